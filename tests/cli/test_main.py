"""The command line: what options become, and how what cannot work is refused."""

from __future__ import annotations

import runpy
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import router.app
from cli.main import main
from cli.settings import BUNDLED_MODEL, NODE_SETTINGS, node_config
from common.config import LoopbackFaults, ModelConfig, NodeConfig, Protocol, Role, RouterConfig, WorkerAddress


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """(exit status, what stands on stderr), which is one line."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr().err
    assert said.startswith("tandem: error: ")
    assert said.count("\n") == 1
    assert isinstance(ended.value.code, int)
    return ended.value.code, said.removeprefix("tandem: error: ").strip()


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """A router takes them over, here in the process of the tests."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The configurations that nodes and routers would have been started with."""
    configs: list[Any] = []
    front = types.ModuleType("node.front")
    front.__dict__["serve"] = configs.append
    monkeypatch.setitem(sys.modules, "node.front", front)
    monkeypatch.setattr(router.app, "serve", lambda config, _: configs.append(config))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).touch()
    return configs


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0


def test_a_node_without_options_is_the_default_configuration(served: list[Any]) -> None:
    for role in Role:
        run(role.value)
        assert served.pop() == NodeConfig(role=role, model=ModelConfig(path=str(BUNDLED_MODEL)))


ALL_OPTIONS = """prefill
    --model-path model --dtype bfloat16 --mamba-ssm-dtype float32 --served-model-name x --device cpu:0
    --load-format dummy
    --host 0.0.0.0 --port 1 --bootstrap-host 10.0.0.1 --disaggregation-bootstrap-port 2 --log-level debug
    --max-body-bytes 12 --upload-timeout 13
    --page-size 32 --max-total-tokens 640 --max-mamba-cache-size 3 --max-running-requests 4
    --chunked-prefill-size 5 --context-length 6 --threads 7
    --transfer-protocol rdma --disaggregation-ib-device mlx5_0 --transfer-host 10.0.0.2 --verify full
    --bootstrap-timeout 8 --transfer-timeout 9 --first-token-timeout 10 --liveness-timeout 11"""


def test_options_reach_their_fields(served: list[Any], tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch()
    run(*ALL_OPTIONS.split(), "--cluster-key-file", str(key))
    (config,) = served
    model, engine, transfer, server = config.model, config.engine, config.transfer, config.server
    assert (model.path, model.dtype, model.ssm_dtype) == ("model", "bfloat16", "float32")
    assert (model.device, model.served_name, model.load_format) == ("cpu:0", "x", "dummy")
    assert (server.host, server.port, server.bootstrap_host, server.bootstrap_port) == ("0.0.0.0", 1, "10.0.0.1", 2)
    assert (server.log_level, server.max_body_bytes, server.upload_timeout_s) == ("debug", 12, 13)
    assert (engine.page_size, engine.max_total_tokens, engine.max_state_slots) == (32, 640, 3)
    assert (engine.max_running_requests, engine.chunked_prefill_size, engine.context_length) == (4, 5, 6)
    assert engine.threads == 7
    assert (transfer.protocol, transfer.device, transfer.host) == (Protocol.RDMA, "mlx5_0", "10.0.0.2")
    assert (transfer.verify, transfer.cluster_key_file) == ("full", str(key))
    assert (transfer.bootstrap_timeout_s, transfer.transfer_timeout_s) == (8, 9)
    assert (transfer.first_token_timeout_s, transfer.liveness_timeout_s) == (10, 11)


def test_faults_are_for_the_loopback_transport(served: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    faults = ["--fault-zero", "ssm", "--fault-every", "2", "--fault-delay", "0.5", "--fault-bandwidth", "1e6"]
    run("decode", "--model-path", "model", "--transport", "loopback", *faults)
    expected = LoopbackFaults(zero="ssm", every=2, delay_s=0.5, bandwidth_bytes_s=1e6)
    assert served[0].transfer.faults == expected
    said = refused(capsys, "decode", "--model-path", "model", *faults)
    assert said == (2, "--fault-zero: only with --transport loopback")


def test_every_field_of_a_node_has_an_option() -> None:
    fields = {(setting.section, setting.field) for setting in NODE_SETTINGS}
    config = NodeConfig(role=Role.DECODE, model=ModelConfig(path="x"))
    parts = {name: getattr(config, name) for name in ("model", "engine", "transfer", "server")}
    for section, part in {**parts, "faults": config.transfer.faults}.items():
        for field in part.__struct_fields__:
            assert (section, field) in fields or field in ("faults", "shared_weights")  # a front tells its ranks


def test_a_router(served: list[Any]) -> None:
    workers = ["--prefill", "http://a:1", "2", "--prefill", "http://b:3", "4", "--decode", "http://c:5"]
    times = ["--idle-timeout", "7", "--liveness-timeout", "8", "--upload-timeout", "9"]
    run("router", "--port", "6", *times, "--pd-disaggregation", *workers)
    assert served == [
        RouterConfig(
            port=6,
            idle_timeout_s=7.0,
            liveness_timeout_s=8.0,
            upload_timeout_s=9.0,
            prefill=(
                WorkerAddress(url="http://a:1", bootstrap_port=2),
                WorkerAddress(url="http://b:3", bootstrap_port=4),
            ),
            decode=(WorkerAddress(url="http://c:5"),),
        )
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("prefill --model-path /nowhere", "--model-path /nowhere: no such folder"),
        ("decode --page-size 0", "--page-size 0: at least 1"),
        ("decode --page-size x", "'--page-size': 'x'"),
        ("decode --dtype float64", "'float64' is not one of"),
        ("decode --max-mamba-cache-size 1", "--max-mamba-cache-size 1: at least 2"),
        ("decode --transfer-host 0.0.0.0", "--transfer-host 0.0.0.0"),
        ("decode --liveness-timeout 0", "--liveness-timeout 0.0"),
        ("decode --cluster-key-file /nowhere", "--cluster-key-file /nowhere"),
        ("unified --port 65536", "--port 65536"),
        ("unified --no-such-option", "--no-such-option"),
        ("router --state-file /nowhere/x", "--state-file /nowhere/x: No such file or directory"),
        ("decode --transfer-device mlx5_0", "--transfer-device mlx5_0: only with --transfer-protocol rdma"),
        (
            "prefill --ssm-wire-dtype float32 --mamba-ssm-dtype bfloat16",
            "--ssm-wire-dtype float32: the SSM state is bfloat16",
        ),
        ("prefill --ssm-wire-dtype int8", "'int8' is not one of"),
        ("decode --upload-timeout 0", "--upload-timeout 0.0: a positive number of seconds"),
        ("router --prefill http://a x", "--prefill takes a URL and the node's bootstrap port (1 to 65535), not x"),
        ("router --prefill http://a --decode http://b", "--prefill takes a URL and the node's bootstrap port"),
        ("router --prefill http://a", "--prefill takes a URL and the node's bootstrap port"),
        ("router --prefill http://a 99999 --decode http://b", "--prefill takes a URL"),
        ("up --threads 0", "--threads 0: at least 1"),
        ("up --model-path /nowhere", "--model-path /nowhere: no such folder"),
        ("up --port 65536", "--port 65536: 0 to 65535"),
        ("up --host 192.0.2.1", "--host 192.0.2.1: cannot listen there (Cannot assign requested address)"),
        ("up --host no.such.host.invalid", "--host no.such.host.invalid: cannot listen there"),
        ("generate", "give either TEXT or --example"),
        ("generate hi --example", "give either TEXT or --example"),
        ("generate hi --url foo", "--url foo: a URL such as http://127.0.0.1:30000"),
        ("generate hi --url http://[", "--url http://[: a URL such as"),
        ("generate hi --url http://a:99999", "--url http://a:99999: a URL such as"),
        ("generate hi --url ftp://a", "--url ftp://a: a URL such as"),
        ("doctor --port 99999", "--port 99999: 0 to 65535"),
        ("router --prefill http://a 1 --decode http://a", "--decode http://a: given more than once"),
        ("router --prefill a 1 --decode http://b", "--prefill a: a URL"),
        ("router --prefill http://a 1 --decode http://b --decode http://b/", "--decode http://b: given more than once"),
        ("router --prefill http://a 1 --decode http://b --max-body-bytes 0", "--max-body-bytes 0: at least 1"),
        ("router --prefill http://a 1 --decode http://b --drain-timeout inf", "--drain-timeout inf: a finite number"),
        ("up --start-timeout 0", "'--start-timeout'"),
        ("up --start-timeout nan", "nan is not a finite number"),
        ("gate gsm-mini --threshold nan", "nan is not a finite number"),
        ("gate gsm-mini --max-failed nan", "nan is not a finite number"),
        ("gate gsm-mini --timeout inf", "inf is not a finite number"),
        ("gate parity --baseline http://a --tie nan", "nan is not a finite number"),
        ("chaos --seconds 1 --fault kill-rank", "--seconds 1: too short for any fault at nodes"),
        ("no-such-command", "no-such-command"),
        ("bench no-such-benchmark", "no-such-benchmark"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], arguments: str, said: str) -> None:
    status, message = refused(capsys, *arguments.split())
    assert status == 2
    assert said in message


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = ["router", "--port", port, "--prefill", "http://127.0.0.1:1", "1", "--decode", "http://127.0.0.1:2"]
        status, message = refused(capsys, *arguments)
    assert status == 2
    assert message.startswith(f"--port {port}: ")


def test_the_settings_table_refuses_values_of_another_type() -> None:
    values = {setting.name: None for setting in NODE_SETTINGS}
    with pytest.raises(msgspec.ValidationError, match="Expected"):
        node_config(Role.DECODE, values | {"transfer__transport": "loopback"})


def test_help_and_version_exit_0(capsys: pytest.CaptureFixture[str]) -> None:
    run("--help")
    run("--version")
    run()
    run("prefill", "--help")
    assert "--fault-zero" not in capsys.readouterr().out


def test_help_shows_what_applies_to_the_role(capsys: pytest.CaptureFixture[str]) -> None:
    """All of them take all options nevertheless."""
    shown = {}
    for role in Role:
        run(role.value, "--help")
        shown[role] = capsys.readouterr().out
    for option, roles in {
        "--bootstrap-port": {Role.PREFILL},
        "--transfer-protocol": {Role.PREFILL, Role.DECODE},
        "--cluster-key-file": {Role.PREFILL, Role.DECODE},
        "--local-prefill-max-tokens": {Role.DECODE},
        "--mamba-track-interval": {Role.DECODE, Role.UNIFIED},
        "--max-running-requests": set(Role),
    }.items():
        assert {role for role in Role if option in shown[role]} == roles, option


def test_a_model_folder_without_a_tokenizer_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").touch()
    for command in ("up", "decode"):
        said = refused(capsys, command, "--model-path", str(tmp_path))
        assert said == (2, f"--model-path {tmp_path}: no tokenizer.json in it")


def test_it_runs_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["tandem", "--version"])
    monkeypatch.delitem(sys.modules, "cli.main")
    with pytest.raises(SystemExit):
        runpy.run_module("cli.main", run_name="__main__")
    assert "tandem, version" in capsys.readouterr().out


def test_a_process_whose_parent_is_gone_ends_at_once() -> None:
    command = [sys.executable, "-m", "cli.main", "router", "--parent-pid", "1"]
    command += ["--prefill", "http://127.0.0.1:1", "1", "--decode", "http://127.0.0.1:1", "--port", "0"]
    done = subprocess.run(command, cwd=BUNDLED_MODEL.parents[1], timeout=20, check=False)
    assert done.returncode == 0


def test_ctrl_c_is_how_a_router_ends() -> None:
    command = [sys.executable, "-m", "cli.main", "router", "--port", "0"]
    command += ["--prefill", "http://127.0.0.1:1", "1", "--decode", "http://127.0.0.1:2"]
    with subprocess.Popen(command, cwd=BUNDLED_MODEL.parents[1], stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        try:
            assert "router listens" in running.stderr.readline()
            time.sleep(0.3)
            running.send_signal(signal.SIGINT)
            assert running.wait(20) == 0
        finally:
            running.kill()
