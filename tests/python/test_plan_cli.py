"""`raggedfsdp plan`, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from raggedfsdp.cli.main import main
from raggedfsdp.cli.plan_run import shapes_of, split

pytestmark = pytest.mark.timeout(120)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["raggedfsdp", "plan", *map(str, args)])
        monkeypatch.setenv("COLUMNS", "160")
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capfd.readouterr()
        return int(exit_.value.code or 0), out, err

    return run


def test_json_has_the_keys_that_programs_read(run: Run) -> None:
    code, out, _ = run("--model", "llama-tiny", "--devices", 4, "--rows", 2, "--json")
    report = json.loads(out)
    assert code == 0
    assert list(report) == ["model", "devices", "rows", "max_buckets", "padding", "plan_ms", "units"]
    assert (report["model"], report["devices"], report["rows"], report["max_buckets"]) == ("llama-tiny", 4, 2, 4)
    root, layer = report["units"]
    assert (root["unit"], root["repeat"], layer["unit"], layer["repeat"]) == ("root", 1, "model.layers.0", 4)
    assert list(layer) == ["unit", "repeat", "padding", "buckets"]
    bucket = layer["buckets"][0]
    assert list(bucket) == ["tensors", "order", "shard_numel", "padding", "bound_padding"]
    assert "self_attn.q_proj.weight" in bucket["tensors"]
    assert 0 <= bucket["bound_padding"] <= bucket["padding"] < 1
    numel = bucket["shard_numel"] * 4 / (1 + bucket["padding"])
    assert numel == pytest.approx(2 * 128 * 128 + 2 * 64 * 128 + 3 * 344 * 128 + 2 * 128)


def test_a_models_padding_is_its_units(run: Run) -> None:
    _, out, _ = run("--model", "deepseek-tiny", "--devices", "3,64", "--rows", 16, "--json")
    for report in json.loads(out):
        numel = [
            u["repeat"] * sum(b["shard_numel"] * report["devices"] / (1 + b["padding"]) for b in u["buckets"])
            for u in report["units"]
        ]
        mean = sum(n * u["padding"] for n, u in zip(numel, report["units"], strict=True)) / sum(numel)
        # A unit of several buckets weighs as its useful elements, which the sum above gives per bucket.
        assert report["padding"] == pytest.approx(mean)


def test_a_real_layer_is_split_and_proved(run: Run) -> None:
    code, out, _ = run("--model", "llama3-70b", "--devices", 64, "--rows", 16, "--json")
    layer = json.loads(out)["units"][1]
    assert (code, layer["repeat"], len(layer["buckets"])) == (0, 80, 3)
    assert layer["padding"] < 0.001
    assert all(b["padding"] == b["bound_padding"] for b in layer["buckets"])
    _, out, _ = run("--model", "llama3-70b", "--devices", 64, "--rows", 16, "--max-buckets", 1, "--json")
    assert json.loads(out)["units"][1]["padding"] == pytest.approx(0.0294, abs=1e-4)


def test_the_table_folds_layers_and_blames_blocks(run: Run) -> None:
    code, out, _ = run("--model", "llama-tiny", "--devices", 512, "--rows", 64)
    assert code == 0
    assert "model.layers.0 x 4" in out
    assert "padding" in out.splitlines()[0]
    assert "would do" in out


def test_a_policy_is_a_function_of_name_and_shape(run: Run, tmp_path: Path) -> None:
    policy = tmp_path / "policy.json"
    policy.write_text(json.dumps({"*q_proj*": "tensor", "*": "elements"}))
    code, out, _ = run("--model", "llama-tiny", "--devices", 8, "--policy", policy, "--json")
    report = json.loads(out)
    assert (code, report["rows"]) == (0, None)
    # A layer is 8 x 24,704 or so: a q_proj that stays whole makes every shard as large as itself.
    assert report["units"][1]["buckets"][0]["shard_numel"] >= 128 * 128


def test_experts_apart_have_the_same_elements() -> None:
    moe = shapes_of("deepseek-tiny", split_experts=False)[2]
    apart = split(moe)
    shapes = dict(apart.tensors)
    assert shapes["mlp.experts.7.gate_proj.weight"] == shapes["mlp.experts.0.up_proj.weight"] == (64, 128)
    assert shapes["mlp.experts.3.down_proj.weight"] == (128, 64)
    assert len(apart.tensors) == len(moe.tensors) - 2 + 3 * 8


@pytest.mark.parametrize("devices", [8, 1024])
def test_the_picture_is_drawn_for_few_and_for_many_devices(run: Run, tmp_path: Path, devices: int) -> None:
    picture = tmp_path / "unit.svg"
    code, _, err = run("--model", "llama-tiny", "--devices", devices, "--rows", 1, "--max-buckets", 1, "--svg", picture)
    assert code == 0
    assert str(picture) in err
    texts = [e.text or "" for e in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    rows = [t for t in texts if t.startswith("device")]
    assert len(rows) == 8 if devices == 8 else 2 <= len(rows) <= 16
    assert any("self_attn.q_proj.weight" in t for t in texts)
    assert picture.stat().st_size < 300_000


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_sweep_is_plotted(run: Run, tmp_path: Path, suffix: str, magic: bytes) -> None:
    plot = tmp_path / f"sweep.{suffix}"
    assert run("--model", "llama-tiny", "--sweep", plot)[0] == 0
    assert plot.read_bytes().startswith(magic)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "--model"),
        (["--model", "llama-tiny"], "--devices: say how many"),
        (["--model", "llama-tiny", "--devices", "0"], "--devices: 0 must be numbers from 1"),
        (["--model", "llama-tiny", "--devices", "8,,9"], "--devices: 8,,9"),
        (["--model", "llama-tiny", "--devices", "8", "--rows", "0"], "--rows"),
        (["--model", "llama-tiny", "--devices", "8", "--rows", "1", "--policy", "x"], "give one of them"),
        (["--model", "llama-tiny", "--devices", "8", "--policy", "/no/such"], "cannot read /no/such"),
        (["--model", "no-such", "--devices", "8"], "no preset"),
        (["--model", "llama-tiny", "--devices", "8", "--svg", "/no/such/x.svg"], "cannot write /no/such/x.svg"),
        (["--model", "llama-tiny", "--devices", "8", "--svg", "x.svg", "--unit", "nobody"], "no unit is called nobody"),
        (["--model", "llama-tiny", "--sweep", "x.txt"], "must end in .png"),
        (["--model", "llama-tiny", "--devices", "8", "--collective-cost", "nan"], "--collective-cost"),
        (["--model", "llama-tiny", "--devices", "8", "--limit", "inf"], "--limit"),
        (["--model", "llama-tiny", "--devices", "9" * 30], "--devices"),
    ],
)
def test_wrong_input_is_one_line(run: Run, args: list[str], message: str) -> None:
    code, _, err = run(*args)
    assert code == 2
    assert message in err
    assert err.startswith("raggedfsdp: ")
    assert err.count("\n") == 1


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_documents_tables_are_current() -> None:
    import subprocess
    import sys

    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, root / "tools" / "planner_tables.py", "--check"], check=True, timeout=280)
