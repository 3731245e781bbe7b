"""What an operation on a RaggedDTensor does: runs on the local piece, reduces, gathers, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from raggedfsdp.tensor import _gather, _random, _reductions, _tables
from raggedfsdp.tensor._layout import UsageError
from raggedfsdp.tensor._operands import Refused, bump, first_ragged, is_ragged, local_of, written_tensors

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return handler_of(func)(func, args, kwargs)
    except Refused as refusal:
        if _gather.allowed():
            return _gather.run_gathered(func, args, kwargs)
        raise UsageError(
            f"{func} on a RaggedDTensor: {refusal}. Use .full_tensor(), or `with raggedfsdp.tensor.gathering():` to gather its "
            "operands on every rank"
        ) from None


@cache
def handler_of(func: Any) -> Handler:
    name = func._schema.name.removeprefix("aten::")
    if name == "copy_":
        return copy_
    for names, handler in (
        (_tables.LIKE, like),
        (_tables.FUSED_OPTIMISERS, listwise),
        (_tables.RANDOM_IN_PLACE, _random.in_place),
        (_tables.RANDOM_LIKE, _random.like),
    ):
        if name in names:
            return handler
    if name in _tables.ELEMENT_WISE:
        return listwise if name.startswith("_foreach_") else element_wise
    if name in ("any", "all"):
        return _reductions.any_or_all if len(func._schema.arguments) == 1 else refuse
    return _OTHERS.get(name, refuse)


def refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise Refused("it is not element-wise and would be wrong on one rank's piece")


def element_wise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    anchor = first_ragged((*args, *kwargs.values()))
    layout = anchor._layout
    written = written_tensors(func, args, kwargs)
    if not all(is_ragged(t) for t in written):
        raise Refused("the tensor written to is a plain one and needs every element")
    local_args = [local_of(a, layout) for a in args]
    local_kwargs = {k: local_of(v, layout) for k, v in kwargs.items() if k != "memory_format"}
    result = func(*local_args, **local_kwargs)
    if written:
        bump(t._local_tensor for t in written)
        return written[0]
    return anchor.with_local(result)


def copy_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Also from a whole tensor of a shape that broadcasts, as plain copy_ does."""
    target, source, *rest = args
    if is_ragged(target) and type(source) in (torch.Tensor, torch.nn.Parameter) and source.dim() > 0:
        source = source.expand(target.shape)
    return element_wise(func, (target, source, *rest), kwargs)


def listwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """foreach and fused: entry i of every list belongs to the same tensor, plain ones among them as they are."""
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor)]
    entries = zip(*(x for x in lists if len(x) == len(lists[0])), strict=True)
    anchors = [next((t for t in entry if is_ragged(t)), None) for entry in entries]
    layouts = [None if a is None else a._layout for a in anchors]
    if any(isinstance(t, DTensor) and not is_ragged(t) for t in lists[0]):
        raise Refused("the list mixes ragged tensors with other DTensors; give them an optimiser or a call of their own")

    def localise(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            if len(value) != len(layouts):
                return value
            return [local_of(v, layout) for v, layout in zip(value, layouts, strict=True)]
        return local_of(value, None)

    written = written_tensors(func, args, kwargs)
    results = func(*map(localise, args), **{k: localise(v) for k, v in kwargs.items()})
    bump(t._local_tensor if is_ragged(t) else t for t in written)
    if results is None or written:
        return None
    return [r if a is None else a.with_local(r) for r, a in zip(results, anchors, strict=True)]


def fill_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Its tensor value must stay 0-d, also for a 0-d target."""
    value = local_of(args[1], None)
    if not is_ragged(args[0]) or (isinstance(value, torch.Tensor) and value.dim() > 0):
        raise Refused("it takes a number or a 0-d plain tensor")
    func(args[0]._local_tensor, value)
    bump([args[0]._local_tensor])
    return args[0]


def masked_fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Its value must stay 0-d, also for a 0-d target."""
    tensor, mask, value = args
    if not is_ragged(tensor):
        raise Refused("the tensor is a plain one and only its mask is ragged")
    result = func(tensor._local_tensor, local_of(mask, tensor._layout), local_of(value, None))
    if func._schema.name == "aten::masked_fill":
        return tensor.with_local(result)
    bump([tensor._local_tensor])
    return tensor


def index_put_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """tensor[mask] = scalar, as Rprop writes it: the one element-wise case."""
    tensor, indices, value = args[:3]
    scalar = isinstance(value, torch.Tensor) and not is_ragged(value) and value.dim() == 0
    mask = indices[0] if len(indices) == 1 else None
    if not (is_ragged(tensor) and scalar and mask is not None and mask.dtype == torch.bool and mask.shape == tensor.shape):
        raise Refused("only tensor[mask] = scalar with a mask of the tensor's shape is element-wise")
    tensor._local_tensor.masked_fill_(local_of(mask, tensor._layout), value)
    bump([tensor._local_tensor])
    return tensor


def like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    kept = {k: v for k, v in kwargs.items() if k not in ("memory_format", "layout")}
    return tensor.with_local(func(tensor._local_tensor, *rest, **kept))


def alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same memory and version counter: the very local tensor."""
    return args[0].with_local(args[0]._local_tensor)


def same_shape_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shape, sizes = args[0].shape, args[1]
    if len(sizes) != len(shape) or any(new not in (old, -1) for new, old in zip(sizes, shape, strict=True)):
        raise Refused(f"a view of shape {tuple(sizes)} of a tensor of shape {tuple(shape)} is cut elsewhere")
    return alias(func, args, kwargs)


def new_of_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """new_zeros and its kin: sharded alike where the shape is the tensor's own, otherwise plain and whole on every rank."""
    tensor, sizes, *rest = args
    if torch.Size(sizes) != tensor.shape:
        return func(tensor._local_tensor, sizes, *rest, **kwargs)
    return tensor.with_local(func(tensor._local_tensor, list(tensor._local_tensor.shape), *rest, **kwargs))


def is_same_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return args[0].shape == args[1].shape


_OTHERS: dict[str, Handler] = {
    "detach": alias,
    "alias": alias,
    "lift_fresh": alias,
    "view": same_shape_view,
    "_unsafe_view": same_shape_view,
    "expand": same_shape_view,
    "new_empty": new_of_size,
    "new_zeros": new_of_size,
    "new_ones": new_of_size,
    "new_full": new_of_size,
    "is_same_size": is_same_size,
    "index_put_": index_put_,
    "fill_": fill_,
    "masked_fill": masked_fill,
    "masked_fill_": masked_fill,
    "linalg_vector_norm": _reductions.vector_norm,
    "norm": _reductions.norm,
    "_foreach_norm": _reductions.foreach_norm,
    "_amp_foreach_non_finite_check_and_unscale_": _reductions.check_and_unscale,
}
