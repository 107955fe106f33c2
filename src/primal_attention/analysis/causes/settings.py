"""What is rarely set of a causal graph and of the search for explanations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from primal_attention.analysis.causes.covariance import Method
from primal_attention.analysis.causes.discovery import Algorithm
from primal_attention.analysis.causes.nodes import ColumnChoice, NodeChoice

__all__ = ["CausalGraphOptions", "ExplainArguments", "ExplainOptions", "Samples"]

Samples = int | Literal["hidden"] | None
"""Effective number of samples; ``"hidden"`` is the width of the model."""


@dataclass(frozen=True, kw_only=True)
class CausalGraphOptions:
    """How a causal graph is read from attention, beyond its threshold."""

    heads: int | Sequence[int] | None = None
    """Which heads; by default all."""
    method: Method | None = None
    """Estimator of the covariance; see :mod:`~primal_attention.analysis.causes.covariance`. By
    default ``"attention"``, and ``"scores"`` for primal layers."""
    algorithm: Algorithm | Literal["auto"] = "auto"
    """``"icd"``, ``"ordered-icd"``, ``"fci"``, ``"pc"``, or ``"auto"``: ordered ICD for causal
    attention, which knows the order of the tokens, and ICD otherwise."""
    nodes: NodeChoice = "auto"
    """``"auto"`` (the 32 words with most attention from the target), ``"all"``, a number, or
    positions and words. All other tokens act as hidden causes."""
    group: Literal["word", "token"] = "word"
    """``"word"`` joins the pieces of a word to one node, ``"token"`` does not."""
    drop_columns: ColumnChoice = "auto"
    """Tokens to condition on: ``"first"``, ``"special"``, positions, or ``None``. ``"auto"`` is
    ``"first"`` for causal layers, whose first token collects attention, and ``None`` for other
    layers and for matrices."""
    center: bool = False
    """Whether to subtract the mean of each row of attention."""
    ridge: float | None = None
    """Independent noise per token, as a share of its variance. By default 0; 1e-3 for scores."""
    max_cond: int | None = None
    """Largest conditioning set; by default 3 up to 20 nodes and 2 above. For scores never more
    than a quarter of the rank."""
    max_tests: int | None = None
    """Budget of tests for each head."""
    stability: int = 0
    """Number of resamples of feature columns that show how stable edges are; needs
    ``method="values"`` or ``"hidden"``."""
    sequence: int = 0
    """Which sequence of the batch."""


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(CausalGraphOptions):
    """The graphs of an explanation, and how many sets run at once."""

    batch_size: int = 64
    """Sets of tokens to run the model without at once."""


class ExplainArguments(TypedDict, total=False):
    """Arguments of :func:`~primal_attention.analysis.causes.explain_subject`."""

    alpha: float
    m: Samples
    tau: float | None
    search: Literal["subset", "radius"]
    radius: int | None
    max_size: int
    max_evals: int
    compare: bool
    options: ExplainOptions | Mapping[str, object] | None
