"""Write a model as a Hugging Face folder: config.json, generation_config.json and bfloat16 model.safetensors.

python -m training.export --checkpoint .ckpt --out models/tandem-mini
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from training.model import ModelConfig, NemotronH
from training.tokenizer import END_OF_TEXT_ID

MAX_POSITIONS = 8192


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json of `config`, with the keys of transformers' NemotronHConfig.

    `time_step_min` is next to nothing because transformers clamps dt at it in the chunked scan but not in a decode
    step, while `time_step_limit` is what other engines read: both together mean that dt is not clamped.
    """
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": len(config.pattern),
        "hybrid_override_pattern": config.pattern,
        "num_attention_heads": config.attention_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "intermediate_size": config.mlp_size,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "mamba_num_heads": config.mamba_heads,
        "mamba_head_dim": config.mamba_head_dim,
        "mamba_hidden_act": "silu",
        "mamba_proj_bias": False,
        "mamba_ssm_cache_dtype": "float32",
        "n_groups": config.groups,
        "ssm_state_size": config.state_size,
        "conv_kernel": config.conv_width,
        "use_conv_bias": True,
        "expand": config.inner_size // config.hidden_size,
        "chunk_size": config.chunk_size,
        "time_step_limit": [0.0, math.inf],
        "time_step_min": 1e-9,
        "time_step_max": 0.1,
        "time_step_floor": 1e-4,
        "use_bias": False,
        "layer_norm_epsilon": config.norm_eps,
        "residual_in_fp32": False,
        "rescale_prenorm_residual": True,
        "hidden_dropout": 0.0,
        "initializer_range": 0.02,
        "max_position_embeddings": MAX_POSITIONS,
        "num_logits_to_keep": 1,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": END_OF_TEXT_ID,
    }


def generation_config() -> dict[str, Any]:
    """The generation_config.json: greedy."""
    return {
        "do_sample": False,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": END_OF_TEXT_ID,
    }


def export(model: NemotronH, folder: Path) -> None:
    """Write `model`, rounded to bfloat16, into `folder`; the tokenizer's files are written elsewhere."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in (("config", hf_config(model.config)), ("generation_config", generation_config())):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def load_exported(folder: Path, device: str = "cpu") -> NemotronH:
    """Read `folder`'s weights (bfloat16) into a float32 model of the default shape."""
    model = NemotronH(ModelConfig())
    model.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})
    return model.to(device).eval()


def main() -> None:
    from training.train import load_parameters

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("models/tandem-mini"))
    args = parser.parse_args()
    model = NemotronH(ModelConfig())
    load_parameters(model, args.checkpoint)
    export(model, args.out)


if __name__ == "__main__":
    main()
