"""A small streaming client of /generate."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import click
import httpx

from accuracy import gsm_mini
from common.errors import ConfigError, ServingError, WorkerError
from common.keys import KeyRole, make_key

_TIMEOUT = httpx.Timeout(300.0, connect=5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """text: None to ask an example. api_key: None to show none."""

    text: str | None
    url: str
    max_new_tokens: int
    temperature: float
    stop: tuple[str, ...]
    question: bool
    no_stream: bool
    api_key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}


def run(options: Options) -> None:
    """Print the answer as it comes.

    Raises ServingError with what the server said, WorkerError when none is there, ConfigError for what is no URL.
    """
    url = _checked(options.url)
    if options.api_key is not None:
        make_key(KeyRole.USER, options.api_key, "--api-key")
    if options.text is not None:
        _ask(url, request_body(options, options.text), options.headers)
        return
    problem = gsm_mini.problems("heldout", secrets.randbelow(1 << 31), 1)[0]
    body = request_body(replace(options, question=True), problem.question)
    _ask(url, body, options.headers, f"Question: {problem.question}\nAnswer:")
    click.echo(f"Expected: {problem.answer}")


def _checked(url: str) -> str:
    try:
        httpx.URL(url)
        parts = urlsplit(url)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (httpx.InvalidURL, ValueError):
        is_right = False
    if not is_right:
        raise ConfigError(f"--url {url}: a URL such as http://127.0.0.1:30000", param="url")
    return url.rstrip("/")


def _ask(url: str, body: dict[str, Any], headers: dict[str, str], before: str = "") -> None:
    """before: printed once the answer begins to come."""
    pieces = _pieces if body["stream"] else _whole
    begun = False
    try:
        for piece in without_last_newlines(pieces(url, body, headers)):
            click.echo(piece if begun else before + piece, nl=False)
            begun = True
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise WorkerError(f"{url}: {error}; is `tandem up` running there? (--url names another)") from error
    except httpx.HTTPError as error:
        raise WorkerError(f"{url}: {error or type(error).__name__}") from error
    finally:
        if begun:
            click.echo()


def without_last_newlines(pieces: Iterable[str]) -> Iterator[str]:
    """The same text but for the line ends that it ends with: they are held back until more comes."""
    held = ""
    for piece in pieces:
        text = held + piece
        shown = text.rstrip("\n")
        held = text[len(shown) :]
        yield shown


def request_body(options: Options, asked: str) -> dict[str, Any]:
    text, stop = asked, list(options.stop)
    if options.question:
        problem = gsm_mini.Problem(scheme="asked", question=asked, worked="", answer=0)
        text, stop = gsm_mini.prompt(problem, gsm_mini.few_shot()), stop + gsm_mini.STOP
    sampling = {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature, "stop": stop}
    return {"text": text, "sampling_params": sampling, "stream": not options.no_stream}


def _whole(url: str, body: dict[str, Any], headers: dict[str, str]) -> Iterator[str]:
    answer = httpx.post(f"{url}/generate", json=body, headers=headers, timeout=_TIMEOUT)
    _raise_for(answer.status_code, answer.text)
    yield str(answer.json()["text"])


def _pieces(url: str, body: dict[str, Any], headers: dict[str, str]) -> Iterator[str]:
    """What each event adds to the text."""
    shown = ""
    with httpx.stream("POST", f"{url}/generate", json=body, headers=headers, timeout=_TIMEOUT) as answer:
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
