"""What a step's tensors take, layer by layer at the widths of real models, against what is planned for them.

Tensors have no memory here and kernels are not run: sizes and lifetimes are those of a card.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.cuda.batch import CudaBatch
from engine.cuda.memory import plan_memory
from engine.cuda.mixers.moe import MoeMixer
from engine.cuda.model import CudaModel
from engine.model_config import HybridConfig, LayerKind
from tests.kernels.dry import META, meta_rows, model_without_memory
from tests.kernels.test_families_on_card import LAYERS, one_layer

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="it is measured on the card")
DTYPE, TOKENS, ROWS = torch.bfloat16, 8192, 4


class Peak(TorchDispatchMode):
    """Bytes of the tensors that are made inside, at a time: now, and the most."""

    def __init__(self) -> None:
        super().__init__()
        # What a model packed for the CPU may have left is opaque and has none.
        older = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        self._live = {each.untyped_storage()._cdata: 0 for each in older if each.layout == torch.strided}
        self.now = self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in self._live:
                self._add(value.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._live[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, storage._cdata)

    def _free(self, key: int) -> None:
        self.now -= self._live.pop(key)


def model_of(config: HybridConfig) -> CudaModel:
    model = model_without_memory(config, DTYPE, few_rows=16)
    for mixer in model.mixers:
        if isinstance(mixer, MoeMixer):
            mixer.experts.grouped = True
    return model


@pytest.mark.parametrize(("family", "kind"), LAYERS)
def test_a_step_takes_what_was_planned(family: str, kind: LayerKind, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda kernel, grid: lambda *args, **options: None)
    config = one_layer(family, kind)
    plan = plan_memory(
        config,
        dtype=DTYPE,
        ssm_dtype=torch.float32,
        num_pages=64,
        page_size=16,
        num_slots=8,
        step_tokens=TOKENS,
        logit_rows=ROWS,
    )
    ids, ends = (torch.empty(count, dtype=torch.int32, device=META) for count in (TOKENS, ROWS))
    rows, last = meta_rows(ROWS, TOKENS // ROWS), torch.empty(8, dtype=torch.int32, device=META)
    with torch.inference_mode():
        model = model_of(config)
        with Peak() as peak:
            model.forward(CudaBatch(ids, None, rows, ends, None, None), last)
    assert peak.most <= plan.step <= 2.5 * peak.most
