"""`tandem up`: router, prefill node and decode node on this machine, a first question through them, then service.

ports ──► start three processes ──► all healthy ──► ask, print ──► serve … Ctrl-C ──► stop all ──► exit 0
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import httpx

from accuracy import gsm_mini
from cli.children import ChildPlan, Children
from cli.installed import require_nodes
from common.config import EngineConfig, ModelConfig, NodeConfig, Role, TransferConfig, TransportName, check_node_config
from common.errors import ConfigError, WorkerError

_ASK_TIMEOUT = httpx.Timeout(300.0, connect=5.0)
_MAX_NEW_TOKENS = 200
_QUESTION_SEED = 2024
_ANY = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}  # addresses of all of this machine, and one of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    host: str
    port: int
    model_path: str
    device: str
    transport: str
    threads: int | None
    start_timeout: float
    log_level: str
    once: bool
    dp_size: int = 1  # of the decode node

    @property
    def url(self) -> str:
        """Of the router, as this machine reaches it."""
        host = _ANY.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def devices(self) -> tuple[str, str]:
        """Of the prefill and of the decode node. Raises ConfigError."""
        names = [name.strip() for name in self.device.split(",")]
        kinds = {name.partition(":")[0] for name in names}
        if not all(names) or len(names) > 2 or len(kinds) > 1:
            raise ConfigError(
                f"--device {self.device}: a device for both nodes, or two of a kind with a comma between them",
                param="device",
            )
        return names[0], names[-1]

    @property
    def node_threads(self) -> int:
        """Of each rank: prefill has one."""
        return max(1, (os.cpu_count() or 1) // (1 + max(1, self.dp_size))) if self.threads is None else self.threads


def up(options: Options) -> int:
    """The exit status. Raises ConfigError for what cannot work, before anything is started."""
    require_nodes("up")
    check_nodes(options)
    options = replace(options, port=free_port(options.host, options.port))
    return run(options, plan_children(options), Children(say))


def check_nodes(options: Options) -> None:
    """Raises ConfigError as the nodes would."""
    for role, device in zip((Role.PREFILL, Role.DECODE), options.devices, strict=True):
        check_node_config(
            NodeConfig(
                role=role,
                model=ModelConfig(path=options.model_path, device=device),
                engine=EngineConfig(
                    threads=options.node_threads, dp_size=options.dp_size if role is Role.DECODE else 1
                ),
                transfer=TransferConfig(transport=TransportName(options.transport)),
            )
        )


def say(line: str) -> None:
    click.echo(f"tandem: {line}")
    sys.stdout.flush()


def run(options: Options, plans: Sequence[ChildPlan], children: Children) -> int:
    """Until SIGINT or SIGTERM (0) or until a child ends or nothing gets ready (1)."""
    try:
        with _signals_interrupt():
            return _serve(options, plans, children)
    except KeyboardInterrupt:
        say("stopping")
        return 0
    except WorkerError as error:
        click.echo(f"tandem: error: {error.message}", err=True)
        return 1
    finally:
        with _signals_ignored():
            children.stop()
        say("stopped")


def _serve(options: Options, plans: Sequence[ChildPlan], children: Children) -> int:
    for plan in plans:
        children.start(plan)
    children.wait_healthy(options.start_timeout)
    answered = ask_first_question(options.url)
    if options.once:
        return 0 if answered else 1
    if answered:
        click.echo(how_to_ask(options.url))
    say(f"serving on {options.url} until Ctrl-C")
    children.watch()
    return 0


# Processes


def plan_children(options: Options) -> list[ChildPlan]:
    """Nodes first: the router is stopped first."""
    prefill_port, bootstrap_port, decode_port = free_ports(3)
    tandem = (sys.executable, "-m", "cli.main")
    log_level = ("--log-level", options.log_level)
    model = ("--model-path", options.model_path)
    at_once = ("--drain-timeout", "0")  # what Ctrl-C means here
    node = (*model, "--transport", options.transport, "--threads", str(options.node_threads), *at_once, *log_level)
    prefill_url, decode_url = f"http://127.0.0.1:{prefill_port}", f"http://127.0.0.1:{decode_port}"
    prefill_device, decode_device = (("--device", device) for device in options.devices)
    prefill_ports = ("--port", str(prefill_port), "--bootstrap-port", str(bootstrap_port))
    prefill = ("prefill", *node, *prefill_device, *prefill_ports)
    decode = ("decode", *node, *decode_device, "--dp-size", str(options.dp_size), "--port", str(decode_port))
    pair = ("--prefill", prefill_url, str(bootstrap_port), "--decode", decode_url)
    router = ("router", "--host", options.host, "--port", str(options.port), *pair, *at_once, *log_level)
    return [
        ChildPlan("prefill node", tandem + prefill, prefill_url),
        ChildPlan("decode node", tandem + decode, decode_url),
        ChildPlan("router", tandem + router, options.url),
    ]


def free_ports(count: int) -> list[int]:
    """Free at this moment; a node that finds its port taken nevertheless says so and ends."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def free_port(host: str, port: int) -> int:
    """The port, when nobody listens there; one that is free when it is 0. Raises ConfigError naming what is wrong."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port}: 0 to 65535", param="port")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    except UnicodeError as error:
        raise ConfigError(f"--host {host}: not a host name", param="host") from error


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    match error.errno:
        case errno.EADDRINUSE:
            advice = "choose another with --port, or make serve PORT=..."
            return ConfigError(f"--port {port}: in use on {host}; {advice}", code="port_in_use", param="port")
        case errno.EACCES:
            return ConfigError(f"--port {port}: this user may not listen there", param="port")
        case number:
            reason = os.strerror(number) if number is not None and number > 0 else error.strerror
            return ConfigError(f"--host {host}: cannot listen there ({reason})", param="host")


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """While children are being stopped, which takes bounded time."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# The first question


def ask_first_question(url: str) -> bool:
    """Ask a held-out question and print everything about it. False when there was no answer."""
    problem = _first_problem()
    body = _request(gsm_mini.prompt(problem, gsm_mini.few_shot()))
    begin = time.monotonic()
    try:
        answer = httpx.post(f"{url}/generate", json=body, timeout=_ASK_TIMEOUT, trust_env=False)
        answer.raise_for_status()
        found = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        click.echo(f"tandem: error: the first question got no answer: {error}", err=True)
        return False
    for line in report(problem, found, time.monotonic() - begin):
        click.echo(line)
    click.echo()
    return True


def _request(text: str) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": _MAX_NEW_TOKENS, "stop": gsm_mini.STOP}
    return {"text": text, "sampling_params": sampling}


def _first_problem() -> gsm_mini.Problem:
    return gsm_mini.problems("heldout", _QUESTION_SEED, 1)[0]


def how_to_ask(url: str) -> str:
    more = f"{_tandem()} generate --url {url} --example"
    return f"Ask it yourself:\n\n{curl_line(url, _first_problem())}\n\nAsk it something else:\n\n{more}\n"


def _tandem() -> str:
    """How a shell finds this command: where make has installed it, it is not on the path."""
    if shutil.which("tandem"):
        return "tandem"
    script, here = Path(sys.executable).with_name("tandem"), Path.cwd()
    return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))


def curl_line(url: str, problem: gsm_mini.Problem) -> str:
    body = json.dumps(_request(gsm_mini.prompt(problem, [])))
    return f"curl -s {url}/generate -H 'content-type: application/json' -d {shlex.quote(body)}"


def report(problem: gsm_mini.Problem, answer: dict[str, Any], total_s: float) -> list[str]:
    """Lines on the question, the answer and where the time went. answer: of /generate. total_s: the client's."""
    meta = answer["meta_info"]
    right = gsm_mini.extract_answer(answer["text"]) == problem.answer
    lines = ["", f"Question: {problem.question}", f"Answer:   {_indented(answer['text'])}"]
    lines += [f"Expected: {problem.answer} ({'right' if right else 'WRONG'})", ""]
    lines.append(f"{meta['prompt_tokens']} prompt tokens, {meta['completion_tokens']} new ones, {total_s * 1e3:.0f} ms")
    if "timing" in meta:
        lines.append(_times(meta["timing"], meta["completion_tokens"]))
    if "transfer_bytes" in meta:
        lines.append("bytes moved:  " + "  ".join(f"{part} {n:,}" for part, n in meta["transfer_bytes"].items()))
    return lines


def _indented(text: str) -> str:
    return text.strip().replace("\n", "\n          ")


def _times(timing: dict[str, float], completion_tokens: int) -> str:
    parts = "  ".join(
        f"{name} {timing[f'{name}_s'] * 1e3:.1f} ms" for name in ("queue", "prefill", "transfer", "decode")
    )
    # The first token is the prefill node's.
    rate = (completion_tokens - 1) / timing["decode_s"] if timing["decode_s"] > 0 else 0.0
    return f"time spent:   {parts}  ({rate:.0f} tokens/s)"
