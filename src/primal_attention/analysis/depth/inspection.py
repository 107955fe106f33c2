"""The shape of a model beside the rule: ``inspect_depth`` and the analysis ``depth``."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from primal_attention.analysis.depth.blocks import show_params
from primal_attention.analysis.depth.bounds import Regime, depth_threshold, log3_sep_bounds
from primal_attention.analysis.depth.literature import FINDINGS
from primal_attention.analysis.depth.roles import ModelParts, embedding_rank, find_parts
from primal_attention.analysis.depth.spectrum import SeparationSpectrum, separation_spectrum
from primal_attention.analysis.options import DepthOptions
from primal_attention.analysis.registry import AnalysisResult, ShownTable
from primal_attention.hosts import Batch
from primal_attention.models.depth_rule import (
    DEEP,
    FITTED_LAYERS,
    SHALLOW,
    depth_error,
    depth_of_width,
    optimal_depth,
    optimal_width,
)
from primal_attention.report.page import Report, to_png
from primal_attention.support.output import to_json

__all__ = ["DepthResult", "analyze_depth", "inspect_depth"]

Side = Literal["shallow", "in the range", "deep"]


@dataclass(frozen=True)
class DepthResult(AnalysisResult):
    """Shape of a model, its parameters by role, and what the rule says about them."""

    name: str
    """Class of the model."""
    parts: ModelParts
    """What the modules show: depth, width, heads, parameters by role."""
    rank: int | None
    """Numerical rank of the embedding, singular values above 1e-3 σ₁; ``None`` without one."""
    spectrum: SeparationSpectrum | None = None
    """Separation spectrum on data, if it was measured."""

    @property
    def layers(self) -> int:
        """Number of blocks that mix tokens."""
        return self.parts.mixing_layers

    @property
    def width(self) -> int:
        """Model width."""
        return self.parts.width

    @property
    def heads(self) -> int | None:
        """Heads of a layer, if they are known."""
        return self.parts.heads

    @property
    def params(self) -> int:
        """Parameters inside the blocks, the ``N`` of the rule."""
        return self.parts.block_params

    @property
    def optimal_depth(self) -> float:
        """``L*(N)`` of the rule, for the depth and width of the model and blocks of ``12 d²``.

        The rule compares depth with width. Blocks of another size, such as gated ones, therefore
        count as if they had the usual ``12 d²`` parameters.
        """
        return optimal_depth(12 * max(self.layers, 1) * self.width**2)

    @property
    def ratio(self) -> float:
        """Depth over ``L*(N)``."""
        return self.layers / self.optimal_depth

    @property
    def side(self) -> Side:
        """Where the depth is, beside the range from 0.5 to 1.5 times ``L*(N)``."""
        if self.ratio < SHALLOW:
            return "shallow"
        return "deep" if self.ratio > DEEP else "in the range"

    @property
    def regime(self) -> Regime:
        """Regime of the theory: whether the depth is below ``log₃ d``."""
        return log3_sep_bounds(max(self.layers, 1), self.width, 1).regime

    @property
    def is_extrapolated(self) -> bool:
        """Whether the rule is used outside the depths to which it was fitted."""
        return not FITTED_LAYERS[0] <= self.optimal_depth <= FITTED_LAYERS[1]

    def verdict(self) -> str:
        """Return the depth of the model beside the rule."""
        best = self.optimal_depth
        size = (
            f"{self.layers} layers of width {self.width}, {show_params(self.params)} parameters in "
            "the blocks"
        )
        if best < 1:
            words = f"{size}: too few for the rule, which was fitted from millions on."
            return " ".join([words, *self.notes()])
        words = (
            f"{size}: the rule gives {best:.1f} layers of width {optimal_width(best):.0f}, so the "
            f"model has {self.ratio:.2f} times that depth "
        )
        words += {
            "shallow": "and is on the shallow side.",
            "deep": "and is on the deep side.",
            "in the range": "and is inside the range from 0.5 to 1.5.",
        }[self.side]
        return " ".join([words, *self.notes()])

    def notes(self) -> list[str]:
        """Return what limits the comparison with the rule, in sentences."""
        found, parts = [], self.parts
        if self.is_extrapolated:
            found.append("This is outside the 6 to 48 layers of the fit: an extrapolation.")
        if parts.mixing_layers < parts.layers:
            found.append(
                f"{parts.layers - parts.mixing_layers} of {parts.layers} layers mix no tokens and "
                "do not count."
            )
        if parts.bilinear_layers:
            found.append(
                f"{parts.bilinear_layers} layers are primal and bilinear; such layers call for "
                "more depth than the rule says."
            )
        if self.rank is not None and self.rank < self.width:
            found.append(
                f"The embedding has rank {self.rank} below the width, so width beyond it adds "
                f"little; depth should be at least {max(depth_of_width(self.rank), 1):.0f}."
            )
        if parts.other_stacks:
            found.append(
                f"Only the largest stack, {parts.stack}, is compared; others: "
                f"{', '.join(parts.other_stacks)}."
            )
        return found

    def table(self) -> ShownTable:
        """Return the shape, the parameters by role and the rule."""
        best, roles = self.optimal_depth, self.parts.roles
        error = depth_error(12 * max(self.layers, 1) * self.width**2)
        rows: list[Sequence[object]] = [
            ["layers", self.layers],
            ["width", self.width],
            ["heads", "unknown" if self.heads is None else self.heads],
            ["rank of the embedding", "none" if self.rank is None else self.rank],
            *[[f"parameters: {role}", f"{getattr(roles, role):,}"] for role in roles._fields],
            ["parameters in the blocks", f"{self.params:,}"],
            ["L*(N)", f"{best:.1f} ± {2 * error:.1f}"],
            ["layers / L*(N)", f"{self.ratio:.2f}"],
            ["threshold log3(width)", f"{depth_threshold(self.width):.1f}"],
            ["regime of the theory", self.regime],
        ]
        if self.spectrum is not None:
            rows += self.spectrum.rows()
        return ["quantity", "value"], rows

    def plot(self) -> bytes:
        """Return size against depth as PNG, with the rule and the model as a point."""
        from primal_attention.analysis.depth.figure import plot_depth

        # the axis is logarithmic: a model that mixes no tokens stands below the first layer
        return to_png(plot_depth({self.name: (float(self.params), max(self.layers, 0.5))}))

    def to_json(self) -> str:
        """Return all numbers as JSON."""
        parts = {k: v for k, v in self.parts._asdict().items() if k not in ("embedding", "roles")}
        return to_json(
            {
                "model": self.name,
                **parts,
                "parameters": self.parts.roles._asdict(),
                "embedding_rank": self.rank,
                "optimal_depth": self.optimal_depth,
                "optimal_width": optimal_width(self.optimal_depth),
                "ratio": self.ratio,
                "side": self.side,
                "regime": self.regime,
                "threshold": depth_threshold(self.width),
                "is_extrapolated": self.is_extrapolated,
                "spectrum": None if self.spectrum is None else self.spectrum._asdict(),
            }
        )

    def limits(self) -> str:
        """Return what the numbers do not show."""
        words = (
            "The rule is a fit to language models on one data set; it does not show that another "
            "depth would score better on your task"
        )
        if self.spectrum is None:
            return f"{words}."
        return f"{words}, and the separation spectrum is a diagnostic, not the theorem's quantity."

    def report(self) -> Report:
        """Return a page with the verdict, the picture, the numbers and later findings."""
        page = Report(
            f"Depth of {self.name}",
            "Is the model deep enough for its size, or too deep? The rule of Levine et al. 2020 "
            "and later findings.",
        )
        page.verdict(self.verdict())
        page.figure(
            self.plot(),
            "Size against depth. Line: the rule, dashed where it extrapolates. Dark band: two "
            "standard errors. Light band: 0.5 to 1.5 times the rule.",
        )
        page.section("Numbers").table(*self.table())
        if self.spectrum is not None:
            page.text(self.spectrum.explain())
        page.section("Later findings, as reported")
        rows = [[f.work, f.says, {"none": "–"}.get(f.pull, f.pull)] for f in FINDINGS]
        return page.table(["work", "finding", "points to"], rows)


def inspect_depth(model: nn.Module) -> DepthResult:
    """Return depth, width and parameters of a model, and what the rule says about them.

    No forward is run. Works for models of transformers, torch.nn, timm and this library, and for
    converted models.

    Args:
        model: A Transformer.

    Example:
        >>> from primal_attention.models import CausalDecoder, DecoderConfig
        >>> config = DecoderConfig(vocab_size=512, dim=256, num_layers=2, attention="softmax")
        >>> result = inspect_depth(CausalDecoder(config))
        >>> result.layers, result.width, result.rank, result.side
        (2, 256, 256, 'in the range')
    """
    parts = find_parts(model)
    rank = None if parts.embedding is None else embedding_rank(parts.embedding)
    return DepthResult(type(model).__name__, parts, rank)


def analyze_depth(model: nn.Module, batches: Sequence[Batch], options: DepthOptions) -> DepthResult:
    """Return the shape of a model beside the rule, and its separation spectrum on the batches.

    Args:
        model: A Transformer.
        batches: Inputs of the model; without any, no spectrum is measured.
        options: Size of the grid.
    """
    result = inspect_depth(model)
    if not batches or not options.templates:
        return result
    spectrum = separation_spectrum(
        model, batches, templates=options.templates, tokens=options.tokens
    )
    return replace(result, spectrum=spectrum)
