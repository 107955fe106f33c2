"""Attention of a layer in one forward: weights, values and scores, by row blocks in float64.

An ``n × n`` matrix is computed only when :meth:`CapturedLayer.weights` is called.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from primal_attention.attention import Attention
from primal_attention.hosts.inputs import LayerInputs

__all__ = ["CapturedLayer", "CapturedScores", "DotProductLayer", "WeightsLayer"]


class CapturedScores(NamedTuple):
    """Scores of a primal layer on one sequence; its kernel is a multiple of ``e diag(lam) rᵀ``."""

    e: Float[Tensor, "h n s"]
    """Scores of the queries."""
    r: Float[Tensor, "h m s"]
    """Scores of the keys."""
    lam: Float[Tensor, "h s"]
    """The weights ``λ = ℓ²`` of the directions."""


class CapturedLayer(ABC):
    """Attention of one layer in one forward; every result is in float64 and without padding."""

    name: str
    """Name of the module that attends, such as ``encoder.layer.5.attention.self``."""
    num_heads: int
    head_dim: int
    is_causal: bool
    """Whether no query attends to a later key."""
    keep: Bool[Tensor, "b m"]
    """``True`` where a key is a real token."""
    query_keep: Bool[Tensor, "b n"]
    """``True`` where a query is a real token."""
    output: Tensor
    """Output of the module, before the residual connection."""
    has_weights: bool = True
    """Whether the layer is a matrix of weights; primal layers have scores instead."""
    layer: Attention | None = None
    """The module, for layers of this library."""
    inputs: LayerInputs | None = None
    """Inputs of the module, for layers of this library."""

    def __len__(self) -> int:
        return len(self.keep)

    @abstractmethod
    def _rows(self, sequence: int, rows: slice) -> Float[Tensor, "h rows m"]:
        """Return rows of the weights of real queries over real keys."""

    @abstractmethod
    def values(self, sequence: int = 0) -> Float[Tensor, "h m v"]:
        """Return the values of the real keys, one set for each query head."""

    def real_inputs(self, sequence: int) -> LayerInputs:
        """Return the inputs of one sequence of a layer of this library, without padding."""
        if self.inputs is None:
            raise ValueError(f"{self.name} is no layer of this library; its inputs are not known.")
        self.inputs.check_rows()
        x, context, _, is_causal, rotary = self.inputs[:5]
        one, queries = slice(sequence, sequence + 1), self.query_keep[sequence]
        other = None if context is None else context[one, self.keep[sequence]]
        if rotary is not None:
            rotary = rotary.take(queries.nonzero()[:, 0].expand(len(x), -1))
            if len(rotary.cos) > 1:
                rotary = type(rotary)(*(t[one] for t in rotary))
        return LayerInputs(x[one, queries], other, None, is_causal, rotary)

    def forbids(self, queries: Bool[Tensor, "b n"], keys: Bool[Tensor, "b m"]) -> bool:
        """Return whether none of these queries may attend to any of these keys."""
        return not bool((keys & self.keep).any())

    def weights(
        self,
        sequence: int = 0,
        *,
        rows: slice | None = None,
        heads: int | slice | Sequence[int] | Tensor | None = None,
    ) -> Float[Tensor, "h n m"]:
        """Return the attention weights of a sequence: ``O(h n m)`` memory.

        Args:
            sequence: Which sequence of the batch.
            rows: Which queries, counted without padding; by default all.
            heads: Which heads, as an index of a tensor's first axis; by default all.
        """
        self._check_weights()
        n = int(self.query_keep[sequence].sum())
        start, stop, step = (rows or slice(None)).indices(n)
        if step != 1:
            raise ValueError(f"rows must have step 1, got step {step}; index the result instead.")
        parts = [
            self._rows(sequence, slice(i, min(i + _BLOCK, stop)))
            for i in range(start, stop, _BLOCK)
        ]
        m = int(self.keep[sequence].sum())
        empty = torch.zeros(self.num_heads, 0, m, dtype=torch.float64)
        found = torch.cat(parts, 1) if parts else empty
        return found if heads is None else found[heads]

    def row_blocks(
        self, sequence: int = 0, *, size: int = 512
    ) -> Iterator[tuple[slice, Float[Tensor, "h rows m"]]]:
        """Yield blocks of rows of the weights: ``O(h size m)`` memory at a time."""
        self._check_weights()
        n = int(self.query_keep[sequence].sum())
        for i in range(0, n, size):
            rows = slice(i, min(i + size, n))
            yield rows, self._rows(sequence, rows)

    def scores(self, sequence: int = 0) -> CapturedScores:
        """Return the scores of a primal layer: ``O(n s)`` memory, no ``n × n`` matrix."""
        raise ValueError(
            f"{self.name} is not a primal layer and has no scores; use weights() instead."
        )

    def _check_weights(self) -> None:
        if not self.has_weights:
            raise ValueError(
                f"{self.name} is a {type(self.layer).__name__} and has no matrix of weights; use "
                "scores() of primal layers, or another layer."
            )


_BLOCK = 512


class DotProductLayer(CapturedLayer):
    """Softmax attention known by its queries, keys, values and mask."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
    ) -> None:
        self._q = q.detach()
        groups = q.shape[1] // k.shape[1]
        self._k, self._v = (t.detach().repeat_interleave(groups, 1) for t in (k, v))
        self._mask, self._causal = mask, causal
        # what scaled_dot_product_attention takes if it gets no scale
        self._scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        self.num_heads, self.head_dim = q.shape[1], v.shape[-1]
        self.is_causal = causal or _forbids_later(mask, q.shape[2], k.shape[2])
        self.keep = _attended(mask, len(q), k.shape[2])
        self.query_keep = torch.ones(len(q), q.shape[2], dtype=torch.bool)

    def _rows(self, sequence: int, rows: slice) -> Float[Tensor, "h rows m"]:
        queries, keep = self.query_keep[sequence].nonzero()[rows, 0], self.keep[sequence]
        q, k = self._q[sequence, :, queries].double(), self._k[sequence][:, keep].double()
        logits = self._scale * q @ k.transpose(-1, -2)
        if self._causal:
            keys = keep.nonzero()[:, 0]
            logits = logits.masked_fill(keys > queries[:, None], -torch.inf)
        if self._mask is not None:
            mask = self._mask.expand(len(self._q), *self._mask.shape[1:])[sequence]
            mask = mask.expand(-1, self._q.shape[2], -1)[:, queries][..., keep]
            if mask.dtype == torch.bool:
                logits = logits.masked_fill(~mask, -torch.inf)
            else:
                logits = logits + mask.double()
        # a row without any key is zero instead of NaN
        return torch.softmax(logits, -1).nan_to_num(0.0)

    def values(self, sequence: int = 0) -> Float[Tensor, "h m v"]:
        """Return the values of the real keys, one set for each query head."""
        return self._v[sequence][:, self.keep[sequence]].double()

    def forbids(self, queries: Bool[Tensor, "b n"], keys: Bool[Tensor, "b m"]) -> bool:
        """Return whether none of these queries may attend to any of these keys."""
        pairs = queries[:, None, :, None] & keys[:, None, None, :]
        if self._causal:
            pairs = pairs.tril()
        if self._mask is not None:
            pairs = pairs & _allowed(self._mask)
        return not bool(pairs.any())


class WeightsLayer(CapturedLayer):
    """Attention whose weights were computed elsewhere.

    Args:
        weights: Weights of all heads; queries are rows.
        v: Values of the heads, if they are known.
        keep: ``True`` where a key is a real token; by default where a query attends to it.
        query_keep: The same for queries; by default everywhere.
        is_causal: Whether no query attends to a later key; by default seen from the weights.
    """

    def __init__(
        self,
        weights: Float[Tensor, "b h n m"],
        v: Float[Tensor, "b h m v"] | None,
        *,
        keep: Bool[Tensor, "b m"] | None = None,
        query_keep: Bool[Tensor, "b n"] | None = None,
        is_causal: bool | None = None,
    ) -> None:
        self._weights, self._v = weights.detach(), None if v is None else v.detach()
        self.num_heads, n, m = weights.shape[1:]
        self.head_dim = 0 if v is None else v.shape[-1]
        if is_causal is None:
            is_causal = n == m > 1 and not bool(weights.triu(1).any())
        self.is_causal = is_causal
        self.keep = weights.any(2).any(1) if keep is None else keep
        every = torch.ones(len(weights), n, dtype=torch.bool)
        self.query_keep = every if query_keep is None else query_keep

    def _rows(self, sequence: int, rows: slice) -> Float[Tensor, "h rows m"]:
        chosen = self.query_keep[sequence].nonzero()[rows, 0]
        return self._weights[sequence][:, chosen][..., self.keep[sequence]].double()

    def values(self, sequence: int = 0) -> Float[Tensor, "h m v"]:
        """Return the values of the real keys, one set for each query head."""
        if self._v is None:
            raise ValueError(f"{self.name or 'The layer'} is given by its weights alone.")
        return self._v[sequence][:, self.keep[sequence]].double()

    def forbids(self, queries: Bool[Tensor, "b n"], keys: Bool[Tensor, "b m"]) -> bool:
        """Return whether none of these queries attends to any of these keys."""
        pairs = queries[:, None, :, None] & keys[:, None, None, :]
        return not bool(self._weights[pairs.expand_as(self._weights)].any())


def _attended(mask: Tensor | None, b: int, m: int) -> Bool[Tensor, "b m"]:
    """Return the keys that at least one query may attend to."""
    if mask is None:
        return torch.ones(b, m, dtype=torch.bool)
    return _allowed(mask).expand(b, *mask.shape[1:]).any(2).any(1).expand(b, m)


def _allowed(mask: Tensor) -> Bool[Tensor, "b h n m"]:
    """Return the pairs that a mask allows."""
    return mask if mask.dtype == torch.bool else mask > _FORBIDDEN


_FORBIDDEN = -1e4
"""Additive masks at or below this forbid a pair: libraries use -10000, the lowest float or -inf."""


def _forbids_later(mask: Tensor | None, n: int, m: int) -> bool:
    if mask is None or n != m or n == 1 or mask.shape[-2:] != (n, m):
        return False
    return not bool(_allowed(mask).triu(1).any())
