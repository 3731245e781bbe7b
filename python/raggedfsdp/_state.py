"""A unit in Python: which slots show what, and the hooks around its modules' forwards."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.fsdp import MixedPrecisionPolicy

from raggedfsdp import _C
from raggedfsdp._adoption import adopt
from raggedfsdp._boundary import cast, moved, through, through_arguments
from raggedfsdp._parameters import Original, ShardedParameter, Slot, owner_of, specs_of
from raggedfsdp._tree import map_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


T = TypeVar("T")


@dataclass
class _Rows:
    """What a step's loops over parameters need, as the tuples that `_C` reads (python/bindings/parameters.cc)."""

    changes: int  # of ShardedParameter when they were made
    slots: list[Any]
    special: list[tuple[Slot, ShardedParameter]]  # modules that must be told by setattr
    owned: list[Any]
    gradients: list[list[Any]]  # by bucket; empty before the first gradient


@dataclass(frozen=True)
class Wrapping:
    """What a unit is made of."""

    comm: _C.Comm
    device: torch.device
    originals: Sequence[Original]
    max_buckets: int | None
    collective_cost_bytes: int | None


class UnitState:
    """What one call of fully_shard made. Modules hold it; it holds the C++ unit."""

    def __init__(self, name: str, modules: Sequence[nn.Module], mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
        self.name = name
        self.modules = tuple(modules)
        self.mesh = mesh
        self.policy = policy
        self.parameters: list[ShardedParameter] = []
        self.borrowed: list[tuple[Slot, ShardedParameter]] = []  # slots tied to parameters of other units
        self.is_root = True
        self.auto_reshard = False
        self.core: _C.UnitCore
        self.device: torch.device
        self.shows_leaves = 0
        self.explicit = False  # between unshard() and reshard()
        self.post_optim_event: torch.Event | None = None
        self._invocations: list[_C.Invocation] = []
        self.by_bucket: list[list[ShardedParameter]] = []
        self._rows: _Rows | None = None
        self._reduce_hook: Callable[[torch.Tensor], None] | None = None

    @property
    def context(self) -> _C.Context:
        return self.core.context

    # --- making ---

    def agree(self, w: Wrapping, failure: Exception | None, more: str) -> None:
        """Raises on every rank if this one failed, another one did, or they do not wrap the same."""
        text = "" if failure is None else str(failure) or type(failure).__name__
        dtypes = self.policy.param_dtype, self.policy.reduce_dtype
        specs = specs_of(w.originals)
        try:
            _C.agree_on_unit(self.name, w.comm, w.device, *dtypes, specs, w.max_buckets, w.collective_cost_bytes, text, more)
        except _C.UsageError:
            if failure is None:
                raise
            raise failure from None

    def build(self, w: Wrapping) -> None:
        self.device = w.device
        weak = weakref.ref(self)  # C++ must not own us: a cycle through it would never be collected
        self.core = _C.UnitCore(
            self.name,
            w.comm,
            w.device,
            self.policy.param_dtype,
            self.policy.reduce_dtype,
            specs_of(w.originals),
            lambda bucket: weak()._current_gradients(bucket),  # type: ignore[union-attr]
            lambda bucket, indices: weak()._publish(bucket, indices),  # type: ignore[union-attr]
            lambda whole: weak()._show_whole(whole),  # type: ignore[union-attr]
            w.max_buckets,
            w.collective_cost_bytes,
        )
        self.by_bucket = [[] for _ in self.core.buckets]
        for (name, original, slots, granularity), (bucket, slot) in zip(w.originals, self.core.places, strict=True):
            parameter = ShardedParameter(name, granularity, self, slots, bucket, slot)
            cut = _C.ragged_cut(self.core.buckets[bucket].plan, slot)
            parameter.build(original, self.core, self.mesh, _C.RaggedShard(cut.dims, cut.local_units))
            self.parameters.append(parameter)
            self.by_bucket[bucket].append(parameter)
        for members in self.by_bucket:
            members.sort(key=lambda p: p.slot)

    def below(self) -> list[UnitState]:
        """The units of all its modules, itself among them, each once."""
        return units_in(*self.modules)

    def borrow(self, slot: Slot, parameter: ShardedParameter) -> None:
        """A slot of our modules holds a parameter that another unit owns."""
        self.borrowed.append((slot, parameter))
        self._rows = None
        self.core.borrow(parameter.unit.core.buckets[parameter.bucket])

    def attach_hooks(self) -> None:
        self.core.group_size = len(self.modules)
        for module in self.modules:
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            # Also after an exception (an early stop of a recompute is one): the slots must not keep the leaves.
            module.register_forward_hook(self._post_forward, always_call=True)
            module.register_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_post_hook(self._after_load)

    def _before_state_dict(self, module: nn.Module, *_: Any) -> None:
        self.force_shards()

    def _after_load(self, module: nn.Module, *_: Any) -> None:
        # With assign=True there are new parameters: an optimiser made next must see the ones that will train.
        self.adopt(finished=False)
        self.force_shards()

    # --- slots ---

    def show_leaves(self) -> None:
        self.shows_leaves += 1
        if self.shows_leaves > 1:
            return
        rows = self.rows()
        _C.show(rows.slots, True)
        for slot, parameter in rows.special:
            slot.put(parameter.leaf)

    def show_shards(self) -> None:
        self.shows_leaves = max(0, self.shows_leaves - 1)
        if self.shows_leaves == 0:
            self.force_shards()

    def end_explicit(self) -> None:
        self._keep_freezing()
        self.explicit = False
        self.show_shards()
        for parameter in self.parameters:
            if parameter.leaf.grad is not None:
                parameter.leaf.grad = None
                raise _C.UsageError(
                    f"unit '{self.name}': somebody set .grad of the whole parameter '{parameter.name}' between unshard() and "
                    "reshard(), where it would be lost; run backward() through the unit's forward"
                )

    def force_shards(self) -> None:
        self.shows_leaves = 0
        if self.explicit:
            self._keep_freezing()
        self.explicit = False
        rows = self.rows()
        _C.show(rows.slots, False)
        for slot, parameter in rows.special:
            slot.put(parameter.sharded)

    def rows(self) -> _Rows:
        if self._rows is None or self._rows.changes != ShardedParameter.changes:
            slots = list(self._all_slots())
            self._rows = _Rows(
                ShardedParameter.changes,
                [(s.module._parameters, s.name, p.leaf, p.sharded) for s, p in slots if s.plain],
                [(s, p) for s, p in slots if not s.plain],
                [(p.slots[0].module._parameters, p.slots[0].name, p.leaf, p.sharded, p.local) for p in self.parameters],
                [[] for _ in self.by_bucket],
            )
        return self._rows

    def _gradient_rows(self, bucket: int) -> list[Any]:
        rows = self.rows().gradients
        if not rows[bucket]:
            rows[bucket] = [p.gradient_row(self.core) for p in self.by_bucket[bucket]]
        return rows[bucket]

    def _all_slots(self) -> Iterator[tuple[Slot, ShardedParameter]]:
        for parameter in self.parameters:
            for slot in parameter.slots:
                yield slot, parameter
        yield from self.borrowed

    def _keep_freezing(self) -> None:
        """What was frozen or unfrozen between unshard() and reshard() was said to the leaves."""
        for parameter in self.parameters:
            self.set_requires_grad(parameter, parameter.leaf.requires_grad)

    def set_requires_grad(self, parameter: ShardedParameter, required: bool) -> None:
        if required is parameter.requires_grad:
            return
        parameter.requires_grad = required
        parameter.sharded.requires_grad_(required)
        parameter.leaf.requires_grad_(required)
        self.core.set_requires_grad(parameter.bucket, parameter.slot, required)

    def adopt(self, *, finished: bool = True) -> None:
        """Takes over what happened to the sharded parameters outside: replaced, re-made, frozen (_adoption.py)."""
        if not self.shows_leaves and not _C.unchanged(self.rows().owned):
            adopt(self, finished)

    # --- what the C++ side asks for in backward ---

    def _current_gradients(self, bucket: int) -> list[torch.Tensor | None]:
        rows = self.rows().gradients[bucket]
        if rows and not _C.any_gradient(rows):
            return []
        gradients = [p.current_gradient() for p in self.by_bucket[bucket]]
        return [] if all(g is None for g in gradients) else gradients

    def _publish(self, bucket: int, indices: Sequence[int] | None) -> bool:
        """Whether hooks ran, which may have used the gradients up."""
        if not _C.set_gradients(self._gradient_rows(bucket), indices):
            return False
        parameters = self.by_bucket[bucket]
        for parameter in parameters if indices is None else [parameters[i] for i in indices]:
            parameter.run_gradient_hooks()
        return True

    def _show_whole(self, whole: bool) -> None:
        if whole:
            self.show_leaves()
            return
        self.show_shards()
        self._end_explicit_if_released()

    def _end_explicit_if_released(self) -> None:
        """The unit's own forward or backward ends an unshard(), as it ends everything else that is gathered."""
        if self.explicit and not self.core.held_explicitly:
            self.end_explicit()

    # --- forward ---

    @torch.compiler.disable
    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        invocation = self._outside_transforms(self._enter)
        if self.is_root and self.device.type != "cpu":
            move = functools.partial(moved, self.device)
            args, kwargs = map_tensors(move, args), map_tensors(move, kwargs)
        if self.policy.cast_forward_inputs and self.policy.param_dtype is not None:
            args, kwargs = map_tensors(functools.partial(cast, self.policy.param_dtype), (args, kwargs))
        return through_arguments(invocation.attach_inputs, args, kwargs)

    def _enter(self) -> _C.Invocation:
        if self.is_root and self._invocations and torch._C._current_graph_task_id() == -1:
            # A forward ended in what torch runs no hooks after (KeyboardInterrupt): its slots still show leaves.
            for state in self.below():
                state.reset()
        self.adopt()
        for _, parameter in self.borrowed:
            parameter.unit.adopt()
        if self.post_optim_event is not None:
            self.post_optim_event.wait()
            self.post_optim_event = None
        invocation = self.core.enter_forward(self.is_root)
        self._invocations.append(invocation)
        self.show_leaves()
        return invocation

    @torch.compiler.disable
    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._invocations:
            return output  # our pre-hook did not get as far
        invocation = self._invocations.pop()
        try:
            if self.policy.output_dtype is not None:
                output = map_tensors(functools.partial(cast, self.policy.output_dtype), output)
            return through(invocation.attach_outputs, output)
        finally:
            self._outside_transforms(lambda: self._leave(invocation))

    def _leave(self, invocation: _C.Invocation) -> None:
        self.show_shards()
        self.core.leave_forward(invocation)
        self._end_explicit_if_released()

    @staticmethod
    def _outside_transforms(fn: Callable[[], T]) -> T:
        """Under torch.func's transforms every tensor op is theirs, and gathering parameters is no part of the function."""
        if torch._C._functorch.peek_interpreter_stack() is None:
            return fn()
        with temporarily_clear_interpreter_stack():
            return fn()

    def reset(self) -> None:
        self._invocations.clear()
        self.force_shards()

    def set_reduce_hook(self, hook: Callable[[torch.Tensor], None], stream: torch.Stream | None) -> None:
        def run(reduced: torch.Tensor) -> None:
            if stream is None:
                return hook(reduced)
            device = torch.get_device_module(reduced.device)
            stream.wait_stream(device.current_stream())
            with stream:
                hook(reduced)
            return device.current_stream().wait_stream(stream)

        self._reduce_hook = run
        weak = weakref.ref(self)  # the hook may hold the model
        self.core.set_reduce_hook(lambda reduced: weak()._reduce_hook(reduced))  # type: ignore[union-attr,misc]


def unit_of(module: nn.Module) -> UnitState | None:
    return module.__dict__.get("_ragged_unit")


def units_in(*models: nn.Module) -> list[UnitState]:
    """The units of models, each once, in the order of their modules."""
    found = {id(state): state for model in models for m in model.modules() if (state := unit_of(m)) is not None}
    return list(found.values())


def share_context(units: Sequence[UnitState]) -> None:
    """One context for these units and for all that share one with any of them already."""
    before = dict.fromkeys(unit.context for unit in units)
    together = [core for context in before if context is not None for core in context.units]
    context = _C.Context()
    for core in dict.fromkeys([*(unit.core for unit in units), *together]):
        context.add(core)


__all__ = ["UnitState", "owner_of", "share_context", "unit_of", "units_in"]
