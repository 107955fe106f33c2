"""Projection scores of Primal-Attention in linear time (Chen et al. 2023, arXiv 2305.19798).

A layer computes ``e_i = W_{e|X}ᵀ φ(q_i)`` and ``r_i = W_{r|X}ᵀ φ(k_i)`` with cosine features
``φ(z) = z / ‖z‖``, and never forms an ``n × n`` matrix. The three ways to obtain the projection
weights are sampled rows times codes (:func:`sample_rows`, :func:`tie_rows`), free parameters, and
dual variables (:func:`dual_weights`).

Speed comes from one identity: the norm is a scalar per row, so ``φ(q) W = (q W) / ‖q‖``. Dividing
the ``n × s`` product instead of the ``n × d`` input saves a second copy of ``q`` and everything
autograd would keep of it. Whole layers (:func:`attend`, :func:`attend_sampled`,
:func:`attend_folded`, :func:`attend_dual`) run in chunks and have backward passes of their own.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from primal_attention.functional.folded import fold_heads
from primal_attention.functional.fused import attend_fused, layer_fused
from primal_attention.functional.fused_dual import dual_fused
from primal_attention.functional.ksvd import ksvd_objective, parameter_trace, reduce_objective
from primal_attention.functional.linear import from_chunks, to_chunks
from primal_attention.functional.precision import accumulator, full_precision, representable
from primal_attention.functional.tiled import project_tiled, weigh_tiled

__all__ = [
    "Linear",
    "Projection",
    "attend",
    "attend_dual",
    "attend_folded",
    "attend_sampled",
    "decayed_sum",
    "dual_weights",
    "effective_weights",
    "even_indices",
    "feature_gram",
    "first_reaching",
    "fold",
    "join",
    "normalize_rows",
    "prefix_sum",
    "project",
    "sample_rows",
    "tie_rows",
]


class Projection(NamedTuple):
    """Scores and their energy."""

    scores: Float[Tensor, "b h n s"]
    """``Wᵀ φ(q_i)``, zero at padded tokens."""
    energy: Float[Tensor, "b h s"]
    """``Σ_i scores_i²`` per column, in float32 or better."""


def even_indices(
    length: int | Int[Tensor, " b"], num: int, device: torch.device | None = None
) -> Int[Tensor, "*batch num"]:
    """Return ``num`` evenly spaced positions of a sequence, first and last included.

    Position ``m`` is ``floor(m (length - 1) / (num - 1))`` in integer arithmetic, so that eager,
    compiled and exported programs agree. Shorter sequences than ``num`` repeat positions.

    Args:
        length: Length of the sequence, or one length per batch entry.
        num: How many positions to return.
        device: Where to put the result when ``length`` is an ``int``.

    Example:
        >>> even_indices(4, 3)
        tensor([0, 1, 3])
    """
    if isinstance(length, Tensor):
        steps = torch.arange(num, device=length.device)
        return steps * (length[:, None] - 1).clamp_min(0) // max(num - 1, 1)
    return torch.arange(num, device=device) * (length - 1) // max(num - 1, 1)


def sample_rows(
    x: Float[Tensor, "b n c"], num: int, key_mask: Bool[Tensor, "b n"] | None = None
) -> Float[Tensor, "b {num} c"]:
    """Return ``num`` evenly spaced real tokens of each sequence; zeros where there is none.

    Padding is skipped before positions are counted, so left, right and interior padding give the
    rows of the unpadded sequence. Costs ``O(b num c)``.
    """
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0], num, x.shape[2])
    if key_mask is None:
        return x.index_select(1, even_indices(x.shape[1], num, x.device))
    position = _real_positions(key_mask, num)
    rows = x.gather(1, position[:, :, None].expand(-1, -1, x.shape[2]))
    return torch.where(key_mask.any(1)[:, None, None], rows, 0.0)


def _real_positions(key_mask: Bool[Tensor, "b n"], num: int) -> Int[Tensor, "b {num}"]:
    """Return where the evenly spaced real tokens of each sequence stand."""
    seen = key_mask.cumsum(1)
    position = first_reaching(seen, even_indices(seen[:, -1], num) + 1)
    return position.clamp_max(key_mask.shape[1] - 1)


def first_reaching(count: Int[Tensor, "b n"], value: Int[Tensor, "b m"]) -> Int[Tensor, "b m"]:
    """Return where a growing count first reaches each value; ``n`` where it never does."""
    if torch.compiler.is_exporting():
        # ONNX knows no binary search: count what lies before
        return (count[:, None, :] < value[:, :, None]).sum(-1)
    return torch.searchsorted(count, value)


def normalize_rows(x: Float[Tensor, "b m c"]) -> Float[Tensor, "b m c"]:
    """Return rows with mean zero and variance one, as a pre-norm block would feed them.

    A constant row becomes zero. Computed in float32 or better.
    """
    wide = torch.nn.functional.layer_norm(
        x.to(accumulator(x)), x.shape[-1:], eps=_smallest_variance(x)
    )
    return wide.to(x.dtype)


def _smallest_variance(x: Tensor) -> float:
    return representable(1e-6, x) ** 2


def effective_weights(
    f: Float[Tensor, "b h m d"], w: Float[Tensor, "h m s"]
) -> Float[Tensor, "b h d s"]:
    """Return ``W_{e|X} = Fᵀ W_e``; costs ``O(m d s)`` per head."""
    return torch.einsum("bhmd,hms->bhsd", f, w.to(f.dtype)).mT


def tie_rows(
    rows: Float[Tensor, "b m c"],
    w_e: Float[Tensor, "h k s"],
    w_r: Float[Tensor, "h k s"],
    *,
    basis: Float[Tensor, "k m"] | None = None,
    normalize: bool = True,
) -> tuple[Float[Tensor, "b 2*h d s"], Float[Tensor, "b h k d"]]:
    """Return the projection weights of both sides that rows imply, and the ``F`` behind them.

    Args:
        rows: Sampled tokens.
        w_e: Codes of the query side.
        w_r: Codes of the key side.
        basis: Functions of position. Codes smooth in position, ``W = Bᵀ C``, act as free codes
            ``C`` of the smoothed rows ``B F``.
        normalize: Whether to apply :func:`normalize_rows` first.
    """
    if normalize:
        rows = normalize_rows(rows)
    if basis is not None:
        rows = basis.to(rows.dtype) @ rows
    f = rows.unflatten(-1, (len(w_e), -1)).transpose(1, 2)
    both = effective_weights(f, torch.cat([w_e, w_r], dim=-1))
    return torch.cat(both.chunk(2, dim=-1), dim=1), f


def _flat_index(position: Int[Tensor, "#b m"], b: int, n: int) -> Int[Tensor, " rows"]:
    """Return where positions stand when ``b`` sequences of ``n`` tokens are one."""
    return (position + torch.arange(0, b * n, n, device=position.device)[:, None]).flatten()


def _onto_tokens(
    basis: Float[Tensor, "k m"], position: Int[Tensor, "b m"], n: int
) -> Float[Tensor, "b k {n}"]:
    """Sum functions of sampled positions over the tokens that stand there.

    For sequences shorter than the sample: what acts on rows that repeat tokens then acts on tokens.
    """
    b, k = len(position), len(basis)
    sums = basis.new_zeros(b * n, k)
    sums.index_add_(0, _flat_index(position, b, n), basis.T.repeat(b, 1))
    return sums.view(b, n, k).mT


def _is_simple(x: Tensor, weight: Tensor) -> bool:
    """Whether a layer may run in one step: eagerly, on some tokens, in float32 or better."""
    return _is_wide(x, weight) and 0 not in x.shape and not _is_traced()


def _is_wide(x: Tensor, weight: Tensor) -> bool:
    return x.dtype == weight.dtype == accumulator(x) and not _autocasts(x)


def _is_traced() -> bool:
    """Whether a compiler or a function transform wants to see every operation."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def _autocasts(x: Tensor) -> bool:
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _inverse_norm(
    q: Float[Tensor, "b h n d"], key_mask: Bool[Tensor, "b n"] | None, eps: float
) -> Float[Tensor, "b h n 1"]:
    norm = torch.linalg.vector_norm(q, dim=-1, keepdim=True, dtype=accumulator(q))
    inverse = norm.clamp_min(representable(eps, q)).reciprocal()
    # a zero here makes the score, the energy and every gradient of a padded token vanish
    return inverse if key_mask is None else torch.where(key_mask[:, None, :, None], inverse, 0.0)


def dual_weights(
    k: Float[Tensor, "b h m d"],
    duals: Float[Tensor, "b h m s"],
    *,
    key_mask: Bool[Tensor, "b m"] | None = None,
    eps: float = 1e-6,
) -> Float[Tensor, "b h d s"]:
    """Return ``Φᵀ H / m``, the projection weights that dual variables ``H`` imply; ``O(m d s)``."""
    # half of the division before the sum, which a narrow type might not hold
    root: float | Tensor = max(k.shape[2], 1) ** -0.5
    if key_mask is not None:
        real = key_mask.sum(1).clamp_min(1).to(accumulator(k))
        root = real.rsqrt().to(duals.dtype)[:, None, None, None]
    codes = duals * root
    if _is_traced():
        total = k.mT @ (codes * _inverse_norm(k, key_mask, eps).to(duals.dtype))
    else:
        total = weigh_tiled(k, codes.to(k.dtype), key_mask, representable(eps, k))
    return total * root


def feature_gram(
    q: Float[Tensor, "b h n d"],
    *,
    key_mask: Bool[Tensor, "b n"] | None = None,
    eps: float = 1e-6,
) -> Float[Tensor, "b h d d"]:
    """Return ``Φᵀ Φ``, in float32 or better, without a copy of the features; ``O(n d²)``.

    Second moments of scores, the KKT residual and off-diagonality all follow from this matrix.
    """
    wide = q.to(accumulator(q))
    with full_precision(q):
        return wide.transpose(-1, -2) @ (wide * _inverse_norm(q, key_mask, eps).square())


def prefix_sum(
    x: Float[Tensor, "b n c"], start: Float[Tensor, "b c"] | None = None
) -> Float[Tensor, "b n c"]:
    """Return ``Σ_{u ≤ t} x_u`` in float32 or better, continuing from ``start``."""
    total = x.to(accumulator(x)).cumsum(1)
    return total if start is None else total + start[:, None]


def decayed_sum(
    x: Float[Tensor, "b n c"],
    decay: float,
    *,
    key_mask: Bool[Tensor, "b n"] | None = None,
    start: Float[Tensor, "b c"] | None = None,
    chunk: int = 64,
) -> Float[Tensor, "b n c"]:
    """Return ``Σ_{u ≤ t} γ^{t-u} x_u`` in float32 or better, continuing from ``start``.

    Time is counted in real tokens: padding neither adds nor decays. Inside a chunk one triangular
    product; across chunks a doubling scan that stops where ``γ`` has faded below rounding, so the
    cost is ``O(n (chunk + log(1/(1-γ)) / chunk) c)``.
    """
    n, c = x.shape[1:]
    wide = x.to(accumulator(x))
    if key_mask is not None:
        # pack the real tokens to the front; a position reads the sum of as many as it has seen
        wide = torch.where(key_mask[:, :, None], wide, 0.0)
        order = key_mask.logical_not().argsort(dim=1, stable=True)
        packed = wide.gather(1, order[:, :, None].expand(-1, -1, c))
        total = decayed_sum(packed, decay, start=start, chunk=chunk)
        start = wide.new_zeros(x.shape[0], c) if start is None else start
        total = torch.cat([start[:, None], total], dim=1)
        return total.gather(1, key_mask.cumsum(1)[:, :, None].expand(-1, -1, c))
    wide = to_chunks(wide, chunk)  # [b g i c]
    chunk = wide.shape[2]
    rate, steps = math.log(decay), torch.arange(chunk, dtype=wide.dtype, device=x.device)
    inside = (rate * (steps[:, None] - steps).tril()).exp().tril()  # [i j]
    with full_precision(x):
        local = inside @ wide
    # carry over chunks: after k rounds it holds the sum of the last 2^k chunks
    carry, step, groups = local[:, :, -1], 1, local.shape[1]
    memory = 1 + int(math.log(torch.finfo(wide.dtype).eps) / rate) // chunk
    while step <= memory:
        older = torch.nn.functional.pad(carry, (0, 0, step, 0))[:, :groups]
        carry = carry + decay ** (chunk * step) * older
        step *= 2
    before = torch.nn.functional.pad(carry, (0, 0, 1, 0))[:, :groups]
    total = local + (rate * (steps + 1)).exp()[:, None] * before[:, :, None]
    total = from_chunks(total, n)
    if start is None:
        return total
    age = torch.arange(1, n + 1, dtype=wide.dtype, device=x.device)
    return total + (rate * age).exp()[:, None] * start[:, None]


def project(
    q: Float[Tensor, "b h n d"],
    w: Float[Tensor, "#b h d s"],
    *,
    key_mask: Bool[Tensor, "b n"] | None = None,
    eps: float = 1e-6,
) -> Projection:
    """Project cosine features onto ``s`` directions per head.

    Costs ``O(n d s)`` per head; keeps inputs, scores and one norm per row for backward.

    Args:
        q: Queries or keys before the feature map, finite also at padded positions; both at once if
            their heads stand next to each other.
        w: Projection weights, one set per batch entry or one for all.
        key_mask: ``True`` where a token is real. Scores of padded tokens are zero.
        eps: Norms below this count as this.

    Example:
        >>> project(torch.tensor([[[[3.0, 4.0]]]]), torch.eye(2)[None, None]).scores
        tensor([[[[0.6000, 0.8000]]]])
    """
    w = w.to(q.dtype)
    if _is_traced():
        # the compiler fuses this by itself and cannot see through in-place slices
        scores = (q @ w) * _inverse_norm(q, key_mask, eps).to(q.dtype)
        return Projection(scores, scores.to(accumulator(scores)).square().sum(2))
    return Projection(*project_tiled(q, w, key_mask, representable(eps, q)))


class Linear(NamedTuple):
    """A linear map ``z ↦ weight z + bias``."""

    weight: Float[Tensor, "out in"]
    bias: Float[Tensor, " out"] | None


def join(first: Linear, second: Linear) -> Linear:
    """Return two maps of the same input as one."""
    weight = torch.cat([first.weight, second.weight])
    if first.bias is None and second.bias is None:
        return Linear(weight, None)
    biases = (
        weight.new_zeros(m.weight.shape[0]) if m.bias is None else m.bias for m in (first, second)
    )
    return Linear(weight, torch.cat(list(biases)))


def fold(inner: Linear, outer: Linear) -> Linear:
    """Return ``O (C (e_i ; r_i) + c) + o`` as one map of the scores of all heads.

    That skips one pass over the tokens and the ``n × c`` numbers between the two maps.

    Args:
        inner: From both scores of a head, ``[d 2*s]``, to its width.
        outer: From all heads, next to each other, to the output.

    Returns:
        The map of the scores of all query heads and, after them, of all key heads.
    """
    heads = outer.weight.shape[1] // inner.weight.shape[0]
    out = outer.weight.unflatten(1, (heads, -1))  # [c h d]
    weight = (out @ inner.weight).unflatten(-1, (2, -1)).transpose(1, 2)  # [c 2 h s]
    bias = outer.bias
    if inner.bias is not None:
        bias = torch.nn.functional.linear(inner.bias.repeat(heads), outer.weight, bias)
    return Linear(weight.flatten(1), bias)


def attend(
    x: Float[Tensor, "b n c"],
    inward: Linear,
    w: Float[Tensor, "#b h d s"],
    outward: Linear,
    *,
    key_mask: Bool[Tensor, "b n"] | None = None,
    eps: float = 1e-6,
) -> tuple[Float[Tensor, "b n c_out"], Float[Tensor, "b h s"]]:
    """Return ``outward(scores)`` with the scores of ``inward(x)``, and the energy of these scores.

    Costs what the two linear maps cost, plus ``O(n d s)`` per head. Keeps ``inward(x)``, the scores
    and one norm per row for backward; without gradients it keeps nothing.

    Args:
        x: Tokens, finite also at padded positions.
        inward: From tokens to the heads of :func:`project`, next to each other.
        w: Projection weights, one set per batch entry or one for all.
        outward: From the scores of all heads, next to each other, to the output.
        key_mask: ``True`` where a token is real. Scores of padded tokens are zero.
        eps: Norms below this count as this.

    Example:
        >>> one = Linear(torch.eye(2), None)
        >>> attend(torch.tensor([[[3.0, 4.0]]]), one, torch.eye(2)[None, None], one)[0]
        tensor([[[0.6000, 0.8000]]])
    """
    if _is_traced():
        q = torch.nn.functional.linear(x, *inward).unflatten(-1, w.shape[1:3]).transpose(1, 2)
        scores, energy = project(q, w, key_mask=key_mask, eps=eps)
        return torch.nn.functional.linear(scores.transpose(1, 2).flatten(2), *outward), energy
    if _autocasts(x):
        dtype = torch.get_autocast_dtype(x.device.type)
        inward, outward = (
            Linear(weight.to(dtype), None if bias is None else bias.to(dtype))
            for weight, bias in (inward, outward)
        )
        x = x.to(dtype)
    return attend_fused(x, inward, w.to(x.dtype), outward, key_mask, representable(eps, x))


def attend_folded(
    x: Float[Tensor, "b n c"],
    inward: tuple[Linear, Linear],
    w: Float[Tensor, "#b both d s"],
    outward: tuple[Linear, Linear],
    *,
    key_mask: Bool[Tensor, "b n"] | None = None,
    eps: float = 1e-6,
    has_energy: bool = True,
) -> tuple[Float[Tensor, "b n c_out"], Float[Tensor, "b both s"] | None]:
    """Return what :func:`attend` returns with joined and folded maps, without any score.

    The output map goes into the weights, ``W C`` of ``2d × d`` per head, and the energies come from
    the ``d × d`` Gram matrices of the unit heads. Costs ``O(n d (c + d))`` per head, whatever the
    number of directions: for layers with more than half as many directions as a head is wide.

    Args:
        x: Tokens, finite also at padded positions.
        inward: From tokens to the heads of the queries, and of the keys.
        w: Projection weights of all query heads and, after them, of all key heads.
        outward: From both scores of a head to its width, and from all heads to the output.
        key_mask: ``True`` where a token is real.
        eps: Norms below this count as this.
        has_energy: Whether to return the energy; without it a product less.
    """
    inner, outer = outward
    b, both, d, s = w.shape
    h, e = both // 2, inner.weight.shape[0]
    by_side = inner.weight.view(e, 2, 1, s).permute(1, 2, 3, 0)  # [2 1 s e]
    m = (w.view(b, 2, h, d, s) @ by_side).transpose(1, 2).reshape(b, h, 2 * d, e)
    weight, bias = join(*inward)
    heads = Linear(_by_head(weight, h), None if bias is None else _by_head(bias, h))
    bias = outer.bias
    if inner.bias is not None:
        bias = torch.nn.functional.linear(inner.bias.repeat(h), outer.weight, bias)
    result = Linear(outer.weight, bias)
    if _is_traced():
        q = torch.nn.functional.linear(x, *heads).unflatten(-1, (2 * h, d)).transpose(1, 2)
        unit = q * _inverse_norm(q, key_mask, eps)
        pairs = unit.unflatten(1, (h, 2)).transpose(2, 3).flatten(3)  # [b h n 2*d]
        y = torch.nn.functional.linear((pairs @ m).transpose(1, 2).flatten(2), *result)
        gram = unit.mT @ unit
    else:
        y, gram = fold_heads(x, heads, m, result, key_mask, representable(eps, x), has_energy)
    if not has_energy:
        return y, None
    by_head = gram.unflatten(1, (h, 2)).transpose(1, 2).flatten(1, 2)  # all queries, all keys
    return y, (w * (by_head @ w)).sum(2)


def _by_head(rows: Shaped[Tensor, "all *rest"], h: int) -> Shaped[Tensor, "all *rest"]:
    """Return rows of all query heads and then all key heads as both of a head, and so on."""
    return rows.unflatten(0, (2, h, -1)).transpose(0, 1).flatten(0, 2)


def _has_many_directions(d: int, s: int, width: int, has_energy: bool) -> bool:
    """Whether scores and their output map cost more per token than :func:`attend_folded`."""
    return 2 * s * (width + d) > d * (width + (4 if has_energy else 2) * d)


def attend_dual(
    x: Float[Tensor, "b n c"],
    inward: Linear,
    duals: Float[Tensor, "hs c"],
    outward: Linear,
    num_heads: int,
    *,
    key_mask: Bool[Tensor, "b n"] | None = None,
    eps: float = 1e-6,
) -> tuple[Float[Tensor, "b n c_out"], Float[Tensor, "b h s"], Float[Tensor, "b h d s"]]:
    """Return the whole layer of :func:`dual_weights`: output, energy of the scores, and weights.

    Args:
        x: Tokens, finite also at padded positions.
        inward: From tokens to the heads of the queries and, after them, of the keys.
        duals: From tokens to the dual variables of as many heads.
        outward: From the scores of all heads, next to each other, to the output.
        num_heads: Heads of both sides together.
        key_mask: ``True`` where a token is real.
        eps: Norms below this count as this.
    """
    if _is_simple(x, duals):
        return dual_fused(x, inward, duals, outward, key_mask, num_heads, representable(eps, x))
    heads, codes = (
        torch.nn.functional.linear(x, *m).unflatten(-1, (num_heads, -1)).transpose(1, 2)
        for m in (inward, Linear(duals, None))
    )
    sums = dual_weights(heads, codes, key_mask=key_mask, eps=eps)
    # the weights of queries come from keys, and the other way round
    w = torch.cat(sums.chunk(2, dim=1)[::-1], dim=1)
    scores, energy = project(heads, w, key_mask=key_mask, eps=eps)
    y = torch.nn.functional.linear(scores.transpose(1, 2).flatten(2), *outward)
    return y, energy, w


def attend_sampled(
    x: Float[Tensor, "b n c"],
    inward: tuple[Linear, Linear],
    codes: tuple[Float[Tensor, "h k s"], Float[Tensor, "h k s"]],
    outward: tuple[Linear, Linear],
    num: int,
    *,
    key_mask: Bool[Tensor, "b n"] | None = None,
    basis: Float[Tensor, "k {num}"] | None = None,
    normalize: bool = True,
    eps: float = 1e-6,
    lam: Float[Tensor, "h s"] | None = None,
    has_energy: bool = True,
) -> tuple[Float[Tensor, "b n c_out"], Tensor | None]:
    """Return the whole layer of :func:`tie_rows`: its output, and the energy or the loss.

    The same as :func:`attend` with the joined and folded maps and the weights of
    :func:`sample_rows`, and as ``reduce_objective`` of its ``ksvd_objective``, in far fewer steps;
    for sequences of a few hundred tokens the steps are what costs.

    Args:
        x: Tokens; zero where padded.
        inward: From tokens to the heads of the queries, and of the keys.
        codes: Codes of the query side and of the key side.
        outward: From both scores of a head to its width, and from all heads to the output.
        num: How many tokens to sample.
        key_mask: ``True`` where a token is real.
        basis: Functions of position, as for :func:`tie_rows`.
        normalize: Whether sampled rows are normalised.
        eps: Norms below this count as this.
        lam: ``ℓ``: return the loss in place of the energy. Not with a mask.
        has_energy: Whether anything but the output is of interest.
    """
    b, n, _ = x.shape
    alike = (inward[0].bias is None) == (inward[1].bias is None)
    shape = outward[0].weight.shape[0], codes[0].shape[-1], outward[1].weight.shape[0]
    folds = _is_wide(x, codes[0]) and _has_many_directions(*shape, has_energy)
    if folds or not (alike and _is_simple(x, codes[0])):
        w, _ = tie_rows(sample_rows(x, num, key_mask), *codes, basis=basis, normalize=normalize)
        energy: Tensor | None
        if folds:
            y, energy = attend_folded(
                x, inward, w, outward, key_mask=key_mask, eps=eps, has_energy=has_energy
            )
        else:
            y, energy = attend(x, join(*inward), w, fold(*outward), key_mask=key_mask, eps=eps)
        if lam is None or energy is None:
            return y, energy
        moment_e, moment_r = (energy / max(n, 1)).chunk(2, dim=1)
        objective = ksvd_objective(moment_e, moment_r, lam, parameter_trace(*codes))
        return y, reduce_objective(objective)
    position = (
        even_indices(n, num, x.device) if key_mask is None else _real_positions(key_mask, num)
    )
    index: Tensor | None = position
    if basis is not None and n < num:
        index, basis = None, _onto_tokens(basis, position.view(-1, num), n)
    elif key_mask is not None:
        index = _flat_index(position, b, n)
    return layer_fused(
        x,
        inward,
        codes,
        outward,
        index=index,
        basis=basis,
        variance=_smallest_variance(x) if normalize else None,
        key_mask=key_mask,
        eps=representable(eps, x),
        lam=lam,
    )
