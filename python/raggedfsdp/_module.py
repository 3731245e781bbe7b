"""FSDPModule: what a wrapped module can do beyond being a module. The names are FSDP2's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from raggedfsdp import _C
from raggedfsdp._state import UnitState, unit_of, units_in
from torch import nn


class UnshardHandle:
    """A gather in flight; `wait()` orders the current stream after it."""

    def __init__(self, state: UnitState | None) -> None:
        self._state = state

    def wait(self) -> None:
        if self._state is not None:
            self._state.core.finish_gather()
            self._state = None


def _not_yet(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"FSDPModule.{name} is not supported yet")

    method.__name__ = name
    method.__doc__ = f"Not supported yet: raises NotImplementedError naming `{name}`."
    return method


class FSDPModule:
    """Mixed into the class of every module given to fully_shard."""

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the unit's parameters and shows them until `reshard()`. With `async_op` returns a handle to wait on."""
        state = self._state()
        state.adopt()
        state.context.unshard(state.core)
        if not state.explicit:
            state.explicit = True
            state.show_leaves()
        handle = UnshardHandle(state)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Releases the unit's gathered parameters, unless its own forward or backward is under way."""
        state = self._state()
        if state.explicit:
            state.explicit = False
            state.show_shards()
        state.context.reshard(state.core)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Without synchronisation gradients accumulate unreduced until a backward with it."""
        for state in self._states(recurse):
            state.core.sync_gradients = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        if not isinstance(reshard_after_forward, bool):
            raise _C.UsageError(f"set_reshard_after_forward: expected a bool, came {reshard_after_forward!r}")
        for state in self._states(recurse):
            state.auto_reshard = False
            state.core.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        for state in self._states(recurse):
            state.core.reshard_after_backward = reshard_after_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """The sum over ranks is divided by `factor` instead of the number of ranks."""
        if not factor > 0:
            raise _C.UsageError(f"set_gradient_divide_factor: expected a positive number, came {factor!r}")
        for state in self._states(recurse=False):
            state.core.divide_factor = float(factor)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted for FSDP2's pipelines; every backward here leaves the unit at rest."""

    def reset_iter_state(self) -> None:
        """Brings the whole model to rest after an exception inside a step."""
        for state in self._states(recurse=True):
            state.reset()
        self._state().context.reset()

    set_requires_all_reduce = _not_yet("set_requires_all_reduce")
    set_modules_to_forward_prefetch = _not_yet("set_modules_to_forward_prefetch")
    set_modules_to_backward_prefetch = _not_yet("set_modules_to_backward_prefetch")
    set_custom_all_gather = _not_yet("set_custom_all_gather")
    set_custom_reduce_scatter = _not_yet("set_custom_reduce_scatter")
    set_all_reduce_hook = _not_yet("set_all_reduce_hook")
    set_post_optim_event = _not_yet("set_post_optim_event")
    set_reduce_scatter_divide_factor = _not_yet("set_reduce_scatter_divide_factor")
    set_force_sum_reduction_for_comms = _not_yet("set_force_sum_reduction_for_comms")
    set_unshard_in_backward = _not_yet("set_unshard_in_backward")
    set_allocate_memory_from_process_group_for_comm = _not_yet("set_allocate_memory_from_process_group_for_comm")

    def _state(self) -> UnitState:
        state = unit_of(self)  # type: ignore[arg-type]
        if state is None:
            raise _C.InternalError(f"{type(self).__name__} is an FSDPModule without a unit")
        return state

    def _states(self, recurse: bool) -> Iterable[UnitState]:
        return units_in(self) if recurse else [self._state()]  # type: ignore[arg-type]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # .to(), .double(), to_empty(): on the shards, and the flat buffers follow.
        for state in self._states(recurse=True):
            state.force_shards()
            state.context.reshard(state.core)
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for state in self._states(recurse=True):
            if not any(p.sharded.is_meta for p in state.parameters):
                state.adopt()
        return result


_classes: dict[type, type] = {}


def _no_deepcopy(self: Any, memo: Any) -> NoReturn:
    raise _C.UsageError(f"{type(self).__name__}: a wrapped module cannot be deep-copied; copy it before fully_shard")


def make_fsdp_module(module: nn.Module) -> None:
    """Puts FSDPModule before the module's class. One new class per class, so that isinstance and pickling by name work."""
    cls = type(module)
    if cls not in _classes:
        _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__deepcopy__": _no_deepcopy})
    module.__class__ = _classes[cls]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes `module.method_name` gather and release like forward does. No-op on a module that is not wrapped."""
    state = unit_of(module)
    if state is None:
        return
    original = getattr(module, method_name, None)
    if original is None:
        raise _C.UsageError(f"register_fsdp_forward_method: {type(module).__name__} has no method '{method_name}'")

    @torch._dynamo.disable
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = state._pre_forward(self, args, kwargs)
        output = None
        try:
            output = original(*args, **kwargs)
        finally:
            output = state._post_forward(self, args, output)
        return output

    setattr(module, method_name, wrapped.__get__(module, type(module)))
