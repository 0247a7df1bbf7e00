"""Rows that follow a grammar, on the device that queues steps: such a step is waited for and sampled on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from common.sampling import LogprobOptions
from engine.cuda.device import CudaDevice
from engine.grammar import GrammarError
from tests.kernels.test_cuda_model import Pair, planned, tokens

FIRST = 40


class OneAfterTheOther:
    """In the place of a `Grammar`: token i of the answer is FIRST + i; after three of them it is lost."""

    def allowed(self, output_ids: Sequence[int]) -> bytes:
        assert list(output_ids) == [FIRST + i for i in range(len(output_ids))], "the mask knows the newest token"
        if len(output_ids) == 3:
            raise GrammarError("lost")
        bits = bytearray(16)
        token_id = FIRST + len(output_ids)
        bits[token_id // 8] |= 1 << token_id % 8
        return bytes(bits)


def test_a_grammar_is_followed_from_step_to_step_and_fails_its_own_row(device: torch.device) -> None:
    cuda = CudaDevice(Pair("plain", device).runner, frozenset())
    grammar: Any = OneAfterTheOther()
    free = LogprobOptions(wanted=True, top_num=1)
    first = cuda.launch([planned(0, 0, tokens(6, 0), grammar=grammar), planned(1, 0, tokens(6, 1))])
    second = cuda.launch(
        [planned(0, 6, None, grammar=grammar)._replace(output_ids=[]), planned(1, 6, None, logprobs=free)]
    )
    assert first.result().tokens[0].token_id == FIRST and second.result().tokens[0].token_id == FIRST + 1
    top = second.result().tokens[1]
    assert top.token_id == top.top[0][1], "the row beside it is free"
    third = cuda.launch([planned(0, 7, None, grammar=grammar)._replace(output_ids=[FIRST])])
    assert third.result().tokens[0].token_id == FIRST + 2
    rows = [planned(0, 8, None, grammar=grammar)._replace(output_ids=[FIRST, FIRST + 1]), planned(1, 7, None)]
    lost = cuda.launch(rows).result()
    assert set(lost.tokens) == {1} and set(lost.failed) == {0}
