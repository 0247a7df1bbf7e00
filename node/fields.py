"""Reading one field of a request: of the right type and in range, or a `RequestError` that names field and value."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from common.errors import RequestError
from common.refusals import refuse, show

T = TypeVar("T")


class NumberRule(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers that a field takes. above_low: low itself is refused. also: one value outside that is allowed too."""

    integer: bool
    low: float
    high: float
    above_low: bool = False
    also: int | None = None

    def __str__(self) -> str:
        kind = "an integer" if self.integer else "a number"
        bounds = f"above {self.low} and up to {self.high}" if self.above_low else f"from {self.low} to {self.high}"
        return f"{kind} {bounds}" + (f", or {self.also}" if self.also is not None else "")

    def allows(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.integer else (int, float)):
            return False
        if self.also is not None and value == self.also:
            return True
        return (self.low < value if self.above_low else self.low <= value) and value <= self.high  # NaN fails both


def read_number(name: str, value: Any, rule: NumberRule) -> Any:
    """value itself: an int for an integer rule, otherwise a float."""
    if not rule.allows(value):
        refuse(name, value, str(rule))
    return value if rule.integer else float(value)


def read_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        refuse(name, value, "true or false")
    return value


def read_string(name: str, value: object, *, max_length: int) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= max_length:
        refuse(name, value, f"a string of 1 to {max_length} characters")
    return value


def read_token_ids(name: str, value: object, vocab_size: int) -> list[int]:
    """A list of token ids inside the vocabulary; the message names the place of the first wrong one."""
    if not isinstance(value, list):
        refuse(name, value, "a list of token ids")
    if set(map(type, value)) <= {int} and (not value or (min(value) >= 0 and max(value) < vocab_size)):
        return value
    rule = NumberRule(integer=True, low=0, high=vocab_size - 1)
    for i, token_id in enumerate(value):
        if not rule.allows(token_id):
            refuse(f"{name}[{i}]", token_id, f"a token id of the vocabulary, {rule}")
    raise AssertionError(f"{name}: no wrong token id found in {show(value)}")


def read_each(
    name: str, value: Any, lengths: Iterable[int], read: Callable[[str, Any], T], default: T, *, total: int
) -> list[T]:
    """One value for each of `total` places: one for all of them, or a list of one of `lengths`.

    A shorter list gives each of its values to as many neighbours (the samples of one prompt). null means the default.
    """
    if not isinstance(value, list):
        return [default if value is None else read(name, value)] * total
    if len(value) not in (allowed := sorted(set(lengths))):
        wanted = " or ".join(map(str, allowed))
        raise RequestError(f"{name}: a list of {len(value)}, but the batch needs {wanted}", param=name)
    repeat = total // len(value)
    items = [default if item is None else read(f"{name}[{i}]", item) for i, item in enumerate(value)]
    return [item for item in items for _ in range(repeat)]


def check_distinct(name: str, values: list[Any]) -> None:
    seen = set()
    for i, value in enumerate(values):
        if value in seen:
            refuse(f"{name}[{i}]", value, "different from the others of the batch")
        seen.add(value)
