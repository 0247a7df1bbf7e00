"""`tandem gate kl`, `parity` and `bisect`: what they ask, print and write. Each returns its exit status."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from accuracy.bisect import Bisection, PartFinding, bisect, open_nodes
from accuracy.client import Api, Client
from accuracy.kl import measure_kl
from accuracy.parity import Comparison, Hits, Likeness, compare_tokens, hits
from accuracy.prompts import Prompt
from accuracy.records import Record
from common.errors import ConfigError

PASS, FAIL = 0, 1


def _client(url: str, timeout_s: float, parallel: int) -> Client:
    return Client(url=url, api=Api.GENERATE, timeout_s=timeout_s, parallel=parallel)


async def kl(
    url: str,
    prompts: Sequence[Prompt],
    *,
    new_tokens: int,
    bounds: tuple[float, float],
    parallel: int,
    output: Path | None,
) -> int:
    async with _client(url, 600.0, parallel) as client:
        found = await measure_kl(client, prompts, new_tokens=new_tokens, bounds=bounds)
    for one in found:
        click.echo(
            f"{one.case:5} KL {one.kl:.2e}  bound {one.bound:g}  {'ok' if one.within else 'ABOVE'}  largest difference "
            f"of a log-probability {one.largest:.2e}  {one.tokens} tokens, {one.unsure} of them unsure, "
            f"{one.cached_share:.0%} of the prompts cached"
        )
    write_json(output, found)
    return PASS if all(one.within for one in found) else FAIL


async def parity(
    url: str,
    baseline: str,
    prompts: Sequence[Prompt],
    *,
    new_tokens: int,
    tie: float,
    parallel: int,
    output: Path | None,
) -> int:
    async with _client(url, 600.0, parallel) as subject, _client(baseline, 600.0, parallel) as reference:
        found = await compare_tokens(subject, reference, prompts, new_tokens=new_tokens, tie=tie)
    for run in ("cold", "warm"):
        own = [one for one in found if one.run == run]
        counts = {likeness: sum(one.likeness is likeness for one in own) for likeness in Likeness}
        largest = max((one.logprob_difference for one in own), default=0.0)
        words = ", ".join(f"{count} {likeness}" for likeness, count in counts.items())
        click.echo(f"{run}: {words}; largest difference of a log-probability before that {largest:.2e}")
    click.echo(_hits_line(hits(found)))
    different = [one for one in found if one.likeness is Likeness.DIFFERENT]
    for one in different:
        click.echo(difference_line(one))
    write_json(output, found)
    return FAIL if different else PASS


def _hits_line(found: Hits) -> str:
    line = (
        f"both runs: {found.different_hits} of {found.hits} answers after a prefix hit are different, "
        f"{found.different_others} of {found.others} without one"
    )
    return line + (": what the prefix cache has saved is wrong" if found.are_suspected else "")


def difference_line(one: Comparison) -> str:
    """Of one that is different."""
    where = f"{one.run}, prompt {one.prompt}: token {one.position}"
    line = f"{where} is {one.subject_token} here and {one.baseline_token} there"
    if one.shortfall is not None:
        line += (
            f", which the baseline finds likelier by {one.shortfall:.3g} (log-probability; its two best: {one.gap:.3g})"
        )
    if not one.prefix_hit:
        return f"{line}; no prefix hit"
    return f"{line}; a prefix hit: {one.cached_tokens} of {one.prompt_tokens} prompt tokens were cached"


async def bisect_prompt(
    url: str,
    unified: str,
    prompt: Prompt,
    *,
    max_tokens: int,
    stop: Sequence[str],
    tolerance: float | None,
    output: Path | None,
) -> int:
    async with open_nodes(url, unified, 600.0) as nodes:
        found = await bisect(nodes, prompt, max_tokens=max_tokens, stop=stop, tolerance=tolerance)
    for line in bisection_lines(found):
        click.echo(line)
    write_json(output, found)
    return FAIL if found.differs else PASS


def bisection_lines(found: Bisection) -> list[str]:
    """A line for each stage of each run, then the first part that differs."""
    stages = dict.fromkeys((one.run, one.stage) for one in found.findings)
    lines = [_stage_line(run, stage, found.findings) for run, stage in stages]
    lines += [
        f"{run}: " + ("all tokens equal" if token is None else f"token {token} is the first that differs")
        for run, token in found.first_tokens.items()
    ]
    return [*lines, *found.notes, first_difference_line(found)]


def _stage_line(run: str, stage: str, findings: Sequence[PartFinding]) -> str:
    own = [one for one in findings if (one.run, one.stage) == (run, stage)]
    parts = dict.fromkeys(one.part for one in own)
    words = []
    for part in parts:
        layers = [one for one in own if one.part == part]
        worst = max(one.distance for one in layers)
        bad = [str(one.layer) for one in layers if one.differs]
        equal = all(one.equal_bytes for one in layers)
        words.append(
            f"{part} " + ("equal" if equal else f"{worst:.1e}" + (f" (layers {' '.join(bad)})" if bad else ""))
        )
    return f"{run}, {stage}: {', '.join(words)}"


def first_difference_line(found: Bisection) -> str:
    first = found.first
    if first is not None:
        where = f"{first.run}, {first.stage}: {first.part} of layer {first.layer}"
        return f"first difference: {where} (relative distance {first.distance:.2g}, tolerance {found.tolerance:g})"
    return "no part of the state differs" + ("; the tokens do" if found.differs else "")


def failing_prompt(answers: Path, wanted: str | None) -> Prompt:
    """The prompt of a question that was answered wrong, by preference one right in the baseline. Raises ConfigError."""
    try:
        lines = answers.read_bytes().splitlines()[1:]
        records = [msgspec.json.decode(line, type=Record) for line in lines]
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--answers {answers}: {error}", param="answers") from error
    right_there = {(r.run, r.id) for r in records if r.side == "baseline" and r.is_right}
    asked = [r for r in records if r.side == "subject" and (wanted is None or r.id == wanted)]
    wrong = asked if wanted is not None else [r for r in asked if not r.is_right]
    lost = [r for r in wrong if (r.run, r.id) in right_there] or wrong
    if not lost:
        raise ConfigError(f"--answers {answers}: no question {wanted or 'that was answered wrong'}", param="answers")
    return {"text": lost[0].prompt}


def write_json(path: Path | None, found: Any) -> None:
    """Raises ConfigError."""
    if path is None:
        return
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"--output {path}: {error}", param="output") from error
