"""What a trace of steps in their steady state shows: the next unit's gather and the last unit's reduction run beside compute,
and the host never waits for the device."""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_support import DEVICE, Late, cuda_mesh
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from models_for_tests import shard_children
from ranks import run_ranks

try:
    import ragged_delayed_comm  # noqa: F401  (after torch, whose libraries it needs)
except ImportError as error:
    pytest.skip(f"tests/gpu/run builds the late comm: {error}", allow_module_level=True)

UNITS = 4
STEPS = 3
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cuStreamSynchronize")


class Large(nn.Module):
    """Enough arithmetic per unit to hide a collective behind."""

    def __init__(self, width: int = 4096) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(UNITS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def milliseconds(fn: Any) -> float:
    """The device's time for fn, the median of five."""
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        fn()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


class Step:
    def __init__(self) -> None:
        mesh = cuda_mesh("gloo")
        self.x = torch.randn(8192, 4096, device=DEVICE)
        layer = nn.Linear(4096, 4096, bias=False, device=DEVICE)
        with torch.no_grad():
            compute = milliseconds(lambda: layer(self.x))
        million = milliseconds(lambda: torch.cuda._sleep(10_000_000)) / 10
        cycles = int(compute / 2 / million * 1_000_000)  # half of a unit's forward
        names = [f"blocks.{i}" for i in range(UNITS)]
        self.late = Late(Large, shard_children(*names, mesh=mesh, reshard_after_forward=True), cycles)
        for unit in self.late.model.modules():
            if (state := unit.__dict__.get("_ragged_unit")) is not None:
                state.context.set_poison(False)  # filling memory takes time of its own
        self.optimizer = torch.optim.AdamW(self.late.model.parameters(), 1e-4, foreach=True)

    def __call__(self) -> None:
        self.late.model(self.x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(self.late.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def traced(step: Step) -> list[dict[str, Any]]:
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function("steady"):
            for _ in range(STEPS):
                step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [e for e in events if e.get("ph") == "X"]


def host_waits(events: list[dict[str, Any]]) -> list[str]:
    (steady,) = (e for e in events if e["name"] == "steady" and e.get("cat") in ("user_annotation", "cpu_op"))
    begin, end = steady["ts"], steady["ts"] + steady["dur"]
    calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and begin <= e["ts"] <= end]
    assert len(calls) > STEPS * UNITS, "the trace shows no calls of the runtime"
    return [e["name"] for e in calls if e["name"] in WAITS]


def shares_beside_compute(events: list[dict[str, Any]]) -> list[float]:
    """Of each delay on the comm's stream, the share during which the compute stream was busy."""
    kernels = [e for e in events if e.get("cat") == "kernel"]
    delays = [e for e in kernels if "spin" in e["name"]]
    assert delays, f"no delay in the trace: {sorted({e['name'][:40] for e in kernels})}"
    stream = delays[0]["args"]["stream"]
    compute = [e for e in kernels if e["args"]["stream"] != stream]
    shares = []
    for delay in delays:
        begin, end = delay["ts"], delay["ts"] + delay["dur"]
        busy = sum(max(0.0, min(end, e["ts"] + e["dur"]) - max(begin, e["ts"])) for e in compute)
        shares.append(busy / delay["dur"])
    return shares


def _overlap() -> None:
    step = Step()
    events = traced(step)
    shares = shares_beside_compute(events)
    # A step gathers each unit twice (the outermost has no parameters), reduces each once, and exchanges which were used.
    assert len(shares) == STEPS * (3 * UNITS + 1), f"{len(shares)} collectives in {STEPS} steps"
    hidden = sum(share > 0.5 for share in shares)
    # All but the first gather of forward and of backward, and the last reduction, have compute to hide behind.
    assert hidden >= STEPS * (2 * (UNITS - 1) + UNITS - 2), [round(share, 2) for share in shares]
    assert step.late.comm.touched() == 0


def _no_waits() -> None:
    step = Step()
    waits = host_waits(traced(step))
    assert not waits, f"the host waited: {waits}"
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("body", [_overlap, _no_waits], ids=lambda body: body.__name__[1:])
def test_trace(body: Any) -> None:
    run_ranks(body, 1, 110)
