"""Other routers in front of our nodes: sglang-router 0.3.2 and SGLang's mini_lb, unchanged. Answers are unified's."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.stack import Stack, free_port, stop

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang_router") is None, reason="sglang-router is not installed (extra dev, Linux x86-64)"
)

PROMPT = "Question: Tom has 12 apples and buys 7 more. How many apples does he have?\nAnswer:"
MESSAGES = [{"role": "user", "content": "Tom has 12 apples and buys 7 more. How many apples does he have?"}]
GREEDY = {"model": "tandem-mini", "temperature": 0, "max_tokens": 24}
SAMPLING = {"temperature": 0, "max_new_tokens": 24}
LOGPROBS = {"return_logprob": True, "logprob_start_len": 0}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": PROMPT, "sampling_params": SAMPLING}),
    ("/generate", {"text": PROMPT, "sampling_params": SAMPLING} | LOGPROBS),
    ("/v1/completions", {"prompt": PROMPT} | GREEDY),
    ("/v1/completions", {"prompt": PROMPT, "n": 2, "logprobs": 1} | GREEDY),
    ("/v1/chat/completions", {"messages": MESSAGES} | GREEDY),
    ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2} | GREEDY),
]


@pytest.fixture(scope="module", params=["sglang-router", "mini_lb"])
def foreign(request: pytest.FixtureRequest, shared_stack: Stack) -> Iterator[str]:
    """Its URL."""
    info = httpx.get(f"{shared_stack.prefill.url}/server_info", timeout=10).json()
    port = free_port()
    arguments = ["--pd-disaggregation", "--host", "127.0.0.1", "--port", str(port), "--decode", shared_stack.decode.url]
    arguments += ["--prefill", shared_stack.prefill.url, str(info["bootstrap_port"])]
    arguments += ["--mini-lb"] if request.param == "mini_lb" else ["--prometheus-port", str(free_port())]
    command = [sys.executable, "-m", "sglang_router.launch_router", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_ready(url, process)
        yield url
    finally:
        stop(process)


def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """It answers a request; sglang-router has to find its workers first."""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.post(f"{url}/generate", json=BODIES[0][1], timeout=10).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"it does not serve, exit status {process.poll()}")


@pytest.mark.parametrize(
    ("path", "body"), BODIES, ids=lambda value: "-".join(value) if isinstance(value, dict) else value
)
def test_answers_are_unifieds(path: str, body: dict[str, Any], foreign: str, shared_stack: Stack) -> None:
    assert shared_stack.unified is not None
    expected = said(path, [httpx.post(shared_stack.unified.url + path, json=body, timeout=60).json()])
    whole = httpx.post(foreign + path, json=body, timeout=60)
    assert whole.status_code == 200 and said(path, [whole.json()]) == expected
    assert said(path, events(foreign + path, body)) == expected


def events(url: str, body: dict[str, Any]) -> list[Any]:
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def said(path: str, objects: list[Any]) -> list[Any]:
    """What the objects of an answer or of a stream say, put together."""
    if path == "/generate":
        # sglang-router leaves out the prompt's in an event that arrives together with another one.
        scored = [token_id for _, token_id, _ in objects[0]["meta_info"].get("input_token_logprobs", [])]
        return [objects[-1]["text"], objects[-1]["output_ids"], objects[-1]["meta_info"]["finish_reason"], scored]
    found: dict[int, list[Any]] = {}
    for choice in (choice for item in objects for choice in item["choices"]):
        part = found.setdefault(choice["index"], ["", [], None])
        message = choice.get("message") or choice.get("delta") or {}
        part[0] += choice.get("text") or message.get("content") or ""
        told = choice.get("logprobs") or {}
        part[1] += told.get("tokens") or [token["token"] for token in told.get("content") or []]
        part[2] = choice["finish_reason"] or part[2]
    return [found[index] for index in sorted(found)]


def test_errors_and_models(foreign: str) -> None:
    for path, body in (("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": MESSAGES})):
        refused = httpx.post(foreign + path, json=body | {"model": "m", "logit_bias": {"99999": 1.0}}, timeout=60)
        assert refused.status_code == 400 and "logit_bias" in refused.text
    assert httpx.get(f"{foreign}/v1/models", timeout=10).json()["data"][0]["id"] == "tandem-mini"
