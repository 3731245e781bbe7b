"""Random module trees for the stress test: what a `Node` says, as a module. Values and gradients stay small whole numbers.

Every module is called as `module(x, plan)` with x of (..., WIDTH) or by keywords; the `Plan` says which layers this rank uses.
"""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass
class Node:
    """A module of the tree and how its parent calls it. Plain values, so that a case can be printed, cut down and read back."""

    name: str
    kind: str
    children: list[Node] = field(default_factory=list)
    has: dict[str, Any] = field(default_factory=dict)  # what the kind needs: bias, hidden, rows, dtype ...
    unit: dict[str, Any] | None = None  # options of fully_shard; "with": names of siblings in the same unit
    frozen: bool = False
    ignored: bool = False  # its own parameters are left alone by fully_shard
    pack: str | None = None  # what forward returns its tensors in
    edits_input: bool = False
    # how it is called
    checkpoint: str | None = None
    keywords: bool = False
    view: bool = False
    edit: str | None = None

    def walk(self) -> list[Node]:
        return [self, *(n for child in self.children for n in child.walk())]

    def tree(self, depth: int = 0) -> str:
        default = Node("", "")
        shown = {k: v for k, v in vars(self).items() if k not in ("name", "kind", "children") and v != getattr(default, k)}
        line = "  " * depth + f"{self.name}: {self.kind} " + ", ".join(f"{k}={v}" for k, v in shown.items())
        return "\n".join([line.rstrip(), *(child.tree(depth + 1) for child in self.children)])


class Failure(Exception):
    """Thrown on purpose inside a forward or a backward."""


class _Bound(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, values: float, gradients: float) -> torch.Tensor:
        ctx.gradients = gradients
        return x.clamp(-values, values)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g.clamp(-ctx.gradients, ctx.gradients), None, None


@dataclass
class Plan:
    """One forward: the same salt on every rank; `by_rank` lets ranks use different layers of one unit."""

    salt: int
    rank: int
    by_rank: bool = True
    small: bool = False  # exact in bf16
    fail: tuple[str, str, int] | None = None  # node, "forward" or "backward", at which call of it
    checkpoints: bool = True
    calls: dict[str, int] = field(default_factory=dict)

    def bound(self, x: torch.Tensor) -> torch.Tensor:
        return _Bound.apply(x, 2.0, 1.0) if self.small else _Bound.apply(x, 4.0, 2.0)

    def random(self, name: str, by_rank: bool) -> random.Random:
        return random.Random(f"{self.salt} {name} {self.rank if by_rank and self.by_rank else '-'}")

    def enter(self, name: str) -> None:
        if self.fail is None or self.fail[:2] != (name, "forward"):
            return
        self.calls[name] = self.calls.get(name, 0) + 1
        if self.calls[name] == self.fail[2]:
            raise Failure(f"in forward of {name}")

    def arm(self, name: str, y: torch.Tensor) -> None:
        if self.fail is not None and self.fail[:2] == (name, "backward") and y.requires_grad:
            y.register_hook(_fail)


def _fail(gradient: torch.Tensor) -> None:
    raise Failure("in backward")


# --- what forwards return ---

Pair = namedtuple("Pair", "first second")


@dataclass
class Output:
    first: torch.Tensor
    more: dict[str, Any]
    note: str = "text"


PACKS: dict[str | None, tuple[Callable[[Any, Any], Any], Callable[[Any], tuple[Any, Any]]]] = {
    None: (lambda y, e: y, lambda o: (o, None)),
    "tuple": (lambda y, e: (y, e), lambda o: o),
    "list": (lambda y, e: [y, [e, None]], lambda o: (o[0], o[1][0])),
    "namedtuple": (Pair, lambda o: (o.first, o.second)),
    "dict": (lambda y, e: {"y": y, "in": {"e": (e, 1)}}, lambda o: (o["y"], o["in"]["e"][0])),
    "dataclass": (lambda y, e: Output(y, {"e": [e]}), lambda o: (o.first, o.more["e"][0])),
    "halves": (lambda y, e: y.split(WIDTH // 2, dim=-1), lambda o: (torch.cat(o, dim=-1), None)),
}


def call(node: Node, child: nn.Module, x: torch.Tensor, plan: Plan) -> torch.Tensor:
    """How a parent calls a child: through a checkpoint or not, by keywords or not, with what is done to the output."""

    def run(t: torch.Tensor) -> torch.Tensor:
        edits = child.node.edits_input
        h = t * 1 if edits else t
        h = h[None] if node.view else h
        out = child(x=h, plan=plan, side={"more": [t * 1, None]}) if node.keywords else child(h, plan)
        y, extra = PACKS[child.node.pack][1](out)
        if extra is not None and node.has.get("extra"):
            y = y + extra
        if node.view:
            y, h = y.squeeze(0), h.squeeze(0)
        if node.edit == "add_":
            y.add_(t)
        elif node.edit == "neg_":
            y.neg_()
        if edits:
            y = y + h
        return plan.bound(y)

    if node.checkpoint is None or not plan.checkpoints:
        return run(x)
    return checkpoint(run, x, use_reentrant=node.checkpoint == "reentrant")


# --- modules ---


class Part(nn.Module):
    def __init__(self, node: Node) -> None:
        super().__init__()
        self.node = node

    def parameter(self, name: str, *shape: int) -> None:
        dtype = DTYPES[self.node.has.get("dtype", "fp32")]
        setattr(self, name, nn.Parameter(torch.randint(-2, 3, shape).to(dtype), requires_grad=not self.node.frozen))

    def forward(self, x: torch.Tensor, plan: Plan, side: dict[str, Any] | None = None) -> Any:
        if self.node.edits_input:
            x.neg_()
        if side is not None:
            x = plan.bound(x + side["more"][0])
        plan.enter(self.node.name)
        y, extra = self.compute(x, plan)
        y = plan.bound(y)
        plan.arm(self.node.name, y)
        return PACKS[self.node.pack][0](y, plan.bound(y * 1 if extra is None else extra * 1))

    def compute(self, x: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, torch.Tensor | None]:
        raise NotImplementedError


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))


class Linear(Part):
    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.parameter("weight", WIDTH, WIDTH)
        self.bias: nn.Parameter | None = None
        if node.has.get("bias"):
            self.parameter("bias", WIDTH)
        self.register_buffer("constant", torch.arange(3), persistent=node.has.get("bias", False))

    def compute(self, x: torch.Tensor, plan: Plan) -> Any:
        return linear(x, self.weight, self.bias), None


class Block(Part):
    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.parameter("up", node.has["hidden"], WIDTH)
        self.parameter("down", WIDTH, node.has["hidden"])

    def compute(self, x: torch.Tensor, plan: Plan) -> Any:
        return linear(plan.bound(torch.relu(linear(x, self.up))), self.down) + x, None


class Scale(Part):
    """A vector and a number, and a weight stored transposed."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.parameter("weight", WIDTH)
        self.parameter("temperature")
        self.parameter("turned", WIDTH, WIDTH)
        self.turned = nn.Parameter(self.turned.detach().t(), requires_grad=not node.frozen)

    def compute(self, x: torch.Tensor, plan: Plan) -> Any:
        y = plan.bound(x * self.weight * self.temperature)
        return y.to(self.turned.dtype) @ self.turned, y


class Lookup(Part):
    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.parameter("table", node.has["rows"], WIDTH)

    def compute(self, x: torch.Tensor, plan: Plan) -> Any:
        rows = x.detach()[..., 0].abs().long() % self.node.has["rows"]
        return F.embedding(rows, self.table) + x, None


class Adapter(Part):
    """LoRA: the weight is frozen, the adapters are not."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.parameter("weight", WIDTH, WIDTH)
        self.weight.requires_grad_(False)
        self.parameter("a", node.has["rank"], WIDTH)
        self.parameter("b", WIDTH, node.has["rank"])

    def compute(self, x: torch.Tensor, plan: Plan) -> Any:
        return linear(x, self.weight) + linear(plan.bound(linear(x, self.a)), self.b), None


class Odd(Part):
    """Shapes that no shard boundary suits."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        for i, shape in enumerate(node.has["shapes"]):
            self.parameter(f"w{i}", *shape)

    def compute(self, x: torch.Tensor, plan: Plan) -> Any:
        for i in range(len(self.node.has["shapes"])):
            x = plan.bound(x + plan.bound(getattr(self, f"w{i}").sum()))
        return x * 1, None


class Twice(Part):
    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.parameter("weight", WIDTH, WIDTH)

    def compute(self, x: torch.Tensor, plan: Plan) -> Any:
        y = plan.bound(linear(x, self.weight))
        return linear(y, self.weight.t()), y


class Plain(Part):
    def compute(self, x: torch.Tensor, plan: Plan) -> Any:
        return torch.relu(x) - 1, None


class Container(Part):
    def __init__(self, node: Node, parts: list[nn.Module]) -> None:
        super().__init__(node)
        self.parts = nn.ModuleList(parts)

    def run(self, i: int, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        return call(self.node.children[i], self.parts[i], x, plan)


class Sequence(Container):
    """`moves`: the order of the parts is another in each step; `skips`: some do not run (alike on all ranks)."""

    def compute(self, x: torch.Tensor, plan: Plan) -> Any:
        chance = plan.random(self.node.name, by_rank=False)
        order = list(range(len(self.parts)))
        if self.node.has.get("moves") and chance.random() < 0.5:
            chance.shuffle(order)
        if self.node.has.get("skips"):
            order = [i for i in order if chance.random() < 0.6]
        first, x = None, x * 1
        for i in order:
            y = self.run(i, x, plan)
            x = plan.bound(x + y) if self.node.has.get("residual") else y
            first = x if first is None else first
        return x, first


class Parallel(Container):
    def compute(self, x: torch.Tensor, plan: Plan) -> Any:
        outs = [self.run(i, x, plan) for i in range(len(self.parts))]
        return sum(outs[1:], start=outs[0]), outs[-1]


class Repeat(Container):
    def compute(self, x: torch.Tensor, plan: Plan) -> Any:
        first = x = self.run(0, x, plan)
        for _ in range(self.node.has["times"] - 1):
            x = self.run(0, x, plan)
        return x, first


class Choice(Container):
    """Each rank runs the parts that its data ask for, perhaps none; `alike`: all ranks the same."""

    def compute(self, x: torch.Tensor, plan: Plan) -> Any:
        chance = plan.random(self.node.name, by_rank=not self.node.has.get("alike"))
        x = x * 1
        for i in chance.choices(range(len(self.parts)), k=chance.randrange(3)):
            x = self.run(i, x, plan)
        return x, None


LEAVES = {cls.__name__.lower(): cls for cls in (Linear, Block, Scale, Lookup, Adapter, Odd, Twice, Plain)}
CONTAINERS = {cls.__name__.lower(): cls for cls in (Sequence, Parallel, Repeat, Choice)}


def build(node: Node, made: dict[str, nn.Module]) -> nn.Module:
    """The module of a node; `made` gets the modules by name. "again" is a module made before, "tied" shares its weight."""
    if node.kind == "again":
        return made.get(node.has["of"]) or Plain(node)
    if node.kind in CONTAINERS:
        module: nn.Module = CONTAINERS[node.kind](node, [build(child, made) for child in node.children])
    else:
        module = LEAVES[node.kind](node)
        if node.has.get("tied") in made:
            module.weight = made[node.has["tied"]].weight
    made[node.name] = module
    return module


def make(tree: Node) -> nn.Module:
    return build(tree, {})
