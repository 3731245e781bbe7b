"""Random values as the unsharded tensor would get them: every rank draws all and keeps its piece.

Ranks that share a seed therefore agree, whatever their number; the price is one whole tensor at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from raggedfsdp.tensor._layout import Layout
from raggedfsdp.tensor._operands import Refused, bump


def _whole(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    return torch.empty(layout.shape, dtype=local.dtype, device=local.device)


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
