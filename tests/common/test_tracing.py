"""Where traces are sent, what is refused, and that the SDK is not even imported when there are none."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from common import tracing
from common.errors import ConfigError
from common.tracing import Tracing, check_endpoint, open_tracing


def test_without_an_endpoint_its_sdk_is_not_imported() -> None:
    code = "import sys, router.app, node.front; from common.tracing import open_tracing; open_tracing(None, 'x'); "
    code += "sys.exit('opentelemetry.sdk' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("endpoint", ["", "collector:4318", "ftp://x", "http://", "http://x:99999", "http://[x"])
def test_what_is_no_url_is_refused_by_name(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint") as caught:
        check_endpoint(endpoint)
    assert caught.value.param == "otlp_endpoint"


def test_secrets_in_the_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as caught:
        check_endpoint("https://me:hidden@collector:4318")
    assert "hidden" not in caught.value.message and caught.value.param == "otlp_endpoint"


def test_without_the_extra_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_MODULE", "opentelemetry_that_is_not_there.exporter")
    with pytest.raises(ConfigError, match=r"--otlp-endpoint http://x:1: .*tandem-serve\[otel\]"):
        open_tracing("http://x:1", "x")


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://x:4318", "http://x:4318/v1/traces"),
        ("http://x:4318/", "http://x:4318/v1/traces"),
        ("https://x/mine/v1/traces", "https://x/mine/v1/traces"),
    ],
)
def test_a_base_url_gets_the_path_of_traces(monkeypatch: pytest.MonkeyPatch, endpoint: str, url: str) -> None:
    seen: list[str] = []
    monkeypatch.setattr(tracing, "_provider", lambda found, _: seen.append(found))
    monkeypatch.setattr(tracing, "Tracing", lambda provider: provider)
    open_tracing(endpoint, "x")
    assert seen == [url]


def test_a_collector_that_is_not_there_holds_up_nobody() -> None:
    found = open_tracing("http://127.0.0.1:9", "x")
    assert isinstance(found, Tracing)
    start = time.monotonic()
    span = found.begin("a", "server", start)
    assert found.headers(span)["traceparent"].startswith("00-")
    found.end(span, start + 1, {"n": 1}, "some_error")
    found.close()
    assert time.monotonic() - start < 5
