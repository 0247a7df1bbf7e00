"""The prompt's logprobs come from the prefill leg, the answer's from the decode leg: both go into one answer."""

from __future__ import annotations

from typing import Any

import msgspec

from common.errors import WorkerError

_FIELDS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")


class PromptLogprobs:
    """Of one prefill answer. body: its JSON, one object or a list in the order of the sequences.

    All of it raises WorkerError (502) for answers of another shape.
    """

    def __init__(self, body: bytes) -> None:
        self._items = _items(_decode(body))

    def merge_answer(self, body: bytes) -> bytes:
        """A whole decode answer (one object or a list) with the prompt's logprobs in it."""
        answer = _decode(body)
        for index, item in enumerate(_items(answer)):
            self._merge(item, index)
        return msgspec.json.encode(answer)

    def merge_event(self, event: bytes) -> bytes:
        """One server-sent event, without its final blank line. Events that carry no object are returned unchanged."""
        data = event.removeprefix(b"data:").strip()
        if not data.startswith(b"{"):
            return event
        (item,) = _items(_decode(data))
        self._merge(item, item.get("index", 0))
        return b"data: " + msgspec.json.encode(item)

    def _merge(self, item: dict[str, Any], index: int) -> None:
        """Mutates the item's meta_info. An item that has none (an error) stays as it is."""
        meta = item.get("meta_info")
        if meta is None or index >= len(self._items):
            return
        prompt = self._items[index].get("meta_info", {})
        for name in _FIELDS:
            if prompt.get(name) is not None:
                meta[name] = prompt[name] + (meta.get(name) or [])


def _decode(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WorkerError("a worker's answer is not JSON", code="bad_answer", status=502) from error


def _items(answer: Any) -> list[dict[str, Any]]:
    items = answer if isinstance(answer, list) else [answer]
    if not all(isinstance(item, dict) for item in items):
        raise WorkerError("a worker's answer holds no objects", code="bad_answer", status=502)
    return items
