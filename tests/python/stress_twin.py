"""The sharded model of a case beside its unsharded twin, and what must hold after every action."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from parity import Twin, integers
from raggedfsdp import Granularity, fully_shard, share_comm_ctx
from raggedfsdp._parameters import ShardedParameter
from raggedfsdp._state import UnitState, units_in
from stress_cases import Case
from stress_models import DTYPES, PACKS, Failure, Node, Part, Plan, make

Tensors = list[torch.Tensor | None]
Body = Callable[[Any, int], Tensors]


class TooLarge(Exception):
    """Numbers left the range in which nothing rounds: the case ends here, rightly."""


def granularity(policy: str, name: str, shape: torch.Size) -> Granularity:
    if policy == "mixed":
        policy = ["rows", "tensor", "elements"][(len(name) + len(shape)) % 3]
    if policy == "rows" and len(shape) > 1:
        return Granularity.rows(2)
    return Granularity.tensor() if policy == "tensor" else Granularity.elements()


def options_of(unit: dict[str, Any]) -> dict[str, Any]:
    dtype = lambda key: DTYPES.get(unit.get(key) or "")  # noqa: E731
    mixed = MixedPrecisionPolicy(dtype("param"), dtype("reduce"), dtype("output"), unit.get("cast", True))
    options: dict[str, Any] = {"reshard_after_forward": unit["reshard"], "mp_policy": mixed}
    policy = unit.get("policy")
    if policy in ("shard0", "shard1"):
        options["shard_placement_fn"] = lambda p: Shard(0) if policy == "shard0" else Shard(1) if p.ndim > 1 else None
    elif policy is not None:
        options["orig_param_policy"] = lambda name, shape: granularity(policy, name, shape)
    return options | {"max_buckets": unit.get("max_buckets"), "collective_cost_bytes": unit.get("cost")}


def shard(case: Case, model: nn.Module) -> None:
    parts = {m.node.name: m for m in model.modules() if isinstance(m, Part)}
    ignored = {p for m in parts.values() if m.node.ignored for p in m.parameters(recurse=False)}

    def wrap(node: Node) -> None:
        for i, child in enumerate(node.children):
            wrap(child)
            before = node.children[i - 1] if i > 0 else None
            if before is not None and child.name in (before.unit or {}).get("with", []):
                wrap_one(before)
            if child.unit is not None and not any(n.name in child.unit.get("with", []) for n in node.children[i + 1 :]):
                wrap_one(child)

    def wrap_one(node: Node) -> None:
        assert node.unit is not None
        modules = [parts[name] for name in (node.name, *node.unit.get("with", [])) if name in parts]
        fully_shard(modules if len(modules) > 1 else modules[0], ignored_params=ignored, **options_of(node.unit))
        if (divide := node.unit.get("divide")) is not None:
            modules[0].set_gradient_divide_factor(divide)

    wrap(case.tree)
    if case.tree.unit is not None:
        wrap_one(case.tree)
    if case.share:
        share_comm_ctx([unit.modules[0] for unit in units_in(model) if unit.is_root])


class StressTwin(Twin):
    def __init__(self, case: Case) -> None:
        self.case = case
        super().__init__(lambda: make(case.tree), lambda model: shard(case, model), divide=None)
        self.owners: dict[str, ShardedParameter | None] = {n: getattr(p, "_ragged_parameter", None) for n, p, _ in self.pairs()}
        self.pending: dict[str, torch.Tensor] = {}  # accumulated without synchronisation
        self.mass: dict[str, float] = {}
        self.went_back = False
        self.broken = False  # an exception ended a step, and nothing has brought the model to rest yet
        self.adopt_oracle()

    def adopt_oracle(self) -> None:
        for name, q in self.oracle.named_parameters():
            self.mass.setdefault(name, 0.0)
            if self.owners[name] is not None:
                q.grad_dtype = None

    @property
    def sharded_names(self) -> list[str]:
        return [name for name, owner in self.owners.items() if owner is not None]

    def roots(self) -> list[UnitState]:
        return [u for u in self.units if u.is_root]

    def named(self, which: list[int]) -> list[str]:
        names = list(self.owners)
        return list(dict.fromkeys(names[i % len(names)] for i in which)) if names else []

    def units_at(self, which: list[int]) -> list[Any]:
        return list({id(u): u.modules[0] for u in (self.units[i % len(self.units)] for i in which)}.values())

    # --- one and the same thing done with both ---

    def plan(self, step: dict[str, Any], rank: int, **more: Any) -> Plan:
        return Plan(step["salt"], rank, by_rank=step["by_rank"], small=self.case.small, **more)

    def input(self, step: dict[str, Any], rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step["salt"] + rank)
        rows = 1 + (step["salt"] + rank) % 3
        return torch.randint(-2, 3, (rows, 6), generator=generator).float().requires_grad_(step["x_grad"])

    def loss(self, model: Any, x: torch.Tensor, plan: Plan, uses: str = "both") -> torch.Tensor:
        y, extra = PACKS[model.node.pack][1](model(x, plan))
        parts = [y, extra] if extra is not None and uses == "both" else [extra if extra is not None and uses == "second" else y]
        return sum((weighted(t) for t in parts), start=torch.zeros(()))

    def back(self, loss: torch.Tensor, **options: Any) -> None:
        if loss.requires_grad:
            self.went_back = True
            loss.backward(**options)

    def both(self, what: str, body: Body) -> bool:
        """`body` on the oracle with every rank's data, on the model with this rank's; False where both failed on purpose."""
        self.went_back = False
        want = self.of_the_oracle(body)
        try:
            came = body(self.model, self.rank)
        except Failure:
            assert want is None, f"{what}: a failure that the oracle does not have"
            return False
        assert want is not None, f"{what}: the failure was swallowed"
        assert len(came) == len(want)
        for i, (a, b) in enumerate(zip(came, want, strict=True)):
            assert (a is None) == (b is None), f"{what}, value {i}: {a}, expected {b}"
            if a is not None and b is not None:
                self.same(f"{what}, value {i}", a.detach().double(), b.detach().double())
        return True

    def of_the_oracle(self, body: Body) -> Tensors | None:
        before = {name: q.grad for name, q in self.oracle.named_parameters()}
        sums: dict[str, torch.Tensor] = {}
        own: dict[str, torch.Tensor] = {}
        want: Tensors | None = None
        failed = False
        for rank in range(self.world):
            self.oracle.zero_grad()
            try:
                values = body(self.oracle, rank)
            except Failure:
                failed = True
                continue
            want = values if rank == self.rank else want
            for name, q in self.oracle.named_parameters():
                if q.grad is None:
                    continue
                self.add_mass(name, q.grad)
                sums[name] = sums[name] + q.grad.double() if name in sums else q.grad.double()
                if rank == self.rank:
                    own[name] = q.grad
        for name, q in self.oracle.named_parameters():
            q.grad = before[name]
        if failed:
            return None
        self.collect(sums, own)
        return want

    def collect(self, sums: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> None:
        for name, q in self.oracle.named_parameters():
            owner = self.owners[name]
            if owner is None:  # not sharded: each rank has its own gradient
                if name in own:
                    q.grad = own[name] if q.grad is None else q.grad + own[name]
                continue
            if name in sums:
                self.pending[name] = self.pending[name] + sums[name] if name in self.pending else sums[name]
            if self.went_back and owner.unit.core.sync_gradients and name in self.pending:
                total = self.pending.pop(name) / (owner.unit.core.divide_factor or self.world)
                bucket = owner.unit.core.buckets[owner.bucket]
                total = total if q.grad is None else total + q.grad.double()
                q.grad = total.to(torch.promote_types(q.dtype, bucket.reduce_dtype))

    def add_mass(self, name: str, gradient: torch.Tensor) -> None:
        if self.owners[name] is None or gradient.numel() == 0:
            return
        self.mass[name] += gradient.abs().max().item()
        narrow = self.case.small
        if self.mass[name] > (256 if narrow else 2**20):
            raise TooLarge(name)

    # --- between actions ---

    def zero(self, set_to_none: bool = True) -> None:
        # What was accumulated and is set to zeros still waits for its reduction, which is nothing that the checks know of.
        set_to_none = set_to_none or bool(self.pending)
        for model in (self.model, self.oracle):
            model.zero_grad(set_to_none=set_to_none)
        self.pending.clear()
        self.mass = dict.fromkeys(self.mass, 0.0)

    def rest(self) -> None:
        for unit in self.units:
            unit.modules[0].reshard()

    def optimise(self, set_to_none: bool) -> None:
        for model in (self.model, self.oracle):
            by_name = dict(model.named_parameters())
            params = [by_name[name] for name in self.sharded_names]
            if params:
                torch.optim.SGD(params, 1 / 8, weight_decay=0.5).step()
            with torch.no_grad():
                for p in params:
                    p.round_().clamp_(-2, 2)
        self.zero(set_to_none)

    def check(self) -> None:
        for name, p, q in self.pairs():
            assert p.requires_grad == q.requires_grad, name
            assert (p.grad is None) == (q.grad is None), f"{name}: gradient {p.grad}, expected {q.grad}"
            compare = self.same if self.owners[name] is None else self.same_piece
            compare(name, p.detach(), q.detach())
            if q.grad is not None:
                compare(f"{name}.grad", p.grad, q.grad)
        self.check_rest()

    def check_rest(self) -> None:
        for unit in self.units:
            for bucket in unit.core.buckets:
                assert not bucket.gathered, f"unit {unit.name} is still gathered"
                assert self.pending or not bucket.accumulating, f"unit {unit.name} still accumulates"
            self.check_slots(unit)
        used = sum(unit.context.pool_used_bytes for unit in self.roots())
        assert self.pending or used == 0, f"{used} bytes of the pools in use"
        assert self.traffic.hostile.unwaited() == 0

    def check_ranks_agree(self) -> None:
        mine = [(r.verb, r.numel, r.bytes) for r in self.traffic.recording.records()]
        everybody: list[Any] = [None] * self.world
        dist.all_gather_object(everybody, mine)
        assert all(other == mine for other in everybody), f"collectives by rank: {everybody}"
        self.traffic.clear()


def weighted(y: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(y.numel()).remainder(3).sub(1).float()
    return (y.float() * weights.view_as(y)).sum()


def new_values(model: nn.Module, salt: int) -> None:
    torch.manual_seed(salt)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(integers(*p.shape))
