"""Primal-Attention in linear time and two stages (Chen et al. 2023, arXiv 2305.19798).

    tie       W = Fᵀ codes,  or  W = Φᵀ H / n                     [b 2h d s]
    attend    e_i = W_eᵀ φ(q_i)    r_i = W_rᵀ φ(k_i)    y_i = O (C (e_i ; r_i) + c) + o

``φ(z) = z / ‖z‖``; ``W`` holds the weights of all query heads and, after them, of all key heads. It
is all that tokens share: many processes that hold parts of a sequence would add up its ``2 d s``
numbers per head, and nothing else. ``attend`` also returns the energy ``Σ_i e_i²``, all that the
KSVD loss needs.

The norm is a scalar per token, so ``φ(q) W = (q W) / ‖q‖``: dividing the ``n × s`` product instead
of the ``n × d`` input saves a second copy of ``q`` and what autograd would keep of it.
"""

import functools
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from primal_attention.functional.engine import Attend, Heads, TilePlan
from primal_attention.functional.folding import LayerMaps, join_maps
from primal_attention.functional.plain import (
    dual_weights,
    inverse_norm,
    plain_folded,
    plain_scores,
)
from primal_attention.functional.precision import (
    accumulator,
    autocast_dtype,
    full_precision,
    is_traced,
    representable,
)
from primal_attention.functional.ties import TieDual, TieRows
from primal_attention.functional.tiles import LinearMap, cut

__all__ = [
    "Heads",
    "LayerMaps",
    "LinearMap",
    "attend",
    "choose_engine",
    "even_indices",
    "feature_gram",
    "first_reaching",
    "sample_rows",
    "sampled_features",
    "standardize_rows",
    "tie_dual",
    "tie_sampled",
]

Engine = Literal["plain", "scores", "folded"]

_DEVIATION = 1e-6
"""Rows with a smaller standard deviation count as constant."""


def choose_engine(
    x: Tensor, d: int, s: int, maps: LayerMaps | None = None, *, has_energy: bool = True
) -> Engine:
    """Return which engine attends from tokens ``x`` with ``s`` directions per head of width ``d``.

    ========  ======================================  =============================================
    engine    what it does                            when
    ========  ======================================  =============================================
    plain     the formulas, differentiated by         a compiler, an export or ``torch.func`` looks
              autograd                                on; no tokens
    folded    tiles; ``W C`` per head, Gram matrices  all maps are given, all is float32 or better,
              instead of scores                       and ``2 s (c + d) > d (c + 4 d)``: that costs
                                                      fewer products (without energy ``2 d``)
    scores    tiles; ``2 s`` scores per head          otherwise
    ========  ======================================  =============================================
    """
    if is_traced() or 0 in x.shape:
        return "plain"
    return "folded" if _folds(x, d, s, maps, has_energy) else "scores"


def _folds(x: Tensor, d: int, s: int, maps: LayerMaps | None, has_energy: bool) -> bool:
    if maps is None:
        return False
    # Gram matrices of features lose digits that a narrow type does not have
    if not x.dtype == maps.q.weight.dtype == accumulator(x) or autocast_dtype(x) is not None:
        return False
    c = maps.out.weight.shape[0]
    return 2 * s * (c + d) > d * (c + (4 if has_energy else 2) * d)


# the first stage: sampled weights


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
    # the k-th real token stands where the count of real tokens first reaches k
    position = first_reaching(seen, even_indices(seen[:, -1], num) + 1)
    return position.clamp_max(key_mask.shape[1] - 1)


def first_reaching(count: Int[Tensor, "b n"], value: Int[Tensor, "b m"]) -> Int[Tensor, "b m"]:
    """Return where a growing count first reaches each value; ``n`` where it never does."""
    if torch.compiler.is_exporting():
        # ONNX knows no binary search: count what lies before
        return (count[:, None, :] < value[:, :, None]).sum(-1)
    return torch.searchsorted(count, value)


def standardize_rows(x: Float[Tensor, "b m c"]) -> Float[Tensor, "b m c"]:
    """Return rows with mean zero and variance one, as a pre-norm block would feed them.

    A constant row becomes zero. Computed in float32 or better.
    """
    # a constant row has variance zero: epsilon keeps its gradient finite in the type of x
    wide = layer_norm(x.to(accumulator(x)), x.shape[-1:], eps=representable(_DEVIATION, x) ** 2)
    return wide.to(x.dtype)


def sampled_features(
    x: Float[Tensor, "b n c"],
    num: int,
    num_heads: int,
    *,
    key_mask: Bool[Tensor, "b n"] | None = None,
    basis: Float[Tensor, "k {num}"] | None = None,
    standardize: bool = True,
) -> Float[Tensor, "b {num_heads} k d"]:
    """Return ``F``: sampled tokens, standardised and combined by the basis, split into heads.

    Codes smooth in position, ``W = Bᵀ C``, act as free codes ``C`` of the smoothed rows ``B F``.
    """
    rows = sample_rows(x, num, key_mask)
    if standardize:
        rows = standardize_rows(rows)
    if basis is not None:
        rows = basis.to(rows.dtype) @ rows
    return rows.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def tie_sampled(
    x: Float[Tensor, "b n c"],
    w_e: Float[Tensor, "h k s"],
    w_r: Float[Tensor, "h k s"],
    num: int,
    *,
    key_mask: Bool[Tensor, "b n"] | None = None,
    basis: Float[Tensor, "k {num}"] | None = None,
    standardize: bool = True,
) -> tuple[Float[Tensor, "b both d s"], Float[Tensor, "b n c"]]:
    """Return ``W_{e|X} = Fᵀ W_e`` and ``W_{r|X} = Fᵀ W_r`` of sampled tokens, and the tokens.

    Attend from the returned tokens: their gradient and that of the weights then add up in place.
    Costs ``O(num d s)`` per head, or ``O(k d s)`` with a basis.

    Args:
        x: Tokens; zero where padded.
        w_e: Codes of the query side.
        w_r: Codes of the key side.
        num: How many tokens to sample.
        key_mask: ``True`` where a token is real.
        basis: Functions of position, for codes that are smooth in it.
        standardize: Whether to apply :func:`standardize_rows` to the sampled tokens.
    """
    b, n, _ = x.shape
    is_wide = x.dtype == w_e.dtype == accumulator(x) and autocast_dtype(x) is None
    options = num, key_mask, basis, standardize
    plain = functools.partial(_tie_plain, options)
    if is_traced() or 0 in x.shape or not is_wide:
        return plain(x, w_e, w_r)
    if key_mask is None:
        position = even_indices(n, num, x.device)
    else:
        position = _real_positions(key_mask, num)
    index: Tensor | None = position
    if basis is not None and n < num:
        # rows repeat tokens: let the basis act on the tokens instead
        index, basis = None, _basis_of_tokens(basis, position.view(-1, num), n)
    elif key_mask is not None:
        index = _flat_index(position, b, n)
    variance = _DEVIATION**2 if standardize else None
    return TieRows.apply(plain, x, w_e, w_r, basis, index, variance)  # type: ignore[no-untyped-call]


def _tie_plain(
    options: tuple[int, Tensor | None, Tensor | None, bool], x: Tensor, w_e: Tensor, w_r: Tensor
) -> tuple[Tensor, Tensor]:
    num, key_mask, basis, standardize = options
    h = w_e.shape[0]
    f = sampled_features(x, num, h, key_mask=key_mask, basis=basis, standardize=standardize)
    codes = torch.cat([w_e, w_r], dim=-1).to(f.dtype)
    both = torch.einsum("bhmd,hms->bhsd", f, codes).mT
    return torch.cat(both.chunk(2, dim=-1), dim=1), x


def _flat_index(position: Int[Tensor, "#b m"], b: int, n: int) -> Int[Tensor, " rows"]:
    """Return positions in ``b`` sequences of ``n`` tokens laid end to end."""
    return (position + torch.arange(0, b * n, n, device=position.device)[:, None]).flatten()


def _basis_of_tokens(
    basis: Float[Tensor, "k m"], position: Int[Tensor, "b m"], n: int
) -> Float[Tensor, "b k {n}"]:
    """Return functions of sampled positions as functions of tokens, for short sequences."""
    (b, _), (k, _) = position.shape, basis.shape
    sums = basis.new_zeros(b * n, k)
    sums.index_add_(0, _flat_index(position, b, n), basis.T.repeat(b, 1))
    return sums.view(b, n, k).mT


# the first stage: dual weights


def tie_dual(
    x: Float[Tensor, "b n _"],
    maps: tuple[LinearMap, LinearMap] | Float[Tensor, "b n _"],
    num_heads: int,
    *,
    key_mask: Bool[Tensor, "b n"] | None = None,
    eps: float = 1e-6,
) -> tuple[Float[Tensor, "b {num_heads} d s"], Heads]:
    """Return ``Φ_kᵀ H_r / n`` and ``Φ_qᵀ H_e / n``, the weights of dual variables, and the heads.

    Attend from the returned heads: their gradient and that of the weights then add up in place.
    Costs ``O(n d s)`` per head.

    Args:
        x: Tokens; or, where ``maps`` are dual variables, the heads of the queries and, after them,
            of the keys, side by side.
        maps: From tokens to the heads of both sides and to their dual variables, or these
            variables, side by side.
        num_heads: Heads of both sides together.
        key_mask: ``True`` where a token is real.
        eps: Norms below this count as this.
    """
    count: Tensor = torch.full((1,), max(x.shape[1], 1), device=x.device)
    if key_mask is not None:
        count = key_mask.sum(1).clamp_min(1)
    share = count.to(accumulator(x)).reciprocal()[:, None, None, None]
    if is_traced() or 0 in x.shape:
        heads, duals = (x, maps) if isinstance(maps, Tensor) else (linear(x, *m) for m in maps)
        w = dual_weights(heads, duals, num_heads, share, key_mask, eps)
        return w, Heads((heads,), (), (), (x.shape[0], x.shape[1]))
    # dual variables that are given count as the input of an identity map
    given: tuple[Tensor | None, ...]
    if isinstance(maps, Tensor):
        given, widest = (maps.to(x.dtype), None, None, None), max(x.shape[-1], maps.shape[-1])
    else:
        narrow = autocast_dtype(x)
        q, d = maps if narrow is None else (_cast(m, narrow) for m in maps)
        given, widest = (None, *q, d.weight), max(len(q.weight), len(d.weight))
        x = x.to(q.weight.dtype)
    tiles, has_grad = cut(x.shape[0], x.shape[1], widest), torch.is_grad_enabled()
    options = tiles, key_mask, num_heads, representable(eps, x), has_grad, share
    w, *found = TieDual.apply(*options, x, *given)  # type: ignore[no-untyped-call]
    parts, norms = tuple(found[: len(tiles)]), tuple(found[len(tiles) :])
    return w, Heads(parts, norms, tiles, (x.shape[0], x.shape[1]))


# the second stage


def attend(
    x: Float[Tensor, "b n c"] | Heads,
    w: Float[Tensor, "#b both d s"],
    maps: LayerMaps | None,
    *,
    key_mask: Bool[Tensor, "b n"] | None = None,
    eps: float = 1e-6,
    has_energy: bool = True,
) -> tuple[Float[Tensor, "b n out"], Float[Tensor, "b both s"] | None]:
    """Return ``O (C (e_i ; r_i) + c) + o`` of every token, and the energy ``Σ_i`` of its scores.

    Costs what the maps cost, plus ``O(n d s)`` per head, or ``O(n d²)`` where that is less. Keeps
    heads, scores and one norm per token and head for backward; without gradients it keeps nothing.

    Args:
        x: Tokens, finite also at padded positions, or the heads that :func:`tie_dual` returns.
        w: Projection weights, one set per sequence or one for all.
        maps: The maps of the layer. Without them ``x`` holds the heads of all tokens side by side,
            and so does the output the scores.
        key_mask: ``True`` where a token is real. Scores of padded tokens are zero.
        eps: Norms below this count as this.
        has_energy: Whether to return the energy.

    Example:
        >>> one = LinearMap(torch.eye(2))
        >>> maps = LayerMaps(one, one, LinearMap(torch.eye(2, 4)), one)
        >>> attend(torch.tensor([[[3.0, 4.0]]]), torch.eye(2).expand(1, 2, 2, 2), maps)[0]
        tensor([[[0.6000, 0.8000]]])
    """
    d, s = w.shape[2:]
    folds = not isinstance(x, Heads) and _folds(x, d, s, maps, has_energy)
    heads: Tensor | None = None
    if isinstance(x, Heads):
        # heads without tiles come from plain formulas, so autograd goes on with these
        heads = None if x.tiles else x.parts[0]
    elif is_traced() or 0 in x.shape:
        heads = x if maps is None else linear(x, *join_maps(maps.q, maps.k))
    if heads is not None:
        by_head = heads.unflatten(-1, w.shape[1:3]).transpose(1, 2)
        if folds and maps is not None:
            return plain_folded(by_head, w, maps, key_mask, eps)
        return plain_scores(by_head, w, maps, key_mask, eps)
    like = x.parts[0] if isinstance(x, Heads) else x
    # a function with a backward pass of its own must cast what autocast would have cast
    narrow = None if folds else autocast_dtype(like)
    if narrow is not None:
        maps = None if maps is None else LayerMaps(*(_cast(m, narrow) for m in maps))
        like = like.to(narrow)
    w, tokens = w.to(like.dtype), None if isinstance(x, Heads) else like
    given: tuple[Tensor | None, ...] = (None,) * 8
    if maps is not None:
        given = (*maps.q, *maps.k, *maps.concat, *maps.out)
    if isinstance(x, Heads):
        tiles, shape = x.tiles, x.shape
        given = (None,) * 4 + given[4:] + x.parts + x.norms
    else:
        shape = x.shape[0], x.shape[1]
        tiles = cut(*shape, x.shape[-1] if maps is None else 2 * len(maps.q.weight))
    plan = TilePlan(tiles, shape, key_mask, representable(eps, like), folds, has_energy)
    return Attend.apply(plan, torch.is_grad_enabled(), tokens, w, *given)  # type: ignore[no-untyped-call]


def _cast(m: LinearMap, dtype: torch.dtype) -> LinearMap:
    return LinearMap(m.weight.to(dtype), None if m.bias is None else m.bias.to(dtype))


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
        return wide.transpose(-1, -2) @ (wide * inverse_norm(q, key_mask, eps).square())
