"""Settings of tables: what to read, and the model without what the data decide.

This module does not import torch, so that ``--help`` answers at once.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from primal_attention.models.config import StackConfig
from primal_attention.tasks.task import DataSettings

__all__ = [
    "MAX_WIDTH",
    "ROW_ATTENTIONS",
    "ROW_OPTIONS",
    "NPTOptions",
    "RowAttention",
    "TableSettings",
]

RowAttention = Literal["softmax", "primal", "hybrid", "none"]
Context = Literal["train", "transductive"]
Numbers = Literal["linear", "piecewise", "periodic"]
Kind = Literal["auto", "classes", "number"]

MAX_WIDTH = 4096
"""Largest width of row attention; its weights grow with the square of the width."""

_RESIDUAL = {"regularizer": "kkt"}
"""The regulariser that vanishes only where the KSVD problem is stationary."""
ROW_OPTIONS = {"primal-dual": _RESIDUAL}
"""Options of row attentions that are not those of the registry."""

ROW_ATTENTIONS: dict[str, dict[str, object]] = {
    "softmax": {"attention": "softmax"},
    "primal": {"attention": "primal-dual", "attention_options": _RESIDUAL},
    "hybrid": {
        "attention": "primal-sparse",
        "primal_layers": "last:1",
        "other_attention": "primal-dual",
        "other_options": _RESIDUAL,
    },
    "none": {"has_rows": False},
}
"""Fields of :class:`NPTOptions` for the row attentions that estimators name."""


@dataclass(frozen=True, kw_only=True)
class TableSettings(DataSettings):
    """A table: a known set, or a file with one row an item and a column to predict."""

    target: str = "target"
    """Column to predict: classes, or numbers."""
    kind: Kind = "auto"
    """Whether the target is classes or a number; by default its values decide (auto)."""
    categorical: tuple[str, ...] = ()
    """Columns of numbers that are names of categories; words always are."""
    max_context: int = 4096
    """Most training rows that a prediction attends to; a larger table is sampled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, got {self.kind!r}.")
        if self.max_context < 1:
            raise ValueError(f"max_context must be at least 1, got {self.max_context}.")


@dataclass(frozen=True, kw_only=True)
class NPTOptions(StackConfig):
    """A Non-Parametric Transformer without what the data decide: columns and context.

    Every layer attends between rows with ``attention``, then between the cells of a row.

    Example:
        >>> NPTOptions(attention="primal-dual").p_target
        0.5
    """

    dim: int = 32
    """Width of the embedding of a cell."""
    num_heads: int = 4
    """Heads of both attentions; must divide ``dim`` and ``row_dim``."""
    num_layers: int = 2
    """Layers, each of two blocks: between rows, and between cells."""
    attention: str = "softmax"
    """Attention between rows: an attention of the registry that takes a context."""
    cell_attention: str = "softmax"
    """Attention between the cells of a row."""
    has_rows: bool = True
    """Whether rows attend to each other at all."""
    row_dim: int | None = 64
    """Width of row attention, to which the cells of a row are mapped; None is the published
    width, that of all cells together."""
    numbers: Numbers = "piecewise"
    """Embedding of a number: linear (published), piecewise linear over quantiles, or periodic."""
    dropout: float = 0.1
    """Probability of dropping an element of each branch in training."""
    p_feature: float = 0.15
    """Probability that a known feature is hidden in training, to be predicted."""
    p_target: float = 0.5
    """Probability that a row's target is hidden in training, to be predicted; with 1 the model
    never reads a target."""
    feature_weight: float = 0.2
    """Weight of hidden features in the loss at the start, 1 in the paper; it falls to zero as a
    cosine."""
    context: Context = "train"
    """What a row to predict attends to: training rows (train), or also the rows beside it."""
    published: bool = False
    """Blocks as in the paper: a learned matrix on the residual path, logits divided by the root of
    the whole width, embeddings normalised by nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        from primal_attention.attention import attention_entry, list_attentions

        self._check_count("row_dim")
        self._check_choice("context", Context)
        self._check_choice("numbers", Numbers)
        for name in ("p_feature", "p_target", "feature_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}.")
        if self.p_target == 0:
            raise ValueError("p_target is 0: no target is ever predicted; use 0.1 to 1.")
        if self.row_dim is not None and self.row_dim % self.num_heads:
            raise ValueError(
                f"row_dim must be a multiple of num_heads, got {self.row_dim} and {self.num_heads}."
            )
        attention_entry(self.cell_attention)
        for name in self.layer_attentions:
            # published Primal-Attention samples rows by their position, which a table has not
            if not attention_entry(name).capabilities.cross or name in _UNSUITED:
                known = [n for n in list_attentions(cross=True) if n not in _UNSUITED]
                raise ValueError(
                    f"{name!r} cannot attend from rows to a set of other rows; use one of: "
                    f"{', '.join(known)}."
                )


_UNSUITED = frozenset(
    {
        *("primal", "primal-relative", "cosformer", "kernelized", "kernelized-log", "linformer"),
        *("flow", "nystromformer", "skyformer"),
    }
)
"""Attentions whose weights depend on the order of the rows, or on the other rows to predict."""
