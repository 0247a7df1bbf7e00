"""Builds the images, starts compose.yaml, asks it, kills its prefill node, asks again, takes it down.

    make test-compose [DEBOOTSTRAP=1]
    python3 deploy/test_compose.py [--debootstrap]

Needs a container engine that this user may use, and `docker compose` or `docker-compose`; without one it says so and
ends with 0. BASE_IMAGE: what the images are built on (python:3.11-slim-bookworm). Where no image can be pulled,
--debootstrap makes one of Debian's packages (root, the package debootstrap). TORCH_INDEX and the wheels in
deploy/wheelhouse as for the Dockerfiles. The standard library alone is used.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

DEPLOY = Path(__file__).resolve().parent
PROJECT = "tandem-test"
BASE_IMAGE = "tandem-base:debootstrap"
PACKAGES = "python3,python3-venv,ca-certificates,libibverbs1,tini"
BUNDLE = Path("etc/ssl/certs/ca-certificates.crt")
NODES = ("prefill", "decode-1", "decode-2")
READY_S = 300.0
PROMPT = (
    "Question: A club has 768 students. 25% of them are girls and the rest are boys. How many boys are there?\nAnswer:"
)
KILL_FRONT = "import os, pathlib; os.kill(int(pathlib.Path('/proc/1/task/1/children').read_text().split()[0]), 9)"


class FailedError(Exception):
    """Something is not as it must be."""


@dataclass(frozen=True, slots=True)
class Stack:
    """compose: the command with its files. url, keys: of the router, as seen from outside."""

    compose: tuple[str, ...]
    environment: dict[str, str]
    url: str
    user_key: str
    admin_key: str

    def __call__(self, *arguments: str) -> str:
        return output([*self.compose, *arguments], self.environment)

    def container(self, service: str) -> str:
        return self("ps", "-q", service).strip()

    def inspect(self, service: str, template: str) -> str:
        return output(["docker", "inspect", "--format", template, self.container(service)]).strip()


def output(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    """stdout. Raises FailedError with all that the command said."""
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=DEPLOY)
    if done.returncode != 0:
        raise FailedError(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def succeeds(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def compose_command() -> tuple[str, ...] | None:
    """None where there is no container engine."""
    if not succeeds("docker", "info"):
        return None
    commands = (("docker", "compose"), ("docker-compose",))
    return next((command for command in commands if succeeds(*command, "version")), None)


def debootstrap() -> str:
    """Makes BASE_IMAGE of Debian's packages, with the certificate authorities that this machine trusts."""
    say(f"{BASE_IMAGE} of Debian's packages")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "root"
        output(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(folder)])
        if (Path("/") / BUNDLE).exists():
            shutil.copy(Path("/") / BUNDLE, folder / BUNDLE)
        tar = subprocess.Popen(["tar", "-C", str(folder), "-c", "."], stdout=subprocess.PIPE)
        change = f"ENV PIP_CERT=/{BUNDLE}"
        subprocess.run(["docker", "import", "-c", change, "-", BASE_IMAGE], stdin=tar.stdout, check=True)
        if tar.wait() != 0:
            raise FailedError("tar could not read what debootstrap has made")
    return BASE_IMAGE


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(stack: Stack, key: str | None = None) -> tuple[int, dict[str, object]]:
    """Status and body of a /generate from outside."""
    body = {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 200, "stop": "Question"}}
    headers = {"content-type": "application/json"} | ({} if key is None else {"authorization": f"Bearer {key}"})
    request = urllib.request.Request(f"{stack.url}/generate", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def answer(stack: Stack) -> str:
    """The text. Raises FailedError unless the problem is solved and the state of it came from the prefill node."""
    status, said = ask(stack, stack.user_key)
    text = str(said.get("text"))
    if status != 200 or "#### 576" not in text:
        raise FailedError(f"/generate: {status} {said}")
    return text


def wait(what: str, is_so: Callable[[], bool], limit_s: float = READY_S) -> None:
    started = time.monotonic()
    while not is_so():
        if time.monotonic() - started > limit_s:
            raise FailedError(f"{what}: not within {limit_s:.0f} s")
        time.sleep(1)
    say(f"{what}: after {time.monotonic() - started:.0f} s")


def is_healthy(stack: Stack, service: str) -> bool:
    return stack.inspect(service, "{{.State.Health.Status}}") == "healthy"


def restarts(stack: Stack, service: str) -> int:
    return int(stack.inspect(service, "{{.RestartCount}}"))


def check(stack: Stack) -> None:
    """Start, ask, kill, ask again."""
    say("up")
    stack("up", "-d", "--no-build")
    wait("router healthy", lambda: is_healthy(stack, "router"))
    first = answer(stack)
    say(f"answers: {first.strip().splitlines()[-1]}")
    with urllib.request.urlopen(f"{stack.url}/", timeout=10) as page:
        if b"<html" not in page.read():
            raise FailedError("the image has no status page")
    if ask(stack)[0] != 401:
        raise FailedError("a request without a key was not refused")
    identities(stack)
    doctors(stack)
    stack("exec", "-T", "prefill", "python3", "-c", KILL_FRONT)
    wait("prefill started again", lambda: restarts(stack, "prefill") == 1)
    wait("prefill healthy again", lambda: is_healthy(stack, "prefill"))
    wait("an answer again", lambda: ask(stack, stack.user_key)[0] == 200, 60)
    if answer(stack) != first:
        raise FailedError("another answer than before the prefill node was killed")
    say("the same answer again")


def identities(stack: Stack) -> None:
    """Every container tells peers an address of its own, and its name, and runs as nobody's root."""
    names = {service: stack("exec", "-T", service, "hostname").strip() for service in NODES}
    users = {service: stack("exec", "-T", service, "id", "-u").strip() for service in (*NODES, "router")}
    if names != {service: service for service in NODES} or set(users.values()) != {"10001"}:
        raise FailedError(f"names {names}, users {users}")
    key = {"authorization": f"Bearer {stack.admin_key}"}
    with urllib.request.urlopen(urllib.request.Request(f"{stack.url}/server_info", headers=key), timeout=10) as info:
        told = info.read().decode()
    if not any(f'"{name}:30000/0"' in told for name in NODES[1:]):
        raise FailedError(f"no decode node is called by its name: {told}")


def doctors(stack: Stack) -> None:
    """What README.md shows: before a node starts, and in the router that runs."""
    keys = ("--cluster-key-file=/run/secrets/cluster_key", "--api-key-file=/run/secrets/api_keys")
    hosts = ("--host=0.0.0.0", "--bootstrap-host=0.0.0.0", "--transfer-host=prefill")
    said = stack("run", "--rm", "-T", "prefill", "doctor", "--role", "prefill", *hosts, *keys)
    nodes = ("--prefill", "http://prefill:30000", "8998", "--decode", "http://decode-1:30000")
    nodes += ("--decode", "http://decode-2:30000", keys[1], "--worker-api-key-file=/run/secrets/api_keys")
    said += stack("exec", "-T", "router", "tandem", "doctor", "--role", "router", "--port", "0", *nodes)
    wrong = [line for line in said.splitlines() if line.startswith(("error", "warning"))]
    if wrong:
        raise FailedError("\n".join(wrong))
    say("the doctors of a node and of the router find no fault")


def leftovers() -> list[str]:
    """What the project still has at the engine."""
    label = f"label=com.docker.compose.project={PROJECT}"
    kinds = (("ps", "-aq"), ("network", "ls", "-q"), ("volume", "ls", "-q"))
    return [line for kind in kinds for line in output(["docker", *kind, "--filter", label]).split()]


def build(stack: Stack) -> None:
    for service in ("router", "prefill"):  # one at a time; the decode nodes are of prefill's image
        started = time.monotonic()
        say(f"building {service}'s image (minutes the first time; what is printed is shown when it fails)")
        stack("build", service)
        image = stack.environment["TANDEM_ROUTER_IMAGE" if service == "router" else "TANDEM_NODE_IMAGE"]
        size = int(output(["docker", "image", "inspect", "--format", "{{.Size}}", image]))
        say(f"{image}: {size / 1e6:.0f} MB, built in {time.monotonic() - started:.0f} s")


def make_stack(command: tuple[str, ...], base: str, secrets: Path) -> Stack:
    output([str(DEPLOY / "make_secrets.sh"), str(secrets)])
    port = free_port()
    environment = os.environ | {
        "BASE_IMAGE": base,
        "TANDEM_NODE_IMAGE": "tandem-node:test",
        "TANDEM_ROUTER_IMAGE": "tandem-router:test",
        "TANDEM_PORT": str(port),
        "TANDEM_SECRETS": str(secrets),
    }
    return Stack(
        compose=(*command, "-p", PROJECT, "-f", str(DEPLOY / "compose.yaml")),
        environment=environment,
        url=f"http://127.0.0.1:{port}",
        user_key=(secrets / "user.key").read_text(),
        admin_key=(secrets / "admin.key").read_text(),
    )


def take_down(stack: Stack) -> None:
    started = time.monotonic()
    stack("down", "-v", "--remove-orphans")
    if left := leftovers():
        raise FailedError(f"down has left {left}")
    say(f"down: nothing left, after {time.monotonic() - started:.0f} s")


def run(command: tuple[str, ...], base: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        stack = make_stack(command, base, Path(folder) / "secrets")
        build(stack)
        try:
            check(stack)
        except FailedError:
            say(output([*stack.compose, "logs", "--no-color", "--tail=40"], stack.environment))
            raise
        finally:
            take_down(stack)


def say(what: str) -> None:
    print(f"test_compose: {what}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--debootstrap", action="store_true", help=f"make {BASE_IMAGE} and build on it")
    options = parser.parse_args()
    command = compose_command()
    if command is None:
        say("SKIPPED: no container engine here (docker info, docker compose or docker-compose)")
        return 0
    try:
        base = debootstrap() if options.debootstrap else os.environ.get("BASE_IMAGE", "python:3.11-slim-bookworm")
        run(command, base)
    except FailedError as error:
        say(f"FAILED: {error}")
        return 1
    say("PASSED; the images stay, for the next time: docker image ls 'tandem-*'")
    return 0


if __name__ == "__main__":
    sys.exit(main())
