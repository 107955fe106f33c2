"""Softmax over few keys, those with the largest primal kernel.

    κ_ij = Σ_h ⟨φ(q_hi), φ(k_hj)⟩,  φ(x) = x / ‖x‖        N_i = the t keys with the largest κ_ij
    y_i = Σ_{j ∈ N_i} p_ij v_j,     p_ij ∝ a_ij exp(⟨q_i, k_j⟩ / √d)

``κ`` is the kernel of Primal-Attention, summed over heads. ``a`` falls linearly from 1 for the
first key to 0 for key number ``t + 1``. So the output is continuous, and training improves the
choice itself. A primal layer smooths and cannot copy: its kernel has a bounded rank. This layer
copies. Beside primal layers, one of it is enough to look up single tokens.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize, pad
from torch.types import Device

from primal_attention.attention.base import JOINED_TIME, Capabilities
from primal_attention.attention.multihead import CachingCore, MultiHeadAttention
from primal_attention.attention.registry import register_attention
from primal_attention.functional.precision import accumulator

__all__ = ["SparseAttention", "SparseCore"]

_EPS = 1e-3
_TIE = 1e-3
"""Added to differences of the kernel, so that equal keys have equal weights."""


class SparseCore(CachingCore):
    """Softmax over the ``t`` keys with the largest primal kernel; ``O(n m d + n t d)`` time.

    Args:
        num_keys: Keys ``t`` that a query attends to.
    """

    capabilities = Capabilities(time=JOINED_TIME | {"rotary"})

    def __init__(self, num_keys: int = 64) -> None:
        super().__init__()
        if num_keys < 1:
            raise ValueError(f"num_keys must be at least 1, got {num_keys}.")
        self.num_keys = num_keys

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        v: Float[Tensor, "b h m v"],
        *,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "b h n v"]:
        """Return the softmax mean of the values of the chosen keys; zero without keys."""
        keep = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        if key_mask is not None:
            keep = keep & key_mask[:, None, None, :]
        return self._attend_masked(q, k, v, keep.tril() if is_causal else keep)

    def choose(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        keep: Bool[Tensor, "#b 1 #n m"],
    ) -> tuple[Int[Tensor, "b n t"], Bool[Tensor, "b n t"]]:
        """Return ``t + 1`` keys of every query, best first, and which of them are real.

        A query with fewer keys gets the key number ``m``, which does not exist.
        """
        count = self.num_keys + 1
        with torch.no_grad():
            f, g = (normalize(x.to(accumulator(x)), dim=-1) for x in (q, k))
            f, g = (x.transpose(1, 2).flatten(2) for x in (f, g))
            kernel = torch.where(keep[:, 0], f @ g.mT, -torch.inf)
            # so many columns more that there are always enough of them
            best = pad(kernel, (0, count), value=-torch.inf).topk(count)
        return best.indices.clamp_max(k.shape[2]), best.values != -torch.inf

    def _attend_masked(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        index, is_real = self.choose(q, k, keep)
        q, wide = q.to(accumulator(q)), k.to(accumulator(k))
        # the key that does not exist is a row of zeros
        chosen = _take(pad(wide, (0, 0, 0, 1)), index)  # [b h n t d]
        scores = torch.einsum("bhnd,bhntd->bhnt", q, chosen)
        lengths = q.norm(dim=-1)[..., None] * chosen.norm(dim=-1)
        kernel = (scores / lengths.clamp_min(_EPS)).sum(1)  # [b n t]
        scores = scores * q.shape[-1] ** -0.5 + _taper(kernel, is_real[..., -1:]).log()[:, None]
        scores, is_real = scores[..., :-1], is_real[:, None, :, :-1]
        scores = torch.where(is_real, scores, torch.finfo(scores.dtype).min)
        weights = torch.where(is_real, scores.softmax(-1), 0.0).to(v.dtype)
        return torch.einsum(
            "bhnt,bhntv->bhnv", weights, _take(pad(v, (0, 0, 0, 1)), index[..., :-1])
        )


def _taper(
    kernel: Float[Tensor, "b n t"], has_more: Bool[Tensor, "b n 1"]
) -> Float[Tensor, "b n t"]:
    """Return factors from 1 for the first key to 0 for the last; 1 if all keys are chosen."""
    above = (kernel - kernel[..., -1:]).clamp_min(0) + _TIE
    return torch.where(has_more, above / above[..., :1], 1.0)


def _take(x: Float[Tensor, "b h m d"], index: Int[Tensor, "b n t"]) -> Float[Tensor, "b h n t d"]:
    """Return the rows in the given places, the same for all heads."""
    b, h, _, d = x.shape
    flat = index.flatten(1)[:, None, :, None].expand(-1, h, -1, d)
    return x.gather(2, flat).view(b, h, *index.shape[1:], d)


class SparseAttention(MultiHeadAttention):
    """Multi-head softmax over the few keys that the primal kernel retrieves.

    Args:
        dim: Model width.
        num_heads: Number of heads; must divide ``dim``.
        num_keys: Keys that a query attends to, the same for all heads.
        bias: Whether the four projections have a bias.
        dropout: Probability of dropping an element of the output in training.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Example:
        >>> SparseAttention(16, 4, num_keys=3)(torch.randn(2, 9, 16)).shape
        torch.Size([2, 9, 16])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        num_keys: int = 64,
        bias: bool = True,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        core = SparseCore(num_keys)
        super().__init__(
            dim, num_heads, core, bias=bias, dropout=dropout, device=device, dtype=dtype
        )


register_attention(
    "primal-sparse",
    SparseAttention,
    capabilities=SparseCore.capabilities,
    cost="n²",
    summary="softmax over the few keys with the largest primal kernel",
)
