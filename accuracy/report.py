"""A report for programs: JSON, and JUnit XML in which an invalid run is an error and a bad one a failure."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec

from accuracy.gate import SUBJECT, Report
from accuracy.page import page
from accuracy.verdict import RunSummary, Verdict
from common.errors import ConfigError


def write_reports(report: Report, folder: Path) -> list[Path]:
    """report.json, report.xml and report.html in the folder. Raises ConfigError when they cannot be written."""
    contents = {
        "report.json": as_json(report),
        "report.xml": as_junit(report),
        "report.html": page(report).encode(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise ConfigError(f"--output {folder}: {error}", param="output") from error
    return [folder / name for name in contents]


def as_json(report: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def as_junit(report: Report) -> bytes:
    """A test case a run, one for each comparison with the baseline and one for the verdict as a whole."""
    suite = ET.Element("testsuite", name=f"tandem gate {report.task}", timestamp=report.started)
    properties = ET.SubElement(suite, "properties")
    for name in ("url", "baseline_url", "threshold", "questions", "shots", "max_tokens", "parallel"):
        ET.SubElement(properties, "property", name=name, value=str(getattr(report, name)))
    for run in report.runs:
        _add_run(suite, report, run)
    for pairing in report.pairings:
        case = _case(suite, report, f"run {pairing.run} against the baseline", 0.0)
        text = f"only here right {pairing.only_subject}, only there {pairing.only_baseline}, p = {pairing.p:.4g}"
        ET.SubElement(case, "system-out").text = text
    _add_verdict(suite, report)
    for name, tag in (("failures", "failure"), ("errors", "error")):
        suite.set(name, str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("tests", str(len(suite.findall("testcase"))))
    suite.set("time", f"{report.seconds:.3f}")
    content: bytes = ET.tostring(suite, encoding="utf-8", xml_declaration=True)
    return content


def _case(suite: ET.Element, report: Report, name: str, seconds: float) -> ET.Element:
    return ET.SubElement(suite, "testcase", classname=f"gate.{report.task}", name=name, time=f"{seconds:.3f}")


def _add_run(suite: ET.Element, report: Report, run: RunSummary) -> None:
    case = _case(suite, report, f"run {run.name}" + ("" if run.side == SUBJECT else f" of the {run.side}"), run.seconds)
    figures = f"accuracy {run.accuracy:.4f} ({run.right} of {run.answered}), {run.missing} without an answer"
    if run.side == SUBJECT and run.highest < report.threshold:
        ET.SubElement(case, "failure", message=f"below {report.threshold:g}: {figures}")
    ET.SubElement(case, "system-out").text = figures


def _add_verdict(suite: ET.Element, report: Report) -> None:
    case = _case(suite, report, "verdict", report.seconds)
    tags = {Verdict.FAIL: "failure", Verdict.INVALID: "error"}
    if report.verdict in tags:
        ET.SubElement(case, tags[report.verdict], message=_printable("; ".join(report.reasons)))
    drifts = report.drift is not None and report.drift.alarm
    ET.SubElement(case, "system-out").text = "the accuracy drifts down" if drifts else report.verdict.value


def _printable(text: str) -> str:
    """Without the control characters that XML cannot hold: a server's error may have any."""
    return "".join(c if c.isprintable() else " " for c in text)
