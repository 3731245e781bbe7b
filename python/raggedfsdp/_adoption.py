"""Taking over what happened to sharded parameters outside the engine: new values, another dtype or device, new objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from raggedfsdp import _C
from raggedfsdp._optimizers import parameters_were_replaced
from raggedfsdp._parameters import ShardedParameter
from raggedfsdp.tensor import RaggedDTensor

if TYPE_CHECKING:
    from raggedfsdp._state import UnitState


def adopt(state: UnitState, finished: bool) -> None:
    """Takes over what happened to the sharded parameters outside: replaced, re-made, frozen.

    Not `finished`: more is to come (a state dict in parts, the other modules of a unit of several), so what does not fit
    together yet is left alone.
    """
    for parameter in state.parameters:
        sharded = parameter.sharded
        current = parameter.slots[0].get()
        if current is not sharded:
            _adopt_replacement(state, parameter, current)
            sharded = parameter.sharded
        if sharded._local_tensor is not parameter.local and (finished or _fits(state, parameter)):
            _adopt_values(state, parameter)
        if sharded._backward_hooks:
            raise _C.UsageError(
                f"unit '{state.name}': register_hook on parameter '{parameter.name}' would never run: its gradient is "
                "made by a reduction; use register_post_accumulate_grad_hook"
            )
        state.set_requires_grad(parameter, sharded.requires_grad)


def _fits(state: UnitState, parameter: ShardedParameter) -> bool:
    """Whether the values can be taken over: a change of dtype or device concerns the whole bucket."""
    local = parameter.sharded._local_tensor
    if local.is_meta:
        return False
    if local.dtype == parameter.local.dtype and local.device == parameter.local.device:
        return True
    others = [p.sharded._local_tensor for p in state.by_bucket[parameter.bucket]]
    return all(other.dtype == local.dtype and other.device == local.device for other in others)


def _adopt_replacement(state: UnitState, parameter: ShardedParameter, current: nn.Parameter | None) -> None:
    if current is None or current.shape != parameter.sharded.shape:
        came = "nothing" if current is None else f"a parameter of shape {tuple(current.shape)}"
        raise _C.UsageError(
            f"unit '{state.name}': parameter '{parameter.name}' of shape {tuple(parameter.sharded.shape)} was replaced by "
            f"{came}; a wrapped parameter may get new values but not a new shape"
        )
    with torch.no_grad():
        if isinstance(current, RaggedDTensor) and isinstance(current, nn.Parameter):
            replacement: nn.Parameter = current
        else:
            layout = parameter.sharded._layout
            local = layout.slice_of(current.detach()).to(parameter.local.dtype)
            replacement = nn.Parameter(parameter.sharded.data.with_local(local), requires_grad=current.requires_grad)
    replacement.__dict__.update(parameter.sharded.__dict__)
    parameters_were_replaced()
    parameter.sharded = replacement
    parameter.allow_gradient_dtype(state.core)
    ShardedParameter.changes += 1
    for slot in parameter.slots:
        slot.put(replacement)


def _adopt_values(state: UnitState, parameter: ShardedParameter) -> None:
    local = parameter.sharded._local_tensor
    if local.is_meta:
        raise _C.UsageError(
            f"unit '{state.name}': parameter '{parameter.name}' is still on the meta device; call "
            "model.to_empty(device=...) and initialise it before its first use"
        )
    if local.dtype != parameter.local.dtype or local.device != parameter.local.device:
        _retype(state, parameter.bucket, parameter)
        return
    state.core.buckets[parameter.bucket].materialize()
    with torch.no_grad():
        parameter.local.copy_(local)
    parameter.sharded._local_tensor = parameter.local


def _retype(state: UnitState, bucket: int, first: ShardedParameter) -> None:
    """All parameters of a bucket were moved to another dtype or device: their buffers follow."""
    locals_ = [p.sharded._local_tensor for p in state.by_bucket[bucket]]
    dtype, device = first.sharded.dtype, first.sharded._local_tensor.device
    for parameter, local in zip(state.by_bucket[bucket], locals_, strict=True):
        if local.dtype != dtype or local.device != device:
            raise _C.UsageError(
                f"unit '{state.name}': parameter '{first.name}' became {dtype} on {device} and '{parameter.name}', which "
                f"shares its buffer, {local.dtype} on {local.device}; change the whole unit, or before fully_shard"
            )
    state.core.buckets[bucket].retype(dtype, device)
    state.core.buckets[bucket].materialize()
    for parameter, local in zip(state.by_bucket[bucket], locals_, strict=True):
        parameter.bind(state.core)
        with torch.no_grad():
            parameter.local.copy_(local)
        parameter.sharded._local_tensor = parameter.local
