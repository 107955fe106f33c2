"""Softmax that reads near keys and the best far blocks exactly, and all other blocks by moments.

    y_i ∝ Σ_{j ∈ E_i} e^{q_i·k_j} v_j + Σ_{J ∉ E_i} m_iJ (ν_J + X_Jᵀ q_i)
    m_iJ = n_J exp(q_i·μ_J + ½ q_iᵀ Σ_J q_i)

``J`` are blocks of keys with mean ``μ``, covariance ``Σ`` of low rank, mean value ``ν`` and
covariance ``X`` of keys and values. A query reads exactly: the first keys, the blocks around its
own place, and the ``top`` blocks whose best key may score highest, ``q·μ + 2 √(qᵀ Σ q)``. While
that is everything, the layer is softmax. Every query chooses for itself, so no choice depends on a
later token.

The expansion is that of fast kernel summation. Choosing blocks by a bound is also in Quest (Tang et
al. 2024, arXiv 2406.10774), MoBA (Lu et al. 2025, arXiv 2502.13189) and native sparse attention
(Yuan et al. 2025, arXiv 2502.11089), the first tokens in StreamingLLM (Xiao et al. 2023, arXiv
2309.17453), sums of far fields in fast multipole attention (Kang et al. 2023, arXiv 2310.11960).
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.types import Device

from primal_attention.attention.base import JOINED_TIME, Capabilities, State
from primal_attention.attention.multihead import (
    Core,
    MultiHeadAttention,
    count_seen,
    real_first,
    take_tokens,
)
from primal_attention.attention.registry import register_attention
from primal_attention.attention.rotary import Turn
from primal_attention.functional.adaptive import adaptive_attention, neglected_mass
from primal_attention.functional.adaptive_blocks import BlockPlan
from primal_attention.functional.adaptive_cache import (
    AdaptiveCache,
    attend_next,
    crop_cache,
    empty_cache,
)

__all__ = ["AdaptiveAttention", "AdaptiveCore", "NeglectedMass"]


class NeglectedMass(NamedTuple):
    """What a layer did not read exactly, per head, as a mean over real queries."""

    mass: Float[Tensor, "b h"]
    """Share of the mass of the softmax that comes from moments."""
    spread: Float[Tensor, "b h"]
    """Estimated standard deviation of that share: how far the moments may be off."""


class AdaptiveCore(Core):
    """An adaptive sum; the decoding state grows with every token.

    Args:
        block: Keys of a block.
        window: Blocks that are read before a query's own one; without order also after it.
        top: Far blocks that every query reads, or ``"auto"``: as many as ``error`` needs.
        sinks: First keys, which every query reads.
        rank: Directions of the covariances.
        error: With ``top="auto"``, the share of the mass that may come from moments.
        exact: Keys up to which a query reads all, because this is no slower; in whole blocks.
    """

    capabilities = Capabilities(time=JOINED_TIME | {"rotary"})
    ordered = True
    takes_groups = True

    def __init__(
        self,
        block: int = 32,
        window: int = 2,
        top: int | Literal["auto"] = 8,
        sinks: int = 4,
        rank: int = 4,
        error: float | None = None,
        exact: int = 1024,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("block", block, 1),
            ("window", window, 0),
            ("sinks", sinks, 0),
            ("rank", rank, 0),
            ("exact", exact, 0),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}; raise it.")
        if isinstance(top, str) and top != "auto":
            raise ValueError(f"top must be a number or 'auto', got {top!r}; write top='auto'.")
        if isinstance(top, int) and top < 0:
            raise ValueError(f"top must be at least 0, got {top}; use 0 to choose no block.")
        if (top == "auto") != (error is not None):
            raise ValueError(
                f"error and top='auto' belong together, got top={top!r} and error={error}; give "
                "both, such as top='auto', error=0.05, or a number of blocks alone."
            )
        if error is not None and not 0 <= error < 1:
            raise ValueError(f"error is a share of the mass, at least 0 and below 1, got {error}.")
        count = None if isinstance(top, str) else top
        self.plan = BlockPlan(block, window, count, sinks, rank, error or 0.0, exact)

    def extra_repr(self) -> str:
        """Return the options for ``print``."""
        return ", ".join(f"{name}={value}" for name, value in self.plan._asdict().items())

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b g m d"],
        v: Float[Tensor, "b g m v"],
        *,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "b h n v"]:
        """Return the adaptive sum; zero for a row without keys.

        Keys may have fewer heads than queries; each then serves several of them.
        """
        return adaptive_attention(q, k, v, self.plan, key_mask=key_mask, is_causal=is_causal)

    def init_state(self, k: Float[Tensor, "b g zero d"], v: Float[Tensor, "b g zero v"]) -> State:
        """Return an empty cache of keys, values and moments."""
        cache = empty_cache(k, v, self.plan)
        return State(tuple(cache), cache.keep.sum(1))

    def step(
        self,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g t d"],
        v: Float[Tensor, "b g t v"],
        state: State,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b h t v"], State]:
        """Continue a causal forward; reads near and chosen blocks, and ``n / block`` moments."""
        cache = AdaptiveCache(*state.tensors)
        y, cache = attend_next(q, k, v, cache, self.plan, key_mask)
        return y, State(tuple(cache), count_seen(state, k, key_mask))

    def crop(self, state: State, length: int) -> State:
        """Return the state after the first ``length`` tokens, padding included.

        Speculative decoding removes rejected tokens this way.
        """
        cache = AdaptiveCache(*state.tensors)
        if not 0 <= length <= cache.keep.shape[1]:
            raise ValueError(
                f"length must be between 0 and the {cache.keep.shape[1]} tokens of the state, got "
                f"{length}; a crop only removes tokens."
            )
        cache = crop_cache(cache, length, self.plan)
        return State(tuple(cache), cache.keep.sum(1))


class AdaptiveAttention(MultiHeadAttention):
    """Multi-head softmax that is exact where the mass is, and sums the rest by moments.

    Args:
        dim: Model width.
        num_heads: Number of heads; must divide ``dim``.
        block: Keys of a block.
        window: Blocks that are read before a query's own one; without order also after it.
        top: Far blocks that every query reads, or ``"auto"``: as many as ``error`` needs.
        sinks: First keys, which every query reads.
        rank: Directions of the covariances.
        error: With ``top="auto"``, the share of the mass that may come from moments.
        exact: Keys up to which a query reads all, because this is no slower; in whole blocks.
        bias: Whether the four projections have a bias.
        dropout: Probability of dropping an element of the output in training.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Example:
        >>> layer = AdaptiveAttention(16, 4, block=8, top=2, exact=0)
        >>> layer(torch.randn(2, 100, 16), is_causal=True).shape
        torch.Size([2, 100, 16])
    """

    core: AdaptiveCore

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        block: int = 32,
        window: int = 2,
        top: int | Literal["auto"] = 8,
        sinks: int = 4,
        rank: int = 4,
        error: float | None = None,
        exact: int = 1024,
        bias: bool = True,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        core = AdaptiveCore(block, window, top, sinks, rank, error, exact)
        super().__init__(
            dim, num_heads, core, bias=bias, dropout=dropout, device=device, dtype=dtype
        )

    @torch.no_grad()
    def diagnose(
        self,
        x: Float[Tensor, "b n c"],
        context: Float[Tensor, "b m c"] | None = None,
        *,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
        rotary: Turn | None = None,
    ) -> NeglectedMass:
        """Return how much of the mass of every head comes from moments.

        Args:
            x: Tokens, as for ``forward``.
            context: Memory, as for ``forward``.
            key_mask: ``True`` where a token of the memory is real.
            is_causal: As for ``forward``.
            rotary: As for ``forward``.

        Example:
            >>> layer = AdaptiveAttention(16, 2, block=4, window=0, top=1, exact=0)
            >>> found = layer.diagnose(torch.randn(1, 100, 16))
            >>> bool((found.mass > 0).all() and (found.mass < 1).all())
            True
        """
        self._check(x, context, key_mask, is_causal, rotary=rotary)
        memory = x if context is None else context
        if key_mask is not None:
            order = real_first(key_mask)
            memory = take_tokens(torch.where(key_mask[:, :, None], memory, 0.0), order)
            rotary, key_mask = rotary and rotary.take(order), key_mask.gather(1, order)
        q = self._split(self.q_proj(memory if context is None else x))
        k, v = self._split_keys(self.k_proj(memory)), self._split_keys(self.v_proj(memory))
        if rotary is not None:
            q, k = rotary.queries(q), rotary.keys(k)
        plan = self.core.plan
        mass, spread = neglected_mass(q, k, v, plan, key_mask=key_mask, is_causal=is_causal)
        real = q.new_ones(q.shape[0], q.shape[2])
        if key_mask is not None and context is None:
            real = key_mask.to(q.dtype)
        count = real.sum(1).clamp_min(1)[:, None]
        return NeglectedMass(*((t * real[:, None]).sum(-1) / count for t in (mass, spread)))


register_attention(
    "adaptive",
    AdaptiveAttention,
    capabilities=AdaptiveCore.capabilities,
    cost="n² / block",
    summary="softmax that is exact where the mass is; moments for the rest",
)
