"""The tests of the model, its numerics and its saved states (tests/engine), with the CUDA runner."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.runner import ModelRunner
from tests.engine.conftest import folders, reference_models  # noqa: F401
from tests.engine.test_model_parity import (  # noqa: F401
    runners,
    test_batched_equals_alone,
    test_bfloat16_stays_close_to_float32,
    test_chunked_equals_alone,
    test_dt_is_bounded_in_prefill_and_decode,
    test_greedy_tokens_equal_transformers,
    test_many_decode_rows_equal_alone,
    test_mixed_steps_equal_alone,
    test_model_equals_the_float64_recurrence,
    test_only_the_logits_asked_for,
    test_prefill_equals_transformers,
    test_the_state_is_needed,
)
from tests.engine.test_model_tracking import (  # noqa: F401
    labs,
    test_a_wrong_saved_state_shows,
    test_batches_save_for_some_of_their_rows,
    test_decode_rows_save_in_runs_and_in_gaps,
    test_requests_share_a_saved_state,
    test_resumed_rows_and_decode_rows_save_in_one_step,
    test_resuming_is_as_if_it_had_never_stopped,
    test_the_saved_state_is_that_of_a_cold_run,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module", autouse=True)
def on_card() -> Iterator[None]:
    from tests.kernels.on_card import load_on_card

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "load", load_on_card)
        yield
