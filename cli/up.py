"""`tandem up`: router, prefill node and decode node on this machine, a first question through them, then service.

ports ──► start three processes ──► all healthy ──► ask, print ──► serve … Ctrl-C ──► stop all ──► exit 0
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click
import httpx

from accuracy import gsm_mini
from cli.children import ChildPlan, Children
from common.errors import ConfigError, WorkerError

_ASK_TIMEOUT = httpx.Timeout(300.0, connect=5.0)
_MAX_NEW_TOKENS = 200
_QUESTION_SEED = 2024


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    host: str
    port: int
    model_path: str
    transport: str
    threads: int | None
    start_timeout: float
    log_level: str
    once: bool

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def up(options: Options) -> int:
    """The exit status. Raises ConfigError when the port is taken, before anything is started."""
    check_port_is_free(options.host, options.port)
    return run(options, plan_children(options), Children(say))


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
    say(f"serving on {options.url} until Ctrl-C")
    children.watch()
    return 0


# Processes


def plan_children(options: Options) -> list[ChildPlan]:
    """Nodes first: the router is stopped first."""
    prefill_port, bootstrap_port, decode_port = free_ports(3)
    tandem = (sys.executable, "-m", "cli.main")
    threads = options.threads or max(1, (os.cpu_count() or 1) // 2)
    log_level = ("--log-level", options.log_level)
    node = ("--model-path", options.model_path, "--transport", options.transport, "--threads", str(threads), *log_level)
    prefill_url, decode_url = f"http://127.0.0.1:{prefill_port}", f"http://127.0.0.1:{decode_port}"
    prefill = ("prefill", *node, "--port", str(prefill_port), "--bootstrap-port", str(bootstrap_port))
    decode = ("decode", *node, "--port", str(decode_port))
    pair = ("--prefill", prefill_url, str(bootstrap_port), "--decode", decode_url)
    router = ("router", "--host", options.host, "--port", str(options.port), *pair, *log_level)
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


def check_port_is_free(host: str, port: int) -> None:
    """Raises ConfigError naming the port."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--port {port}: cannot listen on {host}:{port} ({reason})", param="port") from error


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
    problem = gsm_mini.problems("heldout", _QUESTION_SEED, 1)[0]
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
    click.echo(f"\nAsk it yourself:\n\n{curl_line(url, problem)}\n")
    return True


def _request(text: str) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": _MAX_NEW_TOKENS, "stop": gsm_mini.STOP}
    return {"text": text, "sampling_params": sampling}


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
