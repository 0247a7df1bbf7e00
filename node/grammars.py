"""Grammars that a request brings along: checked in a process of their own before the request runs."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from common.errors import CapacityError, RequestError
from node.processes import how_ended
from node.sampling_fields import GrammarSource, SamplingRequest

log = logging.getLogger(__name__)

CPU_S = 1.0
MAX_REMEMBERED = 128
LINE_S = 10.0
ANSWER_S = 30.0  # the process has its own limit, of processor time; this one is for a process that gets none
MAX_LINE_BYTES = 4 * 1024 * 1024


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    model_path: str
    vocab_size: int
    eos_ids: list[int]


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """kind: json_schema, regex, ebnf or structural_tag."""

    kind: str
    text: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """text: the grammar in llguidance's form. error: why it is refused."""

    text: str = ""
    error: str | None = None


class GrammarChecker:
    """Owns one process, started when the first grammar comes; one grammar at a time. `close` ends it.

    Verdicts are remembered, refusals too.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._verdicts: OrderedDict[tuple[str, str], Verdict] = OrderedDict()

    async def resolve(self, sampling: list[SamplingRequest]) -> list[SamplingRequest]:
        """With the grammars in the engine's form. Raises RequestError that names the field, and CapacityError."""
        return [one if one.grammar is None else one.following(await self.check(one.grammar)) for one in sampling]

    async def check(self, source: GrammarSource) -> str:
        """The grammar in the engine's form. Raises RequestError that names the field, and CapacityError."""
        key = (source.kind, source.text)
        verdict = self._verdicts.get(key)
        if verdict is None:
            async with self._turn():
                verdict = self._verdicts.get(key) or await self._ask(Question(kind=source.kind, text=source.text))
            self._verdicts[key] = verdict
        self._verdicts.move_to_end(key)
        while len(self._verdicts) > MAX_REMEMBERED:
            self._verdicts.popitem(last=False)
        if verdict.error is not None:
            raise RequestError(f"{source.path}: {verdict.error}", code="invalid_grammar", param=source.path)
        return verdict.text

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await _end(process)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Raises CapacityError when those in front take too long: each may have a second."""
        try:
            async with asyncio.timeout(LINE_S):
                await self._lock.acquire()
        except TimeoutError:
            raise CapacityError(f"the grammars in front of this one take more than {LINE_S:g} s to check") from None
        try:
            yield
        finally:
            self._lock.release()

    async def _ask(self, question: Question) -> Verdict:
        process = self._process = self._process or await self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(question) + b"\n")
            line = await asyncio.wait_for(process.stdout.readline(), ANSWER_S)
        except (TimeoutError, ConnectionError) as error:
            await self.close()
            raise CapacityError(f"no time to check a grammar: {type(error).__name__}") from error
        except BaseException:  # its answer would be taken for that to the next question
            await self.close()
            raise
        if line.endswith(b"\n"):
            return msgspec.json.decode(line, type=Verdict)
        self._process = None
        return _verdict_of_death(await process.wait(), len(question.text))

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "node.grammar_check",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=MAX_LINE_BYTES,
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(self._settings) + b"\n")
        return process


def _verdict_of_death(code: int, length: int) -> Verdict:
    """The process has ended over a grammar of so many characters. Raises CapacityError where that was not its fault."""
    log.info("the process that tries grammars %s over one of %d characters", how_ended(code), length)
    match -code:
        case signal.SIGPROF:
            return Verdict(error=f"the grammar is too complex: it takes more than {CPU_S:g} s to compile")
        case signal.SIGABRT | signal.SIGSEGV:
            return Verdict(error="the grammar is too complex: compiling it takes too much memory")
        case _:
            raise CapacityError("the process that tries grammars was ended")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
