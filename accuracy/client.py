"""Asks a server that speaks SGLang's /generate or OpenAI's completions. What fails is told, never retried."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from common.errors import WorkerError

PROBE_TIMEOUT_S = 5.0
FLUSH_TIMEOUT_S = 60.0
_SHOWN_CHARACTERS = 200


class Api(enum.StrEnum):
    GENERATE = "generate"
    COMPLETIONS = "completions"
    CHAT = "chat"


class Flush(enum.StrEnum):
    """What became of the wish for empty caches."""

    DONE = "flushed"
    UNSUPPORTED = "not flushed: the server cannot"
    REFUSED = "not flushed: the server refused"
    NOT_ASKED = ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one request. error: why there is no answer. finish: stop, length or what the server calls it.

    output_ids: empty where the server does not tell. cached_tokens: None where it does not. latency_s: until the end.
    """

    text: str = ""
    finish: str = ""
    output_ids: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    latency_s: float = 0.0
    error: str | None = None
    timed_out: bool = False


class _UnusableAnswerError(Exception):
    """The server answered, but not with what its API promises."""


@dataclass(slots=True, kw_only=True)
class Client:
    """One server. api None: found out by `open`. model: the name that completions need; None: the first one served.

    timeout_s: of a whole request. An async context manager.
    """

    url: str
    api: Api | None = None
    model: str | None = None
    timeout_s: float = 300.0
    parallel: int = 128
    _session: aiohttp.ClientSession | None = field(default=None, init=False)

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=self.parallel))
        if self.api is None:
            self.api = await self._guess_api()
        if self.model is None and self.api is not Api.GENERATE:
            self.model = await self._first_model()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "to be used as a context manager"
        return self._session

    async def _guess_api(self) -> Api:
        """/generate where the server has SGLang's /model_info or nobody answers at all; completions otherwise."""
        for path in ("/model_info", "/get_model_info"):
            found = await self._get(path)
            if found is not None and "model_path" in found:
                return Api.GENERATE
        return Api.GENERATE if await self._get("/v1/models") is None else Api.COMPLETIONS

    async def _first_model(self) -> str:
        served = (await self._get("/v1/models") or {}).get("data")
        match served:
            case [{"id": str(name)}, *_]:
                return name
            case _:
                return "default"

    async def _get(self, path: str) -> dict[str, Any] | None:
        """A JSON object, or None for anything else."""
        limit = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        try:
            async with self.session.get(self.url + path, timeout=limit) as response:
                found = await response.json(content_type=None)
                return found if response.status == 200 and isinstance(found, dict) else None
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None

    async def flush(self) -> Flush:
        """Empty the server's prefix caches, with SGLang's endpoint or vLLM's."""
        unknown = 0
        for path in ("/flush_cache", "/reset_prefix_cache"):
            status = await self._post_status(path)
            if status == 200:
                return Flush.DONE
            unknown += status in (404, 405)
        return Flush.UNSUPPORTED if unknown == 2 else Flush.REFUSED

    async def _post_status(self, path: str) -> int | None:
        limit = aiohttp.ClientTimeout(total=FLUSH_TIMEOUT_S)
        try:
            async with self.session.post(f"{self.url}{path}?timeout=30", timeout=limit) as response:
                await response.read()
                return response.status
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def ask(self, prompt: str, *, max_tokens: int, stop: Sequence[str]) -> Outcome:
        """The greedy answer. Errors of the transport and the server are in the outcome."""
        assert self.api is not None
        path, body = _question(self.api, self.model, prompt, max_tokens, list(stop))
        begin = time.monotonic()
        try:
            found = await self._post(path, body)
            outcome = _read_generate(found) if self.api is Api.GENERATE else _read_completion(found)
        except TimeoutError:
            outcome = Outcome(error=f"no answer within {self.timeout_s:g} s", timed_out=True)
        except (aiohttp.ClientError, _UnusableAnswerError) as error:
            outcome = Outcome(error=f"{type(error).__name__.removeprefix('_')}: {error}")
        return msgspec.structs.replace(outcome, latency_s=time.monotonic() - begin)

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of /generate to any body. Raises WorkerError when there is none."""
        found = await self.call("/generate", body)
        if not isinstance(found, dict) or "meta_info" not in found:
            raise WorkerError(f"{self.url}: no answer of /generate: {str(found)[:_SHOWN_CHARACTERS]}")
        return found

    async def generate_all(self, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Every answer, in order; `parallel` requests at once. Raises WorkerError for the first that fails."""
        gate = asyncio.Semaphore(self.parallel)

        async def one(body: dict[str, Any]) -> dict[str, Any]:
            async with gate:
                return await self.generate(body)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(body)) for body in bodies]
        except* WorkerError as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def call(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer to a POST. Raises WorkerError when there is none."""
        try:
            return await self._post(path, body)
        except TimeoutError as error:
            raise WorkerError(f"{self.url}{path}: no answer within {self.timeout_s:g} s") from error
        except (aiohttp.ClientError, _UnusableAnswerError) as error:
            raise WorkerError(f"{self.url}{path}: {error}") from error

    async def get_json(self, path: str) -> dict[str, Any]:
        """Raises WorkerError when it is no JSON object."""
        found = await self._get(path)
        if found is None:
            raise WorkerError(f"{self.url}{path}: no answer that could be read")
        return found

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer. Raises _UnusableAnswerError, aiohttp.ClientError and TimeoutError."""
        async with asyncio.timeout(self.timeout_s):
            async with self.session.post(self.url + path, json=body, timeout=_NO_LIMIT) as response:
                content = await response.read()
        shown = content[:_SHOWN_CHARACTERS].decode(errors="replace")
        if response.status != 200:
            raise _UnusableAnswerError(f"HTTP {response.status}: {shown}")
        try:
            return msgspec.json.decode(content)
        except msgspec.DecodeError as error:
            raise _UnusableAnswerError(f"no JSON but {response.content_type}: {shown}") from error


_NO_LIMIT = aiohttp.ClientTimeout(total=None, sock_connect=PROBE_TIMEOUT_S)


def _question(api: Api, model: str | None, prompt: str, max_tokens: int, stop: list[str]) -> tuple[str, dict[str, Any]]:
    match api:
        case Api.GENERATE:
            sampling = {"temperature": 0, "max_new_tokens": max_tokens, "stop": stop}
            return "/generate", {"text": prompt, "sampling_params": sampling}
        case Api.COMPLETIONS:
            asked: dict[str, Any] = {"prompt": prompt}
            path = "/v1/completions"
        case Api.CHAT:
            asked = {"messages": [{"role": "user", "content": prompt}]}
            path = "/v1/chat/completions"
    return path, {"model": model, "temperature": 0, "max_tokens": max_tokens, "stop": stop, **asked}


def _read_generate(found: Any) -> Outcome:
    match found:
        case {"text": str(text), "meta_info": {"finish_reason": {"type": str(finish)}} as meta}:
            if finish == "abort":
                raise _UnusableAnswerError(f"the server ended the request: {meta['finish_reason']}")
            return Outcome(
                text=text,
                finish=finish,
                output_ids=tuple(found.get("output_ids") or ()),
                prompt_tokens=meta.get("prompt_tokens"),
                completion_tokens=meta.get("completion_tokens"),
                cached_tokens=meta.get("cached_tokens"),
            )
        case _:
            raise _UnusableAnswerError(f"no answer of /generate: {str(found)[:_SHOWN_CHARACTERS]}")


def _read_completion(found: Any) -> Outcome:
    match found:
        case {"choices": [{"message": {"content": str(text)}, "finish_reason": str(finish)}, *_]}:
            return _completed(text, finish, found.get("usage"))
        case {"choices": [{"text": str(text), "finish_reason": str(finish)}, *_]}:
            return _completed(text, finish, found.get("usage"))
        case _:
            raise _UnusableAnswerError(f"no completion: {str(found)[:_SHOWN_CHARACTERS]}")


def _completed(text: str, finish: str, usage: Any) -> Outcome:
    counts = usage if isinstance(usage, dict) else {}
    details = counts.get("prompt_tokens_details")
    return Outcome(
        text=text,
        finish=finish,
        prompt_tokens=counts.get("prompt_tokens"),
        completion_tokens=counts.get("completion_tokens"),
        cached_tokens=details.get("cached_tokens") if isinstance(details, dict) else None,
    )
