"""``primal repro relative``: kernel attention with relative positions (Luo et al. 2021).

Four parts (arXiv 2106.12566). *copy*: what relative positions give to each attention. *convert*:
random features replace the exact kernel of a trained model, without further training. *scratch*:
models with these features learn to sort from the start. *grid*: rows and columns of pictures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from primal_attention.support.output import markdown_table, page
from primal_attention.support.settings import at_least_one, one_of
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import Files, group_lines, plot_lines, rows_table

__all__ = ["RelativeOptions", "RelativeStudy"]

PARTS = ("copy", "convert", "scratch", "grid")
ATTENTIONS = ("softmax", "linear", "favor", "primal-dual", "kernelized", "primal-relative")
MAPS = (
    "positive",
    "positive, on the sphere",
    "positive, orthogonal",
    "positive, orthogonal ±, tilted",
    "trigonometric",
)
POSITIONS = ("grid", "no relative positions", "softmax")


@dataclass(frozen=True)
class RelativeOptions:
    """Relative positions in kernel attention: copying, conversion, training, pictures."""

    parts: tuple[str, ...] = PARTS
    """Parts: copy, convert, scratch, grid."""
    steps: int = 600
    """Steps of 64 sequences of the first three parts."""
    seeds: int = 3
    """Seeds of copy and grid."""
    convert_seeds: int = 2
    """Seeds of convert and scratch."""
    sizes: tuple[int, ...] = (8, 16, 32, 64, 128)
    """Numbers of features."""
    draws: int = 3
    """Draws of the features that replace a kernel."""
    grid_steps: int = 1000
    """Steps of 32 pictures."""
    num_train: int = 20_000
    """Training pictures."""
    num_test: int = 4_000
    """Test pictures."""
    data: Path | None = None
    """Folder with vision/cifar-10; by default that of PRIMAL_DATA."""

    def __post_init__(self) -> None:
        one_of(self, "parts", PARTS)
        at_least_one(self, "steps", "seeds", "convert_seeds", "sizes", "draws", "grid_steps")


class RelativeStudy(Study[RelativeOptions]):
    """One cell a training; conversions of the models of a task are one cell."""

    name = "relative"
    Options = RelativeOptions

    def cells(self, options: RelativeOptions) -> Sequence[Cell]:
        """Return the cells, part by part."""
        sizes, steps = list(options.sizes), {"steps": options.steps}
        seeds, few = range(options.seeds), range(options.convert_seeds)
        scratch = [(kind, 32, "unit") for kind in MAPS]
        scratch += [("positive", size, "unit") for size in (sizes[0], sizes[-1])]
        scratch.append(("positive", 32, "free"))
        pictures = {key: getattr(options, key) for key in ("grid_steps", "num_train", "num_test")}
        drawn = {"sizes": sizes, "seeds": len(few), "draws": options.draws}
        cells: dict[str, list[Cell]] = {
            "copy": [{"attention": a, "seed": s, **steps} for a in ATTENTIONS for s in seeds],
            "convert": [
                {"task": task, "rows": rows, **drawn, **steps}
                for task in ("copy", "sort")
                for rows in ("unit", "free")
            ],
            "scratch": [
                {"features": kind, "size": size, "rows": rows, "seed": s, **steps}
                for kind, size, rows in dict.fromkeys(scratch)
                for s in few
            ],
            "grid": [{"positions": p, "seed": s, **pictures} for s in seeds for p in POSITIONS],
        }
        return [{"part": part, **cell} for part in options.parts for cell in cells[part]]

    def run(self, cell: Cell, options: RelativeOptions, scratch: Path) -> Row | Sequence[Row]:
        """Train one model, or train and convert those of a task."""
        if cell["part"] == "convert":
            return _convert(cell)
        if cell["part"] == "grid":
            return {"accuracy": _grid_accuracy(cell, options.data, scratch)}
        import primal_attention as pa
        from primal_studies.core.relative_models import (
            HEAD_DIM,
            HEADS,
            feature_attention,
            share_right,
            train,
        )

        if cell["part"] == "copy":
            extra = {"regularizer": None} if cell["attention"] == "primal-dual" else {}
            make: Any = partial(
                pa.create_attention, cell["attention"], HEADS * HEAD_DIM, HEADS, **extra
            )
            model = train(make, "copy", cell["steps"], cell["seed"])
            return {"accuracy": share_right(model, "copy", 1000)}
        is_unit = cell["rows"] == "unit"
        make = partial(feature_attention, cell["features"], cell["size"], is_unit, is_exact=False)
        model = train(make, "sort", cell["steps"], cell["seed"])
        return {"accuracy": share_right(model, "sort", 300, seed=0)}

    def tables(self, rows: Sequence[Row], options: RelativeOptions) -> Mapping[str, str | bytes]:
        """Return one table a part, and a picture of the conversions."""
        found = {part: [row for row in rows if row["part"] == part] for part in PARTS}
        files: Files = {}
        if found["copy"]:
            steps = found["copy"][0]["steps"]
            caption = f"Accuracy of copying the token five back, {steps} steps of 64 sequences."
            files["copy.md"] = page(caption, _by_seed(found["copy"], ["attention"]))
        if found["scratch"]:
            steps = found["scratch"][0]["steps"]
            caption = f"Accuracy of sorting, {steps} steps of 64 sequences of 25 tokens."
            keys = ["features", "size", "rows"]
            files["scratch.md"] = page(caption, _by_seed(found["scratch"], keys))
        if found["grid"]:
            first = found["grid"][0]
            caption = (
                f"Test accuracy on {first['num_test']:,} pictures after {first['grid_steps']:,} "
                f"steps of 32 of {first['num_train']:,} pictures."
            )
            files["grid.md"] = page(caption, _by_seed(found["grid"], ["positions"], 4))
        if found["convert"]:
            files |= _converted(found["convert"])
        return files


def _by_seed(rows: Sequence[Row], keys: Sequence[str], digits: int = 2) -> str:
    """Return a table with one column a seed, and mean and spread of three or more."""
    groups: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in keys), {})[row["seed"]] = row["accuracy"]
    seeds = sorted({row["seed"] for row in rows})
    table = []
    for key, values in groups.items():
        shown = [str(values.get(seed, "—")) for seed in seeds]
        found = list(values.values())
        if len(seeds) > 2:
            spread = f" ± {stdev(found):.{digits}f}" if len(found) > 1 else ""
            shown.append(f"{mean(found):.{digits}f}{spread}")
        table.append([*key, *shown])
    last = ["mean"] if len(seeds) > 2 else []
    return markdown_table([*keys, *(f"seed {s}" for s in seeds), *last], table)


def _converted(rows: Sequence[Row]) -> dict[str, str | bytes]:
    panels = group_lines(
        (f"{r['task']}, {r['rows']} queries and keys", line, r["size"], r[key])
        for r in rows
        for line, key in ((r["features"], "accuracy"), ("exact kernel", "exact"))
    )
    lines: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        key = {"task": row["task"], "rows": row["rows"], "features": row["features"]}
        line = lines.setdefault(tuple(key.values()), {**key, "exact": row["exact"]})
        line[str(row["size"])] = row["accuracy"]
    first = rows[0]
    caption = (
        "Accuracy after the kernel was replaced by features, by number of features; "
        f"{first['steps']} steps of training, mean of {first['seeds']} seeds and "
        f"{first['draws']} draws."
    )
    records = list(lines.values())
    return {
        "convert.md": page(caption, rows_table(records, list(records[0]))),
        "convert.png": plot_lines(
            panels,
            xlabel="features",
            ylabels=["accuracy after conversion"],
            columns=2,
            dashed=["exact kernel"],
            is_log=False,
        ),
    }


def _convert(cell: Cell) -> Sequence[Row]:
    """Return the accuracy of trained models after features replaced their kernels."""
    from primal_studies.core.relative_models import (
        RelativeCore,
        draw,
        feature_attention,
        share_right,
        train,
    )

    task, is_unit = cell["task"], cell["rows"] == "unit"
    exact: list[float] = []
    found: dict[tuple[str, int], list[float]] = {}
    for seed in range(cell["seeds"]):
        make = partial(feature_attention, "positive", 2, is_unit, is_exact=True)
        model = train(make, task, cell["steps"], seed)
        exact.append(share_right(model, task, 300, seed=0))
        cores = [m for m in model.modules() if isinstance(m, RelativeCore)]
        for kind, size in ((k, s) for k in MAPS for s in cell["sizes"]):
            for number in range(cell["draws"]):
                for i, core in enumerate(cores):
                    core.features = draw(kind, size, is_unit, 100 * number + i)
                    core.is_exact = False
                found.setdefault((kind, size), []).append(share_right(model, task, 300, seed=0))
    return [
        {
            "features": kind,
            "size": size,
            "accuracy": round(mean(values), 3),
            "worst": min(values),
            "exact": round(mean(exact), 3),
        }
        for (kind, size), values in found.items()
    ]


def _grid_accuracy(cell: Cell, data: Path | None, scratch: Path) -> float:
    """Return the test accuracy after the last step; the test data choose nothing."""
    import torch

    from primal_attention.datasets.public import data_folder
    from primal_studies.core.relative_models import grid_model, grid_pictures
    from primal_studies.core.sequences import accuracy_on, train_classifier

    folder = data_folder(data) / "vision/cifar-10"
    torch.manual_seed(cell["seed"])
    model = grid_model(cell["positions"])
    train_classifier(
        model,
        grid_pictures(folder, "train", cell["num_train"]),
        scratch,
        steps=cell["grid_steps"],
        epochs=4,
        batch_size=32,
        lr=2e-3,
        seed=cell["seed"],
    )
    return accuracy_on(model, grid_pictures(folder, "test", cell["num_test"]))
