"""`raggedfsdp train` as a user starts it: processes, signals, exit codes. No process may be left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)
SMALL = ["--ranks", "2", "--batch", "1", "--sequence", "32"]
ENDLESS = [*SMALL, "--steps", "1000000"]


def _as_in_a_terminal() -> None:
    # Shells start what runs in the background deaf to Ctrl-C, which these tests may be.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Command:
    """A running `raggedfsdp train` in a process group of its own, like a terminal's."""

    def __init__(self, *args: str) -> None:
        command = [sys.executable, "-m", "raggedfsdp", "train", *args]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_as_in_a_terminal,
        )
        self.ranks: list[int] = []

    def wait_for_ranks(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "tokens a step" in line:
                break
        self.ranks = wait_until(lambda: children(self._process.pid) or None)

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def interrupt_all(self) -> None:
        os.killpg(self._process.pid, signal.SIGINT)

    def result(self, timeout: float = 60) -> tuple[int, str, list[str]]:
        """Exit code, what was printed, and the lines of errors."""
        out, err = self._process.communicate(timeout=timeout)
        return self._process.returncode, out, err.splitlines()

    def kill_group(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(p) for p in text.split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], object], timeout: float = 30) -> object:
    until = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.02)
    return value


@pytest.fixture
def start() -> Iterator[Callable[..., Command]]:
    started: list[Command] = []

    def make(*args: str) -> Command:
        started.append(Command(*args))
        return started[-1]

    yield make
    for command in started:
        command.kill_group()
        assert not [pid for pid in command.ranks if alive(pid)], "a rank is left"


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))


def test_trains_and_reports(start: Callable[..., Command], tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    code, out, err = start(*SMALL, "--steps", "12", "--lr", "3e-3", "--verify", "--json", str(path)).result()
    assert (code, err) == (0, [])
    assert "llama-tiny, 791,680 parameters, fp32, on 2 ranks" in out
    assert re.search(r"step 12/12  loss \d", out)
    for word in ("model.layers.0", "padding", "gathered pool", "lm_head.weight", "within tolerance"):
        assert word in out
    values = json.loads(path.read_text())
    assert len(values["loss"]) == 12
    assert values["loss"][-1] < values["loss"][0] - 0.3
    assert values["tokens_per_s"] > 0
    assert sum(u["parameters"] for u in values["units"]) == values["parameters"] == 791_680
    assert [u["unit"].partition(" ")[0] for u in values["units"]] == [*(f"model.layers.{i}" for i in range(4)), "root"]
    assert all(u["shard_numel"] * 2 == u["parameters"] + u["padding_numel"] for u in values["units"])
    assert values["memory"]["peak_bytes"] >= values["memory"]["shard_bytes"] >= 4 * 791_680 / 2
    assert values["verify"]["passed"] is True
    assert not list((tmp_path / "tmp").glob("raggedfsdp-*")), "temporary files are left"


def test_a_killed_rank_is_named(start: Callable[..., Command]) -> None:
    command = start(*ENDLESS)
    command.wait_for_ranks()
    time.sleep(1)
    os.kill(command.ranks[1], signal.SIGKILL)
    code, _, err = command.result(20)
    assert code == 1
    assert len(err) == 1
    assert re.match(r"raggedfsdp: rank 1 was killed by SIGKILL (before the first|after) step", err[0])


@pytest.mark.parametrize("group", [True, False])
def test_ctrl_c(start: Callable[..., Command], group: bool) -> None:
    command = start(*ENDLESS)
    command.wait_for_ranks()
    time.sleep(0.5)
    command.interrupt_all() if group else command.send(signal.SIGINT)
    code, _, err = command.result(20)
    assert (code, err) == (130, ["raggedfsdp: interrupted"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_asked_to_end(start: Callable[..., Command], number: int) -> None:
    command = start(*ENDLESS)
    command.wait_for_ranks()
    command.send(number)
    code, _, err = command.result(20)
    assert (code, err) == (130, ["raggedfsdp: interrupted"])


def test_ranks_end_with_a_killed_parent(start: Callable[..., Command]) -> None:
    command = start(*ENDLESS)
    command.wait_for_ranks()
    command.send(signal.SIGKILL)
    assert command.result(20)[0] == -signal.SIGKILL
    wait_until(lambda: not any(alive(pid) for pid in command.ranks), 10)


def test_a_loss_that_is_no_number(start: Callable[..., Command]) -> None:
    code, _, err = start(*SMALL, "--lr", "1e20", "--steps", "50").result()
    assert code == 2
    assert len(err) == 1
    assert "raggedfsdp: the loss is nan at step" in err[0]
    assert "smaller --lr" in err[0]


def torchrun(*args: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*command, "-m", "raggedfsdp", "train", *args], capture_output=True, text=True, timeout=100, check=False
    )


def test_under_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = torchrun("--steps", "2", "--batch", "1", "--sequence", "32", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("on 2 ranks") == 1
    assert json.loads(path.read_text())["ranks"] == 2


def test_wrong_input_under_torchrun_is_said_once() -> None:
    done = torchrun("--model", "nothing")
    assert done.returncode != 0
    assert (done.stdout + done.stderr).count("no preset and no file is called nothing") == 1
