"""Attention of token numbers whose weights are corpus counts.

Row-normalised counts are a softmax: ``log C_ij = PMI(i, j) + log p(i) + log p(j) + log Z``, and a
softmax over ``j`` does not see the terms of ``i``. Hence, for a sequence ``x``,

    Norm(M)_rs = softmax_s( PMI(x_r, x_s) + log p(x_s) ),        M_rs = C[x_r, x_s]

exactly: attention with logits PMI, temperature 1 and a key bias, the log probability of the key.
A truncated SVD ``PMI ≈ W_Q W_Kᵀ`` gives queries and keys of width ``s``.
"""

import copy
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, Unpack, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from primal_attention.analysis.counts.cooccurrence import Cooccurrence
from primal_attention.analysis.counts.factors import (
    AssociationKernel,
    KeyBias,
    count_factors,
    smoothed_counts,
    type_key_bias,
)
from primal_attention.analysis.counts.transforms import Transform, TransformArguments, to_dense
from primal_attention.analysis.counts.vocabulary import Document, Splitter

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from scipy.sparse import csr_array

__all__ = ["CountAttention", "DistributionalAttention"]

Positional = Literal["inverse-distance", "learned"]
# largest distance with a parameter of its own
_REACH = 64


class CountAttention(NamedTuple):
    """Output and weights of count attention."""

    output: Float[Tensor, "b n v"]
    weights: Float[Tensor, "b n m"]


class DistributionalAttention(nn.Module):
    """Attention of token numbers from the counts of a corpus, without training.

    The weight of key ``s`` for query ``r`` grows with the counts ``C[x_r, x_s]``. With the default
    options, counts that are all positive, and no ``rank``, the weights are the row-normalised
    counts exactly.

    Tokens without counts: an unknown query, and a query whose allowed keys all have weight zero,
    attends to all allowed positions equally. An unknown key has weight zero for other queries. Rows
    without an allowed key are zero.

    Args:
        cooc: The counts.
        rank: Number of singular directions of the logits; ``None`` keeps the whole table. Give
            ``smoothing`` with it: the floor of pairs without counts would fill the directions.
        transform: Logits: ``"pmi"``, ``"ppmi"``, ``"log"``, ``"log1p"`` go through a softmax.
            ``"counts"`` and ``"probability"`` are divided by their row sums, which is the softmax
            of their logarithm.
        key_bias: ``"unigram"`` adds the log probability of the key; ``"auto"`` does so for PMI and
            PPMI.
        positional: ``"inverse-distance"`` divides weights by the distance of two tokens.
            ``"learned"`` starts there and has a parameter for each distance up to 64.
        directional: Use ``F``, how often ``x_s`` follows ``x_r``; otherwise ``S = F + Fᵀ``.
        causal: Whether queries attend to themselves and earlier tokens only.
        diag: ``"zero"`` sets the diagonal of the counts to zero: a word does not attend to itself.
        values: ``"rows"``: a token's value is its row of counts, divided by its sum. ``"svd"``: its
            ``rank`` kernel-SVD scores. Or a table with a row for each word. By default ``"rows"``
            without ``rank``, otherwise ``"svd"``.
        temperature: Divides the logits.
        trainable: Whether the tables are parameters, for training that starts at the corpus.
        dtype: Dtype of the tables; by default that of torch.
        options: Options of the transform: ``shift``, ``context_smoothing``, ``epsilon``,
            ``pmi_min``, ``smoothing``.

    Example:
        >>> texts = ["the river bank flooded", "the bank gave a loan", "a loan of money"]
        >>> attention = DistributionalAttention.from_corpus(texts, diag="zero")
        >>> words, weights = attention.attend("bank loan")
        >>> weights
        tensor([[0., 1.],
                [1., 0.]])
    """

    logit_table: Tensor
    query_table: Tensor
    key_table: Tensor
    key_bias: Tensor
    values: Tensor

    def __init__(
        self,
        cooc: Cooccurrence,
        *,
        rank: int | None = None,
        transform: Transform = "pmi",
        key_bias: KeyBias | None = "auto",
        positional: Positional | None = None,
        directional: bool = True,
        causal: bool = False,
        diag: Literal["keep", "zero"] = "keep",
        values: Literal["rows", "svd"] | Tensor | None = None,
        temperature: float = 1.0,
        trainable: bool = False,
        dtype: torch.dtype | None = None,
        **options: Unpack[TransformArguments],
    ) -> None:
        super().__init__()
        _check(rank, transform, positional, diag, temperature)
        self.vocabulary = cooc.vocabulary
        self.rank, self.transform, self.positional = rank, transform, positional
        self.directional, self.causal, self.diag = directional, causal, diag
        self.temperature, self.trainable = temperature, trainable
        self._dtype = torch.get_default_dtype() if dtype is None else dtype
        counts = smoothed_counts(cooc, directional, options)
        for side, axis in (("query_seen", 1), ("key_seen", 0)):
            seen = torch.from_numpy(np.asarray(counts.sum(axis)).ravel() > 0)
            self.register_buffer(side, seen, persistent=False)
        self.query_seen: Tensor
        self.key_seen: Tensor
        self._store_logits(cooc, key_bias, options)
        self._store("values", self._value_table(cooc, counts, values, options))
        if positional == "learned":
            away = torch.arange(-_REACH, _REACH + 1).abs().clamp_min(1)
            self.distance_bias = nn.Parameter(-away.log().to(self._dtype))

    def _store(self, name: str, table: Tensor) -> None:
        table = table.to(self._dtype, copy=True)
        if self.trainable:
            self.register_parameter(name, nn.Parameter(table))
        else:
            self.register_buffer(name, table)

    def _store_logits(
        self, cooc: Cooccurrence, key_bias: KeyBias | None, options: TransformArguments
    ) -> None:
        if self.rank is not None:
            factors = count_factors(
                cooc,
                self.rank,
                transform=self.transform,
                key_bias=key_bias,
                directional=self.directional,
                **options,
            )
            self._store("query_table", factors.query)
            self._store("key_table", factors.key)
            self._store("key_bias", factors.key_bias)
            return
        # the logarithm of zero counts is −∞, which is weight zero
        logarithm = self.transform in ("counts", "probability")
        kind: Transform = "log" if logarithm else self.transform
        table = to_dense(cooc.transform(kind, directional=self.directional, **options))
        bias = type_key_bias(cooc, self.transform, key_bias, self.directional, options)
        self._store("logit_table", torch.from_numpy(table))
        self._store("key_bias", bias)

    def _value_table(
        self,
        cooc: Cooccurrence,
        counts: "csr_array | NDArray[np.float64]",
        values: Literal["rows", "svd"] | Tensor | None,
        options: TransformArguments,
    ) -> Tensor:
        if values is None:
            values = "rows" if self.rank is None else "svd"
        if isinstance(values, Tensor):
            if values.ndim != 2 or len(values) != len(cooc):
                raise ValueError(
                    f"values have shape {tuple(values.shape)}; they must be one row for each of "
                    f"{len(cooc)} words."
                )
            return values
        if values == "rows":
            rows = to_dense(counts)
            total = rows.sum(1, keepdims=True)
            return torch.from_numpy(rows / np.where(total > 0, total, 1.0))
        if values != "svd":
            raise ValueError(f"values must be 'rows', 'svd' or a tensor, got {values!r}.")
        if self.rank is None:
            raise ValueError("values='svd' needs rank=, the number of singular directions.")
        # e = U Σ = (U Σ^½) Σ^½, and ‖U Σ^½‖ of a column is σ^½
        query = self.query_table.detach()
        return query * query.norm(dim=0)

    @classmethod
    def from_corpus(
        cls,
        texts: Iterable[str],
        tokenizer: Splitter = None,
        *,
        top_k: int | None = None,
        window: int = 5,
        smoothing: float = 0.0,
        **options: Any,
    ) -> Self:
        """Return the attention of a corpus.

        Args:
            texts: The documents.
            tokenizer: As in :meth:`Cooccurrence.from_corpus`.
            top_k: Number of words; by default all.
            window: Largest distance of counted pairs.
            smoothing: Added to the count of every pair.
            options: Options of the class.
        """
        counts = Cooccurrence.from_corpus(
            texts, tokenizer, top_k=top_k, window=window, smoothing=smoothing
        )
        return cls(counts, **options)

    @property
    def words(self) -> tuple[str, ...]:
        """The words, in the order of their numbers."""
        return self.vocabulary.words

    def encode(self, document: Document) -> Int[Tensor, "1 n"]:
        """Return the token numbers of a text or of words, as a batch of one."""
        return torch.from_numpy(self.vocabulary.encode(document))[None].to(self.query_seen.device)

    def attend(self, document: Document) -> tuple[list[str], Float[Tensor, "n n"]]:
        """Return the words of a text, ``"?"`` for unknown ones, and their weights."""
        ids = self.encode(document)
        return self.vocabulary.decode(ids[0].tolist()), self.weights(ids)[0].detach()

    def forward(
        self,
        ids: Int[Tensor, "b n"],
        context: Int[Tensor, "b m"] | None = None,
        *,
        key_mask: Bool[Tensor, "b m"] | None = None,
        return_weights: bool = False,
    ) -> Float[Tensor, "b n v"] | CountAttention:
        """Return the mean of the values of the keys, ``[b n v]``.

        Args:
            ids: Token numbers of the queries; any number outside the vocabulary is unknown.
            context: Token numbers of the keys; by default ``ids``.
            key_mask: ``True`` where a key is real.
            return_weights: Return :class:`CountAttention` with the weights.
        """
        weights = self.weights(ids, context, key_mask=key_mask)
        number, known = self._known(ids if context is None else context)
        output = weights @ torch.where(known[..., None], self.values[number], 0.0)
        return CountAttention(output, weights) if return_weights else output

    def logits(
        self, ids: Int[Tensor, "b n"], context: Int[Tensor, "b m"] | None = None
    ) -> Float[Tensor, "b n m"]:
        """Return association plus key bias, without positions and masks, before the temperature."""
        queries, keys = self._known(ids)[0], self._known(ids if context is None else context)[0]
        if self.rank is None:
            scores = self.logit_table[queries[:, :, None], keys[:, None, :]]
        else:
            scores = self.query_table[queries] @ self.key_table[keys].mT
        return scores + self.key_bias[keys][:, None, :]

    def weights(
        self,
        ids: Int[Tensor, "b n"],
        context: Int[Tensor, "b m"] | None = None,
        *,
        key_mask: Bool[Tensor, "b m"] | None = None,
    ) -> Float[Tensor, "b n m"]:
        """Return the attention weights; arguments as in :meth:`forward`."""
        memory = ids if context is None else context
        if context is not None and (self.causal or self.positional):
            raise ValueError(
                "a context has no order against the queries; build the attention with causal=False "
                "and positional=None to use one."
            )
        if key_mask is not None and key_mask.shape != memory.shape:
            raise ValueError(
                f"key_mask has shape {tuple(key_mask.shape)}; it must be that of the keys, "
                f"{tuple(memory.shape)}."
            )
        allowed = self._allowed(ids, memory, key_mask, context is None)
        scores = self.logits(ids, context)
        if self.positional:
            scores = scores + self._distance_bias(memory, key_mask)
        usable = allowed & self._usable(ids, memory) & (scores > -math.inf)
        least = torch.finfo(scores.dtype).min
        soft = (scores / self.temperature).masked_fill(~usable, least).softmax(-1)
        # bool divided by int is float32
        uniform = allowed.to(soft.dtype) / allowed.sum(-1, keepdim=True).clamp_min(1)
        soft = torch.where(usable, soft, 0.0)
        return torch.where(usable.any(-1, keepdim=True), soft, uniform)

    def _known(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return numbers inside the vocabulary, and which of them are true."""
        known = (ids >= 0) & (ids < len(self.vocabulary))
        return torch.where(known, ids, 0), known

    def _usable(self, ids: Tensor, memory: Tensor) -> Bool[Tensor, "b n m"]:
        """Return where both words have counts and the diagonal allows the pair."""
        (query, query_known), (key, key_known) = self._known(ids), self._known(memory)
        rows, columns = query_known & self.query_seen[query], key_known & self.key_seen[key]
        usable = rows[:, :, None] & columns[:, None, :]
        return usable & (query[:, :, None] != key[:, None, :]) if self.diag == "zero" else usable

    def _allowed(
        self, ids: Tensor, memory: Tensor, key_mask: Tensor | None, is_self: bool
    ) -> Bool[Tensor, "b n m"]:
        allowed = torch.ones(*ids.shape, memory.shape[1], dtype=torch.bool, device=ids.device)
        if self.causal:
            allowed = allowed.tril()
        if key_mask is not None:
            allowed = allowed & key_mask[:, None, :]
            if is_self:
                allowed = allowed & key_mask[:, :, None]
        return allowed

    def _distance_bias(self, ids: Tensor, key_mask: Tensor | None) -> Float[Tensor, "b n m"]:
        real = torch.ones_like(ids, dtype=torch.bool) if key_mask is None else key_mask
        # places count real tokens, so that padding changes no distance
        place = real.cumsum(1)
        away = place[:, None, :] - place[:, :, None]
        if self.positional == "learned":
            return self.distance_bias[away.clamp(-_REACH, _REACH) + _REACH]
        return -away.abs().clamp_min(1).to(self._dtype).log()

    def heads(self, count: int) -> tuple["DistributionalAttention", ...]:
        """Return attentions whose associations add up to this one: head ``h`` of ``count``.

        Head ``h`` has the singular directions ``h, h + count, …``, so that all have similar shares.
        Every head has the whole key bias and its own softmax; weights and outputs of heads do
        *not* add up to those of the whole.
        """
        if self.rank is None or self.rank % count:
            raise ValueError(
                f"{count} heads need rank=, a multiple of their number; rank is {self.rank}."
            )
        return tuple(self._head(h, count) for h in range(count))

    def _head(self, h: int, count: int) -> "DistributionalAttention":
        head = copy.deepcopy(self)
        head.rank = self.query_table.shape[1] // count
        for name in ("query_table", "key_table"):
            table = getattr(self, name).detach()[:, h::count].clone()
            setattr(head, name, nn.Parameter(table) if self.trainable else table)
        return head

    def as_kernel(self, *, key_bias: bool = False) -> "AssociationKernel":
        """Return the association as a kernel between words, for the tools of kernels.

        Args:
            key_bias: Whether to include the key bias, as one more feature.
        """
        if self.rank is None:
            table = self.logit_table.detach()
            if not bool(table.isfinite().all()):
                raise ValueError(
                    "the logits have infinite values, which no features give; set rank=, "
                    "smoothing= or a finite pmi_min."
                )
            query, key = torch.eye(len(table), dtype=table.dtype), table.T
        else:
            query, key = self.query_table.detach(), self.key_table.detach()
        if key_bias:
            query = torch.cat([query, torch.ones_like(query[:, :1])], dim=1)
            key = torch.cat([key, self.key_bias.detach()[:, None]], dim=1)
        return AssociationKernel(query, key)


def _check(
    rank: int | None, transform: str, positional: str | None, diag: str, temperature: float
) -> None:
    for name, value, choices in (
        ("transform", transform, get_args(Transform)),
        ("positional", positional, (None, *get_args(Positional))),
        ("diag", diag, ("keep", "zero")),
    ):
        if value not in choices:
            raise ValueError(f"{name} must be one of {choices}, got {value!r}.")
    if rank is not None and transform in ("counts", "probability"):
        raise ValueError(
            f"rank={rank} with transform={transform!r}: counts of low rank have negative entries, "
            "which cannot be divided by row sums; use transform='pmi' or 'log', which go through a "
            "softmax."
        )
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be a positive finite number, got {temperature}.")
