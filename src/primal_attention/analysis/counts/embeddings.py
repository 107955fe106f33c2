"""Word vectors from counts: PMI-SVD, kernel-SVD scores and GloVe.

An association ``S♯`` of counts (PPMI, log counts …) is an asymmetric kernel between word types. Its
kernel SVD ``S♯ H_r = H_e Σ``, ``S♯ᵀ H_e = H_r Σ`` gives

    word scores     e(i) = Σ_j h_r(j) S♯_ij = (H_e Σ)_i
    context scores  r(j) = Σ_i h_e(i) S♯_ij = (H_r Σ)_j

The classical PMI-SVD word vectors are ``H_e Σ^p``: the word scores at ``p = 1``, the balanced
feature map at ``p = ½``. GloVe fits ``log C_ij ≈ w_i·w̃_j + b_i + b̃_j`` to the counted pairs.
"""

from typing import TYPE_CHECKING, Literal, Unpack, get_args

import numpy as np
import torch
from torch import Tensor

from primal_attention.analysis.counts.cooccurrence import Cooccurrence
from primal_attention.analysis.counts.transforms import Transform, TransformArguments, to_dense
from primal_attention.analysis.counts.word_vectors import WordVectors
from primal_attention.ksvd.solvers import KernelTriplets, dense_svd, matrix_free_svd

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from scipy.sparse import csr_array

__all__ = ["association_svd", "glove_fit", "ksvd_embeddings", "pmi_svd"]

# a full SVD of more rows takes minutes
_DENSE_ROWS = 2000


def association_svd(
    matrix: "csr_array | NDArray[np.float64]",
    rank: int,
    *,
    tol: float = 1e-6,
    max_passes: int = 50,
    seed: int = 0,
) -> KernelTriplets:
    """Return the leading singular triplets of a square association matrix, in float64.

    Up to 2,000 rows the SVD is complete; above, it is matrix-free (:func:`matrix_free_svd`).

    Args:
        matrix: Dense or sparse.
        rank: Number of triplets.
        tol: Relative residual at which the matrix-free solver stops.
        max_passes: Largest number of passes of that solver.
        seed: Seed of its random start.

    Example:
        >>> association_svd(np.diag([1.0, 3.0, 2.0]), 2).singular_values
        tensor([3., 2.], dtype=torch.float64)
    """
    n = matrix.shape[0]
    if not 1 <= rank <= n:
        raise ValueError(f"rank is {rank}; it must be from 1 to the number of words, {n}.")

    def rows(x: Tensor, y: Tensor) -> Tensor:
        return torch.from_numpy(to_dense(matrix[x[:, 0].long().numpy()]))

    number = torch.arange(n, dtype=torch.float64)[:, None]
    if n <= _DENSE_ROWS:
        return dense_svd(rows(number, number), rank)
    generator = torch.Generator().manual_seed(seed)
    return matrix_free_svd(
        rows, number, number, rank, tol=tol, max_passes=max_passes, generator=generator
    )


def pmi_svd(
    cooc: Cooccurrence,
    k: int = 100,
    *,
    shift: float = 1.0,
    context_smoothing: float = 0.75,
    symmetric_power: float = 0.5,
    directional: bool = False,
    seed: int = 0,
) -> WordVectors:
    """Return word vectors ``U Σ^p`` and context vectors ``V Σ^(1−p)`` of the PPMI matrix.

    Args:
        cooc: The counts.
        k: Number of dimensions.
        shift: Number of negative samples of the skip-gram model with the same matrix.
        context_smoothing: Exponent of the context distribution.
        symmetric_power: ``p``: ½ is usual and good for similarity, 1 gives the kernel-SVD scores.
        directional: Use what follows a word only, instead of both sides.
        seed: Seed of the solver, above 2,000 words.

    Example:
        >>> texts = ["big dog runs", "big cat runs", "small fish swims"]
        >>> counts = Cooccurrence.from_corpus(texts, window=1)
        >>> pmi_svd(counts, 3).neighbors("dog", 1)[0].word
        'cat'
    """
    matrix = cooc.transform(
        "ppmi", directional=directional, shift=shift, context_smoothing=context_smoothing
    )
    left, sigma, right = (t.numpy() for t in association_svd(matrix, k, seed=seed))
    vectors, contexts = left * sigma**symmetric_power, right * sigma ** (1 - symmetric_power)
    return WordVectors(cooc.words, vectors, contexts, sigma)


def ksvd_embeddings(
    cooc: Cooccurrence,
    k: int = 100,
    *,
    transform: Transform = "ppmi",
    directional: bool | None = None,
    seed: int = 0,
    **options: Unpack[TransformArguments],
) -> WordVectors:
    """Return the kernel-SVD scores of words and of contexts, ``H_e Σ`` and ``H_r Σ``.

    :meth:`WordVectors.joined` concatenates them, as a primal layer does for every token.

    Args:
        cooc: The counts.
        k: Number of directions.
        transform: The association that is the kernel.
        directional: Whether the kernel is directional; by default as ``cooc``.
        seed: Seed of the solver, above 2,000 words.
        options: Options of the transform, such as ``shift``.

    Example:
        >>> counts = Cooccurrence.from_counts([[0, 4], [1, 0]])
        >>> ksvd_embeddings(counts, 2, transform="counts").singular_values
        array([4., 1.])
    """
    matrix = cooc.transform(transform, directional=directional, **options)
    left, sigma, right = (t.numpy() for t in association_svd(matrix, k, seed=seed))
    return WordVectors(cooc.words, left * sigma, right * sigma, sigma)


Solver = Literal["adagrad", "lbfgs"]


def glove_fit(
    cooc: Cooccurrence,
    k: int = 50,
    *,
    x_max: float = 100.0,
    alpha: float = 0.75,
    epochs: int = 25,
    lr: float = 0.2,
    batch_size: int = 8192,
    directional: bool = False,
    solver: Solver = "adagrad",
    seed: int = 0,
) -> WordVectors:
    """Return GloVe vectors and biases: ``Σ f(C_ij) (w_i·w̃_j + b_i + b̃_j − log C_ij)²`` is small.

    ``f(x) = min(1, (x / x_max)^alpha)``. Pairs without counts do not enter.

    Args:
        cooc: The counts.
        k: Number of dimensions.
        x_max: Count from which all pairs have the same weight.
        alpha: Exponent of the weight.
        epochs: Passes over all pairs; for ``"lbfgs"`` the number of outer iterations.
        lr: Step size of Adagrad.
        batch_size: Pairs of one step of Adagrad.
        directional: Fit what follows a word only, instead of both sides.
        solver: ``"adagrad"`` for real corpora, ``"lbfgs"`` for a precise fit of a small matrix.
        seed: Seed of the start and of the order.

    Example:
        >>> counts = Cooccurrence.from_corpus(["river bank flooded", "bank loan money"])
        >>> glove_fit(counts, 2, epochs=2).vectors.shape
        (5, 2)
    """
    if solver not in get_args(Solver):
        raise ValueError(f"solver must be one of {get_args(Solver)}, got {solver!r}.")
    if min(k, epochs, batch_size) < 1 or min(x_max, lr) <= 0:
        raise ValueError(
            f"k={k}, epochs={epochs}, batch_size={batch_size}, x_max={x_max} and lr={lr} must all "
            "be positive."
        )
    pairs = (cooc.forward if directional else cooc.symmetric).tocoo()
    if pairs.nnz == 0:
        raise ValueError("there are no counts to fit; call fit with documents first.")
    count = torch.from_numpy(pairs.data.astype(np.float64))
    at = torch.from_numpy(np.stack(pairs.coords).astype(np.int64))
    weight, target = (count / x_max).pow(alpha).clamp_max(1.0), count.log()
    generator = torch.Generator().manual_seed(seed)
    # word, context: k coordinates and a bias, in the range that the GloVe tool starts from
    start = torch.rand(2, len(cooc), k + 1, dtype=torch.float64, generator=generator)
    tables = (start - 0.5) / k
    fit = _adagrad if solver == "adagrad" else _lbfgs
    fit(tables, at, weight, target, epochs, lr, batch_size, generator)
    (words, word_bias), (contexts, context_bias) = (
        (table[:, :k].numpy(), table[:, k].numpy()) for table in tables
    )
    return WordVectors(cooc.words, words, contexts, word_bias=word_bias, context_bias=context_bias)


def _glove_error(word: Tensor, context: Tensor, target: Tensor) -> Tensor:
    """Return ``w·w̃ + b + b̃ − log C`` for rows ``[w, b]`` and ``[w̃, b̃]``."""
    products = (word[:, :-1] * context[:, :-1]).sum(1)
    return products + word[:, -1] + context[:, -1] - target


def _adagrad(
    tables: Tensor,
    at: Tensor,
    weight: Tensor,
    target: Tensor,
    epochs: int,
    lr: float,
    batch_size: int,
    generator: torch.Generator,
) -> None:
    """Change the tables in place; only the rows of a batch are touched by its step."""
    squares = torch.ones_like(tables)
    for _ in range(epochs):
        order = torch.randperm(len(target), generator=generator)
        for batch in order.split(batch_size):
            rows = [tables[side, at[side, batch]] for side in (0, 1)]
            error = weight[batch] * _glove_error(rows[0], rows[1], target[batch])
            for side, other in ((0, rows[1]), (1, rows[0])):
                slope = other.clone()
                slope[:, -1] = 1.0  # of the bias
                step = torch.zeros_like(tables[side])
                step.index_add_(0, at[side, batch], slope * error[:, None])
                squares[side] += step.square()
                tables[side] -= lr * step / squares[side].sqrt()


def _lbfgs(
    tables: Tensor, at: Tensor, weight: Tensor, target: Tensor, epochs: int, *_: object
) -> None:
    """Change the tables in place, with the exact gradient of all pairs."""
    free = tables.clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS(
        [free],
        max_iter=200,
        history_size=50,
        tolerance_grad=1e-14,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        error = _glove_error(free[0, at[0]], free[1, at[1]], target)
        loss = (weight * error.square()).sum()
        loss.backward()
        return loss

    for _step in range(epochs):
        optimizer.step(closure)
    tables.copy_(free.detach())
