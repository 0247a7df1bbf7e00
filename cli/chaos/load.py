"""The clients: they ask, leave, abort, and judge what they get.

An answer is right when it is the undisturbed one, token for token and letter for letter; of an answer that was broken
off, what came must be its beginning. Otherwise a client may get a typed error, and it must not wait for long.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from cli.chaos.options import Options
from cli.chaos.plan import Kind
from cli.chaos.tasks import Task

_LEAVE_SHARE, _ABORT_SHARE = 0.1, 0.08
_END_CODES = ("aborted", "client_disconnected")
_FAULT_CODES = ("internal", "protocol_error", "non_finite_logits", "incomplete")
_EVENT_BYTES = 1 << 20


class End(enum.StrEnum):
    """RIGHT, ERROR, LEFT are as it should be; the others are not."""

    RIGHT = "right"
    ERROR = "error"
    LEFT = "left"
    WRONG = "wrong"
    LATE = "late"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """seconds: all of it. silence_s: the longest time without a byte. code: of the typed error. detail: for people.

    aborted: its client asked for that.
    """

    rid: str
    end: End
    seconds: float
    silence_s: float
    code: str = ""
    detail: str = ""
    aborted: bool = False


class JudgementError(Exception):
    """What the client got is not what it may get."""

    def __init__(self, end: End, detail: str) -> None:
        super().__init__(detail)
        self.end, self.detail = end, detail


class _TypedError(Exception):
    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code, self.detail = code, detail


@dataclass(slots=True, kw_only=True)
class Behaviour:
    """leave_s, abort_s: after so many seconds, if at all."""

    stream: bool
    leave_s: float | None = None
    abort_s: float | None = None


@dataclass(slots=True)
class _Clock:
    """When a client last heard something."""

    begun_s: float = field(default_factory=time.monotonic)
    silence_s: float = 0.0
    heard_s: float = 0.0

    def heard(self) -> float:
        """Seconds since the beginning."""
        now = time.monotonic()
        self.silence_s = max(self.silence_s, now - (self.heard_s or self.begun_s))
        self.heard_s = now
        return now - self.begun_s


class Load:
    """url: of the router."""

    def __init__(self, session: aiohttp.ClientSession, url: str, tasks: Sequence[Task], options: Options) -> None:
        self._session, self._url, self._tasks, self._options = session, url, tasks, options
        self._numbers = itertools.count(1)
        self._next_start_s = 0.0
        self.outcomes: list[Outcome] = []

    async def sweep(self, name: str) -> list[Outcome]:
        """Every task once, undisturbed, JSON and streams by turns."""
        gate = asyncio.Semaphore(self._options.concurrency)

        async def one(i: int, task: Task) -> Outcome:
            async with gate:
                return await self._ask(f"{name}-{i}", task, Behaviour(stream=i % 2 == 0))

        return list(await asyncio.gather(*(one(i, task) for i, task in enumerate(self._tasks))))

    async def run(self, over: asyncio.Event) -> None:
        """Until `over`; fills `outcomes`."""
        clients = range(self._options.concurrency)
        await asyncio.gather(*(self._client(random.Random(f"{self._options.seed}/{i}"), over) for i in clients))

    async def _client(self, rng: random.Random, over: asyncio.Event) -> None:
        while not over.is_set():
            await self._turn()
            rid = f"chaos-{next(self._numbers)}"
            self.outcomes.append(await self._ask(rid, rng.choice(self._tasks), self._behaviour(rng)))

    async def _turn(self) -> None:
        """Requests of all clients together begin at the rate."""
        now = time.monotonic()
        self._next_start_s = max(now, self._next_start_s + 1 / self._options.rate)
        await asyncio.sleep(self._next_start_s - now)

    def _behaviour(self, rng: random.Random) -> Behaviour:
        what, when, stream = rng.random(), rng.uniform(0, 0.6), rng.random() < 0.6
        if what < _LEAVE_SHARE and Kind.LEAVE in self._options.kinds:
            return Behaviour(stream=stream, leave_s=when)
        if _LEAVE_SHARE <= what < _LEAVE_SHARE + _ABORT_SHARE and Kind.ABORT in self._options.kinds:
            return Behaviour(stream=stream, abort_s=when)
        return Behaviour(stream=stream)

    async def _ask(self, rid: str, task: Task, behaviour: Behaviour) -> Outcome:
        clock, aborting = _Clock(), None
        if behaviour.abort_s is not None:
            aborting = asyncio.create_task(self._abort(rid, behaviour.abort_s))
        end, code, detail = await self._end(rid, task, behaviour, clock)
        seconds = clock.heard()
        if aborting is not None and (wrong := await aborting):
            end, detail = End.BROKEN, wrong
        if code in _END_CODES and aborting is None:
            end, detail = End.BROKEN, f"ended by an abort that was not its own: {detail}"
        return Outcome(
            rid=rid,
            end=end,
            seconds=seconds,
            silence_s=clock.silence_s,
            code=code,
            detail=detail,
            aborted=aborting is not None,
        )

    async def _end(self, rid: str, task: Task, behaviour: Behaviour, clock: _Clock) -> tuple[End, str, str]:
        """How it ends: what that is, the code of a typed error, and what there is to say about it."""
        try:
            async with asyncio.timeout(behaviour.leave_s):
                await self._answer(task.body(rid, stream=behaviour.stream), task, clock)
        except _TypedError as error:
            return End.ERROR, error.code, error.detail
        except JudgementError as error:
            return error.end, "", error.detail
        except aiohttp.SocketTimeoutError:
            return End.LATE, "", f"nothing heard for {self._options.silence_limit_s:g} s"
        except TimeoutError:
            return End.LEFT, "", ""
        except (aiohttp.ClientError, ValueError) as error:
            return End.BROKEN, "", f"{type(error).__name__}: {error}"
        return End.RIGHT, "", ""

    async def _abort(self, rid: str, after_s: float) -> str:
        """What is wrong with the answer to the abort, if anything is. A dead worker makes it a typed error."""
        await asyncio.sleep(after_s)
        try:
            async with self._session.post(f"{self._url}/abort_request", json={"rid": rid}) as response:
                if response.status != 200:
                    raise _typed_error(await response.read(), response.status)
        except _TypedError:
            return ""
        except (aiohttp.ClientError, TimeoutError, JudgementError) as error:
            return f"abort: {type(error).__name__}: {error}"
        return ""

    async def _answer(self, body: dict[str, Any], task: Task, clock: _Clock) -> None:
        """Returns for a right answer. Raises the rest."""
        limit = aiohttp.ClientTimeout(total=None, sock_read=self._options.silence_limit_s)
        async with self._session.post(
            f"{self._url}/generate", json=body, timeout=limit, read_bufsize=_EVENT_BYTES
        ) as response:
            clock.heard()
            if response.status != 200:
                raise _typed_error(await response.read(), response.status)
            if not body["stream"]:
                judge_whole(task, json.loads(await response.read()), body["rid"])
                return
            await _judge_stream(response, task, clock, body["rid"])


async def _judge_stream(response: aiohttp.ClientResponse, task: Task, clock: _Clock, rid: str) -> None:
    last: dict[str, Any] | None = None
    done = False
    async for line in response.content:
        clock.heard()
        data = line.strip().removeprefix(b"data:").strip()
        if not data:
            continue
        if done:
            raise JudgementError(End.BROKEN, f"something came after [DONE]: {data[:200]!r}")
        if data == b"[DONE]":
            done = True
            continue
        event = json.loads(data)
        if "error" in event:
            raise _typed_error(data, None)
        judge_piece(task, event, last)
        last = event
    if last is None or not done:
        raise JudgementError(End.BROKEN, "the stream ended without [DONE] and without an error")
    judge_whole(task, last, rid)


def judge_piece(task: Task, event: dict[str, Any], before: dict[str, Any] | None) -> None:
    """An event of a stream has all tokens so far, and more of them than the one before."""
    ids = tuple(event["output_ids"])
    if ids != task.answer[: len(ids)] or not task.text.startswith(event["text"].rstrip("\ufffd")):
        raise JudgementError(End.WRONG, _difference(task, ids))
    if before is not None and len(ids) <= len(before["output_ids"]):
        raise JudgementError(End.WRONG, f"an event of {len(ids)} tokens after one of {len(before['output_ids'])}")


def judge_whole(task: Task, answer: dict[str, Any], rid: str) -> None:
    """Raises for anything that differs from the undisturbed answer."""
    meta, ids = answer["meta_info"], tuple(answer["output_ids"])
    if ids != task.answer:
        raise JudgementError(End.WRONG, _difference(task, ids))
    expected = {
        "text": task.text,
        "id": rid,
        "prompt_tokens": len(task.prompt),
        "completion_tokens": len(task.answer),
        "finish_reason": {"type": "length", "length": len(task.answer)},
    }
    found = {name: answer["text"] if name == "text" else meta[name] for name in expected}
    wrong = [name for name in expected if expected[name] != found[name]]
    if wrong:
        raise JudgementError(End.WRONG, f"{wrong[0]} is {found[wrong[0]]!r}, not {expected[wrong[0]]!r}")


def _difference(task: Task, ids: tuple[int, ...]) -> str:
    pairs = zip(ids, task.answer, strict=False)
    place = next((i for i, (got, right) in enumerate(pairs) if got != right), min(len(ids), len(task.answer)))
    return (
        f"prompt of {len(task.prompt)}: token {place} of {len(task.answer)} is {ids[place : place + 3]}, "
        f"not {task.answer[place : place + 3]}"
    )


def _typed_error(body: bytes, status: int | None) -> Exception:
    """status: None in a stream. What cannot be called a typed error, or blames the client, is judged."""
    shown = body[:300].decode(errors="replace")
    try:
        error = json.loads(body)["error"]
        code, _ = str(error["code"]), (error["message"], error["type"], bool(error["retryable"]))
    except (ValueError, KeyError, TypeError):
        return JudgementError(End.BROKEN, f"status {status} without a typed error: {shown}")
    if code in _FAULT_CODES or (error["type"] == "invalid_request_error") or error["type"] == "config_error":
        return JudgementError(End.BROKEN, f"status {status}, not an error that a fault may cause: {shown}")
    return _TypedError(code, f"status {status}: {shown}")
