"""Writes grafana/dashboards/tandem.json from the table below.

python3 deploy/observability/dashboard.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent / "grafana" / "dashboards" / "tandem.json"
SOURCE = {"type": "prometheus", "uid": "prometheus"}
COLUMNS, WIDTH, HEIGHT = 3, 8, 8


def rate(metric: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}[$__rate_interval]))"


def quantiles(histogram: str, by: str = "") -> tuple[tuple[str, str], ...]:
    """Median and 99th percentile; by: labels with a comma behind each."""
    label = "".join(f"{{{{{each}}}}} " for each in by.split(",") if each)
    buckets = f"sum by ({by}le) (rate({histogram}_bucket[$__rate_interval]))"
    return tuple((f"histogram_quantile({q}, {buckets})", f"{label}p{q * 100:.0f}") for q in (0.5, 0.99))


def ratio(part: str, whole: str) -> str:
    return f"sum(rate({part}[$__rate_interval])) / sum(rate({whole}[$__rate_interval]))"


ROWS: tuple[tuple[str, tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...]], ...] = (
    (
        "Requests",
        (
            ("Requests by outcome", "reqps", ((rate("tandem_router_requests_total", "code"), "{{code}}"),)),
            (
                "In flight and waiting",
                "short",
                (
                    ("sum(tandem_router_requests_in_flight)", "in flight"),
                    ("sum(tandem_router_queue_length)", "of them waiting"),
                ),
            ),
            (
                "Another try",
                "ops",
                (
                    (rate("tandem_router_retries_total", "instance"), "retries"),
                    (rate("tandem_router_resumes_total", "instance"), "resumes"),
                ),
            ),
            ("Time to first token", "s", quantiles("tandem_router_time_to_first_token_seconds")),
            ("Time between tokens, of each node", "s", quantiles("tandem_inter_token_seconds", "instance,")),
            ("Time of a request", "s", quantiles("tandem_router_request_seconds")),
            ("Where the time goes (median)", "s", quantiles("tandem_router_phase_seconds", "phase,")[:1]),
            (
                "Tokens",
                "short",
                (
                    (rate("tandem_router_prompt_tokens_total", "job"), "prompt"),
                    (rate("tandem_router_cached_tokens_total", "job"), "of them cached"),
                    (rate("tandem_router_completion_tokens_total", "job"), "answer"),
                ),
            ),
            ("Refused", "reqps", ((rate("tandem_router_rejected_total", "code"), "{{code}}"),)),
        ),
    ),
    (
        "Workers",
        (
            (
                "Up",
                "short",
                (("tandem_router_worker_up", "{{role}} {{worker}}"), ("tandem_rank_up", "{{instance}} rank {{rank}}")),
            ),
            ("Load", "short", (("tandem_router_worker_load_tokens", "{{role}} {{worker}} rank {{rank}}"),)),
            ("Computed tokens", "short", ((rate("tandem_tokens_total", "instance, kind"), "{{instance}} {{kind}}"),)),
            ("Sequences", "short", (("sum by (instance, phase) (tandem_sequences)", "{{instance}} {{phase}}"),)),
            ("Pages", "short", (("sum by (instance, use) (tandem_pages)", "{{instance}} {{use}}"),)),
            ("State slots", "short", (("sum by (instance, use) (tandem_slots)", "{{instance}} {{use}}"),)),
            (
                "Prefix cache",
                "percentunit",
                (
                    (
                        ratio("tandem_router_cached_tokens_total", "tandem_router_prompt_tokens_total"),
                        "prompt tokens cached",
                    ),
                    (
                        ratio('tandem_cache_lookups_total{result="hit"}', "tandem_cache_lookups_total"),
                        "lookups that hit",
                    ),
                ),
            ),
            (
                "Given up for others",
                "ops",
                (
                    (rate("tandem_retractions_total", "instance"), "{{instance}} retractions"),
                    (rate("tandem_cache_evicted_slots_total", "instance"), "{{instance}} saved states"),
                    (rate("tandem_checkpoints_skipped_total", "instance"), "{{instance}} states not saved"),
                ),
            ),
            (
                "Errors of sequences",
                "ops",
                ((rate("tandem_failures_total", "instance, code"), "{{instance}} {{code}}"),),
            ),
        ),
    ),
    (
        "Hand-off",
        (
            ("Hand-offs", "ops", ((rate("tandem_handoffs_total", "instance, outcome"), "{{instance}} {{outcome}}"),)),
            ("Bytes", "Bps", ((rate("tandem_router_transfer_bytes_total", "part"), "{{part}}"),)),
            (
                "Speed while writing",
                "Bps",
                (
                    (
                        rate('tandem_transfer_bytes_total{role="prefill"}', "instance, part")
                        + " / "
                        + rate("tandem_transfer_seconds_total", "instance, part"),
                        "{{instance}} {{part}}",
                    ),
                ),
            ),
            (
                "Rooms and leases",
                "short",
                (
                    ("sum by (instance, state) (tandem_rooms)", "{{instance}} room {{state}}"),
                    ("sum by (instance, state) (tandem_leases)", "{{instance}} lease {{state}}"),
                ),
            ),
            (
                "Held back",
                "short",
                (
                    ("tandem_leases_quarantined", "{{instance}} quarantined"),
                    ("tandem_peers_silent", "{{instance}} silent peers"),
                ),
            ),
            (
                "Must stay 0",
                "short",
                (
                    ("tandem_leaks_total", "{{instance}} leaks"),
                    ("tandem_integrity_failures_total", "{{instance}} integrity"),
                    ("sum by (instance) (tandem_digest_mismatches_total)", "{{instance}} digests"),
                ),
            ),
        ),
    ),
)


def panel(
    number: int, place: tuple[int, int], title: str, unit: str, queries: tuple[tuple[str, str], ...]
) -> dict[str, Any]:
    """place: column and y."""
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"x": place[0] * WIDTH, "y": place[1], "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for i, (expression, legend) in enumerate(queries)
        ],
    }


def panels() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    y = 0
    for title, charts in ROWS:
        made.append({"id": len(made) + 1, "type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})
        y += 1
        for i, chart in enumerate(charts):
            made.append(panel(len(made) + 1, (i % COLUMNS, y + i // COLUMNS * HEIGHT), *chart))
        y += -(-len(charts) // COLUMNS) * HEIGHT
    return made


def dashboard() -> dict[str, Any]:
    return {
        "uid": "tandem",
        "title": "Tandem",
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-15m", "to": "now"},
        "panels": panels(),
    }


if __name__ == "__main__":
    TARGET.write_text(json.dumps(dashboard(), indent=1) + "\n")
