"""Layers that start at the counts of a corpus: queries and keys from its singular vectors.

An association ``S♯ ≈ U Σ Vᵀ`` of token pairs gives every token a query target ``U Σ^½`` and a key
target ``V Σ^½``. The projections of the first layer are fitted to these targets by least squares
over the vocabulary, through the token embeddings as the layer receives them:

    min ‖X W_Qᵀ + b_Q − U Σ^½‖²        min ‖X W_Kᵀ + b_K − V Σ^½‖²

Directions are dealt out to the heads in turn, so each head has strong and weak ones. Embeddings
with fewer dimensions than tokens cannot carry arbitrary targets: random ones explain about ``c/n``
of them. With ``embeddings=True`` the table itself becomes ``[U Σ^½, V Σ^½]`` first.

No claim is made that this helps training; the study ``corpus-init`` measures it.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.analysis.counts.factors import CountFactors
from primal_attention.analysis.counts.layers import split_directions
from primal_attention.analysis.counts.probe_models import stream_of_tokens
from primal_attention.attention import PrimalAttention
from primal_attention.models.sequence import SequenceModel

__all__ = ["CorpusFit", "initialize_from_corpus"]


class CorpusFit(NamedTuple):
    """How much of the targets the projections reproduce, as a share of their variance."""

    queries: float
    keys: float


@torch.no_grad()
def initialize_from_corpus(
    model: SequenceModel, factors: CountFactors, *, embeddings: bool = False
) -> CorpusFit:
    """Set the first layer of a model to the factors of a corpus; return how well they fit.

    The size of the changed weights stays that of the random start: the root mean square of the
    embeddings, and of the queries and keys of primal layers, which see angles only. Queries and
    keys of other layers get the size at which their logits are the association.

    Args:
        model: A model of this library whose token ``i`` is word ``i`` of the factors; changed in
            place.
        factors: From :func:`count_factors`. Their rank must be at least the model's width;
            further directions are not used.
        embeddings: Also set the token embeddings, to query and key factors of half that width.

    Example:
        >>> from primal_attention.models import CausalDecoder, DecoderConfig
        >>> from primal_attention.analysis.counts import Cooccurrence, count_factors
        >>> counts = Cooccurrence(40).fit(torch.randint(40, (900,)).numpy())
        >>> model = CausalDecoder(DecoderConfig(vocab_size=40, dim=16, num_heads=2))
        >>> factors = count_factors(counts, 16, transform="ppmi")
        >>> fit = initialize_from_corpus(model, factors, embeddings=True)
        >>> fit.queries > 0.5
        True
    """
    width = _check(model, factors)
    sides = factors.query, factors.key
    if embeddings:
        table = torch.cat([side[:, : (width + 1) // 2] for side in sides], dim=1)[:, :width]
        # columns of one size: otherwise few directions fill the norm, and the layer sees only them
        table = table / table.square().mean(0).sqrt().clamp_min(1e-12)
        weight: Tensor = model.embed.weight  # type: ignore[assignment]
        weight.copy_((table * weight.square().mean().sqrt()).to(weight.dtype))
    block: Any = model.blocks[0]
    device = next(model.parameters()).device
    x = stream_of_tokens(model, torch.arange(len(factors.query), device=device))[:, 0]
    x = block.attention_norm(x) if block.norm == "pre" else x
    layer = block.attention
    # logits of a head are products over √d; a primal layer sees angles only
    scale = None if isinstance(layer, PrimalAttention) else layer.head_dim**0.25
    # the directions are dealt out to the heads in turn
    targets = (
        split_directions(side[:, :width].to(device), layer.num_heads).flatten(1) for side in sides
    )
    return CorpusFit(*map(partial(_fit, x), (layer.q_proj, layer.k_proj), targets, [scale] * 2))


def _check(model: SequenceModel, factors: CountFactors) -> int:
    """Return the width of a model that suits the factors."""
    embed = getattr(model, "embed", None)
    if not isinstance(model, SequenceModel) or not isinstance(embed, nn.Embedding):
        raise TypeError(
            f"{type(model).__name__} is no model of this library with token ids; give an encoder "
            "or decoder with vocab_size."
        )
    layer: Any = model.blocks[0].attention
    if not (hasattr(layer, "q_proj") and hasattr(layer, "k_proj")):
        raise TypeError(
            f"the first layer is {type(layer).__name__}, which has no projections of queries and "
            "keys; use softmax or primal attention."
        )
    words, rank = factors.query.shape
    if words != embed.num_embeddings:
        raise ValueError(
            f"the factors have {words} words, but the model has {embed.num_embeddings} tokens; "
            "count the tokens of the model, with Cooccurrence(vocab_size)."
        )
    if rank < model.config.dim:
        raise ValueError(
            f"the factors have rank {rank}, but the model has width {model.config.dim}; compute "
            "count_factors with at least that rank."
        )
    return model.config.dim


def _fit(
    x: Float[Tensor, "n c"],
    projection: nn.Linear,
    target: Float[Tensor, "n c"],
    scale: float | None,
) -> float:
    """Set a projection to the least-squares fit; return the share of variance it explains.

    Without a ``scale`` the output keeps its root mean square.
    """
    size = projection(x).double().square().mean().sqrt()
    design = x.double()
    if projection.bias is not None:
        design = torch.cat([design, design.new_ones(len(x), 1)], dim=1)
    # rows of a layer norm sum to zero up to rounding: a direction that must not be used
    solution = torch.linalg.lstsq(design, target, rcond=1e-5, driver="gelsd").solution
    fitted = design @ solution
    share = 1 - (target - fitted).square().sum() / (target - target.mean(0)).square().sum()
    factor = size / fitted.square().mean().sqrt().clamp_min(1e-12) if scale is None else scale
    weight = (factor * solution).to(projection.weight.dtype)
    projection.weight.copy_(weight[: x.shape[1]].T)
    if projection.bias is not None:
        projection.bias.copy_(weight[-1])
    return float(share)
