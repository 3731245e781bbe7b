"""Turning the operands of an operation into this rank's pieces."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor

from raggedfsdp.tensor._layout import Layout

if TYPE_CHECKING:
    from raggedfsdp.tensor._dtensor import RaggedDTensor


class Refused(Exception):
    """The operation cannot run on local pieces; the text says why."""


def is_ragged(value: Any) -> TypeGuard[RaggedDTensor]:
    return getattr(type(value), "_is_ragged", False)  # isinstance goes through a metaclass, and this runs per operand


def first_ragged(values: Iterable[Any]) -> Any:
    for value in values:
        if is_ragged(value):
            return value
    raise Refused("its ragged operand is inside a list")


def local_of(value: Any, layout: Layout | None) -> Any:
    """The operand's elements of this rank's piece. `layout` is None where the operand must mean the same for every piece."""
    if not isinstance(value, torch.Tensor):
        return value
    if is_ragged(value):
        if layout is None:
            raise Refused("a ragged tensor stands where a scalar or a plain tensor is expected")
        if value._layout is not layout and value._layout != layout:
            raise Refused(
                f"operands are cut differently: shape {tuple(layout.shape)} as {layout.placements} and shape "
                f"{tuple(value.shape)} as {value.placements}; redistribute() one of them"
            )
        return value._local_tensor
    if isinstance(value, DTensor):
        return local_of(_replicated(value), layout)
    if layout is None:
        return value
    if value.dim() == 0 or (value.numel() == 1 and 0 < value.dim() <= len(layout.shape)):
        # A piece of a 0-d tensor is 1-D: with a 0-d operand types would promote otherwise than they do unsharded.
        if not layout.shape:
            return value.reshape(1) if value.device.type == layout.mesh.device_type else value
        return value.reshape(1) if value.dim() > 1 else value  # pieces are flat: more dims would not broadcast in place
    if value.shape == layout.shape:
        return layout.slice_of(value)
    raise Refused(
        f"a plain operand of shape {tuple(value.shape)} is neither a scalar nor of the tensor's shape {tuple(layout.shape)}"
    )


def _replicated(value: DTensor) -> torch.Tensor:
    """A clip coefficient, a learning rate: small, the same everywhere."""
    if all(p.is_replicate() for p in value.placements):
        return value._local_tensor
    if value.dim() == 0:
        return value.full_tensor()
    raise Refused(f"a DTensor operand placed as {value.placements} must be replicated or ragged like the others")


@cache
def _written_places(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that the operation changes in place, in argument order."""
    written: list[Any] = []
    for position, name in _written_places(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        if isinstance(value, torch.Tensor):
            written.append(value)
        elif isinstance(value, (list, tuple)):
            written.extend(v for v in value if isinstance(v, torch.Tensor))
    return written


def bump(tensors: Iterable[torch.Tensor]) -> None:
    """Below autograd nobody counts versions; the engine reads the flat shard's as the bucket's generation."""
    counted = [t for t in tensors if not t.is_inference()]
    if counted:
        torch.autograd.graph.increment_version(counted)
