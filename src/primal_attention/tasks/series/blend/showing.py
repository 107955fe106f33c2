"""The parts of a blend in a report: their shares, and what each scores alone."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from primal_attention.models import ModelOutput
from primal_attention.tasks.series.blend.model import SeriesBlend
from primal_attention.tasks.series.settings import PARTS

if TYPE_CHECKING:
    from primal_attention.report import Report
    from primal_attention.tasks.results import Result
    from primal_attention.tasks.task import Task

__all__ = ["show_parts"]

_BATCH = 256


def show_parts(report: "Report", results: "Sequence[Result]", data: Any, task: "Task") -> None:
    """Add a table with one row a part: its share in every model, and its score on some data.

    Args:
        report: Where to add it.
        results: The trained models.
        data: Series with targets.
        task: What scores answers.
    """
    head = ["part"]
    rows: list[list[str]] = [[part] for part in PARTS]
    for result in results:
        if result.trained is None or not isinstance(result.trained.model, SeriesBlend):
            continue
        blend = result.trained.model
        shares: dict[str, float] = dict(zip(blend.config.parts, blend.shares.tolist(), strict=True))
        scores = _part_scores(blend, data, task)
        name = next(iter(scores.values()))[0] if scores else "score"
        head += [f"share in {result.name}", f"{name} alone"]
        for row in rows:
            part = row[0]
            is_there = part in shares
            row += [f"{shares[part]:.2f}" if is_there else "–"]
            row += [f"{scores[part][1]:.3f}" if is_there else "–"]
    if len(head) > 1:
        report.section("Parts").text(
            "The answer is a blend of three parts. Shares are chosen by the likelihood of series "
            "that a part did not learn from; a part without a share brought nothing."
        ).table(head, rows)


def _part_scores(blend: SeriesBlend, data: Any, task: "Task") -> dict[str, tuple[str, float]]:
    """Return name and value of the main score of every part alone."""
    batches = [
        task.collate([data[i] for i in range(start, min(start + _BATCH, len(data)))])
        for start in range(0, len(data), _BATCH)
    ]
    labels = torch.cat([batch["labels"] for batch in batches])
    answers = [blend.answers(batch["x"], batch["key_mask"]) for batch in batches]
    scored: dict[str, tuple[str, float]] = {}
    for part in blend.config.parts:
        values = np.concatenate([found[part] for found in answers])
        if blend.config.num_classes > 1:
            values = np.log(np.maximum(values, 1e-9))
        score = task.score(task.answer(ModelOutput(torch.from_numpy(values)), labels))
        name = "accuracy" if "accuracy" in score else next(iter(score))
        scored[part] = (name, float(score[name].value))
    return scored
