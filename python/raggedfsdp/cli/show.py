"""What a person sees of a training: a heading, a progress bar, the result."""

from __future__ import annotations

from rich import progress as bars
from rich.console import Console

from raggedfsdp.cli.tables import memory_table, units_table, verdict, verify_table
from raggedfsdp.cli.words import count, size
from raggedfsdp.data import Corpus
from raggedfsdp.recipe import TrainOptions
from raggedfsdp.report import StepReport, TrainReport

console = Console(highlight=False)
_LINES_WITHOUT_TERMINAL = 10


def heading(options: TrainOptions, ranks: int, parameters: int, corpus: Corpus) -> None:
    tokens = options.batch * options.sequence * options.accumulate * ranks
    console.print(
        f"[bold]{options.model}[/], {count(parameters)} parameters, {options.precision}, on {ranks} rank{'s' * (ranks != 1)}"
        f"\n{tokens:,} tokens a step from {corpus.name} ({size(corpus.size_bytes)})"
    )


class Progress:
    """A bar with loss and tokens/s on a terminal, ten lines elsewhere."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._bar = bars.Progress(
            bars.TextColumn("step {task.completed}/{task.total}"),
            bars.BarColumn(bar_width=30),
            bars.TextColumn("loss {task.fields[loss]}"),
            bars.TextColumn("{task.fields[speed]} tokens/s"),
            bars.TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps, loss="-", speed="-")
        self._recent = 0.0

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def step(self, report: StepReport) -> None:
        speed = report.tokens / max(report.seconds, 1e-9)
        # The first step also allocates, so it does not count; then a mean that forgets slowly.
        self._recent = speed if report.step <= 2 else 0.8 * self._recent + 0.2 * speed
        self._bar.update(self._task, completed=report.step, loss=f"{report.loss:.4f}", speed=f"{self._recent:,.0f}")
        every = max(1, self._steps // _LINES_WITHOUT_TERMINAL)
        if not console.is_terminal and (report.step % every == 0 or report.step == self._steps):
            line = f"step {report.step}/{self._steps}  loss {report.loss:.4f}  {self._recent:,.0f} tokens/s"
            console.print(line)


def result(report: TrainReport) -> None:
    first, last = report.steps[0], report.steps[-1]
    console.print(f"loss {first.loss:.4f} -> {last.loss:.4f}, {report.tokens_per_s:,.0f} tokens/s\n")
    console.print(units_table(report.units), "", memory_table(report.memory), "")
    if report.verify is not None:
        console.print(verify_table(report.verify), "")
        console.print(verdict(report.verify), soft_wrap=True)
