"""The hand-off over RDMA verbs, on Soft-RoCE in a guest: what crosses, what carried it, and which devices are refused.

`make test-rdma`. A comparison of bytes alone shows nothing: without an RDMA device Mooncake moves them over TCP, right
and without a word. So the queue pairs' packet sequence numbers and the port's counters are looked at.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rdma.guest import run_alone, run_pair
from tests.rdma.image import image

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(3600)]

GUEST_TIMEOUT_S = 900
PATH_MTU = 4096
PAGE, CONV, SSM = 4 * 16384, 3 * 12288, 3 * 262144
SENT = {
    "1": {"kv": 4 * PAGE, "conv": CONV, "ssm": SSM},
    "2": {"kv": 4 * PAGE, "conv": CONV, "ssm": SSM, "track": CONV + SSM},
    "3": {"kv": 4 * PAGE, "conv": CONV, "ssm": SSM},
    "4": {"kv": 3 * PAGE, "conv": CONV, "ssm": SSM, "track": CONV + SSM},
}
TRACKS = {"1": "none", "2": "received", "3": "same_as_final", "4": "received"}
PAYLOAD = sum(nbytes for parts in SENT.values() for nbytes in parts.values())


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Consoles and reports; kept when a test has failed."""
    path = Path(tempfile.mkdtemp(prefix="tandem-rdma-"))
    yield path
    if request.session.testsfailed:
        print(f"consoles and reports are in {path}")
    else:
        shutil.rmtree(path)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """The report of each scenario of a guest with both ranks."""
    return run_alone(image(), folder, GUEST_TIMEOUT_S)


@pytest.fixture(scope="module")
def pair(folder: Path) -> dict[str, Any]:
    """The reports of two guests, one rank each, with a wire between them that loses one packet in a hundred."""
    return run_pair(image(), folder, GUEST_TIMEOUT_S)


def assert_all_arrived(prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    """Every byte of every room, none that belongs elsewhere, and no more was sent than decode had asked for."""
    assert prefill["failed"] == decode["failed"] == []
    assert decode["wrong_items"] == []
    assert decode["tracks"] == TRACKS
    assert prefill["sent"] == SENT


def assert_queue_pairs_carried_it(prefill: dict[str, Any], decode: dict[str, Any], packets: int) -> None:
    for rank, side in ((prefill, "sq-psn"), (decode, "rq-psn")):
        assert rank["transport"] == "mooncake-rdma" and rank["devices"] == ["rxe0"]
        assert {(pair["type"], pair["state"]) for pair in rank["queue_pairs"]} == {("RC", "RTS")}
        assert sum(pair[side] for pair in rank["queue_pairs"]) * PATH_MTU >= PAYLOAD
    assert packets * PATH_MTU >= PAYLOAD


def test_every_part_of_the_state_crosses(alone: dict[str, Any]) -> None:
    assert_all_arrived(alone["rdma"]["prefill"], alone["rdma"]["decode"])


def test_queue_pairs_carry_the_bytes(alone: dict[str, Any]) -> None:
    counted = alone["rdma"]["counted"]
    assert_queue_pairs_carried_it(alone["rdma"]["prefill"], alone["rdma"]["decode"], counted["packets"])
    assert counted["local_bytes"] < PAYLOAD / 50, "control messages are all that crosses TCP"


def test_lost_packets_change_nothing(pair: dict[str, Any]) -> None:
    prefill, decode = pair["prefill"], pair["decode"]
    assert_all_arrived(prefill["prefill"], decode["decode"])
    assert_queue_pairs_carried_it(prefill["prefill"], decode["decode"], prefill["counted"]["packets"])
    assert prefill["counted"]["dropped"] > 0 and prefill["counted"]["again"] > 0


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ("misnamed", ("--transfer-device rxe9", "did not start")),
        ("down", ("--transfer-device rxe2", "did not start")),
        ("one of two misnamed", ("--transfer-device rxe0,rxe9", "did not open rxe9")),
        ("one of two down", ("--transfer-device rxe0,rxe2", "did not open rxe2")),
    ],
)
def test_a_device_that_cannot_be_used_is_refused(alone: dict[str, Any], scenario: str, words: tuple[str, ...]) -> None:
    """By Mooncake itself where it is the only one (MC_FORCE_HCA), by us where others of the list work."""
    answer = alone[scenario]["open"]
    assert answer["param"] == "transfer_device"
    assert all(word in answer["refused"] for word in words)


def test_every_device_of_a_list_is_opened(alone: dict[str, Any]) -> None:
    assert alone["two devices"]["open"]["devices"] == ["rxe0", "rxe1"]


def test_tcp_is_tcp_where_there_are_rdma_devices(alone: dict[str, Any]) -> None:
    answer = alone["tcp"]["open"]
    assert (answer["transport"], answer["devices"], answer["queue_pairs"]) == ("mooncake-tcp", [], [])


def test_without_the_first_protection_the_second_one_refuses(alone: dict[str, Any]) -> None:
    """MC_FORCE_HCA is taken away: Mooncake falls back, and what it installed is looked at."""
    answer = alone["misnamed, not forced"]["open"]
    assert answer["param"] == "transfer_protocol" and "installed another transport" in answer["refused"]


def test_without_any_protection_these_tests_would_notice(alone: dict[str, Any]) -> None:
    """Bytes, digests and the transport's name are right, and all of it is TCP: only queue pairs and counters tell."""
    fallen_back = alone["misnamed, not forced, not looked at"]
    prefill, decode, counted = fallen_back["prefill"], fallen_back["decode"], fallen_back["counted"]
    assert_all_arrived(prefill, decode)
    assert counted["packets"] == 0 and counted["local_bytes"] >= PAYLOAD
    with pytest.raises(AssertionError):
        assert_queue_pairs_carried_it(prefill, decode, counted["packets"])
