"""Operations that need every element: allowed inside `gathering()`, at the price of one gather per ragged operand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from raggedfsdp.tensor._layout import UsageError
from raggedfsdp.tensor._operands import bump, is_ragged, written_tensors

# Inside gathering(): the gathered copies that user code may hold views of.
_gathered_views: ContextVar[set[StorageWeakRef] | None] = ContextVar("raggedfsdp_gathered_views", default=None)


class _NoLostWrites(TorchDispatchMode):
    """A view of a gathered copy is for reading: a write to it would not reach the parameter."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in written_tensors(func, args, kwargs) if _views() and isinstance(func, OpOverload) else ():
            if type(tensor) is torch.Tensor and StorageWeakRef(tensor.untyped_storage()) in _views():
                raise UsageError(
                    f"{func} writes to a view of a gathered RaggedDTensor, a copy: it would be lost. Write to the tensor "
                    "itself, or use raggedfsdp.tensor.initialize_"
                )
        return func(*args, **kwargs)


@contextmanager
def gathering() -> Iterator[None]:
    """Inside, an operation that is not element-wise gathers its operands; all ranks must run it. Results are plain tensors,
    except that in-place operations write each rank's piece back; views are for reading. Not differentiable: use
    full_tensor() for that."""
    token = _gathered_views.set(set())
    try:
        with _NoLostWrites():
            yield
    finally:
        _gathered_views.reset(token)


def allowed() -> bool:
    return _gathered_views.get() is not None


def _views() -> set[StorageWeakRef]:
    views = _gathered_views.get()
    return set() if views is None else views


def run_gathered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    wholes: dict[int, tuple[Any, torch.Tensor]] = {}

    def whole_of(value: Any) -> Any:
        if not is_ragged(value):
            return value
        if value.requires_grad and torch.is_grad_enabled():
            raise UsageError(f"{func} inside gathering(): not differentiable; call full_tensor() or use torch.no_grad()")
        if id(value) not in wholes:
            wholes[id(value)] = (value, value.with_local(value._local_tensor).full_tensor())
        return wholes[id(value)][1]

    result = func(*tree_map(whole_of, args), **tree_map(whole_of, kwargs))
    if func.is_view:
        _views().update(StorageWeakRef(whole.untyped_storage()) for _, whole in wholes.values())
    for tensor in written_tensors(func, args, kwargs):
        if is_ragged(tensor):
            _write_back(func, tensor, wholes[id(tensor)][1])
    owners = {id(whole): tensor for tensor, whole in wholes.values()}
    return tree_map(lambda r: owners.get(id(r), r), result)


def _write_back(func: Any, tensor: Any, whole: torch.Tensor) -> None:
    if whole.shape != tensor.shape or not whole.is_contiguous():
        raise UsageError(f"{func} inside gathering(): it would change the shape of a RaggedDTensor in place; use full_tensor()")
    tensor._local_tensor.copy_(tensor._layout.slice_of(whole))
    bump([tensor._local_tensor])
