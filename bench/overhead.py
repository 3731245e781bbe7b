"""The engine's own host time per unit and step, with a comm that moves nothing, beside FSDP2 and the unsharded model.

    python bench/overhead.py

32 units of 4, 16 and 64 small parameters under torch's fake process group. All three models take turns in one process; what the
unsharded one needs (autograd and the modules themselves) is subtracted from the others. The ratio is of what remains.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ENGINES = ("unsharded", "raggedfsdp", "fsdp2")


class Tiny(nn.Module):
    """Many parameters and hardly any compute: a chain of additions."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(8) for _ in range(parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for w in self.weights:
            x = x + w
        return x


def build(engine: str, units: int, parameters: int) -> nn.Module:
    model = nn.Sequential(*(Tiny(parameters) for _ in range(units)))
    if engine == "unsharded":
        return model
    shard: Callable[..., Any]
    if engine == "raggedfsdp":
        from raggedfsdp import fully_shard as shard
    else:
        from torch.distributed.fsdp import fully_shard as shard
    for unit in model:
        shard(unit)
    shard(model)
    return model


def step(model: nn.Module, x: torch.Tensor) -> float:
    begin = time.perf_counter()
    model(x).sum().backward()
    seconds = time.perf_counter() - begin
    for p in model.parameters():
        p.grad = None
    return seconds


def measure(options: argparse.Namespace, parameters: int) -> dict[str, float]:
    models = {engine: build(engine, options.units, parameters) for engine in ENGINES}
    x = torch.zeros(8, requires_grad=True)
    times: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    for i in range(options.warmup + options.steps):
        for engine in ENGINES if i % 2 == 0 else reversed(ENGINES):
            seconds = step(models[engine], x)
            if i >= options.warmup:
                times[engine].append(seconds)
    medians = {engine: statistics.median(t) for engine, t in times.items()}
    return {engine: 1e6 * (medians[engine] - medians["unsharded"]) / options.units for engine in ENGINES[1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=32)
    parser.add_argument("--parameters", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--profile", action="store_true", help="print where the engine's Python time goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    print("own host time per unit and step, us (beyond the unsharded model)")
    for parameters in options.parameters:
        own = measure(options, parameters)
        ratio = own["fsdp2"] / own["raggedfsdp"]
        per_parameter = own["raggedfsdp"] / parameters
        print(
            f"{parameters:3d} parameters: raggedfsdp {own['raggedfsdp']:7.0f}  fsdp2 {own['fsdp2']:7.0f}  "
            f"ratio {ratio:4.1f}  raggedfsdp per parameter {per_parameter:5.1f}"
        )
    if options.profile:
        profile(options)
    dist.destroy_process_group()


def profile(options: argparse.Namespace) -> None:
    import cProfile
    import pstats

    model = build("raggedfsdp", options.units, 16)
    x = torch.zeros(8, requires_grad=True)
    for _ in range(options.warmup):
        step(model, x)
    with cProfile.Profile() as profiler:
        for _ in range(options.steps):
            step(model, x)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
