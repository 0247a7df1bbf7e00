"""Every prompt and answer as a line of JSON, written as it comes, so that a gate that was stopped can go on."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import msgspec

from accuracy.client import Outcome
from accuracy.tasks import Question, Task
from common.errors import ConfigError


class Grade(enum.StrEnum):
    """CUT: ended by the length limit, which is wrong whatever it says. FAILED: no answer; neither right nor wrong."""

    RIGHT = "right"
    WRONG = "wrong"
    CUT = "cut"
    NO_NUMBER = "no number"
    FAILED = "failed"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One question asked in one run. side: subject or baseline. found: the number extracted, whatever the grade."""

    run: int
    side: str
    id: str
    prompt: str
    asked: str
    label: int
    leaked: bool
    grade: Grade
    found: int | None
    outcome: Outcome

    @property
    def key(self) -> tuple[int, str, str]:
        return self.run, self.side, self.id

    @property
    def is_right(self) -> bool:
        return self.grade is Grade.RIGHT


def grade(task: Task, question: Question, outcome: Outcome, *, run: int, side: str) -> Record:
    found = task.extract(outcome.text)
    return Record(
        run=run,
        side=side,
        id=question.id,
        prompt=question.prompt,
        asked=question.asked,
        label=question.label,
        leaked=question.leaked,
        grade=_grade(outcome, found, question.label),
        found=found,
        outcome=outcome,
    )


def _grade(outcome: Outcome, found: int | None, label: int) -> Grade:
    if outcome.error is not None:
        return Grade.FAILED
    if outcome.finish == "length":
        return Grade.CUT
    if found is None:
        return Grade.NO_NUMBER
    return Grade.RIGHT if found == label else Grade.WRONG


class Journal:
    """The file of the records; its first line says what was asked of whom. A context manager.

    `done`: what an earlier gate with the same settings left, when resume is set. Raises ConfigError when the settings
    differ or the file cannot be used.
    """

    def __init__(self, path: Path, settings: dict[str, Any], *, resume: bool) -> None:
        self.path = path
        self.done: dict[tuple[int, str, str], Record] = {}
        keep = resume and path.is_file()
        if keep:
            self.done = {record.key: record for record in self._read(settings)}
        self._file: IO[bytes] = self._open(keep)
        if not keep:
            self._write(settings)

    def _open(self, keep: bool) -> IO[bytes]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if keep:
                _drop_half_line(self.path)
            return self.path.open("ab" if keep else "wb")
        except OSError as error:
            raise ConfigError(f"--output {self.path.parent}: {error}", param="output") from error

    def _read(self, settings: dict[str, Any]) -> Iterator[Record]:
        header, *lines = self.path.read_bytes().split(b"\n")[:-1] or [b""]
        if header != msgspec.json.encode(settings):
            raise ConfigError(
                f"--resume: {self.path} was written with other settings: {header.decode(errors='replace')[:500]}",
                param="resume",
            )
        for number, line in enumerate(lines, 2):
            try:
                yield msgspec.json.decode(line, type=Record)
            except msgspec.MsgspecError as error:
                raise ConfigError(f"--resume: {self.path}, line {number}: {error}", param="resume") from error

    def add(self, record: Record) -> None:
        self._write(record)

    def _write(self, thing: Any) -> None:
        self._file.write(msgspec.json.encode(thing) + b"\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _drop_half_line(path: Path) -> None:
    """What was killed while it wrote leaves a line without an end."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        path.write_bytes(content[:whole])
