"""Text to token ids, and token ids back to text as they come.

A stream of tokens is not a stream of characters: one character may be spread over several tokens. The detokenisers here
hold back what is not yet a whole character and hand out the rest. Two of them: byte-level vocabularies (all bundled and
most Hugging Face models) are decoded exactly and at constant cost; any other goes through a window of recent tokens.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from common.errors import ConfigError

MAX_HELD_TOKENS = 16
REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Turns one sequence's tokens into text."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The characters that these tokens complete. May be empty."""
        ...

    def finish(self) -> str:
        """What was held back: U+FFFD for bytes that never became a character."""
        ...


class Tokenizer:
    """A model folder's tokenizer.json. Made by `load_tokenizer`.

    longest_token_bytes: no token stands for more bytes of a prompt, so n tokens hold at most n times as many. (But for
    what a normaliser drops or an unknown token swallows: no prompt that makes sense is made of that.) special_tokens:
    the texts of those that are no text of an answer. tag_tokens: of those that are text and in angle brackets,
    `<tool_call>` of Qwen; a grammar names them as it names special ones, to which llguidance counts them.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        added = inner.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_tokens = frozenset(added[i].content for i in self._special_ids)
        others = {token.content for token in added.values()} - self.special_tokens
        self.tag_tokens = frozenset(text for text in others if text.startswith("<") and text.endswith(">"))
        self._is_byte_level = isinstance(inner.decoder, tokenizers.decoders.ByteLevel)
        to_bytes = _byte_level_bytes if self._is_byte_level else str.encode
        self.longest_token_bytes = max(len(to_bytes(token)) for token in inner.get_vocab())
        self._bytes_of: dict[int, bytes] = {}
        self._text_of: dict[int, str] = {}

    @property
    def vocab_size(self) -> int:
        return self._inner.get_vocab_size()

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. special_tokens: with those that tokenizer.json's post-processor adds."""
        return self._inner.encode(text, add_special_tokens=special_tokens).ids

    def encode_long(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The same as `encode`, for a thread: here the library lets other threads run meanwhile."""
        return self._inner.encode_batch_fast([text], add_special_tokens=special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The whole text of a finished sequence; bytes that are no character become U+FFFD."""
        return self._inner.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text of one token alone, special ones included."""
        text = self._text_of.get(token_id)
        if text is None:
            text = self._text_of[token_id] = self._inner.decode([token_id], skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """What one token of a byte-level vocabulary stands for. Empty for an id without a token."""
        found = self._bytes_of.get(token_id)
        if found is None:
            found = self._bytes_of[token_id] = _byte_level_bytes(self._inner.id_to_token(token_id) or "")
        return found

    def piece(self, token_id: int) -> bytes:
        """What one token alone adds to a text, special ones included; where it is not byte-level, nearly."""
        return self.token_bytes(token_id) if self._is_byte_level else self.token_text(token_id).encode()

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        skipped = self._special_ids if skip_special_tokens else frozenset()
        if self._is_byte_level:
            return ByteLevelDetokenizer(self, skipped)
        return WindowDetokenizer(self, skipped)


class ByteLevelDetokenizer:
    """Exact, and constant cost a token: every token is a known piece of a UTF-8 stream."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(self._bytes_of(i) for i in token_ids if i not in self._skipped))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For any vocabulary: decodes the last few tokens with and without the new ones and hands out the difference.

    Text that ends in U+FFFD may be half a character and waits, for `MAX_HELD_TOKENS` tokens at most, so that a model
    that produces broken bytes for ever costs no more than one that does not.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._decode = tokenizer.decode
        self._skipped = skipped
        self._context: list[int] = []  # handed out already; gives the new tokens their neighbours
        self._held: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """One by one: the text does not depend on how many tokens come at once."""
        return "".join(self._push(i) for i in token_ids if i not in self._skipped)

    def _push(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._held) <= MAX_HELD_TOKENS:
            return ""
        self._context, self._held = self._held, []
        return text

    def finish(self) -> str:
        text = self._new_text()
        self._context, self._held = self._held, []
        return text

    def _new_text(self) -> str:
        if not self._held:
            return ""
        known = self._decode(self._context, False) if self._context else ""
        return self._decode(self._context + self._held, False)[len(known) :]


def load_tokenizer(model_path: str) -> Tokenizer:
    """Raises ConfigError when the folder has no tokenizer.json or the file is broken."""
    path = Path(model_path) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"--model-path {model_path}: no tokenizer.json in it", param="model_path")
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(
            f"--model-path {model_path}: tokenizer.json is broken: {error}", param="model_path"
        ) from error
    inner.no_padding()
    inner.no_truncation()
    return Tokenizer(inner)


def load_eos_token_ids(model_path: str) -> frozenset[int]:
    """End-of-sequence ids: generation_config.json's, else config.json's (`eos_token_id`, a number or a list)."""
    for name in ("generation_config.json", "config.json"):
        value = load_json(Path(model_path) / name).get("eos_token_id")
        if value is not None:
            return frozenset(value if isinstance(value, list) else [value])
    return frozenset()


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object of a model folder; empty when there is no such file. Raises ConfigError when it is broken."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}", param="model_path") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a JSON object", param="model_path")
    return value


def _byte_level_bytes(token: str) -> bytes:
    """A byte-level token writes each byte as one printable character; one that does not is its own text."""
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """The GPT-2 byte alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
