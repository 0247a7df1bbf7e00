"""The model's folder and the memory plan, by what the engine itself would make of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cli.doctor.checks import Check, error, gib, not_applicable, ok, refused, warning
from cli.doctor.machine import available_memory
from cli.installed import is_installed
from common.config import LoadFormat, NodeConfig, rank_devices
from common.errors import ConfigError, ServingError

if TYPE_CHECKING:
    from node.preflight import Capacity, Cuda

_MAX_READ_BYTES = 4 << 30
"""Weights that are read for a fingerprint."""


def check_model(config: NodeConfig) -> Iterator[Check]:
    """A line for each part of the folder; an error names the file."""
    if not config.model.path or not Path(config.model.path).is_dir():
        fix = "give a Hugging Face model folder with --model-path (in a container: is the volume mounted?)"
        yield error("model", f"{config.model.path or '(empty)'}: no such folder", fix)
        return
    parts = {"": _config, ".weights": _weights, ".tokenizer": _tokenizer, ".chat_template": _chat_template}
    for part, check in parts.items():
        try:
            yield check(f"model{part}", config)
        except ServingError as reason:
            if part == ".weights" and "/config.json" in reason.message:
                yield not_applicable(f"model{part}", "not without config.json")
            else:
                yield refused(f"model{part}", reason, _advice(reason))


def _config(name: str, config: NodeConfig) -> Check:
    from node.preflight import architecture

    found = architecture(config)
    path, tokens = config.model.path, found.context_length
    text = f"{path}: {found.layers}; up to {tokens:,} tokens"
    return ok(name, text, path=path, context_length=tokens, vocab_size=found.vocab_size)


def _weights(name: str, config: NodeConfig) -> Check:
    from node.preflight import weights

    if config.model.load_format is LoadFormat.DUMMY:
        return ok(name, "random ones (--load-format dummy)")
    if missing := _missing_files(Path(config.model.path)):
        fix = "download them (hf download), whole, into the folder"
        return error(name, f"not there: {', '.join(missing)}", fix, missing=missing)
    found = weights(config)
    text = f"{gib(found.nbytes)}, complete, stored as {', '.join(found.dtypes)}"
    return ok(name, text, weight_bytes=found.nbytes, dtypes=list(found.dtypes))


def _missing_files(folder: Path) -> list[str]:
    """Of those that the index names; none when there is no readable index, which the engine will say."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = {str(file) for file in index["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return sorted(file for file in files if not (folder / file).is_file())


def _tokenizer(name: str, config: NodeConfig) -> Check:
    from node.preflight import architecture, tokenizer_size

    size = tokenizer_size(config)
    try:
        known = architecture(config).vocab_size
    except ServingError:  # which has its own line
        return ok(name, f"{size:,} tokens", vocab_size=size)
    if size > known:
        fix = "tokenizer.json is another model's: download the folder again"
        return error(name, f"{size:,} tokens, the model knows {known:,}", fix, vocab_size=size)
    return ok(name, f"{size:,} tokens, the model knows {known:,}", vocab_size=size)


def _chat_template(name: str, config: NodeConfig) -> Check:
    from node.preflight import has_chat_template

    if has_chat_template(config):
        return ok(name, "there")
    fix = "--chat-template FILE; without one /v1/chat/completions is refused, everything else works"
    return warning(name, "none", fix)


def _advice(reason: ServingError) -> str:
    text = reason.message
    if reason.param == "chat_template":
        return "give another file, or none: the folder's own template is used then"
    if reason.param == "context_length":
        return "--context-length: at most that"
    if "this engine runs" in text or "not implemented" in text:
        return "docs/models.md says what the native engine runs: give another model, or serve this one with SGLang"
    return "the file is missing or incomplete: download it again (hf download), whole"


def find_capacity(config: NodeConfig) -> Capacity | ServingError:
    from node.preflight import capacity

    try:
        return capacity(config)
    except ServingError as reason:
        return reason


def check_memory_plan(config: NodeConfig, plan: Capacity | ServingError, cuda: Cuda | None) -> list[Check]:
    """cuda: of ranks on cards."""
    if isinstance(plan, ServingError):
        if "config.json" in plan.message:
            return [not_applicable("memory_plan", "not without the model's config.json")]
        if plan.param == "context_length":
            return [not_applicable("memory_plan", "not with this --context-length")]
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
    needs = f"{_needs(capacity)} of {gib(free)} {where}"
    data = _numbers(capacity) | {"free_bytes": free}
    if capacity.needed_bytes > free:
        return error(name, needs, _what_to_lower(config, capacity, free), **data)
    fits = (
        f"{'each rank: ' if capacity.ranks_on_device > 1 else ''}{capacity.max_requests} requests at once of "
        f"{capacity.mean_tokens:,} tokens each, alone up to {capacity.longest_tokens:,}"
    )
    wanted = config.engine.max_running_requests
    if capacity.slots < wanted:
        fix = f"--max-mamba-cache-size {wanted + 1} or more, or --max-running-requests {capacity.slots}"
        return warning(name, f"{capacity.slots} slots for {wanted} requests; {fits} ({needs})", fix, **data)
    return ok(name, f"{fits} ({needs})", **data)


def _needs(capacity: Capacity) -> str:
    plan, ranks = capacity.plan, capacity.ranks_on_device
    each = f"pages {gib(plan.pages)} + slots {gib(plan.slots)} + step {gib(plan.step)} + other {gib(plan.other)}"
    rest = each if ranks == 1 else f"{ranks} ranks * ({each})"
    return f"weights {gib(plan.weights)} + {rest} = {gib(capacity.needed_bytes)}"


def _numbers(capacity: Capacity) -> dict[str, int]:
    names = (
        "needed_bytes",
        "max_requests",
        "mean_tokens",
        "longest_tokens",
        "slots",
        "pages",
        "slot_bytes",
        "page_bytes",
    )
    parts = {f"{part}_bytes": getattr(capacity.plan, part) for part in ("weights", "pages", "slots", "step", "other")}
    return {name: getattr(capacity, name) for name in names} | parts


def _what_to_lower(config: NodeConfig, capacity: Capacity, free: int) -> str:
    """The largest part, and how far it would have to go down if it can make up for what is missing."""
    plan, missing = capacity.plan, -(-(capacity.needed_bytes - free) // capacity.ranks_on_device)
    if max(plan.pages, plan.slots) < plan.weights and plan.pages + plan.slots < missing + plan.weights // 10:
        if (fewer := _fewer_ranks(capacity, free)) is not None:
            return f"--dp-size {fewer} at most, or give {gib(capacity.needed_bytes - free)} more memory"
        return f"the weights alone are {gib(plan.weights)}: more memory, --dtype bfloat16, or fewer ranks (--dp-size)"
    if plan.slots >= plan.pages:
        slots = (plan.slots - missing) // capacity.slot_bytes
        option, most = "--max-mamba-cache-size", max(0, slots)
    else:
        pages = (plan.pages - missing) // capacity.page_bytes
        option, most = "--max-total-tokens", max(0, pages) * config.engine.page_size
    if most < (2 * config.engine.page_size if option == "--max-total-tokens" else 2):
        rest = "lower both --max-total-tokens and --max-mamba-cache-size, or give more memory: "
        rest += f"{gib(capacity.needed_bytes - free)} are missing"
        return rest if (fewer := _fewer_ranks(capacity, free)) is None else f"--dp-size {fewer} at most, or {rest}"
    return f"{option} {most} at most, or free {gib(missing * capacity.ranks_on_device)}"


def _fewer_ranks(capacity: Capacity, free: int) -> int | None:
    """How many ranks with these settings fit here, which are less than were asked for; None: not even one."""
    plan = capacity.plan
    fit = (free - plan.weights) // (plan.pages + plan.slots + plan.step + plan.other)
    return fit if 1 <= fit < capacity.ranks_on_device else None


def own_fingerprint(config: NodeConfig) -> str | None:
    """None when it cannot be known, or only by reading too much."""
    if not is_installed("torch"):
        return None
    from node.preflight import fingerprint

    try:
        nbytes = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
        return fingerprint(config) if nbytes <= _MAX_READ_BYTES else None
    except (ConfigError, OSError):
        return None
