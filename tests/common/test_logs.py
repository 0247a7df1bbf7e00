"""A record of the log is one line, whatever is quoted in it."""

from __future__ import annotations

import logging
import sys

import pytest

from common.logs import configure_logging, in_a_row, one_line


@pytest.mark.parametrize(
    ("said", "written"),
    [
        ("plain, naïve, 日本 😀", "plain, naïve, 日本 😀"),
        ("a\nb", r"a\nb"),
        ("a\r\nb", r"a\r\nb"),
        ("\x1b[2J", r"\x1b[2J"),
        ("\u2028\u202e", r"\u2028\u202e"),
        ("", ""),
    ],
)
def test_what_does_not_print_is_escaped(said: str, written: str) -> None:
    assert one_line(said) == written


def test_a_record_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        configure_logging("info", "router")
        logging.getLogger("x").info("request %s", "r\n2026-01-01 router INFO x: forged")
        try:
            sys.exit("why")
        except SystemExit:
            logging.getLogger("x").exception("failed")
    finally:
        for handler in root.handlers[:]:
            root.removeHandler(handler)
        for handler in before:
            root.addHandler(handler)
        root.setLevel(level)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith(r"router INFO x: request r\n2026-01-01 router INFO x: forged")
    assert lines[1].endswith("router ERROR x: failed") and lines[2].startswith("Traceback"), (
        "a traceback keeps its lines"
    )


def test_lines_of_our_own_stand_in_a_row() -> None:
    assert in_a_row("rank 1 ended\n  Traceback:\n  ValueError: x") == "rank 1 ended | Traceback: | ValueError: x"
    assert in_a_row("one\x1b") == "one\x1b"
