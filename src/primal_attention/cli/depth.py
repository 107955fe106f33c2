"""``primal depth``: a plan for a budget, exact separation ranks, the regime of a shape."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from primal_attention.support.command import UserError, did_you_mean, user_errors
from primal_attention.support.output import markdown_table, write_atomically
from primal_attention.support.settings import parse

__all__ = ["main"]


@dataclass(frozen=True)
class DepthPlanCommand:
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
    """Write the plan to this file as well: a page (.html) or JSON (.json)."""


@dataclass(frozen=True)
class DepthRankCommand:
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


@dataclass(frozen=True)
class DepthRegimeCommand:
    """Print on which side of the thresholds a shape is, by theory and by the fitted rule."""

    layers: Annotated[int, tyro.conf.arg(aliases=["-L"])]
    """Depth."""
    width: Annotated[int, tyro.conf.arg(aliases=["-d"])]
    """Model width."""
    heads: Annotated[int, tyro.conf.arg(aliases=["-H"])] = 1
    """Heads."""


def main(argv: list[str]) -> int:
    """Run ``plan``, ``rank`` or ``regime``."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_HELP)
        return 0
    action, rest = argv[0], argv[1:]
    if action not in _ACTIONS:
        raise UserError(
            f"there is no action {action!r}.{did_you_mean(action, _ACTIONS)} "
            f"Actions: {', '.join(_ACTIONS)}."
        )
    kind, run = _ACTIONS[action]
    options: Any = parse(kind, rest, prog=f"primal depth {action}")
    with user_errors(""):
        run(options)
    return 0


def _plan(options: DepthPlanCommand) -> None:
    from primal_attention.analysis.depth.planner import plan

    if options.out is not None and options.out.suffix not in (".html", ".json"):
        raise UserError(f"--out must end in .html or .json, got {options.out}.")
    found = plan(
        options.params,
        vocab=options.vocab,
        head_width=options.head_width,
        attention=options.attention,
        rank=options.rank,
        ffn_ratio=options.ffn_ratio,
        gated=options.gated,
        multiple_of=options.multiple_of,
        includes_embedding=options.includes_embedding,
    )
    print(f"{found.verdict()}\n\n{markdown_table(*found.table())}\n")
    print("\n".join(f"- {reason}" for reason in found.reasons))
    print(f"\n{found.limits()}")
    if options.out is None:
        return
    if options.out.suffix == ".html":
        found.to_html(options.out)
    else:
        write_atomically(options.out, found.to_json())
    print(f"Wrote {options.out}")


def _rank(options: DepthRankCommand) -> None:
    from primal_attention.analysis.depth.ranks import separation_rank

    def rank(attention: str) -> int:
        return separation_rank(
            attention,
            options.layers,
            options.width,
            options.heads,
            options.tokens,
            options.rank,
            max_templates=options.max_templates,
        )

    found = rank(options.attention)
    shape = f"{options.layers} layers of width {options.width}, {options.heads} heads, "
    print(f"{options.attention}, {shape}{options.tokens} tokens: separation rank {found}")
    if options.attention in ("primal", "primal-static"):
        print(f"standard, the same shape: separation rank {rank('standard')}")
    print(
        "Exact, over a prime field, with random weights and no softmax. It says what such a "
        "network can express, not what a trained one does."
    )


def _regime(options: DepthRegimeCommand) -> None:
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

    lower, upper, regime = log3_sep_bounds(options.layers, options.width, options.heads)
    size = 12 * options.layers * options.width**2
    best = optimal_depth(size)
    ratio = options.layers / best
    side = "shallow" if ratio < SHALLOW else "deep" if ratio > DEEP else "inside the range"
    rows = [
        ["parameters, 12 L d²", show_params(size)],
        ["threshold of the theory, log3(d)", f"{depth_threshold(options.width):.1f}"],
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


_ACTIONS: dict[str, tuple[type[Any], Callable[[Any], None]]] = {
    "plan": (DepthPlanCommand, _plan),
    "rank": (DepthRankCommand, _rank),
    "regime": (DepthRegimeCommand, _regime),
}

_HELP = """usage: primal depth ACTION [OPTIONS]

actions:
  plan    depth, width and heads for a budget of parameters, with reasons
  rank    exact separation rank of a small network without softmax
  regime  on which side of the thresholds a shape is

examples:
  primal depth plan 30M --vocab 32000
  primal depth rank --attention primal -L 2 -d 4
  primal depth regime --layers 2 --width 512

primal depth ACTION --help shows its options. primal analyze MODEL depth checks a saved model."""
