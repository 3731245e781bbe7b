"""Which Comm a mesh dimension's collectives go through.

One Comm per process group, shared by all that use the group. A test that wants to see or disturb the traffic wraps it:

    made = []
    def record(comm):
        made.append(_C.make_recording_comm(comm))
        return made[-1]
    with wrap_comms(record):
        fully_shard(model, mesh=mesh)      # what is sharded here uses the wrapped comms, also after the block
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import timedelta

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from raggedfsdp import _C

CommTable = weakref.WeakKeyDictionary[ProcessGroup, _C.Comm]

# Comms live as long as their group: collectives of one group must be issued through one of them, in one order.
_comms: CommTable = weakref.WeakKeyDictionary()
_wrapping: ContextVar[tuple[Callable[[_C.Comm], _C.Comm], CommTable] | None] = ContextVar("wrapping", default=None)


def comm_for(mesh: DeviceMesh, dim: int = 0) -> _C.Comm:
    """The Comm of one mesh dimension. Moves nothing itself; every rank of the dimension must ask for it."""
    group = mesh.get_group(dim)
    if group not in _comms:
        comm = _C.make_process_group_comm(group.group_name)
        limit = debug_limit()
        _comms[group] = comm if limit is None else _C.make_checked_comm(comm, limit)
    wrapping = _wrapping.get()
    if wrapping is None:
        return _comms[group]
    wrap, wrapped = wrapping
    if group not in wrapped:
        wrapped[group] = wrap(_comms[group])
    return wrapped[group]


def debug_limit() -> timedelta | None:
    """Debug mode, from RAGGEDFSDP_DEBUG: before each collective the ranks tell each other which one comes next.

    1: ranks that are out of step raise CommError naming the unit, the phase and the odd rank; one that does not come within 10
    seconds is out of step too. Another number: that many seconds. 0 or unset: off. Docs: docs/errors.md.
    """
    text = os.environ.get("RAGGEDFSDP_DEBUG", "0")
    try:
        seconds = float(text or "0")
    except ValueError:
        seconds = -1.0
    if seconds < 0:
        raise _C.UsageError(f"RAGGEDFSDP_DEBUG is '{text}'; use 0 (off), 1 (on) or a time limit in seconds")
    if seconds == 0:
        return None
    return timedelta(seconds=10 if seconds == 1 else seconds)


@contextlib.contextmanager
def wrap_comms(wrap: Callable[[_C.Comm], _C.Comm]) -> Iterator[None]:
    """For tests: `comm_for` inside the block returns wrap(comm), one per process group."""
    token = _wrapping.set((wrap, weakref.WeakKeyDictionary()))
    try:
        yield
    finally:
        _wrapping.reset(token)
