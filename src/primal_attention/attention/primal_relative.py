"""Primal-Attention with relative positions: KSVD scores tied to duals, weighted by distance.

    e_i = Σ_j c_{j-i} ⟨φ(q_i), φ(k_j)⟩ h_j / Σ_j c_{j-i}      r_i likewise with q and k exchanged

Dual-tied Primal-Attention (Chen et al. 2023, arXiv 2305.19798) projects onto ``Σ_j φ(k_j) h_jᵀ``, a
mean over tokens that has lost their order. Here each token has a mean of its own, weighted by a
learned Toeplitz matrix (Luo et al. 2021, arXiv 2106.12566): the same cosine features, the same
duals, no values, no ``n × n`` matrix, and a constant decoding state. Cosine features may cancel, so
the divisor is the sum of the weights, not of the scores.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.types import Device

from primal_attention.attention.base import SQUARES_FIT, Attention, Aux, Capabilities, State
from primal_attention.attention.multihead import close_gaps, real_first, take_tokens
from primal_attention.attention.positions import RelativePosition
from primal_attention.attention.registry import register_attention
from primal_attention.attention.rotary import Turn
from primal_attention.functional.precision import accumulator, full_precision
from primal_attention.functional.toeplitz import WindowState
from primal_attention.kernels.base import Factory
from primal_attention.kernels.exact import unit

__all__ = ["PrimalRelativeAttention"]


class PrimalRelativeAttention(Attention):
    """Primal projection scores with weights that depend on the distance between tokens.

    Time ``O(n (w + d) (d + s))`` per head beside the projections; decoding state
    ``2 (d s + w (d + s))`` numbers per head.

    Args:
        dim: Model width.
        num_heads: Heads; must divide ``dim``.
        rank: Directions ``s`` per head; by default 32, or the head width if that is smaller.
        window: Lags with a weight of their own to each side; beyond, weights are constant.
        bias: Whether projections and output map have a bias.
        dropout: Probability of dropping an element of the output in training.
        device: Where to create the parameters.
        dtype: Type of the parameters.

    Example:
        >>> attn = PrimalRelativeAttention(16, 4, window=8)
        >>> attn(torch.randn(2, 50, 16), is_causal=True).shape
        torch.Size([2, 50, 16])
    """

    capabilities = Capabilities(relative_position=True, rotary=False, max_magnitude=SQUARES_FIT)

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        rank: int | None = None,
        window: int = 64,
        bias: bool = True,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, num_heads, dropout=dropout)
        factory: Factory = {"device": device, "dtype": dtype}
        self.rank = min(32, self.head_dim) if rank is None else rank
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}.")
        self.q_proj = nn.Linear(dim, dim, bias, **factory)
        self.k_proj = nn.Linear(dim, dim, bias, **factory)
        self.dual_e = nn.Linear(dim, num_heads * self.rank, False, **factory)
        self.dual_r = nn.Linear(dim, num_heads * self.rank, False, **factory)
        self.position_e = RelativePosition(num_heads, window=window, **factory)
        self.position_r = RelativePosition(num_heads, window=window, **factory)
        self.concat = nn.Linear(2 * self.rank, self.head_dim, bias, **factory)
        self.out_proj = nn.Linear(dim, dim, bias, **factory)

    def _forward(
        self,
        x: Tensor,
        context: Tensor | None,
        key_mask: Tensor | None,
        rotary: Turn | None,
        *,
        is_causal: bool,
        return_aux: bool,
    ) -> tuple[Tensor, Aux | None]:
        memory, order, keep = x if context is None else context, None, None
        if key_mask is not None:
            # where, not multiply: a NaN in a padded slot must not survive
            memory = torch.where(key_mask[:, :, None], memory, 0.0)
            order = real_first(key_mask)
            memory, keep = take_tokens(memory, order), key_mask.gather(1, order)
        x = memory if context is None else x
        unit_q, unit_k = self._units(x)
        memory_q, memory_k = (unit_q, unit_k) if context is None else self._units(memory)
        dual_e, dual_r = self._duals(memory, keep)
        count = memory.shape[1] if keep is None else keep.sum(1, keepdim=True)
        at = torch.arange(x.shape[1], device=x.device)[None]
        scores = []
        for position, queries, keys, duals in (
            (self.position_e, unit_q, memory_k, dual_r),
            (self.position_r, unit_k, memory_q, dual_e),
        ):
            sums = position.sums(queries, keys, duals, is_causal=is_causal)
            scores.append(sums / position.totals(at, None if is_causal else count))
        heads = self._merge(self._heads(scores, x))
        if order is not None and context is None:
            heads = take_tokens(heads, order.argsort(1))
        y = self.dropout(self.out_proj(heads))
        if key_mask is not None and context is None:
            y = torch.where(key_mask[:, :, None], y, 0.0)
        return y, None

    def _units(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosine features of queries and keys, in float32 or better."""
        return unit(self._split(self.q_proj(x))), unit(self._split(self.k_proj(x)))

    def _duals(self, x: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the dual variables of both sides, zero at padded tokens."""
        e, r = (self._split(t.to(accumulator(t))) for t in (self.dual_e(x), self.dual_r(x)))
        if keep is not None:
            e, r = (torch.where(keep[:, None, :, None], t, 0.0) for t in (e, r))
        return e, r

    def _heads(self, scores: list[Tensor], x: Tensor) -> Float[Tensor, "b h n d"]:
        return self.concat(torch.cat(scores, dim=-1).to(self.concat.weight.dtype)).to(x.dtype)

    def init_state(self, batch_size: int) -> State:
        """Return zero sums and empty windows of both sides."""
        weight, h, d, s = self.q_proj.weight, self.num_heads, self.head_dim, self.rank
        w = self.position_e.reach
        shapes = 2 * ((d, s), (w, d), (w, s))
        zeros = (weight.new_zeros(batch_size, h, *z, dtype=accumulator(weight)) for z in shapes)
        return State(tuple(zeros), weight.new_zeros(batch_size, dtype=torch.long))

    def step(
        self,
        x: Float[Tensor, "b t c"],
        state: State,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t c"], State]:
        """Decode the next tokens at constant cost; see :meth:`Attention.step`."""
        self._check(x, key_mask=key_mask, state=state)
        if key_mask is not None:
            x = torch.where(key_mask[:, :, None], x, 0.0)
        (unit_q, unit_k), (dual_e, dual_r) = self._units(x), self._duals(x, key_mask)
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        real = real if key_mask is None else key_mask
        at = (state.seen[:, None] + real.cumsum(1) - 1).clamp_min(0)
        scores: list[Tensor] = []
        after: list[Tensor] = []
        for position, queries, keys, duals, old in (
            (self.position_e, unit_q, unit_k, dual_r, state.tensors[:3]),
            (self.position_r, unit_k, unit_q, dual_e, state.tensors[3:]),
        ):
            sums, new = self._continue(position, queries, keys, duals, old, state.seen, key_mask)
            scores.append(sums / position.totals(at, None))
            after.extend(new)
        y = self.dropout(self.out_proj(self._merge(self._heads(scores, x))))
        if key_mask is not None:
            y = torch.where(key_mask[:, :, None], y, 0.0)
        return y, State(tuple(after), state.seen + real.sum(1)).compact()

    def _continue(
        self,
        position: RelativePosition,
        queries: Tensor,
        keys: Tensor,
        duals: Tensor,
        old: tuple[Tensor, ...],
        seen: Int[Tensor, " b"],
        key_mask: Tensor | None,
    ) -> tuple[Tensor, WindowState]:
        with full_precision(queries):
            if key_mask is None:
                return position.step(queries, keys, duals, WindowState(*old))
            sums, *window = old
            moved = close_gaps(window, queries, [keys, duals], seen, key_mask)
            state = WindowState(sums, *moved.window)
            y, state = position.step(moved.queries, *moved.tokens, state)
            return moved.read(y), state


register_attention(
    "primal-relative",
    PrimalRelativeAttention,
    capabilities=PrimalRelativeAttention.capabilities,
    cost="n",
    summary="dual-tied primal projections with learned weights of near lags",
)
