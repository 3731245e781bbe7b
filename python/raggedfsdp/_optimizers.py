"""An optimiser made before fully_shard holds tensors that no longer train. It must say so, not step on nothing."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from raggedfsdp import _C
from raggedfsdp._parameters import owner_of

# What was checked: the number of parameters of each optimiser, and how often parameters had been replaced by then. A list is
# looked through again only when either changed.
_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
_replacements = 0


def parameters_were_replaced() -> None:
    """To be called by whoever makes sharded parameters out of others."""
    global _replacements
    _replacements += 1
    _watch()


@functools.cache
def _watch() -> None:
    """Once per process: every torch optimiser is checked before its first step. Torch offers no hook narrower than this."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    seen = (sum(len(group["params"]) for group in optimizer.param_groups), _replacements)
    if _checked.get(optimizer) == seen:
        return
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        owner = owner_of(p)
        if owner is not None and owner.sharded is not p:
            raise _C.UsageError(
                f"{type(optimizer).__name__}.step: it holds parameter '{owner.name}' of unit '{owner.unit.name}' as it was "
                "before fully_shard (or before load_state_dict(assign=True)), which no longer trains; make it afterwards, "
                "from model.parameters()"
            )
    _checked[optimizer] = seen
