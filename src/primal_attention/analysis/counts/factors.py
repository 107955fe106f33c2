"""Queries, keys and key bias of word types from counts, and the kernel between words they give."""

from typing import TYPE_CHECKING, Literal, NamedTuple, Unpack, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from primal_attention.analysis.counts.cooccurrence import Cooccurrence
from primal_attention.analysis.counts.embeddings import association_svd
from primal_attention.analysis.counts.transforms import (
    Transform,
    TransformArguments,
    context_probability,
)
from primal_attention.kernels.base import FeatureMap

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from scipy.sparse import csr_array

__all__ = ["AssociationKernel", "CountFactors", "KeyBias", "count_factors"]

KeyBias = Literal["auto", "unigram"]
"""``"unigram"``: log probability of the key; ``"auto"``: the same for PMI and PPMI only."""


class AssociationKernel(FeatureMap):
    """The kernel ``κ(i, j) = φ_q(i)·φ_k(j)`` between words, given by two tables of features.

    Rows are word numbers, ``[n]``, or selectors, ``[n words]``: one-hot rows or mixtures of words.

    Args:
        query: Features of words as queries.
        key: Features of words as keys.

    Example:
        >>> kernel = AssociationKernel(torch.eye(2), torch.tensor([[0.0, 3.0], [1.0, 0.0]]))
        >>> kernel.gram(torch.tensor([0, 1]), torch.tensor([1, 1]))
        tensor([[1., 1.],
                [0., 0.]])
    """

    relation = "exact"
    is_positive = False

    def __init__(self, query: Float[Tensor, "words p"], key: Float[Tensor, "words p"]) -> None:
        super().__init__()
        self.register_buffer("query", query)
        self.register_buffer("key", key)
        self.query: Tensor
        self.key: Tensor
        self.num_features = query.shape[1]

    def query_features(self, x: Tensor) -> Tensor:
        """Return ``φ_q`` of word numbers or of mixtures of words."""
        return x @ self.query if x.is_floating_point() else self.query[x]

    def key_features(self, x: Tensor) -> Tensor:
        """Return ``φ_k`` of word numbers or of mixtures of words."""
        return x @ self.key if x.is_floating_point() else self.key[x]

    def gram(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the matrix ``κ(x_i, y_j)``."""
        return self.approximate(x, y)


class CountFactors(NamedTuple):
    """Queries and keys of word types: ``query @ key.T`` is the rank-``s`` association."""

    query: Float[Tensor, "words s"]
    """``U Σ^½``."""
    key: Float[Tensor, "words s"]
    """``V Σ^½``."""
    key_bias: Float[Tensor, " words"]
    """Log probability of every word as a context; zero without a key bias."""
    singular_values: Float[Tensor, " s"]


def count_factors(
    cooc: Cooccurrence,
    rank: int,
    *,
    transform: Transform = "pmi",
    key_bias: KeyBias | None = "auto",
    directional: bool = True,
    **options: Unpack[TransformArguments],
) -> CountFactors:
    """Return the factors of an association matrix, in float64.

    Args:
        cooc: The counts.
        rank: Number of singular directions.
        transform: The association; all its values must be finite.
        key_bias: As in :class:`DistributionalAttention`.
        directional: Whether to use directional counts.
        options: Options of the transform, such as ``pmi_min`` or ``context_smoothing``.

    Example:
        >>> counts = Cooccurrence.from_corpus(["river bank flooded", "bank loan"], smoothing=0.5)
        >>> count_factors(counts, 2).query.shape
        torch.Size([4, 2])
    """
    matrix = cooc.transform(transform, directional=directional, **options)
    if isinstance(matrix, np.ndarray) and not np.isfinite(matrix).all():
        raise ValueError(
            f"transform {transform!r} has infinite values, which have no low rank; set smoothing, "
            "epsilon or a finite pmi_min."
        )
    left, sigma, right = association_svd(matrix, rank)
    root = sigma.sqrt()
    bias = type_key_bias(cooc, transform, key_bias, directional, options)
    return CountFactors(left * root, right * root, bias, sigma)


def smoothed_counts(
    cooc: Cooccurrence, directional: bool, options: TransformArguments
) -> "csr_array | NDArray[np.float64]":
    """Return the counts with smoothing."""
    smoothing = options.get("smoothing", cooc.smoothing)
    return cooc.transform("counts", directional=directional, smoothing=smoothing)


def type_key_bias(
    cooc: Cooccurrence,
    transform: Transform,
    key_bias: KeyBias | None,
    directional: bool,
    options: TransformArguments,
) -> Float[Tensor, " words"]:
    """Return the key bias of every word, zero if there is none."""
    if key_bias not in (None, *get_args(KeyBias)):
        raise ValueError(f"key_bias must be 'auto', 'unigram' or None, got {key_bias!r}.")
    is_pmi = transform in ("pmi", "ppmi")
    if key_bias == "unigram" and not is_pmi:
        raise ValueError(
            f"key_bias='unigram' counts the frequency of a key twice with transform={transform!r}, "
            "which contains it; use key_bias=None, or transform='pmi'."
        )
    if key_bias is None or not is_pmi:
        return torch.zeros(len(cooc), dtype=torch.float64)
    columns = np.asarray(smoothed_counts(cooc, directional, options).sum(0)).ravel()
    probability = context_probability(columns, options.get("context_smoothing", 1.0))
    # words without counts are masked as keys, so their bias may be any number
    return torch.from_numpy(np.log(np.where(probability > 0, probability, 1.0)))
