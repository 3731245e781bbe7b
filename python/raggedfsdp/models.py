"""Unmodified `transformers` causal language models, built from a configuration alone: nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from raggedfsdp import UsageError
from raggedfsdp.presets import PRESETS

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig

ROOT = "root"


def load_config(name_or_path: str) -> PretrainedConfig:
    """The configuration of a preset, or of a JSON file as `transformers` writes it (a folder with config.json will do)."""
    from transformers import AutoConfig

    values = dict(PRESETS[name_or_path]) if name_or_path in PRESETS else _read_json(name_or_path)
    model_type = values.pop("model_type", None)
    if not isinstance(model_type, str):
        raise UsageError(f'--model: {name_or_path} has no "model_type"; it must be a transformers configuration')
    try:
        return AutoConfig.for_model(model_type, **values)
    except Exception as e:  # a configuration class raises whatever it likes on a bad value
        raise UsageError(f"--model: {name_or_path}: {_one_line(e)}") from e


def _read_json(name: str) -> dict[str, Any]:
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        raise UsageError(f"--model: no preset and no file is called {name}; presets are {', '.join(PRESETS)}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UsageError(f"--model: cannot read {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise UsageError(f"--model: {path} is not text; it must be a JSON configuration") from e
    except json.JSONDecodeError as e:
        raise UsageError(f"--model: {path} is not JSON: line {e.lineno}, column {e.colno}: {e.msg}") from e
    if not isinstance(values, dict):
        raise UsageError(f"--model: {path} must hold one JSON object, a transformers configuration")
    return values


def build_model(config: PretrainedConfig, device: torch.device | str) -> nn.Module:
    """The model with fp32 parameters, whatever dtype the configuration names: mixed precision keeps fp32 masters."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as e:
        raise UsageError(f"--model: cannot build a causal language model of type {config.model_type}: {_one_line(e)}") from e
    return cast("nn.Module", model)


def units(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """What to wrap, in order: the transformer's layers, then the root with everything else."""
    return [*_layers(model), (ROOT, model)]


def _layers(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Members of the outermost module lists; lists of experts lie inside a layer and are not looked for."""
    from torch import nn

    found: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            members = [(f"{prefix}{name}.{i}", layer) for i, layer in enumerate(child)]
            found += [(path, layer) for path, layer in members if any(True for _ in layer.parameters())]
        else:
            found += _layers(child, f"{prefix}{name}.")
    return found


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
