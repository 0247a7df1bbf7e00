"""What the policies may know of a request: how large it is, how its prompt begins, and its routing key.

The beginning of a prompt is a path of hashes, one for each block, each of everything up to there. Blocks grow with
their distance from the start, so that a path is short however long the prompt is, and says of any two prompts how much
they share to within a few per cent. Tokens are not known here: a token counts as four bytes of text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from common.errors import RequestError
from common.refusals import refuse
from router.loads import SEQUENCE_TOKENS

BYTES_PER_TOKEN = 4
MAX_BYTES = 2**20
"""Of a prompt's beginning that are looked at: a quarter of a million tokens."""
_FIRST_BLOCK_BYTES = 256
_BLOCKS_OF_A_SIZE = 32


def _edges() -> tuple[int, ...]:
    """Where blocks end: 32 of 256 bytes, 32 of 512, and so on."""
    edges, end, size = [], 0, _FIRST_BLOCK_BYTES
    while end + size <= MAX_BYTES:
        end += size
        edges.append(end)
        if len(edges) % _BLOCKS_OF_A_SIZE == 0:
            size *= 2
    return tuple(edges)


EDGES = _edges()


RANK_FIELDS = ("routed_dp_rank", "data_parallel_rank")
_KEY_HEADERS = (b"x-routing-key", b"x-smg-routing-key")
_MAX_KEY_CHARACTERS = 1024
_MAX_MESSAGES = 4096


class Path(NamedTuple):
    """hashes: of the prompt up to each of its `EDGES`. num_bytes: of the prompt, as far as it is looked at."""

    hashes: tuple[int, ...]
    num_bytes: int

    def shared(self, num_blocks: int) -> float:
        """Which part of the prompt its first blocks are: 0 … 1."""
        return EDGES[num_blocks - 1] / self.num_bytes if num_blocks else 0.0


class Affinity:
    """Of one request, made from its JSON object; what is no prompt has an empty path, and the nodes refuse it.

    num_sequences: prompts times n. routing_key: requests of the same one belong together (`Sticky`).
    """

    def __init__(self, fields: dict[str, Any], *, num_sequences: int = 1) -> None:
        self._fields = fields
        self.num_sequences = num_sequences

    @property
    def routing_key(self) -> str | None:
        key = self._fields.get("routing_key")
        return key if isinstance(key, str) else None

    @property
    def rank(self) -> int | None:
        """The decode rank that the client wants; what is no number is the node's to refuse."""
        found = next((rank for name in RANK_FIELDS if (rank := self._fields.get(name)) is not None), None)
        return found if isinstance(found, int) else None

    def check_rank(self, num_ranks: int) -> None:
        """num_ranks: of the decode node that has most. Raises RequestError as a node would, before any leg opens."""
        given = {name: rank for name in RANK_FIELDS if (rank := self._fields.get(name)) is not None}
        for name, rank in given.items():
            is_number = isinstance(rank, int | float) and not isinstance(rank, bool)
            if not (is_number and 0 <= rank < num_ranks and rank == int(rank)):
                refuse(name, rank, f"an integer from 0 to {num_ranks - 1}" if num_ranks > 1 else "0, the only rank")
        if len(set(given.values())) > 1:
            first, second = given.items()
            raise RequestError(f"{second[0]}: {second[1]}, but {first[0]} is {first[1]}", param=second[0])

    @cached_property
    def num_tokens(self) -> int:
        """Of all prompts of the request, once for each sequence, as an estimate."""
        if isinstance(messages := self._fields.get("messages"), list):
            return sum(map(_message_tokens, messages[:_MAX_MESSAGES])) * self.num_sequences
        prompts = self._prompts
        total = sum(map(_num_tokens, prompts))
        return total * max(1, self.num_sequences // max(1, len(prompts)))

    @property
    def weight(self) -> int:
        """What the request adds to a load, in tokens."""
        return self.num_tokens + SEQUENCE_TOKENS * self.num_sequences

    @cached_property
    def path(self) -> Path:
        """Of the first prompt."""
        fields = self._fields
        if isinstance(messages := fields.get("messages"), list):
            start = _start(_chat_text(messages[:_MAX_MESSAGES], fields.get("tools")))
        else:
            start = _start(next(iter(self._prompts), None))
        return make_path(start, seed=_key_hash(fields))

    @property
    def _prompts(self) -> list[Any]:
        """Each a text or a list of token ids."""
        fields = self._fields
        found = next((fields[name] for name in ("text", "input_ids", "prompt") if fields.get(name) is not None), None)
        if isinstance(found, list) and found and isinstance(found[0], str | list):
            return found
        return [] if found is None else [found]


def take_routing_key(fields: dict[str, Any], headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Put a header's into the body, which it does not overrule. Raises RequestError for what is no key."""
    if fields.get("routing_key") is None:
        found = next((value for name, value in headers if name in _KEY_HEADERS), None)
        if found is None:
            return
        fields["routing_key"] = found.decode("latin-1")
    key = fields["routing_key"]
    if not isinstance(key, str) or not 0 < len(key) <= _MAX_KEY_CHARACTERS:
        raise RequestError(f"routing_key: a string of 1 to {_MAX_KEY_CHARACTERS} characters", param="routing_key")


def make_path(start: bytes, *, seed: int = 0) -> Path:
    view, hashes, begin = memoryview(start), [], 0
    for end in EDGES[: bisect_right(EDGES, len(start))]:
        seed = xxh3_64_intdigest(view[begin:end], seed)
        hashes.append(seed)
        begin = end
    return Path(tuple(hashes), len(start))


def _num_tokens(prompt: object) -> int:
    if isinstance(prompt, str):
        return len(prompt) // BYTES_PER_TOKEN
    return len(prompt) if isinstance(prompt, list) else 0


def _message_tokens(message: object) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    return _num_tokens(content) if isinstance(content, str) else len(_json(message)) // BYTES_PER_TOKEN


def _start(prompt: object) -> bytes:
    """Token ids as they are written: the quickest way, and about as many bytes as their text has."""
    if isinstance(prompt, str):
        return prompt[:MAX_BYTES].encode("utf-8", "replace")[:MAX_BYTES]
    return _json(prompt[: MAX_BYTES // BYTES_PER_TOKEN])[:-1][:MAX_BYTES] if isinstance(prompt, list) else b""


def _chat_text(messages: list[Any], tools: object) -> str:
    """Begins as the text of the conversation's next turn will begin. What templates put in front goes in front."""
    parts = [] if tools is None else [_json(tools).decode()]
    left = MAX_BYTES
    for message in messages:
        if left <= 0:
            break
        parts.append(_message_text(message)[:left])
        left -= len(parts[-1])
    return "\n".join([*parts, ""])


def _message_text(message: object) -> str:
    """The text alone where there is one, so that a long message is not copied more than once."""
    if isinstance(message, dict) and isinstance(message.get("content"), str):
        return f"{message.get('role')}\n{message['content']}"
    return _json(message).decode()


def _json(value: object) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (RecursionError, ValueError):
        return b""


def _key_hash(fields: dict[str, Any]) -> int:
    """Nothing is shared between requests of different keys."""
    key = fields.get("extra_key", fields.get("cache_salt"))  # the latter at OpenAI's endpoints
    if isinstance(key, list) and key:
        key = key[0]
    return xxh3_64_intdigest(key.encode("utf-8", "replace")) if isinstance(key, str) else 0
