"""Wrong input ends before any rank starts: one line that names the cause, exit code 2."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from raggedfsdp.cli import checks
from raggedfsdp.cli.main import main
from raggedfsdp.presets import PRESETS

pytestmark = pytest.mark.timeout(60)
Run = Callable[..., str]


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs `raggedfsdp train` with these arguments and returns its one line."""

    def no_process(*args: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr("raggedfsdp.cli.run.LocalRanks", no_process)

    def run(*args: object) -> str:
        monkeypatch.setattr("sys.argv", ["raggedfsdp", "train", *map(str, args)])
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capfd.readouterr()
        assert (exit_.value.code, out) == (2, "")
        assert err.startswith("raggedfsdp: ")
        assert err.count("\n") == 1
        return err

    return run


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--bogus"], "No such option"),
        (["--steps", "many"], "'--steps'"),
        (["--steps", "0"], "'--steps'"),
        (["--ranks", "-1"], "'--ranks'"),
        (["--sequence", "1"], "'--sequence'"),
        (["--lr", "-1"], "'--lr'"),
        (["--lr", "nan"], "--lr"),
        (["--precision", "fp8"], "'--precision'"),
        (["--model", "lama-tiny"], "presets are llama-tiny"),
        (["--data", "/no/such/place"], "there is no /no/such/place"),
        (["--sequence", "4096"], "takes 2048 tokens at most, not 4096"),
        (["--ranks", "5000"], "--ranks 5000"),
        (["--json", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
        (["--json", "/"], "is a folder"),
        (["--device", "abacus"], "--device abacus: torch"),
        (["--device", "meta"], "--device meta: torch"),
        (["--device", "cuda", "--ranks", "16"], "--device cuda"),
        (["--batch", "1000000000"], "the logits of 4 ranks alone need"),
        (["surplus"], "surplus"),
    ],
)
def test_message(wrong: Run, args: list[str], message: str) -> None:
    assert message in wrong(*args)


def test_files(wrong: Run, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    assert "it is empty" in wrong("--data", empty)
    short = tmp_path / "short"
    short.write_text("brief")
    assert "holds 5 bytes, fewer than one sequence of 128" in wrong("--data", short)
    bad = tmp_path / "bad.json"
    bad.write_text("{nonsense")
    assert f"{bad} is not JSON: line 1, column 2" in wrong("--model", bad)
    bad.write_text(json.dumps({**PRESETS["llama-tiny"], "vocab_size": 100}))
    assert "vocab_size is 100" in wrong("--model", bad)


def test_without_a_command_it_is_help(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["raggedfsdp"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0
    assert "train" in capfd.readouterr().out


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(wrong: Run, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "no permission" in wrong("--json", tmp_path / "x.json")


@pytest.mark.parametrize("model", ["llama3-70b", "deepseek-v3"])
def test_a_model_that_does_not_fit(wrong: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_free_bytes", lambda: 20 * 2**30)
    assert "and 20 GiB are free" in wrong("--model", model)


def test_ranks_of_torchrun(wrong: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "torchrun started 2 ranks; leave --ranks out" in wrong("--ranks", "4")


def test_help_names_every_option(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["raggedfsdp", "train", "--help"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0
    text = capfd.readouterr().out
    options = "model data ranks steps batch sequence lr precision accumulate reshard-after-forward seed json verify"
    assert all(f"--{option} " in text for option in options.split())
