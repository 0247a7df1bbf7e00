"""Puts together what the processes of one router say of themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

_ADDED_GAUGES = frozenset({"requests_in_flight", "queue_length", "worker_legs"})
"""Ends of names. Of other gauges, which say how a process sees a worker, the largest value counts."""


class Families(Collector):
    """Metrics that are there already, as a collector."""

    def __init__(self, found: Iterable[Metric]) -> None:
        self._found = list(found)

    def collect(self) -> Iterable[Metric]:
        return self._found


def expose(found: Iterable[Metric]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Families(found))
    return generate_latest(registry)


def merged_metrics(expositions: Iterable[bytes]) -> bytes:
    """Counters, histograms and some gauges of all are added up."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for text in expositions:
        for family in text_string_to_metric_families(text.decode()):
            families.setdefault(family.name, family)
            _add(family, values.setdefault(family.name, {}))
    return expose(_with_values(family, values[name]) for name, family in families.items())


def _add(family: Metric, values: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> None:
    is_added = family.type != "gauge" or family.name.removeprefix("tandem_router_") in _ADDED_GAUGES
    for sample in family.samples:
        key = (sample.name, tuple(sample.labels.items()))
        known = values.get(key)
        if known is None:
            values[key] = sample.value
        else:
            values[key] = known + sample.value if is_added else max(known, sample.value)


def _with_values(family: Metric, values: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> Metric:
    merged = Metric(family.name, family.documentation, family.type)
    for (name, labels), value in values.items():
        merged.add_sample(name, dict(labels), value)
    return merged


def merged_status(own: dict[str, Any], others: Iterable[dict[str, Any]], limit: int) -> dict[str, Any]:
    """`/status.json` of all: totals and requests at workers are added up, the rest is as this process sees it."""
    said = [own, *others]
    requests_at = _sums({worker["url"]: worker["requests"] for worker in each["workers"]} for each in said)
    return own | {
        "processes": len(said),
        "totals": _sums(each["totals"] for each in said),
        "workers": [worker | {"requests": requests_at[worker["url"]]} for worker in own["workers"]],
        "requests": merged_requests([each["requests"] for each in said], limit),
    }


def merged_requests(listings: Iterable[list[dict[str, Any]]], limit: int) -> list[dict[str, Any]]:
    """Those that run first, then the newest."""
    found = [request for listing in listings for request in listing]
    found.sort(key=lambda request: (request["running"], request["began_at"]), reverse=True)
    return found[:limit]


def _sums(found: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Numbers by name; objects of numbers likewise."""
    total: dict[str, Any] = {}
    for each in found:
        for name, value in each.items():
            if isinstance(value, dict):
                total[name] = _sums([total.get(name, {}), value])
            else:
                total[name] = total.get(name, 0) + value
    return total
