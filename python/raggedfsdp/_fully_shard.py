"""fully_shard: FSDP2's signature, plus the granularity of each parameter."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from raggedfsdp import _C
from raggedfsdp._module import make_fsdp_module
from raggedfsdp._optimizers import parameters_were_replaced
from raggedfsdp._parameters import Original, Slot, owner_of
from raggedfsdp._state import UnitState, Wrapping, share_context, unit_of, units_in
from raggedfsdp.comm import comm_for

ParamPolicy = Callable[[str, torch.Size], _C.Granularity]
PlacementFn = Callable[[nn.Parameter], Shard | None]


def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  (frozen; FSDP2's signature)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    orig_param_policy: ParamPolicy | None = None,
    max_buckets: int | None = None,
    collective_cost_bytes: int | None = None,
) -> Any:
    """Shards the parameters of `module` that no earlier call on a submodule took, as one unit; call it bottom-up.

    Args:
        module: a module, or several that form one unit. Changed in place: its class becomes `FSDP<class>`.
        mesh: a 1-D device mesh; by default all ranks.
        reshard_after_forward: whether gathered parameters are released between forward and backward. None: True, except for
            the outermost unit.
        mp_policy: dtypes of compute, reduction and outputs.
        ignored_params: left alone.
        dp_mesh_dims: FSDP2's, for parameters that are DTensors on a mesh of several dims: not supported yet.
        shard_placement_fn: FSDP2's way to say it: Shard(d) keeps slices of dim d whole.
        orig_param_policy: `fn(name, shape) -> Granularity`: what no shard boundary may cut. By default any element may begin
            a shard.
        max_buckets: at most so many collectives per dtype of the unit. None: the planner splits a unit where another
            collective costs less than the padding it saves. 1: never.
        collective_cost_bytes: what one more collective costs, as bytes of a gathered buffer. None: 4 MiB. 0: nothing.

    Returns `module`. A collective: call it on every rank. Raises UsageError on bad input, NotImplementedError for what is named
    but not built yet; where the ranks do not agree on what they wrap, or one of them fails, every rank raises.
    """
    modules = [module] if isinstance(module, nn.Module) else list(module)
    _check_types(mesh, mp_policy)  # without a mesh and a policy there is nobody to agree with, and nothing to agree on
    mesh = mesh if mesh is not None else _default_mesh()
    if mesh.ndim != 1:
        raise NotImplementedError(f"fully_shard: a mesh of {mesh.ndim} dims is not supported yet; pass a 1-D mesh")
    device = _device_of(mesh)
    originals: list[Original] = []
    borrowed: list[tuple[Slot, Any]] = []
    failure: Exception | None = None
    try:
        _check_arguments(modules, reshard_after_forward, shard_placement_fn, orig_param_policy, offload_policy)
        _check_costs(max_buckets, collective_cost_bytes)
        if dp_mesh_dims is not None:
            raise NotImplementedError("fully_shard: dp_mesh_dims is not supported yet: parameters must be plain tensors")
        own, borrowed = _collect(modules, ignored_params or set())
        _check_at_rest([*units_in(*modules), *(parameter.unit for _, parameter in borrowed)])
        ask = functools.partial(_granularity, orig_param_policy, shard_placement_fn)
        originals = [(name, p, slots, ask(name, p)) for name, p, slots in own]
    except Exception as error:  # also what a policy of the user's raised: no rank may raise alone
        failure = error
    state = UnitState(type(modules[0]).__name__ if modules else "nothing", modules, mesh, mp_policy)
    more = [f"reshard_after_forward {reshard_after_forward}", f"modules {len(modules)}"]
    more += [f"tied parameter {parameter.name}" for _, parameter in borrowed]
    wrapping = Wrapping(comm_for(mesh), device, originals, max_buckets, collective_cost_bytes)
    state.agree(wrapping, failure, "\n".join(more))
    state.build(wrapping)
    for slot, parameter in borrowed:
        state.borrow(slot, parameter)
    _move_buffers(modules, device)
    state.force_shards()
    state.auto_reshard = reshard_after_forward is None
    state.core.reshard_after_forward = bool(reshard_after_forward) if reshard_after_forward is not None else True
    state.attach_hooks()
    for m in modules:
        m.__dict__["_ragged_unit"] = state
        make_fsdp_module(m)
    _join(state, modules)
    parameters_were_replaced()
    return module


def _check_costs(max_buckets: int | None, collective_cost_bytes: int | None) -> None:
    if max_buckets is not None and max_buckets < 1:
        raise _C.UsageError(f"fully_shard: max_buckets is {max_buckets}; it must be at least 1")
    if collective_cost_bytes is not None and collective_cost_bytes < 0:
        raise _C.UsageError(f"fully_shard: collective_cost_bytes is {collective_cost_bytes}; it must not be negative")


def _check_arguments(modules: list[nn.Module], reshard: Any, placement_fn: Any, policy: Any, offload: Any) -> None:
    if not modules:
        raise _C.UsageError("fully_shard: an empty list of modules; pass at least one")
    for m in modules:
        if not isinstance(m, nn.Module):
            raise _C.UsageError(f"fully_shard: expected an nn.Module or a list of them, came {type(m).__name__}")
        if isinstance(m, (nn.ModuleList, nn.ModuleDict)) and type(m).forward in (nn.ModuleList.forward, nn.ModuleDict.forward):
            raise _C.UsageError(f"fully_shard: {type(m).__name__} has no forward, so it cannot be a unit; wrap its members")
        if unit_of(m) is not None:
            raise _C.UsageError(f"fully_shard: {type(m).__name__} is wrapped already; each module can be wrapped once")
    if isinstance(reshard, int) and not isinstance(reshard, bool):
        raise NotImplementedError("fully_shard: reshard_after_forward as a number is not supported yet; pass True or False")
    if placement_fn is not None and policy is not None:
        raise _C.UsageError("fully_shard: pass shard_placement_fn or orig_param_policy, not both")
    if isinstance(offload, CPUOffloadPolicy):
        raise NotImplementedError(
            "fully_shard: CPUOffloadPolicy is not supported: shards, gathers and reductions live on the mesh's device"
        )


def _check_at_rest(units: list[UnitState]) -> None:
    for unit in units:
        if unit.core.held:
            raise _C.UsageError(f"fully_shard: unit '{unit.name}' is unsharded; call reshard() on it before wrapping a parent")


def _check_types(mesh: Any, policy: Any) -> None:
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise _C.UsageError(f"fully_shard: mesh must be a DeviceMesh, came {mesh!r}; make one with init_device_mesh")
    if not isinstance(policy, MixedPrecisionPolicy):
        raise _C.UsageError(f"fully_shard: mp_policy must be a MixedPrecisionPolicy, came {policy!r}")
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, name)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise _C.UsageError(f"fully_shard: mp_policy.{name} must be a torch.dtype such as torch.bfloat16, came {dtype!r}")


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        raise _C.UsageError(
            "fully_shard: there is no process group; start with torchrun and call torch.distributed.init_process_group() "
            "first, or pass a mesh"
        )
    backend = dist.get_backend()
    device_type = "cpu" if "gloo" in backend or backend == "fake" else torch._C._get_accelerator().type
    return init_device_mesh(device_type, (dist.get_world_size(),))


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _granularity(policy: ParamPolicy | None, placement_fn: PlacementFn | None, name: str, p: nn.Parameter) -> _C.Granularity:
    if policy is not None:
        granularity = policy(name, p.shape)
        if not isinstance(granularity, _C.Granularity):
            raise _C.UsageError(
                f"fully_shard: orig_param_policy returned {granularity!r} for parameter '{name}'; expected a "
                "Granularity such as Granularity.rows(32)"
            )
        return granularity
    placement = placement_fn(p) if placement_fn is not None else None
    if placement is None:
        return _C.Granularity.elements()
    if not isinstance(placement, Shard):
        raise _C.UsageError(
            f"fully_shard: shard_placement_fn returned {placement!r} for parameter '{name}'; expected None or "
            "Shard(dim), or use orig_param_policy"
        )
    return _granularity_of(placement, name, p.shape)


def _granularity_of(placement: Shard, name: str, shape: torch.Size) -> _C.Granularity:
    """Shards are flat, so Shard(d) becomes the granularity that contains its cuts: slices of dim d stay whole."""
    ndim = len(shape)
    dim = placement.dim + ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < max(ndim, 1):
        raise _C.UsageError(f"fully_shard: shard_placement_fn returned {placement} for parameter '{name}' of {ndim} dims")
    if dim >= ndim - 1:
        return _C.Granularity.elements()
    return _C.Granularity.rows(max(1, math.prod(shape[dim + 1 : -1])))


def _collect(
    modules: list[nn.Module], ignored: set[nn.Parameter]
) -> tuple[list[tuple[str, nn.Parameter, list[Slot]]], list[tuple[Slot, Any]]]:
    """The parameters this unit takes, each with all its slots, and the slots tied to parameters of other units."""
    skip = {id(p) for p in ignored}
    own: dict[int, tuple[str, nn.Parameter, list[Slot]]] = {}
    borrowed: list[tuple[Slot, Any]] = []
    seen: set[tuple[int, str]] = set()
    for root in modules:
        for prefix, m in root.named_modules(remove_duplicate=False):
            for name, p in m._parameters.items():
                if p is None or id(p) in skip or (id(m), name) in seen:
                    continue
                seen.add((id(m), name))
                slot = Slot(m, name)
                owner = owner_of(p)
                if owner is not None:
                    taken = owner.slots + [s for u in units_in(root) for s, q in u.borrowed if q is owner]
                    if not any(s.module is m and s.name == name for s in taken):
                        borrowed.append((slot, owner))
                    continue
                own.setdefault(id(p), (f"{prefix}.{name}".lstrip("."), p, []))[2].append(slot)
    for name, p, _ in own.values():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise _C.UsageError(f"fully_shard: parameter '{name}' is lazy and has no shape yet; run a forward first")
        if isinstance(p, DTensor):
            raise NotImplementedError(
                f"fully_shard: parameter '{name}' is a DTensor already ({p.placements}): not supported yet"
            )
        if type(p.data) is not torch.Tensor:
            raise NotImplementedError(
                f"fully_shard: parameter '{name}' is a {type(p.data).__name__}, a subclass of torch.Tensor whose insides "
                "would be lost: not supported yet"
            )
    return list(own.values()), borrowed


def _move_buffers(modules: list[nn.Module], device: torch.device) -> None:
    for root in modules:
        for m in root.modules():
            for name, buffer in m._buffers.items():
                if buffer is not None and not buffer.is_meta and buffer.device.type != device.type:
                    m._buffers[name] = buffer.to(device)


def _join(state: UnitState, modules: list[nn.Module]) -> None:
    """One context for this unit, all units below it, those it shares parameters with and those that they share one with.

    This one is the outermost now.
    """
    below = [unit for unit in state.below() if unit is not state]
    share_context([*below, state, *(parameter.unit for _, parameter in state.borrowed)])
    for unit in [*below, state]:
        unit.is_root = unit is state
        if unit.auto_reshard:
            unit.core.reshard_after_forward = unit is not state
    for m in modules:
        _name_units(m, state)


def _name_units(root: nn.Module, outermost: UnitState) -> None:
    """Names for messages and reports: the path from the outermost unit, which is the only one that knows it."""
    for path, m in root.named_modules():
        unit = unit_of(m)
        if unit is not None and unit.modules[0] is m and unit is not outermost:
            unit.name = unit.core.name = path
    outermost.name = outermost.core.name = f"root ({type(root).__name__.removeprefix('FSDP')})"
