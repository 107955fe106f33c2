"""Study of clouds that a small Transformer moves, with published and corrected metrics.

Instances of 20 tokens in two or three Gaussian clouds are classified by one block that acts on
their two features. The positions of all tokens after every epoch are a path. Its numbers are
computed twice: as in the published code, and as defined in
:mod:`primal_attention.analysis.transport.maps`.
"""

import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import GREY, Column, Files, Picture, columns_table, grouped, mean_of
from primal_studies.tables.aligned import make_clouds

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CloudOptions", "CloudPaths", "make_instances", "straight_path"]

_VARIANTS = ("published", "no norm", "frozen head", "tied values")
_INSTANCES, _TOKENS = 90, 20
_SIZES = (50, 200, 450, 900)
"""Numbers of points of straight paths; the last is that of the training instances."""
_MARKS = (1, 2, 5, 10, 20, 50, 100, 200)
"""Epochs of the picture."""
_PICTURE_POINTS = 300


@dataclass(frozen=True)
class CloudOptions:
    """Paths of points during training: coded and corrected metrics side by side."""

    clouds: tuple[int, ...] = (2, 3)
    """Numbers of clouds."""
    separations: tuple[int, ...] = (1, 2, 3, 4)
    """How far apart clouds are."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Seeds of clouds and weights."""
    epochs: int = 200
    """Epochs of a training."""

    def __post_init__(self) -> None:
        at_least_one(self, "separations", "epochs")
        if not self.clouds or set(self.clouds) - {2, 3} or not self.seeds:
            raise ValueError("clouds must be 2, 3 or both, and seeds must not be empty.")


def make_instances(
    clouds: int, separation: float, *, seed: int = 0
) -> "tuple[Tensor, Tensor, Tensor, Tensor]":
    """Return training and test instances ``[45 20 2]``, each followed by its classes.

    Coordinates are standardised with the training instances.
    """
    import torch

    # the classes of points take turns, so instances are cut out of each class
    points, classes = make_clouds(clouds, separation, rows=_INSTANCES * _TOKENS, seed=seed)
    y = torch.arange(_INSTANCES) % clouds
    x = torch.empty(_INSTANCES, _TOKENS, 2)
    for c in range(clouds):
        chosen = torch.from_numpy(points[classes == c]).float()
        x[y == c] = chosen.reshape(-1, _TOKENS, 2)
    order = torch.randperm(_INSTANCES, generator=torch.Generator().manual_seed(seed))
    x, y = x[order], y[order]
    train = x[::2].reshape(-1, 2)
    x = (x - train.mean(0)) / train.std(0)
    return x[::2], y[::2], x[1::2], y[1::2]


def straight_path(count: int, *, seed: int = 0) -> "tuple[Tensor, Tensor]":
    """Return a path ``[5 n 2]`` that is straight and optimal, and two classes.

    Example:
        >>> path, classes = straight_path(50)
        >>> path.shape, classes.unique().tolist()
        (torch.Size([5, 50, 2]), [0, 1])
    """
    import torch

    points, classes = make_clouds(2, 2.0, rows=count, seed=seed)
    start = torch.from_numpy(points)
    # the gradient of a convex function: nearly a translation, and a little wider
    end = 1.1 * start + torch.tensor([3.0, 1.0])
    steps = torch.linspace(0, 1, 5, dtype=torch.float64)[:, None, None]
    return start + steps * (end - start), torch.from_numpy(classes)


class CloudPaths(Study[CloudOptions]):
    """Train a small Transformer on clouds and measure how it moves the points."""

    name = "ot-clouds"
    Options = CloudOptions

    def cells(self, options: CloudOptions) -> list[Cell]:
        """Return straight paths first, then all trainings of the first seed."""
        cells: list[Cell] = [{"kind": "straight", "points": count} for count in _SIZES]
        return cells + [
            {
                "kind": "trained",
                "clouds": clouds,
                "separation": separation,
                "variant": variant,
                "seed": seed,
                "epochs": options.epochs,
            }
            for seed in options.seeds
            for clouds in options.clouds
            for separation in options.separations
            for variant in _VARIANTS
        ]

    def run(self, cell: Cell, options: CloudOptions, scratch: Path) -> Row:
        """Measure one path."""
        if cell["kind"] == "straight":
            return _measure(*straight_path(cell["points"]))
        return _train(cell)

    def describe(self, row: Row) -> str:
        """Return what was measured in one line."""
        what = f"{row.get('points')} points, straight"
        if row["kind"] == "trained":
            data = f"{row['clouds']} clouds ±{row['separation']}"
            what = f"{row['variant']}, {data}, seed {row['seed']}"
        coded, ours = row["root_efficiency"], row["efficiency"]
        return f"{what}: efficiency coded {coded:.3f}, ours {ours:.3f}"

    def tables(self, rows: Sequence[Row], options: CloudOptions) -> Mapping[str, str | bytes]:
        """Return both kinds of metrics side by side, the ceiling, and a picture."""
        straight = [row for row in rows if row["kind"] == "straight"]
        trained = [
            row for row in rows if row["kind"] == "trained" and row["epochs"] == options.epochs
        ]
        files: Files = {"ceiling.md": _ceiling_page(straight)}
        if trained:
            files |= {"metrics.md": _metric_page(trained), "picture.png": _picture(trained)}
        return files


def _measure(path: "Tensor", labels: "Tensor") -> dict[str, float]:
    """Return coded and corrected numbers of a path ``[epochs n 2]``."""
    from primal_attention.analysis.transport.metrics import map_metrics, root_metrics

    path = path.double()
    coded = root_metrics(path, labels)
    ends = path[[0, -1]]
    pooled = map_metrics(ends[0], ends[1])
    within = map_metrics(ends[0], ends[1], labels, scope="class")
    return {
        **coded._asdict(),
        # what the coded efficiency is if every path is replaced by a straight one
        "root_ceiling": root_metrics(ends, labels).root_efficiency,
        "efficiency": _efficiency(path),
        "cost": pooled.cost,
        "gap": pooled.gap,
        "optimality": pooled.optimality,
        "matching": pooled.matching,
        "class_optimality": within.optimality,
        "class_matching": within.matching,
        "spread": pooled.spread,
    }


def _efficiency(path: "Tensor") -> float:
    import torch

    walked = float(torch.linalg.vector_norm(path.diff(dim=0), dim=-1).sum())
    straight = float(torch.linalg.vector_norm(path[-1] - path[0], dim=-1).sum())
    return straight / walked if walked else 1.0


def _train(cell: Cell) -> dict[str, Any]:
    """Train a model and return accuracy and numbers of its path."""
    import torch

    from primal_attention.analysis.transport.recorder import TransportRecorder
    from primal_attention.tasks.tables.aligned_geometry import place_centres
    from primal_attention.training import Columns, TrainingConfig, fit
    from primal_studies.tables.cloud_model import CloudTransformer
    from primal_studies.tables.pretraining import pretrain_head

    x, y, x_test, y_test = make_instances(cell["clouds"], cell["separation"], seed=cell["seed"])
    tokens = y[:, None].expand(-1, _TOKENS)
    torch.manual_seed(cell["seed"])
    model = CloudTransformer(cell["clouds"], variant=cell["variant"])
    if cell["variant"] == "frozen head":
        import numpy as np

        centres = place_centres(np.zeros((cell["clouds"], 2)), "circle")
        pretrain_head(model.head, torch.from_numpy(centres).float(), verbose=False)
    config = TrainingConfig(
        epochs=cell["epochs"],
        batch_size=len(x),
        lr=0.01,
        optimizer="adam",
        schedule="constant",
        warmup=0.0,
        weight_decay=0.0,
        seed=cell["seed"],
    )
    with warnings.catch_warnings():
        # the published block normalises over two features, which is part of what is measured
        warnings.filterwarnings("ignore", message=".*normalises over")
        recorder = TransportRecorder(model.block, model, {"x": x}, labels=y)
    # the published code chose the epoch on the test instances
    is_valid = torch.arange(len(x)) % 5 == 0
    train, valid = (Columns(x=x[part], labels=tokens[part]) for part in (~is_valid, is_valid))
    with recorder:
        history = fit(model, train, config=config, valid=valid, on_epoch=recorder, verbose=False)
    with torch.no_grad():
        shares = model(x_test).softmax(-1).mean(1)
    accuracy = float((shares.argmax(-1) == y_test).float().mean())
    labels = tokens.flatten()  # the recorder keeps all points, in their order
    best = history.best_epoch or 0
    row: dict[str, Any] = {"accuracy": accuracy, "best_epoch": best}
    row |= _measure(recorder.positions[: best + 1], labels)
    if cell["seed"] == 0:
        row["curve"] = _curve(recorder.positions)
    return {key: round(v, 5) if isinstance(v, float) else v for key, v in row.items()}


def _curve(path: "Tensor") -> list[list[float]]:
    """Return epoch, optimality and efficiency so far of some epochs."""
    from primal_attention.analysis.transport.metrics import map_metrics

    few = path[:, :: -(-path.shape[1] // _PICTURE_POINTS)].double()
    return [
        [e, round(map_metrics(few[0], few[e]).optimality, 4), round(_efficiency(path[: e + 1]), 4)]
        for e in _MARKS
        if e < len(path)
    ]


_MAP = {
    "accuracy": ("accuracy (%)", 100, 1),
    "best_epoch": ("epoch", 1, 0),
    "root_optimality": ("optimality, coded", 1, 3),
    "class_optimality": ("optimality in classes", 1, 3),
    "optimality": ("optimality", 1, 3),
    "class_matching": ("matching in classes", 1, 2),
    "matching": ("matching", 1, 2),
}
_PATH = {
    "root_efficiency": ("efficiency, coded", 1, 3),
    "root_ceiling": ("its ceiling", 1, 3),
    "efficiency": ("efficiency", 1, 3),
    "root_gap": ("gap, coded", 1, 2),
    "gap": ("gap", 1, 2),
    "cost": ("cost", 1, 1),
}
"""Numbers of the tables: title, factor and digits."""


def _ceiling_page(rows: Sequence[Row]) -> str:
    columns: dict[str, Column] = {
        "points": "{points}",
        "efficiency, coded": "{root_efficiency:.3f}",
        "efficiency": "{efficiency:.3f}",
        "optimality, coded": "{root_optimality:.3f}",
        "optimality": "{optimality:.3f}",
    }
    caption = "Straight paths of an optimal map, in two classes. The coded efficiency is √(2/n)."
    return page(caption, columns_table(rows, columns))


def _metric_page(rows: Sequence[Row]) -> str:
    """Return means over separations by variant, then the published variant by separation."""
    order = {variant: place for place, variant in enumerate(_VARIANTS)}
    rows = sorted(rows, key=lambda r: (r["clouds"], order[r["variant"]]))
    published = [row for row in rows if row["variant"] == "published"]
    by_distance = sorted(published, key=lambda r: (r["clouds"], r["separation"]))
    parts = list(_PATH.items())[:3]
    return page(
        "Means and standard deviations over separations and seeds, at the chosen epoch. Coded "
        "numbers are those of the published code, which sums over classes.",
        _side_by_side(rows, "variant", "{clouds} clouds, {variant}", _MAP),
        "*Its ceiling* is the coded efficiency of straight paths with the same ends.",
        _side_by_side(rows, "variant", "{clouds} clouds, {variant}", _PATH),
        "The published variant by separation, means and standard deviations over seeds.",
        _side_by_side(
            by_distance, "separation", "{clouds} clouds, ±{separation}", _MAP | dict(parts)
        ),
    )


def _side_by_side(
    rows: Sequence[Row], key: str, name: str, numbers: Mapping[str, tuple[str, int, int]]
) -> str:
    columns: dict[str, Column] = {"data": name}
    for score, (title, factor, digits) in numbers.items():
        columns[title] = mean_of(score, digits, factor)
    return columns_table(grouped(rows, "clouds", key).values(), columns)


def _picture(rows: Sequence[Row]) -> bytes:
    """Return a PNG: optimality and efficiency over the epochs, beside the coded ceiling."""
    picture = Picture(2, size=(10, 3.6))
    left, right = picture.axes
    colors = dict(zip(_VARIANTS, picture.colors, strict=False))
    for row in (r for r in rows if "curve" in r):
        epochs, *curves = zip(*row["curve"], strict=True)
        for axis, curve in zip(picture.axes, curves, strict=True):
            axis.plot(epochs, curve, color=colors[row["variant"]], lw=0.9, alpha=0.7)
    ceiling = statistics.fmean(row["root_ceiling"] for row in rows)
    right.axhline(ceiling, color=GREY, ls="--", lw=1)
    right.annotate("largest coded efficiency", (1, ceiling), (0, 3), textcoords="offset points")
    for axis, title in zip(picture.axes, ("optimality of all points", "efficiency"), strict=True):
        axis.set(xscale="log", xlabel="epoch", ylabel=title, ylim=(0, 1.03))
    for variant, color in colors.items():
        left.plot([], [], color=color, label=variant)
    left.legend(frameon=False)
    return picture.png()
