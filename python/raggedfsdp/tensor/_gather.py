"""Operations that need every element: allowed inside `gathering()`, at the price of one gather per ragged operand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from raggedfsdp.tensor._layout import UsageError
from raggedfsdp.tensor._operands import bump, is_ragged, written_tensors
from torch.utils._pytree import tree_map

_gathering: ContextVar[bool] = ContextVar("raggedfsdp_gathering", default=False)


@contextmanager
def gathering() -> Iterator[None]:
    """Inside, an operation that is not element-wise gathers its operands; all ranks must run it. Results are plain tensors,
    except that in-place operations write each rank's piece back; views can't be written to. Not differentiable: use
    full_tensor() for that."""
    token = _gathering.set(True)
    try:
        yield
    finally:
        _gathering.reset(token)


def allowed() -> bool:
    return _gathering.get()


def run_gathered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    wholes: dict[int, tuple[Any, torch.Tensor]] = {}

    def whole_of(value: Any) -> Any:
        if not is_ragged(value):
            return value
        if value.requires_grad and torch.is_grad_enabled():
            raise UsageError(f"{func} inside gathering(): not differentiable; call full_tensor() or use torch.no_grad()")
        if id(value) not in wholes:
            wholes[id(value)] = (value, value.data.full_tensor())
        return wholes[id(value)][1]

    # A view of the gathered copy is an inference tensor: torch refuses to write to it, and the write would be lost.
    with torch.inference_mode(func.is_view or torch.is_inference_mode_enabled()):
        result = func(*tree_map(whole_of, args), **tree_map(whole_of, kwargs))
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
