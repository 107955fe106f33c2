"""Parts of the scores of a primal layer, one for each modality of the tokens they come from.

Data-dependent and dual-tied projection weights are sums over tokens::

    W_{e|X} = Σ_c W_c        W_c: the tokens of modality c alone        e_i = Σ_c W_cᵀ φ(q_i)

So every score is exactly the sum of its parts. The cost is that of the layer times the number of
modalities. Static weights see no token: without a causal mask each score comes from its own token,
and with one from the prefix mean, which is a sum over tokens too.
"""

import copy
from typing import NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from primal_attention.attention import PrimalAttention, PrimalRelativeAttention
from primal_attention.attention.sources import SampledSource
from primal_attention.functional import causal_sums, decayed_sum, sample_rows, standardize_rows
from primal_attention.functional.plain import inverse_norm, swap_sides
from primal_attention.hosts import LayerInputs

__all__ = ["ScoreParts", "contribution_shares", "split_scores"]


class ScoreParts(NamedTuple):
    """Parts of the scores of one sequence by modality; their sums are the layer's scores."""

    e: Float[Tensor, "M h n s"]
    """Parts of the query-side scores."""
    r: Float[Tensor, "M h n s"]
    """Parts of the key-side scores."""


@torch.no_grad()
def split_scores(
    layer: PrimalAttention | PrimalRelativeAttention,
    inputs: LayerInputs,
    senders: Float[Tensor, "m M"],
    receivers: Float[Tensor, "n M"] | None = None,
) -> ScoreParts:
    """Return the scores of a primal layer, split by the modality of the tokens they come from.

    Args:
        layer: The layer; it is not changed. The parts are computed in float64.
        inputs: Its inputs for one sequence, without padding.
        senders: Modality of the tokens that the weights are made of, from :func:`membership`.
        receivers: Modality of the tokens that have the scores; needed with a context only.

    Example:
        >>> from primal_attention.analysis.flow import membership
        >>> layer, x = PrimalAttention(8, 2, weights="dual"), torch.randn(1, 5, 8)
        >>> inputs = LayerInputs(x, None, None, False)
        >>> parts = split_scores(layer, inputs, membership(torch.tensor([0, 0, 1, 1, 1]), 2))
        >>> parts.e.shape
        torch.Size([2, 2, 5, 4])
    """
    twin = copy.deepcopy(layer).double().eval()
    x, context = (None if t is None else t.double() for t in inputs[:2])
    if x is None or len(x) != 1 or inputs.key_mask is not None:
        raise ValueError("split_scores takes one sequence without padding; cut the padding first.")
    members = senders.T[:, None, :, None]  # [M 1 m 1]
    memory = x if context is None else context
    if isinstance(twin, PrimalRelativeAttention):
        return _relative(twin, x, memory, members, is_causal=inputs.is_causal)
    heads = twin.project_heads(x, inputs.rotary)
    unit = heads * inverse_norm(heads, None, twin.conventions.eps)
    if twin.weights == "static":
        own = senders if receivers is None else receivers
        both = _static(twin, heads, unit, members, own, is_causal=inputs.is_causal)
    elif inputs.is_causal:
        both = _causal(twin, x, unit, members, inputs)
    else:
        memory_heads = heads if context is None else twin.project_heads(memory)
        weights = _weights_by_modality(twin, memory, memory_heads, senders)
        both = unit @ weights
    return ScoreParts(*both.chunk(2, dim=1))


def contribution_shares(parts: Float[Tensor, "M h n s"]) -> Float[Tensor, "h n M"]:
    """Return ``‖e_i^(c)‖ / Σ_c ‖e_i^(c)‖`` of every head and token; zero for a zero score.

    Example:
        >>> contribution_shares(torch.tensor([1.0, 3.0]).reshape(2, 1, 1, 1))
        tensor([[[0.2500, 0.7500]]])
    """
    norms = parts.norm(dim=-1).permute(1, 2, 0)
    total = norms.sum(-1, keepdim=True)
    return norms / torch.where(total > 0, total, 1.0)


def _weights_by_modality(
    layer: PrimalAttention, memory: Tensor, heads: Tensor, senders: Float[Tensor, "m M"]
) -> Float[Tensor, "M both d s"]:
    """Return the projection weights that the tokens of each modality make."""
    if layer.weights == "dual":
        unit = heads * inverse_norm(heads, None, layer.conventions.eps)
        duals = layer.project_duals(memory) * senders.T[:, None, :, None]
        return swap_sides(unit.mT @ duals) / max(memory.shape[1], 1)
    rows = sample_rows(memory, layer.num_samples)
    if layer.conventions.standardize:
        rows = standardize_rows(rows)
    # the sampled rows of each modality alone; the basis then combines them
    rows = rows * sample_rows(senders[None], layer.num_samples)[0].T[:, :, None]
    if layer.codes == "basis":
        rows = layer.basis @ rows
    f = layer._split(rows)
    codes = torch.cat([layer.w_e, layer.w_r])
    return torch.cat([f, f], dim=1).mT @ codes


def _causal(
    layer: PrimalAttention, x: Tensor, unit: Tensor, members: Tensor, inputs: LayerInputs
) -> Float[Tensor, "M both n s"]:
    """Return the scores of prefix sums in which the tokens of one modality have codes."""
    t = torch.arange(1, x.shape[1] + 1)
    if layer.weights == "dual":
        f, codes = swap_sides(unit), swap_sides(layer.project_duals(x))
        scale = 1 / t.double()
    else:
        rows = layer._split(standardize_rows(x) if layer.conventions.standardize else x)
        source = cast("SampledSource", layer.source(x))  # that of data weights
        f, codes = torch.cat([rows, rows], dim=1), source.codes_at(t[None] - 1)
        # as the layer scales its prefix sums: √(m / t) for the first m tokens, m / t beyond
        ratio = layer.num_samples / t.double()
        scale = torch.where(ratio > 1, ratio.sqrt(), ratio)
    parts = [causal_sums(unit, f, codes * member).values for member in members]
    return torch.cat(parts) * scale[:, None]


def _static(
    layer: PrimalAttention,
    heads: Tensor,
    unit: Tensor,
    members: Tensor,
    own: Float[Tensor, "n M"],
    *,
    is_causal: bool,
) -> Float[Tensor, "M both n s"]:
    """Return scores of weights that see no token: of the own token, or of prefix means."""
    w = torch.cat([layer.w_e, layer.w_r])
    if not is_causal:
        return (unit @ w) * own.T[:, None, :, None]
    sums, total = (_prefix_sums(layer, t) for t in (heads * members, heads))
    # the divisor of the mean cancels in the norm
    return sums @ w * inverse_norm(total, None, layer.conventions.eps)


def _prefix_sums(
    layer: PrimalAttention, heads: Float[Tensor, "M both n d"]
) -> Float[Tensor, "M both n d"]:
    if layer.decay is None:
        return heads.cumsum(2)
    sums = decayed_sum(layer._merge(heads), layer.decay)
    return sums.unflatten(-1, (heads.shape[1], -1)).transpose(1, 2)


def _relative(
    layer: PrimalRelativeAttention, x: Tensor, memory: Tensor, members: Tensor, *, is_causal: bool
) -> ScoreParts:
    """Return the scores of distance-weighted sums of the duals of each modality."""
    unit_q, unit_k = layer._units(x)
    memory_q, memory_k = (unit_q, unit_k) if memory is x else layer._units(memory)
    dual_e, dual_r = layer._duals(memory, None)
    at, count = torch.arange(x.shape[1])[None], None if is_causal else memory.shape[1]
    sides = []
    for position, queries, keys, duals in (
        (layer.position_e, unit_q, memory_k, dual_r),
        (layer.position_r, unit_k, memory_q, dual_e),
    ):
        total = position.totals(at, count)
        parts = [
            position.sums(queries, keys, duals * member, is_causal=is_causal)[0] / total[0]
            for member in members
        ]
        sides.append(torch.stack(parts))
    return ScoreParts(*sides)
