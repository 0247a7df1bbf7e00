"""Every setting of a process: frozen, nested, checked once. Only the command line reads the environment."""

from __future__ import annotations

import enum
from pathlib import Path

import msgspec

from common.errors import ConfigError, why_unreadable
from common.reasoning import ReasoningParser

MAX_RANKS = 64


class Role(enum.StrEnum):
    UNIFIED = "unified"
    PREFILL = "prefill"
    DECODE = "decode"


class TransportName(enum.StrEnum):
    AUTO = "auto"
    MOONCAKE = "mooncake"
    LOOPBACK = "loopback"
    CUDA_IPC = "cuda_ipc"


class Protocol(enum.StrEnum):
    TCP = "tcp"
    RDMA = "rdma"
    NVLINK = "nvlink"


class Verify(enum.StrEnum):
    OFF = "off"
    DIGEST = "digest"
    FULL = "full"


class DType(enum.StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class LoadFormat(enum.StrEnum):
    AUTO = "auto"
    DUMMY = "dummy"


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """path: a Hugging Face folder. dtype: of weights, KV and conv state. ssm_dtype: of the SSM state. load_format: auto
    reads the folder's weights; dummy makes random ones, the same in every process with such a device, to measure speed.
    chat_template: a file, in place of the folder's own. reasoning_parser: how thoughts are told from what is said.
    shared_weights: of a rank, the file in which ranks of its node share their weights; no setting.
    """

    path: str
    load_format: LoadFormat = LoadFormat.AUTO
    dtype: DType = DType.FLOAT32
    ssm_dtype: DType = DType.FLOAT32
    device: str = "cpu"
    served_name: str | None = None
    chat_template: str | None = None
    reasoning_parser: ReasoningParser = ReasoningParser.AUTO
    shared_weights: str | None = None


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the pools and of a step, and how states are saved. context_length None: the model's own.

    dp_size: ranks of the node. threads: of torch, in a rank. chunked_prefill_size -1: prompts are not cut.
    mamba_scheduler_strategy: no_buffer or extra_buffer. mamba_track_interval: tokens between the states that decode
    saves. local_prefill_max_tokens: how much of a prompt a decode node computes itself when it holds the rest.
    disable_overlap_schedule None: on the CPU, where planning and computing share the cores.
    """

    page_size: int = 16
    max_total_tokens: int = 65536
    max_state_slots: int = 128
    max_running_requests: int = 48
    chunked_prefill_size: int = 1024
    context_length: int | None = None
    dp_size: int = 1
    threads: int = 1
    mamba_scheduler_strategy: str = "extra_buffer"
    mamba_track_interval: int = 256
    disable_radix_cache: bool = False
    disable_overlap_schedule: bool | None = None
    enable_mixed_chunk: bool = False
    local_prefill_max_tokens: int = 256


class LoopbackFaults(msgspec.Struct, frozen=True, kw_only=True):
    """Faults that the loopback transport injects on purpose (tests). Parts are kv, conv, ssm, track, metadata.

    flip: flip one byte of this part of every `every`-th room. zero: write zeros in place of this part.
    drop: do not write this part. fail: writing this part (not metadata) fails. delay_s: added before each write.
    bandwidth_bytes_s: pace of the link, 0 = unlimited. file: JSON of these settings, which hold in place of the others
    for as long as it is there; looked at before each write. engine: a fault of the engine itself (`engine/faults.py`).
    """

    flip: str | None = None
    zero: str | None = None
    drop: str | None = None
    fail: str | None = None
    every: int = 1
    delay_s: float = 0.0
    bandwidth_bytes_s: float = 0.0
    file: str | None = None
    engine: str | None = None


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How state crosses. Times are seconds; no wait in the hand-off is without one of them.

    host: the address that peers reach this rank at (never 0.0.0.0). cluster_key_file: a shared secret; without one only
    loopback peers are accepted. disable_layerwise_transfer: send what a step completes when the whole step is done.
    disable_early_prefill: compute no prompt before decode has opened its room. ssm_wire_dtype: what SSM states cross
    as, None: what they are. transport: see `chosen_transport`.
    """

    transport: TransportName = TransportName.AUTO
    protocol: Protocol = Protocol.TCP
    device: str = ""
    host: str = "127.0.0.1"
    verify: Verify = Verify.DIGEST
    disable_layerwise_transfer: bool = False
    disable_early_prefill: bool = False
    ssm_wire_dtype: DType | None = None
    cluster_key_file: str | None = None
    bootstrap_timeout_s: float = 30.0
    transfer_timeout_s: float = 30.0
    first_token_timeout_s: float = 300.0
    liveness_timeout_s: float = 5.0
    faults: LoopbackFaults = LoopbackFaults()


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where a node listens. bootstrap_*: where a prefill node's rooms are opened. upload_timeout_s: for a body.

    drain_timeout_s: how long what runs may take to end after SIGTERM. otlp_endpoint: where traces go, None: nowhere.
    api_key_file: keys of clients, None: everybody is let in. ssl_*: `TlsConfig`.

    routers: where the node registers itself, by URL, every heartbeat_interval_s; advertise_url: as what, None: host and
    port. router_api_key_file: its key there; router_ca_file: whom to trust for https routers.
    """

    otlp_endpoint: str | None = None
    host: str = "127.0.0.1"
    port: int = 30000
    bootstrap_host: str = "127.0.0.1"
    bootstrap_port: int = 8998
    log_level: str = "info"
    max_body_bytes: int = 16 * 1024 * 1024
    upload_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0
    routers: tuple[str, ...] = ()
    advertise_url: str | None = None
    heartbeat_interval_s: float = 5.0
    router_api_key_file: str | None = None
    router_ca_file: str | None = None
    api_key_file: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    role: Role
    model: ModelConfig
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    server: ServerConfig = ServerConfig()


class WorkerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of the router. bootstrap_port is None for a decode worker."""

    url: str
    bootstrap_port: int | None = None


class PolicyName(enum.StrEnum):
    """Which worker of a role serves a request (router/policies.py). SGLang's names for the same are taken too."""

    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    LEAST_LOAD = "least_load"
    POWER_OF_TWO = "power_of_two"
    PREFIX_AWARE = "prefix_aware"
    STICKY = "sticky"

    @classmethod
    def _missing_(cls, value: object) -> PolicyName | None:
        return {"cache_aware": cls.PREFIX_AWARE, "manual": cls.STICKY}.get(str(value))


class SiblingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Of one of several processes that are one router. folder: of their sockets; number: 0 to count - 1."""

    folder: str
    number: int
    count: int


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Times are seconds. connect_timeout_s: to open a connection; idle_timeout_s: between two bytes of an answer.

    liveness_timeout_s: without an answer to health checks until a worker's requests are given up. upload_timeout_s: for
    the whole body of a request. drain_timeout_s: how long what runs may take to end after SIGTERM. max_retries: how
    often a request may move to another pair of workers; resume_on_decode_failure: also in mid-answer.

    policy: how both roles are chosen, unless prefill_policy or decode_policy says otherwise for one.

    Membership: state_file: where workers that came at run time are kept, None: nowhere; require_fingerprint: the one
    state layout that may serve; heartbeat_timeout_s: without word from a worker that registers by itself until it is
    forgotten, if it does not live either; idle_probe_interval_s: until an idle worker is asked for a token, 0: never.
    breaker_*: `router.breaker.BreakerLimits`; outlier_*: `router.outliers.OutlierLimits`.

    siblings: None for a router of one process. request_log: text, json or off: a line for each request. otlp_endpoint:
    where traces go, None: nowhere.

    Protection (docs/operations.md#protection): max_concurrent_requests, queue_size, queue_timeout_s: places, who may
    wait for one, and for how long; request_timeout_s: for a whole request; requests_per_minute, tokens_per_minute: of
    one user key. None: no bound. admin_host, admin_port: where the administration listens, None: at the public port.
    api_key_file: keys of clients; worker_api_key_file: the key for the workers; worker_ca_file: whom to trust for https
    workers. ssl_*: `TlsConfig`.
    """

    host: str = "127.0.0.1"
    port: int = 30000
    prefill: tuple[WorkerAddress, ...] = ()
    decode: tuple[WorkerAddress, ...] = ()
    state_file: str | None = None
    require_fingerprint: str | None = None
    heartbeat_timeout_s: float = 30.0
    idle_probe_interval_s: float = 0.0
    breaker_failures: int = 3
    breaker_failure_rate: float = 0.5
    breaker_window_s: float = 30.0
    breaker_open_s: float = 5.0
    outlier_factor: float = 0.0
    outlier_window_s: float = 30.0
    outlier_ejection_s: float = 30.0
    health_interval_s: float = 1.0
    connect_timeout_s: float = 2.0
    idle_timeout_s: float = 300.0
    liveness_timeout_s: float = 5.0
    upload_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0
    siblings: SiblingConfig | None = None
    request_log: str = "text"
    otlp_endpoint: str | None = None
    max_retries: int = 2
    resume_on_decode_failure: bool = True
    policy: PolicyName = PolicyName.PREFIX_AWARE
    prefill_policy: PolicyName | None = None
    decode_policy: PolicyName | None = None
    max_body_bytes: int = 16 * 1024 * 1024
    log_level: str = "info"
    max_concurrent_requests: int | None = None
    queue_size: int = 1000
    queue_timeout_s: float = 60.0
    request_timeout_s: float | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    api_key_file: str | None = None
    worker_api_key_file: str | None = None
    worker_ca_file: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None


def check_node_config(config: NodeConfig) -> NodeConfig:
    """Refuse what cannot work, naming the setting, its value and what is allowed. Returns the config unchanged.

    Raises ConfigError.
    """
    engine, transfer, server = config.engine, config.transfer, config.server
    _check_model_folder(config.model.path)
    _positive("page_size", engine.page_size)
    _positive("max_total_tokens", engine.max_total_tokens)
    _positive("max_running_requests", engine.max_running_requests)
    if engine.local_prefill_max_tokens < 0:
        raise ConfigError(
            f"--local-prefill-max-tokens {engine.local_prefill_max_tokens}: 0 or more", param="local_prefill_max_tokens"
        )
    _positive("threads", engine.threads)
    rank_devices(config)
    if engine.context_length is not None:
        _positive("context_length", engine.context_length)
    if engine.max_state_slots < 2:
        raise ConfigError(
            f"--max-mamba-cache-size {engine.max_state_slots}: at least 2, because slot 0 is reserved",
            param="max_mamba_cache_size",
        )
    if engine.max_total_tokens < 2 * engine.page_size:
        raise ConfigError(
            f"--max-total-tokens {engine.max_total_tokens}: two pages of {engine.page_size} at least",
            param="max_total_tokens",
        )
    if config.role is not Role.UNIFIED and transfer.host in ("0.0.0.0", "::", ""):
        raise ConfigError(
            f"--transfer-host {transfer.host or '(empty)'}: peers cannot reach it; give this machine's address",
            param="transfer_host",
        )
    if config.role is not Role.UNIFIED:
        _check_transport(config)
    by_mooncake = chosen_transport(transfer.transport, config.model.device) in (
        TransportName.MOONCAKE,
        TransportName.AUTO,
    )
    if config.role is not Role.UNIFIED and not by_mooncake and transfer.protocol is not Protocol.TCP:
        raise ConfigError(
            f"--transfer-protocol {transfer.protocol.value}: only with --transport mooncake", param="transfer_protocol"
        )
    if transfer.ssm_wire_dtype is DType.FLOAT32 and config.model.ssm_dtype is DType.BFLOAT16:
        raise ConfigError(
            "--ssm-wire-dtype float32: the SSM state is bfloat16 (--mamba-ssm-dtype), which can only cross as it is",
            param="ssm_wire_dtype",
        )
    if transfer.device and transfer.protocol is not Protocol.RDMA:
        raise ConfigError(
            f"--transfer-device {transfer.device}: only with --transfer-protocol rdma", param="transfer_device"
        )
    if transfer.cluster_key_file is not None:
        _check_key_file(transfer.cluster_key_file)
    for name in ("bootstrap", "transfer", "first_token", "liveness"):
        _positive_seconds(f"{name}_timeout", getattr(transfer, f"{name}_timeout_s"))
    _positive_seconds("upload_timeout", server.upload_timeout_s)
    if not 0 <= server.drain_timeout_s < float("inf"):
        raise ConfigError(f"--drain-timeout {server.drain_timeout_s}: 0 or more seconds", param="drain_timeout")
    _positive("max_body_bytes", server.max_body_bytes)
    _positive("fault_every", transfer.faults.every)
    for name, port in (("port", server.port), ("bootstrap_port", server.bootstrap_port)):
        if not 0 <= port <= 65535:
            raise ConfigError(f"--{name.replace('_', '-')} {port}: 0 to 65535", param=name)
    return config


def rank_devices(config: NodeConfig) -> tuple[str, ...]:
    """The device of each rank, one for every rank on a card. Raises ConfigError."""
    device, count = config.model.device, config.engine.dp_size
    if not 1 <= count <= MAX_RANKS:
        raise ConfigError(f"--dp-size {count}: 1 to {MAX_RANKS}", param="dp_size")
    names = [name.strip() for name in device.split(",")]
    if names == ["cuda"] and count > 1:
        return tuple(f"cuda:{card}" for card in range(count))
    shared = names * count if names == ["cpu"] else names
    on_cards = all(name.partition(":")[0] == "cuda" for name in names)
    if len(shared) != count or len(set(names)) != len(names) or (count > 1 and not on_cards and names != ["cpu"]):
        raise ConfigError(
            f"--device {device}: with --dp-size {count} it is cpu, cuda or {count} different cards (cuda:0,cuda:1)",
            param="device",
        )
    return tuple(shared)


def rank_config(config: NodeConfig, rank: int, shared_weights: str | None = None) -> NodeConfig:
    """The settings of one rank of a node: those of the node, with what is this rank's own."""
    device = rank_devices(config)[rank]
    model = msgspec.structs.replace(config.model, device=device, shared_weights=shared_weights)
    return msgspec.structs.replace(config, model=model)


def chosen_transport(asked: TransportName, device: str) -> TransportName:
    """auto is Mooncake where the pools lie in the host's memory. Where they lie in a card's it stays auto: each pair of
    ranks has cuda_ipc when it can, Mooncake otherwise."""
    if asked is not TransportName.AUTO or device.startswith("cuda"):
        return asked
    return TransportName.MOONCAKE


def _check_transport(config: NodeConfig) -> None:
    """What carries the memory that the pools lie in, and nothing that would have to read it on a card."""
    device, transfer = config.model.device, config.transfer
    transport = chosen_transport(transfer.transport, device)
    on_card = device.startswith("cuda")
    if transport is (TransportName.LOOPBACK if on_card else TransportName.CUDA_IPC):
        allowed = "cuda_ipc, mooncake (or auto)" if on_card else "mooncake, loopback (or auto)"
        raise ConfigError(
            f"--transport {transport.value}: it does not carry the memory of --device {device}, which {allowed} does",
            param="transport",
        )
    if not on_card:
        return
    if transfer.verify is Verify.FULL:
        raise ConfigError(
            "--verify full: sha256 is taken of host memory only; --device cuda allows off, digest", param="verify"
        )
    if transfer.ssm_wire_dtype not in (None, config.model.ssm_dtype):
        raise ConfigError(
            f"--ssm-wire-dtype {transfer.ssm_wire_dtype}: a state on a card crosses as it is "
            f"(--mamba-ssm-dtype {config.model.ssm_dtype.value})",
            param="ssm_wire_dtype",
        )


def _check_key_file(path: str) -> None:
    try:
        is_file = Path(path).is_file()
    except OSError as error:  # a folder on the way that this user may not look into
        raise ConfigError(f"--cluster-key-file {path}: {why_unreadable(error)}", param="cluster_key_file") from error
    if not is_file:
        raise ConfigError(f"--cluster-key-file {path}: no such file", param="cluster_key_file")


def _check_model_folder(path: str) -> None:
    if not path or not Path(path).is_dir():
        raise ConfigError(f"--model-path {path or '(empty)'}: no such folder", param="model_path")
    for name in ("config.json", "tokenizer.json"):
        if not (Path(path) / name).is_file():
            raise ConfigError(f"--model-path {path}: no {name} in it", param="model_path")


def _positive_seconds(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigError(f"--{name.replace('_', '-')} {value}: a positive number of seconds", param=name)


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"--{name.replace('_', '-')} {value}: at least 1", param=name)
