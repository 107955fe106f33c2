"""Correlation between the tokens of one sequence, as a head of attention encodes it.

A head returns ``Z = A V``. Read as the linear model ``X = G X + Λ U``, the values ``V`` are the
independent sources of the tokens and ``A`` is the mixing matrix ``(I − G)⁻¹ Λ``. With ``C_V = I``
the covariance of tokens is ``A Aᵀ``, and the positive scale of a row of ``A`` cancels in the
correlation. Every estimator here returns a *factor* ``X`` with the covariance ``X Xᵀ``:

===============  ===========================  =========================  ====================
name             covariance                   factor                     effective samples
===============  ===========================  =========================  ====================
``attention``    ``A Aᵀ``                     ``A``                      head width
``values``       ``A Σ_V Aᵀ``                 ``A V``, centred           head width
``hidden``       Gram of the block's output   states, centred            model width
``rollout``      ``Ã Ãᵀ``, Ã = Π ½(A_l + I)   ``Ã``                      model width
``scores``       ``E Eᵀ`` of primal scores    ``E``                      rank
``key-scores``   ``R Rᵀ`` of primal scores    ``R``                      rank
===============  ===========================  =========================  ====================

*Centred* means that the mean of each row over its features is removed.

To marginalise a token is to drop its row of the factor and to keep its column: its source still
drives the other tokens. To drop a *column* means to condition on that token: its value is a fixed
context. This is a modelling choice for tokens that collect most of the attention, so-called sinks.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from primal_attention.analysis.causes.primal import Matrix, promote
from primal_attention.hosts import CapturedLayer
from primal_attention.ksvd import unit_rows

__all__ = [
    "Correlation",
    "Method",
    "attention_factor",
    "center_features",
    "correlate",
    "mix_rows",
    "rollout_factor",
    "sem_effects",
    "values_factor",
]

Method = Literal["attention", "values", "hidden", "rollout", "scores", "key-scores"]
"""How the covariance of tokens is estimated; see the module docstring."""

_SAME = 1 - 1e-10
"""Correlations above this in size count as duplicates."""
_SINGULAR = 1e12
"""Condition numbers above this have no correct digits left in partial correlations."""


class Correlation(NamedTuple):
    """Correlation between tokens, and how well conditioned it is."""

    matrix: Float[Tensor, "k k"]
    """The correlations, symmetric, in float64, with a unit diagonal."""
    median: float
    """Median correlation of different tokens; near 1 if all rows are parallel, as with a sink."""
    condition: float
    """Condition number."""
    warnings: tuple[str, ...]
    """What makes results doubtful: duplicates, empty rows, a singular matrix."""


def correlate(
    factor: Matrix, *, ridge: float = 0.0, labels: Sequence[str] | None = None
) -> Correlation:
    """Return the correlations ``ρ`` of a covariance ``X Xᵀ``, finite for every input.

    Args:
        factor: ``X``, one row for each token, for example rows of an attention matrix.
        ridge: Variance of independent noise per token, as a share of the token's variance.
        labels: Names of the tokens for warnings; by default their numbers.

    Example:
        >>> correlate(torch.tensor([[1.0, 0.0], [1.0, 1.0]])).matrix.round(decimals=3)
        tensor([[1.0000, 0.7070],
                [0.7070, 1.0000]], dtype=torch.float64)
    """
    x = promote(factor)
    if x.ndim != 2 or len(x) < 1:
        raise ValueError(
            f"factor must be a matrix with one row for each token, got the shape "
            f"{tuple(x.shape)}; give one head at a time."
        )
    if not x.isfinite().all():
        raise ValueError("factor has infinite values or NaN; check the model and its inputs.")
    if not ridge >= 0:
        raise ValueError(f"ridge must be at least 0, got {ridge}.")
    names = [str(i) for i in range(len(x))] if labels is None else list(labels)
    unit = unit_rows(x)
    rho = unit @ unit.T
    rho = ((rho + rho.T) / 2).clamp(-1, 1).fill_diagonal_(1.0)
    warnings = _describe(unit, rho, names)
    rho = (rho / (1 + ridge)).fill_diagonal_(1.0)
    values = torch.linalg.eigvalsh(rho)
    lowest = max(float(values[0]), 0.0)
    condition = float(values[-1]) / lowest if lowest > 0 else float("inf")
    if condition > _SINGULAR:
        warnings.append(
            f"The correlation matrix has the condition number {condition:.0e}: partial "
            "correlations given many tokens are unreliable; use ridge=1e-3."
        )
    others = rho[~torch.eye(len(rho), dtype=torch.bool)]
    median = float(others.median()) if len(others) else 0.0
    return Correlation(rho, median, condition, tuple(warnings))


def _describe(unit: Tensor, rho: Tensor, names: list[str]) -> list[str]:
    """Return warnings of duplicates and of rows without any mass."""
    found = []
    same = (rho.abs() > _SAME).triu(1).nonzero().tolist()
    if same:
        pairs = ", ".join(f"{names[i]} and {names[j]}" for i, j in same[:5])
        more = f", and {len(same) - 5} pairs more" if len(same) > 5 else ""
        found.append(f"Rows of {pairs}{more} are the same: no test can tell these tokens apart.")
    empty = [names[i] for i in (~unit.any(1)).nonzero()[:, 0].tolist()]
    if empty:
        found.append(f"Rows of {', '.join(empty)} are zero: these tokens count as independent.")
    return found


def mix_rows(
    attention: Matrix | CapturedLayer, rows: Float[Tensor, "k n"], sequence: int = 0
) -> Float[Tensor, "h k m"]:
    """Return weighted sums of the rows of attention, ``P A`` for each head, in float64.

    A captured layer is read by blocks of rows, so memory is ``O(h (k + 512) m)``.

    Args:
        attention: A matrix, one matrix for each head, or a captured layer.
        rows: The weights ``P``: one row for each sum.
        sequence: Which sequence of a captured layer.
    """
    if not isinstance(attention, CapturedLayer):
        return rows @ promote(attention)
    parts = (rows[:, block] @ found for block, found in attention.row_blocks(sequence))
    total = next(parts)
    for part in parts:
        total += part
    return total


def attention_factor(
    rows: Float[Tensor, "*h k m"],
    *,
    drop: Sequence[int] = (),
    center: bool = False,
    groups: Sequence[Sequence[int]] | None = None,
) -> Float[Tensor, "*h k w"]:
    """Return the factor of ``A Aᵀ`` from the rows of the wanted tokens.

    Args:
        rows: Rows of ``A``; all columns, also those of tokens that are not wanted.
        drop: Columns to drop, which conditions on their tokens.
        center: Whether to subtract the mean of each row. Rows of attention sum to 1, so otherwise
            their constant part raises all correlations.
        groups: Columns of each word; they are summed. By default every token is a word.

    Example:
        >>> attention_factor(torch.tensor([[0.5, 0.3, 0.2]]), drop=[0], groups=[[0], [1, 2]])
        tensor([[0.5000]], dtype=torch.float64)
    """
    rows = promote(rows)
    dropped = set(drop)
    if groups is None:
        found = rows[..., _kept(rows, dropped)]
    else:
        words = [[i for i in group if i not in dropped] for group in groups]
        sums = [rows[..., word].sum(-1) for word in words if word]
        found = torch.stack(sums, -1) if sums else rows[..., :0]
    return found - found.mean(-1, keepdim=True) if center else found


def _kept(rows: Tensor, dropped: set[int]) -> list[int]:
    return [i for i in range(rows.shape[-1]) if i not in dropped]


def values_factor(
    rows: Float[Tensor, "h k m"],
    values: Float[Tensor, "h m v"],
    *,
    drop: Sequence[int] = (),
    center: bool = False,
) -> Float[Tensor, "h k v"]:
    """Return the factor of ``A Σ_V Aᵀ`` with ``Σ_V = V_c V_cᵀ / (v − 1)``: the head's output.

    ``V_c`` has the mean of each token over its ``v`` features removed.

    Args:
        rows: Rows of ``A`` of the wanted tokens.
        values: Values of all tokens.
        drop: Columns to drop, which conditions on their tokens.
        center: Whether to subtract the mean of each row of ``A``.
    """
    kept = _kept(rows, set(drop))
    mixed = attention_factor(rows, drop=drop, center=center) @ promote(values)[..., kept, :]
    return center_features(mixed) / max(mixed.shape[-1] - 1, 1) ** 0.5


def center_features(states: Matrix) -> Float[Tensor, "*h n c"]:
    """Return states in float64 without the mean of each token over its features."""
    found = promote(states)
    return found - found.mean(-1, keepdim=True)


def rollout_factor(
    layers: Sequence[Matrix | CapturedLayer],
    rows: Float[Tensor, "k n"],
    sequence: int = 0,
) -> Float[Tensor, "k n"]:
    """Return rows of ``Ã = Π ½(A_l + I)``, with ``A_l`` the mean over the heads of layer ``l``.

    Args:
        layers: Attention of each layer, the first layer first.
        rows: Which rows, as weights of tokens: rows of the identity for single tokens.
        sequence: Which sequence of captured layers.

    Example:
        >>> a = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
        >>> rollout_factor([a[None]], torch.eye(2, dtype=torch.float64))
        tensor([[1.0000, 0.0000],
                [0.2500, 0.7500]], dtype=torch.float64)
    """
    if not layers:
        raise ValueError("layers is empty; rollout needs the attention of at least one layer.")
    found = promote(rows)
    for layer in reversed(layers):
        mixed = mix_rows(layer, found, sequence)
        found = (mixed.mean(0) + found) / 2 if mixed.ndim == 3 else (mixed + found) / 2
    return found


def sem_effects(attention: Matrix) -> Float[Tensor, "*h n n"]:
    """Return the direct effects ``G = I − diag(A) A⁻¹`` that causal attention determines.

    ``G[i, j]`` is the direct effect of token ``j`` on token ``i``. It is strictly lower triangular.
    Effects may be negative although attention is not. Rows of ``A`` may have any positive scale:
    with another scale ``R`` the effects are ``R G R⁻¹``. Attention without a causal order does not
    determine effects; use :func:`causal_graph` for it.

    Args:
        attention: Lower triangular weights with a positive diagonal, one matrix or one for each
            head.

    Example:
        >>> sem_effects(torch.tensor([[1.0, 0.0], [0.4, 0.6]]))
        tensor([[0.0000, 0.0000],
                [0.4000, 0.0000]], dtype=torch.float64)
    """
    a = promote(attention)
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise ValueError(f"attention must be square, got the shape {tuple(a.shape)}.")
    diagonal = a.diagonal(dim1=-2, dim2=-1)
    if a.triu(1).any() or not (diagonal > 0).all():
        raise ValueError(
            "attention must be lower triangular with a positive diagonal: only a causal order "
            "determines direct effects. Use causal_graph for attention in both directions."
        )
    identity = torch.eye(a.shape[-1], dtype=a.dtype).expand_as(a)
    inverse = torch.linalg.solve_triangular(a, identity, upper=False)
    return (identity - diagonal[..., None] * inverse).tril(-1)
