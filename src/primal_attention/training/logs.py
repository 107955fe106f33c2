"""Logs of a run: CSV and JSON lines per epoch, TensorBoard events, a bar on a terminal."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from primal_attention.output import to_csv, to_json, write_atomically
from primal_attention.training.config import TrainingConfig
from primal_attention.training.history import History

__all__ = ["Logs"]


class Logs:
    """Writes ``config.json``, ``history.csv`` and ``history.jsonl``, and draws the bar."""

    def __init__(
        self, out: Path | None, config: TrainingConfig, total_steps: int, *, visible: bool
    ) -> None:
        self.out, self.config, self.total_steps = out, config, total_steps
        self.bar = _bar() if visible else None
        self.task: Any = None

    def start(self, history: History, step: int) -> None:
        """Begin, perhaps in the middle of a run."""
        if self.out is not None:
            write_atomically(self.out / "config.json", to_json(asdict(self.config)))
        if self.bar is not None:
            self.bar.start()
            self.task = self.bar.add_task("training", total=self.total_steps, completed=step)

    def step(self, step: int, loss: float) -> None:
        """Move the bar."""
        if self.bar is not None:
            self.bar.update(self.task, completed=step)

    def epoch(self, history: History) -> None:
        """Write the tables anew: a resumed run has no line twice."""
        record = history.records[-1]
        if self.out is not None:
            rows = history.rows()
            write_atomically(self.out / "history.csv", to_csv(rows))
            lines = "".join(f"{json.dumps(row)}\n" for row in rows)
            write_atomically(self.out / "history.jsonl", lines)
        if self.bar is not None:
            text = f"epoch {record.epoch}  loss {record.loss:.3f}"
            if record.valid_loss is not None:
                text += f"  validation {record.valid_loss:.3f}, {record.valid_accuracy:.1%}"
            self.bar.update(self.task, description=text)

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.stop()


def _bar() -> Any:
    """Return a progress bar, or ``None`` where nobody would see it."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        return None
    console = Console(stderr=True)
    return Progress(console=console, transient=True) if console.is_terminal else None
