"""A random case of the stress test: a tree of modules, how it is wrapped, and what is done with it. Plain values only."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from stress_models import PACKS, Node


@dataclass
class Action:
    kind: str
    has: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind} " + ", ".join(f"{k}={v}" for k, v in self.has.items())


@dataclass
class Case:
    seed: int
    world: int
    tree: Node
    actions: list[Action]
    small: bool = False  # everything is exact in bf16, and dtypes are mixed
    share: bool = False  # without an outermost unit: share_comm_ctx

    def __str__(self) -> str:
        head = f"seed {self.seed}, world {self.world}, small={self.small}, share={self.share}"
        return "\n".join([head, self.tree.tree(1), *(f"  {i}. {action}" for i, action in enumerate(self.actions))])


def make_case(seed: int, world: int) -> Case:
    return _Maker(seed, world).case()


SHAPES = [(1, 17), (5, 3), (7,), (0, 4), (), (1,), (1, 1)]
POLICIES = [None, None, None, "rows", "tensor", "mixed", "shard0", "shard1"]


def _drop_what_is_not_legal(tree: Node) -> None:
    """A module used in two places must be a unit or belong to the same one; a tie must not leave the units."""
    home: dict[str, str | None] = {}  # the unit that a node's parameters belong to

    def place(node: Node, unit: str | None, together: dict[str, str]) -> None:
        home[node.name] = unit = node.name if node.unit is not None else together.get(node.name, unit)
        inside = {name: child.name for child in node.children for name in (child.unit or {}).get("with", [])}
        for child in node.children:
            place(child, unit, inside)

    place(tree, None, {})
    members = {name for node in tree.walk() if node.unit for name in (node.name, *node.unit.get("with", []))}
    for node in tree.walk():
        if node.kind == "again" and node.has["of"] not in members and home[node.name] != home[node.has["of"]]:
            node.kind, node.has = "plain", {}
        # The members of a unit are wrapped together, after what is inside the last of them.
        for i, child in enumerate(node.children):
            group = [n for n in node.children[i:] if child.unit and n.name in (child.name, *child.unit.get("with", []))]
            for n in (n for member in group[1:] for n in member.walk() if n.kind == "again"):
                if n.has["of"] in [member.name for member in group]:
                    n.kind, n.has = "plain", {}
        # What asks for a recompute depends on the layers used, and the recompute gathers units.
        if node.checkpoint == "non-reentrant" and sum(n.name in members or n.kind == "again" for n in node.walk()) > 1:
            for n in node.walk():
                if n.kind == "choice":
                    n.has["alike"] = True
        if "tied" in node.has and None in (home[node.name], home[node.has["tied"]]):
            del node.has["tied"]


class _Maker:
    def __init__(self, seed: int, world: int) -> None:
        self.seed, self.world = seed, world
        self.r = random.Random(f"{seed} {world}")
        self.small = self.chance(0.35)
        self.freezes = self.chance(0.4)
        self.names = 0
        self.leaves: list[Node] = []  # made so far
        self.chosen: set[str] = set()  # below a choice: no units there

    def chance(self, p: float) -> bool:
        return self.r.random() < p

    def name(self) -> str:
        self.names += 1
        return f"n{self.names}"

    def case(self) -> Case:
        tree = self.container("sequence", 0)
        tree.checkpoint = None
        self.units(tree)
        if self.chance(0.85) or not any(n.unit is not None for n in tree.walk()):
            tree.unit = self.unit()
        tree.edits_input = False  # the input of the model is a leaf
        _drop_what_is_not_legal(tree)
        actions = [self.action() for _ in range(self.r.randint(3, 8))]
        rooted = tree.unit is not None
        if not rooted:
            actions = [a for a in actions if a.kind != "accumulate"]
        return Case(self.seed, self.world, tree, actions, self.small, share=not rooted and self.chance(0.5))

    # --- the tree ---

    def node(self, depth: int) -> Node:
        if depth < 3 and self.chance(0.45):
            kind = self.r.choices(["sequence", "parallel", "repeat", "choice"], [4, 2, 2, 3])[0]
            return self.container(kind, depth)
        return self.leaf()

    def container(self, kind: str, depth: int) -> Node:
        node = Node(self.name(), kind)
        if kind == "choice":
            node.children = [self.leaf(again=False) for _ in range(self.r.randint(2, 3))]
            self.chosen |= {n.name for n in node.children}
        elif kind == "repeat":
            node.children = [self.node(depth + 1)]
            node.has["times"] = self.r.randint(2, 3) if depth < 2 else 2
        else:
            least = 2 if depth == 0 or kind == "parallel" else 1
            node.children = [self.node(depth + 1) for _ in range(self.r.randint(least, 4 if depth == 0 else 3))]
        if kind == "sequence":
            node.has.update({k: True for k, p in (("residual", 0.4), ("moves", 0.15), ("skips", 0.15)) if self.chance(p)})
        return self.called(node)

    def leaf(self, again: bool = True) -> Node:
        reusable = [n for n in self.leaves if n.name not in self.chosen]
        if again and reusable and self.chance(0.06):
            return self.called(Node(self.name(), "again", has={"of": self.r.choice(reusable).name}), fresh=False)
        kinds = ["linear", "block", "scale", "lookup", "adapter", "odd", "twice", "plain"]
        node = Node(self.name(), self.r.choices(kinds, [4, 3, 2, 2, 2, 2, 2, 1])[0])
        if node.kind == "linear":
            node.has["bias"] = self.chance(0.5)
        elif node.kind == "block":
            node.has["hidden"] = self.r.choice([1, 5, 17])
        elif node.kind == "lookup":
            node.has["rows"] = self.r.choice([1, 3, 10])
        elif node.kind == "adapter":
            node.has["rank"] = self.r.choice([1, 2])
        elif node.kind == "odd":
            node.has["shapes"] = self.r.sample(SHAPES, self.r.randint(1, 4))
        if self.small and self.chance(0.2):
            node.has["dtype"] = self.r.choice(["bf16", "fp64"])
        ties = [n for n in self.leaves if n.kind in ("linear", "twice")]
        if node.kind in ("linear", "twice") and ties and self.chance(0.2):
            node.has["tied"] = self.r.choice(ties).name
        node.frozen = self.freezes and self.chance(0.35) and "tied" not in node.has
        node.ignored = self.chance(0.03)
        self.leaves.append(node)
        return self.called(node)

    def called(self, node: Node, fresh: bool = True) -> Node:
        """How it returns and how it is called."""
        if fresh and self.chance(0.25):
            node.pack = self.r.choice([p for p in PACKS if p is not None])
            node.has["extra"] = self.chance(0.5)
        if fresh and not self.small and self.chance(0.08):
            node.edits_input = True
        if self.chance(0.2):
            node.checkpoint = self.r.choice(["reentrant", "non-reentrant"])
        node.keywords = self.chance(0.2)
        node.view = self.chance(0.15)
        if node.pack != "halves" and self.chance(0.15):
            node.edit = self.r.choice(["add_", "neg_"])
        return node

    # --- the units ---

    def units(self, node: Node) -> None:
        for i, child in enumerate(node.children):
            self.units(child)
            if child.kind == "again" or child.name in self.chosen or child.unit is not None:
                continue
            if any(child.name in (n.unit or {}).get("with", []) for n in node.children):
                continue
            if self.chance(0.5 if child.children else 0.35) and not (child.kind == "repeat" and self.chance(0.5)):
                child.unit = self.unit()
                after = node.children[i + 1] if i + 1 < len(node.children) else None
                if after is not None and after.kind != "again" and self.chance(0.2):
                    child.unit["with"] = [after.name]

    def unit(self) -> dict[str, Any]:
        options: dict[str, Any] = {"reshard": self.r.choice([None, None, True, True, False])}
        if (policy := self.r.choice(POLICIES)) is not None:
            options["policy"] = policy
        if self.chance(0.2):
            options["max_buckets"] = self.r.randint(1, 3)
        if self.chance(0.2):
            options["cost"] = self.r.choice([0, 1, 64])
        if self.small and self.chance(0.7):
            options["param"] = self.r.choice([None, "bf16", "bf16", "fp64"])
            options["reduce"] = self.r.choice([None, "bf16", "fp32"])
            options["output"] = self.r.choice([None, None, "bf16", "fp32"])
            options["cast"] = self.chance(0.8)
        averages = [None] if self.world != 3 else []  # a third is not exact
        options["divide"] = self.r.choice([1, *averages] if self.small else [1, 1, 2, 4, *averages])
        return options

    # --- what is done ---

    def step(self) -> dict[str, Any]:
        """One forward: with `x_grad` the input requires grad, and only then may ranks use different layers."""
        x_grad = self.chance(0.75)
        return {"salt": self.r.randrange(10**6), "x_grad": x_grad, "by_rank": x_grad and self.chance(0.7)}

    def some(self) -> list[int]:
        """Some parameters or units, by number; what is beyond the last wraps around."""
        return [self.r.randrange(1000) for _ in range(self.r.randint(1, 4))]

    def action(self) -> Action:
        kinds = {
            "train": 4, "forward": 1.5, "two": 2, "accumulate": 1.5, "freeze": 1.5, "unshard": 1.2, "settings": 1.2,
            "zero": 0.5, "user_gradients": 1, "state": 1.8, "step": 0.7, "fail": 1.5, "retain": 0.8, "input_gradient": 0.8,
            "partial": 1, "hooks": 0.7, "norm": 0.3, "double": 0 if self.small else 0.3,
        }  # fmt: skip
        kind = self.r.choices(list(kinds), list(kinds.values()))[0]
        fill = getattr(self, f"_{kind}", dict)
        return Action(kind, fill())

    def _train(self) -> dict[str, Any]:
        return self.step() | {"optimise": self.chance(0.7), "none": self.chance(0.6)}

    def _forward(self) -> dict[str, Any]:
        return self.step() | {"mode": self.r.choice(["no_grad", "inference", "dropped"])}

    def _two(self) -> dict[str, Any]:
        order = self.r.choice(["forwards", "backwards", "sum", "first", "second"])
        return {"first": self.step(), "second": self.step(), "order": order}

    def _accumulate(self) -> dict[str, Any]:
        return {"steps": [self.step() for _ in range(self.r.randint(1, 3))], "units": self.some() if self.chance(0.4) else None}

    def _freeze(self) -> dict[str, Any]:
        return {"which": self.some(), "whole": self.chance(0.3)}

    def _unshard(self) -> dict[str, Any]:
        return self.step() | {"which": self.some(), "async": self.chance(0.5), "early": self.chance(0.3)}

    def _settings(self) -> dict[str, Any]:
        kind = self.r.choice(["after_forward", "after_backward", "forward_prefetch", "backward_prefetch"])
        return {"kind": kind, "unit": self.r.randrange(1000), "value": self.chance(0.5), "which": self.some()}

    def _zero(self) -> dict[str, Any]:
        return {"none": self.chance(0.5)}

    def _user_gradients(self) -> dict[str, Any]:
        return {"which": [(i, self.r.choice(["full", "none", "double"])) for i in self.some()]}

    def _state(self) -> dict[str, Any]:
        kinds = ["full", "full rank 0", "load", "load rank 0", "round trip", "assign"]
        return {"kind": self.r.choice(kinds), "salt": self.r.randrange(10**6)}

    def _fail(self) -> dict[str, Any]:
        return {
            "salt": self.r.randrange(10**6),
            "x_grad": self.chance(0.75),
            "by_rank": False,
            "node": f"n{self.r.randint(1, max(1, self.names))}",
            "when": self.r.choice(["forward", "backward"]),
            "call": self.r.choice([1, 1, 2]),
            "then": self.r.choice(["reset", "forward", "nothing"]),
        }

    def _retain(self) -> dict[str, Any]:
        return self.step()

    def _input_gradient(self) -> dict[str, Any]:
        return self.step() | {"x_grad": True}

    def _partial(self) -> dict[str, Any]:
        return self.step() | {"uses": self.r.choice(["first", "second", "second"])}

    def _hooks(self) -> dict[str, Any]:
        return self.step() | {"which": self.some()}
