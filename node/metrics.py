"""GET /metrics: the ranks' state and the front's own, in Prometheus's text format.

Nothing is counted here: values are taken from the `state` of each rank at the time of the scrape, and from the front's
`Meter`. A rank that cannot tell its state is `tandem_rank_up 0` and has no values of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from common.config import Role
from common.histogram import Histogram
from node.meter import Meter

CONTENT_TYPE = CONTENT_TYPE_LATEST

State = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Value:
    """One number of a rank's state, under its dotted path there."""

    name: str
    text: str
    path: str


@dataclass(frozen=True, slots=True)
class Split:
    """One family with a label. values: label value → path of its number; or the path of an object of numbers.

    known: label values of such an object that are 0 while it does not name them: whoever watches for growth must have
    seen them before.
    """

    name: str
    text: str
    label: str
    values: Mapping[str, str] | str
    known: tuple[str, ...] = ()


PARTS = ("kv", "conv", "ssm", "track")
OUTCOMES = ("failed", "declined")

GAUGES: tuple[Value | Split, ...] = (
    Split(
        "tandem_pages",
        "KV pages by use, without page 0; together they are all, unless some leaked",
        "use",
        {
            "free": "pages_free",
            "cached": "pages_cached",
            "request": "pages_in_requests",
            "room": "pages_in_rooms",
            "draining": "pages_draining",
        },
    ),
    Split(
        "tandem_slots",
        "State slots by use, without slot 0; together they are all, unless some leaked",
        "use",
        {"free": "slots_free", "cached": "slots_cached", "main": "slots_main", "track": "slots_track"},
    ),
    Split(
        "tandem_sequences",
        "Sequences by what they wait for or do",
        "phase",
        {
            "waiting": "num_waiting",
            "prefilling": "num_prefilling",
            "running": "num_running",
            "reserving": "num_reserving",
            "receiving": "num_receiving",
        },
    ),
    Split("tandem_rooms", "Rooms of a prefill rank by state", "state", "transfer.rooms"),
    Split("tandem_leases", "Leases of a decode rank by state", "state", "transfer.leases"),
    Value("tandem_leases_quarantined", "Draining leases whose sender is lost", "transfer.quarantined"),
    Value("tandem_leaked_items", "What is owned by nobody now, for 10 s at least", "leaks"),
    Value("tandem_peers_silent", "Connected peers that say nothing", "transfer.peers_silent"),
)

COUNTERS: tuple[Value | Split, ...] = (
    Split(
        "tandem_requests",
        "Sequences that ended",
        "outcome",
        {"finished": "requests_finished", "failed": "requests_failed"},
    ),
    Split(
        "tandem_tokens",
        "Tokens computed",
        "kind",
        {"prefill": "prefill_tokens_computed", "decode": "decode_tokens_computed"},
    ),
    Split("tandem_steps", "Steps computed", "kind", {"prefill": "prefill_steps", "decode": "decode_steps"}),
    Value("tandem_retractions", "Sequences that gave up their memory and were computed again", "retractions"),
    Value("tandem_checkpoints", "States saved for later requests", "checkpoints"),
    Value("tandem_checkpoints_skipped", "States not saved for want of a slot", "checkpoints_skipped"),
    Split(
        "tandem_cache_lookups",
        "Requests by whether they could resume",
        "result",
        {"hit": "cache.hits", "miss": "cache.misses"},
    ),
    Value("tandem_cache_hit_tokens", "Tokens not computed again", "cache.hit_tokens"),
    Value("tandem_cache_evicted_pages", "Cached pages given up", "cache.evicted_pages"),
    Value("tandem_cache_evicted_slots", "Saved states given up", "cache.evicted_slots"),
    Split(
        "tandem_handoffs", "Rooms since the start by what became of them", "outcome", "transfer.rooms_total", OUTCOMES
    ),
    Split("tandem_transfer_bytes", "Bytes of hand-offs that succeeded", "part", "transfer.bytes", PARTS),
    Split(
        "tandem_transfer_seconds",
        "Time of a prefill rank's writes, by what they wrote",
        "part",
        "transfer.seconds",
        PARTS,
    ),
    Split(
        "tandem_digest_mismatches",
        "Parts that did not arrive intact",
        "part",
        "transfer.digest_mismatches",
        (*PARTS, "metadata"),
    ),
    Value("tandem_leaks", "Items that were owned by nobody for 10 s", "leaks_total"),
    Value("tandem_integrity_failures", "Idle checks of all pages and slots that failed", "integrity_failures"),
)


def exposition(
    role: Role, states: Sequence[State | None], *, meter: Meter, num_unanswered: int, is_draining: bool
) -> bytes:
    """states: one a rank, None of one that cannot tell it. The rest is the front's."""
    families: list[Metric] = [
        _of_node("tandem_requests_unanswered", "Sequences whose requests wait for something", role, num_unanswered),
        _of_node("tandem_draining", "Whether the node takes nothing new because it is about to end", role, is_draining),
        _up(role, states),
    ]
    families += [_fill(GaugeMetricFamily, source, role, states) for source in GAUGES]
    families += [_fill(CounterMetricFamily, source, role, states) for source in COUNTERS]
    families += _measured(role, meter, len(states))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry)


def _measured(role: Role, meter: Meter, num_ranks: int) -> list[Metric]:
    """A prefill node's answer holds its token back until the hand-off is over, so it tells no times of tokens."""
    meters = [meter.ranks[rank] for rank in range(num_ranks)]
    errors = CounterMetricFamily("tandem_http_errors", "Requests answered with an error", labels=["role", "code"])
    for code, count in meter.http_errors.items():
        errors.add_metric([role, code], count)
    failures = CounterMetricFamily(
        "tandem_failures", "Sequences that ended with an error", labels=["role", "rank", "code"]
    )
    phases = HistogramMetricFamily(
        "tandem_phase_seconds", "Parts of a request that this node did", labels=["role", "rank", "phase"]
    )
    whole = HistogramMetricFamily("tandem_request_seconds", "From arrival to the end", labels=["role", "rank"])
    first = HistogramMetricFamily(
        "tandem_time_to_first_token_seconds", "From a request's arrival to its first token", labels=["role", "rank"]
    )
    between = HistogramMetricFamily(
        "tandem_inter_token_seconds", "Between two tokens of a sequence", labels=["role", "rank"]
    )
    for rank, each in enumerate(meters):
        labels = [role, str(rank)]
        for code, count in each.failures.items():
            failures.add_metric([*labels, code], count)
        for phase, histogram in each.phases.items():
            _add(phases, [*labels, phase], histogram)
        _add(whole, labels, each.whole)
        _add(first, labels, each.first_token)
        _add(between, labels, each.between_tokens)
    return [errors, failures, phases, whole, *(() if role is Role.PREFILL else (first, between))]


def _add(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    family.add_metric(labels, buckets=histogram.buckets(), sum_value=histogram.sum)


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _of_node(name: str, text: str, role: Role, value: int) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["role"])
    family.add_metric([role], int(value))
    return family


def _up(role: Role, states: Sequence[State | None]) -> Metric:
    family = GaugeMetricFamily("tandem_rank_up", "Whether the rank answers", labels=["role", "rank"])
    for rank, state in enumerate(states):
        family.add_metric([role, str(rank)], int(state is not None))
    return family


def _fill(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    source: Value | Split,
    role: Role,
    states: Sequence[State | None],
) -> Metric:
    own = [source.label] if isinstance(source, Split) else []
    family = kind(source.name, source.text, labels=["role", "rank", *own])
    for rank, state in enumerate(states):
        for labels, number in _numbers(source, state or {}):
            family.add_metric([role, str(rank), *labels], number)
    return family


def _numbers(source: Value | Split, state: State) -> list[tuple[list[str], float]]:
    """(values of the own label, number), of what this rank has."""
    if isinstance(source, Value):
        found: list[tuple[list[str], Any]] = [([], _at(state, source.path))]
    elif isinstance(source.values, str):
        numbers = _at(state, source.values)
        known = dict.fromkeys(source.known, 0)
        found = [] if numbers is None else [([name], number) for name, number in (known | numbers).items()]
    else:
        found = [([name], _at(state, path)) for name, path in source.values.items()]
    return [(labels, number) for labels, number in found if number is not None]


def _at(state: State, path: str) -> Any:
    """None where there is no such thing: not every role has everything."""
    value: Any = state
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value
