"""What the planner returns: shapes, a range of depths and reasons."""

import math
from dataclasses import asdict, dataclass
from typing import NamedTuple

from primal_attention.analysis.depth.blocks import show_params
from primal_attention.analysis.depth.bounds import Regime
from primal_attention.analysis.registry import AnalysisResult, ShownTable
from primal_attention.report.page import Report, to_png
from primal_attention.support.output import to_json

__all__ = ["DepthPlan", "Shape"]


class Shape(NamedTuple):
    """A model that fits the budget."""

    layers: int
    width: int
    heads: int
    hidden: int
    """Width inside the perceptron, chosen so that the budget is met."""
    params: int
    """Parameters of the blocks, without embeddings."""
    embedding: int
    """Parameters of one embedding; 0 if no vocabulary was given."""
    ratio: float
    """Depth over ``L*(N)``."""
    regime: Regime
    """Regime of the theory: which side of ``log₃ d`` the depth is on."""
    mega_flops: float
    """Million operations a token, forward, without the attention matrix."""


@dataclass(frozen=True)
class DepthPlan(AnalysisResult):
    """Depth and width for a budget: one recommended shape, its neighbours, a range and reasons."""

    params: float
    """Parameters without embeddings."""
    depth: float
    """``L*(N)`` of the rule."""
    width: float
    """``d*`` at this depth."""
    error: float
    """Standard error of the depth in layers, from that of the constants."""
    low: float
    """Shallow end of the range."""
    high: float
    """Deep end of the range."""
    recommended: Shape
    """The shape nearest to the rule."""
    shapes: tuple[Shape, ...]
    """The recommended shape and its neighbours, from shallow to deep."""
    reasons: tuple[str, ...]
    """Why the range is what it is, in sentences."""

    def verdict(self) -> str:
        """Return the recommended shape and the range of depths."""
        best = self.recommended
        return (
            f"For {show_params(self.params)} parameters without embeddings the rule gives "
            f"{self.depth:.1f} ± {2 * self.error:.1f} layers; take {best.layers} layers of width "
            f"{best.width} with {best.heads} heads. Anything from {math.ceil(self.low)} to "
            f"{math.floor(self.high)} layers is reasonable, and the expected penalty is small."
        )

    def table(self) -> ShownTable:
        """Return the recommended shape between its neighbours."""
        header = ["layers", "width", "heads", "FFN width", "parameters", "embedding"]
        header += ["layers / L*", "regime", "MFLOPs a token", ""]
        rows: list[list[object]] = []
        for shape in self.shapes:
            count, embedding = show_params(shape.params), show_params(shape.embedding)
            mark = "recommended" if shape == self.recommended else ""
            row: list[object] = [
                shape.layers,
                shape.width,
                shape.heads,
                shape.hidden,
                count,
                embedding,
            ]
            row += [f"{shape.ratio:.2f}", shape.regime, f"{shape.mega_flops:.1f}", mark]
            rows.append(row)
        return header, rows

    def plot(self) -> bytes:
        """Return size against depth as PNG, with the shapes as points."""
        from primal_attention.analysis.depth.figure import plot_depth

        points = {f"{s.layers} × {s.width}": (float(s.params), s.layers) for s in self.shapes}
        chosen = f"{self.recommended.layers} × {self.recommended.width}"
        return to_png(plot_depth(points, chosen=chosen))

    def to_json(self) -> str:
        """Return all numbers and reasons as JSON."""
        content = asdict(self)
        content["recommended"] = self.recommended._asdict()
        content["shapes"] = [shape._asdict() for shape in self.shapes]
        return to_json(content)

    def limits(self) -> str:
        """Return what the plan does not show."""
        return (
            "The rule was fitted to trained language models of 6 to 48 layers on one data set; it "
            "says nothing about your data, your optimizer or the speed of your machine."
        )

    def report(self) -> Report:
        """Return a page with the verdict, the picture, the shapes and the reasons."""
        page = Report(f"Depth for {show_params(self.params)} parameters")
        page.verdict(self.verdict())
        page.figure(self.plot(), "Size against depth: the rule, its error and the shapes.")
        page.section("Shapes").table(*self.table())
        page.section("Reasons")
        for reason in self.reasons:
            page.text(reason)
        return page
