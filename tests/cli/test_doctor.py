"""`tandem doctor` under real conditions: what is wrong is named, with what to do, and the exit status says so."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from cli.doctor import addresses, machine, rdma, versions, wire
from cli.doctor.checks import Status
from cli.doctor.model import check_memory_plan, find_capacity
from cli.doctor.servers import check_skew
from cli.main import main
from cli.settings import BUNDLED_MODEL
from common.config import (
    DType,
    EngineConfig,
    ModelConfig,
    NodeConfig,
    Protocol,
    Role,
    TransferConfig,
    check_node_config,
)
from common.errors import ConfigError
from common.keys import read_key_file
from common.tls import TlsConfig, server_context
from node.preflight import Card, Cuda
from tests.support.stack import command, free_port, running
from transfer.handshake import read_key

REPO = Path(__file__).resolve().parents[2]
Doctor = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    """(exit status, checks by name) of `tandem doctor` on free ports, without the write test unless asked for."""

    def run(*arguments: str, write: bool = False, ports: bool = True) -> tuple[int, dict[str, Any]]:
        free = ["--port", "0", "--disaggregation-bootstrap-port", "0"] if ports else []
        with pytest.raises(SystemExit) as ended:
            main(["doctor", "--json", *([] if write else ["--quick"]), *free, *arguments])
        report = json.loads(capsys.readouterr().out)
        assert report["ok"] == (ended.value.code == 0)
        checks = {check["name"]: check for check in report["checks"]}
        assert len(checks) == len(report["checks"])
        for check in checks.values():
            assert check["status"] in list(Status)
            assert bool(check["fix"]) == (check["status"] in ("error", "warning")), check
        return int(ended.value.code), checks  # type: ignore[arg-type]

    return run


def errors(checks: dict[str, Any]) -> set[str]:
    return {name for name, check in checks.items() if check["status"] == "error"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the bundled model, to be broken."""
    copied = tmp_path / "model"
    shutil.copytree(BUNDLED_MODEL, copied)
    return copied


def split(folder: Path) -> None:
    """Its weights in two files with an index."""
    tensors = sorted(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    placed = {}
    for number, part in enumerate((tensors[::2], tensors[1::2])):
        save_file(dict(part), folder / f"part-{number}.safetensors")
        placed |= dict.fromkeys(dict(part), f"part-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


# This machine


def test_a_machine_without_cards_and_rdma_is_well(doctor: Doctor) -> None:
    status, checks = doctor(write=True)
    assert (status, errors(checks)) == (0, set())
    expected = {
        "python", "tandem", "torch", "triton", "mooncake", "cpu", "memory", "shm", "temporary_folder", "open_files",
        "cuda", "device", "rdma", "memlock", "memory_plan",
        "model", "model.weights", "model.tokenizer", "model.chat_template",
        "port.http", "port.bootstrap", "api_keys", "tls", "address.transfer", "address.bootstrap", "cluster_key",
        "transport.self",
    }  # fmt: skip
    assert set(checks) == expected
    assert {checks[name]["status"] for name in ("cuda", "rdma", "memlock", "triton")} == {"not_applicable"}
    write = checks["transport.self"]
    assert write["data"]["transport"] == "mooncake-tcp"
    assert write["data"]["gb_per_s"] > 0.001
    assert "digest right" in write["found"]


def test_the_memory_plan_is_the_engines(doctor: Doctor) -> None:
    options = ["--max-total-tokens", "4096", "--max-mamba-cache-size", "9", "--max-running-requests", "4"]
    _, checks = doctor("--role", "decode", *options)
    plan = checks["memory_plan"]["data"]
    assert (plan["pages"], plan["page_bytes"], plan["slots"], plan["slot_bytes"]) == (255, 32768, 8, 655360 + 46080)
    assert (plan["max_requests"], plan["mean_tokens"], plan["longest_tokens"]) == (4, 63 * 16, 255 * 16)
    _, twice = doctor("--role", "decode", "--dp-size", "2", *options)
    more = twice["memory_plan"]["data"]["needed_bytes"] - plan["needed_bytes"]
    assert more == plan["needed_bytes"] - plan["weights_bytes"]  # which ranks on the CPU share
    _, few = doctor("--max-mamba-cache-size", "9", "--max-running-requests", "10")
    assert few["memory_plan"]["status"] == "warning"
    assert "8 slots for 10 requests" in few["memory_plan"]["found"]


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["--max-mamba-cache-size", "9000000"], "--max-mamba-cache-size "),
        (["--max-total-tokens", "9000000000"], "--max-total-tokens "),
    ],
)
def test_too_little_memory(doctor: Doctor, options: list[str], advice: str) -> None:
    """The advice fits: with it nothing is wrong."""
    status, checks = doctor("--role", "unified", *options)
    assert (status, errors(checks)) == (1, {"memory_plan"})
    fix = checks["memory_plan"]["fix"]
    assert fix.startswith(advice)
    lower = int(int(fix.split()[1]) * 0.9)  # what is free changes meanwhile
    assert doctor("--role", "unified", options[0], str(lower))[0] == 0


def test_more_ranks_than_fit(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small their pools are."""
    monkeypatch.setattr("cli.doctor.model.available_memory", lambda: 8 << 30)
    options = ["--role", "decode", "--max-total-tokens", "4096", "--max-mamba-cache-size", "9"]
    options += ["--max-running-requests", "4"]
    _, checks = doctor(*options, "--dp-size", "64")
    advice = re.match(r"--dp-size (\d+) at most", checks["memory_plan"]["fix"])
    assert advice is not None
    assert "memory_plan" not in errors(doctor(*options, "--dp-size", advice[1])[1])
    assert "memory_plan" in errors(doctor(*options, "--dp-size", str(int(advice[1]) + 1))[1])


def test_roles_have_the_checks_that_matter_to_them(doctor: Doctor) -> None:
    status, unified = doctor("--role", "unified")
    assert status == 0
    assert "port.bootstrap" not in unified and "address.transfer" not in unified
    status, router = doctor("--role=router", "--port", "0", "--admin-port", "0", ports=False)
    assert status == 0
    assert "model" not in router and {"port.http", "port.admin"} <= set(router)


def test_a_terminal_gets_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """In 80 columns no line is longer; where there is no terminal, plain lines."""
    words = ["doctor", "--role", "router", "--port", "0", "--decode", "http://127.0.0.1:1"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 1
    assert re.search(r"^error    worker.decode.127.0.0.1:1: .*\n         -> start it", capsys.readouterr().out, re.M)
    script = ["script", "-qec", f"stty cols 80; {' '.join(command(*words))}", "/dev/null"]
    shown = subprocess.run(script, capture_output=True, text=True, timeout=90)
    assert shown.returncode == 1
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.stdout).replace("\r", "\n")
    assert max(map(len, text.splitlines())) <= 80
    assert "→ start it" in text


# The model's folder


def test_a_missing_shard(doctor: Doctor, folder: Path) -> None:
    split(folder)
    assert doctor("--model-path", str(folder))[0] == 0
    (folder / "part-1.safetensors").unlink()
    status, checks = doctor("--model-path", str(folder))
    assert (status, errors(checks)) == (1, {"model.weights"})
    assert checks["model.weights"]["data"]["missing"] == ["part-1.safetensors"]


def truncated(folder: Path) -> str:
    split(folder)
    os.truncate(folder / "part-0.safetensors", 500_000)
    return "part-0.safetensors"


def bad_json(folder: Path) -> str:
    (folder / "config.json").write_text("{")
    return "config.json: not valid JSON"


def no_tokenizer(folder: Path) -> str:
    (folder / "tokenizer.json").unlink()
    return "no tokenizer.json"


def another_architecture(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    return 'model_type is "llama"'


def another_shape(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 1030}))
    return "its shape is [1024, "


def lost_tensor(folder: Path) -> str:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: value for name, value in tensors.items() if "norm_f" not in name}, folder / "model.safetensors")
    return "norm_f.weight: missing"


def no_weights(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    return "neither model.safetensors nor"


def bad_template(folder: Path) -> str:
    (folder / "chat_template.jinja").write_text("{% if")
    return "no chat template: line 1"


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (truncated, "model.weights"),
        (bad_json, "model"),
        (no_tokenizer, "model.tokenizer"),
        (another_architecture, "model"),
        (another_shape, "model.weights"),
        (lost_tensor, "model.weights"),
        (no_weights, "model.weights"),
        (bad_template, "model.chat_template"),
    ],
)
def test_a_broken_folder(doctor: Doctor, folder: Path, harm: Callable[[Path], str], named: str) -> None:
    said = harm(folder)
    status, checks = doctor("--model-path", str(folder))
    assert (status, errors(checks)) == (1, {named})
    assert said in checks[named]["found"]
    assert checks[named]["fix"]


def test_a_folder_without_a_chat_template_is_a_warning(doctor: Doctor, folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    status, checks = doctor("--model-path", str(folder))
    assert (status, checks["model.chat_template"]["status"]) == (0, "warning")


# Ports, addresses, limits


def test_a_port_that_is_taken_names_who_has_it(doctor: Doctor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, checks = doctor("--bootstrap-port", port)
    assert (status, errors(checks)) == (1, {"port.bootstrap"})
    assert f"process {os.getpid()} " in checks["port.bootstrap"]["fix"]


def test_two_listeners_at_one_port(doctor: Doctor) -> None:
    port = str(free_port())
    status, checks = doctor("--port", port, "--bootstrap-port", port)
    assert (status, errors(checks)) == (1, {"port.bootstrap"})
    assert checks["port.bootstrap"]["found"].endswith(f"bootstrap-port {port}: --port is the same")
    assert "process" not in checks["port.bootstrap"]["fix"]  # to end the doctor is no help


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_that_all_may_reach_but_no_peer(doctor: Doctor, role: str) -> None:
    status, checks = doctor("--role", role, "--host", "0.0.0.0", "--bootstrap-host", "0.0.0.0")
    check = checks["address.transfer"]
    assert (status, check["status"]) == (0, "warning")
    assert "peers on other hosts are told" in check["found"] and "--transfer-host" in check["fix"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["decode"], "decode: say --role decode"),
        (["--serve", "0", "--peer", "127.0.0.1:1"], "--peer, --serve: one of them"),
    ],
)
def test_words_that_contradict_each_other(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_no_model_path_at_all(doctor: Doctor) -> None:
    status, checks = doctor("--model-path", "")
    assert (status, errors(checks), checks["model"]["found"]) == (1, {"model"}, "(empty): no such folder")


def test_addresses_that_others_cannot_reach(doctor: Doctor) -> None:
    status, checks = doctor("--transfer-host", "203.0.113.9", "--host", "no-such-host.invalid")
    assert status == 1
    assert {"port.http", "address.transfer", "address.bootstrap", "cluster_key"} == errors(checks)
    assert "does not resolve" in checks["port.http"]["fix"]
    assert "not an address of this machine" in checks["address.transfer"]["found"]
    assert "look for this node on themselves" in checks["address.bootstrap"]["found"]
    assert "--cluster-key-file" in checks["cluster_key"]["fix"]


def test_a_cluster_key_that_cannot_be_used(doctor: Doctor, tmp_path: Path) -> None:
    assert errors(doctor("--cluster-key-file", str(tmp_path / "none"))[1]) == {"cluster_key"}
    (tmp_path / "key").write_text("short")
    status, checks = doctor("--cluster-key-file", str(tmp_path / "key"))
    assert (status, errors(checks)) == (1, {"cluster_key"})


def test_a_key_that_others_can_read(doctor: Doctor, tmp_path: Path) -> None:
    """Files that make_secrets.sh makes can be read by all who reach them, which its folder prevents."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        made = folder / "secrets"
        subprocess.run([REPO / "deploy" / "make_secrets.sh", made], check=True, timeout=30)
        folder.chmod(0o755)
        key = ["--cluster-key-file", str(made / "cluster.key")]
        assert doctor(*key)[1]["cluster_key"]["status"] == "ok"
        made.chmod(0o755)
        check = doctor(*key)[1]["cluster_key"]
        assert check["status"] == "warning" and "chmod 700" in check["fix"]
        (made / "cluster.key").chmod(0o640)
        assert doctor(*key)[1]["cluster_key"]["status"] == "ok"
    finally:
        shutil.rmtree(folder)


def test_a_mounted_secret_is_seen_in_its_container_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key = Path(tempfile.mkdtemp(dir="/tmp")) / "key"
    try:
        key.parent.chmod(0o755)
        key.touch(0o644)
        assert addresses.anybody_can_read(key)
        monkeypatch.setattr(addresses, "_SECRETS", key.parent)
        assert not addresses.anybody_can_read(key)
    finally:
        shutil.rmtree(key.parent)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("where", ["file", "folder"])
def test_a_file_that_this_user_may_not_read_says_which_user(where: str) -> None:
    """Of keys and certificates, be it the file or its folder."""
    node = NodeConfig(role=Role.DECODE, model=ModelConfig(path=str(BUNDLED_MODEL)))
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        path = folder / "file"
        path.write_text("a key of at least sixteen bytes")
        path.chmod(0o600 if where == "file" else 0o644)
        folder.chmod(0o755 if where == "file" else 0o700)
        tries: list[Callable[[], object]] = [
            lambda: read_key(str(path)),
            lambda: read_key_file(str(path), "--api-key-file"),
            lambda: server_context(TlsConfig(certfile=str(path))),
        ]
        if where == "folder":
            transfer = TransferConfig(cluster_key_file=str(path))
            tries.append(lambda: check_node_config(msgspec.structs.replace(node, transfer=transfer)))
        for attempt in tries:
            os.seteuid(10001)
            try:
                with pytest.raises(ConfigError, match="user 10001, as which this process runs, must be able to read"):
                    attempt()
            finally:
                os.seteuid(0)
    finally:
        shutil.rmtree(folder)


def test_keys_and_certificates(doctor: Doctor, tmp_path: Path) -> None:
    status, checks = doctor("--host", "0.0.0.0")
    assert (checks["api_keys"]["status"], checks["tls"]["status"]) == ("warning", "not_applicable")
    (tmp_path / "none").touch()
    status, checks = doctor("--api-key-file", str(tmp_path / "none"), "--ssl-certfile", str(tmp_path / "none"))
    assert (status, errors(checks)) == (1, {"api_keys", "tls"})
    router = ["--role", "router", "--port", "0", "--admin-api-key", "a-long-secret-key-of-the-router"]
    assert doctor(*router, ports=False)[1]["api_keys"]["found"] == "clients need a key"


def bounded(limit: int, bound: int, *arguments: str) -> dict[str, Any]:
    """In a process with this limit, and without the privilege that lifts that of locked memory."""

    def lower() -> None:
        ctypes.CDLL(None).prctl(24, 14, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_IPC_LOCK: in force after exec
        resource.setrlimit(limit, (bound, bound))

    words = command("doctor", "--json", "--quick", "--port", "0", "--bootstrap-port", "0", *arguments)
    done = subprocess.run(words, preexec_fn=lower, capture_output=True, text=True, timeout=90)
    assert done.returncode == 1, done.stderr
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def test_a_small_memlock_matters_to_rdma_alone(doctor: Doctor) -> None:
    checks = bounded(resource.RLIMIT_MEMLOCK, 65536, "--transfer-protocol", "rdma")
    assert errors(checks) == {"memlock", "rdma"}
    assert checks["memlock"]["found"].startswith("64 KiB, pages and slots are 214 MiB")
    assert "ulimit -l unlimited" in checks["memlock"]["fix"]
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, before[1]))
    try:
        status, checks = doctor()
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
    assert (status, checks["memlock"]["status"]) == (0, "not_applicable")


def test_few_open_files() -> None:
    assert errors(bounded(resource.RLIMIT_NOFILE, 100)) == {"open_files"}


def test_a_read_only_container(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    status, checks = doctor()
    assert (status, errors(checks)) == (1, {"temporary_folder"})


def test_what_a_container_may_use(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("600000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 100000\n")
    assert machine.available_cores(tmp_path) == 0.5
    assert machine.available_memory(tmp_path) == 500_000


def test_old_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions.check_python((3, 10)).fix is not None
    assert versions.check_python((3, 11)).fix is None
    there = {"torch": "2.5.1", "triton": "3.5.0", "mooncake-transfer-engine-non-cuda": "0.3.7.post2"}
    monkeypatch.setattr("importlib.metadata.version", there.__getitem__)
    monkeypatch.setattr("importlib.metadata.requires", lambda _: ["filelock", "triton==3.7.0; sys_platform == 'linux'"])

    def found() -> list[Status]:
        node = NodeConfig(role=Role.DECODE, model=ModelConfig(path="x"))
        checks = versions.check_torch(True), versions.check_triton(True), versions.check_mooncake(node)
        return [check.status for check in checks]

    assert found() == [Status.ERROR] * 3
    there["torch"] = "2.13.0+cpu"
    assert "-c deploy/constraints-gpu.txt -e '.[cuda13,gpu]'" in (versions.check_torch(True).fix or "")
    there.update({"torch": "2.13.0+cpu", "triton": "3.9.0", "mooncake-transfer-engine-non-cuda": "0.3.13.post1"})
    assert found() == [Status.ERROR, Status.WARNING, Status.OK]
    there.update({"torch": "2.13.0+cu130", "triton": "3.7.0"})
    assert found() == [Status.OK] * 3


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--context-length 99999", "model"),
        ("--chunked-prefill-size 3", "memory_plan"),
        ("--device banana", "device"),
    ],
)
def test_settings_that_only_the_engine_can_refuse(doctor: Doctor, options: str, named: str) -> None:
    status, checks = doctor(*options.split())
    assert (status, errors(checks)) == (1, {named})


# Cards: this machine has none; driver and torch are made up


CARD = Card(name="H200", number=0, free_bytes=140 << 30, total_bytes=141 << 30, capability="9.0")


@pytest.mark.parametrize(
    ("driver", "cuda", "found"),
    [
        (None, Cuda("13.0", (CARD,), ""), {"cuda": "error"}),
        ("13.0", Cuda(None, (), "built without"), {"cuda": "error"}),
        ("13.0", Cuda("13.0", (), "none visible"), {"cuda": "error"}),
        ("12.8", Cuda("13.0", (CARD,), ""), {"cuda": "error", "cuda.0": "ok", "cuda.1": "error"}),
        ("13.1", Cuda("13.0", (CARD, CARD._replace(number=1)), ""), {"cuda": "ok", "cuda.0": "ok", "cuda.1": "ok"}),
        (
            "13.0",
            Cuda("13.0", (CARD, CARD._replace(number=1, free_bytes=1 << 30)), ""),
            {"cuda": "ok", "cuda.0": "ok", "cuda.1": "warning"},
        ),
    ],
)
def test_cards(monkeypatch: pytest.MonkeyPatch, driver: str | None, cuda: Cuda, found: dict[str, str]) -> None:
    monkeypatch.setattr(machine, "driver_version", lambda: driver)
    config = NodeConfig(
        role=Role.UNIFIED,
        model=ModelConfig(path=str(BUNDLED_MODEL), device="cuda", dtype=DType.BFLOAT16),
        engine=EngineConfig(dp_size=2),
    )
    checks = machine.check_cuda(config, lambda: cuda)
    assert {check.name: check.status for check in checks} == found
    plans = check_memory_plan(config, find_capacity(config), cuda)
    expected = {f"memory_plan.{card.number}": "ok" if card.free_bytes > 2 << 30 else "error" for card in cuda.cards}
    assert {check.name: check.status for check in plans} == (expected or {"memory_plan": "not_applicable"})


def test_clocks_that_differ() -> None:
    class Ahead:
        def ask(self, what: str) -> dict[str, float]:
            assert what == "clock"
            return {"time_s": time.time() + 3}

    skew_s, error_s = wire.clock(Ahead())  # type: ignore[arg-type]
    assert abs(skew_s - 3) < 0.1 + error_s
    check = check_skew("peer.clock", skew_s, error_s)
    assert check.status is Status.WARNING and "ahead of ours" in check.found and "NTP" in (check.fix or "")
    assert check_skew("peer.clock", -3.0, 4.0).status is Status.OK  # not to be told from none


# RDMA: this machine has none; the kernel's files are made up


def device(sysfs: Path, name: str, state: str, gids: dict[str, str]) -> None:
    port = sysfs / name / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (port / "gid_attrs" / "types").mkdir(parents=True)
    for file, text in {"state": state, "link_layer": "Ethernet", "rate": "100 Gb/sec (4X EDR)"}.items():
        (port / file).write_text(text + "\n")
    for index, (address, kind) in enumerate(gids.items()):
        (port / "gids" / str(index)).write_text(address + "\n")
        (port / "gid_attrs" / "types" / str(index)).write_text(kind + "\n")


GID = {"fe80:0000:0000:0000:0000:0000:0000:0001": "IB/RoCE v1", "0000:0000:0000:0000:0000:ffff:0a00:0001": "RoCE v2"}
ZERO = {"0000:0000:0000:0000:0000:0000:0000:0000": ""}


def rdma_node(device: str) -> Any:
    transfer = TransferConfig(protocol=Protocol.RDMA, device=device)
    return NodeConfig(role=Role.DECODE, model=ModelConfig(path="x"), transfer=transfer)


def test_rdma_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device(tmp_path, "mlx5_0", "4: ACTIVE", GID)
    device(tmp_path, "mlx5_1", "1: DOWN", GID)
    device(tmp_path, "mlx5_2", "4: ACTIVE", ZERO)
    files = tmp_path / "dev"
    files.mkdir()

    def found(asked: str) -> dict[str, Status]:
        return {check.name: check.status for check in rdma.check_rdma(rdma_node(asked), tmp_path, files)}

    assert found("mlx5_0") == {"rdma.verbs": Status.ERROR, "rdma.mlx5_0/1": Status.OK}
    (files / "uverbs0").touch()
    assert found("mlx5_0") == {"rdma.mlx5_0/1": Status.OK}
    assert found("mlx5_0,mlx5_9") == {"rdma.mlx5_9": Status.ERROR, "rdma.mlx5_0/1": Status.OK}
    assert found("") == {
        "rdma.mlx5_0/1": Status.OK,
        "rdma.mlx5_1/1": Status.WARNING,
        "rdma.mlx5_2/1": Status.ERROR,
    }
    assert found("mlx5_1") == {"rdma.mlx5_1/1": Status.ERROR}
    monkeypatch.setenv("MC_GID_INDEX", "7")
    assert found("mlx5_0") == {"rdma.mlx5_0/1": Status.ERROR}


def test_a_transport_that_cannot_work(doctor: Doctor) -> None:
    status, checks = doctor("--transfer-protocol", "rdma", "--transfer-device", "mlx5_0", write=True)
    assert status == 1
    assert {"rdma", "transport.self"} <= errors(checks)
    assert "Mooncake did not start" in checks["transport.self"]["found"]
    assert "--transfer-protocol tcp" in checks["transport.self"]["fix"]
    status, checks = doctor("--transfer-host", "203.0.113.9", write=True)
    assert {"address.transfer", "transport.self"} <= errors(checks)


def test_a_write_that_changes_bytes_is_noticed(doctor: Doctor) -> None:
    status, checks = doctor("--transport", "loopback", "--fault-flip", "kv", write=True)
    assert (status, errors(checks)) == (1, {"transport.self"})
    assert "other bytes arrived" in checks["transport.self"]["found"]


# Options


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--role nurse", "'nurse' is not one of"),
        ("--page-size 0", "--page-size 0: at least 1"),
        ("--transfer-host 0.0.0.0", "--transfer-host 0.0.0.0"),
        ("--engine sglang", "--engine sglang: the doctor knows"),
        ("--model-path /nowhere --page-size 0", "--page-size 0: at least 1"),
        ("--peer nowhere", "nowhere is not HOST:PORT"),
        ("--role router --page-size 16", "No such option"),
        ("--role router --port 70000", "--port 70000: 0 to 65535"),
        ("--role unified --serve 0", "--serve: only with --role prefill or decode"),
        ("--router ftp://x", "--router ftp://x: a URL"),
        ("--host 0.0.0.0 --router http://127.0.0.1:1", "--advertise-url: needed with --host 0.0.0.0"),
    ],
)
def test_wrong_options_exit_2(capsys: pytest.CaptureFixture[str], arguments: str, said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments.split()])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


# Routers and workers


@contextmanager
def answering(bodies: dict[str, Any], key: str = "") -> Iterator[str]:
    """The URL of a server with these JSON answers by path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = not key or self.headers.get("authorization") == f"Bearer {key}"
            body = json.dumps(bodies.get(self.path, {})).encode()
            self.send_response(200 if allowed and self.path in bodies else 404 if allowed else 401)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_router_that_cannot_be_reached(doctor: Doctor) -> None:
    status, checks = doctor("--router", f"http://127.0.0.1:{free_port()}")
    (name,) = errors(checks)
    assert status == 1 and name.startswith("router.127.0.0.1:")
    assert "start the router" in checks[name]["fix"]


def test_a_real_router(doctor: Doctor, tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with running("router", ["router", "--port", str(port)], url, tmp_path):
        deadline = time.monotonic() + 30
        while (status := doctor("--router", url)[0]) and time.monotonic() < deadline:
            time.sleep(0.1)
        status, checks = doctor("--router", url)
        assert status == 0
        assert checks[f"router.127.0.0.1:{port}"]["data"] == {"workers": 0, "alive": 0}
        assert abs(checks[f"router.127.0.0.1:{port}.clock"]["data"]["skew_s"]) < 1
        assert checks[f"router.127.0.0.1:{port}.fingerprint"]["found"].endswith("none there yet")


def test_fingerprints_and_clock_of_a_router(doctor: Doctor, tmp_path: Path) -> None:
    ours = {"fingerprint": "", "alive": True}
    body = {"now": time.time() + 100, "workers": [ours]}
    with answering({"/status.json": body}, key="sesame-sesame-sesame") as url:
        place = url.removeprefix("http://")
        assert "asks for a key" in doctor("--router", url)[1][f"router.{place}"]["found"]
        keys = tmp_path / "keys"
        keys.write_text("admin doctor sesame-sesame-sesame\n")
        keys.chmod(0o600)
        options = ["--router", url, "--router-api-key-file", str(keys)]
        status, checks = doctor(*options)
        assert status == 0
        assert 90 < checks[f"router.{place}.clock"]["data"]["skew_s"] < 110
        assert checks[f"router.{place}.clock"]["status"] == "warning"
        ours["fingerprint"] = checks[f"router.{place}.fingerprint"]["data"]["own"]
        body["now"] = time.time()
        status, checks = doctor(*options)
        assert (status, checks[f"router.{place}.fingerprint"]["status"]) == (0, "ok")
        status, checks = doctor(*options, "--page-size", "32")
        assert (status, errors(checks)) == (1, {f"router.{place}.fingerprint"})


def test_workers_of_a_router(doctor: Doctor) -> None:
    bodies = {"disaggregation_mode": "prefill", "fingerprint": "a", "version": "0"}
    with (
        answering({"/server_info": bodies}) as prefill,
        answering({"/server_info": bodies | {"disaggregation_mode": "decode", "fingerprint": "b"}}) as decode,
    ):
        router = ["--role", "router", "--port", "0"]
        status, checks = doctor(*router, "--prefill", prefill, "1", "--decode", decode, ports=False)
        assert (status, checks["workers.fingerprints"]["status"]) == (0, "warning")
        status, checks = doctor(*router, "--prefill", decode, "1", "--decode", prefill, ports=False)
        assert (status, len(errors(checks))) == (1, 2)


# Peers


@contextmanager
def serving(*arguments: str, launcher: tuple[str, ...] = ()) -> Iterator[tuple[str, int]]:
    """The address of a `tandem doctor --serve`."""
    process = subprocess.Popen(
        [*launcher, *command("doctor", "--serve", "0", *arguments)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline().decode()
        host, _, port = said.partition(" at ")[2].partition(";")[0].partition(":")
        assert ("; on this host" if host == "127.0.0.1" else "; on another") in said
        yield host, int(port)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
        process.stdout.close()


def test_a_peer_that_is_not_there(doctor: Doctor) -> None:
    status, checks = doctor("--peer", f"127.0.0.1:{free_port()}")
    assert (status, errors(checks)) == (1, {"peer.connect"})
    assert "tandem doctor --serve" in checks["peer.connect"]["fix"]


def test_something_else_at_the_peers_port(doctor: Doctor) -> None:
    def greet() -> None:
        with other.accept()[0] as caller:
            caller.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

    with socket.create_server(("127.0.0.1", 0)) as other:
        thread = Thread(target=greet)
        thread.start()
        status, checks = doctor("--peer", f"127.0.0.1:{other.getsockname()[1]}")
        thread.join()
    assert (status, errors(checks)) == (1, {"peer.connect"})
    assert "is no tandem doctor" in checks["peer.connect"]["found"]
    assert checks["peer.connect"]["found"].count("127.0.0.1") == 1
    assert "`tandem doctor --serve`" in checks["peer.connect"]["fix"]


def test_a_peers_port_that_says_nothing(doctor: Doctor) -> None:
    def hang_up() -> None:
        other.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as other:
        thread = Thread(target=hang_up)
        thread.start()
        _, checks = doctor("--peer", f"127.0.0.1:{other.getsockname()[1]}")
        thread.join()
    assert checks["peer.connect"]["found"].count("127.0.0.1") == 1
    assert "`tandem doctor --serve`" in checks["peer.connect"]["fix"]


def test_a_peer_with_another_key_or_transport(doctor: Doctor, tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).write_text(f"a long key of the {name} cluster")
        (tmp_path / name).chmod(0o600)
    one = ["--cluster-key-file", str(tmp_path / "one"), "--transport", "loopback"]
    with serving(*one) as (host, port):
        peer = ["--transport", "loopback", "--peer", f"{host}:{port}"]
        status, checks = doctor(*peer, "--cluster-key-file", str(tmp_path / "other"))
        assert (status, errors(checks)) == (1, {"peer.connect"})
        assert "the cluster keys differ" in checks["peer.connect"]["found"]
        assert "--cluster-key-file" in checks["peer.connect"]["fix"]
        assert "only one of the two" in doctor(*peer)[1]["peer.connect"]["found"]
        status, checks = doctor("--peer", f"{host}:{port}", *one[:2])
        assert (status, errors(checks)) == (1, {"peer.fit"})
        assert "mooncake-tcp here, loopback there" in checks["peer.fit"]["found"]
        status, checks = doctor(*peer, *one)
        assert (status, errors(checks)) == (0, set())
        assert {"peer.connect", "peer.clock", "peer.fit", "peer.write", "peer.read"} <= set(checks)
        status, checks = doctor(*peer, *one, "--page-size", "32", "--verify", "off", "--mamba-ssm-dtype", "bfloat16")
        assert (status, errors(checks)) == (1, {"peer.fit"})
        for each in ("--page-size: 32 here, 16", "--verify: off here, digest", "--mamba-ssm-dtype: bfloat16 here"):
            assert each in checks["peer.fit"]["found"]
        other = tmp_path / "model"
        shutil.copytree(BUNDLED_MODEL, other)
        tensors = load_file(other / "model.safetensors")
        save_file(
            dict(tensors, **{name: value + 1 for name, value in list(tensors.items())[:1]}), other / "model.safetensors"
        )
        status, checks = doctor(*peer, *one, "--model-path", str(other))
        assert (status, errors(checks)) == (1, {"peer.fit"})
        assert "fingerprint: " in checks["peer.fit"]["found"] and "another model" in checks["peer.fit"]["found"]


@contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Network namespaces joined by a wire: 10.94.7.1 and 10.94.7.2. Skips where there can be none."""
    here, there = names = f"doctor{os.getpid()}a", f"doctor{os.getpid()}b"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", here, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", there)
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.94.7.{number}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=10)


def test_two_hosts_measure_wire_and_clocks(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("a key of at least sixteen bytes")
    key.chmod(0o600)
    options = ["--cluster-key-file", str(key)]
    with two_hosts() as (here, there):
        launcher = ("ip", "netns", "exec", there)
        with serving("--role", "decode", "--transfer-host", "10.94.7.2", *options, launcher=launcher) as (host, port):
            assert host == "10.94.7.2"
            words = ["--transfer-host", "10.94.7.1", "--bootstrap-host", "10.94.7.1", "--peer", f"{host}:{port}"]
            done = subprocess.run(
                ["ip", "netns", "exec", here, *command("doctor", "--quick", "--json", *words, *options)],
                capture_output=True,
                text=True,
                timeout=90,
            )
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert (done.returncode, errors(checks)) == (0, set())
    assert checks["peer.write"]["data"]["gb_per_s"] > 0.001
    assert checks["peer.read"]["data"]["gb_per_s"] > 0.001
    assert abs(checks["peer.clock"]["data"]["skew_s"]) < 0.1 + checks["peer.clock"]["data"]["error_s"]
    assert checks["address.transfer"]["found"] == "10.94.7.1"
