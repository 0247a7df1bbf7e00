"""The names that a /generate body may have: all of an SGLang server's, sorted by what this project does with them."""

from __future__ import annotations

from typing import Any

from common.errors import RequestError
from common.refusals import check_known

_HONOURED = frozenset(
    [
        "text",
        "input_ids",
        "sampling_params",
        "stream",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "return_text_in_logprobs",
        "rid",
        "extra_key",
        "resume",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "routed_dp_rank",
        "data_parallel_rank",
    ]
)
_ACCEPTED = frozenset(  # taken and without effect: scheduling hints, tracing, what only other set-ups need
    [
        "model",
        "priority",
        "routing_key",
        "bootstrap_pair_key",
        "decode_tp_size",
        "disagg_prefill_dp_rank",
        "log_metrics",
        "background",
        "conversation_id",
        "no_logs",
        "custom_labels",
        "external_trace_header",
        "http_worker_ipc",
        "return_bytes",
        "modalities",
        "validation_time",
        "received_time",
        "received_time_perf",
        "routed_experts_start_len",
    ]
)
_UNSUPPORTED = frozenset(  # refused unless empty
    [
        "input_embeds",
        "image_data",
        "video_data",
        "audio_data",
        "token_ids_logprob",
        "return_hidden_states",
        "return_routed_experts",
        "return_entropy",
        "session_params",
        "lora_path",
        "lora_id",
        "custom_logit_processor",
        "require_reasoning",
    ]
)
_KNOWN = _HONOURED | _ACCEPTED | _UNSUPPORTED


def check_names(raw: dict[str, Any]) -> None:
    """Refuse names nobody knows and features that are not there, unless their value is null or empty."""
    check_known("", (name for name, value in raw.items() if value is not None), _KNOWN)
    for name in sorted(raw.keys() & _UNSUPPORTED):
        value = raw[name]
        is_empty = not value or (isinstance(value, list) and not any(value))
        if not is_empty:
            raise RequestError(f"{name}: not supported", code="unsupported_parameter", param=name)
