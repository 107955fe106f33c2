"""``primal repro schoenbat-kernels``: four kernels of the dot product, and their temperature.

The two-layer models of Long Range Arena with SchoenbAt (Guo et al. 2025, arXiv 2505.12252), on
ListOps expressions of 128 to 512 tokens and on the first 1,024 bytes of film reviews. Each kernel
has once the published temperature, 1/√d, where its weights hardly differ from an average, and once
a learned one; softmax stands beside them. Tokens see all tokens, or only those before them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one, one_of
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import rows_table

if TYPE_CHECKING:
    from primal_attention.models import EncoderClassifier

__all__ = ["KERNELS", "KernelOptions", "KernelStudy", "build_encoder"]

KERNELS = ("exp", "inverse", "logi", "sqrt")
_PUBLISHED = "1/√d"
_HEAD_DIM = 32


@dataclass(frozen=True)
class KernelOptions:
    """Four kernels of SchoenbAt, with the published temperature and a learned one."""

    tasks: tuple[str, ...] = ("listops", "text")
    """Tasks: listops, text."""
    kernels: tuple[str, ...] = (*KERNELS, "softmax")
    """Kernels: exp, inverse, logi, sqrt; softmax always takes part."""
    steps: int = 2000
    """Steps of 8 sequences."""
    num_train: int = 20_000
    """Training sequences."""
    num_test: int = 2_000
    """Test sequences."""
    data: Path | None = None
    """Folder with text/imdb; by default that of PRIMAL_DATA."""

    def __post_init__(self) -> None:
        one_of(self, "tasks", ("listops", "text"))
        one_of(self, "kernels", (*KERNELS, "softmax"))
        at_least_one(self, "steps", "num_train", "num_test")


class KernelStudy(Study[KernelOptions]):
    """One cell a training."""

    name = "schoenbat-kernels"
    Options = KernelOptions

    def cells(self, options: KernelOptions) -> Sequence[Cell]:
        """Return the cells, task by task."""
        models = [
            (kernel, temperature)
            for kernel in options.kernels
            for temperature in (_PUBLISHED, "learned")
            if kernel != "softmax" or temperature == _PUBLISHED
        ]
        common = {key: getattr(options, key) for key in ("steps", "num_train", "num_test")}
        return [
            {"task": task, "kernel": kernel, "temperature": temperature, "sees": sees, **common}
            for task in options.tasks
            for sees in ("all", "before")
            for kernel, temperature in models
        ]

    def run(self, cell: Cell, options: KernelOptions, scratch: Path) -> Row:
        """Train one model."""
        import torch

        from primal_attention.attention.schoenbat import SchoenbatCore
        from primal_studies.core.sequences import accuracy_on, longrange_parts, train_classifier

        sizes = {"num_train": cell["num_train"], "num_test": cell["num_test"]}
        parts = longrange_parts(cell["task"], options.data, **sizes)
        torch.manual_seed(0)
        model = build_encoder(cell, max_length=max(int(part.lengths.max()) for part in parts))
        train_classifier(model, parts.train, scratch, steps=cell["steps"], clip=1.0)
        cores = [m for m in model.modules() if isinstance(m, SchoenbatCore)]
        learned = [float(value) for core in cores for value in core.temperature.tolist()]
        return {
            "test_accuracy": accuracy_on(model, parts.test),
            "temperatures": " ".join(f"{value:.2f}" for value in learned),
        }

    def tables(self, rows: Sequence[Row], options: KernelOptions) -> Mapping[str, str | bytes]:
        """Return one table and its picture."""
        from primal_attention.report import plot_dots, to_png

        first = rows[0]
        caption = (
            f"{first['steps']:,} steps of 8 sequences, {first['num_test']:,} test sequences, "
            "seed 0; the temperatures of the heads after training."
        )
        shown = [{**r, "test accuracy": f"{r['test_accuracy']:.4f}"} for r in rows]
        columns = ["task", "kernel", "temperature", "sees", "test accuracy", "temperatures"]
        values: dict[str, dict[str, float]] = {}
        for row in rows:
            order = {"all": "bidirectional", "before": "causal"}[row["sees"]]
            line = values.setdefault(f"{row['kernel']}, {row['temperature']}", {})
            line[f"{row['task']}, {order}"] = 100 * row["test_accuracy"]
        picture = to_png(plot_dots(values, xlabel="test accuracy, %"))
        return {"table.md": page(caption, rows_table(shown, columns)), "picture.png": picture}


def build_encoder(cell: Cell, **changes: Any) -> "EncoderClassifier":
    """Return the model of a cell: that of the task, with another kernel, temperature or order."""
    from primal_attention.models import EncoderClassifier
    from primal_attention.tasks.longrange import model_config

    if cell["kernel"] != "softmax":
        fixed = _HEAD_DIM**-0.5 if cell["temperature"] == _PUBLISHED else None
        options = {"kernel": cell["kernel"], "temperature": fixed}
        changes |= {"attention": "schoenbat", "attention_options": options}
    changes |= {"is_causal": cell["sees"] == "before"}
    return EncoderClassifier(model_config(cell["task"], "softmax", **changes))
