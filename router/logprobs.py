"""The prompt's logprobs come from the prefill leg, the answer's from the decode leg: both go into one answer.

With many alternatives they are megabytes, and every event of a stream repeats them. So nothing is read that need not
be: JSON that stays as it is passes as bytes (`Raw`), and the prompt's part is cut out once.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from common.errors import RequestError, WorkerError

_FIELDS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
_NULL = Raw(b"null")
_MAX_BYTES = 64 * 2**20
"""Of a prefill answer. A prompt that comes as text may have more positions than the router could know beforehand."""

Object = dict[str, Raw]
Values = list[Raw] | None


class _PromptMeta(msgspec.Struct):
    input_token_logprobs: Values = None
    input_top_logprobs: Values = None
    input_token_ids_logprobs: Values = None


class _PromptItem(msgspec.Struct):
    meta_info: _PromptMeta | None = None


class PromptLogprobs:
    """Of one prefill answer. body: its JSON, one object or a list in the order of the sequences.

    All of it raises WorkerError (502) for answers of another shape; RequestError for a body beyond reason.
    """

    def __init__(self, body: bytes) -> None:
        if len(body) > _MAX_BYTES:
            message = f"top_logprobs_num: the prompt's log-probabilities have more than {_MAX_BYTES} bytes"
            raise RequestError(message, param="top_logprobs_num")
        items = _decode(body, list[_PromptItem] | _PromptItem)
        self._parts = [_parts(item.meta_info) for item in (items if isinstance(items, list) else [items])]

    def merge_answer(self, body: bytes) -> bytes:
        """A whole decode answer (one object or a list) with the prompt's logprobs in it."""
        answer = _decode(body, list[Object] | Object)
        if not isinstance(answer, list):
            return b"".join(self._merged(answer, 0))
        items = (b"".join(self._merged(item, index)) for index, item in enumerate(answer))
        return b"[" + b",".join(items) + b"]"

    def merge_event(self, event: bytes) -> bytes:
        """One server-sent event, without its final blank line. Events that carry no object are returned unchanged."""
        data = event.removeprefix(b"data:").strip()
        if not data.startswith(b"{"):
            return event
        item = _decode(data, Object)
        return b"".join([b"data: ", *self._merged(item, _decode(item.get("index", Raw(b"0")), int))])

    def _merged(self, item: Object, index: int) -> list[bytes]:
        """The item's JSON in pieces, of which the large ones are copied only once, by whoever joins them. An item that
        has no meta_info (an error) stays as it is. Mutates the item."""
        meta = _decode(item.get("meta_info", _NULL), Object | None)
        if meta is None or not any(self._parts[index : index + 1]):
            return [msgspec.json.encode(item)]
        merged: list[bytes] = []
        for name, part in self._parts[index].items():
            own = _decode(meta.pop(name, _NULL), Values) or []
            comma = b"," if part and own else b""
            merged += [b'"%s":[' % name.encode(), part, comma, b",".join(own), b"]", b","]
        del item["meta_info"]
        return [_begun(item), b'"meta_info":', _begun(meta), *merged[:-1], b"}}"]


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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WorkerError("a worker's answer makes no sense", code="bad_answer", status=502) from error
