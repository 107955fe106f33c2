"""The multi-head layer around mechanisms that are functions of queries, keys and values."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.types import Device

from primal_attention.attention.base import Attention, Aux, Capabilities, State
from primal_attention.attention.rotary import Turn

__all__ = ["CachingCore", "Core", "FixedCoreAttention", "MultiHeadAttention"]


class Core(nn.Module):
    """A mechanism on heads: ``(q, k, v) → out``, with its dense matrix of weights.

    Inputs are finite, also at padded positions: :class:`MultiHeadAttention` sets padding to zero.
    """

    capabilities: Capabilities = Capabilities()
    ordered: bool = False
    """Whether positions matter. If so, ``forward`` gets all padding behind the real tokens."""
    takes_query_mask: bool = False
    """Whether queries influence each other. If so, ``forward`` also takes ``query_mask``."""
    takes_turn: bool = False
    """Whether the core applies ``rotary`` itself. If so, ``forward`` and ``step`` take ``turn``."""
    takes_groups: bool = False
    """Whether several heads of queries may share one head of keys and values."""

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        v: Float[Tensor, "b h m v"],
        *,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "b h n v"]:
        """Return the output of every query."""
        raise NotImplementedError  # abstract

    def weights(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        *,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "b h n m"]:
        """Return the dense matrix ``A`` with ``forward(q, k, v) = A v``; ``O(n m)`` memory.

        Every core is linear in ``v``, so column ``j`` of ``A`` is its output for the unit value
        ``j``.
        """
        b, h, m, _ = k.shape
        unit = torch.eye(m, dtype=q.dtype, device=q.device).expand(b, h, m, m)
        return self(q, k, unit, key_mask=key_mask, is_causal=is_causal)

    def init_state(self, k: Float[Tensor, "b h zero d"], v: Float[Tensor, "b h zero v"]) -> State:
        """Return the state before the first token; ``k`` and ``v`` have no tokens."""
        raise NotImplementedError  # abstract

    def step(
        self,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b h t d"],
        v: Float[Tensor, "b h t v"],
        state: State,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b h t v"], State]:
        """Continue a causal forward by ``t`` tokens."""
        raise NotImplementedError  # abstract


class CachingCore(Core):
    """A mechanism with a weight for every pair of tokens; its decoding state is a cache of keys."""

    def init_state(self, k: Float[Tensor, "b h zero d"], v: Float[Tensor, "b h zero v"]) -> State:
        """Return an empty cache of keys, values and their mask."""
        keep = torch.zeros(k.shape[0], 0, dtype=torch.bool, device=k.device)
        return State((k, v, keep), keep.sum(1))

    def step(
        self,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b h t d"],
        v: Float[Tensor, "b h t v"],
        state: State,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b h t v"], State]:
        """Append the tokens to the cache and attend to all of it; ``O(prefix)`` per token."""
        old_k, old_v, old_keep = state.tensors
        b, _, t, _ = q.shape
        new_keep = torch.ones(b, t, dtype=torch.bool, device=q.device)
        keep = torch.cat([old_keep, new_keep if key_mask is None else key_mask], dim=1)
        keys, values = torch.cat([old_k, k], dim=2), torch.cat([old_v, v], dim=2)
        pairs = keep[:, None, None, :].expand(-1, -1, t, -1).tril(old_keep.shape[1])
        after = State((keys, values, keep), count_seen(state, k, key_mask))
        return self._attend_masked(q, keys, values, pairs), after

    def _attend_masked(
        self, q: Tensor, k: Tensor, v: Tensor, keep: Bool[Tensor, "b 1 #n m"]
    ) -> Float[Tensor, "b h n v"]:
        """Return the outputs; ``keep`` is ``True`` where a query may attend to a key."""
        raise NotImplementedError  # abstract


class MultiHeadAttention(Attention):
    """Multi-head attention: projections, heads, masks and dropout around a :class:`Core`.

    Args:
        dim: Model width.
        num_heads: Number of heads; must divide ``dim``.
        core: The mechanism.
        bias: Whether the four projections have a bias.
        dropout: Probability of dropping an element of the output in training.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        core: Core,
        *,
        bias: bool = True,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, num_heads, dropout=dropout)
        self.q_proj = nn.Linear(dim, dim, bias, device, dtype)
        self.k_proj = nn.Linear(dim, dim, bias, device, dtype)
        self.v_proj = nn.Linear(dim, dim, bias, device, dtype)
        self.out_proj = nn.Linear(dim, dim, bias, device, dtype)
        self.core = core
        self.capabilities = core.capabilities
        self.kv_heads = num_heads
        """Heads of keys and values; fewer in a converted layer whose core takes groups."""

    def _split_keys(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b g n d"]:
        """Return the heads of keys or values as a view."""
        return x.unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)

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
        memory = x if context is None else context
        if key_mask is not None:
            # where instead of multiply: NaN times zero is NaN
            memory = torch.where(key_mask[:, :, None], memory, 0.0)
        order, keep = None, key_mask
        # such a core reads a position as a slot, so padding inside a sequence must move
        if key_mask is not None and self.core.ordered:
            order = real_first(key_mask)
            memory, keep = take_tokens(memory, order), key_mask.gather(1, order)
            rotary = None if rotary is None else rotary.take(order)
        q = self._split(self.q_proj(memory if context is None else x))
        extra: dict[str, Any] = {"key_mask": keep, "is_causal": is_causal}
        if keep is not None and self.core.takes_query_mask:
            real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
            extra["query_mask"] = keep if context is None else real
        y = self._merge(self._attend(q, memory, rotary, extra))
        if order is not None and context is None:
            y = take_tokens(y, order.argsort(1))
        y = self.dropout(self.out_proj(y))
        if key_mask is not None and context is None:
            y = torch.where(key_mask[:, :, None], y, 0.0)
        return y, None

    def _attend(
        self, q: Tensor, memory: Tensor, rotary: Turn | None, extra: dict[str, Any]
    ) -> Float[Tensor, "b h n v"]:
        """Project the memory to keys and values, and return the output of the core."""
        k, v = self._split_keys(self.k_proj(memory)), self._split_keys(self.v_proj(memory))
        if rotary is not None and self.core.takes_turn:
            extra = {**extra, "turn": rotary}
        elif rotary is not None:
            q, k = rotary.queries(q), rotary.keys(k)
        return self.core(q, k, v, **extra)

    def init_state(self, batch_size: int) -> State:
        """Return the state before the first token."""
        if not self.capabilities.stateful:
            return super().init_state(batch_size)
        weight = self.k_proj.weight
        empty = weight.new_zeros(batch_size, self.kv_heads, 0, self.head_dim)
        return self.core.init_state(empty, empty)

    def step(
        self,
        x: Float[Tensor, "b t c"],
        state: State,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
        rotary: Turn | None = None,
    ) -> tuple[Float[Tensor, "b t c"], State]:
        """Decode the next tokens; see :meth:`Attention.step` and :meth:`forward`."""
        if not self.capabilities.stateful:
            return super().step(x, state, key_mask=key_mask)
        self._check(x, key_mask=key_mask, state=state, rotary=rotary)
        if key_mask is not None:
            x = torch.where(key_mask[:, :, None], x, 0.0)
        q = self._split(self.q_proj(x))
        k, v = self._split_keys(self.k_proj(x)), self._split_keys(self.v_proj(x))
        extra: dict[str, Any] = {"key_mask": key_mask}
        if rotary is not None and self.core.takes_turn:
            extra["turn"] = rotary
        elif rotary is not None:
            q, k = rotary.queries(q), rotary.keys(k)
        y, state = self.core.step(q, k, v, state, **extra)
        y = self.dropout(self.out_proj(self._merge(y)))
        if key_mask is not None:
            y = torch.where(key_mask[:, :, None], y, 0.0)
        return y, state.compact()


class FixedCoreAttention(MultiHeadAttention):
    """Multi-head attention with a core that has no options; a subclass sets ``core_class``.

    Args:
        dim: Model width.
        num_heads: Number of heads; must divide ``dim``.
        bias: Whether the four projections have a bias.
        dropout: Probability of dropping an element of the output in training.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    core_class: ClassVar[type[Core]]

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        bias: bool = True,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        core = self.core_class()
        super().__init__(
            dim, num_heads, core, bias=bias, dropout=dropout, device=device, dtype=dtype
        )


def real_first(key_mask: Bool[Tensor, "b m"]) -> Int[Tensor, "b m"]:
    """Return an order of the slots: real tokens first, then padding, each in sequence order."""
    return (~key_mask).to(torch.uint8).argsort(dim=1, stable=True)


def take_tokens(x: Float[Tensor, "b n c"], slots: Int[Tensor, "b k"]) -> Float[Tensor, "b k c"]:
    """Return the tokens in the given slots of each sequence."""
    return x.gather(1, slots[:, :, None].expand(-1, -1, x.shape[-1]))


class AlignedWindow(NamedTuple):
    """A window and the tokens after it, with all padding moved to the left."""

    window: tuple[Tensor, Tensor]
    queries: Tensor
    tokens: tuple[Tensor, Tensor]
    slots: Int[Tensor, "b t"]
    """New slot of each token."""

    def read(self, y: Float[Tensor, "b h t v"]) -> Float[Tensor, "b h t v"]:
        """Return the outputs in the original order of the tokens."""
        return y.gather(2, self.slots[:, None, :, None].expand_as(y))


def close_gaps(
    window: Sequence[Float[Tensor, "b h w _"]],
    queries: Float[Tensor, "b h t _"],
    tokens: Sequence[Float[Tensor, "b h t _"]],
    seen: Int[Tensor, " b"],
    key_mask: Bool[Tensor, "b t"],
) -> AlignedWindow:
    """Return a window and its new tokens with all padding moved to the left.

    Afterwards the distance of two slots is the distance of their positions.

    Args:
        window: Keys and values of the last ``w`` tokens; the last ``min(seen, w)`` are real.
        queries: Queries of the new tokens.
        tokens: Keys and values of the new tokens.
        seen: Number of real tokens before the new ones.
        key_mask: ``True`` where a new token is real.
    """
    w = window[0].shape[2]
    # at the start of a sequence part of the window is empty
    was = torch.arange(w, device=key_mask.device) >= w - seen[:, None]
    order = torch.cat([was, key_mask], dim=1).to(torch.uint8).argsort(dim=1, stable=True)
    slots = (order.argsort(1)[:, w:] - w).clamp_min(0)
    # a slot filled from the window has no query; its output is never read, so any query will do
    source = (order[:, None, w:, None] - w).clamp_min(0)
    queries = queries.gather(2, source.expand_as(queries))
    keys, values = (torch.cat([old, new], dim=2) for old, new in zip(window, tokens, strict=True))
    keys, values = (t.gather(2, order[:, None, :, None].expand_as(t)) for t in (keys, values))
    before, after = (keys[:, :, :w], values[:, :, :w]), (keys[:, :, w:], values[:, :, w:])
    return AlignedWindow(before, queries, after, slots)


def count_seen(
    state: State, k: Float[Tensor, "b h t d"], key_mask: Bool[Tensor, "b t"] | None
) -> Tensor:
    """Return the number of real tokens of each sequence after the tokens of ``k``."""
    return state.seen + (k.shape[2] if key_mask is None else key_mask.sum(1))
