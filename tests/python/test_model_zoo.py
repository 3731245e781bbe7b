"""transformers' own models, unmodified: gradients and updates beside the unsharded model, each layer a unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from parity import Twin
from raggedfsdp import fully_shard
from raggedfsdp.models import units
from ranks import run_ranks

VOCABULARY = 64
SMALL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = SMALL | {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
}
MOE = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}

CAUSAL: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gemma2": LLAMA,
    "gemma3_text": LLAMA,
    "phi3": LLAMA,
    "olmo2": LLAMA,
    "cohere": LLAMA,
    "starcoder2": LLAMA,
    "mixtral": LLAMA | MOE,
    "qwen2_moe": LLAMA | MOE | {"shared_expert_intermediate_size": 20},
    "qwen3_moe": LLAMA | MOE,
    "olmoe": LLAMA | MOE,
    "gpt_oss": LLAMA | MOE,
    "granitemoe": LLAMA | MOE,
    "deepseek_v3": LLAMA
    | MOE
    | {
        "num_key_value_heads": 4,
        "head_dim": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 12,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "gpt2": SMALL | {"n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "gpt_neox": LLAMA,
    "opt": SMALL
    | {"hidden_size": 24, "ffn_dim": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "word_embed_proj_dim": 12},
    "bloom": SMALL | {"hidden_size": 24, "n_layer": 3, "n_head": 4},
    "falcon": SMALL | {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4},
    "gptj": SMALL | {"n_embd": 24, "n_layer": 3, "n_head": 4, "rotary_dim": 4, "n_positions": 64},
    "mamba": SMALL | {"hidden_size": 24, "state_size": 4, "num_hidden_layers": 3},
    "mamba2": SMALL
    | {
        "hidden_size": 24,
        "state_size": 4,
        "num_hidden_layers": 3,
        "head_dim": 6,
        "num_heads": 8,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "jamba": LLAMA | MOE | {"mamba_d_state": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "xglm": SMALL | {"d_model": 24, "ffn_dim": 40, "num_layers": 3, "attention_heads": 4},
}
ATTENTION = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": (
        "AutoModelForSeq2SeqLM",
        SMALL | {"d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    ),
    "bart": (
        "AutoModelForSeq2SeqLM",
        SMALL
        | {
            "d_model": 24,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 40,
            "decoder_ffn_dim": 40,
            "max_position_embeddings": 64,
            "decoder_start_token_id": 2,
            "forced_eos_token_id": None,
        },
    ),
    "bert": ("AutoModelForMaskedLM", SMALL | ATTENTION | {"max_position_embeddings": 64}),
    "roberta": ("AutoModelForMaskedLM", SMALL | ATTENTION | {"max_position_embeddings": 64}),
    "deberta-v2": ("AutoModelForMaskedLM", SMALL | ATTENTION | {"max_position_embeddings": 64}),
    "albert": ("AutoModelForMaskedLM", SMALL | ATTENTION | {"embedding_size": 12, "max_position_embeddings": 64}),
    "vit": ("AutoModelForImageClassification", ATTENTION | {"image_size": 16, "patch_size": 4, "num_labels": 5}),
    "convnext": ("AutoModelForImageClassification", {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1], "num_labels": 5}),
}
CLASSES = dict.fromkeys(CAUSAL, "AutoModelForCausalLM") | {name: cls for name, (cls, _) in OTHERS.items()}
QUICK = ("gpt2", "gpt_oss", "deepseek_v3", "qwen3_moe", "t5", "mamba", "vit")


def make(name: str) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(name, **(CAUSAL[name] if name in CAUSAL else OTHERS[name][1]))
    for key in list(vars(config)):
        if "dropout" in key or key.endswith("pdrop") or key in ("drop_path_rate", "router_jitter_noise"):
            setattr(config, key, 0.0)
    torch.manual_seed(3)
    model: nn.Module = getattr(transformers, CLASSES[name]).from_config(config, dtype=torch.float32)
    return model.train()


def data(name: str, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if "Image" in CLASSES[name]:
        size = 16 if name == "vit" else 32
        pixels = torch.rand(2, 3, size, size, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(5, (2,), generator=generator)}
    tokens = torch.randint(3, VOCABULARY, (2, 16), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def shard(model: nn.Module) -> None:
    for _, module in units(model):
        fully_shard(module)


def loss(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    result: torch.Tensor = model(**given).loss
    return result


def plain(model: Any) -> None:
    """As it is."""


def reentrant(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()


def non_reentrant(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def mostly_frozen(model: Any) -> None:
    """Biases and norms train."""
    for p in model.parameters():
        p.requires_grad_(p.ndim < 2)


MODES: dict[str, Callable[[Any], None]] = {f.__name__: f for f in (plain, reentrant, non_reentrant, mostly_frozen)}


def _trains(name: str) -> None:
    modes = MODES if make(name).supports_gradient_checkpointing else {"plain": plain, "mostly_frozen": mostly_frozen}
    for prepare in modes.values():

        def prepared(prepare: Callable[[Any], None] = prepare) -> nn.Module:
            model = make(name)
            prepare(model)
            return model

        twin = Twin(prepared, shard, tolerance=2e-6)
        optimisers = [torch.optim.SGD((p for p in m.parameters() if p.requires_grad), 0.1) for m in (twin.model, twin.oracle)]
        for step in range(2):
            twin.backward(loss, lambda rank, step=step: data(name, 10 * step + rank))
            twin.check()
            for optimiser in optimisers:
                optimiser.step()
                optimiser.zero_grad()
        twin.check()


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in CLASSES])
def test_trains_like_the_unsharded_model(name: str) -> None:
    run_ranks(_trains, 2, 100, name)
