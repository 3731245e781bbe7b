"""Norms as partial results, reduced when somebody needs the value, many of them in one all-reduce; and verdicts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._ops._math_ops import _NormPartial

from raggedfsdp import _C
from raggedfsdp.tensor._layout import Layout
from raggedfsdp.tensor._operands import Refused, bump, is_ragged, local_of

if TYPE_CHECKING:
    from raggedfsdp.tensor._dtensor import RaggedDTensor


def _partial_of(order: float) -> Partial:
    """As stock DTensor reduces norms of Shard, so that clipping treats both alike."""
    if order == math.inf:
        return Partial("max")
    if order == -math.inf:
        return Partial("min")
    return Partial("sum") if order == 0 else _NormPartial(order)


def _scalar(value: torch.Tensor, layout: Layout, placement: Partial) -> DTensor:
    spec = layout.scalar_spec(placement, value.dtype)
    return torch.Tensor._dtensor__new__(DTensor, value, spec, requires_grad=False)


def _local_norm(local: torch.Tensor, order: float, dtype: torch.dtype | None) -> torch.Tensor:
    if local.numel() == 0:  # the neutral element; torch has no maximum of nothing
        return local.new_full((), math.inf if order < 0 else 0.0, dtype=dtype)
    return torch.linalg.vector_norm(local, order, dtype=dtype)


def _whole_norm(tensor: RaggedDTensor, order: float, dtype: torch.dtype | None) -> DTensor:
    return _scalar(_local_norm(tensor._local_tensor, order, dtype), tensor._layout, _partial_of(order))


def _over_everything(dim: Any, keepdim: bool, ndim: int) -> None:
    whole = dim is None or len(dim) == 0 or sorted(d % max(1, ndim) for d in dim) == list(range(ndim))
    if keepdim or not whole:
        raise Refused(f"only the norm over all dims reduces, not dim={dim}, keepdim={keepdim}")


def vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, order, dim, keepdim = (*args, *(2, None, False)[len(args) - 1 :])[:4]
    if "out" in kwargs:
        raise Refused("it has no out= for partial results")
    _over_everything(dim, keepdim, tensor.dim())
    return _whole_norm(tensor, float(order), kwargs.get("dtype"))


def norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = [a.name for a in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if "out" in given:
        raise Refused("it has no out= for partial results")
    order = 2 if given.get("p") is None else given["p"]
    _over_everything(given.get("dim"), bool(given.get("keepdim", False)), given["self"].dim())
    return _whole_norm(given["self"], float(order), given.get("dtype"))


def foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, order = args[0], float((*args, 2)[1])
    dtype = kwargs.get("dtype", args[2] if len(args) > 2 else None)
    locals_ = [t._local_tensor if is_ragged(t) else t for t in tensors]
    filled = iter(
        torch._foreach_norm([x for x in locals_ if x.numel()], order, dtype) if any(x.numel() for x in locals_) else ()
    )
    norms = [next(filled) if x.numel() else _local_norm(x, order, dtype) for x in locals_]
    placement = _partial_of(order)
    return [_scalar(n, t._layout, placement) if is_ragged(t) else n for n, t in zip(norms, tensors, strict=True)]


def any_or_all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """One small all-reduce: every rank gets the same plain answer (loops of initialisers and NaN checks branch on it)."""
    tensor = args[0]
    verdict = func(tensor._local_tensor).to(torch.uint8).view(1)
    op = _C.ReduceOp.MAX if func._schema.name == "aten::any" else _C.ReduceOp.MIN
    tensor._layout.comm.all_reduce(verdict, op).order_after()
    return verdict.view(()).to(torch.bool)


def check_and_unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A rank that sees an infinity tells the others: all skip the step or none does."""
    gradients, found_inf, inverse_scale = args
    locals_ = [t._local_tensor if is_ragged(t) else t for t in gradients]
    func(locals_, found_inf, local_of(inverse_scale, None))
    bump([*locals_, found_inf])
    comms = {id(comm): comm for comm in (t._layout.comm for t in gradients if is_ragged(t))}
    for comm in comms.values():
        comm.all_reduce(found_inf.view(-1), _C.ReduceOp.MAX).order_after()
