"""`sampling_params` of a request: every name an SGLang server takes, its range, and the ones that are refused."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from common.errors import RequestError
from common.refusals import check_known, refuse
from common.sampling import SamplingParams
from node.fields import NumberRule, read_bool, read_number, read_string, read_token_ids

MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_GRAMMAR_CHARACTERS = 65_536
GREEDY_BELOW = 1e-6  # a smaller temperature would overflow the logits; it means greedy, as at SGLang

_COUNT = NumberRule(integer=True, low=0, high=MAX_COUNT)
_PENALTY = NumberRule(integer=False, low=-2, high=2)
_NUMBERS: dict[str, NumberRule] = {
    "max_new_tokens": _COUNT,
    "min_new_tokens": _COUNT,
    "temperature": NumberRule(integer=False, low=0, high=100),
    "top_p": NumberRule(integer=False, low=0, high=1, above_low=True),
    "top_k": NumberRule(integer=True, low=1, high=MAX_COUNT, also=-1),
    "min_p": NumberRule(integer=False, low=0, high=1),
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "repetition_penalty": NumberRule(integer=False, low=0, high=2, above_low=True),
    "sampling_seed": NumberRule(integer=True, low=0, high=MAX_SEED),
    "stream_interval": NumberRule(integer=True, low=1, high=MAX_COUNT),
}
_SAMPLES = NumberRule(integer=True, low=1, high=128)
_BIAS = NumberRule(integer=False, low=-100, high=100)
_BOOLS = frozenset({"ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"})
_LISTS = frozenset({"stop", "stop_token_ids", "logit_bias"})
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_UNSUPPORTED = frozenset({"stop_regex", "custom_params"})
_KNOWN = _BOOLS | _LISTS | _UNSUPPORTED | {"n", *_NUMBERS, *_GRAMMARS}


class GrammarSource(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer has to follow, as the client wrote it. kind: json_schema, regex, ebnf or structural_tag. path: the
    field that it came in."""

    kind: str
    text: str
    path: str


class SamplingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt's sampling_params. is_length_open: the client named no length, so the answer may be cut to what fits.

    params.sampling_seed is the client's, or a random one. grammar: params.grammar is made of it (`node/grammars.py`).
    """

    params: SamplingParams
    num_samples: int
    is_length_open: bool
    grammar: GrammarSource | None = None

    def again(self, raw: dict[str, Any]) -> SamplingRequest:
        """The same for another prompt with the same raw parameters: with a seed of its own unless they name one."""
        if raw.get("sampling_seed") is not None:
            return self
        return msgspec.structs.replace(self, params=msgspec.structs.replace(self.params, sampling_seed=_random_seed()))

    def following(self, grammar: str) -> SamplingRequest:
        """The same with this grammar in the engine's form."""
        return msgspec.structs.replace(self, params=msgspec.structs.replace(self.params, grammar=grammar))

    def sample(self, i: int, max_new_tokens: int) -> SamplingParams:
        """Rules of sample i of this prompt: its own seed, no more than max_new_tokens."""
        length = min(self.params.max_new_tokens, max_new_tokens)
        return msgspec.structs.replace(
            self.params,
            max_new_tokens=length,
            min_new_tokens=min(self.params.min_new_tokens, length),
            sampling_seed=(self.params.sampling_seed + i) % (MAX_SEED + 1),
        )


def read_sampling(where: str, raw: Any, vocab_size: int) -> SamplingRequest:
    """where: `sampling_params` or `sampling_params[3]`, for messages. Raises RequestError."""
    if not isinstance(raw, dict):
        refuse(where, raw, "an object of sampling parameters")
    given = {name: value for name, value in raw.items() if value is not None}
    check_known(where, given, _KNOWN)
    _check_supported(where, given)
    values: dict[str, Any] = {"sampling_seed": _random_seed()}
    for name in given.keys() & _NUMBERS.keys():
        values[name] = read_number(f"{where}.{name}", given[name], _NUMBERS[name])
    for name in given.keys() & _BOOLS:
        values[name] = read_bool(f"{where}.{name}", given[name])
    for name in given.keys() & _LISTS:
        values[name] = _read_list(f"{where}.{name}", name, given[name], vocab_size)
    if "max_new_tokens" in raw and raw["max_new_tokens"] is None:
        values["max_new_tokens"] = MAX_COUNT  # null: as long as fits; left out: the default
    grammar = _read_grammar(where, given)
    if grammar is not None:
        values["ignore_eos"] = False  # the grammar says where the answer may end
    return SamplingRequest(
        params=_check_together(where, SamplingParams(**values)),
        num_samples=read_number(f"{where}.n", given.get("n", 1), _SAMPLES),
        is_length_open="max_new_tokens" not in given,
        grammar=grammar,
    )


def _random_seed() -> int:
    return secrets.randbelow(MAX_SEED + 1)


def _check_supported(where: str, given: dict[str, Any]) -> None:
    for name in sorted(given.keys() & _UNSUPPORTED):
        raise RequestError(
            f"{where}.{name}: not supported",
            code="unsupported_parameter",
            param=f"{where}.{name}",
        )


def _read_grammar(where: str, given: dict[str, Any]) -> GrammarSource | None:
    kinds = [name for name in _GRAMMARS if name in given]
    if not kinds:
        return None
    path = f"{where}.{kinds[0]}"
    if len(kinds) > 1:
        raise RequestError(f"{path}: {where}.{kinds[1]} is given too, but only one of them may be", param=path)
    value = given[kinds[0]]
    if isinstance(value, dict) and kinds[0] in ("json_schema", "structural_tag"):
        value = msgspec.json.encode(value).decode()
    if isinstance(value, str) and len(value) > MAX_GRAMMAR_CHARACTERS:
        raise RequestError(f"{path}: {len(value)} characters, at most {MAX_GRAMMAR_CHARACTERS}", param=path)
    text = read_string(path, value, max_length=MAX_GRAMMAR_CHARACTERS)
    return GrammarSource(kind=kinds[0], text=text, path=path)


def _check_together(where: str, params: SamplingParams) -> SamplingParams:
    if params.min_new_tokens > params.max_new_tokens:
        refuse(f"{where}.min_new_tokens", params.min_new_tokens, f"at most max_new_tokens, {params.max_new_tokens}")
    if params.temperature < GREEDY_BELOW:
        return msgspec.structs.replace(params, temperature=0.0)
    return params


def _read_list(path: str, name: str, value: Any, vocab_size: int) -> tuple[Any, ...]:
    match name:
        case "stop":
            return _read_stops(path, value)
        case "stop_token_ids":
            return tuple(read_token_ids(path, value, vocab_size))
        case "logit_bias":
            return _read_logit_bias(path, value, vocab_size)
        case _:
            raise AssertionError(f"unknown list parameter {name}")


def _read_stops(path: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (read_string(path, value, max_length=MAX_STOP_CHARACTERS),)
    if not isinstance(value, list) or len(value) > MAX_STOPS:
        refuse(path, value, f"a string or a list of at most {MAX_STOPS} strings")
    return tuple(read_string(f"{path}[{i}]", stop, max_length=MAX_STOP_CHARACTERS) for i, stop in enumerate(value))


def _read_logit_bias(path: str, value: Any, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        refuse(path, value, "an object from token ids to biases")
    return tuple(_read_bias(path, key, bias, vocab_size) for key, bias in value.items())


def _read_bias(path: str, key: str, bias: Any, vocab_size: int) -> tuple[int, float]:
    if not (key.isascii() and key.isdigit() and len(key) < 20 and int(key) < vocab_size):
        refuse(f"{path}.{key[:40]}", key, f"a token id of the vocabulary, from 0 to {vocab_size - 1}")
    return int(key), read_number(f"{path}.{key}", bias, _BIAS)
