"""GET /metrics of the router, in Prometheus's text format. Nothing is counted here: values are taken from the records'
totals, from the dispatcher and from the workers at the time of the scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from common.config import Role
from common.histogram import Histogram
from router.dispatch import Dispatcher
from router.leg_outcome import LegEnd
from router.merge import expose
from router.record import Totals
from router.workers import Worker, Workers

CONTENT_TYPE = CONTENT_TYPE_LATEST
_PREFIX = "tandem_router_"
_PARTS = ("kv", "conv", "ssm", "track")


def exposition(dispatcher: Dispatcher) -> bytes:
    return expose(families(dispatcher))


def families(dispatcher: Dispatcher) -> Iterator[Metric]:
    totals = dispatcher.recorder.totals
    yield from _now(dispatcher)
    yield from _counters(totals)
    yield from _histograms(totals)
    yield from _workers(dispatcher.workers.all)
    yield from _legs(dispatcher.workers)
    yield from _decisions(dispatcher.workers)


def _now(dispatcher: Dispatcher) -> Iterator[Metric]:
    running = dispatcher.recorder.running
    yield _gauge("requests_in_flight", "Requests that have no answer yet, those that wait included", len(running))
    yield _gauge("queue_length", "Requests that wait at the router", dispatcher.recorder.num_waiting)
    yield _gauge("draining", "Whether the router takes nothing new because it is about to end", dispatcher.is_draining)


def _counters(totals: Totals) -> Iterator[Metric]:
    requests = CounterMetricFamily(_PREFIX + "requests", "Requests that have ended", labels=["endpoint", "code"])
    for (endpoint, code), count in totals.requests.items():
        requests.add_metric([endpoint, code], count)
    yield requests
    yield _counter("rejected", "Requests that were refused before any leg was opened", "code", totals.rejected)
    yield _counter("failed", "Requests that failed for no fault of their clients", "code", totals.failed)
    for name, text, value in (
        ("retries", "More tries of requests, from their start", totals.retries),
        ("resumes", "Streams that went on at other workers", totals.resumes),
        ("prompt_tokens", "Tokens of prompts, where an answer has begun and tells them", totals.prompt_tokens),
        ("cached_tokens", "Those of them that were not computed", totals.cached_tokens),
        ("completion_tokens", "Tokens of answers", totals.completion_tokens),
    ):
        family = CounterMetricFamily(_PREFIX + name, text)
        family.add_metric([], value)
        yield family
    parts = dict.fromkeys(_PARTS, 0) | totals.transfer_bytes
    yield _counter("transfer_bytes", "Bytes of state that crossed for answered requests", "part", parts)


def _histograms(totals: Totals) -> Iterator[Metric]:
    for name, text, histogram in (
        ("queue_seconds", "From a request's arrival until its legs are opened", totals.wait_s),
        ("time_to_first_token_seconds", "From a request's arrival to the first byte of its stream", totals.ttft_s),
        ("inter_token_seconds", "Mean gap between the tokens of a stream of one sequence", totals.itl_s),
        ("request_seconds", "From a request's arrival to the end of its answer", totals.e2e_s),
        ("prompt_length_tokens", "Prompts of answered requests", totals.prompt_length),
        ("completion_length_tokens", "Answers", totals.completion_length),
    ):
        family = HistogramMetricFamily(_PREFIX + name, text)
        _add(family, [], histogram)
        yield family
    phases = HistogramMetricFamily(_PREFIX + "phase_seconds", "Parts of a request, by the nodes", labels=["phase"])
    for name, histogram in totals.timing_s.items():
        _add(phases, [name.removesuffix("_s")], histogram)
    yield phases


def _workers(workers: Iterable[Worker]) -> Iterator[Metric]:
    up = GaugeMetricFamily(_PREFIX + "worker_up", "Whether a worker may get requests", labels=["role", "worker"])
    legs = GaugeMetricFamily(_PREFIX + "worker_legs", "Legs that run at a worker", labels=["role", "worker"])
    load = GaugeMetricFamily(
        _PREFIX + "worker_load_tokens", "Load of a rank as the policies see it", labels=["role", "worker", "rank"]
    )
    state = GaugeMetricFamily(_PREFIX + "worker_state", "1 for the state", labels=["role", "worker", "state"])
    for worker in workers:
        labels = [worker.role.value, worker.url]
        up.add_metric(labels, int(worker.takes_requests))
        legs.add_metric(labels, worker.num_legs)
        state.add_metric([*labels, worker.state], 1)
        for target in worker.targets:
            load.add_metric([*labels, str(target.rank)], target.load.tokens)
    yield from (up, state, legs, load)


def _legs(workers: Workers) -> Iterator[Metric]:
    family = CounterMetricFamily(_PREFIX + "legs", "Legs that have ended", labels=["role", "outcome"])
    for role in (Role.PREFILL, Role.DECODE):
        for end in LegEnd:
            family.add_metric([role.value, end.value], workers.legs_ended[role, end])
    yield family


def _decisions(workers: Workers) -> Iterator[Metric]:
    for name, text, field in (
        ("policy_decisions", "Choices of a worker", "total"),
        ("policy_prompt_tokens", "Prompt tokens that the prefix tree was asked for, estimated", "prompt_tokens"),
        ("policy_hit_tokens", "Those of them that it had at the worker that was chosen", "hit_tokens"),
    ):
        family = CounterMetricFamily(_PREFIX + name, text, labels=["role"])
        for role, decisions in workers.pairing.decisions.items():
            family.add_metric([role.value], getattr(decisions, field))
        yield family


def _gauge(name: str, text: str, value: int) -> Metric:
    family = GaugeMetricFamily(_PREFIX + name, text)
    family.add_metric([], int(value))
    return family


def _counter(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(_PREFIX + name, text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family


def _add(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    family.add_metric(labels, buckets=histogram.buckets(), sum_value=histogram.sum)
