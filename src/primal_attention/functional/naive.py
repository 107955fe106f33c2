"""The readable truth: every mechanism straight from its formula, with nothing done for speed.

One sequence position is one row, nothing is fused, matrices of size ``n × m`` are formed where the
maths has them. The fast functions of this package are tested against this file in values and in
gradients, and timed beside it. :func:`primal_layer` is the default layer of the library as a whole.

Letters: ``b`` batch, ``h`` heads, ``n`` queries, ``m`` keys or sampled rows, ``c`` model width,
``d`` head width, ``s`` rank, ``v`` value width. Masks are ``True`` where a token is real.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import linear

__all__ = [
    "causal_data_scores",
    "causal_dual_scores",
    "cosine",
    "data_weights",
    "dual_weights",
    "even_indices",
    "ksvd_objective",
    "linear_attention",
    "prefix_mean",
    "primal_layer",
    "primal_output",
    "primal_scores",
    "smooth_basis",
    "softmax_attention",
    "standardized",
    "valid_positions",
]


def cosine(x: Float[Tensor, "*batch d"], eps: float = 1e-6) -> Float[Tensor, "*batch d"]:
    """Return ``x / max(‖x‖, eps)``, the feature map of every published experiment."""
    return x / x.norm(dim=-1, keepdim=True).clamp_min(eps)


def even_indices(length: int, num: int) -> list[int]:
    """Return ``floor(m (length - 1) / (num - 1))`` for ``m = 0 … num - 1``; all zero if one."""
    return [m * (length - 1) // max(num - 1, 1) for m in range(num)]


def data_weights(
    f: Float[Tensor, "b h m d"], w: Float[Tensor, "h m s"]
) -> Float[Tensor, "b h d s"]:
    """Return ``W_{e|X} = Fᵀ W_e``: the sampled rows times their codes."""
    return torch.einsum("bhmd,hms->bhds", f, w)


def dual_weights(
    phi: Float[Tensor, "b h n d"], duals: Float[Tensor, "b h n s"]
) -> Float[Tensor, "b h d s"]:
    """Return ``Φᵀ H / n``: the stationarity condition that ties weights to dual variables."""
    return torch.einsum("bhnd,bhns->bhds", phi, duals) / max(phi.shape[2], 1)


def primal_scores(
    q: Float[Tensor, "b h n d"], w: Float[Tensor, "#b h d s"], eps: float = 1e-6
) -> Float[Tensor, "b h n s"]:
    """Return ``e_i = Wᵀ φ(q_i)``."""
    return cosine(q, eps) @ w


def primal_output(
    e: Float[Tensor, "b h n s"],
    r: Float[Tensor, "b h n s"],
    concat_weight: Float[Tensor, "d two_s"],
    concat_bias: Float[Tensor, " d"] | None,
    out_weight: Float[Tensor, "c hd"],
    out_bias: Float[Tensor, " c"] | None,
) -> Float[Tensor, "b n c"]:
    """Return the layer output: ``2s → d`` per head, merge the heads, project."""
    heads = torch.cat([e, r], dim=-1) @ concat_weight.T
    if concat_bias is not None:
        heads = heads + concat_bias
    y = heads.transpose(1, 2).flatten(2) @ out_weight.T
    return y if out_bias is None else y + out_bias


def standardized(x: Float[Tensor, "*batch c"], eps: float = 1e-6) -> Float[Tensor, "*batch c"]:
    """Return rows with mean zero and variance one; a constant row becomes zero."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps**2).sqrt()


def smooth_basis(num: int, size: int, like: Tensor) -> Float[Tensor, "{num} {size}"]:
    """Return ``cos(π j (m + ½) / num)`` for rows ``m`` and ``j < size``, orthonormal columns."""
    rows, order = torch.arange(num).to(like)[:, None], torch.arange(size).to(like)
    scale = torch.where(order == 0, 1.0, 2.0).to(like).div(num).sqrt()
    return scale * torch.cos(math.pi * order * (rows + 0.5) / num)


def primal_layer(
    x: Float[Tensor, "b n c"],
    q_proj: tuple[Tensor, Tensor | None],
    k_proj: tuple[Tensor, Tensor | None],
    codes: tuple[Float[Tensor, "h k s"], Float[Tensor, "h k s"]],
    concat: tuple[Tensor, Tensor | None],
    out_proj: tuple[Tensor, Tensor | None],
    ell: Float[Tensor, "h s"],
    num_samples: int,
    key_mask: Bool[Tensor, "b n"] | None = None,
) -> tuple[Float[Tensor, "b n c"], Float[Tensor, ""]]:
    """Return output and KSVD loss of the default Primal-Attention layer, one sequence at a time.

    Args:
        x: Tokens.
        q_proj: Weight and bias of the queries.
        k_proj: Weight and bias of the keys.
        codes: Coefficients of the smooth codes ``W_e`` and ``W_r``.
        concat: Weight and bias of the map from both scores of a head to its width.
        out_proj: Weight and bias of the output.
        ell: ``ℓ`` of the objective.
        num_samples: Sampled rows ``m``.
        key_mask: ``True`` where a token is real.
    """
    h, size, _ = codes[0].shape
    basis = smooth_basis(num_samples, size, x)

    def heads(z: Float[Tensor, "m c"]) -> Float[Tensor, "h m d"]:
        return z.unflatten(-1, (h, -1)).transpose(0, 1)

    outputs, losses = [], []
    for i in range(x.shape[0]):
        tokens = x[i] if key_mask is None else x[i, key_mask[i]]
        if tokens.shape[0] == 0:
            outputs.append(torch.zeros_like(x[i]))
            continue
        f = heads(standardized(tokens[even_indices(tokens.shape[0], num_samples)]))  # [h m d]
        e, r = (
            cosine(heads(linear(tokens, *proj))) @ (f.mT @ (basis @ code))  # φ(q) Fᵀ W
            for proj, code in zip((q_proj, k_proj), codes, strict=True)
        )
        y = linear(linear(torch.cat([e, r], dim=-1), *concat).transpose(0, 1).flatten(1), *out_proj)
        if key_mask is not None:
            y = torch.zeros_like(x[i]).index_put((key_mask[i],), y)
        outputs.append(y)
        losses.append(ksvd_objective(e[None], r[None], ell, *codes).mean().square())
    loss = torch.stack(losses).mean() if losses else x.new_zeros(())
    return torch.stack(outputs), loss


def prefix_mean(
    x: Float[Tensor, "b h n d"], decay: float | None = None
) -> Float[Tensor, "b h n d"]:
    """Return the running mean over positions ``u ≤ t``, or the decayed mean ``γ m + (1-γ) x``."""
    rows, carry = [], torch.zeros_like(x[:, :, 0])
    for t in range(x.shape[2]):
        if decay is None:
            carry = (carry * t + x[:, :, t]) / (t + 1)
        else:
            carry = decay * carry + (1 - decay) * x[:, :, t]
        rows.append(carry)
    return torch.stack(rows, dim=2)


def causal_data_scores(
    q: Float[Tensor, "b h n d"],
    f: Float[Tensor, "b h n d"],
    codes: Float[Tensor, "h n s"],
    num_samples: int,
    eps: float = 1e-6,
) -> Float[Tensor, "b h n s"]:
    """Return ``e_t = a_t S_tᵀ φ(q_t)``, ``S_t = Σ_{u ≤ t} f_u w_uᵀ``.

    The scale ``a_t`` is ``√(m / t)`` for the first ``m = num_samples`` tokens, then ``m / t``.
    """
    rows = []
    for t in range(q.shape[2]):
        seen = torch.einsum("bhud,hus->bhds", f[:, :, : t + 1], codes[:, : t + 1])
        scale = num_samples / (t + 1)
        scale = scale**0.5 if scale > 1 else scale
        rows.append(scale * torch.einsum("bhd,bhds->bhs", cosine(q[:, :, t], eps), seen))
    return torch.stack(rows, dim=2)


def causal_dual_scores(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    duals: Float[Tensor, "b h n s"],
    eps: float = 1e-6,
) -> Float[Tensor, "b h n s"]:
    """Return ``e_t = (1 / t) Σ_{u ≤ t} ⟨φ(q_t), φ(k_u)⟩ h_u``."""
    n = q.shape[2]
    kernel = (cosine(q, eps) @ cosine(k, eps).transpose(-1, -2)).tril()
    return kernel @ duals / torch.arange(1, n + 1, dtype=q.dtype, device=q.device)[:, None]


def ksvd_objective(
    e: Float[Tensor, "b h n s"],
    r: Float[Tensor, "b h m s"],
    lam: Float[Tensor, "h s"],
    w_e: Float[Tensor, "*batch k s"],
    w_r: Float[Tensor, "*batch k s"],
) -> Float[Tensor, "b h"]:
    """Return ``J = ½ mean‖ℓ∘e‖² + ½ mean‖ℓ∘r‖² − Tr(W_eᵀ W_r)`` with explicit diagonal matrices."""
    diagonal = torch.diag_embed(lam)  # [h s s]
    energy_e = torch.einsum("bhns,hst->bhnt", e, diagonal).square().sum(-1).mean(-1)
    energy_r = torch.einsum("bhns,hst->bhnt", r, diagonal).square().sum(-1).mean(-1)
    gram = torch.einsum("...ms,...mt->...st", w_e, w_r)
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    return energy_e / 2 + energy_r / 2 - trace


def _dense_mask(
    scores: Float[Tensor, "b h n m"],
    key_mask: Bool[Tensor, "b m"] | None,
    is_causal: bool,
) -> Bool[Tensor, "b h n m"]:
    keep = torch.ones_like(scores, dtype=torch.bool)
    if key_mask is not None:
        keep = keep & key_mask[:, None, None, :]
    if is_causal:
        keep = keep.tril()
    return keep


def softmax_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h m d"],
    v: Float[Tensor, "b h m v"],
    key_mask: Bool[Tensor, "b m"] | None = None,
    is_causal: bool = False,
) -> Float[Tensor, "b h n v"]:
    """Return ``softmax(q kᵀ / √d) v``; a row without keys is zero."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    keep = _dense_mask(scores, key_mask, is_causal)
    weights = torch.where(keep, scores, -torch.inf).softmax(-1)
    return torch.where(keep, weights, 0.0) @ v


def linear_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h m d"],
    v: Float[Tensor, "b h m v"],
    key_mask: Bool[Tensor, "b m"] | None = None,
    is_causal: bool = False,
) -> Float[Tensor, "b h n v"]:
    """Return attention with weights ``φ(q)·φ(k)``, ``φ = elu + 1``; a row without keys is zero."""
    phi_q, phi_k = torch.nn.functional.elu(q) + 1, torch.nn.functional.elu(k) + 1
    weights = phi_q @ phi_k.transpose(-1, -2)
    weights = torch.where(_dense_mask(weights, key_mask, is_causal), weights, 0.0)
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0) @ v


def valid_positions(keep: Bool[Tensor, " n"]) -> Int[Tensor, " valid"]:
    """Return the positions of the real tokens of one sequence, in order."""
    return keep.nonzero().flatten()
