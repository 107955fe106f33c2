"""Layers that benchmarks time beside those of the registry."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import normalize

from primal_attention.attention import PrimalAttention, create_attention
from primal_attention.attention.terms import PublishesTerms
from primal_attention.functional import (
    ksvd_objective,
    parameter_trace,
    reduce_objective,
    sample_rows,
)

__all__ = ["EXTRA", "CausalLayer", "ProjectionFloor", "TextbookPrimal", "build_rival"]

EXTRA = ("floor", "primal-textbook")
"""Rivals that are not in the registry."""


class ProjectionFloor(nn.Module):
    """The query, key and output projections alone: no attention can be cheaper than this."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Float[Tensor, "b n c"]) -> tuple[Tensor, Tensor]:
        """Return what the projections return; both carry gradient."""
        return self.out_proj(self.q_proj(x)), self.k_proj(x)


class TextbookPrimal(PublishesTerms):
    """Primal-Attention as the formulas read: normalise, project, concatenate, map, merge, project.

    It borrows the parameters of a :class:`PrimalAttention` and computes the same function.
    """

    def __init__(self, layer: PrimalAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        """Return the layer's output and publish its term."""
        layer = self.layer
        q, k = (layer._split(p(x)).contiguous() for p in (layer.q_proj, layer.k_proj))
        tied = layer._tie_rows(sample_rows(x, layer.num_samples))
        e = normalize(q, dim=-1, eps=layer.conventions.eps) @ tied.w_e
        r = normalize(k, dim=-1, eps=layer.conventions.eps) @ tied.w_r
        heads = layer.concat(torch.cat([e, r], dim=-1))
        moment_e, moment_r = e.square().mean(2), r.square().mean(2)
        trace = parameter_trace(layer.w_e, layer.w_r)
        objective = ksvd_objective(moment_e, moment_r, layer.ell, trace)
        self.publish({"": reduce_objective(objective)})
        return layer.out_proj(heads.transpose(1, 2).flatten(2))


class CausalLayer(nn.Module):
    """An attention whose tokens see only those before them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        """Return the layer's causal output."""
        return self.layer(x, is_causal=True)


def build_rival(name: str, dim: int, num_heads: int, **options: Any) -> nn.Module:
    """Return a layer of the registry, ``floor`` or ``primal-textbook``, in training mode."""
    if name == "floor":
        return ProjectionFloor(dim)
    if name == "primal-textbook":
        return TextbookPrimal(PrimalAttention(dim, num_heads, **options))
    layer = create_attention(name, dim, num_heads, **options)
    # static weights mix tokens in causal order only
    return CausalLayer(layer) if name == "primal-static" else layer
