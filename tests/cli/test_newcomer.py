"""What somebody meets who tries things for the first time: what is said, and that it is said once."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from accuracy import gsm_mini
from cli.settings import BUNDLED_MODEL
from common.config import Verify
from common.errors import ConfigError
from common.layout import StateLayout
from engine.families import read_config
from engine.pools import StatePools
from transfer.messages import PROTOCOL_VERSION, Hello
from transfer.rendezvous import BootstrapServer, look_up
from transfer.server import dial


@pytest.mark.parametrize(
    ("num_pages", "num_slots", "said"),
    [
        (10**13, 8, r"--max-total-tokens 160000000000000: [\d,]{15,} bytes cannot be had \(.+\)"),
        (8, 10**12, r"--max-mamba-cache-size 1000000000000: [\d,]{15,} bytes cannot be had \(.+\)"),
        (10**20, 8, r"--max-total-tokens 16"),
    ],
)
def test_pools_that_are_too_large_name_the_setting(num_pages: int, num_slots: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_pools(num_pages, num_slots)


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), RuntimeError("out of memory\nmore")])
def test_what_a_transport_cannot_allocate_is_the_settings_fault(error: Exception) -> None:
    def allocate(nbytes: int) -> Tensor:
        raise error

    with pytest.raises(ConfigError, match=r"^--max-mamba-cache-size 8: [\d,]+ bytes cannot be had \([^\n]+\)$"):
        make_pools(2, 8, allocate)


def make_pools(num_pages: int, num_slots: int, allocate: object = None) -> StatePools:
    return StatePools(
        read_config(BUNDLED_MODEL),
        num_pages=num_pages,
        num_slots=num_slots,
        page_size=16,
        dtype=torch.float32,
        ssm_dtype=torch.float32,
        device="cpu",
        revision="r",
        allocate=allocate,  # type: ignore[arg-type]
    )


LAYOUT = StateLayout(model="m", revision="r", page_size=4, chunk=8, conv_width=4, vocab_size=9, pools=())


async def test_a_look_up_leaves_no_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "transfer")
    server = BootstrapServer("127.0.0.1", 0, [("127.0.0.1", 5)], LAYOUT, None)
    await server.start()
    try:
        assert (await look_up("127.0.0.1", server.port, None, hello(LAYOUT), 5)).addresses == (("127.0.0.1", 5),)
        await until_logged(caplog, "peer_lost")
        assert [record.levelname for record in caplog.records] == ["DEBUG"]
        with pytest.raises(ConfigError):
            await dial("127.0.0.1", server.port, None, hello(msgspec.structs.replace(LAYOUT, page_size=8)), 5)
        await until_logged(caplog, "layout_mismatch")
        assert caplog.records[-1].levelname == "INFO"
    finally:
        await server.close()


def hello(layout: StateLayout) -> Hello:
    return Hello(
        version=PROTOCOL_VERSION, role="decode", node_id="d", instance="i", verify=Verify.DIGEST, layout=layout
    )


async def until_logged(caplog: pytest.LogCaptureFixture, words: str) -> None:
    for _ in range(500):
        if words in caplog.text:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"no {words} in {caplog.text}")


def test_gsm_mini_prints_problems_with_answers() -> None:
    command = [sys.executable, "-m", "accuracy.gsm_mini", "--count", "2", "--seed", "3", "--shots", "1"]
    repo = Path(__file__).parents[2]
    printed = subprocess.run(command, cwd=repo, capture_output=True, text=True, check=True).stdout
    first, second = gsm_mini.problems("heldout", 3, 2)
    (solved,) = gsm_mini.few_shot(count=1)
    assert printed == "".join(map(gsm_mini.shot, (solved, first, solved, second)))
