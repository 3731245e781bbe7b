"""Random values as the unsharded tensor would get them: every rank draws all and keeps its piece.

Ranks that share a seed therefore agree, whatever their number; the price is one whole tensor at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from raggedfsdp.tensor._layout import Layout
from raggedfsdp.tensor._operands import Refused, bump, is_ragged


def _whole(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    return torch.empty(layout.shape, dtype=local.dtype, device=local.device)


def initialize_(tensor: torch.Tensor, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """fn(tensor, *args, **kwargs) for an initialiser that is not element-wise (orthogonal_, eye_, ...): runs it on a whole
    tensor on every rank and keeps the piece. On a plain tensor it is just the call."""
    if not is_ragged(tensor):
        return fn(tensor, *args, **kwargs)
    with torch.no_grad():
        whole = _whole(tensor._local_tensor, tensor._layout)
        fn(whole, *args, **kwargs)
        return tensor.copy_(whole)


def in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    if any(isinstance(a, torch.Tensor) for a in (*rest, *kwargs.values())):
        raise Refused("random values with a tensor of parameters need that tensor whole")
    if not tensor._local_tensor.is_meta:
        whole = _whole(tensor._local_tensor, tensor._layout)
        func(whole, *rest, **kwargs)
        tensor._local_tensor.copy_(tensor._layout.slice_of(whole))
        bump([tensor._local_tensor])
    return tensor


def like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    kept = {k: v for k, v in kwargs.items() if k not in ("memory_format", "layout")}
    whole = func(_whole(tensor._local_tensor, tensor._layout), *rest, **kept)
    return tensor.with_local(tensor._layout.slice_of(whole).clone())
