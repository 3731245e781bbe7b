"""What happens to the tensors that go into and come out of a unit's forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from raggedfsdp._tree import map_tensors

Attach = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor


def moved(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """CPU tensors come along, as FSDP2's outermost unit does it; what lies on another device was put there on purpose."""
    return tensor.to(device, non_blocking=True) if tensor.is_cpu else tensor


def through(attach: Attach, value: Any) -> Any:
    """`value` with its tensors that require grad behind boundary nodes."""
    if not torch.is_grad_enabled():
        return value
    if isinstance(value, torch.Tensor):  # what most modules return, for which the rest is a tenth of the whole hook
        return attach([value])[0] if value.requires_grad else value
    tracked: dict[int, torch.Tensor] = {}

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tracked[id(tensor)] = tensor
        return tensor

    map_tensors(collect, value)
    if not tracked:
        return value
    behind = dict(zip(tracked, attach(list(tracked.values())), strict=True))
    return map_tensors(lambda t: behind.get(id(t), t), value)


def through_arguments(attach: Attach, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if len(args) == 1 and not kwargs:
        return (through(attach, args[0]),), kwargs
    return through(attach, (args, kwargs))
