"""More requests than there is room for, clients that leave at any point: no error, no deadlock, nothing left over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from common.config import EngineConfig
from tests.support.held import HeldTransport, held_ranks
from tests.support.ranks import Outcome, Ranks, Request, assert_equivalent, check_integrity, disaggregated_ranks

CHUNKS, CHUNK_TOKENS = 4, 256
PIECES = EngineConfig(max_total_tokens=16384, max_state_slots=16, chunked_prefill_size=CHUNK_TOKENS)


def crowd(number: int, prompt_tokens: int, max_new_tokens: int) -> list[Request]:
    """Prompts without a common beginning."""
    return [
        Request(
            prompt=[5 + (i * 53 + j * 7) % 900 for j in range(prompt_tokens + i % 9)], max_new_tokens=max_new_tokens
        )
        for i in range(number)
    ]


def run_crowd(ranks: Ranks, requests: list[Request]) -> tuple[list[Outcome], list[str]]:
    """All at once; what came of them, and in which order their first tokens came."""
    outcomes = [ranks.submit(request) for request in requests]
    order: list[str] = []

    def ended() -> bool:
        order.extend(o.rid for o in outcomes if o.tokens and o.rid not in order)
        for role in ranks.roles:
            check_integrity(role)
        return all(outcome.ended for outcome in outcomes)

    ranks.run_until(ended, 60)
    return outcomes, order


def test_forty_requests_at_once_through_two_slots() -> None:
    """Nobody gets anybody else's state or metadata."""
    engine = EngineConfig(max_total_tokens=8192, max_state_slots=3, max_running_requests=20)
    requests = crowd(40, 30, 4)
    with disaggregated_ranks(engine=engine) as ranks:
        outcomes, _ = run_crowd(ranks, requests)
        ranks.assert_all_free()
        assert all(outcome.error is None and len(outcome.tokens) == 4 for outcome in outcomes)
        for request, outcome in list(zip(requests, outcomes, strict=True))[::4]:
            assert_equivalent(outcome, ranks.run([request])[0])


def test_34_requests_on_pools_for_eight_queue_in_order() -> None:
    tokens = 8 * (64 + 16 + 16)
    engine = EngineConfig(max_total_tokens=tokens, max_state_slots=9, max_running_requests=8)
    with disaggregated_ranks(engine=engine) as ranks:
        outcomes, order = run_crowd(ranks, crowd(34, 48, 12))
        assert all(outcome.error is None and len(outcome.tokens) == 12 for outcome in outcomes)
        assert order == [outcome.rid for outcome in outcomes]
        ranks.assert_all_free()


# Clients that leave


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with held_ranks(PIECES, PIECES, disable_early_prefill=True) as made:
        yield made


def steps(ranks: Ranks) -> int:
    return int(ranks.prefill.host.scheduler.counters.prefill_steps)


def after_pieces(number: int) -> Callable[[Ranks, Outcome], bool]:
    return lambda ranks, _: bool(ranks.decode.rooms) and steps(ranks) == number


def in_transfer(ranks: Ranks, outcome: Outcome) -> bool:
    """Everything is computed; a write is in flight."""
    assert isinstance(ranks.prefill.transport, HeldTransport)
    return steps(ranks) == CHUNKS and ranks.prefill.transport.reached.is_set()


def first_token(ranks: Ranks, outcome: Outcome) -> bool:
    return len(outcome.tokens) >= 1


POINTS = {f"{25 * number} % of prefill": after_pieces(number) for number in range(CHUNKS + 1) if number != 3}


@pytest.mark.parametrize("point", [*POINTS, "during transfer", "at the first token"])
def test_a_client_leaves(ranks: Ranks, point: str) -> None:
    """Both ranks are empty within a second, nothing more is computed, and the next request is undisturbed."""
    transport = ranks.prefill.transport
    assert isinstance(transport, HeldTransport)
    reached = {**POINTS, "during transfer": in_transfer, "at the first token": first_token}[point]
    ranks.flush()
    (undisturbed,) = ranks.run([Request(prompt=list(range(9, 80)))])
    ranks.flush()
    ranks.prefill.host.scheduler.counters.prefill_steps = 0
    if point == "during transfer":
        transport.hold()
    leaving = ranks.submit(Request(prompt=[5 + i * 7 % 900 for i in range(CHUNKS * CHUNK_TOKENS)], max_new_tokens=500))
    ranks.run_until(lambda: reached(ranks, leaving))
    computed = steps(ranks)
    ranks.abort(leaving)
    started = time.monotonic()
    transport.land.set()
    ranks.run_until(lambda: leaving.error is not None, 1)
    ranks.assert_all_free(1)
    assert time.monotonic() - started < 1
    assert leaving.error is not None and leaving.error.code == "aborted"
    assert steps(ranks) == computed and len(leaving.tokens) <= 2
    (again,) = ranks.run([Request(prompt=list(range(9, 80)))])
    assert_equivalent(again, undisturbed)
