"""Layers that start at the counts of a corpus."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from primal_attention.analysis.counts.cooccurrence import Cooccurrence
from primal_attention.analysis.counts.factors import KeyBias, count_factors
from primal_attention.analysis.counts.transforms import Transform
from primal_attention.attention import DistributionalTokenAttention
from primal_attention.support.options import read_options

__all__ = ["CorpusLayer", "CountLogits", "attention_from_counts", "split_directions"]


@dataclass(frozen=True, kw_only=True)
class CountLogits:
    """How the counts of a pair of words become the logit of a query and a key."""

    transform: Transform = "pmi"
    """The association."""
    key_bias: KeyBias | None = "auto"
    """As in :class:`DistributionalAttention`; every head has the whole bias."""
    directional: bool = True
    """Whether to use directional counts."""
    smoothing: float | None = None
    """Added to every count; by default that of the counts."""
    shift: float = 1.0
    """``log shift`` is subtracted from PMI and PPMI."""
    context_smoothing: float = 1.0
    """Exponent of the context distribution."""
    epsilon: float = 0.0
    """Added inside the logarithm of ``"log"``."""
    pmi_min: float = -10.0
    """PMI of pairs without counts, and the least of all others."""


class CorpusLayer(NamedTuple):
    """An attention layer set from counts, and how well it fits them."""

    layer: DistributionalTokenAttention
    explained: float
    """Share of the variance of wanted queries, keys and biases that the projections reproduce."""


def split_directions(
    table: Float[Tensor, "words s"], num_heads: int
) -> Float[Tensor, "words h each"]:
    """Return the columns of a table in heads: head ``h`` has columns ``h, h + heads, …``.

    Example:
        >>> split_directions(torch.arange(4.0)[None], 2)
        tensor([[[0., 2.],
                 [1., 3.]]])
    """
    return table.unflatten(1, (-1, num_heads)).mT


def attention_from_counts(
    cooc: Cooccurrence,
    embedding: Float[Tensor, "words c"],
    num_heads: int = 8,
    *,
    rank: int | None = None,
    weighting: Literal["unigram"] | None = "unigram",
    dropout: float = 0.0,
    options: CountLogits | Mapping[str, object] | None = None,
) -> CorpusLayer:
    """Return a layer of the name ``distributional`` whose queries and keys come from counts.

    With one head, one-hot embeddings and full rank it *is* count attention. With another embedding
    its projections are the least-squares fit; ``explained`` says how good that is. Values and
    output start at random.

    Args:
        cooc: The counts.
        embedding: Token vectors of the words, in the order of ``cooc.words``.
        num_heads: Number of heads; singular directions are dealt to them in turn.
        rank: Directions of one head; by default and at most the head width minus one.
        weighting: ``"unigram"``: frequent words count more in the fit.
        dropout: Probability of dropping an element of the output in training.
        options: :class:`CountLogits`, or some of them by name, such as ``transform``.

    Example:
        >>> texts = ["the river bank flooded", "the bank gave a loan"]
        >>> counts = Cooccurrence.from_corpus(texts, smoothing=0.5)
        >>> layer, explained = attention_from_counts(counts, torch.randn(7, 16), 2)
        >>> layer(torch.randn(1, 5, 16)).shape, 0 < explained <= 1
        (torch.Size([1, 5, 16]), True)
    """
    words, dim = embedding.shape
    layer = DistributionalTokenAttention(
        dim, num_heads, dropout=dropout, device=embedding.device, dtype=embedding.dtype
    )
    if words != len(cooc):
        raise ValueError(
            f"embedding has {words} rows for {len(cooc)} words; give one row for each word, in the "
            "order of cooc.words."
        )
    each = min(layer.head_dim - 1, words // num_heads)
    rank = each if rank is None else rank
    if not 1 <= rank <= each:
        raise ValueError(
            f"rank is {rank}; with {num_heads} heads of width {layer.head_dim} and {words} words "
            f"it must be from 1 to {each}."
        )
    logits = read_options(CountLogits, options)
    factors = count_factors(
        cooc,
        rank * num_heads,
        transform=logits.transform,
        key_bias=logits.key_bias,
        directional=logits.directional,
        smoothing=cooc.smoothing if logits.smoothing is None else logits.smoothing,
        shift=logits.shift,
        context_smoothing=logits.context_smoothing,
        epsilon=logits.epsilon,
        pmi_min=logits.pmi_min,
    )
    frequency = torch.from_numpy(cooc.unigram) if weighting == "unigram" else None
    explained = layer.fit_tables_(
        embedding,
        split_directions(factors.query, num_heads),
        split_directions(factors.key, num_heads),
        factors.key_bias,
        frequency=frequency,
    )
    return CorpusLayer(layer, float(explained))
