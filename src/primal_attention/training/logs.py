"""Logs of a run: CSV and JSON lines per epoch, TensorBoard events, a bar on a terminal."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from primal_attention.support.command import needs, progress
from primal_attention.support.output import to_csv, to_json, write_atomically
from primal_attention.training.config import TrainingConfig
from primal_attention.training.history import History

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["Logs"]

_SECONDS = 5.0
"""Time between two lines of progress where there is no terminal."""


class Logs:
    """Writes ``config.json``, ``history.csv``, ``history.jsonl`` and events, and draws the bar.

    Args:
        out: Folder to write to; ``None`` writes nothing.
        config: The configuration of the run.
        total_steps: Length of the bar.
        verbose: Whether to show progress: a bar, or lines where there is no terminal; ``None``
            draws the bar only.
    """

    def __init__(
        self, out: Path | None, config: TrainingConfig, total_steps: int, *, verbose: bool | None
    ) -> None:
        self.out, self.config, self.total_steps = out, config, total_steps
        self.bar = None if verbose is False else _bar()
        self.prints = bool(verbose) and self.bar is None
        self.printed = time.monotonic()
        self.task: TaskID | None = None
        self.events: SummaryWriter | None = None

    def start(self, step: int) -> None:
        """Begin after ``step`` steps; zero unless a run is resumed."""
        if self.out is not None:
            write_atomically(self.out / "config.json", to_json(asdict(self.config)))
            if self.config.tensorboard:
                self.events = _events(self.out / "tensorboard", step)
        if self.bar is not None:
            self.bar.start()
            self.task = self.bar.add_task("training", total=self.total_steps, completed=step)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Log one step."""
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=step)
        self._emit("step", step, values)

    def epoch(self, history: History) -> None:
        """Log the last epoch. Tables are rewritten, so that a resumed run has no line twice."""
        record = history.records[-1]
        if self.out is not None:
            rows = history.rows()
            write_atomically(self.out / "history.csv", to_csv(rows))
            lines = "".join(f"{json.dumps(row)}\n" for row in rows)
            write_atomically(self.out / "history.jsonl", lines)
        self._emit("epoch", record.step, record.row())
        text = f"epoch {record.epoch}  training loss {record.loss:.3f}"
        text += "".join(f"  {name} {value:.3f}" for name, value in record.valid.items())
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, description=text)
        is_last = record.step >= self.total_steps
        if self.prints and (is_last or time.monotonic() - self.printed > _SECONDS):
            progress(f"{100 * record.step // self.total_steps:3d} %  {text}")
            self.printed = time.monotonic()

    def _emit(self, group: str, step: int, values: Mapping[str, float | None]) -> None:
        if self.events is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self.events.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        """Remove the bar and finish the files."""
        if self.bar is not None:
            self.bar.stop()
        if self.events is not None:
            self.events.close()


def _bar() -> "Progress | None":
    """Return a progress bar; ``None`` without a terminal or notebook."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        return None
    console = Console(stderr=True)
    is_shown = console.is_terminal or console.is_jupyter
    return Progress(console=console, transient=True) if is_shown else None


def _events(folder: Path, step: int) -> "SummaryWriter":
    """Return a writer of events that hides what a broken run wrote after ``step``."""
    with needs("train", "tensorboard=True"):
        from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter(str(folder), purge_step=step + 1)
