"""Rids and room numbers that come back too early, and legs that do not belong together, cost nobody else anything."""

from __future__ import annotations

import time

from common.handoff import RoomAddress
from common.sampling import SamplingParams
from node.messages import Abort, Submit
from prefill_node.rank import PrefillRole
from tests.support.ranks import WITH_LOGPROBS, Outcome, Ranks, Request, disaggregated_ranks

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)


def leg(ranks: Ranks, role: object, *, rid: str, room: int, prompt: list[int]) -> Outcome:
    """One leg of a request, given to `role` alone."""
    assert ranks.bootstrap_port is not None
    address = RoomAddress(host="127.0.0.1", port=ranks.bootstrap_port, room=room)
    role.submit(  # type: ignore[attr-defined]
        Submit(
            rid=rid,
            token_ids=prompt,
            sampling=GREEDY,
            logprobs=WITH_LOGPROBS,
            room=address,
            arrival_s=time.monotonic(),
        )
    )
    outcomes = ranks.outcomes if role is ranks.roles[-1] else ranks.legs
    return outcomes.setdefault(rid, Outcome())


def test_a_rid_comes_back_while_its_old_room_is_still_written() -> None:
    with disaggregated_ranks() as ranks:
        prompt = list(range(5, 100))
        leg(ranks, ranks.decode, rid="x", room=1, prompt=prompt)
        leg(ranks, ranks.prefill, rid="x", room=1, prompt=prompt)
        ranks.run_until(lambda: bool(ranks.prefill.host.scheduler.counters.prefill_steps))
        for role in ranks.roles:
            role.abort(Abort(rid="x"))
            role.take_outbox()
        ranks.outcomes.clear()
        ranks.legs.clear()
        again = leg(ranks, ranks.decode, rid="x", room=2, prompt=prompt)
        leg(ranks, ranks.prefill, rid="x", room=2, prompt=prompt)
        ranks.run_until(lambda: again.ended)
        assert again.error is None and len(again.tokens) == 4
        ranks.assert_all_free()


def test_a_room_number_comes_back_before_its_last_event_was_taken_in() -> None:
    with disaggregated_ranks() as ranks:
        prefill: PrefillRole = ranks.prefill
        prompt = list(range(5, 40))
        leg(ranks, prefill, rid="a", room=7, prompt=prompt)
        prefill.abort(Abort(rid="a"))  # the transfer forgets the room at once, the rank when it polls
        prefill.take_outbox()
        leg(ranks, prefill, rid="b", room=7, prompt=prompt)
        assert [m.error.code for m in prefill.take_outbox()] == ["room_in_use"]  # type: ignore[union-attr]
        ranks.assert_all_free()
        assert ranks.run([Request(prompt=prompt)])[0].error is None


def test_legs_with_different_prompts_of_one_length_are_refused() -> None:
    with disaggregated_ranks() as ranks:
        answer = leg(ranks, ranks.decode, rid="a", room=3, prompt=list(range(5, 40)))
        leg(ranks, ranks.prefill, rid="b", room=3, prompt=list(range(6, 41)))
        ranks.run_until(lambda: answer.ended)
        assert answer.error is not None and answer.error.code == "prompt_mismatch" and answer.error.status == 400
        ranks.assert_all_free()


def test_a_stray_decode_leg_does_not_fail_a_running_request() -> None:
    """Its pages are lent to a room that never comes; the running request waits for them and goes on."""
    with disaggregated_ranks(first_token_timeout_s=1.5) as ranks:
        scheduler = ranks.decode.host.scheduler
        usable = scheduler.memory.pages.num_usable * scheduler.limits.page_size
        running = ranks.submit(Request(prompt=list(range(5, 20)), max_new_tokens=200))
        ranks.run_until(lambda: len(running.tokens) > 2)
        stray = leg(ranks, ranks.decode, rid="stray", room=99, prompt=[5 + i % 900 for i in range(usable - 64)])
        ranks.run_until(lambda: running.ended, timeout_s=30)
        assert running.error is None and len(running.tokens) == 200
        assert stray.error is not None and stray.error.code == "first_token_timeout"
        ranks.assert_all_free()
