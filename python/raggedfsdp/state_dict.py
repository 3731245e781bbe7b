"""Whole state dicts out of sharded models, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from raggedfsdp import _C
from raggedfsdp._state import units_in
from raggedfsdp.tensor import RaggedDTensor


def full_state_dict(model: nn.Module, *, rank0_only: bool = False) -> dict[str, Any]:
    """The unsharded model's state dict: plain tensors, its keys and shapes. A collective: call it on every rank.

    With `rank0_only` the other ranks take part but return an empty dict.
    """
    result: dict[str, Any] = {}
    keep = not rank0_only or _rank(model) == 0
    with torch.no_grad():
        for key, value in model.state_dict().items():
            whole = value.full_tensor() if isinstance(value, RaggedDTensor) else value
            if keep:
                result[key] = whole.clone() if whole is value and isinstance(whole, torch.Tensor) else whole
    return result


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], *, rank0_only: bool = False, strict: bool = True) -> Any:
    """Loads what `full_state_dict` returned. With `rank0_only` only rank 0 passes it and the others receive their parts.

    A collective: call it on every rank. Returns what `load_state_dict` returns; raises the same error on every rank.
    """
    comm = _comm(model)
    targets = model.state_dict()
    on_meta = [key for key, value in targets.items() if isinstance(value, torch.Tensor) and value.is_meta]
    if on_meta:
        raise _C.UsageError(
            f"load_full_state_dict: '{on_meta[0]}' is on the meta device; call model.to_empty(device=...) first"
        )
    if not rank0_only:
        _agree(comm, targets, state, strict)
        return model.load_state_dict(dict(state), strict=strict)
    have = torch.tensor([comm.rank == 0 and key in state for key in targets], dtype=torch.uint8)
    comm.broadcast(have, 0).order_after()
    missing = [key for key, there in zip(targets, have.tolist(), strict=True) if not there]
    if missing and strict:
        raise _C.UsageError(
            f"load_full_state_dict: rank 0 has no values for {', '.join(missing)}; pass strict=False to skip them"
        )
    received = {key: _broadcast(comm, key, value, state.get(key)) for key, value in targets.items() if key not in missing}
    return model.load_state_dict(received, strict=strict)


def _agree(comm: Any, targets: Mapping[str, Any], state: Mapping[str, Any], strict: bool) -> None:
    """Every rank must have every value, in its shape, before any rank loads one."""
    fits = torch.tensor([_fits(target, state.get(key), strict) for key, target in targets.items()], dtype=torch.uint8)
    comm.all_reduce(fits, _C.ReduceOp.MIN).order_after()
    wrong = [key for key, fit in zip(targets, fits.tolist(), strict=True) if not fit]
    if wrong:
        raise _C.UsageError(
            f"load_full_state_dict: some rank has no value of the right shape for {', '.join(wrong)}; pass the whole state "
            "dict on every rank, or rank0_only=True where only rank 0 has it"
        )


def _fits(target: Any, value: Any, strict: bool) -> bool:
    if value is None:
        return not strict
    return not isinstance(target, torch.Tensor) or value.shape == target.shape


def _broadcast(comm: Any, key: str, target: Any, value: Any) -> Any:
    # A flag first, so that a wrong shape is everybody's error and not a hang.
    wrong = torch.tensor([0 if comm.rank != 0 or value.shape == target.shape else 1], dtype=torch.uint8)
    comm.broadcast(wrong, 0).order_after()
    if wrong.item():
        raise _C.UsageError(f"load_full_state_dict: '{key}' must have shape {tuple(target.shape)}; rank 0 passed another one")
    local = target._local_tensor if isinstance(target, RaggedDTensor) else target
    whole = torch.empty(target.shape, dtype=target.dtype, device=local.device)
    if comm.rank == 0:
        whole.copy_(value)
    comm.broadcast(whole.view(-1), 0).order_after()
    return whole


def _comm(model: nn.Module) -> Any:
    from raggedfsdp.comm import comm_for

    units = units_in(model)
    if not units:
        raise _C.UsageError(f"{type(model).__name__} has no unit: call fully_shard first")
    return comm_for(units[0].mesh)


def _rank(model: nn.Module) -> int:
    return int(_comm(model).rank)
