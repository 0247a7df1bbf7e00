"""`tandem gate mutate`: every known fault put in on purpose, one at a time, to see what catches it.

A healthy unified node is the reference. For each fault a stack of its own starts with digests on. Where they refuse
what has arrived they have caught it, and the accuracy is taken with digests off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from accuracy.bisect import Bisection, bisect, open_nodes
from accuracy.client import Api, Client
from accuracy.paired import Pairing, is_loss, pair
from accuracy.records import Journal
from accuracy.runs import Asking, Kind, Run, RunPlan, ask_all
from accuracy.tasks import Task, gsm_mini_task
from accuracy.verdict import RunSummary, Verdict, judge, summarise
from cli.gate.checks import write_json
from cli.gate.stack import disaggregated, unified_node
from common.errors import ConfigError

HEALTHY = "none"
_TIMEOUT_S = 300.0
_MAX_TOKENS = 256
_REFUSAL = '"digest_mismatch"'
_LOOPBACK = ("--transport", "loopback")

# Decode would compute the ends of prompts whose beginnings it holds itself, and then nothing of them would cross.
_ALL_CROSS = ("--local-prefill-max-tokens", "0")

FAULTS: dict[str, tuple[str, ...]] = {
    HEALTHY: (),
    "conv-dropped": ("--fault-drop", "conv", *_ALL_CROSS),
    "ssm-dropped": ("--fault-drop", "ssm", *_ALL_CROSS),
    "kv-dropped": ("--fault-drop", "kv", *_ALL_CROSS),
    "track-dropped": ("--fault-drop", "track"),
    "received-page-lost": ("--fault-engine", "received-page-lost", *_ALL_CROSS),
    "received-ssm-rounded": ("--fault-engine", "received-ssm-rounded", *_ALL_CROSS),
    "received-state-cleared": ("--fault-engine", "received-state-cleared", *_ALL_CROSS),
    "wrong-slot": ("--fault-engine", "wrong-slot", *_ALL_CROSS),
    "position-off-by-one": ("--fault-engine", "position-off-by-one", *_ALL_CROSS),
    "track-not-written": ("--fault-engine", "track-not-written"),
    "track-of-the-chunk-before": ("--fault-engine", "track-of-the-chunk-before"),
    "track-conv-off-by-one": ("--fault-engine", "track-conv-off-by-one"),
    "saved-state-not-read": ("--fault-engine", "saved-state-not-read"),
    "saved-conv-not-read": ("--fault-engine", "saved-conv-not-read"),
}
"""Options of the prefill and the decode node, by the fault that they put in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MutateOptions:
    """faults: names of FAULTS, HEALTHY first. node_options: of every node."""

    faults: tuple[str, ...]
    num_questions: int
    parallel: int
    threshold: float
    model_path: str
    node_options: tuple[str, ...]
    output: Path


class Caught(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one fault. refused: hand-offs that the digests refused, of `asked`. cold, warm: accuracy without
    digests. gate: the verdict. p: of McNemar's test, the smaller one. first: what bisection names, None: nothing."""

    fault: str
    refused: int
    asked: int
    cold: float
    warm: float
    gate: Verdict
    loses: bool
    p: float
    first: str | None

    @property
    def by(self) -> list[str]:
        """What has caught it."""
        names = {
            "digest": self.refused > 0,
            "gate": self.gate is Verdict.FAIL or self.loses,
            "bisect": self.first is not None,
        }
        return [name for name, caught in names.items() if caught]

    @property
    def as_expected(self) -> bool:
        return self.gate is not Verdict.INVALID and bool(self.by) == (self.fault != HEALTHY)


def mutate_options(faults: Sequence[str], node_options: Sequence[str], **values: object) -> MutateOptions:
    """Raises ConfigError for a fault that is not known."""
    for name in faults:
        if name not in FAULTS:
            raise ConfigError(f"--fault {name}: one of {', '.join(FAULTS)}", param="fault")
    chosen = [name for name in FAULTS if name in faults] or list(FAULTS)
    ordered = dict.fromkeys((HEALTHY, *chosen))
    return MutateOptions(faults=tuple(ordered), node_options=tuple(node_options), **values)  # type: ignore[arg-type]


async def mutate(options: MutateOptions, say: Callable[[str], None]) -> list[Caught]:
    """Raises WorkerError when a stack does not start; its logs are in the output folder."""
    trial = _Trial(options, say)
    node = ("--model-path", options.model_path, *options.node_options)
    with unified_node(node, options.output / "logs" / "unified") as reference:
        await trial.ask_reference(reference)
        found = []
        for fault in options.faults:
            found.append(await trial.try_fault(fault, reference))
            write_json(options.output / "mutate.json", found)
        return found


class _Trial:
    """expected: the reference's runs, cold and warm."""

    def __init__(self, options: MutateOptions, say: Callable[[str], None]) -> None:
        self.options, self.say = options, say
        self.task: Task = gsm_mini_task(seed=0, count=options.num_questions, shots=5)
        self.expected: list[Run] = []

    async def ask_reference(self, url: str) -> None:
        self.expected = await self._ask(url, "reference", max_failed=0.01)
        self.say(f"reference: {_figures(self.expected)}")

    async def try_fault(self, fault: str, reference: str) -> Caught:
        with self._stack(fault, "digest") as url:
            runs = await self._ask(url, f"{fault}-digest", max_failed=1.0)
            refused = sum(_REFUSAL in (record.outcome.error or "") for run in runs for record in run.records)
            found = None if refused else await self._bisect(url, reference)
        asked = sum(run.asked for run in runs)
        if refused:
            with self._stack(fault, "off") as url:
                runs = await self._ask(url, fault, max_failed=0.01)
                found = await self._bisect(url, reference)
        caught = self._judge(fault, runs, refused, asked, found)
        self.say(f"{fault}: {_figures(runs)}, caught by {', '.join(caught.by) or 'nothing'}")
        return caught

    @contextlib.contextmanager
    def _stack(self, fault: str, verify: str) -> Iterator[str]:
        options = self.options
        node = ("--model-path", options.model_path, *options.node_options, *_LOOPBACK, "--verify", verify)
        with disaggregated((*node, *FAULTS[fault]), options.output / "logs" / f"{fault}-{verify}") as url:
            yield url

    async def _ask(self, url: str, name: str, *, max_failed: float) -> list[Run]:
        asking = Asking(max_tokens=_MAX_TOKENS, max_failed=max_failed, parallel=self.options.parallel)
        plans = [RunPlan(number=n, kind=kind, side="subject") for n, kind in enumerate((Kind.COLD, Kind.WARM))]
        path = self.options.output / f"{name}.jsonl"
        async with Client(url=url, api=Api.GENERATE, timeout_s=_TIMEOUT_S, parallel=self.options.parallel) as client:
            with Journal(path, {"url": url}, resume=False) as journal:
                return [await ask_all(client, self.task, plan, asking, journal) for plan in plans]

    async def _bisect(self, url: str, reference: str) -> Bisection:
        prompt = {"text": self.task.questions[0].prompt}
        async with open_nodes(url, reference, _TIMEOUT_S) as nodes:
            return await bisect(nodes, prompt, max_tokens=_MAX_TOKENS, stop=self.task.stop)

    def _judge(self, fault: str, runs: Sequence[Run], refused: int, asked: int, found: Bisection | None) -> Caught:
        summaries = [summarise(run) for run in runs]
        pairings = self._pair(runs)
        first = None if found is None else found.first
        return Caught(
            fault=fault,
            refused=refused,
            asked=asked,
            cold=summaries[0].accuracy,
            warm=summaries[1].accuracy,
            gate=judge(summaries, threshold=self.options.threshold, max_failed=0.01).verdict,
            loses=is_loss(pairings),
            p=min(pairing.p for pairing in pairings),
            first=None if first is None else f"{first.run}, {first.stage}: {first.part} of layer {first.layer}",
        )

    def _pair(self, runs: Sequence[Run]) -> list[Pairing]:
        return [pair(run.plan.name, run.records, other.records) for run, other in zip(runs, self.expected, strict=True)]


def _figures(runs: Sequence[Run]) -> str:
    summaries: list[RunSummary] = [summarise(run) for run in runs]
    return ", ".join(f"{one.kind} {one.accuracy:.3f}" for one in summaries)


def show(found: Sequence[Caught]) -> None:
    """The table, on stdout."""
    console = Console()
    table = Table(title="faults put in on purpose")
    for name in ("fault", "digests refuse", "cold", "warm", "p", "gate", "bisection: first difference", "caught by"):
        table.add_column(name)
    for one in found:
        refused, gate = f"{one.refused}/{one.asked}", f"{one.gate}{', loses' if one.loses else ''}"
        accuracies = (f"{one.cold:.3f}", f"{one.warm:.3f}", f"{one.p:.2g}")
        table.add_row(one.fault, refused, *accuracies, gate, one.first or "-", ", ".join(one.by) or "-")
    (console if console.is_terminal else Console(width=170)).print(table)
