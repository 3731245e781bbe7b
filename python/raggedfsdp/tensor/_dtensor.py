"""RaggedDTensor: a DTensor whose local tensor is a flat piece of unequal length."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.distributed.tensor import DTensor, Placement
from torch.optim.optimizer import _foreach_supported_types as _optim_foreach_types
from torch.utils._foreach_utils import _foreach_supported_types as _utils_foreach_types

from raggedfsdp import _C
from raggedfsdp._C import Granularity
from raggedfsdp.tensor._layout import Layout, RaggedShard, UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def wrap(local: torch.Tensor, layout: Layout, *, requires_grad: bool = False) -> RaggedDTensor:
    """A RaggedDTensor over this very local tensor; nothing is checked."""
    tensor = torch.Tensor._dtensor__new__(RaggedDTensor, local, layout.spec(local.dtype), requires_grad=requires_grad)
    tensor._layout = layout
    return tensor


def _own_attributes(tensor: RaggedDTensor) -> dict[str, Any]:
    """What a copy takes along. Names that begin with _ragged_ tie a tensor to the engine that owns its memory: not a copy's."""
    return {name: value for name, value in tensor.__dict__.items() if not name.startswith("_ragged_")}


class RaggedDTensor(DTensor):
    """Element-wise operations run on the local piece; norms reduce; everything else gathers when told to or is refused."""

    __slots__ = ("_layout",)
    _is_ragged = True
    _layout: Layout

    @classmethod
    def from_shard(
        cls,
        local_flat: torch.Tensor,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        shape: Sequence[int],
        *,
        granularity: Granularity | None = None,
        requires_grad: bool = False,
    ) -> RaggedDTensor:
        """Over this very `local_flat` (1-D, contiguous), without checks or communication: for code that cut it itself."""
        layout = Layout(mesh, placements, shape, Granularity.elements() if granularity is None else granularity)
        return wrap(local_flat, layout, requires_grad=requires_grad)

    def with_local(self, local_flat: torch.Tensor, *, requires_grad: bool = False) -> RaggedDTensor:
        """As `from_shard`, cut as this tensor is: the cheapest way to make a gradient or a moment."""
        return wrap(local_flat, self._layout, requires_grad=requires_grad)

    @staticmethod
    def from_local(  # type: ignore[override]
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh,
        placements: Sequence[Placement],
        *,
        shape: Sequence[int],
        granularity: Granularity | None = None,
    ) -> RaggedDTensor:
        """From every rank's flat piece. One collective agrees on the lengths; an error is the same on all ranks."""
        from raggedfsdp.tensor._agree import agree_on_lengths
        from raggedfsdp.tensor._redistribute import FromLocal

        layout = Layout(device_mesh, placements, shape, Granularity.elements() if granularity is None else granularity)
        agree_on_lengths(local_tensor, layout)
        return FromLocal.apply(local_tensor, layout)

    @property
    def granularity(self) -> Granularity:
        return self._layout.granularity

    @property
    def extents(self) -> _C.RaggedExtents:
        """The lengths and offsets of all ranks along the ragged mesh dim."""
        return self._layout.extents

    @property
    def data(self) -> RaggedDTensor:
        return wrap(self._local_tensor, self._layout)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # Values, never memory: the local piece belongs to a bucket's buffer.
        if value.dtype != self.dtype or value.shape != self.shape:
            raise UsageError(
                f"RaggedDTensor.data = ...: expected {self.dtype} of shape {tuple(self.shape)}, came {value.dtype} of shape "
                f"{tuple(value.shape)}; use module.to() or module.to_empty() to change the type"
            )
        with torch.no_grad():
            self.copy_(value)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        from raggedfsdp.tensor._redistribute import ToLocal

        return ToLocal.apply(self) if torch.is_grad_enabled() and self.requires_grad else self._local_tensor

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **unsupported: Any
    ) -> DTensor:
        """To Replicate() or another RaggedShard along the ragged mesh dim. Differentiable; one collective."""
        from raggedfsdp.tensor._redistribute import redistribute

        return redistribute(self, device_mesh, placements, unsupported)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor as a plain one: one gather. Differentiable."""
        from raggedfsdp.tensor._redistribute import FullTensor

        return FullTensor.apply(self)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"RaggedDTensor(shape={tuple(self.shape)}, local_tensor={self._local_tensor}, placements={self.placements}, "
            f"granularity={self.granularity.to_string()})"
        )

    def __format__(self, spec: str) -> str:
        return repr(self)  # the inherited one reads the value of a 0-d tensor, which would communicate

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedDTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("RaggedDTensor: only leaves can be deep-copied; detach() first")
        result = wrap(self._local_tensor.clone(), self._layout, requires_grad=self.requires_grad)
        memo[id(self)] = result
        result.__dict__ = copy.deepcopy(_own_attributes(self), memo)
        if self.grad is not None:
            if self.grad_dtype != self.dtype:
                result.grad_dtype = self.grad_dtype
            result.grad = copy.deepcopy(self.grad, memo)
        return result

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A clone, because the local tensor is usually a view of a bucket's buffer and would drag that and its padding along.
        cuts = [(p.dims, p.local_units) if isinstance(p, RaggedShard) else p for p in self.placements]
        layout = (self.device_mesh, cuts, tuple(self.shape), self.granularity.to_string())
        return rebuild, (self._local_tensor.clone(), *layout, self.requires_grad, _own_attributes(self))

    def __create_write_items__(self, fqn: str, object: Any) -> Any:
        _refuse_checkpoint(fqn)

    def __create_chunk_list__(self) -> Any:
        _refuse_checkpoint("")

    def __get_tensor_shard__(self, index: Any) -> Any:
        _refuse_checkpoint(getattr(index, "fqn", ""))

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_local_tensor"], (self._layout, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], context: Any, outer_size: Any, outer_stride: Any) -> RaggedDTensor:
        return wrap(inner["_local_tensor"], context[0], requires_grad=context[1])


def _refuse_checkpoint(name: str) -> NoReturn:
    # torch.distributed.checkpoint knows rectangular pieces only: it would store one rank's piece as the whole tensor.
    raise NotImplementedError(
        f"torch.distributed.checkpoint of the RaggedDTensor '{name}' is not supported yet; save full_state_dict(model), or "
        "torch.save(model.state_dict()) per rank"
    )


def rebuild(
    local: torch.Tensor,
    mesh: DeviceMesh,
    cuts: list[Any],
    shape: tuple[int, ...],
    granularity: str,
    requires_grad: bool,
    state: dict[str, Any],
) -> RaggedDTensor:
    """The inverse of pickling, out of types that torch.load(weights_only=True) knows."""
    placements = [RaggedShard(*cut) if isinstance(cut, tuple) else cut for cut in cuts]
    layout = Layout(mesh, placements, shape, Granularity.parse(granularity))
    result = wrap(local, layout, requires_grad=requires_grad)
    result.__dict__.update(state)
    return result


# At the end: _dispatch needs the class.
from raggedfsdp.tensor._dispatch import dispatch  # noqa: E402

torch.serialization.add_safe_globals([rebuild])
for _types in (_optim_foreach_types, _utils_foreach_types):
    if RaggedDTensor not in _types:
        _types.append(RaggedDTensor)
