"""What the formats share: their list, small data, and models of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from primal_attention.models.config import EncoderOptions
from primal_attention.tasks.longrange.task import TokenTask
from primal_attention.tasks.trained import save_trained

from .harness import Case

__all__ = [
    "CASES",
    "WORDS",
    "Builder",
    "case",
    "check_rows",
    "event_log",
    "make",
    "pair_task",
    "series_model",
    "table",
    "table_model",
    "text_model",
    "value_model",
    "vectors",
]

Builder = Callable[[Path], Case]
CASES: dict[str, Builder] = {}
"""How to make a case in an empty folder, by the name of the format."""

WORDS = ["good film", "bad plot", "a good, good cast", "bad: no fun", "fine", "poor \u00e9"] * 2


def make(name: str, folder: Path) -> Case:
    """Return a case whose files are in a folder."""
    torch.manual_seed(0)
    return CASES[name](folder)


def case(name: str) -> Callable[[Builder], Builder]:
    def add(builder: Builder) -> Builder:
        CASES[name] = builder
        return builder

    return add


def check_rows(rows: Any, folder: Path) -> str | None:
    """Predictions are numbered, and probabilities are some."""
    if not isinstance(rows, list) or not rows or "index" not in rows[0]:
        return None
    if [row["index"] for row in rows] != list(range(len(rows))):
        return "the predictions are not numbered from 0"
    for row in rows:
        shares = [value for key, value in row.items() if key.startswith("p(")]
        if shares and not (np.isfinite(shares).all() and abs(sum(shares) - 1) < 1e-3):
            return f"no probabilities: {row}"
        if "value" in row and not np.isfinite(row["value"]):
            return f"no finite number: {row}"
    return None


def text_model(folder: Path) -> Path:
    task = TokenTask("text", ("bad", "good"), 64)
    options = EncoderOptions(dim=16, num_heads=2, num_layers=1, attention="primal-dual")
    save_trained(folder / "model", task, task.build(options))
    return folder / "model"


def series_model(folder: Path) -> Path:
    from primal_attention.tasks.series.data import series_from_arrays
    from primal_attention.tasks.series.settings import SeriesOptions
    from primal_attention.tasks.series.task import SeriesTask

    rng = np.random.default_rng(0)
    cases = [rng.normal(size=(2, n)) for n in (5, 7, 6, 8)]
    task = SeriesTask.fit(series_from_arrays(cases, ["down", "up", "down", "up"]))
    options = SeriesOptions(dim=16, num_heads=2, num_layers=1)
    save_trained(folder / "model", task, task.build(options))
    return folder / "model"


def value_model(folder: Path) -> Path:
    from primal_attention.tasks.series.data import SeriesCollection
    from primal_attention.tasks.series.regression import SeriesValueTask
    from primal_attention.tasks.series.settings import SeriesOptions

    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 5, 2)).astype(np.float32)
    series = SeriesCollection(x, np.full(6, 5), rng.normal(size=6))
    task = SeriesValueTask.fit(series)
    options = SeriesOptions(dim=16, num_heads=2, num_layers=1)
    save_trained(folder / "model", task, task.build(options))
    return folder / "model"


def table() -> Any:
    import pandas as pd

    rng = np.random.default_rng(0)
    size = rng.normal(size=30).round(3)
    return pd.DataFrame(
        {
            "size": size,
            "color": rng.choice(["red", "blue"], 30),
            "day": pd.date_range("2024-01-01", periods=30).astype(str),
            "price": np.where(size > 0, "dear", "cheap"),
        }
    )


def table_model(folder: Path) -> Path:
    from primal_attention.tasks.tables import TableClassifier

    frame = table()
    model = TableClassifier(dim=8, num_heads=2, num_layers=1, max_epochs=1, random_state=0)
    model.fit(frame.drop(columns="price"), frame["price"]).save(folder / "model")
    return folder / "model"


def event_log() -> Any:
    import pandas as pd

    rng = np.random.default_rng(0)
    rows, start = [], pd.Timestamp("2024-03-01")
    for user in range(12):
        when = start
        for _ in range(int(rng.integers(4, 9))):
            when += pd.Timedelta(hours=float(rng.exponential(30)))
            kind = str(rng.choice(["view", "cart", "buy"]))
            rows.append((f"u{user}", when.isoformat(timespec="seconds"), kind))
    return pd.DataFrame(rows, columns=["user", "time", "event"])


def vectors() -> Any:
    x = np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def pair_task() -> Any:
    from primal_attention.tasks.pairs import TextTokenizer
    from primal_attention.tasks.pairs.settings import PairOptions
    from primal_attention.tasks.pairs.task import PairTask

    task = PairTask(TextTokenizer.learn(["a red square", "a blue circle"]), size=16, length=8)
    return task, task.build(PairOptions(dim=16, num_heads=2))
