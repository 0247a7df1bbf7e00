"""Our settings as SGLang's flags: of every version, against a table read from its wheels; and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.settings import NODE_SETTINGS
from common.config import (
    EngineConfig,
    ModelConfig,
    NodeConfig,
    Protocol,
    Role,
    ServerConfig,
    TransferConfig,
    TransportName,
)
from common.errors import ConfigError
from node.sglang.config import SglangConfig, check_sglang_config
from node.sglang.fingerprint import fingerprint, model_name
from node.sglang.flags import _ELSEWHERE, PLAIN, Launch, launch
from node.sglang.versions import installed_version, version_of
from tests.sglang.conftest import FakePython
from tests.sglang.wheels import TABLE, VERSIONS, download, known
from tests.support.stack import MODEL

SECTIONS = {"model": ModelConfig, "engine": EngineConfig, "transfer": TransferConfig, "server": ServerConfig}
OPTIONS = {f"{each.section}.{each.field}": each.flags[0] for each in NODE_SETTINGS}
EVERYTHING: dict[str, Any] = {
    "engine.page_size": 16,
    "engine.max_total_tokens": 9,
    "engine.dp_size": 2,
    "engine.disable_radix_cache": True,
    "engine.disable_overlap_schedule": True,
    "model.device": "cuda:1",
    "transfer.protocol": Protocol.RDMA,
    "transfer.device": "mlx5_0",
}


def config(role: Role = Role.PREFILL, arguments: tuple[str, ...] = (), tp: int = 1, **given: Any) -> SglangConfig:
    """given: `section__field`."""
    return of({name.replace("__", "."): value for name, value in given.items()}, role, arguments, tp)


def of(given: dict[str, Any], role: Role, arguments: tuple[str, ...] = (), tp: int = 1) -> SglangConfig:
    parts: dict[str, dict[str, Any]] = {"model": {"path": str(MODEL)}, "engine": {}, "transfer": {}, "server": {}}
    for setting, value in given.items():
        section, _, field = setting.partition(".")
        parts[section][field] = value
    node = NodeConfig(role=role, **{name: SECTIONS[name](**fields) for name, fields in parts.items()})
    options = {setting: OPTIONS[setting] for setting in given}
    return SglangConfig(node=node, given=options, python=sys.executable, arguments=arguments, tp_size=tp)


def launched(asked: SglangConfig, version: str = "0.5.17") -> Launch:
    return launch(asked, version_of(version))


def refusal(asked: SglangConfig, version: str = "0.5.17") -> str:
    with pytest.raises(ConfigError) as refused:
        check_sglang_config(asked)
        launched(asked, version)
    assert refused.value.param
    return refused.value.message


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("strategy", ["extra_buffer", "no_buffer"])
def test_every_flag_that_is_made_exists_in_that_version(version: str, role: Role, strategy: str) -> None:
    has = json.loads(TABLE.read_text())[version]
    plain = dict.fromkeys(PLAIN, "x")
    given = plain | EVERYTHING | {"engine.page_size": 1, "engine.mamba_scheduler_strategy": strategy}
    flags = [each for each in launched(of(given, role, tp=2), version).arguments if each.startswith("--")]
    assert len(flags) > len(PLAIN) and not [flag for flag in flags if flag not in has]
    over_tcp = launched(config(role), version).arguments
    if role is not Role.UNIFIED:
        backend = over_tcp[over_tcp.index("--disaggregation-transfer-backend") + 1]
        assert backend == ("mooncake_tcp" if "mooncake_tcp" in has else "mooncake")


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_table_is_what_the_wheels_say(version: str, tmp_path: Path) -> None:
    wheel = download(version, tmp_path)
    if wheel is None:
        pytest.skip(f"sglang {version} cannot be downloaded")
    assert known(wheel) == json.loads(TABLE.read_text())[version]


def test_only_what_was_given_is_translated() -> None:
    assert launched(config(Role.UNIFIED), "0.5.23").arguments == (
        *("--model-path", str(MODEL)),
        *("--host", "127.0.0.1", "--port", "30000"),
    )
    assert launched(config(engine__chunked_prefill_size=-1)).arguments[6:8] == ("--chunked-prefill-size", "-1")
    arguments = launched(config(Role.UNIFIED, engine__page_size=32, model__device="cuda:3"), "0.5.23").arguments
    assert arguments[6:] == ("--page-size", "32", "--device", "cuda", "--base-gpu-id", "3")


def test_legs_have_mode_backend_and_port() -> None:
    prefill = launched(config(Role.PREFILL, server__bootstrap_port=9001), "0.5.23").arguments
    assert prefill[6:] == (
        *("--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "mooncake_tcp"),
        *("--disaggregation-bootstrap-port", "9001"),
    )
    assert "--disaggregation-bootstrap-port" not in launched(config(Role.DECODE)).arguments


@pytest.mark.parametrize("version", VERSIONS)
def test_the_strategy_has_that_versions_name(version: str) -> None:
    arguments = launched(config(engine__mamba_scheduler_strategy="no_buffer"), version).arguments
    flag = "--mamba-scheduler-strategy" if version in ("0.5.12", "0.5.13") else "--mamba-radix-cache-strategy"
    assert arguments[arguments.index(flag) + 1] == "no_buffer" and "--disable-overlap-schedule" in arguments


@pytest.mark.parametrize(
    ("version", "extra", "limited"),
    [
        ("0.5.12", {}, True),
        ("0.5.17", {}, True),
        ("0.5.19", {"engine__mamba_scheduler_strategy": "extra_buffer"}, True),
        ("0.5.19.post1", {}, True),
        ("0.5.19", {"engine__mamba_scheduler_strategy": "no_buffer"}, False),
        ("0.5.19", {"engine__disable_radix_cache": True}, False),
        ("0.5.20", {"engine__mamba_scheduler_strategy": "extra_buffer"}, False),
        ("0.5.23", {}, False),
    ],
)
def test_versions_that_mix_states_compute_prompts_one_at_a_time(
    version: str, extra: dict[str, Any], limited: bool
) -> None:
    for role in (Role.PREFILL, Role.UNIFIED):
        arguments = launched(config(role, **extra), version).arguments
        assert ("--prefill-max-requests" in arguments) is limited
    assert "--prefill-max-requests" not in launched(config(Role.DECODE, **extra), version).arguments


def test_a_model_without_recurrent_layers_is_not_limited(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    assert "--prefill-max-requests" not in launched(config(model__path=str(tmp_path))).arguments
    assert "--prefill-max-requests" in launched(config(model__path="nvidia/unknown")).arguments


@pytest.mark.parametrize(
    "arguments",
    [("--prefill-max-requests", "4"), ("--prefill-max-requests=8",), ("--prefill-max-r=2",), ("--enable-mix",)],
)
def test_who_asks_for_wrong_states_is_refused(arguments: tuple[str, ...]) -> None:
    assert "saves wrong states" in refusal(config(arguments=arguments))
    launched(config(arguments=arguments), "0.5.23")
    launched(config(arguments=arguments, engine__mamba_scheduler_strategy="no_buffer"))


def test_one_at_a_time_may_be_said_too() -> None:
    arguments = launched(config(arguments=("--prefill-max-requests", "1"))).arguments
    assert arguments.count("--prefill-max-requests") == 1


@pytest.mark.parametrize(
    ("protocol", "variables"),
    [
        (Protocol.TCP, {"MC_FORCE_TCP": "1"}),
        (Protocol.RDMA, {"MC_FORCE_HCA": "1", "MOONCAKE_PROTOCOL": "rdma"}),
        (Protocol.NVLINK, {"MC_FORCE_MNNVL": "1", "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "NVLINK"}),
    ],
)
def test_mooncake_gets_the_protocol_and_no_other(protocol: Protocol, variables: dict[str, str]) -> None:
    inherited = {
        "MC_FORCE_TCP": "0",
        "MC_FORCE_HCA": "0",
        "MC_FORCE_MNNVL": "0",
        "PATH": "/bin",
        "MC_TCP_SLICE_SIZE": "7",
    }
    found = launched(config(transfer__protocol=protocol)).environment(inherited)
    forced = ("MC_FORCE_TCP", "MC_FORCE_HCA", "MC_FORCE_MNNVL", "MOONCAKE_PROTOCOL", "SGLANG_MOONCAKE_CUSTOM_MEM_POOL")
    assert {name: found[name] for name in forced if name in found} == variables
    assert (found["PATH"], found["MC_TCP_SLICE_SIZE"]) == ("/bin", "7"), "the user's own stay"
    assert found["MC_TCP_BIND_ADDRESS"] == "127.0.0.1"


def test_cuda_ipc_is_mooncakes_way_between_cards_of_a_host() -> None:
    asked = launched(config(transfer__transport=TransportName.CUDA_IPC))
    assert asked.forced == {"MC_INTRANODE_NVLINK": "1", "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "INTRA_NODE_NVLINK"}
    assert asked.arguments[asked.arguments.index("--disaggregation-transfer-backend") + 1] == "mooncake"


def test_time_outs_of_the_hand_off_are_told() -> None:
    found = launched(config(transfer__bootstrap_timeout_s=12.4, transfer__transfer_timeout_s=0.2)).environment({})
    assert found["SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"] == "12"
    assert found["SGLANG_DISAGGREGATION_WAITING_TIMEOUT"] == "1"
    assert "SGLANG_DISAGGREGATION_WAITING_TIMEOUT" not in launched(config()).environment({})


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"transfer__verify": "full"}, "--verify"),
        ({"engine__local_prefill_max_tokens": 3}, "--local-prefill-max-tokens"),
        ({"server__api_key_file": "keys"}, "--api-key-file"),
        ({"server__ssl_ca_certs": "ca"}, "--ssl-ca-certs"),
        ({"transfer__transport": TransportName.LOOPBACK}, "--transport loopback"),
        ({"transfer__device": "mlx5_0"}, "--transfer-device mlx5_0"),
        ({"server__bootstrap_host": "10.0.0.1"}, "--bootstrap-host 10.0.0.1"),
        ({"server__port": 0}, "--port 0"),
        ({"server__bootstrap_port": 30000}, "--bootstrap-port 30000"),
        ({"server__drain_timeout_s": -1.0}, "--drain-timeout -1.0"),
        ({"model__device": "cpu"}, "--device cpu"),
        ({"model__device": "cuda:0,cuda:1"}, "--device cuda:0,cuda:1"),
        ({"engine__mamba_scheduler_strategy": "no_buffer", "engine__page_size": 16}, "--page-size 16"),
        (
            {"engine__mamba_scheduler_strategy": "no_buffer", "engine__disable_overlap_schedule": False},
            "--enable-overlap",
        ),
        ({"tp": 0}, "--tp-size 0"),
        ({"engine__page_size": 0}, "--page-size 0"),
        ({"engine__chunked_prefill_size": -2}, "--chunked-prefill-size -2"),
        ({"server__ssl_certfile": "/no/such", "server__ssl_keyfile": "/no/such"}, "--ssl-certfile /no/such"),
        ({"server__ssl_keyfile": "/no/such"}, "--ssl-keyfile /no/such"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, Any], name: str) -> None:
    assert refusal(config(**given)).startswith(name)


@pytest.mark.parametrize("argument", ["--port=9", "--model-path", "--mod", "--disaggregation-m=decode", "--api-key=x"])
def test_what_we_set_is_not_passed_on(argument: str) -> None:
    assert refusal(config(arguments=(argument,))).startswith(f"--sglang-arg {argument}: use ")


@pytest.mark.parametrize("argument", ["--quantization", "fp8", "--model-impl=auto", "--hicache-ratio", "-1", "--"])
def test_the_rest_is_passed_on_as_it_is(argument: str) -> None:
    assert launched(config(arguments=(argument,))).arguments[-1] == argument


def test_every_setting_is_translated_used_or_refused() -> None:
    """A new one is refused until somebody says what it is at SGLang."""
    for setting in OPTIONS:
        section, _, field = setting.partition(".")
        if section == "faults" or setting in PLAIN or setting in _ELSEWHERE:
            continue
        default = getattr(SECTIONS[section](**({"path": "x"} if section == "model" else {})), field)
        assert OPTIONS[setting] in refusal(of({setting: default}, Role.PREFILL))


@pytest.mark.parametrize("version", ["0.5.11", "0.5.24", "0.6.0", "0.5.1", "nightly", "0.5.17rc1", ""])
def test_an_unknown_version_is_refused(version: str, fake_python: FakePython) -> None:
    with pytest.raises(ConfigError, match=r"0\.5\.12 to 0\.5\.23"):
        version_of(version)


def test_the_version_is_that_of_the_python_that_runs_it(fake_python: FakePython) -> None:
    assert installed_version(fake_python("0.5.13.post1")) == "0.5.13.post1"
    assert version_of("0.5.13.post1").strategy_flag == "--mamba-scheduler-strategy"
    with pytest.raises(ConfigError, match="--sglang-python /no/such"):
        installed_version("/no/such")
    with pytest.raises(ConfigError, match="no sglang there"):
        installed_version(sys.executable)


def test_fingerprint_says_what_decides_the_layout(tmp_path: Path) -> None:
    info = {"version": "0.5.17", "page_size": 1, "kv_cache_dtype": "auto", "mamba_ssm_dtype": "float32", "tp_size": 2}
    first = fingerprint(info, "m")
    for change in ({"page_size": 16}, {"tp_size": 1}, {"version": "0.5.18"}, {"kv_cache_dtype": "fp8_e4m3"}):
        assert fingerprint(info | change, "m") != first
    assert fingerprint(info | {"port": 1, "mamba_radix_cache_strategy": "auto"}, "m") == first
    (tmp_path / "config.json").write_text("{}")
    plain = model_name(str(tmp_path), None)
    (tmp_path / "model.safetensors").write_bytes(b"1")
    assert model_name(str(tmp_path), None) != plain
    assert model_name("org/name", "v2") == "org/name@v2" and model_name("org/name", None) == "org/name@main"


def test_a_config_is_checked_before_sglang_is_asked_for_anything() -> None:
    for field in ("start_timeout_s", "health_timeout_s"):
        asked = config()
        broken = SglangConfig(node=asked.node, given={}, python="x", **{field: float("nan")})
        with pytest.raises(ConfigError, match="a positive number of seconds"):
            check_sglang_config(broken)
