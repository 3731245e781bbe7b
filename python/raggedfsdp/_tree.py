"""Tensors inside whatever a module takes or returns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree

TensorFn = Callable[[torch.Tensor], torch.Tensor]


def map_tensors(fn: TensorFn, value: Any) -> Any:
    """`value` with `fn` applied to every tensor in it. What holds no changed tensor is returned as it is, not copied."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, (tuple, list)):
        return _map_sequence(fn, value)
    if isinstance(value, Mapping):
        return _map_mapping(fn, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(fn, value)
    if type(value) in _pytree.SUPPORTED_NODES:
        leaves, spec = _pytree.tree_flatten(value)
        mapped = [fn(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return value if _same(leaves, mapped) else _pytree.tree_unflatten(mapped, spec)
    return value


def _same(before: Any, after: Any) -> bool:
    return all(a is b for a, b in zip(before, after, strict=True))


def _map_sequence(fn: TensorFn, value: Any) -> Any:
    mapped = [map_tensors(fn, item) for item in value]
    if _same(value, mapped):
        return value
    if hasattr(value, "_fields"):  # a namedtuple
        return type(value)(*mapped)
    return type(value)(mapped)


def _map_mapping(fn: TensorFn, value: Any) -> Any:
    changed = {key: new for key, old in value.items() if (new := map_tensors(fn, old)) is not old}
    if not changed:
        return value
    result = copy.copy(value)  # keeps the type, a defaultdict's factory and a ModelOutput's attributes
    for key, new in changed.items():
        result[key] = new
    return result


def _map_dataclass(fn: TensorFn, value: Any) -> Any:
    result = value
    for field in dataclasses.fields(value):
        old = getattr(value, field.name, None)
        new = map_tensors(fn, old)
        if new is not old:
            if result is value:
                result = copy.copy(value)
            object.__setattr__(result, field.name, new)  # frozen ones too
    return result
