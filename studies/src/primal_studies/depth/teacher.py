"""``primal bench depth-teacher``: can one wide layer copy two narrow ones?

An illustration of depth efficiency, not a test of it. The teacher has two softmax-free layers of
width 4 with random weights; its separation rank over four tokens is 110. Students have one layer of
some width behind a linear map of the tokens, or two layers of width 4. On tokens of width 4 one
layer has rank 5, however wide it is inside. Least squares gives the error that no single layer of
any width and any number of heads can go below, because one layer is linear in 40 cubic features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import Column, columns_table, number

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DepthTeacherOptions", "DepthTeacherStudy"]

_WIDTH, _TOKENS, _HELD_OUT = 4, 4, 4000


@dataclass(frozen=True)
class DepthTeacherOptions:
    """Students of one and two layers that learn a teacher of two layers."""

    widths: tuple[int, ...] = (8, 16, 32, 64, 128)
    """Widths of the students with one layer."""
    restarts: int = 5
    """Trainings of each student; the best counts."""
    steps: int = 1500
    """Steps of Adam with 256 samples each."""
    samples: int = 20000
    """Training samples."""

    def __post_init__(self) -> None:
        at_least_one(self, "widths", "restarts", "steps", "samples")


class DepthTeacherStudy(Study[DepthTeacherOptions]):
    """One cell a student."""

    name = "depth-teacher"
    Options = DepthTeacherOptions

    def cells(self, options: DepthTeacherOptions) -> Sequence[Cell]:
        """Return the cells: least squares, one layer by width, two layers."""
        shared = {
            "restarts": options.restarts,
            "steps": options.steps,
            "samples": options.samples,
        }
        students = [{"layers": 1, "width": 0}, *({"layers": 1, "width": w} for w in options.widths)]
        return [{**student, **shared} for student in [*students, {"layers": 2, "width": _WIDTH}]]

    def run(self, cell: Cell, options: DepthTeacherOptions, scratch: Path) -> Row:
        """Return the held-out error of the best training, relative to the variance."""
        x, y = _samples(cell["samples"] + _HELD_OUT)
        if not cell["width"]:
            return {"error": round(_least_squares(x, y), 4), "median": None}
        errors = sorted(_train(x, y, cell, restart) for restart in range(cell["restarts"]))
        return {"error": round(errors[0], 4), "median": round(errors[len(errors) // 2], 4)}

    def tables(
        self, rows: Sequence[Row], options: DepthTeacherOptions
    ) -> Mapping[str, str | bytes]:
        """Return one table."""
        first = rows[0]
        caption = (
            f"Held-out squared error over variance of students that learn two random softmax-free "
            f"layers of width {_WIDTH} on {_TOKENS} tokens (separation rank 110); "
            f"{first['samples']} samples, {first['steps']} steps of Adam, best and median of "
            f"{first['restarts']} trainings."
        )
        columns: dict[str, Column] = {
            "student": _student,
            "separation rank": lambda row: 110 if row["layers"] == 2 else _WIDTH + 1,
            "best": "{error:.3f}",
            "median": lambda row: number(row["median"]),
        }
        return {"table.md": page(caption, columns_table(rows, columns))}


def _student(row: Row) -> str:
    if not row["width"]:
        return "one layer, any width and heads, by least squares"
    return f"{row['layers']} layer{'s' * (row['layers'] > 1)}, width {row['width']}"


def _network(x: "Tensor", weights: "Sequence[Sequence[Tensor] | Tensor]") -> "Tensor":
    """Return the first coordinate of the first token after layers of softmax-free attention."""
    for w_q, w_k, w_v in weights:
        x = (x @ w_q) @ (x @ w_k).mT @ (x @ w_v)
    return x[:, 0]


def _samples(count: int) -> "tuple[Tensor, Tensor]":
    """Return tokens on the unit sphere, and the standardised output of the teacher."""
    import torch

    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2, 3, _WIDTH, _WIDTH, generator=generator) / _WIDTH**0.5
    x = torch.randn(count, _TOKENS, _WIDTH, generator=generator)
    x = x / x.norm(dim=-1, keepdim=True)
    y = _network(x, list(weights))[:, 0]
    return x, (y - y.mean()) / y.std()


def _least_squares(x: "Tensor", y: "Tensor") -> float:
    """Return the error of the best function ``Σ c[a b c] x_0[a] Σ_j x_j[b] x_j[c]``."""
    import torch

    moments = torch.einsum("bja,bjc->bac", x, x)
    row, column = torch.triu_indices(_WIDTH, _WIDTH)
    features = torch.einsum("ba,bs->bas", x[:, 0], moments[:, row, column]).flatten(1).double()
    features = torch.cat([features, torch.ones(len(x), 1).double()], dim=1)
    q, r = torch.linalg.qr(features[:-_HELD_OUT])
    solution = torch.linalg.solve_triangular(
        r, (q.T @ y[:-_HELD_OUT].double())[:, None], upper=True
    )
    left = y[-_HELD_OUT:].double() - (features[-_HELD_OUT:] @ solution)[:, 0]
    return float(left.square().mean() / y[-_HELD_OUT:].double().var())


def _train(x: "Tensor", y: "Tensor", cell: Cell, restart: int) -> float:
    """Return the held-out error of one training."""
    import torch

    generator = torch.Generator().manual_seed(100 + restart)
    layers, width = cell["layers"], cell["width"]

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-2] ** 0.5).requires_grad_()

    lift, read = draw(_WIDTH, width), draw(width, 1)
    weights = [[draw(width, width) for _ in range(3)] for _ in range(layers)]
    shift = torch.zeros(1, requires_grad=True)
    everything = [lift, read, shift, *(w for layer in weights for w in layer)]
    optimizer = torch.optim.Adam(everything, lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cell["steps"])

    def predict(tokens: torch.Tensor) -> torch.Tensor:
        return (_network(tokens @ lift, weights) @ read)[:, 0] + shift

    for _ in range(cell["steps"]):
        pick = torch.randint(len(x) - _HELD_OUT, (256,), generator=generator)
        optimizer.zero_grad()
        (predict(x[pick]) - y[pick]).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(everything, 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        left = y[-_HELD_OUT:] - predict(x[-_HELD_OUT:])
        return float(left.square().mean() / y[-_HELD_OUT:].var())
