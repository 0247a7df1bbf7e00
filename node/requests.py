"""POST /generate, from a JSON object to sequences: every field of SGLang's request, checked and made complete.

    JSON object ──► parse ──► (tokenise the texts) ──► expand ──► one Submit a sequence

Sequences are in prompt-major order: the n samples of the first prompt, then those of the second. All errors are
`RequestError`s that name the field and the value.
"""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from common.config import Role
from common.errors import RequestError
from common.handoff import RoomAddress
from common.refusals import refuse
from common.sampling import LogprobOptions, SamplingParams
from node.fields import NumberRule, check_distinct, read_bool, read_each, read_number, read_string, read_token_ids
from node.limits import ServingLimits
from node.messages import Submit
from node.request_names import check_names
from node.resume import NOTHING, Resume, check_length, read_resume
from node.rooms import read_rooms
from node.sampling_fields import SamplingRequest, read_sampling

_RANK_FIELDS = ("routed_dp_rank", "data_parallel_rank")  # SGLang's name and its older one

MAX_SEQUENCES = 512
MAX_TEXTS_BYTES = 4 * 1024 * 1024
MAX_RID_CHARACTERS = 256
MAX_EXTRA_KEY_CHARACTERS = 1024
MAX_TOP_LOGPROBS = 1024
MAX_LISTED = 2**20  # characters of stop strings, stop tokens, biases: of all sequences of a request
MAX_GRAMMAR_CHARACTERS = 2**23  # likewise
MAX_PROMPT_ALTERNATIVES = 2**20  # positions of prompts times top_logprobs_num: the front writes out each of them


class ParsedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked body whose texts are not tokenised yet.

    prompts: of `field`, all texts or all token ids. sampling: one a prompt. The lists after it: one a sequence.
    is_list: the answer is a list. groups: the rid that the client gave to this and other sequences together, if it did.
    resume: what there is of the answer of a single sequence.
    """

    field: str
    prompts: list[str] | list[list[int]]
    is_list: bool
    sampling: list[SamplingRequest]
    num_samples: int
    logprobs: list[LogprobOptions]
    rids: list[str]
    groups: list[str | None]
    extra_keys: list[str | None]
    rooms: list[RoomAddress | None]
    dp_rank: int | None
    stream: bool
    return_text: bool
    resume: Resume


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks get (`submits`) and how the client wants its answer. groups: one a sequence. resume: what there is
    of that answer already."""

    submits: list[Submit]
    is_list: bool
    groups: list[str | None]
    dp_rank: int | None
    stream: bool
    return_text: bool
    resume: Resume = NOTHING


def parse(raw: dict[str, Any], limits: ServingLimits) -> ParsedRequest:
    """Check everything that needs no tokenizer."""
    check_names(raw)
    field, prompts, is_batch = _read_prompts(raw, limits)
    _check_count(field, len(prompts))
    sampling = _read_all_sampling(raw, len(prompts), limits)
    num_samples = sampling[0].num_samples
    total = len(prompts) * num_samples
    _check_count("sampling_params.n", total)
    _check_lists(sampling)
    is_list = is_batch or num_samples > 1
    groups, rids = _read_rids(raw, len(prompts), total, is_list)
    logprobs = _read_logprobs(raw, len(prompts), total)
    return ParsedRequest(
        field=field,
        prompts=prompts,
        is_list=is_list,
        sampling=sampling,
        num_samples=num_samples,
        logprobs=logprobs,
        rids=rids,
        groups=groups,
        extra_keys=_read_extra_keys(raw, len(prompts), total),
        rooms=read_rooms(raw, len(prompts), total, limits),
        dp_rank=_read_dp_rank(raw, limits),
        stream=read_bool("stream", _get(raw, "stream", False)),
        return_text=read_bool("return_text_in_logprobs", _get(raw, "return_text_in_logprobs", False)),
        resume=read_resume(raw.get("resume"), limits.vocab_size, total, logprobs=logprobs[0].wanted),
    )


def check_text_sizes(texts: list[str], longest_token_bytes: int, limits: ServingLimits) -> None:
    """Refuse what is too long in any case, before it costs the time of tokenising."""
    longest = limits.context_length * longest_token_bytes
    sizes = [len(text.encode()) for text in texts]
    for i, size in enumerate(sizes):
        if size > longest:
            name = f"text[{i}]" if len(texts) > 1 else "text"
            raise RequestError(
                f"{name}: it has {size} bytes, but a context of {limits.context_length} tokens holds at most {longest}",
                code="context_length_exceeded",
                param=name,
            )
    total = max(longest, MAX_TEXTS_BYTES)
    if sum(sizes) > total:
        raise RequestError(f"text: {sum(sizes)} bytes in all, at most {total} in one request", param="text")


def expand(
    parsed: ParsedRequest, token_ids: list[list[int]], limits: ServingLimits, *, arrival_s: float
) -> GenerateRequest:
    """The sequences of a request. token_ids: one list a prompt, up to the first that is too long. Refuses prompts and
    answers that cannot fit."""
    submits = []
    for i, prompt in enumerate(token_ids):
        name = f"{parsed.field}[{i}]" if parsed.is_list and len(parsed.prompts) > 1 else parsed.field
        room_left = _tokens_left(name, prompt, parsed.sampling[i], limits)
        for k in range(parsed.num_samples):
            place = i * parsed.num_samples + k
            _check_start_len(parsed.logprobs[place], len(prompt))
            sampling = parsed.sampling[i].sample(k, room_left)
            check_length(parsed.resume, len(prompt), sampling.max_new_tokens, limits.max_total_tokens)
            submits.append(
                Submit(
                    rid=parsed.rids[place],
                    token_ids=prompt,
                    sampling=sampling,
                    logprobs=parsed.logprobs[place],
                    room=parsed.rooms[place],
                    arrival_s=arrival_s,
                    extra_key=parsed.extra_keys[place],
                    output_ids=parsed.resume.output_ids,
                )
            )
    _check_alternatives(submits)
    return GenerateRequest(
        submits=submits,
        is_list=parsed.is_list,
        groups=parsed.groups,
        dp_rank=parsed.dp_rank,
        stream=parsed.stream,
        return_text=parsed.return_text,
        resume=parsed.resume,
    )


def _check_count(name: str, num_sequences: int) -> None:
    if num_sequences > MAX_SEQUENCES:
        raise RequestError(f"{name}: {num_sequences} sequences, at most {MAX_SEQUENCES} in one request", param=name)


def _check_lists(sampling: list[SamplingRequest]) -> None:
    """Each sequence takes its own copy of these to its rank, so they are bounded together."""
    for name, what, size in (
        ("stop", "characters", _stop_characters),
        ("stop_token_ids", "token ids", lambda params: len(params.stop_token_ids)),
        ("logit_bias", "token ids", lambda params: len(params.logit_bias)),
    ):
        total = sum(size(one.params) * one.num_samples for one in sampling)
        _check_total(f"sampling_params.{name}", what, total, MAX_LISTED)
    grammars = [(one.grammar, one.num_samples) for one in sampling if one.grammar is not None]
    if grammars:
        total = sum(len(grammar.text) * n for grammar, n in grammars)
        _check_total(grammars[0][0].path, "characters", total, MAX_GRAMMAR_CHARACTERS)


def _check_total(path: str, what: str, total: int, most: int) -> None:
    if total > most:
        raise RequestError(f"{path}: {total} {what} over all sequences, at most {most}", param=path)


def _stop_characters(params: SamplingParams) -> int:
    return sum(map(len, params.stop))


def _get(raw: dict[str, Any], name: str, default: Any) -> Any:
    value = raw.get(name)
    return default if value is None else value


# -- prompts -----------------------------------------------------------------------------------------------------------


def _read_prompts(raw: dict[str, Any], limits: ServingLimits) -> tuple[str, list[str] | list[list[int]], bool]:
    """(field, prompts, whether the client sent a batch)."""
    text, input_ids = raw.get("text"), raw.get("input_ids")
    if text is None and input_ids is None:
        raise RequestError("text or input_ids: one of them must be given", param="text")
    if text is not None and input_ids is not None:
        raise RequestError("input_ids: text is given too, but only one of them may be", param="input_ids")
    if text is not None:
        prompts, is_batch = _read_texts(text)
        return "text", prompts, is_batch
    ids, is_batch = _read_input_ids(input_ids, limits.vocab_size)
    return "input_ids", ids, is_batch


def _read_texts(text: Any) -> tuple[list[str], bool]:
    if isinstance(text, list):
        if not text:
            refuse("text", text, "a string or a list of at least one string")
        return [_read_text(f"text[{i}]", item) for i, item in enumerate(text)], True
    return [_read_text("text", text)], False


def _read_text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        refuse(name, value, "a string that is not empty")
    return value


def _read_input_ids(input_ids: Any, vocab_size: int) -> tuple[list[list[int]], bool]:
    if not isinstance(input_ids, list) or not input_ids:
        refuse("input_ids", input_ids, "a list of at least one token id, or a list of such lists")
    if not isinstance(input_ids[0], list):
        return [read_token_ids("input_ids", input_ids, vocab_size)], False
    for i, item in enumerate(input_ids):
        if item == []:
            refuse(f"input_ids[{i}]", item, "a list of at least one token id")
    return [read_token_ids(f"input_ids[{i}]", item, vocab_size) for i, item in enumerate(input_ids)], True


def _read_all_sampling(raw: dict[str, Any], batch: int, limits: ServingLimits) -> list[SamplingRequest]:
    """One a prompt. All must ask for the same number of samples, as at SGLang."""
    value = _get(raw, "sampling_params", {})
    if not isinstance(value, list):
        first = read_sampling("sampling_params", value, limits.vocab_size)
        return [first, *(first.again(value) for _ in range(batch - 1))]
    if len(value) != batch:
        raise RequestError(
            f"sampling_params: a list of {len(value)}, but the batch needs {batch}", param="sampling_params"
        )
    requests = [read_sampling(f"sampling_params[{i}]", item or {}, limits.vocab_size) for i, item in enumerate(value)]
    for i, request in enumerate(requests):
        if request.num_samples != requests[0].num_samples:
            refuse(
                f"sampling_params[{i}].n", request.num_samples, f"{requests[0].num_samples}, as for the first prompt"
            )
    return requests


def _tokens_left(name: str, prompt: list[int], sampling: SamplingRequest, limits: ServingLimits) -> int:
    """How many tokens the answer may have. Raises RequestError when prompt and answer together cannot fit."""
    length = len(prompt)
    if length == 0:
        raise RequestError(f"{name}: it has no tokens", param=name)
    if length >= limits.context_length:
        raise RequestError(
            f"{name}: the prompt has {length} tokens, but the context is {limits.context_length}, the answer included",
            code="context_length_exceeded",
            param=name,
        )
    left = limits.context_length - length
    memory_left = limits.max_total_tokens - length
    if sampling.is_length_open:
        left = max(0, min(left, memory_left))
    wanted = 0 if limits.role is Role.PREFILL else min(left, sampling.params.max_new_tokens)
    if wanted > memory_left:
        raise RequestError(
            f"{name}: {length} prompt tokens and {wanted} new ones (max_new_tokens), but all pages together hold "
            f"{limits.max_total_tokens}",
            code="too_many_tokens",
            param=name if memory_left <= 0 else "sampling_params.max_new_tokens",
        )
    return left


# -- the lists of a batch ----------------------------------------------------------------------------------------------


def _read_rids(raw: dict[str, Any], batch: int, total: int, is_list: bool) -> tuple[list[str | None], list[str]]:
    """(the group of each sequence, its rid). A rid for several sequences is their group; theirs end in `_0`, `_1`, …"""
    value = raw.get("rid")
    if value is None:
        return [None] * total, [uuid.uuid4().hex for _ in range(total)]
    if isinstance(value, list) and None in value:
        refuse(f"rid[{value.index(None)}]", None, f"a string of 1 to {MAX_RID_CHARACTERS} characters")
    given = read_each("rid", value, (batch, total), _read_rid, "", total=total)
    sharers = total // len(value) if isinstance(value, list) else total
    if sharers == 1 and not (is_list and isinstance(value, str)):
        check_distinct("rid", given)
        return [None] * total, given
    rids = [f"{rid}_{i % sharers}" for i, rid in enumerate(given)]
    check_distinct("rid", rids)
    return list(given), rids


def _read_rid(name: str, value: Any) -> str:
    return read_string(name, value, max_length=MAX_RID_CHARACTERS)


def _read_extra_keys(raw: dict[str, Any], batch: int, total: int) -> list[str | None]:
    return read_each("extra_key", raw.get("extra_key"), (batch, total), _read_extra_key, None, total=total)


def _read_extra_key(name: str, value: Any) -> str | None:
    return read_string(name, value, max_length=MAX_EXTRA_KEY_CHARACTERS)


def _read_logprobs(raw: dict[str, Any], batch: int, total: int) -> list[LogprobOptions]:
    lengths = (batch, total)
    start = NumberRule(integer=True, low=-1, high=2**31 - 1)
    top = NumberRule(integer=True, low=0, high=MAX_TOP_LOGPROBS)

    def read_start(name: str, value: Any) -> int:
        return int(read_number(name, value, start))

    def read_top(name: str, value: Any) -> int:
        return int(read_number(name, value, top))

    wanted = read_each("return_logprob", raw.get("return_logprob"), lengths, read_bool, False, total=total)
    starts = read_each("logprob_start_len", raw.get("logprob_start_len"), lengths, read_start, -1, total=total)
    tops = read_each("top_logprobs_num", raw.get("top_logprobs_num"), lengths, read_top, 0, total=total)
    return [
        LogprobOptions(wanted=True, start_len=s, top_num=t) if w else LogprobOptions()
        for w, s, t in zip(wanted, starts, tops, strict=True)
    ]


def _check_start_len(options: LogprobOptions, num_prompt_tokens: int) -> None:
    if options.start_len >= num_prompt_tokens:
        refuse("logprob_start_len", options.start_len, f"below the prompt's length of {num_prompt_tokens} tokens")


def _check_alternatives(submits: list[Submit]) -> None:
    asked = [submit for submit in submits if submit.logprobs.start_len >= 0]
    total = sum((len(submit.token_ids) - submit.logprobs.start_len) * submit.logprobs.top_num for submit in asked)
    if total > MAX_PROMPT_ALTERNATIVES:
        raise RequestError(
            f"top_logprobs_num: {total} alternatives of the prompts' positions, at most {MAX_PROMPT_ALTERNATIVES}",
            param="top_logprobs_num",
        )


def _read_dp_rank(raw: dict[str, Any], limits: ServingLimits) -> int | None:
    """The rank that the client chose. A prefill node's rank follows from the room, so there it is only checked."""
    high = 2**31 - 1 if limits.role is Role.PREFILL else limits.num_ranks - 1
    rule = NumberRule(integer=True, low=0, high=high)
    given = {name: raw[name] for name in _RANK_FIELDS if raw.get(name) is not None}
    ranks = {name: int(read_number(name, value, rule)) for name, value in given.items()}
    if len(set(ranks.values())) > 1:
        first, second = ranks.items()
        raise RequestError(f"{second[0]}: {second[1]}, but {first[0]} is {first[1]}", param=second[0])
    return None if limits.role is Role.PREFILL else next(iter(ranks.values()), None)
