"""Random NemotronH folders of realistic scale: states that neither die nor explode."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from transformers import NemotronHForCausalLM

NANO_V2_PATTERN = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"


@dataclasses.dataclass(frozen=True)
class Shape:
    """The widths of a random model; everything else is the same for all."""

    pattern: str
    hidden: int
    heads: int
    head_dim: int
    d_state: int
    groups: int
    conv: int
    chunk: int
    query_heads: int
    kv_heads: int
    attention_dim: int
    mlp: int
    bias: bool = False
    vocab: int = 97


SHAPES = {
    "small": Shape("M*-M", 48, 4, 12, 16, 2, 4, 8, 4, 2, 16, 64),
    "biased": Shape("*M-M*M-", 64, 6, 8, 20, 3, 3, 16, 6, 1, 10, 96, bias=True),
    "nano_v2": Shape(NANO_V2_PATTERN, 64, 16, 8, 16, 8, 4, 16, 5, 1, 16, 112),
}


def make_model(shape: Shape, seed: int = 0) -> NemotronHForCausalLM:
    """A transformers model in float32.

    time_step_min is tiny because transformers takes it as the lower bound of dt in prefill, but not in decode; dt_bias
    and A_log are drawn as they are at the start of a training.
    """
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig(
        hybrid_override_pattern=shape.pattern,
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        mamba_num_heads=shape.heads,
        mamba_head_dim=shape.head_dim,
        ssm_state_size=shape.d_state,
        n_groups=shape.groups,
        conv_kernel=shape.conv,
        chunk_size=shape.chunk,
        num_attention_heads=shape.query_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.attention_dim,
        intermediate_size=shape.mlp,
        use_bias=shape.bias,
        mlp_bias=shape.bias,
        use_conv_bias=True,
        time_step_min=1e-9,
        max_position_embeddings=4096,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = NemotronHForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            _draw(name, weight)
    return model


def _draw(name: str, weight: torch.Tensor) -> None:
    if name.endswith("dt_bias"):
        dt = torch.exp(torch.empty_like(weight).uniform_(math.log(0.001), math.log(0.1)))
        weight.copy_(dt + torch.log(-torch.expm1(-dt)))
    elif name.endswith("A_log"):
        weight.copy_(torch.empty_like(weight).uniform_(1, 16).log())
    elif name.endswith((".D", "norm.weight", "norm_f.weight")):
        weight.normal_(1, 0.1)
    elif name.endswith("bias"):
        weight.normal_(0, 0.1)
    elif name.endswith("conv1d.weight"):
        weight.uniform_(-1, 1)
    else:
        weight.normal_(0, 1 if "embeddings" in name else weight.shape[-1] ** -0.5)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def reference_models() -> Callable[[str], Any]:
    """name of a shape -> the transformers model with its weights, made once."""
    made: dict[str, Any] = {}

    def model(name: str) -> Any:
        if name not in made:
            made[name] = make_model(SHAPES[name])
        return made[name]

    return model


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, reference_models: Callable[[str], Any]) -> Callable[[str], Path]:
    """name of a shape -> a folder that transformers saved; tests do not change it."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            reference_models(name).save_pretrained(made[name])
        return made[name]

    return folder
