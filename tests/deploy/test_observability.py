"""Prometheus's and Grafana's files: they name metrics that exist, and a real Prometheus takes them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.deploy.files import DEPLOY, compose
from tests.support.stack import free_port, running, stop, wait_healthy

FOLDER = DEPLOY / "observability"
DASHBOARD = json.loads((FOLDER / "grafana" / "dashboards" / "tandem.json").read_text())
OPERATIONS = (DEPLOY.parent / "docs" / "operations.md").read_text()
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
needs_prometheus = pytest.mark.skipif(PROMETHEUS is None or PROMTOOL is None, reason="Debian's prometheus is not here")


def documented() -> set[str]:
    """Names of the series in the tables of docs/operations.md."""
    rows = [line.split("|") for line in OPERATIONS.splitlines() if line.startswith("| `tandem_")]
    names: set[str] = set()
    for _, metrics, *about in rows:
        for name in re.findall(r"`(tandem_\w+)`", metrics):
            is_histogram = "histogram" in " ".join(about)
            names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if is_histogram else {name}
    return names


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def alerts() -> list[str]:
    return [rule["expr"] for group in read("alerts.yml")["groups"] for rule in group["rules"]]


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def metrics(expression: str) -> set[str]:
    return set(re.findall(r"tandem_\w+", re.sub(r'"[^"]*"', "", expression)))


@pytest.mark.parametrize("expression", [*expressions(), *alerts()])
def test_only_documented_metrics_are_asked_for(expression: str) -> None:
    assert metrics(expression) <= documented()
    assert metrics(expression) or "up{" in expression


def test_alerts_say_how_bad_it_is() -> None:
    rules = [rule for group in read("alerts.yml")["groups"] for rule in group["rules"]]
    assert {rule["labels"]["severity"] for rule in rules} == {"critical", "warning"}


def test_the_table_of_metrics_is_found() -> None:
    assert len(documented()) > 40
    assert {"tandem_rank_up", "tandem_router_phase_seconds_bucket", "tandem_router_queue_length"} <= documented()


def test_the_dashboard_is_what_its_script_writes() -> None:
    script = "import json, runpy, sys; print(json.dumps(runpy.run_path(sys.argv[1])['dashboard']()))"
    done = subprocess.run(
        [sys.executable, "-c", script, str(FOLDER / "dashboard.py")], capture_output=True, check=True, timeout=30
    )
    assert json.loads(done.stdout) == DASHBOARD


def test_panels_have_ids_and_places_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)


def test_every_process_of_the_cpu_file_is_scraped() -> None:
    (targets,) = read("targets-compose.yml")
    assert set(targets["targets"]) == {f"{name}:30000" for name in compose("compose.yaml")["services"]}


def test_every_process_of_the_gpu_file_is_scraped() -> None:
    (targets,) = read("targets-host.yml")
    services = compose("compose.gpu.yaml")["services"].values()
    ports = [service["environment"]["TANDEM_PORT"] for service in services]
    assert set(targets["targets"]) == {f"127.0.0.1:{port}" for port in ports}


@pytest.mark.parametrize("name", ("compose.observability.yaml", "compose.observability.host.yaml"))
def test_the_files_that_containers_mount_are_there(name: str) -> None:
    for service in compose(name)["services"].values():
        for volume in service["volumes"]:
            if volume.startswith("./"):
                assert (DEPLOY / volume.split(":")[0]).exists(), volume


@needs_prometheus
def test_promtool_finds_no_fault(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "alerts.yml", tmp_path)
    shutil.copy(FOLDER / "targets-compose.yml", tmp_path / "targets.yml")
    config = configuration(tmp_path, tmp_path / "key")
    done = subprocess.run([str(PROMTOOL), "check", "config", str(config)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(alerts())} rules found" in done.stdout


def configuration(folder: Path, key: Path) -> Path:
    """prometheus.yml with another place of the key."""
    key.touch()
    text = (FOLDER / "prometheus.yml").read_text()
    assert "/run/secrets/admin_key" in text
    path = folder / "prometheus.yml"
    path.write_text(
        text.replace("/run/secrets/admin_key", str(key)).replace("scrape_interval: 5s", "scrape_interval: 1s")
    )
    path.write_text(path.read_text().replace("scrape_timeout: 5s", "scrape_timeout: 1s"))
    return path


@contextmanager
def cpu_stack(folder: Path, secrets: Path) -> Iterator[list[str]]:
    """The processes of compose.yaml on loopback. Yields their URLs, the router's first."""
    own = ("--api-key-file", str(secrets / "api_keys"))
    shared = (*own, "--cluster-key-file", str(secrets / "cluster_key"))
    to_workers = ("--worker-api-key-file", str(secrets / "api_keys"))
    ports = [free_port() for _ in range(5)]
    urls = [f"http://127.0.0.1:{port}" for port in ports[:4]]
    bootstrap = str(ports[4])
    commands = (
        ("router", "--prefill", urls[1], bootstrap, "--decode", urls[2], "--decode", urls[3], *own, *to_workers),
        ("prefill", "--bootstrap-port", bootstrap, *shared),
        ("decode", *shared),
        ("decode", *shared),
    )
    with ExitStack() as processes:
        servers = [
            processes.enter_context(running(f"{number}-{words[0]}", [*words, "--port", str(port)], url, folder))
            for number, (words, port, url) in enumerate(zip(commands, ports[:4], urls, strict=True))
        ]
        for server in reversed(servers):
            wait_healthy(server)
        yield urls


@contextmanager
def prometheus(folder: Path, config: Path) -> Iterator[str]:
    """Debian's Prometheus. Yields its URL."""
    port = free_port()
    command = [str(PROMETHEUS), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        stop(process)


def query(url: str, expression: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}, timeout=10)
    assert answer.status_code == 200, f"{expression}: {answer.text}"
    found: list[dict[str, Any]] = answer.json()["data"]["result"]
    return found


def wait_for_up(url: str, count: int) -> None:
    """Until so many targets have been scraped well twice."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if len(query(url, 'sum_over_time(up{job="tandem"}[5m]) >= 2')) == count:
                return
        except (httpx.HTTPError, AssertionError):
            pass  # it starts
        time.sleep(0.3)
    raise AssertionError(httpx.get(f"{url}/api/v1/targets").text)


@pytest.mark.slow
@needs_prometheus
def test_prometheus_scrapes_every_process(tmp_path: Path, secrets: Path) -> None:
    """Keys and all; every query of the dashboard and of the alerts is taken, and of metrics that are really there."""
    with cpu_stack(tmp_path, secrets) as urls:
        key = {"authorization": f"Bearer {(secrets / 'user_key').read_text()}"}
        body = {"text": "Question: 1 + 1?", "sampling_params": {"max_new_tokens": 8}}
        assert httpx.post(f"{urls[0]}/generate", json=body, headers=key, timeout=60).status_code == 200
        shutil.copy(FOLDER / "alerts.yml", tmp_path)
        targets = [{"targets": [url.removeprefix("http://") for url in urls]}]
        (tmp_path / "targets.yml").write_text(yaml.safe_dump(targets))
        with prometheus(tmp_path, configuration(tmp_path, secrets / "admin_key")) as url:
            wait_for_up(url, len(urls))
            for expression in (*expressions(), *alerts()):
                query(url, expression.replace("$__rate_interval", "1m"))
            scraped = {found["metric"]["__name__"] for found in query(url, '{__name__=~"tandem_.+"}')}
    asked = set().union(*(metrics(expression) for expression in expressions()))
    # Series that begin with the first error, or are there while a hand-off is under way.
    unseen = {"tandem_router_rejected_total", "tandem_failures_total", "tandem_rooms", "tandem_leases"}
    assert asked - scraped <= unseen
