"""What a rank would find and need, before it is started: the model's folder, and the memory that the settings ask for.

Nothing is loaded but headers; with `fingerprint` the weight files are read once.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import torch

from common.config import DType, LoadFormat, NodeConfig, rank_devices
from engine.cuda.memory import MemoryPlan, plan_memory
from engine.families import read_config
from engine.pools import StatePools
from engine.runner import torch_device, torch_dtype
from engine.weights import dummy_revision, stored_dtypes, weights_revision
from node.chat_template import load_chat_template
from node.engine_host import resolve_context_length, resolve_limits, resolve_states
from node.tokenizer import load_tokenizer

_CPU_PROCESS_BYTES = 300 << 20
"""Of a rank on the CPU: interpreter, torch, and what oneDNN keeps."""


class Architecture(NamedTuple):
    """layers: e.g. "5 mamba, 2 attention". vocab_size: of the embedding. context_length: of what will be served."""

    layers: str
    vocab_size: int
    context_length: int


class Weights(NamedTuple):
    """dtypes: as they are stored. nbytes: of the files."""

    dtypes: tuple[str, ...]
    nbytes: int


class Capacity(NamedTuple):
    """Of one rank. plan: bytes. max_requests: at once; longest_tokens: of one request when it is alone; slots, pages:
    usable ones; bytes of one of them; mean_tokens: of each of max_requests when the pages are divided evenly."""

    plan: MemoryPlan
    ranks_on_device: int
    max_requests: int
    longest_tokens: int
    mean_tokens: int
    slots: int
    pages: int
    slot_bytes: int
    page_bytes: int

    @property
    def needed_bytes(self) -> int:
        """By all ranks that share the device; they share the memory of their weights too."""
        return self.plan.weights + self.ranks_on_device * (self.plan.total - self.plan.weights)


def architecture(config: NodeConfig) -> Architecture:
    """Raises ConfigError naming what of the folder's config.json a node would refuse."""
    hybrid = read_config(config.model.path)
    kinds = [kind.name.lower() for kind in hybrid.layers]
    layers = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    return Architecture(layers, hybrid.vocab_size, resolve_context_length(config.engine, hybrid))


def weights(config: NodeConfig) -> Weights:
    """Raises ConfigError naming file and tensor."""
    folder = Path(config.model.path)
    dtypes = stored_dtypes(folder, read_config(folder)).values()
    return Weights(tuple(sorted(set(dtypes))), sum(file.stat().st_size for file in folder.glob("*.safetensors")))


def tokenizer_size(config: NodeConfig) -> int:
    """Tokens that it knows. Raises ConfigError."""
    return load_tokenizer(config.model.path).vocab_size


def has_chat_template(config: NodeConfig) -> bool:
    """Raises ConfigError for one that is broken."""
    return load_chat_template(config.model.path, config.model.chat_template) is not None


def capacity(config: NodeConfig) -> Capacity:
    """Raises ConfigError for settings that do not go together."""
    engine, devices = config.engine, rank_devices(config)
    hybrid = read_config(config.model.path)
    limits = resolve_limits(engine, resolve_states(engine, hybrid, devices[0]))
    num_pages = engine.max_total_tokens // engine.page_size
    on_card = devices[0].startswith("cuda")
    step_tokens = limits.prefill_budget + limits.max_running
    plan = plan_memory(
        hybrid,
        dtype=torch_dtype(config.model.dtype),
        ssm_dtype=torch_dtype(config.model.ssm_dtype),
        num_pages=num_pages,
        page_size=engine.page_size,
        num_slots=engine.max_state_slots,
        step_tokens=step_tokens,
        logit_rows=step_tokens if on_card else limits.max_running,
    )
    longest = min(resolve_context_length(engine, hybrid), (num_pages - 1) * engine.page_size)
    at_once = max(1, min(engine.max_running_requests, engine.max_state_slots - 1, num_pages - 1))
    return Capacity(
        plan=plan if on_card else _on_cpu(plan, config),
        ranks_on_device=1 if on_card else engine.dp_size,
        max_requests=at_once,
        longest_tokens=longest,
        mean_tokens=min(longest, (num_pages - 1) // at_once * engine.page_size),
        slots=engine.max_state_slots - 1,
        pages=num_pages - 1,
        slot_bytes=plan.slots // engine.max_state_slots,
        page_bytes=plan.pages // num_pages,
    )


def _on_cpu(plan: MemoryPlan, config: NodeConfig) -> MemoryPlan:
    """float32 weights are kept in a second layout too."""
    copies = 2 if config.model.dtype is DType.FLOAT32 else 1
    return dataclasses.replace(plan, weights=copies * plan.weights, other=_CPU_PROCESS_BYTES)


def fingerprint(config: NodeConfig) -> str:
    """Of the layout that a rank with these settings has. Reads every weight file. Raises ConfigError."""
    model, dummy = config.model, config.model.load_format is LoadFormat.DUMMY
    pools = StatePools(
        read_config(model.path),
        num_pages=2,
        num_slots=2,
        page_size=config.engine.page_size,
        dtype=torch_dtype(model.dtype),
        ssm_dtype=torch_dtype(model.ssm_dtype),
        device="cpu",
        revision=dummy_revision(model.path) if dummy else weights_revision(model.path),
        allocate=None,
    )
    return pools.layout().fingerprint()


def check_devices(config: NodeConfig) -> None:
    """Raises ConfigError for a device that torch cannot use here."""
    for name in rank_devices(config):
        torch_device(name)


class Card(NamedTuple):
    """A CUDA device. Bytes of its memory; capability: "9.0"."""

    name: str
    number: int
    free_bytes: int
    total_bytes: int
    capability: str


class Cuda(NamedTuple):
    """runtime: what torch is built for, None: for no CUDA. reason: why there are no cards."""

    runtime: str | None
    cards: tuple[Card, ...]
    reason: str


def cuda() -> Cuda:
    """What torch sees here."""
    if torch.version.cuda is None:
        return Cuda(None, (), "this torch is built without CUDA")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        cards = tuple(_card(number) for number in range(torch.cuda.device_count()))
    except (RuntimeError, AssertionError) as error:
        return Cuda(torch.version.cuda, (), str(error).partition("\n")[0])
    return Cuda(torch.version.cuda, cards, "" if cards else "no card is visible (CUDA_VISIBLE_DEVICES?)")


def _card(number: int) -> Card:
    free, total = torch.cuda.mem_get_info(number)
    major, minor = torch.cuda.get_device_capability(number)
    return Card(torch.cuda.get_device_name(number), number, free, total, f"{major}.{minor}")
