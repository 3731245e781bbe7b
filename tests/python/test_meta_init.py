"""Models made on the meta device, sharded there, materialised, initialised and retyped: as the unsharded model would be."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from models_for_tests import shard_children, shard_root
from raggedfsdp import MixedPrecisionPolicy, UsageError, full_state_dict, fully_shard, load_full_state_dict
from raggedfsdp._state import units_in
from raggedfsdp.tensor import RaggedDTensor, distribute_tensor
from ranks import run_ranks

WIDTH = 6
Shard = Callable[[Any], Any]


class Rotary(nn.Module):
    """A parameter of its own, a buffer that is saved and one that is not; counts how often it was initialised."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("seen", torch.empty(2, dtype=torch.long))
        self.register_buffer("angles", torch.empty(WIDTH), persistent=False)
        self.resets = 0
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.gain, 0.5, 1.5)
        self.seen.copy_(torch.arange(2))
        self.angles.copy_(torch.arange(WIDTH).div(WIDTH))
        self.resets += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain + self.angles.to(x.dtype) * self.seen.sum()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()
        self.up = nn.Linear(WIDTH, 5)
        self.norm = nn.LayerNorm(5)
        self.down = nn.Linear(5, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(self.rotary(x)))))


class Model(nn.Module):
    """Tied embeddings around two layers, and a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale, 1.0, 0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale


def grouped(model: Any) -> None:
    fully_shard([model.embedding, model.head])
    fully_shard(list(model.layers))
    fully_shard(model)


WRAPPINGS: dict[str, Shard] = {
    "root": shard_root(),
    "layers": shard_children("layers.0", "layers.1"),
    "nested": shard_children("layers.0.up", "layers.0", "layers.1.rotary", "layers.1"),
    "grouped": grouped,
    "tied in two units": shard_children("embedding", "layers.0", "head"),
}


def reset_all(model: nn.Module, seed: int = 5) -> None:
    torch.manual_seed(seed)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def on_meta(dtype: torch.dtype = torch.float32) -> Any:
    with torch.device("meta"):
        return Model().to(dtype)


def reference(dtype: torch.dtype = torch.float32) -> Any:
    model = on_meta(dtype)
    model.to_empty(device="cpu")
    model.head.weight = model.embedding.weight  # torch unties what it materialises; sharded parameters stay tied
    reset_all(model)
    return model


def materialised(shard: Shard, dtype: torch.dtype = torch.float32) -> Any:
    model = on_meta(dtype)
    shard(model)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    reset_all(model)
    return model


def same(came: nn.Module, want: nn.Module) -> None:
    """Names, values, dtypes and ties."""
    pairs = list(zip(came.named_parameters(), want.named_parameters(), strict=True))
    for (name, p), (other, q) in pairs:
        assert name == other
        assert isinstance(p, RaggedDTensor), name
        assert p.dtype == q.dtype, name
        assert torch.equal(p.full_tensor(), q), name
    for (name, b), (other, c) in zip(came.named_buffers(), want.named_buffers(), strict=True):
        assert name == other
        assert b.dtype == c.dtype
        assert torch.equal(b, c), name
    assert came.embedding.weight is came.head.weight


def tokens(step: int, rank: int) -> torch.Tensor:
    return (torch.arange(4) * 3 + 2 * step + rank) % 10


def close(name: str, came: Any, want: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(came.full_tensor(), want, rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}")


def train(model: Any, oracle: Any, tolerance: float, steps: int = 3) -> None:
    """AdamW on both; the oracle sees every rank's batch. Gradients and parameters agree."""
    rank, world = dist.get_rank(), dist.get_world_size()
    optimisers = [torch.optim.AdamW(m.parameters(), 0.05) for m in (model, oracle)]
    for step in range(steps):
        for r in range(world):
            (oracle(tokens(step, r)).square().sum() / world).backward()
        model(tokens(step, rank)).square().sum().backward()
        for (name, p), q in zip(model.named_parameters(), oracle.parameters(), strict=True):
            assert p.grad.dtype == q.grad.dtype
            close(f"{name}.grad", p.grad, q.grad, tolerance)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
    for (name, p), q in zip(model.named_parameters(), oracle.parameters(), strict=True):
        close(name, p, q, tolerance)


def _initialised(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model = materialised(WRAPPINGS[name], dtype)
        same(model, reference(dtype))
        assert [m.resets for m in model.modules() if isinstance(m, Rotary)] == [2, 2]  # once on meta, once for real
        assert list(model.state_dict()) == list(reference(dtype).state_dict())
    train(model, reference(torch.float64), 1e-9)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", WRAPPINGS)
def test_initialised_as_the_unsharded_model(name: str, world: int) -> None:
    run_ranks(_initialised, world, 60, name)


def _mixed_precision() -> None:
    """The masters are initialised, not the copies that compute sees."""
    for reduce_dtype in (torch.float32, None):
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
        model = materialised(shard_children("layers.0", "layers.1", mp_policy=policy))
        same(model, reference())
        oracle = reference().bfloat16()
        with torch.no_grad():
            assert torch.equal(model(tokens(0, 0)), oracle(tokens(0, 0)))
        model(tokens(0, dist.get_rank())).sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def _sharded_on_meta() -> None:
    """fully_shard itself under the meta device, its mesh included; an optimiser made before there are values."""
    with torch.device("meta"):
        model: Any = Model()
        shard_children("layers.0", "layers.1")(model)
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    model.to_empty(device="cpu")
    reset_all(model)
    oracle = reference()
    same(model, oracle)
    for r in range(dist.get_world_size()):
        (oracle(tokens(0, r)).sum() / dist.get_world_size()).backward()
    model(tokens(0, dist.get_rank())).sum().backward()
    optimiser.step()
    torch.optim.SGD(oracle.parameters(), 0.1).step()
    for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q)


def _unit_by_unit() -> None:
    """Each unit materialised and initialised in turn; the model's own parameter is replaced by a plain one."""
    model = on_meta()
    shard_children("embedding", "layers.0", "layers.1", "head")(model)
    oracle = reference()
    torch.manual_seed(5)
    Model.reset_parameters(oracle)
    for name in ("embedding", "layers.0", "layers.1", "head"):
        unit = model.get_submodule(name)
        unit.to_empty(device="cpu")
        reset_all(unit)
        reset_all(oracle.get_submodule(name))
    model.scale = nn.Parameter(oracle.scale.detach().clone())
    model(tokens(0, 0))
    same(model, oracle)
    train(model.double(), oracle.double(), 1e-9)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_paths_to_values(world: int) -> None:
    run_ranks(_mixed_precision, world, 60)
    run_ranks(_sharded_on_meta, world, 60)
    run_ranks(_unit_by_unit, world, 60)


def _not_materialised() -> None:
    model = on_meta()
    shard_children("layers.0")(model)
    with pytest.raises(UsageError, match=r"still on the meta device.*to_empty"):
        model(tokens(0, 0))
    model.layers[0].to_empty(device="cpu")
    with pytest.raises(UsageError, match="still on the meta device"):
        model(tokens(0, 0))
    model.to_empty(device="cpu")
    load_full_state_dict(model, reference().state_dict())
    for module in model.modules():
        if isinstance(module, Rotary):
            module.reset_parameters()
    load_full_state_dict(model, reference().state_dict())
    same(model, reference())


def _loaded() -> None:
    """A whole state dict on rank 0 only, and assigned shards in several incomplete state dicts."""
    want = reference()
    for rank0_only in (True, False):
        model = on_meta()
        shard_children("layers.0", "layers.1")(model)
        model.to_empty(device="cpu")
        state = want.state_dict() if dist.get_rank() == 0 or not rank0_only else {}
        for module in model.modules():
            if isinstance(module, Rotary):
                module.reset_parameters()
        load_full_state_dict(model, state, rank0_only=rank0_only)
        same(model, want)


def _assigned(piece_by_piece: bool) -> None:
    """Shards of a whole state dict become the parameters themselves, all at once or a key at a time."""
    want = reference()
    model = on_meta()
    shard_children("layers.0", "layers.1")(model)
    whole, shards = want.state_dict(), {}
    for key, shard in model.state_dict().items():
        shards[key] = whole[key]
        if isinstance(shard, RaggedDTensor):
            shards[key] = distribute_tensor(whole[key], shard.device_mesh, shard.placements[0])
    for part in [{key: value} for key, value in shards.items()] if piece_by_piece else [shards]:
        model.load_state_dict(part, strict=not piece_by_piece, assign=True)
    for module in model.modules():
        if isinstance(module, Rotary):
            module.angles = torch.arange(WIDTH).div(WIDTH)
    model(tokens(0, 0))
    same(model, want)
    train(model.double(), reference().double(), 1e-9)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_loaded_instead(world: int) -> None:
    run_ranks(_not_materialised, world, 60)
    run_ranks(_loaded, world, 60)
    run_ranks(_assigned, world, 60, False)


def test_assigned_piece_by_piece() -> None:
    run_ranks(_assigned, 2, 60, True)


# --- retyped afterwards ---

CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "double": lambda m: m.double(),
    "to dtype": lambda m: m.to(torch.float64),
    "to device and dtype": lambda m: m.to("cpu", torch.float64),
    "there and back": lambda m: m.double().float().double(),
    "_apply": lambda m: m._apply(lambda t: t.double() * 1.0 if t.is_floating_point() else t),
    "unit by unit": lambda m: [part.double() for part in (*m.layers, m)][-1],
    "through half": lambda m: m.half().double(),
}


def _converted(name: str, wrappings: tuple[str, ...]) -> None:
    convert = CONVERSIONS[name]
    for wrapping, trained in itertools.product(wrappings, (False, True)):
        model, oracle = materialised(WRAPPINGS[wrapping]), reference()
        if trained:
            train(model, oracle, 1e-4)
            load_full_state_dict(model, oracle.state_dict())
        model, oracle = convert(model), convert(oracle)
        same(model, oracle)
        train(model, oracle, 1e-9)
        assert all(b.shard_dtype == torch.float64 for u in units_in(model) for b in u.core.buckets)


@pytest.mark.parametrize(("name", "world"), [("double", 1), ("double", 3), *((name, 2) for name in CONVERSIONS)])
def test_converted_afterwards(name: str, world: int) -> None:
    run_ranks(_converted, world, 60, name, ("nested",) if world == 2 else ("layers",))


def test_units_of_several_modules_converted_afterwards() -> None:
    run_ranks(_converted, 2, 60, "double", ("grouped",))


def _converted_with_gradients() -> None:
    """Gradients are converted too, and the next backward adds to them."""
    model, oracle = materialised(WRAPPINGS["layers"]), reference()
    world = dist.get_world_size()
    for step in range(2):
        for r in range(world):
            (oracle(tokens(step, r)).sum() / world).backward()
        model(tokens(step, dist.get_rank())).sum().backward()
        model.double()
        oracle.double()
        for (name, p), q in zip(model.named_parameters(), oracle.parameters(), strict=True):
            assert p.grad is not None, name
            assert p.grad.dtype == torch.float64, name
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-5, atol=1e-5)
    assert set(full_state_dict(model)) == set(oracle.state_dict())


def _partly_converted() -> None:
    """One parameter of a bucket in another dtype than its neighbours is refused, by name."""
    model = materialised(WRAPPINGS["root"])
    model.layers[0].up.double()
    with pytest.raises(UsageError, match=r"layers\.0\.up\.weight|layers\.0\.rotary\.gain|embedding\.weight"):
        model(tokens(0, 0))
    model.float()
    same(model, reference())
    train(model, reference(), 1e-4)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_and_parts(world: int) -> None:
    run_ranks(_converted_with_gradients, world, 60)
    run_ranks(_partly_converted, world, 60)
