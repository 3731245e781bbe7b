from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raggedfsdp import UsageError
from raggedfsdp.models import ROOT, build_model, load_config, units
from raggedfsdp.presets import PRESETS

pytestmark = pytest.mark.timeout(60)

# Published totals, numbers of layers, and of a layer the tensors that planning depends on.
REAL_SIZES: dict[str, tuple[int, int, str, dict[str, tuple[int, ...]]]] = {
    "llama3-70b": (
        70_553_706_496,
        80,
        "model.layers.79.",
        {
            "self_attn.q_proj.weight": (8192, 8192),
            "self_attn.k_proj.weight": (1024, 8192),
            "mlp.gate_proj.weight": (28672, 8192),
            "mlp.down_proj.weight": (8192, 28672),
        },
    ),
    "gpt-oss-120b": (
        116_829_156_672,
        36,
        "model.layers.0.",
        {
            "self_attn.sinks": (64,),
            "mlp.router.weight": (128, 2880),
            "mlp.experts.gate_up_proj": (128, 2880, 5760),
            "mlp.experts.down_proj": (128, 2880, 2880),
        },
    ),
    "deepseek-v3": (
        671_026_404_352,
        61,
        "model.layers.3.",
        {
            "self_attn.q_a_proj.weight": (1536, 7168),
            "self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
            "mlp.experts.gate_up_proj": (256, 4096, 7168),
            "mlp.experts.down_proj": (256, 7168, 2048),
        },
    ),
    "qwen3-235b-a22b": (
        235_093_634_560,
        94,
        "model.layers.93.",
        {
            "self_attn.q_proj.weight": (8192, 4096),
            "self_attn.k_norm.weight": (128,),
            "mlp.experts.gate_up_proj": (128, 3072, 4096),
            "mlp.experts.down_proj": (128, 4096, 1536),
        },
    ),
}
TINY = ("llama-tiny", "gpt-oss-tiny", "deepseek-tiny")


def test_every_preset_is_tested() -> None:
    assert set(PRESETS) == {*REAL_SIZES, *TINY}


@pytest.mark.parametrize("name", REAL_SIZES)
def test_real_size(name: str) -> None:
    total, layers, prefix, expected = REAL_SIZES[name]
    model = build_model(load_config(name), "meta")
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert sum(p.numel() for p in model.parameters()) == total
    assert [n for n, _ in units(model)] == [*(f"model.layers.{i}" for i in range(layers)), ROOT]
    assert {n: shapes[prefix + n] for n in expected} == expected
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("name", TINY)
def test_tiny_model_learns_one_batch(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(load_config(name), "cpu").train()
    assert sum(p.numel() for p in model.parameters()) < 2_000_000
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    tokens = torch.randint(0, 256, (2, 16))
    losses = []
    for _ in range(10):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.1


def test_tiny_models_have_the_shapes_that_are_hard() -> None:
    def dims(name: str) -> dict[str, int]:
        return {n: p.dim() for n, p in build_model(load_config(name), "meta").named_parameters()}

    assert dims("gpt-oss-tiny")["model.layers.0.mlp.experts.gate_up_proj"] == 3
    deepseek = dims("deepseek-tiny")
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa.weight" in deepseek
    assert "model.layers.0.mlp.gate_proj.weight" in deepseek, "the first layer is dense"
    assert deepseek["model.layers.1.mlp.experts.down_proj"] == 3


def config_file(folder: Path, **changes: Any) -> Path:
    values = {**PRESETS["llama-tiny"], **changes}
    path = folder / "config.json"
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return path


def test_a_file_or_its_folder_is_a_model_with_fp32_parameters(tmp_path: Path) -> None:
    path = config_file(tmp_path, dtype="bfloat16", architectures=["LlamaForCausalLM"], num_hidden_layers=2)
    for given in (path, tmp_path):
        model = build_model(load_config(str(given)), "cpu")
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert len(units(model)) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None}, 'has no "model_type"'),
        ({"model_type": "lama"}, "lama"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": 100, "num_attention_heads": 3}, "multiple of"),
    ],
)
def test_bad_configuration(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = config_file(tmp_path, **changes)
    with pytest.raises(UsageError, match=message) as caught:
        build_model(load_config(str(path)), "meta")
    assert "\n" not in str(caught.value)


def test_a_model_that_is_no_causal_language_model(tmp_path: Path) -> None:
    path = tmp_path / "vit.json"
    path.write_text('{"model_type": "vit"}')
    with pytest.raises(UsageError, match="cannot build a causal language model of type vit"):
        build_model(load_config(str(path)), "meta")


@pytest.mark.parametrize(
    ("text", "message"),
    [(b"{", "not JSON: line 1"), (b"[]", "must hold one JSON object"), (b"\xff\xfe\x00", "not text"), (b"", "not JSON")],
)
def test_bad_file(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(UsageError, match=message):
        load_config(str(path))


def test_a_name_that_is_nothing_lists_the_presets() -> None:
    with pytest.raises(UsageError, match="llama-tiny, gpt-oss-tiny"):
        load_config("llama-tinny")


def test_units_are_layers_and_not_their_experts() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = nn.ModuleDict({"h": nn.ModuleList(Layer() for _ in range(2))})
            self.activations = nn.ModuleList([nn.ReLU()])

    model = Model()
    names = [name for name, _ in units(model)]
    assert names == ["transformer.h.0", "transformer.h.1", ROOT]
    assert units(model)[-1][1] is model
