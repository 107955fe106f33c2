"""Both stages of a primal layer in operations that autograd and tracers know.

The functions on tiles have a backward pass of their own. Compilers, transforms and empty inputs
take these formulas instead, and so do second derivatives.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import linear

from primal_attention.functional.folding import LayerMaps, fold_bias, fold_concat, fold_weights
from primal_attention.functional.precision import accumulator, representable

__all__ = ["dual_weights", "inverse_norm", "plain_folded", "plain_scores", "swap_sides"]


def dual_weights(
    heads: Float[Tensor, "b n bothd"],
    duals: Float[Tensor, "b n boths"],
    num_heads: int,
    share: Float[Tensor, "#b 1 1 1"],
    key_mask: Bool[Tensor, "b n"] | None,
    eps: float,
) -> Float[Tensor, "b {num_heads} d s"]:
    """Return ``Φ_kᵀ H_r / n`` and ``Φ_qᵀ H_e / n`` from heads and dual variables, side by side."""
    like, codes = (t.unflatten(-1, (num_heads, -1)).transpose(1, 2) for t in (heads, duals))
    # half of the division before the sum, which a narrow type might not hold
    root = share.sqrt()
    codes = codes * (root * inverse_norm(like, key_mask, eps)).to(like.dtype)
    return swap_sides((like.mT @ codes * root).to(like.dtype))


def plain_scores(
    heads: Float[Tensor, "b both n d"],
    w: Float[Tensor, "#b both d s"],
    maps: LayerMaps | None,
    key_mask: Bool[Tensor, "b n"] | None,
    eps: float,
) -> tuple[Float[Tensor, "b n out"], Float[Tensor, "b both s"]]:
    """Return the layer's output, or the scores where there are no maps, and their energy."""
    # the norm divides s scores instead of d features
    w = w.to(heads.dtype)
    scores = (heads @ w) * inverse_norm(heads, key_mask, eps).to(heads.dtype)
    energy = scores.to(accumulator(scores)).square().sum(2)
    y = scores.transpose(1, 2).flatten(2)
    return y if maps is None else linear(y, *fold_concat(maps.concat, maps.out)), energy


def plain_folded(
    heads: Float[Tensor, "b both n d"],
    w: Float[Tensor, "#b both d s"],
    maps: LayerMaps,
    key_mask: Bool[Tensor, "b n"] | None,
    eps: float,
) -> tuple[Float[Tensor, "b n out"], Float[Tensor, "b both s"]]:
    """Return the same without forming a score."""
    unit = heads * inverse_norm(heads, key_mask, eps)
    outputs = torch.cat(unit.chunk(2, dim=1), dim=-1) @ fold_weights(w, maps.concat)
    bias = fold_bias(maps.concat, maps.out)
    y = linear(outputs.transpose(1, 2).flatten(2), maps.out.weight, bias)
    return y, (w * (unit.mT @ unit @ w)).sum(2)


def inverse_norm(
    q: Float[Tensor, "b h n d"], key_mask: Bool[Tensor, "b n"] | None, eps: float
) -> Float[Tensor, "b h n 1"]:
    """Return ``1 / max(‖q‖, eps)`` in float32 or better, and zero for padding."""
    norm = torch.linalg.vector_norm(q, dim=-1, keepdim=True, dtype=accumulator(q))
    inverse = norm.clamp_min(representable(eps, q)).reciprocal()
    # a zero here removes the score, the energy and every gradient of a padded token
    return inverse if key_mask is None else torch.where(key_mask[:, None, :, None], inverse, 0.0)


def swap_sides(both: Float[Tensor, "b both *rest"]) -> Float[Tensor, "b both *rest"]:
    """Exchange the sides: the weights of queries come from keys, and the other way round."""
    queries, keys = both.chunk(2, dim=1)
    return torch.cat([keys, queries], dim=1)
