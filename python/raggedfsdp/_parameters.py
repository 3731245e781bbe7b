"""The two objects of a parameter, and the slots of modules that show one or the other.

The *sharded* parameter is a RaggedDTensor over the flat shard: what optimisers and state dicts hold. The *leaf* is an
nn.Parameter over pool memory: what compute uses. Neither is ever held by a weakref, nor the sharded one by C++: either would
make `module.double()` and `to_empty()` fail (they swap the tensors' insides).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from raggedfsdp import _C
from raggedfsdp.tensor import RaggedDTensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_OWNER = "_ragged_parameter"  # on original and sharded parameters: finds ties without a table of ids


@dataclass(eq=False)
class Slot:
    """One name of one module under which a parameter is registered."""

    module: nn.Module
    name: str

    def __post_init__(self) -> None:
        # Modules that override __setattr__ (RNNs keep a flat list of their weights) must be told.
        self.plain = type(self.module).__setattr__ is nn.Module.__setattr__

    def get(self) -> nn.Parameter | None:
        return self.module._parameters.get(self.name)

    def put(self, parameter: nn.Parameter) -> None:
        if self.plain:
            self.module._parameters[self.name] = parameter
        else:
            setattr(self.module, self.name, parameter)


@dataclass(eq=False)
class ShardedParameter:
    """A parameter in its bucket."""

    name: str
    granularity: _C.Granularity
    unit: Any  # the UnitState that owns it
    slots: list[Slot]
    bucket: int = -1
    slot: int = -1
    sharded: Any = field(init=False)  # both an nn.Parameter and a RaggedDTensor
    leaf: nn.Parameter = field(init=False)
    local: torch.Tensor = field(init=False)  # this rank's view of the flat shard
    requires_grad: bool = field(init=False)  # of the leaf; the sharded parameter's is what the user sets
    gradient: RaggedDTensor | None = None  # over the gradient shard, made once
    changes: ClassVar[int] = 0  # how often any parameter's tensors were replaced: rows made of them are stale then

    def build(self, original: nn.Parameter, core: _C.UnitCore, mesh: DeviceMesh, placement: _C.RaggedShard) -> None:
        self.local = core.buckets[self.bucket].shard_view(self.slot)
        shown = torch.empty_like(self.local, device="meta") if original.is_meta else self.local
        tensor = RaggedDTensor.from_shard(shown, mesh, [placement], original.shape, granularity=self.granularity)
        self.sharded = nn.Parameter(tensor, requires_grad=original.requires_grad)
        self.sharded.__dict__.update({k: v for k, v in original.__dict__.items() if k != _OWNER})
        setattr(original, _OWNER, weakref.ref(self))  # weak: whoever keeps the original must not keep the model
        setattr(self.sharded, _OWNER, self)
        self.bind(core)

    def bind(self, core: _C.UnitCore) -> None:
        """Makes the leaf over the bucket's memory as it is now: its dtype and device may have changed."""
        bucket = core.buckets[self.bucket]
        self.local = bucket.shard_view(self.slot)
        self.requires_grad = self.sharded.requires_grad
        self.leaf = nn.Parameter(bucket.gathered_view(self.slot), requires_grad=self.requires_grad)
        self.leaf.__dict__.update(self.sharded.__dict__)
        # Weak: the C++ unit keeps the leaf alive, and a cycle through C++ would never be collected.
        setattr(self.leaf, _OWNER, weakref.ref(self))
        self.allow_gradient_dtype(core)
        self.gradient = None
        ShardedParameter.changes += 1
        core.set_leaf(self.bucket, self.slot, self.leaf)

    def allow_gradient_dtype(self, core: _C.UnitCore) -> None:
        """bf16 shards with fp32 reduction have fp32 gradients, which torch refuses otherwise."""
        bucket = core.buckets[self.bucket]
        if self.sharded.dtype.is_floating_point and bucket.reduce_dtype != bucket.shard_dtype:
            self.sharded.grad_dtype = None

    def gradient_row(self, core: _C.UnitCore) -> tuple[Any, RaggedDTensor]:
        """The sharded parameter, and the view of the gradient shard that its `.grad` becomes."""
        if self.gradient is None:
            self.gradient = self.sharded.data.with_local(core.buckets[self.bucket].gradient_view(self.slot))
        return self.sharded, self.gradient

    def run_gradient_hooks(self) -> None:
        """Those registered for a finished gradient."""
        hooks = self.sharded._post_accumulate_grad_hooks
        if hooks:
            for hook in tuple(hooks.values()):
                hook(self.sharded)

    def current_gradient(self) -> torch.Tensor | None:
        """What `.grad` holds, as this rank's flat part."""
        gradient = self.sharded.grad
        if gradient is None or gradient is self.gradient:
            return None if gradient is None else self.gradient._local_tensor  # type: ignore[union-attr]
        if isinstance(gradient, RaggedDTensor):
            return gradient._local_tensor
        return self.sharded._layout.slice_of(gradient)


def owner_of(parameter: nn.Parameter) -> ShardedParameter | None:
    """The sharded parameter that `parameter` is, or was turned into."""
    owner = getattr(parameter, _OWNER, None)
    return owner() if isinstance(owner, weakref.ref) else owner


# A parameter before it is sharded: name, itself, all its slots, what no shard boundary may cut.
Original = tuple[str, nn.Parameter, list[Slot], _C.Granularity]


def specs_of(originals: Sequence[Original]) -> list[_C.ParameterSpec]:
    return [_C.ParameterSpec(name, p.detach(), granularity, p.requires_grad) for name, p, _, granularity in originals]
