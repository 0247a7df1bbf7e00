"""`/openapi.json` beside what nodes and router really take."""

from __future__ import annotations

from typing import Any

import jsonschema

from node import request_names, sampling_fields
from node.openai import chat, completions, tokens
from router import control, observe, openai, worker_routes
from router.openapi import ADMIN_PATHS, USER_PATHS, document
from tests.router.mocks import RunningRouter

KNOWN = {
    "GenerateRequest": request_names._HONOURED | {"routing_key"},
    "SamplingParams": sampling_fields._KNOWN,
    "ChatRequest": chat._KNOWN,
    "CompletionRequest": completions._KNOWN,
    "TokenizeRequest": tokens._TOKENIZE,
    "DetokenizeRequest": tokens._DETOKENIZE,
}


def test_no_field_is_described_that_nobody_takes_and_none_that_is_honoured_is_left_out() -> None:
    schemas = document({})["components"]["schemas"]
    for name, known in KNOWN.items():
        assert schemas[name]["properties"].keys() <= known, name
    left_to_routers = {"resume", "bootstrap_host", "bootstrap_port", "bootstrap_room"}
    left_to_routers |= {"routed_dp_rank", "data_parallel_rank"}
    assert request_names._HONOURED - left_to_routers <= schemas["GenerateRequest"]["properties"].keys()
    numbers = schemas["SamplingParams"]["properties"]
    for name, rule in sampling_fields._NUMBERS.items():
        described = numbers[name]
        low = rule.low if rule.also is None else min(rule.low, rule.also)
        assert (described["minimum"], described["maximum"]) == (low, rule.high), name


def test_every_path_is_described_once_and_exists() -> None:
    routes = {path for path, _, _ in (*control.ROUTES, *observe.ROUTES, *openai.ROUTES, *worker_routes.ROUTES)}
    routes |= {"/generate", "/v1/chat/completions", "/v1/completions", "/health_generate"}
    described = USER_PATHS.keys() | ADMIN_PATHS.keys()
    files = {path for path in routes if path == "/" or path.startswith("/page/")}
    assert {path.replace("{name:path}", "{name}") for path in routes - files} == described | {"/openapi.json"}


async def test_the_router_serves_it_and_its_references_resolve(router: RunningRouter) -> None:
    answer = await router.client.get("/openapi.json")
    found = answer.json()
    assert (answer.status_code, found["openapi"]) == (200, "3.1.0")
    for schema in found["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    names = found["components"]["schemas"].keys()
    assert {reference.removeprefix("#/components/schemas/") for reference in references(found)} <= names


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        here = {value["$ref"]} if "$ref" in value else set()
        return here.union(*(references(item) for item in value.values()))
    return set().union(*(references(item) for item in value)) if isinstance(value, list) else set()
