"""``primal analyze depth``: a plan for a budget, exact separation ranks, the regime of a shape."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from primal_attention.analysis.registry import check_file
from primal_attention.support.output import markdown_table

__all__ = ["DepthPlanTool", "DepthRankTool", "DepthRegimeTool"]


@dataclass(frozen=True)
class DepthPlanTool:
    """Print depth, width and heads for a budget of parameters, with reasons."""

    params: Annotated[str, tyro.conf.Positional]
    """Parameters without embeddings: 30000000, 30M or 1.5B."""
    vocab: int | None = None
    """Distinct token ids."""
    head_width: int = 64
    """Width of a head."""
    attention: str = "softmax"
    """softmax, linear, primal, linformer, nystromformer or skyformer."""
    rank: int | None = None
    """Directions of each primal head, or rank of a low-rank mechanism."""
    ffn_ratio: float = 4.0
    """Width inside the perceptron over the model width."""
    gated: bool = False
    """The perceptron has a gate, and with it a third matrix."""
    multiple_of: int = 64
    """The model width is a multiple of this."""
    includes_embedding: bool = False
    """PARAMS counts one embedding of VOCAB rows."""
    out: Path | None = None
    """Write the plan to this file as well: a page (.html), numbers (.json) or picture (.png)."""

    def run(self) -> None:
        """Print the plan, write the file."""
        from primal_attention.analysis.depth.planner import plan

        if self.out is not None:
            check_file(self.out)
        # every other field is an argument of the same name
        found = plan(**{name: value for name, value in vars(self).items() if name != "out"})
        print(f"{found.verdict()}\n\n{markdown_table(*found.table())}\n")
        print("\n".join(f"- {reason}" for reason in found.reasons))
        print(f"\n{found.limits()}")
        if self.out is not None:
            found.write(self.out)
            print(f"Wrote {self.out}")


@dataclass(frozen=True)
class DepthRankTool:
    """Print the exact separation rank of a small network without softmax."""

    attention: str = "standard"
    """standard (also softmax-free), residual, linear, primal or primal-static."""
    layers: Annotated[int, tyro.conf.arg(aliases=["-L"])] = 1
    """Depth."""
    width: Annotated[int, tyro.conf.arg(aliases=["-d"])] = 2
    """Model width."""
    heads: Annotated[int, tyro.conf.arg(aliases=["-H"])] = 1
    """Heads."""
    tokens: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 4
    """Number of tokens."""
    rank: Annotated[int | None, tyro.conf.arg(aliases=["-s"])] = None
    """Directions of each primal head; by default the head width."""
    max_templates: int = 640
    """Work limit: the largest rank that can be found."""

    def run(self) -> None:
        """Print the rank, beside that of standard attention."""
        from primal_attention.analysis.depth.ranks import separation_rank

        def rank(attention: str) -> int:
            return separation_rank(
                attention,
                self.layers,
                self.width,
                self.heads,
                self.tokens,
                self.rank,
                max_templates=self.max_templates,
            )

        found = rank(self.attention)
        shape = f"{self.layers} layers of width {self.width}, {self.heads} heads, "
        print(f"{self.attention}, {shape}{self.tokens} tokens: separation rank {found}")
        if self.attention in ("primal", "primal-static"):
            print(f"standard, the same shape: separation rank {rank('standard')}")
        print(
            "Exact, over a prime field, with random weights and no softmax. It says what such a "
            "network can express, not what a trained one does."
        )


@dataclass(frozen=True)
class DepthRegimeTool:
    """Print on which side of the thresholds a shape is, by theory and by the fitted rule."""

    layers: Annotated[int, tyro.conf.arg(aliases=["-L"])]
    """Depth."""
    width: Annotated[int, tyro.conf.arg(aliases=["-d"])]
    """Model width."""
    heads: Annotated[int, tyro.conf.arg(aliases=["-H"])] = 1
    """Heads."""

    def run(self) -> None:
        """Print the thresholds as a table."""
        from primal_attention.analysis.depth.blocks import show_params
        from primal_attention.analysis.depth.bounds import depth_threshold, log3_sep_bounds
        from primal_attention.models.depth_rule import (
            DEEP,
            FITTED_LAYERS,
            SHALLOW,
            depth_error,
            optimal_depth,
            optimal_width,
        )

        lower, upper, regime = log3_sep_bounds(self.layers, self.width, self.heads)
        size = 12 * self.layers * self.width**2
        best = optimal_depth(size)
        ratio = self.layers / best
        side = "shallow" if ratio < SHALLOW else "deep" if ratio > DEEP else "inside the range"
        rows = [
            ["parameters, 12 L d²", show_params(size)],
            ["threshold of the theory, log3(d)", f"{depth_threshold(self.width):.1f}"],
            ["regime of the theory", regime],
            ["log3 of the separation rank", f"{lower:.1f} to {upper:.1f}"],
            ["L*(N) of the rule", f"{best:.1f} ± {2 * depth_error(size):.1f}"],
            ["d* at this depth", f"{optimal_width(best):.0f}"],
            ["layers / L*(N)", f"{ratio:.2f}, {side}"],
        ]
        print(markdown_table(["quantity", "value"], rows))
        if not FITTED_LAYERS[0] <= best <= FITTED_LAYERS[1]:
            print("\nL*(N) is outside the 6 to 48 layers of the fit: an extrapolation.")
        print("\nlog3(d) is no recommended depth; the rule for trained models is L*(N).")
