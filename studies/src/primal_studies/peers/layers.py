"""Layers that benchmarks time beside those of the registry."""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.attention import PrimalAttention, create_attention
from primal_attention.attention.terms import PublishesTerms
from primal_attention.functional import naive

__all__ = ["EXTRA", "CausalLayer", "NaivePrimal", "ProjectionFloor", "build_rival"]

EXTRA = ("floor", "primal-default", "primal-naive")
"""Rivals that are not in the registry."""


class ProjectionFloor(nn.Module):
    """The query, key and output projections alone: a lower bound of the cost."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Float[Tensor, "b n c"]) -> tuple[Tensor, Tensor]:
        """Return the outputs of the projections; both have gradients."""
        return self.out_proj(self.q_proj(x)), self.k_proj(x)


class NaivePrimal(PublishesTerms):
    """``naive.primal_layer`` with the parameters of a :class:`PrimalAttention`."""

    def __init__(self, layer: PrimalAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        """Return the layer's output and publish its term."""
        layer = self.layer
        maps = layer.q_proj, layer.k_proj, layer.concat, layer.out_proj
        q, k, concat, out = ((m.weight, m.bias) for m in maps)
        codes = layer.w_e, layer.w_r
        y, loss = naive.primal_layer(x, q, k, codes, concat, out, layer.ell, layer.num_samples)
        self.publish({"": loss})
        return y


class CausalLayer(nn.Module):
    """An attention in causal order."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        """Return the layer's causal output."""
        return self.layer(x, is_causal=True)


def build_rival(
    name: str, dim: int, num_heads: int, is_causal: bool = False, **options: Any
) -> nn.Module:
    """Return a layer of the registry, or one of :data:`EXTRA`, in training mode.

    ``primal-default`` has its default rank, as many directions as a head is wide up to 32.
    """
    if name == "floor":
        return ProjectionFloor(dim)
    if name == "primal-naive":
        return NaivePrimal(PrimalAttention(dim, num_heads, **options))
    layer: nn.Module
    if name == "primal-default":
        layer = PrimalAttention(dim, num_heads)
    else:
        layer = create_attention(name, dim, num_heads, **options)
    # static weights mix tokens in causal order only
    return CausalLayer(layer) if is_causal or name == "primal-static" else layer
