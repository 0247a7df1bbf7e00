"""A chaos run from the plan to the verdict.

    start ──► right answers ──► warm-up, sweep ──► load and faults ──► settle ──► sweep ──► settle, flush ──► stop
                                          └ memory before    memory calm ┘           └ memory after

A sweep asks every task once and must be answered rightly throughout. Memory is compared by place in the stack (router,
front and rank of each node), in whatever life its process is: before the faults, the stack has done three sweeps for
each rank of a node.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp
import click

from cli.chaos import checks
from cli.chaos.fleet import Fleet, Process
from cli.chaos.load import Load
from cli.chaos.options import Options
from cli.chaos.plan import DECODE, OF_CLIENTS, Fault, Kind, make_plan, twins_of
from cli.chaos.report import LEFT_OUT, Report
from cli.chaos.tasks import make_tasks
from common.config import ModelConfig, NodeConfig, Role, TransferConfig, check_node_config
from common.errors import ConfigError

_SWEEPS_PER_RANK = 3  # before memory is compared
_WRITING_S = 1.0  # until hand-offs have begun that a slow link makes long
_NOTICE_S = 1.0  # until the router knows that a node is healthy again


def chaos(options: Options) -> int:
    """The exit status: 0 when everything held. Raises ConfigError for what cannot work, before anything is started."""
    transfer = TransferConfig(transport=options.transport, verify=options.verify)
    check_node_config(NodeConfig(role=Role.PREFILL, model=ModelConfig(path=options.model_path), transfer=transfer))
    plan = make_plan(options.seed, options.seconds, options.kinds, options.liveness_s)
    if not plan and options.kinds - OF_CLIENTS:
        raise ConfigError(f"--seconds {options.seconds:g}: too short for any fault at nodes", param="seconds")
    report = Report(options=options, plan=plan)
    with _log_folder(report) as folder:
        try:
            asyncio.run(_until_terminated(_Run(report, folder)))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
    for line in report.lines():
        click.echo(line)
    if options.report is not None:
        options.report.write_bytes(report.to_json())
    return 0 if report.passed else 1


@contextlib.contextmanager
def _log_folder(report: Report) -> Iterator[Path]:
    """A temporary one stays when the run has not passed."""
    given = report.options.logs
    if given is not None:
        given.mkdir(exist_ok=True)
        yield given
        return
    folder = Path(tempfile.mkdtemp(prefix="tandem-chaos-"))
    try:
        yield folder
    finally:
        if report.passed:
            shutil.rmtree(folder)
        else:
            click.echo(f"the logs of all processes: {folder}")


async def _until_terminated(run: _Run) -> None:
    """SIGTERM ends it as Ctrl-C does: whatever was started is ended."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await run.go()


class _Run:
    """Fills the report."""

    def __init__(self, report: Report, folder: Path) -> None:
        self._report, self._options = report, report.options
        self._fleet = Fleet(report.options, folder)
        self._in_use = {name: asyncio.Lock() for name in self._fleet.nodes}
        self._begin_s = time.monotonic()

    def _say(self, line: str) -> None:
        click.echo(f"{time.monotonic() - self._begin_s:7.1f} s  {line}")

    async def go(self) -> None:
        for line in [f"seed {self._options.seed}, {len(self._report.plan)} faults:", *map(str, self._report.plan)]:
            click.echo(line)
        async with self._fleet as fleet:
            self._say(f"all healthy, router {fleet.router.url}")
            tasks = await make_tasks(fleet.unified.url, self._options.seed)
            await fleet.unified.close()
            self._say(f"{len(tasks)} tasks with their right answers")
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                load = Load(session, fleet.router.url, tasks, self._options)
                warm_ups = range(1, _SWEEPS_PER_RANK * self._options.dp_size)
                await asyncio.gather(*(load.sweep(f"warm-up-{number}") for number in warm_ups))
                await self._sweep(load, "before")
                await self._storm(load)
                await self._sweep(load, "after")
            self._compare_memory()
            self._report.check("caches can be dropped, and then all is free", await checks.flush(fleet))
        self._close_books()

    async def _sweep(self, load: Load, name: str) -> None:
        outcomes = await load.sweep(name)
        self._report.check(f"all answers right {name} the faults", checks.wrong_outcomes(outcomes, all_right=True))
        self._report.check(f"all free {name} the faults", await self._settled())
        self._report.memory[name] = checks.memory(self._fleet)
        self._say(f"sweep {name}: {len(outcomes)} answers")

    async def _settled(self) -> list[str]:
        return await checks.wait_settled(self._fleet, self._options.settle_s)

    async def _storm(self, load: Load) -> None:
        over = asyncio.Event()
        clients = asyncio.create_task(load.run(over))
        end_s = time.monotonic() + self._options.seconds
        faults = [asyncio.create_task(self._inflict(fault, end_s)) for fault in self._report.plan]
        try:
            await asyncio.sleep(self._options.seconds)
            await asyncio.gather(*faults)
            over.set()
            await clients
        finally:
            for task in [clients, *faults]:
                task.cancel()
        self._report.outcomes = load.outcomes
        self._say(f"storm over: {len(load.outcomes)} requests")
        await self._fleet.wait_healthy(self._fleet.members)
        self._report.second_tries = await checks.second_tries(self._fleet)
        self._report.memory["calm"] = checks.memory(self._fleet)
        self._report.check("right answers or typed errors", checks.wrong_outcomes(load.outcomes, all_right=False))
        self._report.check("most requests answered", checks.too_few_right(load.outcomes))
        self._report.check("all free when the faults are over", await self._settled())

    async def _inflict(self, fault: Fault, end_s: float) -> None:
        """A fault waits until its node serves, and if it takes that out, the other one of the role too; not beyond the
        end of the storm."""
        await asyncio.sleep(fault.at_s)
        nodes = [self._fleet.nodes[name] for name in (fault.node, *twins_of(fault))]
        async with contextlib.AsyncExitStack() as held:
            for node in sorted(nodes, key=lambda node: node.name):
                await held.enter_async_context(self._in_use[node.name])
            await self._all_steady(nodes, end_s)
            done = time.monotonic() < end_s and await _do(fault, nodes[0])
        self._report.done.append(f"{fault}{'' if done else LEFT_OUT}")

    async def _all_steady(self, nodes: Sequence[Process], end_s: float) -> None:
        """Healthy, and a moment later still: a front may not have noticed yet that its rank is dead."""
        while await self._fleet.all_healthy(nodes, end_s):
            lives = [node.lives for node in nodes]
            await asyncio.sleep(_NOTICE_S)
            if await self._fleet.all_healthy(nodes, 0.0) and lives == [node.lives for node in nodes]:
                return

    def _compare_memory(self) -> None:
        memory = self._report.memory
        found = [
            f"{when}: {line}" for when in ("calm", "after") for line in checks.grown(memory["before"], memory[when])
        ]
        self._report.check(f"no process grew by more than {checks.GROWTH_LIMIT:.0%}", found)

    def _close_books(self) -> None:
        """What can be said only when all processes have ended."""
        report, fleet = self._report, self._fleet
        counts = checks.completions(fleet.nodes[name] for name in DECODE)
        report.check("no request computed twice to its end", checks.computed_twice(counts, report.outcomes))
        report.check("every process ended as expected", fleet.surprises)
        report.check("no leak and no traceback in the logs", checks.logged_faults(fleet.members))
        report.check("no process left", fleet.left_over)
        report.lives = {member.name: member.lives for member in fleet.members}
        report.seconds = time.monotonic() - self._begin_s


async def _do(fault: Fault, node: Process) -> bool:
    """Returns when the fault is over; False when there was nothing to hurt."""
    match fault.kind:
        case Kind.KILL_FRONT:
            return node.kill(node.front())
        case Kind.KILL_RANK:
            return node.kill(node.rank())
        case Kind.KILL_TWICE:
            return await _kill_twice(fault, node)
        case Kind.STOP_FRONT:
            return await node.hold(node.front(), fault.last_s)
        case Kind.STOP_RANK:
            return await node.hold(node.rank(), fault.last_s)
        case Kind.RESTART:
            return await node.restart()
        case Kind.CORRUPT | Kind.DELAY | Kind.WRITE_ERROR:
            return await _inject(fault, node)
        case Kind.STOP_WRITING:
            return await _stop_writing(fault, node)
        case Kind.LEAVE | Kind.ABORT:
            raise AssertionError(f"{fault.kind} is the clients' to do")


async def _kill_twice(fault: Fault, node: Process) -> bool:
    """The second time while it starts."""
    done = node.kill(node.front())
    await asyncio.sleep(fault.last_s)
    return node.kill(node.front()) and done


async def _inject(fault: Fault, node: Process) -> bool:
    """Leases that a failed write has left in doubt stay until the sender has ended: so that it is restarted."""
    assert fault.injected is not None
    with node.injecting(fault.injected):
        await asyncio.sleep(fault.last_s)
    return await node.restart() if fault.kind is Kind.WRITE_ERROR else True


async def _stop_writing(fault: Fault, node: Process) -> bool:
    """The rank is stopped in the middle of hand-offs. Where it goes on when it wakes up must not be in use again."""
    assert fault.injected is not None
    with node.injecting(fault.injected):
        await asyncio.sleep(_WRITING_S)
        return await node.hold(node.rank(), fault.last_s)
