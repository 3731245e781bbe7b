"""The Comm contract (tests/comm/contract.h) over torch process groups, and how the package finds its comms."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from raggedfsdp import _C
from raggedfsdp.comm import comm_for, wrap_comms
from ranks import run_ranks

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.int8,
    torch.uint8,
]
SIZES = [0, 1, 7, 1000]
LARGE = 300_001
OPS = [_C.ReduceOp.SUM, _C.ReduceOp.AVG, _C.ReduceOp.MAX, _C.ReduceOp.MIN]
LIMIT = timedelta(seconds=30)


def _comm() -> _C.Comm:
    return comm_for(init_device_mesh("cpu", (dist.get_world_size(),)))


def _input(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, different on every rank: exact in every dtype, so comparisons are bit by bit."""
    values = (torch.arange(numel) * 3 + rank * 7) % 11
    return (values if dtype == torch.uint8 else values - 5).to(dtype)


class _Seat:
    """One rank's checks; the same calls as the C++ contract."""

    def __init__(self, comm: _C.Comm) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.waits = 0

    def wait(self, work: _C.Work) -> None:
        self.waits += 1
        if self.waits % 2:
            work.order_after()
        work.wait_host(LIMIT)
        work.wait_host(LIMIT)

    def equal(self, came: torch.Tensor, want: torch.Tensor, what: str) -> None:
        assert torch.equal(came, want), f"{what} of {want.numel()} x {want.dtype} on rank {self.rank} of {self.size}"

    def all_inputs(self, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [_input(r, numel, dtype) for r in range(self.size)]

    def reduced(self, numel: int, dtype: torch.dtype, op: _C.ReduceOp) -> torch.Tensor:
        parts = torch.stack(self.all_inputs(numel, dtype))
        if op == _C.ReduceOp.MAX:
            return parts.amax(0) if numel else parts[0]
        if op == _C.ReduceOp.MIN:
            return parts.amin(0) if numel else parts[0]
        total = parts.sum(0, dtype=dtype)
        return total / self.size if op == _C.ReduceOp.AVG else total

    def all_gather(self, part: int, dtype: torch.dtype) -> None:
        buffer = torch.full((part * self.size,), 99, dtype=dtype)
        buffer[self.rank * part :][:part] = _input(self.rank, part, dtype)
        self.wait(self.comm.all_gather(buffer))
        self.equal(buffer, torch.cat(self.all_inputs(part, dtype)), "all_gather")

    def all_gather_uneven(self, base: int, dtype: torch.dtype) -> None:
        counts = [0 if r == 1 else base + r for r in range(self.size)]
        want = torch.cat([_input(r, counts[r], dtype) for r in range(self.size)])
        buffer = torch.full_like(want, 99)
        begin = [0, *accumulate(counts)][self.rank]
        buffer[begin:][: counts[self.rank]] = _input(self.rank, counts[self.rank], dtype)
        self.wait(self.comm.all_gather_uneven(buffer, counts))
        self.equal(buffer, want, "all_gather_uneven")

    def reduce_scatter(self, part: int, dtype: torch.dtype, op: _C.ReduceOp) -> None:
        want = self.reduced(part * self.size, dtype, op)[self.rank * part :][:part]
        buffer = _input(self.rank, part * self.size, dtype)
        out = torch.full((part,), 99, dtype=dtype)
        self.wait(self.comm.reduce_scatter(buffer, out, op))
        self.equal(out, want, f"reduce_scatter {op}")
        buffer = _input(self.rank, part * self.size, dtype)
        out = buffer[self.rank * part :][:part]
        self.wait(self.comm.reduce_scatter(buffer, out, op))
        self.equal(out, want, f"reduce_scatter {op} in place")

    def all_reduce(self, numel: int, dtype: torch.dtype, op: _C.ReduceOp) -> None:
        buffer = _input(self.rank, numel, dtype)
        self.wait(self.comm.all_reduce(buffer, op))
        self.equal(buffer, self.reduced(numel, dtype, op), f"all_reduce {op}")

    def broadcast(self, numel: int, dtype: torch.dtype) -> None:
        for root in range(self.size):
            buffer = _input(self.rank, numel, dtype)
            self.wait(self.comm.broadcast(buffer, root))
            self.equal(buffer, _input(root, numel, dtype), f"broadcast from {root}")

    def all_to_all(self, base: int, dtype: torch.dtype) -> None:
        def sent(source: int, to: int) -> torch.Tensor:
            nothing = to == self.size - 1 and source != to
            return _input(source * 10 + to, 0 if nothing else base * (source + to), dtype)

        inputs = [sent(self.rank, r) for r in range(self.size)]
        want = [sent(r, self.rank) for r in range(self.size)]
        out = torch.full_like(torch.cat(want), 99)
        counts, send_counts = [t.numel() for t in want], [t.numel() for t in inputs]
        self.wait(self.comm.all_to_all(out, torch.cat(inputs), counts, send_counts))
        self.equal(out, torch.cat(want), "all_to_all")

    def all_verbs(self, numel: int, dtype: torch.dtype) -> None:
        self.all_gather(numel, dtype)
        self.all_gather_uneven(numel, dtype)
        self.broadcast(numel, dtype)
        self.all_to_all(numel, dtype)
        for op in OPS:
            if op == _C.ReduceOp.AVG and not dtype.is_floating_point:
                continue
            self.reduce_scatter(numel, dtype, op)
            self.all_reduce(numel, dtype, op)


def _contract() -> None:
    seat = _Seat(_comm())
    for dtype in DTYPES:
        for numel in SIZES:
            seat.all_verbs(numel, dtype)
    seat.all_verbs(LARGE, torch.float32)
    seat.all_verbs(LARGE, torch.bfloat16)


def _contract_of_own_collectives() -> None:
    group = dist.group.WORLD
    assert group is not None
    seat = _Seat(_C.make_process_group_comm(group.group_name, _C.GroupRoute.COLLECTIVES))
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        for numel in SIZES:
            seat.all_verbs(numel, dtype)


def _sums_in_rank_order() -> list[float]:
    comm = _comm()
    values = [0.1, 0.2, 0.3, 1e16]
    results = []
    for numel in (1, 100_000):  # both routes of all_reduce
        t = torch.full((numel,), values[comm.rank], dtype=torch.float64)
        comm.all_reduce(t).order_after()
        results.append(t[-1].item())
        out = torch.empty(numel, dtype=torch.float64)
        comm.reduce_scatter(torch.full((numel * comm.size,), values[comm.rank], dtype=torch.float64), out).order_after()
        results.append(out[0].item())
    return results


def _several_comms_on_one_group() -> None:
    group = dist.group.WORLD
    assert group is not None
    comms = [_C.make_process_group_comm(group.group_name) for _ in range(2)]
    order = comms if comms[0].rank else comms[::-1]  # two comms need no common order
    buffers = {id(c): torch.full((1000,), float(c is comms[0])) for c in comms}
    works = [c.all_reduce(buffers[id(c)]) for c in order]
    for work in works:
        work.order_after()
    assert buffers[id(comms[0])].eq(comms[0].size).all()
    assert buffers[id(comms[1])].eq(0).all()


def _contract_under_hostility() -> int:
    hostile = _C.make_hostile_comm(_comm())
    seat = _Seat(hostile)
    for numel in SIZES:
        seat.all_verbs(numel, torch.bfloat16)
    return hostile.unwaited()


def _many_in_flight() -> None:
    comm = _comm()
    buffers = [_input(comm.rank + i, 50_000, torch.float32) for i in range(8)]
    part = 50_000 // comm.size
    own = slice(comm.rank * part, (comm.rank + 1) * part)
    works = [comm.all_reduce(b) if i % 2 else comm.reduce_scatter(b, b[own]) for i, b in enumerate(buffers)]
    works[0] = None  # dropped unwaited
    for i in reversed(range(1, 8)):
        works[i].order_after()
        want = torch.stack([_input(r + i, 50_000, torch.float32) for r in range(comm.size)]).sum(0)
        kept = slice(None) if i % 2 else own
        assert torch.equal(buffers[i][kept], want[kept])


def _usage_errors() -> None:
    comm = _comm()
    ones = torch.ones(comm.size)
    calls: list[Callable[[], object]] = [
        lambda: comm.all_reduce(ones.int(), _C.ReduceOp.AVG),
        lambda: comm.reduce_scatter(ones, torch.ones(2)),
        lambda: comm.all_reduce(torch.ones(2, 2)),
        lambda: comm.broadcast(ones, comm.size),
        lambda: comm.all_gather_uneven(ones, [1] * (comm.size + 1)),
    ]
    if comm.size > 1:
        calls.append(lambda: comm.all_reduce(ones.to("meta")))
    for call in calls:
        with pytest.raises(_C.UsageError):
            call()
    comm.all_reduce(ones).order_after()
    assert ones.tolist() == [comm.size] * comm.size


def _peer_dies(verb: str) -> str:
    comm = _comm()
    buffer = torch.ones(comm.size * 1000)
    comm.all_reduce(buffer).order_after()
    if comm.rank == 1:
        os._exit(1)
    begin = time.monotonic()
    try:
        work = comm.all_gather(buffer) if verb == "all_gather" else comm.all_reduce(buffer)
        work.wait_host(timedelta(seconds=10))
    except _C.CommError as error:
        assert time.monotonic() - begin < 15
        return str(error)
    return "no CommError"


def _late_peer() -> str:
    comm = _comm()
    buffer = torch.ones(comm.size)
    if comm.rank == 1:
        time.sleep(3)
        return ""
    try:
        comm.all_reduce(buffer).wait_host(timedelta(milliseconds=300))
    except _C.CommError as error:
        return str(error)
    return "no CommError"


def _recorded() -> list[tuple[str, int]]:
    made = []

    def record(comm: _C.Comm) -> _C.Comm:
        made.append(_C.make_recording_comm(comm))
        return made[-1]

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with wrap_comms(record):
        comm = comm_for(mesh)
        assert comm_for(mesh) is comm
    assert comm_for(mesh) is not comm
    assert comm_for(mesh) is comm_for(mesh)
    assert len(made) == 1
    comm.all_reduce(torch.ones(3)).order_after()
    return [(r.verb, r.numel) for r in made[0].records()]


_EXIT = """
import os, sys
import torch, torch.distributed as dist
from raggedfsdp import _C
folder, how = sys.argv[1:]
pid = os.fork()
rank = int(pid == 0)
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
comm = _C.make_process_group_comm(dist.group.WORLD.group_name)
t = torch.ones(1000)
comm.all_reduce(t).order_after()
assert t[0] == 2
if how == "in flight" and rank == 0:
    work = comm.all_reduce(torch.ones(1 << 20))     # rank 1 never comes
if how == "forked":
    child = os.fork()
    if child == 0:
        del comm
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
if how == "destroyed":
    dist.destroy_process_group()
if rank == 0:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize("how", ["plainly", "in flight", "forked", "destroyed"])
def test_processes_end(how: str, tmp_path: Path) -> None:
    """Whatever is still alive or in flight at the end of the interpreter: no hang, no crash."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", _EXIT, str(tmp_path), how], env=env, timeout=60, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


_FAKE = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from raggedfsdp import _C
dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=64)
comm = _C.make_process_group_comm(dist.group.WORLD.group_name)
assert (comm.name, comm.rank, comm.size) == ("fake", 3, 64)
t = torch.ones(640)
for work in (comm.all_gather(t), comm.reduce_scatter(t, t[30:40]), comm.all_reduce(t)):
    work.order_after()
"""


def test_other_process_groups_use_their_own_collectives() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", _FAKE], env=env, timeout=60, check=True)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_contract(world: int) -> None:
    run_ranks(_contract, world)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_contract_of_own_collectives(world: int) -> None:
    run_ranks(_contract_of_own_collectives, world)


def test_sums_in_rank_order() -> None:
    want = ((0.1 + 0.2) + 0.3) + 1e16
    assert run_ranks(_sums_in_rank_order, 4) == [[want] * 4] * 4


def test_several_comms_on_one_group() -> None:
    run_ranks(_several_comms_on_one_group, 2)


@pytest.mark.parametrize("world", [2, 3])
def test_contract_under_hostility(world: int) -> None:
    assert run_ranks(_contract_under_hostility, world) == [0] * world


@pytest.mark.parametrize("world", [1, 2])
def test_many_in_flight(world: int) -> None:
    run_ranks(_many_in_flight, world)


@pytest.mark.parametrize("world", [1, 2])
def test_usage_errors(world: int) -> None:
    run_ranks(_usage_errors, world)


@pytest.mark.parametrize("verb", ["all_gather", "all_reduce"])
def test_a_dead_peer_is_a_comm_error(verb: str) -> None:
    messages = run_ranks(_peer_dies, 3, 60, verb, dying=[1])
    assert "rank 1" in messages[0]
    assert "rank 1" in messages[2]


def test_a_late_peer_is_a_comm_error() -> None:
    assert "rank 1" in run_ranks(_late_peer, 2, 60, dying=[1])[0]


def test_wrap_comms_sees_every_call() -> None:
    assert run_ranks(_recorded, 2) == [[("all_reduce", 3)]] * 2


def test_unknown_group() -> None:
    with pytest.raises(_C.UsageError, match="no process group is registered as 'nobody'"):
        _C.make_process_group_comm("nobody")
