"""The prompt's logprobs come from the prefill leg, the answer's from the decode leg: both go into one answer.

With many alternatives they are megabytes, and every event of a stream repeats them. So nothing is read that need not
be: JSON that stays as it is passes as bytes (`Raw`), and the prompt's part is cut out once.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from msgspec import Raw

from common.errors import RequestError, WorkerError
from common.json_body import BAD_JSON
from router.request import GENERATE

_FIELDS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
_NULL = Raw(b"null")
_MAX_BYTES = 64 * 2**20
"""Of a prefill answer. A prompt that comes as text may have more positions than the router could know beforehand."""

Object = dict[str, Raw]
Values = list[Raw] | None


class Merger(Protocol):
    """What one prefill answer says of the prompt.

    All of it raises WorkerError (502) for answers of another shape; RequestError for a body beyond reason.
    """

    def merge_answer(self, body: bytes) -> bytes:
        """A whole decode answer with the prompt's logprobs in it."""
        ...

    def merge_event(self, event: bytes) -> bytes:
        """One server-sent event, without its final blank line. Events that carry no object are returned unchanged."""
        ...


def merger(path: str, body: bytes) -> Merger:
    """body: of the prefill leg's answer at this path."""
    if len(body) > _MAX_BYTES:
        name = "top_logprobs_num" if path == GENERATE else "logprobs"
        message = f"{name}: the prompt's log-probabilities have more than {_MAX_BYTES} bytes"
        raise RequestError(message, param=name)
    return PromptLogprobs(body) if path == GENERATE else PromptChoices(body)


class _PromptMeta(msgspec.Struct):
    input_token_logprobs: Values = None
    input_top_logprobs: Values = None
    input_token_ids_logprobs: Values = None


class _PromptItem(msgspec.Struct):
    meta_info: _PromptMeta | None = None


class PromptLogprobs:
    """Of /generate, where every event repeats them. body: one object or a list in the order of the sequences."""

    def __init__(self, body: bytes) -> None:
        items = _decode(body, list[_PromptItem] | _PromptItem)
        self._parts = [_parts(item.meta_info) for item in (items if isinstance(items, list) else [items])]

    def merge_answer(self, body: bytes) -> bytes:
        answer = _decode(body, list[Object] | Object)
        if not isinstance(answer, list):
            return b"".join(self._merged(answer, 0))
        items = (b"".join(self._merged(item, index)) for index, item in enumerate(answer))
        return b"[" + b",".join(items) + b"]"

    def merge_event(self, event: bytes) -> bytes:
        data = event.removeprefix(b"data:").strip()
        if not data.startswith(b"{"):
            return event
        item = _decode(data, Object)
        return b"".join([b"data: ", *self._merged(item, _decode(item.get("index", Raw(b"0")), int))])

    def _merged(self, item: Object, index: int) -> list[bytes]:
        """The item's JSON in pieces, of which the large ones are copied only once, by whoever joins them. An item that
        has no meta_info (an error) stays as it is. Mutates the item."""
        parts = self._parts[index] if 0 <= index < len(self._parts) else {}
        return _in_front(item, "meta_info", parts)


class _PromptChoice(msgspec.Struct):
    index: int = 0
    logprobs: dict[str, list[Raw]] | None = None


class _PromptChoicesBody(msgspec.Struct):
    choices: list[_PromptChoice]


class PromptChoices:
    """Of /v1/completions, where the first chunk of each choice has them. body: a completion of the echoed prompts."""

    def __init__(self, body: bytes) -> None:
        self._parts = {
            choice.index: {name: b",".join(values) for name, values in (choice.logprobs or {}).items()}
            for choice in _decode(body, _PromptChoicesBody).choices
        }

    def merge_answer(self, body: bytes) -> bytes:
        return self._merged(_decode(body, Object))

    def merge_event(self, event: bytes) -> bytes:
        data = event.removeprefix(b"data:").strip()
        if not self._parts or not data.startswith(b"{"):
            return event
        return b"data: " + self._merged(_decode(data, Object))

    def _merged(self, answer: Object) -> bytes:
        choices = []
        for choice in _decode(answer.pop("choices", _NULL), list[Object] | None) or []:
            parts = self._parts.pop(_decode(choice.get("index", Raw(b"0")), int), {})
            choices.append(b"".join(_in_front(choice, "logprobs", parts)))
        return b"".join([_begun(answer), b'"choices":[', b",".join(choices), b"]}"])


def _in_front(item: Object, name: str, parts: dict[str, bytes]) -> list[bytes]:
    """The item's JSON in pieces, with the parts in front of the lists in its object `name`: those are copied only once,
    by whoever joins the pieces. An item without that object (an error) stays as it is. Mutates the item."""
    lists = _decode(item.get(name, _NULL), Object | None)
    if lists is None or not parts:
        return [msgspec.json.encode(item)]
    merged: list[bytes] = []
    for field, part in parts.items():
        own = _decode(lists.pop(field, _NULL), Values) or []
        comma = b"," if part and own else b""
        merged += [b'"%s":[' % field.encode(), part, comma, b",".join(own), b"]", b","]
    del item[name]
    return [_begun(item), b'"%s":' % name.encode(), _begun(lists), *merged[:-1], b"}}"]


def _begun(fields: Object) -> bytes:
    """The JSON object up to where one more field follows."""
    return msgspec.json.encode(fields)[:-1] + (b"," if fields else b"")


def _parts(meta: _PromptMeta | None) -> dict[str, bytes]:
    """The prompt's values of each field that has any, as JSON without the brackets around them."""
    fields = {name: getattr(meta, name) for name in _FIELDS} if meta is not None else {}
    return {name: b",".join(values) for name, values in fields.items() if values is not None}


def _decode(body: bytes | Raw, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except BAD_JSON as error:
        raise WorkerError("a worker's answer makes no sense", code="bad_answer", status=502) from error
