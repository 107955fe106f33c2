"""Depth and width for a budget of parameters: a range with reasons, not one commandment."""

import math
from dataclasses import dataclass

from primal_attention.analysis.depth.blocks import Block, parse_params, show_params
from primal_attention.analysis.depth.bounds import log3_sep_bounds
from primal_attention.analysis.depth.literature import FINDINGS
from primal_attention.analysis.depth.plans import DepthPlan, Shape
from primal_attention.models.depth_rule import (
    DEEP,
    FITTED_LAYERS,
    SHALLOW,
    SLOPE,
    depth_of_width,
    optimal_depth,
    optimal_width,
    relative_error,
)

__all__ = ["plan"]

_TOLERANCE = 0.03
"""Largest difference from the budget, relative to it."""
_STEP = 8
"""Widths inside the perceptron are multiples of this."""
_STRETCH = 1.5
"""Neighbours whose perceptron differs more from the usual ratio are not shown."""


def plan(
    params: str | float,
    *,
    vocab: int | None = None,
    head_width: int = 64,
    attention: str = "softmax",
    rank: int | None = None,
    ffn_ratio: float = 4.0,
    gated: bool = False,
    multiple_of: int = 64,
    includes_embedding: bool = False,
) -> DepthPlan:
    """Return depth, width and heads for a budget of parameters, as a range with reasons.

    Args:
        params: Parameters without embeddings, as a number or text such as ``"30M"``.
        vocab: Distinct token ids. A small vocabulary makes more depth reasonable.
        head_width: Width of a head; the model width is a multiple of it.
        attention: ``"softmax"``, ``"linear"``, ``"primal"``, ``"linformer"``, ``"nystromformer"``
            or ``"skyformer"``.
        rank: Directions of each primal head, or rank of a low-rank mechanism.
        ffn_ratio: Width inside the perceptron over the model width.
        gated: Whether the perceptron has a gate, and with it a third matrix.
        multiple_of: The model width is a multiple of this too.
        includes_embedding: Whether ``params`` counts one embedding of ``vocab`` rows.

    Example:
        >>> found = plan("30M", vocab=32000)
        >>> found.recommended[:3]
        (17, 384, 6)
        >>> round(found.low), round(found.high)
        (8, 25)
    """
    budget = parse_params(params)
    block = Block(attention, head_width, rank, ffn_ratio, gated)
    for name, value in (("vocab", vocab), ("multiple_of", multiple_of)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    if includes_embedding and vocab is None:
        raise ValueError("includes_embedding needs vocab, the number of distinct token ids.")
    counted = vocab if includes_embedding and vocab is not None else 0
    if counted * optimal_width(0) >= budget:
        raise ValueError(
            f"the embedding alone has more than {show_params(counted * optimal_width(0))} of "
            f"{show_params(budget)} parameters; raise params or take a smaller vocabulary."
        )
    unit = math.lcm(multiple_of, head_width)
    return _Planner(budget, block, vocab or 0, counted, unit).plan()


@dataclass(frozen=True)
class _Planner:
    budget: float
    block: Block
    vocab: int
    counted: int
    """Rows of the embedding that are part of the budget."""
    unit: int
    """Widths are multiples of this."""

    @property
    def depth(self) -> float:
        return optimal_depth(
            self.budget, size=lambda layers, d: layers * self.block.params(d) + self.counted * d
        )

    def left(self, width: float) -> float:
        """Return the parameters that a model of this width has for its blocks."""
        return self.budget - self.counted * width

    def plan(self) -> DepthPlan:
        depth = self.depth
        width = optimal_width(depth)
        error = relative_error(depth) / (1 / depth + 2 * SLOPE)
        best = self.recommend(depth, width)
        around = (self.neighbour(best, step) for step in (1, -1))
        shapes = sorted([best, *(shape for shape in around if shape is not None)])
        low, high, because = self.range(depth, width)
        reasons = [*_rule(depth, error), *because, *_ratio(best, self.block), *_findings()]
        return DepthPlan(
            params=self.left(width),
            depth=depth,
            width=width,
            error=error,
            low=low,
            high=high,
            recommended=best,
            shapes=tuple(shapes),
            reasons=tuple(reasons),
        )

    def recommend(self, depth: float, width: float) -> Shape:
        """Return the shape of the rounded depth whose perceptron is nearest to the usual ratio."""
        layers, near = max(1, round(depth)), round(width / self.unit)
        found = (self.shape(layers, self.unit * k) for k in range(max(1, near - 2), near + 3))
        fits = [shape for shape in found if shape is not None]
        if not fits:
            raise ValueError(
                f"{show_params(self.budget)} parameters do not make {layers} layers whose width "
                f"is a multiple of {self.unit}; raise params, or lower head_width and multiple_of."
            )
        return min(fits, key=self.stretch)

    def neighbour(self, best: Shape, step: int) -> Shape | None:
        """Return a shape that is at least 8 % wider (or narrower) and has another depth."""
        start = max(1, round(0.08 * best.width / self.unit))
        for k in range(start, start + 8):
            width = best.width + step * k * self.unit
            if width < self.unit or self.left(width) <= 0:
                return None
            layers = round(self.left(width) / self.block.params(width))
            shape = self.shape(layers, width)
            if shape and layers != best.layers and self.stretch(shape) < math.log(_STRETCH):
                return shape
        return None

    def stretch(self, shape: Shape) -> float:
        """Return how far the perceptron is from the usual ratio, as a logarithm."""
        return abs(math.log(shape.hidden / (self.block.ffn_ratio * shape.width)))

    def shape(self, layers: int, width: int) -> Shape | None:
        """Return the shape whose perceptron meets the budget, or ``None`` if there is none."""
        budget = self.left(width)
        if layers < 1 or budget <= 0:
            return None
        hidden = round(self.block.hidden_for(width, budget / layers) / _STEP) * _STEP
        if hidden < _STEP:
            return None
        params = round(layers * self.block.params(width, hidden))
        if abs(params - budget) > _TOLERANCE * self.budget:
            return None
        heads = width // self.block.head_width
        embedding = self.vocab * width
        return Shape(
            layers=layers,
            width=width,
            heads=heads,
            hidden=hidden,
            params=params,
            embedding=embedding,
            ratio=layers / self.depth,
            regime=log3_sep_bounds(layers, width, heads).regime,
            mega_flops=round(2 * (params + embedding) / 1e6, 2),
        )

    def range(self, depth: float, width: float) -> tuple[float, float, list[str]]:
        """Return both ends of the range of depths, and the reasons that move them."""
        low, high = max(1.0, SHALLOW * depth), max(1.0, DEEP * depth)
        reasons = []
        if 0 < self.vocab < width:
            floor = depth_of_width(self.vocab)
            at_vocab = self.left(self.vocab) / self.block.params(self.vocab)
            low, high = max(low, floor), max(high, min(at_vocab, 2 * depth))
            reasons.append(
                f"The vocabulary of {self.vocab} is smaller than the width {width:.0f}: the "
                "embedding has at most this rank, so width beyond it adds little and depth gains "
                "(Wies et al. 2021, as reported). The range extends to deeper models."
            )
        if self.block.attention == "primal":
            high = max(high, math.log2(3) * depth)
            reasons.append(
                "Primal layers are bilinear, softmax-free attention is cubic: L layers have degree "
                "2^L instead of 3^L. Give an all-primal model more layers, up to "
                f"{math.log2(3) * depth:.0f}, or keep softmax below and make the last layer primal."
            )
        if self.block.is_low_rank and self.block.rank is not None:
            heads = width / self.block.head_width
            narrow = heads * min(self.block.rank, self.block.head_width)
            if narrow < width:
                low = max(low, min(depth_of_width(narrow), depth))
                reasons.append(
                    f"Rank {self.block.rank} makes heads of width {self.block.head_width} act like "
                    f"heads of width {self.block.rank}; the effective width is {narrow:.0f}."
                )
        return low, high, reasons


def _rule(depth: float, error: float) -> list[str]:
    words = (
        f"Levine et al. 2020: at this size more layers pay up to {depth:.1f} ± {2 * error:.1f} "
        "(two standard errors of their fit, as reported); beyond, width pays as much."
    )
    if depth < FITTED_LAYERS[0] or depth > FITTED_LAYERS[1]:
        words += " This is outside the fitted range of 6 to 48 layers: an extrapolation."
    flat = (
        f"The range is {SHALLOW:g} to {DEEP:g} times that depth, because later work disagrees "
        "about the best shape. Its width is a choice of this library, not a measurement. Fewer "
        "layers are faster at equal size: layers run one after the other."
    )
    return [words, flat]


def _ratio(best: Shape, block: Block) -> list[str]:
    ratio = best.hidden / best.width
    if abs(ratio / block.ffn_ratio - 1) < 0.1:
        return []
    return [
        f"The perceptron is {ratio:.1f} times as wide as the model instead of "
        f"{block.ffn_ratio:g}, so that whole layers and heads meet the budget."
    ]


def _findings() -> list[str]:
    pulls = {"deeper": "Points to the deep end.", "wider": "Points to the wide end.", "none": ""}
    return [f"{f.work}, as reported: {f.says}. {pulls[f.pull]}".strip() for f in FINDINGS]
