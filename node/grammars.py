"""Grammars that a request brings along: checked in processes of their own before the request runs."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from weakref import WeakValueDictionary

import msgspec

from common.errors import CapacityError, RequestError
from node.processes import how_ended
from node.sampling_fields import GrammarSource, SamplingRequest

log = logging.getLogger(__name__)

CPU_S = 1.0
NUM_PROCESSES = 2
MAX_WAITING = 64
"""With so many in line, one more is refused at once."""
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
    """Owns `NUM_PROCESSES` processes, each started when a grammar comes for it; each tries one at a time. `close` ends
    them.

    Verdicts are remembered, refusals too, apart from the others: who sends ever new bad ones makes nobody else's
    grammar be tried again. A grammar that is being tried is not tried a second time meanwhile. Nobody waits behind more
    than `MAX_WAITING`.
    """

    def __init__(self, settings: Settings) -> None:
        self._processes = [_Process(settings) for _ in range(NUM_PROCESSES)]
        self._free: asyncio.LifoQueue[_Process] = asyncio.LifoQueue()
        for process in self._processes:
            self._free.put_nowait(process)
        self._num_waiting = 0
        self._trying: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._good: OrderedDict[tuple[str, str], Verdict] = OrderedDict()
        self._refused: OrderedDict[tuple[str, str], Verdict] = OrderedDict()

    async def resolve(self, sampling: list[SamplingRequest]) -> list[SamplingRequest]:
        """With the grammars in the engine's form. Raises RequestError that names the field, and CapacityError."""
        return [one if one.grammar is None else one.following(await self.check(one.grammar)) for one in sampling]

    async def check(self, source: GrammarSource) -> str:
        """The grammar in the engine's form. Raises RequestError that names the field, and CapacityError."""
        verdict = await self._judge(Question(kind=source.kind, text=source.text))
        if verdict.error is not None:
            raise RequestError(f"{source.path}: {verdict.error}", code="invalid_grammar", param=source.path)
        return verdict.text

    async def close(self) -> None:
        for process in self._processes:
            await process.close()

    async def _judge(self, question: Question) -> Verdict:
        """Raises CapacityError, also when those in front take too long: each may have a second."""
        key = (question.kind, question.text)
        if (known := self._remembered(key)) is not None:
            return known
        lock = self._trying.setdefault(key, asyncio.Lock())
        try:
            async with asyncio.timeout(LINE_S) as line, lock:
                if (known := self._remembered(key)) is not None:
                    return known
                async with self._turn() as process:
                    line.reschedule(None)
                    return self._remember(key, await process.ask(question))
        except TimeoutError:
            raise CapacityError(f"the grammars in front of this one take more than {LINE_S:g} s to check") from None

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[_Process]:
        """Raises CapacityError when too many wait."""
        if self._free.empty() and self._num_waiting >= MAX_WAITING:
            raise CapacityError(f"{MAX_WAITING} grammars wait to be checked")
        self._num_waiting += 1
        try:
            process = await self._free.get()
        finally:
            self._num_waiting -= 1
        try:
            yield process
        finally:
            self._free.put_nowait(process)

    def _remembered(self, key: tuple[str, str]) -> Verdict | None:
        for verdicts in (self._good, self._refused):
            if key in verdicts:
                verdicts.move_to_end(key)
                return verdicts[key]
        return None

    def _remember(self, key: tuple[str, str], verdict: Verdict) -> Verdict:
        verdicts = self._good if verdict.error is None else self._refused
        verdicts[key] = verdict
        while len(verdicts) > MAX_REMEMBERED:
            verdicts.popitem(last=False)
        return verdict


class _Process:
    """One process, started when it is asked; one that was ended is started anew."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._is_closed = False

    async def ask(self, question: Question) -> Verdict:
        """Raises CapacityError. That the process was ended by others costs nobody an answer, unless twice."""
        for _ in range(2):
            if (verdict := await self._ask_once(question)) is not None:
                return verdict
        raise CapacityError("the process that tries grammars was ended")

    async def close(self) -> None:
        """It is not started again."""
        self._is_closed = True
        await self._end()

    async def _ask_once(self, question: Question) -> Verdict | None:
        """None when the process was ended, or could not be started. Raises CapacityError."""
        try:
            process, stdin, stdout = await self._started()
            stdin.write(msgspec.json.encode(question) + b"\n")
            line = await asyncio.wait_for(stdout.readline(), ANSWER_S)
        except TimeoutError as error:
            await self._end()
            raise CapacityError(f"no time to check a grammar: {type(error).__name__}") from error
        except (OSError, RuntimeError) as error:  # the latter is uvloop's for a pipe that is gone
            log.info("the process that tries grammars is gone: %s", error)
            await self._end()
            return None
        except BaseException:  # its answer would be taken for that to the next question
            await self._end()
            raise
        if line.endswith(b"\n"):
            return msgspec.json.decode(line, type=Verdict)
        self._process = None
        return _verdict_of_death(await process.wait(), len(question.text))

    async def _started(self) -> tuple[asyncio.subprocess.Process, asyncio.StreamWriter, asyncio.StreamReader]:
        """Raises OSError, RuntimeError, and CapacityError after the end."""
        if self._is_closed:
            raise CapacityError("the process that tries grammars was ended")
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await self._start()
        assert process.stdin is not None and process.stdout is not None
        return process, process.stdin, process.stdout

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

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
            await process.wait()


def _verdict_of_death(code: int, length: int) -> Verdict | None:
    """The process has ended over a grammar of so many characters. None where that was not its fault."""
    log.info("the process that tries grammars %s over one of %d characters", how_ended(code), length)
    match -code:
        case signal.SIGPROF:
            return Verdict(error=f"the grammar is too complex: it takes more than {CPU_S:g} s to compile")
        case signal.SIGABRT | signal.SIGSEGV:
            return Verdict(error="the grammar is too complex: compiling it takes too much memory")
        case _:
            return None
