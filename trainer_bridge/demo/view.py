"""What a person sees of a demo run: progress while it goes, one table at the end, plain lines without a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from rollout.config import Settings
from trainer_bridge.demo.records import RunRecord, StepRecord
from trainer_bridge.records import Comparison


class View:
    """Writes to one console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._plain = not console.is_terminal

    def starting(self, settings: Settings) -> None:
        """What is about to start."""
        replicas = settings.worker.count
        self._console.print(
            Text(f"starting Ray and {replicas} replica{'s' if replicas > 1 else ''} of {settings.model.path} "
                 f"({settings.model.dtype})"),
            soft_wrap=True,
        )  # fmt: skip

    @contextlib.contextmanager
    def rollout(self, step: int, prompts: int) -> Iterator[Callable[[], None]]:
        """A bar over prompts; yields the function that advances it."""
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console, transient=True, disable=self._plain) as progress:
            task = progress.add_task(f"step {step}: rollout", total=prompts)
            yield lambda: progress.advance(task)

    @contextlib.contextmanager
    def phase(self, step: int, what: str) -> Iterator[None]:
        """A spinner."""
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        with Progress(*columns, console=self._console, transient=True, disable=self._plain) as progress:
            progress.add_task(f"step {step}: {what}", total=None)
            yield

    def step(self, record: StepRecord) -> None:
        """One line as a step ends."""
        a, o = record.aligned, record.ordinary
        self._console.print(
            Text(
                f"step {record.step}  v{record.weight_version}  {a.equal_tokens:,} / {a.tokens:,} equal bits  "
                f"(ordinary trainer {o.equal_tokens:,} / {o.tokens:,}, max |Δ| {o.max_abs:.3g})  "
                f"reward {record.mean_reward:.3f}  {record.tokens_per_s:.0f} tokens/s",
                style="green" if a.bitwise_equal else "bold red",
            ),
            soft_wrap=True,
        )

    def finished(self, run: RunRecord) -> None:
        """The table, the findings and the verdict."""
        self._console.print(_table(run))
        if any(s.aligned.digests_total for s in run.steps):
            equal = sum(s.aligned.digests_equal for s in run.steps)
            total = sum(s.aligned.digests_total for s in run.steps)
            self._console.print(Text(f"row digests (whole distributions): {equal:,} / {total:,} equal"))
        for finding in run.findings:
            self._console.print(Text(f"differs: {finding}", style="bold red"), soft_wrap=True)
        versions = {s.weight_version for s in run.steps}
        equal = sum(s.aligned.equal_tokens for s in run.steps)
        word = "bitwise equal" if run.exact else "UNEQUAL"
        self._console.print(
            Text(
                f"{word}: {equal:,} / {run.tokens:,} tokens over {len(versions)} weight versions, {run.replicas} "
                f"replicas, {run.seconds:.0f} s; token digest {run.token_digest}",
                style="bold green" if run.exact else "bold red",
            ),
            soft_wrap=True,
        )


def _table(run: RunRecord) -> Table:
    table = Table(title="rollout against trainer, step by step", title_justify="left")
    for name in ("step", "weights", "tokens", "equal bits", "max |Δ|", "k3 KL", "reward", "tokens/s"):
        table.add_column(name, justify="right")
    for name in ("ordinary: equal", "max |Δ|", "k3 KL"):
        table.add_column(name, justify="right", style="dim")
    for s in run.steps:
        table.add_row(
            str(s.step),
            f"v{s.weight_version} {s.weight_digest[:8]}",
            f"{s.aligned.tokens:,}",
            f"{s.aligned.equal_tokens:,}",
            *_gap(s.aligned),
            f"{s.mean_reward:.3f}",
            f"{s.tokens_per_s:.0f}",
            f"{s.ordinary.equal_tokens:,}",
            *_gap(s.ordinary),
        )
    return table


def _gap(comparison: Comparison) -> tuple[str, str]:
    return f"{comparison.max_abs:.3g}", f"{comparison.k3:.3g}"
