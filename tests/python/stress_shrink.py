"""Makes a failing case smaller, one piece after another, as long as it goes on failing in the same way."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator

from stress_cases import Case
from stress_models import Node
from stress_run import Failed, run


def shrink(failed: Failed, seconds: float) -> Failed:
    end = time.monotonic() + seconds
    progress = True
    while progress:
        progress = False
        for smaller in smaller_cases(failed.case):
            if time.monotonic() > end:
                return failed
            again = run([smaller], smaller.world).failures
            if again and _sort(again[0]) == _sort(failed):
                failed, progress = again[0], True
                break
    return failed


def _sort(failed: Failed) -> str:
    """The kind of failure: the class of the exception and what it is about, without numbers."""
    lines = [line for line in failed.text.splitlines() if line and not line.startswith(" ")]
    error = next((line for line in lines if "Error" in line or "ended with" in line or "still running" in line), "")
    return "".join(c for c in error.split(",")[0] if not c.isdigit())[:60]


def smaller_cases(case: Case) -> Iterator[Case]:
    """One action less, one module less, one option less."""
    for i in range(len(case.actions)):
        yield _changed(case, lambda c, i=i: c.actions.pop(i))
    count = len(case.tree.walk())
    for i in reversed(range(1, count)):
        yield _changed(case, lambda c, i=i: _remove(c.tree, i, keep=False))
    for i in range(1, count):
        if case.tree.walk()[i].children:
            yield _changed(case, lambda c, i=i: _remove(c.tree, i, keep=True))
    for i, node in enumerate(case.tree.walk()):
        for change in _simpler(node):
            yield _changed(case, lambda c, i=i, change=change: change(c.tree.walk()[i]))


def _changed(case: Case, change: Callable[[Case], object]) -> Case:
    smaller = copy.deepcopy(case)
    change(smaller)
    return smaller


def _remove(tree: Node, i: int, keep: bool) -> None:
    """Takes node i out; with `keep` its children take its place."""
    gone = tree.walk()[i]
    for node in tree.walk():
        at = next((k for k, child in enumerate(node.children) if child is gone), None)
        if at is not None:
            node.children[at : at + 1] = gone.children if keep else []
            if not node.children:
                node.kind = "plain"


def _simpler(node: Node) -> Iterator[Callable[[Node], object]]:
    default = Node("", "")
    for key in ("unit", "frozen", "ignored", "pack", "edits_input", "checkpoint", "keywords", "view", "edit"):
        if getattr(node, key) != getattr(default, key):
            yield lambda n, key=key: setattr(n, key, getattr(default, key))
    for key in ("policy", "max_buckets", "cost", "param", "reduce", "output", "cast", "divide", "with"):
        if node.unit is not None and key in node.unit:
            yield lambda n, key=key: n.unit.pop(key)
    for key in ("bias", "dtype", "tied", "residual", "moves", "skips", "extra"):
        if node.has.get(key):
            yield lambda n, key=key: n.has.pop(key)
