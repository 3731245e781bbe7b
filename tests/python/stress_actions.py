"""What a case does with its model: each action runs on the sharded model and on its twin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from parity import norm_of
from raggedfsdp import full_state_dict, load_full_state_dict
from raggedfsdp.tensor import RaggedDTensor
from stress_models import PACKS
from stress_twin import StressTwin, Tensors, new_values

Has = dict[str, Any]


def one_step(twin: StressTwin, step: Has, what: str = "step", **plan: Any) -> bool:
    def body(model: Any, rank: int) -> Tensors:
        x = twin.input(step, rank)
        loss = twin.loss(model, x, twin.plan(step, rank, **plan))
        twin.back(loss)
        return [loss, x.grad]

    return twin.both(what, body)


def train(twin: StressTwin, has: Has) -> None:
    one_step(twin, has)
    if has["optimise"]:
        settle(twin)
        twin.check()
        twin.optimise(has["none"])


def forward(twin: StressTwin, has: Has) -> None:
    modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "dropped": torch.enable_grad}

    def body(model: Any, rank: int) -> Tensors:
        with modes[has["mode"]]():
            out = model(twin.input(has, rank), twin.plan(has, rank))
            return [t.detach().clone() if t is not None else None for t in PACKS[model.node.pack][1](out)]

    twin.both(has["mode"], body)
    if has["mode"] == "dropped":
        twin.rest()  # units kept for a backward that never comes


def two(twin: StressTwin, has: Has) -> None:
    def body(model: Any, rank: int) -> Tensors:
        steps = [has["first"], has["second"]]
        xs = [twin.input(step, rank) for step in steps]
        losses = [twin.loss(model, x, twin.plan(step, rank)) for x, step in zip(xs, steps, strict=True)]
        order = {"forwards": losses, "backwards": losses[::-1], "first": losses[:1], "second": losses[1:]}
        for loss in order.get(has["order"], [losses[0] + losses[1]]):
            twin.back(loss)
        return [*losses, *(x.grad for x in xs)]

    twin.both(f"two, {has['order']}", body)
    if has["order"] in ("first", "second"):
        twin.rest()


def accumulate(twin: StressTwin, has: Has) -> None:
    units = [twin.model] if has["units"] is None else twin.units_at(has["units"])
    for unit in units:
        unit.set_requires_gradient_sync(False, recurse=has["units"] is None)
    *micro, last = has["steps"]
    for step in micro:
        one_step(twin, step, "without synchronisation")
        settle(twin)
        twin.check_rest()
    twin.model.set_requires_gradient_sync(True)
    one_step(twin, last, "with synchronisation")


def freeze(twin: StressTwin, has: Has) -> None:
    if twin.pending:
        return  # whether a gradient that waits for its reduction outlives a freeze is nobody's promise
    if has["whole"]:
        for unit in twin.units:
            unit.modules[0].unshard()
    for model in (twin.model, twin.oracle):
        by_name = dict(model.named_parameters())
        for name in twin.named(has["which"]):
            by_name[name].requires_grad_(not by_name[name].requires_grad)
    if has["whole"]:
        twin.rest()


def unshard(twin: StressTwin, has: Has) -> None:
    units = twin.units_at(has["which"])
    handles = [unit.unshard(async_op=has["async"]) for unit in units]
    for handle in handles if not has["early"] else []:
        if handle is not None:
            handle.wait()
    one_step(twin, has)
    for unit in units:
        unit.reshard()


def settings(twin: StressTwin, has: Has) -> None:
    unit = twin.units_at([has["unit"]])[0]
    if has["kind"] == "after_forward":
        unit.set_reshard_after_forward(has["value"], recurse=has["unit"] % 2 == 0)
    elif has["kind"] == "after_backward":
        unit.set_reshard_after_backward(has["value"], recurse=has["unit"] % 2 == 0)
    else:
        ahead = [u for u in twin.units_at(has["which"]) if u._ragged_unit.context is unit._ragged_unit.context]
        getattr(unit, f"set_modules_to_{has['kind']}")(ahead if has["value"] else [])


def zero(twin: StressTwin, has: Has) -> None:
    twin.zero(has["none"])


def user_gradients(twin: StressTwin, has: Has) -> None:
    sharded, whole = (dict(m.named_parameters()) for m in (twin.model, twin.oracle))
    for i, kind in has["which"]:
        name = next(iter(twin.named([i])), None)
        if name is None:
            return
        for p in (sharded[name], whole[name]):
            if kind == "full":
                p.grad = torch.full_like(p, 2)
            elif kind == "none":
                p.grad = None
            elif p.grad is not None:
                p.grad.mul_(2)
        twin.mass[name] = 2 * twin.mass[name] + 2


def state(twin: StressTwin, has: Has) -> None:
    kind = has["kind"]
    if kind.startswith("full"):
        came, want = full_state_dict(twin.model, rank0_only=kind == "full rank 0"), twin.oracle.state_dict()
        if kind == "full rank 0" and twin.rank != 0:
            want = {}
        assert list(came) == list(want)
        for key, value in want.items():
            assert type(came[key]) is torch.Tensor
            twin.same(key, came[key], value)
    elif kind.startswith("load"):
        new_values(twin.oracle, has["salt"])
        only = kind == "load rank 0"
        values = {k: v.clone() for k, v in twin.oracle.state_dict().items()} if not only or twin.rank == 0 else {}
        load_full_state_dict(twin.model, values, rank0_only=only)
    elif kind == "round trip":
        twin.model.load_state_dict({k: v.clone() for k, v in twin.model.state_dict().items()})
    else:
        assign(twin)


def assign(twin: StressTwin) -> None:
    """The model gets new parameters, without gradients; ties would not survive."""
    names = list(twin.owners)
    if twin.pending or len(names) < len(list(twin.oracle.named_parameters(remove_duplicate=False))):
        return
    twin.zero()
    for model in (twin.model, twin.oracle):
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    twin.adopt_oracle()


def step(twin: StressTwin, has: Has) -> None:
    twin.optimise(True)


def fail(twin: StressTwin, has: Has) -> None:
    if one_step(twin, has, "fail", fail=(has["node"], has["when"], has["call"])):
        return
    twin.zero()
    if has["then"] == "reset" or len(twin.roots()) > 1:
        for root in twin.roots():
            root.modules[0].reset_iter_state()
    elif has["then"] == "forward":
        forward(twin, has | {"mode": "no_grad"})
        twin.rest()  # units kept for the backward of the forward that failed
    twin.broken = has["then"] == "nothing" and len(twin.roots()) == 1


def retain(twin: StressTwin, has: Has) -> None:
    def body(model: Any, rank: int) -> Tensors:
        x = twin.input(has, rank)
        loss = twin.loss(model, x, twin.plan(has, rank))
        twin.back(loss, retain_graph=True)
        twin.back(loss)
        return [loss, x.grad]

    twin.both("two backwards", body)


def reentrant(twin: StressTwin) -> bool:
    return any(node.checkpoint == "reentrant" for node in twin.case.tree.walk())


def input_gradient(twin: StressTwin, has: Has) -> None:
    def body(model: Any, rank: int) -> Tensors:
        x = twin.input(has, rank)
        loss = twin.loss(model, x, twin.plan(has, rank, checkpoints=not reentrant(twin)))
        twin.went_back = True
        return [loss, *torch.autograd.grad(loss, x)]

    twin.both("autograd.grad", body)
    twin.rest()


def partial(twin: StressTwin, has: Has) -> None:
    def body(model: Any, rank: int) -> Tensors:
        x = twin.input(has, rank)
        loss = twin.loss(model, x, twin.plan(has, rank), has["uses"])
        twin.back(loss)
        return [loss, x.grad]

    twin.both(f"the {has['uses']} output", body)
    twin.rest()


def hooks(twin: StressTwin, has: Has) -> None:
    """Hooks for a finished gradient see it once, and use it up."""
    twin.zero()
    sharded, whole = (dict(m.named_parameters()) for m in (twin.model, twin.oracle))
    wanted = [name for name in twin.named(has["which"]) if isinstance(sharded[name], RaggedDTensor)]
    names = [name for name in wanted if sharded[name].requires_grad]
    fired: Counter[str] = Counter()
    seen: dict[str, torch.Tensor] = {}

    def hook_for(name: str) -> Callable[[Any], None]:
        def hook(p: Any) -> None:
            fired[name] += 1
            seen[name] = p.grad.clone()
            p.grad = None

        return hook

    handles = [sharded[name].register_post_accumulate_grad_hook(hook_for(name)) for name in names]
    one_step(twin, has, checkpoints=not reentrant(twin))
    for handle in handles:
        handle.remove()
    for name in names:
        assert fired[name] == (whole[name].grad is not None), f"the hook of {name} ran {fired[name]} times"
        if whole[name].grad is not None:
            twin.same_piece(f"{name}.grad in its hook", seen[name], whole[name].grad)
        whole[name].grad = None


def norm(twin: StressTwin, has: Has) -> None:
    sharded, whole = (dict(m.named_parameters()) for m in (twin.model, twin.oracle))
    names = [n for n in twin.sharded_names if whole[n].grad is not None]
    if not names:
        return
    came = torch.nn.utils.clip_grad_norm_([sharded[n] for n in names], 1e9)
    came = came.full_tensor() if hasattr(came, "full_tensor") else came
    torch.testing.assert_close(came.item(), norm_of([whole[n].grad for n in names], 2.0), rtol=1e-2, atol=1e-4)


def double(twin: StressTwin, has: Has) -> None:
    """To another dtype and back, and used in between."""
    if twin.pending:
        return
    twin.zero()
    for dtype, salt in ((torch.float64, 1), (torch.float32, 2)):
        twin.model.to(dtype)
        twin.oracle.to(dtype)
        twin.adopt_oracle()
        one_step(twin, {"salt": salt, "x_grad": True, "by_rank": True}, f"as {dtype}")
        settle(twin)
        twin.check()
        twin.zero()


def settle(twin: StressTwin) -> None:
    """Units told to stay gathered after backward are let go."""
    if any(not unit.core.reshard_after_backward for unit in twin.units):
        twin.rest()


ACTIONS: dict[str, Callable[[StressTwin, Has], None]] = {
    f.__name__: f
    for f in (
        train, forward, two, accumulate, freeze, unshard, settings, zero, user_gradients, state, step, fail, retain,
        input_gradient, partial, hooks, norm, double,
    )
}  # fmt: skip


WITHOUT_FORWARD = {"freeze", "settings", "zero", "user_gradients", "state", "step", "norm"}


def perform(twin: StressTwin, kind: str, has: Has) -> None:
    recovers = twin.broken and kind not in WITHOUT_FORWARD
    twin.broken = twin.broken and not recovers
    ACTIONS[kind](twin, has)
    if recovers and kind == "forward":
        twin.rest()  # units kept for the backward of the forward that failed
    if not twin.broken:  # after an exception the model comes to rest with its next forward
        settle(twin)
        twin.check()
    twin.check_ranks_agree()
