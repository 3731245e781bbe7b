"""FSDPModule: what a wrapped module can do beyond being a module. The names are FSDP2's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import nn

from raggedfsdp import _C
from raggedfsdp._state import UnitState, share_context, unit_of, units_in


class UnshardHandle:
    """A gather in flight; `wait()` orders the current stream after it."""

    def __init__(self, state: UnitState | None) -> None:
        self._state = state

    def wait(self) -> None:
        if self._state is not None:
            self._state.core.finish_unshard()
            self._state = None


def _unit(module: Any, who: str) -> UnitState:
    state = unit_of(module) if isinstance(module, nn.Module) else None
    if state is None:
        raise _C.UsageError(f"{who}: expected modules given to fully_shard, came {type(module).__name__}")
    return state


def _not_yet(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"FSDPModule.{name} is not supported yet")

    method.__name__ = name
    method.__doc__ = f"Not supported yet: raises NotImplementedError naming `{name}`."
    return method


class FSDPModule:
    """Mixed into the class of every module given to fully_shard."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Slicing a wrapped container constructs its class anew: that is the original class, without a unit.
        original = cls.__mro__[2]
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the unit's parameters and shows them until its own forward or backward reshards, or `reshard()` is called.

        With `async_op` returns a handle to wait on.
        """
        state = self._state()
        state.adopt()
        state.core.unshard()
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
            state.end_explicit()
        state.core.reshard()

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
        for state in self._state().below():
            state.reset()
        self._state().context.reset()

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gathered when this module's forward begins, instead of the unit that the order predicts."""
        self._state().core.set_forward_prefetch([_unit(m, "set_modules_to_forward_prefetch").core for m in modules])

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gathered when this module's backward begins, instead of the unit that the order predicts."""
        self._state().core.set_backward_prefetch([_unit(m, "set_modules_to_backward_prefetch").core for m in modules])

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Off: the unit's backward reads no parameter (an embedding), so it is not gathered for it."""
        self._state().core.unshard_in_backward = unshard_in_backward

    def set_post_optim_event(self, event: torch.Event) -> None:
        """The next forward of this root waits for `event` on the current stream."""
        self._state().post_optim_event = event

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """For HSDP; on a 1-D mesh there is no all-reduce of gradients and this changes nothing, as in FSDP2."""

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """FSDP2's older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Reductions here are always sums, divided afterwards on the shard."""

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None) -> None:
        """`hook(reduced)` runs after each reduction of this unit, once per bucket: this rank's flat part of the sum over ranks.

        It may change it in place, before it is divided and becomes `.grad`. With `stream` it runs on that stream.
        """
        self._state().set_reduce_hook(hook, stream)

    set_custom_all_gather = _not_yet("set_custom_all_gather")
    set_custom_reduce_scatter = _not_yet("set_custom_reduce_scatter")
    set_reduce_scatter_unused_params = _not_yet("set_reduce_scatter_unused_params")
    set_reduce_scatter_max_input_buffers = _not_yet("set_reduce_scatter_max_input_buffers")
    set_separate_reduce_scatter_group = _not_yet("set_separate_reduce_scatter_group")
    set_allocate_memory_from_process_group_for_comm = _not_yet("set_allocate_memory_from_process_group_for_comm")
    set_symm_mem_for_comm = _not_yet("set_symm_mem_for_comm")

    def _state(self) -> UnitState:
        return _unit(self, "FSDPModule")

    def _states(self, recurse: bool) -> Iterable[UnitState]:
        return units_in(self) if recurse else [self._state()]  # type: ignore[arg-type]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the sharded parameters, also while whole ones are shown, and of what was accumulated without synchronisation."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        outside = torch._C._current_graph_task_id() == -1  # inside backward, what is accumulating belongs to it
        for state in self._states(recurse=True):
            for bucket in state.core.buckets if outside else ():
                bucket.drop_accumulated(set_to_none)
            for parameter in state.parameters:
                gradient = parameter.sharded.grad
                if gradient is not None and set_to_none:
                    parameter.sharded.grad = None
                elif gradient is not None:
                    gradient.zero_()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # .to(), .double(), to_empty(): on the shards, and the flat buffers follow.
        for state in self._states(recurse=True):
            state.context.recover()
            if any(bucket.accumulating for bucket in state.core.buckets):
                raise _C.UsageError(
                    f"unit '{state.name}': gradients that were not reduced yet wait in its memory (a backward without "
                    "synchronisation, or one that failed); run one with it, or call the model's zero_grad(), before changing it"
                )
            state.force_shards()
            state.core.reshard()
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for state in self._states(recurse=True):
            state.adopt(finished=False)
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


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Several roots (the stages of a pipeline) share one memory pool and one order of units."""
    roots = [_unit(m, "share_comm_ctx") for m in modules]
    for root in roots:
        if not root.is_root:
            raise _C.UsageError(f"share_comm_ctx: unit '{root.name}' is inside another one; pass outermost modules")
    share_context([state for root in roots for state in root.below()])
