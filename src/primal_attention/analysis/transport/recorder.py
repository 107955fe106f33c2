"""Positions of points inside a model, recorded over the epochs of a training."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from primal_attention.analysis.registry import AnalysisResult, ShownTable
from primal_attention.analysis.transport.metrics import (
    PathMetrics,
    RootMetrics,
    Scope,
    path_metrics,
    root_metrics,
)
from primal_attention.analysis.transport.plots import plot_map, plot_metrics, plot_paths
from primal_attention.attention import Attention
from primal_attention.functional.precision import accumulator
from primal_attention.hosts import Batch, ModuleCall, batch_arguments
from primal_attention.hosts.recording import first_tensor, watch_modules
from primal_attention.report.page import Report, to_png
from primal_attention.support.output import to_json
from primal_attention.training.evaluation import eval_mode

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PathResult", "TransportRecorder", "warn_of_narrow_norms"]

_NARROW = 3
"""Width up to which a LayerNorm leaves almost nothing of its input."""


class TransportRecorder:
    """Records where a module moves its points, after every epoch.

    The model runs on one fixed batch in evaluation mode. The start (index 0) is the input of
    ``module`` before training. The end of an epoch is the output of ``module``, or of the attention
    in it. The same points are kept for all epochs.

    Args:
        module: The module to watch, inside ``model``: a block, or an attention.
        model: The model that is trained.
        batch: Inputs of the model: a tensor, positional arguments or keyword arguments.
        labels: Class of each sequence ``[b]`` or of each token ``[b n]``.
        what: What moves: ``"block"``, the output of ``module``; ``"attn"``, the output of the
            attention in it; ``"residual"``, the input of ``module`` plus that output. Without an
            attention inside, ``module`` counts as the attention.
        every: Record every so many epochs; the last epoch is recorded when the context ends.
        max_points: Largest number of points; a sample that keeps the shares of the classes.
        seed: Seed of the sample.

    Example:
        >>> from primal_attention.attention import create_attention
        >>> layer, x = create_attention("softmax", 8, 2), torch.randn(4, 10, 8)
        >>> optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        >>> with TransportRecorder(layer, layer, x, what="residual") as recorder:
        ...     for epoch in range(2):
        ...         layer(x).square().mean().backward()
        ...         optimizer.step()
        ...         recorder.record()
        >>> recorder.positions.shape
        torch.Size([3, 40, 8])
    """

    def __init__(
        self,
        module: nn.Module,
        model: nn.Module,
        batch: Batch,
        *,
        labels: Int[Tensor, "*b"] | None = None,
        what: Literal["attn", "block", "residual"] = "block",
        every: int = 1,
        max_points: int = 1000,
        seed: int = 0,
    ) -> None:
        if what not in ("attn", "block", "residual"):
            raise ValueError(f"what must be 'attn', 'block' or 'residual', got {what!r}.")
        if every < 1 or max_points < 2:
            raise ValueError(
                f"every must be at least 1 and max_points at least 2, got {every} and {max_points}."
            )
        warn_of_narrow_norms(module)
        self.module, self.model, self.batch = module, model, batch
        self.what, self.every = what, every
        self.branch = module if what == "block" else _attention_in(module)
        start, end, keep = self._probe()
        self.points, self.labels = _sample(keep, labels, max_points, seed)
        self.note = ""
        """What to know about the space of the positions; empty if it is that of the module."""
        self._space = _CommonSpace.identity()
        start = self._pick(start)
        if start.shape[-1] != end.shape[-1]:
            self._space = _CommonSpace.fit(start, self._pick(end))
            self.note = (
                f"Input and output are {start.shape[-1]} and {end.shape[-1]} wide. Positions are "
                f"{self._space.width} principal components of both, fitted before training."
            )
            warnings.warn(self.note, stacklevel=2)
        self.epoch = 0
        self.epochs = [0]
        self._positions = [self._space.of_input(start)]

    @property
    def positions(self) -> Float[Tensor, "e n d"]:
        """The start, and the positions after every recorded epoch."""
        return torch.stack(self._positions)

    def record(self) -> None:
        """Count one epoch, and store the positions if it is one to record."""
        self.epoch += 1
        if self.epoch % self.every == 0:
            self._store()

    def __call__(self, *_: object) -> None:
        """Record; so that ``fit(..., on_epoch=recorder)`` works."""
        self.record()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self.epochs[-1] != self.epoch:
            self._store()

    def metrics(self, *, scope: Scope = "pooled", p: Literal[1, 2] = 2) -> "PathResult":
        """Return the numbers of every recorded epoch.

        Args:
            scope: ``"pooled"``, or ``"class"`` to optimise within each class.
            p: Exponent of the distance.
        """
        path = self.positions
        rows = path_metrics(path, self.labels, epochs=self.epochs, scope=scope, p=p)
        root = root_metrics(path, self.labels)
        return PathResult(rows, root, path, self.labels, scope, p, self.what, self.note)

    def plot_paths(self) -> "Figure":
        """Return a figure of the paths."""
        return plot_paths(self.positions, self.labels)

    def plot_map(self) -> "Figure":
        """Return a figure of start and end as arrows, beside the optimal map."""
        return plot_map(self._positions[0], self._positions[-1], self.labels)

    def plot_metrics(self, *, scope: Scope = "pooled", p: Literal[1, 2] = 2) -> "Figure":
        """Return a figure of the numbers over the epochs."""
        return plot_metrics(self.metrics(scope=scope, p=p).rows)

    def _store(self) -> None:
        _, end, _ = self._probe()
        self._positions.append(self._space.of_output(self._pick(end)))
        self.epochs.append(self.epoch)

    def _pick(self, tokens: Tensor) -> Float[Tensor, "n d"]:
        return tokens[tuple(self.points.T)]

    @torch.no_grad()
    def _probe(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return input and end of all tokens, and which tokens are real."""
        seen: dict[str, Tensor] = {}

        def enter(part: str, call: ModuleCall) -> None:
            if part == "start":
                seen["start"] = call.args[0] if call.args else call.kwargs["x"]
                if call.kwargs.get("key_mask") is not None and call.kwargs.get("context") is None:
                    seen["mask"] = call.kwargs["key_mask"]

        def leave(part: str, call: ModuleCall) -> None:
            if part == "end":
                seen["end"] = first_tensor(call.output)

        args, kwargs = batch_arguments(self.batch)
        watched = watch_modules(
            {"start": self.module, "end": self.branch}, enter=enter, leave=leave
        )
        with eval_mode(self.model), watched:
            self.model(*args, **kwargs)
        if "start" not in seen or "end" not in seen:
            raise ValueError(
                f"The model did not call {type(self.module).__name__} on the batch; give a module "
                "that is part of the model."
            )
        start, end = (t.to(accumulator(t)).cpu() for t in (seen["start"], seen["end"]))
        if start.shape[:-1] != end.shape[:-1]:
            raise ValueError(
                f"{type(self.module).__name__} maps {tuple(start.shape)} to {tuple(end.shape)}; "
                "only modules that keep the number of tokens can be recorded."
            )
        if self.what == "residual":
            end = start + end
        keep = torch.ones(start.shape[:-1], dtype=torch.bool)
        return start, end, seen.get("mask", keep).cpu()


class _CommonSpace(NamedTuple):
    """Maps of inputs and outputs of different widths into one space; ``None`` for the identity."""

    input: tuple[Tensor, Tensor] | None
    output: tuple[Tensor, Tensor] | None

    @classmethod
    def identity(cls) -> "_CommonSpace":
        return cls(None, None)

    @classmethod
    def fit(cls, x: Float[Tensor, "n a"], y: Float[Tensor, "n b"]) -> "_CommonSpace":
        """Return the loadings of the principal components of ``[x, y]``, for each part."""
        parts = [(t.mean(0), t - t.mean(0)) for t in (x, y)]
        # each part in units of its own size: the larger one would take all components
        sizes = [float(centred.square().sum(1).mean().sqrt()) or 1.0 for _, centred in parts]
        joined = torch.cat([c / s for (_, c), s in zip(parts, sizes, strict=True)], dim=1)
        _, _, vt = torch.linalg.svd(joined, full_matrices=False)
        loadings = vt[: min(x.shape[1], y.shape[1])].T
        split = loadings.split([x.shape[1], y.shape[1]])
        return cls((parts[0][0], split[0]), (parts[1][0], split[1]))

    @property
    def width(self) -> int:
        return 0 if self.input is None else self.input[1].shape[1]

    def of_input(self, x: Tensor) -> Tensor:
        return x if self.input is None else (x - self.input[0]) @ self.input[1]

    def of_output(self, y: Tensor) -> Tensor:
        return y if self.output is None else (y - self.output[0]) @ self.output[1]


def _attention_in(module: nn.Module) -> nn.Module:
    """Return the attention inside a module, or the module if there is none."""
    found: dict[str, nn.Module] = {}
    for name, part in module.named_modules():
        is_inner = any(name.startswith(f"{outer}.") or outer == "" for outer in found)
        if isinstance(part, Attention | nn.MultiheadAttention) and not is_inner:
            found[name] = part
    if len(found) > 1:
        raise ValueError(
            f"{type(module).__name__} has {len(found)} attentions ({', '.join(found)}); give one "
            "of them as module."
        )
    return next(iter(found.values()), module)


def _sample(
    keep: Tensor, labels: Tensor | None, max_points: int, seed: int
) -> tuple[Int[Tensor, "n axes"], Int[Tensor, " n"] | None]:
    """Return the indices of some real tokens, one column an axis, and their classes."""
    points = keep.nonzero()
    if labels is not None:
        labels = labels.cpu()
        if labels.shape != keep.shape[: labels.dim()]:
            raise ValueError(
                f"labels must have the shape {tuple(keep.shape)} of the tokens or its first part, "
                f"got {tuple(labels.shape)}."
            )
        labels = labels[tuple(points[:, : labels.dim()].T)]
    if len(points) > max_points:
        order = torch.randperm(len(points), generator=torch.Generator().manual_seed(seed))
        if labels is not None:
            order = order[labels[order].argsort(stable=True)]
        # evenly spaced in the order of the classes: every class keeps its share
        chosen = order[torch.arange(max_points) * len(points) // max_points].sort().values
        points, labels = points[chosen], None if labels is None else labels[chosen]
    return points, labels


def warn_of_narrow_norms(module: nn.Module) -> None:
    """Warn if a LayerNorm runs over three features or fewer.

    With two features its output is ±(1, −1) for every input.
    """
    narrow = [
        (name or type(part).__name__, part.normalized_shape[-1])
        for name, part in module.named_modules()
        if isinstance(part, nn.LayerNorm) and part.normalized_shape[-1] <= _NARROW
    ]
    if narrow:
        name, width = narrow[0]
        warnings.warn(
            f"{name} normalises over {width} features, which leaves almost nothing of its input: "
            "over two features the result is always ±(1, −1). Embed the features first.",
            stacklevel=3,
        )


@dataclass(frozen=True)
class PathResult(AnalysisResult):
    """How points moved during a training, and how an optimal map would have moved them."""

    rows: Sequence[PathMetrics]
    root: RootMetrics
    positions: Float[Tensor, "e n d"]
    labels: Int[Tensor, " n"] | None
    scope: Scope
    p: int
    what: str
    note: str = ""

    def verdict(self) -> str:
        """Return cost, optimum and efficiency at the end."""
        last = self.rows[-1]
        if last.epoch == 0:
            return "No epoch was recorded; call record() after every epoch."
        return (
            f"After epoch {last.epoch} the map costs {last.cost:.3g}, the best map to the same "
            f"points {last.optimal:.3g}: optimality {last.optimality:.2f}, {last.matching:.0%} of "
            f"the points go where the best map sends them. Paths have efficiency "
            f"{last.efficiency:.2f}, where straight ones have 1."
        )

    def table(self) -> ShownTable:
        """Return the numbers of each recorded epoch."""
        header = [name.replace("_", " ") for name in PathMetrics._fields]
        return header, [[row.epoch, *(f"{value:.4g}" for value in row[1:])] for row in self.rows]

    def plot(self) -> bytes:
        """Return the numbers over the epochs as PNG."""
        return to_png(plot_metrics(self.rows))

    def to_json(self) -> str:
        """Return all numbers as JSON."""
        return to_json(
            {
                "what": self.what,
                "scope": self.scope,
                "p": self.p,
                "points": self.positions.shape[1],
                "note": self.note,
                "epochs": [row._asdict() for row in self.rows],
                "root": self.root._asdict(),
            }
        )

    def limits(self) -> str:
        """Return what the numbers do not show."""
        return (
            "Paths in a common plane do not show what the other dimensions do, nor which moves "
            "matter for the output."
        )

    def report(self) -> Report:
        """Return a page with paths, map, curves and tables."""
        moved = {"attn": "the attention", "block": "the block", "residual": "input plus attention"}
        page = Report(
            "Transport of points during training",
            f"{self.positions.shape[1]} points, moved by {moved[self.what]}; scope {self.scope}, "
            f"p = {self.p}. {self.note}".rstrip(),
        )
        page.verdict(self.verdict())
        page.figure(self.plot(), "Cost and gap, optimality, efficiency and regret over the epochs.")
        page.section("Points")
        start, end = self.positions[0], self.positions[-1]
        page.figure(to_png(plot_paths(self.positions, self.labels)), "Paths of the points.")
        page.figure(
            to_png(plot_map(start, end, self.labels)), "The map, and the best map to the same end."
        )
        page.section("Epochs").table(*self.table())
        page.section("Coded definitions").text(
            "Roots of sums of squares, summed over classes; for comparison with published numbers. "
            "Even straight paths have a small root efficiency, about √(2/n) for two classes."
        )
        return page.table(
            ["number", "value"],
            [
                [name.replace("_", " "), f"{value:.4g}"]
                for name, value in self.root._asdict().items()
            ],
        )
