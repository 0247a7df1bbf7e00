"""The real fault of SGLang before 0.5.20, in its stub: parity finds it and names prefix hits; without it, it passes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from accuracy.parity import Comparison, Likeness, hits
from cli.gate.checks import parity
from tests.sglang.stub_server import Stub, parse
from tests.sglang.test_router import serving

COUNT = 6


def prompts() -> list[dict[str, list[int]]]:
    draw = random.Random(3)
    return [{"input_ids": [draw.randrange(1, 600) for _ in range(70 + 40 * i)]} for i in range(COUNT)]


async def checked(tmp_path: Path, *flags: str, mixes: bool = True) -> tuple[int, list[Comparison]]:
    """Exit status of parity with a server that keeps nothing, and what was found."""
    import msgspec

    report = tmp_path / "parity.json"
    subject, right = (Stub(parse(["--model-path", "m", *each])) for each in (flags, ["--disable-radix-cache"]))
    subject.states.mixes = mixes
    async with serving(subject) as url, serving(right) as baseline:
        status = await parity(url, baseline, prompts(), new_tokens=2, tie=0.12, parallel=COUNT, output=report)
    return status, msgspec.json.decode(report.read_bytes(), type=list[Comparison])


async def test_states_of_a_batch_are_found_wrong_and_the_prefix_hits_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = await checked(tmp_path, "--mamba-radix-cache-strategy", "extra_buffer")
    assert status == 1
    assert not any(one.prefix_hit for one in found if one.run == "cold")
    both = hits(found)
    assert (both.hits, both.different_hits, both.different_others) == (COUNT, COUNT - 1, 0), "all but the first"
    wrong = [one for one in found if one.likeness is Likeness.DIFFERENT]
    assert all((one.position, one.shortfall) == (0, 2.5) for one in wrong)
    said = capsys.readouterr().out
    assert "5 of 6 answers after a prefix hit are different, 0 of 6 without one: what the prefix cache" in said
    last = prompts()[-1]["input_ids"]
    assert f"a prefix hit: {len(last) // 64 * 64} of {len(last)} prompt tokens were cached" in said


@pytest.mark.parametrize(
    ("flags", "mixes"),
    [
        (["--mamba-radix-cache-strategy", "no_buffer"], True),
        (["--mamba-radix-cache-strategy", "extra_buffer", "--prefill-max-requests", "1"], True),
        (["--mamba-radix-cache-strategy", "extra_buffer"], False),
    ],
)
async def test_right_states_pass(tmp_path: Path, flags: list[str], mixes: bool) -> None:
    status, found = await checked(tmp_path, *flags, mixes=mixes)
    assert status == 0
    assert len(found) == 2 * COUNT and all(one.likeness is Likeness.EQUAL for one in found)
    assert any(one.prefix_hit for one in found) == ("extra_buffer" in flags)
