"""Schemathesis against the router's OpenAPI document: requests as it describes them, and requests that break it. None
may be answered with a 500, none may hang, and nothing is left behind. In `make test-slow`; wants the extra `clients`.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.openapi import ADMIN_PATHS, USER_PATHS, document
from tests.support.stack import Stack, stack

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed (pip install -e '.[clients]')")
hypothesis = pytest.importorskip("hypothesis")

LIMIT_S = 60.0
MAX_TOKENS = ("max_new_tokens", "max_tokens", "max_completion_tokens")
ERROR_FIELDS = {"message", "type", "code", "param"}


LENGTHY = ("/v1/chat/completions", "/v1/completions")


def shrink(value: Any, *, lengthy: bool = False) -> Any:
    """Answers of a few tokens, so that thousands of requests fit into minutes; what is not valid stays as it is.

    lengthy: of an endpoint that takes max_tokens.
    """
    if isinstance(value, list):
        return [shrink(item) for item in value]
    if not isinstance(value, dict):
        return value
    body = {name: shrink(item) for name, item in value.items()}
    for name in MAX_TOKENS:
        if type(body.get(name)) is int and body[name] > 3:
            body[name] = 3
    if type(body.get("n")) is int and 2 < body["n"] <= 128:
        body["n"] = 2
    if "text" in body or "input_ids" in body:
        body.setdefault("sampling_params", {"max_new_tokens": 3})
    elif lengthy:
        body.setdefault("max_tokens", 3)
    return body


def tame(value: Any, name: str = "") -> Any:
    """What a schema cannot say of a good request: which fields go together, which numbers are tokens, what is a
    grammar."""
    if isinstance(value, list):
        if name in ("rid", "sampling_params"):
            return tame(value[0], name) if value else None
        return [tame(item, name) for item in value]
    if not isinstance(value, dict):
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # JSON's integers, as a schema sees them
        is_token = name in ("input_ids", "prompt", "tokens", "stop_token_ids") and type(value) is int
        return value % 500 if is_token else value
    body = {key: tame(item, key) for key, item in value.items()}
    for key in (
        "json_schema",
        "regex",
        "ebnf",
        "logit_bias",
        "tools",
        "tool_choice",
        "best_of",
        "chat_template_kwargs",
    ):
        body.pop(key, None)
    if body.get("text") or body.get("prompt"):
        body.pop("input_ids", None)
        body.pop("messages", None)
    if name == "messages":
        body = {"role": body.get("role"), "content": body.get("content") or "a"}
    if body.get("response_format") is not None:
        body["response_format"] = {"type": "json_object"}
    if not body.get("stream"):
        body.pop("stream_options", None)
    return body


def attack(url: str, paths: dict[str, Any], count: int) -> Counter[tuple[str, int]]:
    """`count` requests in all, half of them valid. Returns how they were answered, by path and status."""
    schema = schemathesis.openapi.from_dict(document(paths))
    operations = [found.ok() for found in schema.get_all_operations()]
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    statuses: Counter[tuple[str, int]] = Counter()
    with_bodies = [each for each in operations if each.method.upper() == "POST"]
    each_count = -(-count // (2 * len(with_bodies)))
    with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
        for operation in operations:
            for mode in modes:
                examples = each_count if operation in with_bodies else 10
                drive(client, operation, mode, examples, statuses)
    return statuses


def drive(client: httpx.Client, operation: Any, mode: Any, count: int, statuses: Counter[tuple[str, int]]) -> None:
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        if case.body is not None and not isinstance(case.body, schemathesis.core.NotSet | bytes):
            is_good = mode is schemathesis.GenerationMode.POSITIVE
            case.body = shrink(tame(case.body) if is_good else case.body, lengthy=operation.path in LENGTHY)
        arguments = case.as_transport_kwargs(base_url=str(client.base_url))
        arguments = {name: arguments[name] for name in ("params", "json", "content", "headers") if arguments.get(name)}
        response = client.request(case.method, case.formatted_path, **arguments)
        statuses[operation.path, response.status_code] += 1
        check(response, f"{case.method} {case.formatted_path} {str(arguments)[:600]}")

    try:
        run()
    except hypothesis.errors.Unsatisfiable:
        return  # nothing can be wrong with a request without parameters


def check(response: httpx.Response, asked: str) -> None:
    assert response.status_code != 500, f"{asked}: {response.text[:500]}"
    if response.status_code >= 400:
        assert response.json()["error"].keys() >= ERROR_FIELDS, asked


def check_nothing_left(running: Stack) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not (running.prefill.is_idle() and running.decode.is_idle()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    info = httpx.get(f"{running.router.url}/server_info", timeout=10).json()
    assert info["requests_in_flight"] == 0
    assert running.prefill.state()["leaks"] == running.decode.state()["leaks"] == 0
    for server in (running.router, running.prefill, running.decode):
        assert "Traceback" not in server.text()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_what_users_may_ask(tmp_path: Path) -> None:
    with stack(tmp_path) as running:
        statuses = attack(running.router.url, USER_PATHS, 2000)
        assert statuses.total() >= 2000
        assert all(statuses[path, 200] > 20 for path in USER_PATHS if "post" in USER_PATHS[path]), statuses
        check_nothing_left(running)
        print(sorted(statuses.items()))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_administrators_may_ask(tmp_path: Path) -> None:
    with stack(tmp_path) as running:
        statuses = attack(running.router.url, ADMIN_PATHS, 400)
        assert statuses.total() >= 300
        print(sorted(statuses.items()))
        check_nothing_left(running)
