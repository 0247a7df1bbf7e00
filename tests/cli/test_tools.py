"""`tandem generate` and `bench`."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from cli import bench
from cli.generate import Options, request_body, run, without_last_newlines
from cli.main import main
from common.errors import ConfigError, ServingError, WorkerError
from tests.cli.fake_node import Handler


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def options(text: str | None, url: str = "", *, no_stream: bool = False, question: bool = False) -> Options:
    return Options(
        text=text,
        url=url,
        max_new_tokens=5,
        temperature=0.0,
        stop=("x",),
        question=question,
        no_stream=no_stream,
    )


def test_generate_prints_what_comes(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(options("hi", url))
    assert capsys.readouterr().out == "one two three\n"
    run(options("hi", url, no_stream=True))
    assert capsys.readouterr().out.endswith("#### 42\n")
    run(options("hi", f"{url}/"))
    assert capsys.readouterr().out == "one two three\n"


def test_an_answer_ends_with_one_line_end() -> None:
    assert "".join(without_last_newlines(["a\n", "\n", "b", "\n\n", "\n"])) == "a\n\nb"


def test_generate_can_ask_an_example(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(options(None, url))
    out = capsys.readouterr().out
    assert re.fullmatch(r"Question: .+\?\nAnswer:one two three\nExpected: \d+\n", out)
    with pytest.raises(WorkerError):
        run(options(None, "http://127.0.0.1:1"))
    assert capsys.readouterr().out == ""


def _heed_ctrl_c() -> None:
    """Also where the tests run in the background, whose processes ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_while_an_answer_comes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"http://127.0.0.1:{mute.getsockname()[1]}"
        command = [sys.executable, "-m", "cli.main", "generate", "hi", "--url", address]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=_heed_ctrl_c) as asking:
            mute.settimeout(20)
            try:
                connection, _ = mute.accept()
                connection.recv(1)
                asking.send_signal(signal.SIGINT)
                _, said = asking.communicate(timeout=20)
                connection.close()
            finally:
                asking.kill()
    assert asking.returncode == 130
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("text", "no_stream", "said"),
    [
        ("refuse", True, "status 400: refused on purpose"),
        ("break", False, "broken on purpose"),
        ("refuse", False, "status 400: refused on purpose"),
    ],
)
def test_generate_says_what_went_wrong(url: str, text: str, no_stream: bool, said: str) -> None:
    with pytest.raises(ServingError, match=said):
        run(options(text, url, no_stream=no_stream))


def test_generate_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerError, match=r"is `tandem up` running there\? \(--url names another\)"):
        run(options("hi", "http://127.0.0.1:1"))
    with pytest.raises(SystemExit, match="1"):
        main(["generate", "hi", "--url", "http://127.0.0.1:1"])
    assert capsys.readouterr().err.startswith("tandem: error: http://127.0.0.1:1: ")


def test_generate_can_put_a_question_as_the_bundled_model_knows_it() -> None:
    body = request_body(options(None, question=True), "How many?")
    assert body["text"].endswith("Question: How many?\nAnswer:")
    assert body["text"].count("Question: ") == 6
    assert body["sampling_params"]["stop"][:2] == ["x", "Question"]


def test_bench_lists_and_runs(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "bench"
    folder.mkdir()
    (folder / "good.py").write_text('"""Measures good things.\n\nMore."""\nimport sys\nprint("ran", sys.argv[1:])\n')
    (folder / "bad.py").write_text("raise SystemExit(3)\n")
    (folder / "results.py").write_text("")
    assert list(bench.scripts(folder)) == ["bad", "good"]
    bench.list_scripts(folder)
    assert "good                 Measures good things.\n" in capfd.readouterr().out
    assert bench.run_scripts("good", ["--quick"], folder) == 0
    assert bench.run_scripts(None, [], folder) == 3
    assert capfd.readouterr().out == "ran ['--quick']\nran []\n"
    with pytest.raises(ConfigError, match="other"):
        bench.run_scripts("other", [], folder)


@pytest.mark.parametrize(
    ("arguments", "ran"),
    [
        ("serving --help", ("serving", ("--help",))),
        ("serving --all x", ("serving", ("--all", "x"))),
        ("--all --quick", (None, ("--quick",))),
        ("--all", (None, ())),
    ],
)
def test_bench_hands_on_what_comes_after_the_name(monkeypatch: pytest.MonkeyPatch, arguments: str, ran: object) -> None:
    runs: list[object] = []
    monkeypatch.setattr(bench, "run_scripts", lambda *given: runs.append(given))
    with pytest.raises(SystemExit):
        main(["bench", *arguments.split()])
    assert runs == [ran]
