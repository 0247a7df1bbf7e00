"""A model folder with a tokenizer only, and nodes whose front is real and whose ranks are fake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from common.config import ModelConfig, NodeConfig, Role, ServerConfig, TransferConfig
from tests.support.stack import free_port

START_TIMEOUT_S = 20.0
TEXTS = ["Question: How many apples has Tom?\nAnswer: Tom has 12 apples.", "naïve café — €5 😀 日本語 Привет"]


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer-only")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


class FakeNode:
    """A running front and what it printed."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.log = log

    def ranks(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def post(self, body: object, path: str = "/generate") -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=20)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=20)

    def state(self, rank: int = 0) -> dict[str, object]:
        return dict(self.get("/server_info").json()["internal_states"][rank])

    def events(self, body: dict[str, object]) -> list[object]:
        """The parsed `data:` lines of a stream; its end marker stays a string."""
        with httpx.stream("POST", f"{self.url}/generate", json={**body, "stream": True}, timeout=20) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


def node_config(
    model_path: str, role: Role, *, port: int | None = None, first_token_s: float = 60.0, drain_s: float = 30.0
) -> NodeConfig:
    return NodeConfig(
        role=role,
        model=ModelConfig(path=model_path),
        transfer=TransferConfig(first_token_timeout_s=first_token_s, liveness_timeout_s=2.0),
        server=ServerConfig(
            port=port or free_port(),
            bootstrap_port=free_port(),
            bootstrap_host="127.0.0.1",
            max_body_bytes=100_000,
            upload_timeout_s=1.0,
            drain_timeout_s=drain_s,
        ),
    )


def spawn(config: NodeConfig, log: Path, *, mode: str = "ok", num_ranks: int = 1) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("serve_fake.py")), mode, str(num_ranks)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(config))
    process.stdin.close()
    return process


@contextmanager
def fake_node(config: NodeConfig, log: Path, *, mode: str = "ok", num_ranks: int = 1) -> Iterator[FakeNode]:
    process = spawn(config, log, mode=mode, num_ranks=num_ranks)
    try:
        url = f"http://127.0.0.1:{config.server.port}"
        wait_for(lambda: process.poll() is not None or is_up(url))
        assert process.poll() is None, log.read_text()
        yield FakeNode(process, url, log)
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> int:
    """Stop a front as its user would who is in a hurry; kill it and its ranks when that does not help. Returns the exit
    code."""
    ranks = psutil.Process(process.pid).children() if process.poll() is None else []
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(15)
    except subprocess.TimeoutExpired:
        for pid in [process.pid, *(rank.pid for rank in ranks)]:
            os.kill(pid, signal.SIGKILL)
        process.wait()
        raise


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def wait_for(condition: Callable[[], bool], within_s: float = START_TIMEOUT_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def unified(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeNode]:
    with fake_node(node_config(model_path, Role.UNIFIED), tmp_path_factory.mktemp("unified") / "log") as node:
        yield node


@pytest.fixture(scope="session")
def prefill(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeNode]:
    with fake_node(node_config(model_path, Role.PREFILL), tmp_path_factory.mktemp("prefill") / "log") as node:
        yield node


@pytest.fixture(scope="session")
def decode(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeNode]:
    """Two ranks."""
    config = node_config(model_path, Role.DECODE)
    with fake_node(config, tmp_path_factory.mktemp("decode") / "log", num_ranks=2) as node:
        yield node
