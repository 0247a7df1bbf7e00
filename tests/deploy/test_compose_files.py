"""What the Compose files say, without a container engine: `make test-compose` runs one of them with one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest

from common.config import Protocol, TransportName
from node.registration import check_registration
from tests.deploy.files import DEPLOY, HOST, compose, node, parse, variables

OURS = ("compose.yaml", "compose.gpu.yaml", "compose.rdma.yaml")
SGLANG = ("compose.gpu.sglang.yaml", "compose.rdma.sglang.yaml")
STACKS = (*OURS, *SGLANG)
ALL = (*STACKS, "compose.observability.yaml", "compose.observability.host.yaml")
NODES = [(name, service) for name in OURS for service in compose(name)["services"] if service != "router"]
SGLANG_FLAGS: dict[str, list[str] | None] = json.loads((Path(__file__).parent / "sglang-0.5.17.json").read_text())
DRAIN_AND_STOP_S = 30 + 3 + 4 + 4
"""--drain-timeout, clients that do not read, and a rank until SIGTERM and until SIGKILL."""


def service(name: str, of: str) -> dict[str, Any]:
    found: dict[str, Any] = compose(name)["services"][of]
    return found


@pytest.mark.parametrize(("name", "of"), NODES)
def test_a_node_takes_its_settings(name: str, of: str, secrets: Path) -> None:
    config = node(service(name, of)["command"], secrets)
    check_registration(config.role, config.server)
    assert of.startswith(config.role.value)
    assert config.transfer.host not in ("0.0.0.0", "::", "")
    assert config.transfer.cluster_key_file and config.server.api_key_file


@pytest.mark.parametrize("name", STACKS)
def test_the_router_takes_its_settings(name: str) -> None:
    values = parse(service(name, "router")["command"])
    for url in [url for url, _ in values["prefill"]] + list(values["decode"]):
        assert "0.0.0.0" not in url
    assert values["api_key_file"]


def test_a_flag_that_is_not_there_is_found(secrets: Path) -> None:
    with pytest.raises(click.NoSuchOption):
        node([*service("compose.yaml", "prefill")["command"], "--no-such-flag=1"], secrets)


@pytest.mark.parametrize("name", ("compose.yaml", "compose.gpu.yaml"))
def test_the_router_names_the_nodes_of_its_file(name: str, secrets: Path) -> None:
    """Where a container is reached: by its own name, or on the host's loopback at the node's port."""
    services = compose(name)["services"]
    values = parse(services["router"]["command"])
    (prefill, bootstrap_port), *others = values["prefill"]
    expected = {}
    for of, said in services.items():
        if of != "router":
            config = node(said["command"], secrets)
            host = said.get("hostname", "127.0.0.1")
            expected[f"http://{host}:{config.server.port}"] = config
            assert config.transfer.host == host, "peers are told where it is"
    assert not others and {prefill, *values["decode"]} == set(expected)
    assert expected[prefill].server.bootstrap_port == bootstrap_port


def test_containers_have_identities_of_their_own() -> None:
    services = compose("compose.yaml")["services"]
    assert {of: said["hostname"] for of, said in services.items()} == {of: of for of in services}


@pytest.mark.parametrize("name", STACKS)
def test_every_container_comes_back_and_may_drain(name: str) -> None:
    for said in compose(name)["services"].values():
        assert said["restart"] == "unless-stopped"
        assert int(said["stop_grace_period"].removesuffix("s")) > DRAIN_AND_STOP_S


@pytest.mark.parametrize("name", ALL)
def test_logs_are_rotated(name: str) -> None:
    for said in compose(name)["services"].values():
        assert {"max-size", "max-file"} <= set(said["logging"]["options"])


@pytest.mark.parametrize("name", STACKS)
def test_containers_are_bounded(name: str) -> None:
    for said in compose(name)["services"].values():
        assert said["pids_limit"] > 0 and (name != "compose.yaml" or said["mem_limit"])


@pytest.mark.parametrize("name", ("compose.gpu.yaml", "compose.gpu.sglang.yaml"))
def test_the_probe_follows_the_router_to_another_address(name: str) -> None:
    router = compose(name, {**HOST, "TANDEM_BIND": "10.0.0.1"})["services"]["router"]
    assert router["environment"]["TANDEM_HOST"] == parse(router["command"])["host"] == "10.0.0.1"


@pytest.mark.parametrize("name", ("compose.yaml", "compose.gpu.yaml", "compose.gpu.sglang.yaml"))
def test_the_router_waits_until_the_nodes_are_healthy(name: str) -> None:
    services = compose(name)["services"]
    waits = services["router"]["depends_on"]
    assert waits == {of: {"condition": "service_healthy"} for of in services if of != "router"}


@pytest.mark.parametrize("name", STACKS)
def test_the_probe_asks_where_the_server_listens(name: str) -> None:
    for of, said in compose(name)["services"].items():
        if "sglang" in said["image"]:
            port = next(each for each in said["command"] if each.startswith("--port=")).removeprefix("--port=")
            assert f":{port}/health" in said["healthcheck"]["test"][-1]
            continue
        environment = said.get("environment", {})
        if isinstance(environment, list):
            environment = dict(each.partition("=")[::2] for each in environment)
        values = parse(said["command"])
        port = values["port"] if of == "router" else values["server__port"]
        assert int(environment.get("TANDEM_PORT", 30000)) == port


@pytest.mark.parametrize("name", STACKS)
def test_only_what_is_meant_to_be_is_published(name: str) -> None:
    for of, said in compose(name)["services"].items():
        assert all(of == "router" and port.startswith("127.0.0.1:") for port in said.get("ports", []))


@pytest.mark.parametrize("of", ("prefill", "decode"))
def test_rdma_is_asked_for_and_possible(of: str, secrets: Path) -> None:
    said = service("compose.rdma.yaml", of)
    config = node(said["command"], secrets)
    assert (config.transfer.transport, config.transfer.protocol) == (TransportName.MOONCAKE, Protocol.RDMA)
    assert config.transfer.device == HOST["RDMA_DEVICES"]
    assert said["ulimits"]["memlock"] == -1 and "MC_FORCE_HCA=1" in said["environment"]
    assert said["network_mode"] == "host" and said["devices"] == ["/dev/infiniband:/dev/infiniband"]
    assert config.server.advertise_url == "http://10.0.0.1:30001"


def test_a_decode_node_of_several_cards(secrets: Path) -> None:
    environment = {**HOST, "DECODE_DEVICES": "cuda:1,cuda:2,cuda:3", "DECODE_RANKS": "3"}
    command = compose("compose.gpu.yaml", environment)["services"]["decode"]["command"]
    assert node(command, secrets).engine.dp_size == 3


@pytest.mark.parametrize("name", SGLANG)
def test_sglang_takes_its_flags(name: str) -> None:
    """Of the version that the image's name says."""
    launched = [said for said in compose(name)["services"].values() if "sglang" in said["image"]]
    assert len(launched) >= 2
    for said in launched:
        assert said["image"].endswith(":v0.5.17")
        assert said["command"][:3] == ["python3", "-m", "sglang.launch_server"]
        for argument in said["command"][3:]:
            flag, _, value = argument.partition("=")
            choices = SGLANG_FLAGS[flag]
            assert choices is None or value in choices, argument


@pytest.mark.parametrize("name", ALL)
def test_every_variable_is_explained(name: str) -> None:
    lines = (DEPLOY / ".env.example").read_text().splitlines()
    said = dict(line.removeprefix("# ").partition("=")[::2] for line in lines if "=" in line)
    for variable, default in variables(name).items():
        assert variable in said, f"{variable} of {name} is not in .env.example"
        if default is not None and variable not in (
            "HOST_ADDRESS",
            "RDMA_DEVICES",
            "PREFILL_ADDRESS",
            "DECODE_ADDRESS",
        ):
            assert said[variable] == default


@pytest.mark.parametrize(
    "files",
    [
        *([name] for name in STACKS),
        ["compose.yaml", "compose.observability.yaml"],
        ["compose.gpu.yaml", "compose.observability.host.yaml"],
    ],
)
def test_compose_finds_no_fault(files: list[str], tmp_path: Path) -> None:
    command = shutil.which("docker-compose")
    if command is None:
        pytest.skip("no docker-compose here")
    arguments = [word for name in files for word in ("-f", str(DEPLOY / name))]
    profiles = [word for each in ("prefill", "decode", "router") for word in ("--profile", each)]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **HOST}
    done = subprocess.run(
        [command, *arguments, *profiles, "config", "-q"], capture_output=True, text=True, timeout=60, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_keys_are_made_once_and_fit_together(tmp_path: Path) -> None:
    from common.keys import admin_key

    script, folder = str(DEPLOY / "make_secrets.sh"), tmp_path / "secrets"
    assert subprocess.run([script, str(folder)], timeout=30).returncode == 0
    header = admin_key(str(folder / "api.keys"), "--api-key-file").header
    assert header == f"Bearer {(folder / 'admin.key').read_text()}"
    assert len((folder / "cluster.key").read_text()) == 64
    again = subprocess.run([script, str(folder)], capture_output=True, text=True, timeout=30)
    assert again.returncode == 1 and "has keys already" in again.stderr


@pytest.mark.parametrize("name", ["secrets", "-secrets", "a b/-c"])
def test_keys_go_where_they_are_asked_for(tmp_path: Path, name: str) -> None:
    """Whatever the name looks like, and whatever CDPATH knows under it."""
    elsewhere, here = tmp_path / "elsewhere", tmp_path / "here"
    (elsewhere / name).mkdir(parents=True)
    here.mkdir()
    environment = {**os.environ, "CDPATH": str(elsewhere)}
    done = subprocess.run(
        [DEPLOY / "make_secrets.sh", name], cwd=here, env=environment, capture_output=True, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert len(list((here / name).iterdir())) == 4 and list((elsewhere / name).iterdir()) == []
    assert (here / name).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["cluster.key", "admin.key"])
def test_no_key_is_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("in use")
    done = subprocess.run([DEPLOY / "make_secrets.sh", tmp_path], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and "has keys already" in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == "in use"
