"""The model's folder and the memory plan, by what the engine itself would make of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cli.doctor.checks import Check, error, gib, not_applicable, ok, refused, warning
from cli.doctor.machine import available_memory
from common.config import NodeConfig, rank_devices
from common.errors import ConfigError, ServingError

if TYPE_CHECKING:
    from node.preflight import Capacity, Cuda

_MAX_READ_BYTES = 4 << 30
"""Weights that are read for a fingerprint."""


def check_model(config: NodeConfig) -> Iterator[Check]:
    """Raises nothing: what is wrong with the folder is one error, which names the file."""
    from node.preflight import model_facts

    path = config.model.path
    try:
        facts = model_facts(config)
    except ServingError as reason:
        yield refused("model", reason, _advice(reason, path))
        return
    dtypes = f", stored as {', '.join(facts.dtypes)}" if facts.dtypes else ", random weights"
    yield ok(
        "model",
        f"{path}: {facts.layers}; weights {gib(facts.weight_bytes)}{dtypes}; up to {facts.context_length:,} tokens",
        path=path,
        weight_bytes=facts.weight_bytes,
        dtypes=list(facts.dtypes),
        context_length=facts.context_length,
    )
    yield _check_vocabulary(facts.vocab_size, facts.model_vocab_size)
    if facts.has_chat_template:
        yield ok("model.chat_template", "there")
    else:
        fix = "--chat-template FILE; without one /v1/chat/completions is refused, everything else works"
        yield warning("model.chat_template", "none", fix)


def _check_vocabulary(tokenizer: int, model: int) -> Check:
    found = f"{tokenizer:,} tokens, the model knows {model:,}"
    if tokenizer > model:
        fix = "tokenizer.json is another model's: fetch the folder again"
        return error("model.tokenizer", found, fix, vocab_size=tokenizer)
    return ok("model.tokenizer", found, vocab_size=tokenizer)


def _advice(reason: ServingError, path: str) -> str:
    text = reason.message
    if not Path(path).is_dir():
        return "give a Hugging Face model folder with --model-path (in a container: is the volume mounted?)"
    if reason.param == "chat_template":
        return "give another file, or none: the folder's own template is used then"
    if reason.param == "context_length":
        return "--context-length: at most that"
    if "this engine runs" in text or "not implemented" in text:
        return "serve this model with another backend: the native engine runs unquantised nemotron_h models"
    if "safetensors" in text or "tensor" in text:
        return "the file is missing or incomplete: download it again (hf download), and compare sizes"
    return "download the folder again (hf download): config.json, tokenizer.json and every weight file"


def find_capacity(config: NodeConfig) -> Capacity | ServingError:
    from node.preflight import capacity

    try:
        return capacity(config)
    except ServingError as reason:
        return reason


def check_memory_plan(config: NodeConfig, plan: Capacity | ServingError, cuda: Cuda | None) -> list[Check]:
    """cuda: of ranks on cards."""
    if isinstance(plan, ServingError):
        if plan.param in (None, "model_path") or "config.json" in plan.message:
            return [not_applicable("memory_plan", "not without the model's config.json")]
        return [refused("memory_plan", plan, "change the setting that is named")]
    if not config.model.device.startswith("cuda"):
        return [_check_plan("memory_plan", config, plan, available_memory(), "memory")]
    free = {} if cuda is None else {card.number: card.free_bytes for card in cuda.cards}
    numbers = [int(name.partition(":")[2] or 0) for name in rank_devices(config)]
    found = [
        _check_plan(f"memory_plan.{number}", config, plan, free[number], f"cuda:{number}")
        for number in numbers
        if number in free
    ]
    return found or [not_applicable("memory_plan", f"no card to fit {gib(plan.plan.total)} into")]


def _check_plan(name: str, config: NodeConfig, capacity: Capacity, free: int, where: str) -> Check:
    plan = capacity.plan
    ranks = f"{capacity.ranks_on_device} ranks of " if capacity.ranks_on_device > 1 else ""
    parts = (
        f"{ranks}weights {gib(plan.weights)} + pages {gib(plan.pages)} + slots {gib(plan.slots)} + step "
        f"{gib(plan.step)} + other {gib(plan.other)} = {gib(capacity.needed_bytes)} of {gib(free)} {where}"
    )
    fits = (
        f"{capacity.max_requests} requests at once of {capacity.mean_tokens:,} tokens each, alone up to "
        f"{capacity.longest_tokens:,}"
    )
    data = {
        "needed_bytes": capacity.needed_bytes,
        "free_bytes": free,
        "max_requests": capacity.max_requests,
        "mean_tokens": capacity.mean_tokens,
        "longest_tokens": capacity.longest_tokens,
        "slots": capacity.slots,
        "pages": capacity.pages,
        "slot_bytes": capacity.slot_bytes,
        "page_bytes": capacity.page_bytes,
        **{f"{part}_bytes": getattr(plan, part) for part in ("weights", "pages", "slots", "step", "other")},
    }
    if capacity.needed_bytes > free:
        return error(name, parts, _what_to_lower(config, capacity, free), **data)
    wanted = config.engine.max_running_requests
    if capacity.slots < wanted:
        fix = f"--max-mamba-cache-size {wanted + 1} or more, or --max-running-requests {capacity.slots}"
        return warning(name, f"{parts}; {capacity.slots} slots for {wanted} requests; {fits}", fix, **data)
    return ok(name, f"{fits} ({parts})", **data)


def _what_to_lower(config: NodeConfig, capacity: Capacity, free: int) -> str:
    """The largest part, and how far it would have to go down if it can make up for what is missing."""
    plan, missing = capacity.plan, -(-(capacity.needed_bytes - free) // capacity.ranks_on_device)
    if max(plan.pages, plan.slots) < plan.weights and plan.pages + plan.slots < missing + plan.weights // 10:
        return f"the weights alone are {gib(plan.weights)}: more memory, --dtype bfloat16, or fewer ranks (--dp-size)"
    if plan.slots >= plan.pages:
        slots = (plan.slots - missing) // capacity.slot_bytes
        option, most = "--max-mamba-cache-size", max(0, slots)
    else:
        pages = (plan.pages - missing) // capacity.page_bytes
        option, most = "--max-total-tokens", max(0, pages) * config.engine.page_size
    if most < (2 * config.engine.page_size if option == "--max-total-tokens" else 2):
        return "lower --max-total-tokens and --max-mamba-cache-size (and --dp-size), or give more memory"
    return f"{option} {most} at most, or free {gib(missing * capacity.ranks_on_device)}"


def own_fingerprint(config: NodeConfig) -> str | None:
    """None when it cannot be known, or only by reading too much."""
    from node.preflight import fingerprint

    nbytes = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    try:
        return fingerprint(config) if nbytes <= _MAX_READ_BYTES else None
    except ConfigError:
        return None
