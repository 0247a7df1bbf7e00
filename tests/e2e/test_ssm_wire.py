"""SSM states that cross as bfloat16: what decode has is prefill's, rounded; the answers stay where they were."""

from __future__ import annotations

import random

import pytest
import torch

from common.config import DType, EngineConfig
from tests.support.models import FAMILIES, Models
from tests.support.ranks import Request, Snapshots, assert_equivalent, disaggregated_ranks, unified_ranks

ENGINE = EngineConfig(max_total_tokens=16384, max_state_slots=24, max_running_requests=20, local_prefill_max_tokens=0)
LOGPROB = 0.05  # of random tokens, where the model is sure of nothing; bench/ssm_wire.py has the figures


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layerwise", [False, True])
def test_decode_goes_on_from_the_rounded_state(layerwise: bool, family: str, models: Models) -> None:
    rng, model = random.Random(3), models(family, 16)
    tasks = [Request(prompt=[rng.randrange(3, 97) for _ in range(n)], max_new_tokens=16) for n in (5, 64, 150, 700)]
    with unified_ranks(model=model, engine=ENGINE) as ranks:
        expected = ranks.run(tasks)
    with disaggregated_ranks(
        model=model, engine=ENGINE, ssm_wire_dtype=DType.BFLOAT16, disable_layerwise_transfer=not layerwise
    ) as ranks:
        snapshots = Snapshots()
        snapshots.watch(ranks.prefill, ranks.decode)
        outcomes = ranks.run(tasks)
        sent = ranks.decode.transfer.stats()["bytes"]
        slot_bytes = ranks.decode.host.runner.pools.ssm[0].nbytes
        ranks.assert_all_free()
    assert sent["ssm"] == len(tasks) * slot_bytes // 2
    assert len(snapshots.sent) == len(snapshots.received) == len(tasks)
    for room, (kv, conv, ssm) in snapshots.sent.items():
        their_kv, their_conv, their_ssm = snapshots.received[room]
        assert torch.equal(kv, their_kv) and torch.equal(conv, their_conv)
        assert torch.equal(ssm.bfloat16().float(), their_ssm) and not torch.equal(ssm, their_ssm)
    for got, undisturbed in zip(outcomes, expected, strict=True):
        assert_equivalent(got, undisturbed, gap=LOGPROB, logprob=LOGPROB)


def test_what_is_asked_to_cross_as_it_is_does() -> None:
    with disaggregated_ranks(engine=ENGINE, ssm_wire_dtype=DType.FLOAT32) as ranks:
        assert ranks.prefill.transfer._reader is not None
        assert not any(pool.narrowed for pool in ranks.prefill.transfer._reader.pools)
        (outcome,) = ranks.run([Request(prompt=list(range(5, 90)))])
        assert outcome.error is None
        assert ranks.decode.transfer.stats()["bytes"]["ssm"] == ranks.decode.host.runner.pools.ssm[0].nbytes
