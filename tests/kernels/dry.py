"""Launches that only compile: for a card that need not be there, with tensors that have no memory.

Not where Triton interprets (TRITON_INTERPRET). `python -m tests.kernels.dry` runs a prefill and a decode step of the
layers of real models this way, and prints for each kernel the shared memory of a program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from engine.cuda.batch import CudaBatch
from engine.cuda.linear import FEW_ROWS
from engine.cuda.model import CudaModel
from engine.families import read_config
from engine.kernels.rows import PackedRows
from engine.model_config import HybridConfig
from engine.pools import StatePools
from engine.weights import expected_shapes, keep_float32

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HOPPER = GPUTarget("cuda", 90, 32)
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclasses.dataclass(frozen=True)
class Launch:
    """shared: bytes of a program's shared memory."""

    kernel: str
    shared: int


@contextlib.contextmanager
def dry_launches() -> Iterator[list[Launch]]:
    """Every kernel launched inside is compiled as its first launch with such arguments would, and told of."""
    launches: dict[tuple[Any, ...], Launch] = {}
    found: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        kwargs.pop("launch_pdl", None)
        values = dict(zip(self.arg_names, args, strict=False)) | kwargs
        key = (self.fn.__name__, tuple((name, _kind(value)) for name, value in values.items()), *options.items())
        if key not in launches:
            launches[key] = _compile(self, values, options)
            found.append(launches[key])

    with patch.object(JITFunction, "run", run):
        yield found


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    return ("i32", value % 16 == 0, value == 1) if type(value) is int else value


def _compile(kernel: Any, values: dict[str, Any], options: dict[str, Any]) -> Launch:
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = values[name]
        if kernel.params[i].is_constexpr or (type(value) is int and value == 1):
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name] = TYPES[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else ("i32" if abs(value) < 2**31 else "i64")
        if isinstance(value, Tensor) or (type(value) is int and value % 16 == 0 and signature[name] != "constexpr"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(ASTSource(kernel, signature, constants, attributes), target=HOPPER, options=options)
    return Launch(kernel.fn.__name__, int(compiled.metadata.shared))


# -- real models -------------------------------------------------------------------------------------------------------

META = torch.device("meta")
SPECIAL: Mapping[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": 512}


def falcon_h1_34b() -> PretrainedConfig:
    from transformers import FalconH1Config

    return FalconH1Config(
        **SPECIAL,
        hidden_size=5120,
        intermediate_size=21504,
        num_hidden_layers=1,
        num_attention_heads=20,
        num_key_value_heads=4,
        head_dim=128,
        mamba_d_ssm=4096,
        mamba_n_heads=32,
        mamba_d_head=128,
        mamba_d_state=256,
        mamba_n_groups=2,
        mamba_chunk_size=128,
    )


def granite_4_small(experts: int = 0) -> PretrainedConfig:
    """experts: 72 in the real one, 10 of a token, which torch multiplies."""
    from transformers import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(
        **SPECIAL,
        hidden_size=4096,
        shared_intermediate_size=1536,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=32,
        num_key_value_heads=8,
        num_local_experts=experts,
        num_experts_per_tok=min(experts, 10),
        intermediate_size=768,
        mamba_n_heads=128,
        mamba_d_head=64,
        mamba_d_state=128,
    )


def qwen3_next_80b(dense: Sequence[int] = (0, 1)) -> PretrainedConfig:
    """dense: layers without routed experts, which torch multiplies; none in the real one."""
    from transformers import Qwen3NextConfig

    kinds = ["linear_attention", "full_attention"]
    return Qwen3NextConfig(**SPECIAL, num_hidden_layers=2, layer_types=kinds, mlp_only_layers=list(dense))


MODELS = {"falcon_h1_34b": falcon_h1_34b, "granite_4_small": granite_4_small, "qwen3_next_80b": qwen3_next_80b}


def meta_rows(count: int, longest: int) -> PackedRows:
    def ints(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=META)

    return PackedRows(
        count=count,
        longest=longest,
        begins=ints(count + 1),
        starts=ints(count),
        slots=ints(count),
        track_slots=ints(count),
        track_offsets=ints(count),
        table=ints(64 * count),
        width=ints(1),
    )


def model_without_memory(config: HybridConfig, dtype: torch.dtype, *, few_rows: int) -> CudaModel:
    weights = {
        name: torch.empty(shape, device=META, dtype=torch.float32 if keep_float32(name) else dtype)
        for name, shape in expected_shapes(config).items()
    }
    pools = StatePools(
        config,
        num_pages=64,
        num_slots=8,
        page_size=16,
        dtype=dtype,
        ssm_dtype=torch.float32,
        device=META,
        revision="",
        allocate=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=META),
    )
    return CudaModel(config, weights, pools, few_rows=few_rows)


def steps_of(config: PretrainedConfig, dtype: torch.dtype) -> list[Launch]:
    """The kernels of a decode step of 8 rows and of a prefill of 4 x 512 tokens."""
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        own = read_config(folder)
    last_tokens = torch.empty(8, dtype=torch.int32, device=META)
    with dry_launches() as found, torch.inference_mode():
        model = model_without_memory(own, dtype, few_rows=FEW_ROWS if dtype is torch.bfloat16 else 0)
        for decode, prefill, count in ((meta_rows(8, 1), None, 8), (None, meta_rows(4, 512), 2048)):
            ids = torch.empty(count, dtype=torch.int32, device=META)
            model.forward(CudaBatch(ids, decode, prefill, None, None, None), last_tokens)
    return found


def main(*names: str) -> None:
    """names: of MODELS, bfloat16 or float32; none: all of them."""
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    for model in [name for name in names if name in MODELS] or MODELS:
        for dtype in [name for name in names if name in dtypes] or dtypes:
            for launch in steps_of(MODELS[model](), dtypes[dtype]):
                print(f"{model} {dtype} {launch.kernel} {launch.shared}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
