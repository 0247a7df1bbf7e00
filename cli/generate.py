"""A small streaming client of /generate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click
import httpx

from common.errors import ServingError, WorkerError

_TIMEOUT = httpx.Timeout(300.0, connect=5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    text: str
    url: str
    max_new_tokens: int
    temperature: float
    stop: tuple[str, ...]
    question: bool
    no_stream: bool


def run(options: Options) -> None:
    """Print the answer as it comes. Raises ServingError with what the server said, WorkerError when none is there."""
    body = request_body(options)
    try:
        for piece in _pieces(options.url, body) if body["stream"] else [_whole(options.url, body)]:
            click.echo(piece, nl=False)
    except httpx.HTTPError as error:
        raise WorkerError(f"{options.url}: {error or type(error).__name__}; is `tandem up` running?") from error
    click.echo()


def request_body(options: Options) -> dict[str, Any]:
    text, stop = options.text, list(options.stop)
    if options.question:
        from accuracy import gsm_mini

        problem = gsm_mini.Problem(scheme="asked", question=options.text, worked="", answer=0)
        text, stop = gsm_mini.prompt(problem, gsm_mini.few_shot()), stop + gsm_mini.STOP
    sampling = {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature, "stop": stop}
    return {"text": text, "sampling_params": sampling, "stream": not options.no_stream}


def _whole(url: str, body: dict[str, Any]) -> str:
    answer = httpx.post(f"{url}/generate", json=body, timeout=_TIMEOUT)
    _raise_for(answer.status_code, answer.text)
    return str(answer.json()["text"])


def _pieces(url: str, body: dict[str, Any]) -> Iterator[str]:
    """What each event adds to the text."""
    shown = ""
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=_TIMEOUT) as answer:
        if answer.status_code != 200:
            answer.read()
            _raise_for(answer.status_code, answer.text)
        for line in answer.iter_lines():
            data = line.removeprefix("data:").strip()
            if data.startswith("{"):
                text = _text_of(data)
                yield text[len(shown) :]
                shown = text


def _text_of(data: str) -> str:
    event = json.loads(data)
    if "error" in event:
        raise ServingError(event["error"]["message"])
    return str(event["text"])


def _raise_for(status: int, body: str) -> None:
    if status == 200:
        return
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:500]
    raise ServingError(f"status {status}: {message}")
