"""The front process of a node: starts the ranks, serves HTTP, ends the ranks.

    check ports ──► start ranks ──► all Ready ──► (bootstrap endpoint) ──► HTTP … signal ──► drain ──► Shutdown ──► exit
                                                   a rank dies: another one is started in its place
                                                                            └── the last rank died ──► exit 1

The first SIGTERM or SIGINT lets what runs end, for the drain time-out at most, and refuses the rest; the second one
waits for nothing. While nothing runs, the first one does not wait either. Another role (node/role.py) begins with such
an end.

No torch here: the front is small and starts quickly.
"""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import logging
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from common.config import NodeConfig, Role, ServerConfig, check_node_config
from common.errors import ConfigError, WorkerError
from common.http_server import LimitedProtocol, num_open_answers
from common.keys import KeyRing
from common.logs import configure_logging, in_a_row
from common.net import is_loopback
from common.tls import TlsConfig, server_context
from common.tracing import Tracing, closing, open_tracing
from common.waits import first_of
from node.app import ServingNode, create_app
from node.bootstrap import Bootstrap, StartBootstrap, start_bootstrap
from node.chat_template import ChatTemplate, load_chat_template
from node.grammars import GrammarChecker, Settings
from node.ipc import ipc_directory
from node.limits import ServingLimits
from node.messages import Ready
from node.processes import RankProcess, rank_command, start_rank, weights_file
from node.rank_client import RankClient
from node.registration import Registrar, Registration, Routers, advertised_url, check_registration
from node.role import cannot_change, check_role, own_command_as, start_again
from node.tokenizer import Tokenizer, load_eos_token_ids, load_tokenizer
from node.trace import RequestTrace

log = logging.getLogger(__name__)

LISTEN_BACKLOG = 2048
KEEP_ALIVE_S = 75
HTTP_STOP_S = 3
WRITTEN_POLL_S = 0.05
RANK_STOP_S = 4.0
RANK_START_S = 1800.0
LAST_WORDS_S = 0.5
RESTART_WAIT_S = 30.0  # at most, before a rank that does not serve longer than this is started again
RETURN_S, RETURN_STARTS = 60.0, 4.0  # how long one may load: this, or so many times what the node's own start took


def serve(
    config: NodeConfig,
    *,
    command: list[str] | None = None,
    bootstrap: StartBootstrap = start_bootstrap,
    rank_stop_s: float = RANK_STOP_S,
    rank_return_s: float = RETURN_S,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain.

    command: how to start a rank; `--ipc DIR --front PID --rank R` is added, the config goes to its stdin as JSON.
    Raises ConfigError for settings that cannot work, a port that is taken among them, and WorkerError when a rank dies
    before it is ready or when no rank is left. rank_stop_s: how long a rank may take to shut down before it gets
    SIGTERM, then SIGKILL. rank_return_s: how long a process in the place of a dead one may load, however quick the
    node's own start was.
    """
    configure_logging(config.server.log_level, f"{config.role.value}/front")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    check_node_config(config)
    routers = check_registration(config.role, config.server)
    keys, tls = KeyRing(config.server.api_key_file), server_context(_tls_config(config.server))
    tokenizer = load_tokenizer(config.model.path)
    chat_template = load_chat_template(config.model.path, config.model.chat_template)
    tracing = open_tracing(config.server.otlp_endpoint, f"tandem-{config.role.value}")
    with (
        bind(config.server.host, config.server.port, "port") as listener,
        ipc_directory() as ipc_dir,
        weights_file(config) as weights,
        closing(tracing),
    ):
        _check_bootstrap_port(config)
        front = _Front(
            config=config,
            command=command or rank_command(config.role),
            start_bootstrap=bootstrap,
            rank_stop_s=rank_stop_s,
            rank_return_s=rank_return_s,
            tokenizer=tokenizer,
            chat_template=chat_template,
            tracing=tracing,
            listener=listener,
            ipc_dir=ipc_dir,
            weights=weights,
            keys=keys,
            tls=tls,
            routers=routers,
        )
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(front.run())
    if front.next_command is not None:
        log.info("starting again as %s", " ".join(front.next_command))
        start_again(front.next_command)


def _tls_config(server: ServerConfig) -> TlsConfig:
    return TlsConfig(certfile=server.ssl_certfile, keyfile=server.ssl_keyfile, ca_certs=server.ssl_ca_certs)


@dataclass(kw_only=True)
class _Front:
    config: NodeConfig
    command: list[str]
    start_bootstrap: StartBootstrap
    rank_stop_s: float
    rank_return_s: float
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    tracing: Tracing | None
    listener: socket.socket
    ipc_dir: Path
    weights: str | None  # where ranks share them
    keys: KeyRing
    tls: ssl.SSLContext | None
    routers: Routers | None
    next_command: list[str] | None = None  # what the process becomes when it has drained
    draining: asyncio.Event = field(default_factory=asyncio.Event)  # a signal came
    stopping: asyncio.Event = field(default_factory=asyncio.Event)  # a second one, or there is no rank to drain
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)  # of a process in the place of a dead one
    last_death: WorkerError | None = None  # of the last rank that lived, while the node served

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        if self.keys.has_file:
            loop.add_signal_handler(signal.SIGHUP, self.keys.reload)
        transfer = self.config.transfer
        client = RankClient(
            self.ipc_dir,
            silence_timeout_s=transfer.first_token_timeout_s,
            liveness_timeout_s=transfer.liveness_timeout_s,
            by_room=self.config.role is Role.PREFILL,
        )
        if self.tracing is not None:
            client.begin_trace = partial(RequestTrace, self.tracing, self.config.role.value)
        client.start()
        try:
            async with self._ranks(client):
                began_s = loop.time()
                readies = await self._unless_stopped(_wait_ready(client))
                self.rank_return_s = max(self.rank_return_s, RETURN_STARTS * (loop.time() - began_s))
                if readies is not None:
                    await self._serve_ready(client, readies)
        finally:
            client.close()
        if self.last_death is not None:
            raise self.last_death

    def _on_signal(self) -> None:
        if self.next_command is not None:  # it drains already, to start again; now it only ends
            self.next_command = None
            return
        (self.stopping if self.draining.is_set() else self.draining).set()

    @property
    def num_ranks(self) -> int:
        return self.config.engine.dp_size

    @asynccontextmanager
    async def _ranks(self, client: RankClient) -> AsyncIterator[None]:
        processes: list[RankProcess] = []
        keepers = []
        try:
            for rank in range(self.num_ranks):
                process = await start_rank(self.config, self.command, self.ipc_dir, rank, self.weights)
                processes.append(process)
                client.add_rank(rank, process.pid)
                keepers.append(asyncio.create_task(self._keep(processes, rank, client)))
                keepers[-1].add_done_callback(self._on_keeper_end)
            yield
        finally:
            async with self.starting:
                for keeper in keepers:
                    keeper.cancel()
            client.shut_down_ranks()
            await asyncio.gather(*(self._stop(process, client) for process in processes))

    async def _stop(self, process: RankProcess, client: RankClient) -> None:
        """A rank that loads does not listen, and a second signal waits for nothing."""
        is_ready = process.rank in client.living() and len(client.readies()) == self.num_ranks
        patient = is_ready and not self.stopping.is_set()
        level = logging.WARNING if patient else logging.DEBUG
        await process.stop(grace_s=self.rank_stop_s if patient else LAST_WORDS_S, level=level)

    async def _keep(self, processes: list[RankProcess], rank: int, client: RankClient) -> None:
        """Start another process, while others serve, whenever the one of this rank has ended."""
        wait_s, limit_s = 0.0, 0.0
        while True:
            limit_s = min(max(2 * limit_s, self.rank_return_s), RANK_START_S)
            error, served_s = await self._death(processes[rank], client, limit_s)
            log.error("%s", in_a_row(error.message))
            if not self._is_serving(client) or client.all_dead or self.stopping.is_set():
                break
            wait_s = 0.0 if served_s > RESTART_WAIT_S else _longer(wait_s)
            limit_s = 0.0 if served_s else limit_s
            log.info("rank %d is started again in %g s", rank, wait_s)
            await asyncio.sleep(wait_s)
            while not await self._started_again(processes, rank, client):
                wait_s = _longer(wait_s)
                await asyncio.sleep(wait_s)
        if self._is_serving(client) and client.all_dead and not self.stopping.is_set():
            log.error("no rank is left: the node ends")
            self.last_death = error
            self.stopping.set()

    def _is_serving(self, client: RankClient) -> bool:
        return len(client.readies()) == self.num_ranks

    async def _death(self, process: RankProcess, client: RankClient, limit_s: float) -> tuple[WorkerError, float]:
        """Wait for it; limit_s: how long it may load, in the place of a dead one. Returns how it ended, and how long it
        had served; seconds."""
        limit = None
        if self._is_serving(client):
            limit = asyncio.get_running_loop().call_later(limit_s, _end_late, process, client, limit_s)
        error = await process.wait()
        if limit is not None:
            limit.cancel()
        ready_s, now_s = client.ready_s(process.rank), time.monotonic()
        if ready_s is None or not self._is_serving(client):
            await asyncio.sleep(LAST_WORDS_S)  # its StartFailed, which says more, may still be on its way
        error = client.on_rank_death(process.rank, error)
        process.close()
        return error, 0.0 if ready_s is None else now_s - ready_s

    async def _started_again(self, processes: list[RankProcess], rank: int, client: RankClient) -> bool:
        async with self.starting:
            try:
                processes[rank] = await self._in_place_of_dead(rank, client)
            except WorkerError as error:
                log.error("%s", in_a_row(error.message))
                return False
        log.info("rank %d is started again (pid %d)", rank, processes[rank].pid)
        return True

    async def _in_place_of_dead(self, rank: int, client: RankClient) -> RankProcess:
        process = await start_rank(self.config, self.command, self.ipc_dir, rank, self.weights)
        try:
            client.replace_rank(rank, process.pid)
        except WorkerError:
            await process.stop(grace_s=0, level=logging.DEBUG)
            raise
        return process

    def _on_keeper_end(self, keeper: asyncio.Task[None]) -> None:
        """A fault of ours: without its keeper a rank would be missed by nobody."""
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            log.error("a rank is no longer watched: the node drains and ends", exc_info=error)
            self.last_death = WorkerError(f"a rank is no longer watched: {error!r}", code="internal_error")
            self.draining.set()

    async def _serve_ready(self, client: RankClient, readies: list[Ready]) -> None:
        async with self._bootstrap(client, readies) as bootstrap_port, _grammars(self.config, readies) as grammars:
            node = ServingNode(
                config=self.config,
                grammars=grammars,
                limits=_serving_limits(self.config, readies, bootstrap_port),
                tokenizer=self.tokenizer,
                chat_template=self.chat_template,
                client=client,
                bootstrap_port=bootstrap_port,
                keys=self.keys,
                tracing=self.tracing,
                change_role=self.change_role,
            )
            await self._serve_http(node)

    @asynccontextmanager
    async def _bootstrap(self, client: RankClient, readies: list[Ready]) -> AsyncIterator[int | None]:
        if self.config.role is not Role.PREFILL:
            yield None
            return
        endpoint = await self.start_bootstrap(self.config, readies)
        client.on_return = partial(_move_rank, endpoint)
        try:
            yield endpoint.port
        finally:
            await endpoint.close()

    async def _serve_http(self, node: ServingNode) -> None:
        """Listen until a signal comes and what runs has ended; what does not end in time is ended."""
        _listen(self.listener)
        server = _Server(
            uvicorn.Config(
                create_app(node),
                http=LimitedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=HTTP_STOP_S,
                ssl_context_factory=None if (tls := self.tls) is None else lambda *_: tls,
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[self.listener]))
        host, port = self.listener.getsockname()[:2]
        where = f"{'http' if self.tls is None else 'https'}://{host}:{port}"
        log.info("%s node ready on %s, fingerprint %s", self.config.role.value, where, _prints(node))
        if self.keys.is_open and not is_loopback(self.config.server.host):
            log.warning("no API keys: whoever reaches this node may use and administer it (--api-key-file)")
        async with self._registered(node):
            await first_of(serving, self.draining.wait(), self.stopping.wait())
        if not self.stopping.is_set():
            await self._drain(node.client, server)
        server.should_exit = True
        node.client.abort_all("the node is shutting down")
        node.client.fail_running(WorkerError("the node is shutting down", code="shutting_down"))
        await serving

    @asynccontextmanager
    async def _registered(self, node: ServingNode) -> AsyncIterator[None]:
        """Routers are told that it leaves before it refuses anything, so that nothing they send is refused."""
        if self.routers is None:
            yield
            return
        registration = Registration(
            url=advertised_url(self.config.server, self.listener.getsockname()[1]),
            role=self.config.role.value,
            bootstrap_port=node.bootstrap_port,
            instance=node.instance,
        )
        registrar = Registrar(routers=self.routers, registration=registration)
        registrar.start()
        try:
            yield
        finally:
            leaving = asyncio.create_task(registrar.leave())
            await first_of(leaving, self.stopping.wait())
            if leaving.done():
                leaving.result()
            leaving.cancel()

    def change_role(self, role: Role) -> bool:
        """Drain, and start again as a node of this role. False when it has it. Raises ServingError when it cannot."""
        if self.draining.is_set():
            raise WorkerError("the node is draining", code="draining")
        if role is self.config.role:
            return False
        changed = check_role(self.config, role)
        try:
            _check_bootstrap_port(changed)
            self.next_command = own_command_as(role, self.config.role)
        except ConfigError as error:
            raise cannot_change(error) from error
        log.info("the node drains to become a %s node", role.value)
        self.draining.set()
        return True

    async def _drain(self, client: RankClient, server: uvicorn.Server) -> None:
        """Take nothing new, and wait until nothing runs and all answers are written, a second signal comes or the time
        is over. An answer that is not written by then has as long as the server takes to stop."""
        client.refuse(WorkerError("the node is draining: it ends when what it runs has ended", code="draining"))
        if client.num_unanswered == 0 and num_open_answers(server) == 0:
            log.info("nothing runs: the node ends")
            return
        limit_s = self.config.server.drain_timeout_s
        log.info(
            "draining for %g s at most, sequences that run: %d; again to end at once", limit_s, client.num_unanswered
        )
        await first_of(_wait_written(client, server), self.stopping.wait(), timeout_s=limit_s)
        if client.num_unanswered:
            log.warning("%d sequences did not end in time and are aborted", client.num_unanswered)
        elif num_open := num_open_answers(server):
            log.warning("%d answers were not read in time", num_open)
        else:
            log.info("drained: the node ends")

    async def _unless_stopped(self, work: Coroutine[Any, Any, list[Ready]]) -> list[Ready] | None:
        """The result, or None when a signal came first."""
        task = asyncio.create_task(work)
        await first_of(task, self.draining.wait())
        if task.done():
            return task.result()
        task.cancel()
        return None


class _Server(uvicorn.Server):
    """The front handles the signals itself, also while the ranks load."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _wait_written(client: RankClient, server: uvicorn.Server) -> None:
    """Until no request waits for a rank and no client for the rest of its answer."""
    await client.wait_answered()
    while num_open_answers(server):  # noqa: ASYNC110 - a transport tells nobody that it has written all
        await asyncio.sleep(WRITTEN_POLL_S)


def _end_late(process: RankProcess, client: RankClient, limit_s: float) -> None:
    """One that is stopped or stuck while it loads may hold what others wait for to load."""
    if client.ready_s(process.rank) is None:
        client.give_up(process.rank, WorkerError(f"it was not ready in {limit_s:.0f} s"))
        process.kill()


def _longer(wait_s: float) -> float:
    return min(2 * wait_s + 1.0, RESTART_WAIT_S)


async def _wait_ready(client: RankClient) -> list[Ready]:
    try:
        return await asyncio.wait_for(client.wait_ready(), RANK_START_S)
    except TimeoutError:
        raise WorkerError(f"the ranks were not ready in {RANK_START_S:g} s", code="start_timeout") from None


def _move_rank(endpoint: Bootstrap, rank: int, ready: Ready) -> None:
    if ready.control_address is not None:
        endpoint.move_rank(rank, ready.control_address)


def _serving_limits(config: NodeConfig, readies: list[Ready], bootstrap_port: int | None) -> ServingLimits:
    """Of ranks that differ, the smallest counts."""
    return ServingLimits(
        role=config.role,
        vocab_size=min(ready.vocab_size for ready in readies),
        context_length=min(ready.context_length for ready in readies),
        max_total_tokens=min(ready.max_total_tokens for ready in readies),
        num_ranks=len(readies),
        bootstrap_host=config.server.bootstrap_host,
        bootstrap_port=bootstrap_port or config.server.bootstrap_port,
    )


@asynccontextmanager
async def _grammars(config: NodeConfig, readies: list[Ready]) -> AsyncIterator[GrammarChecker]:
    path = config.model.path
    eos_ids = sorted(load_eos_token_ids(path))
    checker = GrammarChecker(Settings(model_path=path, vocab_size=readies[0].vocab_size, eos_ids=eos_ids))
    try:
        yield checker
    finally:
        await checker.close()


def _prints(node: ServingNode) -> str:
    return ", ".join(sorted({ready.fingerprint for ready in node.client.readies()}))


# -- ports -------------------------------------------------------------------------------


def bind(host: str, port: int, setting: str) -> socket.socket:
    """A bound socket that does not listen yet: until then clients are refused, not kept waiting.

    setting: the name of the port's setting, for messages. Raises ConfigError when the port is taken or the host is not
    this machine's.
    """
    option = f"--{setting.replace('_', '-')} {port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}", param="host") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"{option}: already in use on {host}", code="port_in_use", param=setting) from error
        raise ConfigError(f"{option} on {host}: {error.strerror}", param=setting) from error
    return listener


def _listen(listener: socket.socket) -> None:
    try:
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        port = listener.getsockname()[1]
        raise ConfigError(
            f"--port {port}: already in use: {error.strerror}", code="port_in_use", param="port"
        ) from error


def _check_bootstrap_port(config: NodeConfig) -> None:
    """Find out before the model loads. The endpoint itself binds later."""
    server: ServerConfig = config.server
    if config.role is not Role.PREFILL:
        return
    if server.bootstrap_port == server.port != 0:
        raise ConfigError(
            f"--bootstrap-port {server.bootstrap_port}: --port is the same", code="port_in_use", param="bootstrap_port"
        )
    bind(server.bootstrap_host, server.bootstrap_port, "bootstrap_port").close()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.new_event_loop
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
