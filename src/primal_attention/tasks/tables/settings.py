"""Settings of tables: what to read, and the model without what the data decide.

This module does not import torch, so that ``--help`` answers at once.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from primal_attention.models.config import StackConfig
from primal_attention.support.settings import at_least_one
from primal_attention.tasks.task import DataSettings

__all__ = [
    "MAX_WIDTH",
    "AlignedClassFitOptions",
    "AlignedFitOptions",
    "NPTOptions",
    "TableFitOptions",
    "TableSettings",
]

Context = Literal["train", "transductive"]
Numbers = Literal["linear", "piecewise", "periodic"]
Kind = Literal["auto", "classes", "number"]
Match = Literal["ot", "random", "centre"]
"""How points find dummies of their class; with ``"centre"`` all go to the centre."""
Dummies = Literal["random", "quasi-random"]
"""How dummies are drawn."""
Categorical = Literal["auto"] | tuple[int | str | bool, ...]
"""Columns of numbers that are categories: indices, names or a mask; ``"auto"`` adds none."""

MAX_WIDTH = 4096
"""Largest width of row attention; its weights grow with the square of the width."""

_ROW_OPTIONS = {"primal-dual": {"regularizer": "kkt"}}
"""Options of row attentions that are not those of the registry. This regulariser vanishes only
where the KSVD problem is stationary."""


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

    def complete(self) -> dict[str, Any]:
        """Return all fields by name; options of row attentions get the defaults of tables."""
        chosen = {"attention_options": self.attention, "other_options": self.other_attention}
        options = {
            field: {**_ROW_OPTIONS.get(name, {}), **getattr(self, field)}
            for field, name in chosen.items()
        }
        return {**asdict(self), **options}


_UNSUITED = frozenset(
    {
        *("primal", "primal-relative", "cosformer", "kernelized", "kernelized-log", "linformer"),
        *("flow", "nystromformer", "skyformer"),
    }
)
"""Attentions whose weights depend on the order of the rows, or on the other rows to predict."""


@dataclass(frozen=True, kw_only=True)
class TableFitOptions:
    """What is rarely changed in ``TableClassifier``, ``TableRegressor`` and ``TableImputer``.

    Example:
        >>> TableFitOptions(numbers="linear").max_context
        4096
    """

    attention_options: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Options of the attention's constructor, such as ``{"rank": 16}``."""
    primal_layers: str | tuple[int, ...] = "all"
    """Layers whose rows attend with ``attention``: all, ``"last:k"`` or indices."""
    other_attention: str = "softmax"
    """Row attention of the other layers."""
    other_options: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Options of the other attention's constructor."""
    has_rows: bool = True
    """Whether rows attend to each other at all; without, a row is predicted from its own cells."""
    dropout: float = 0.1
    """Probability of dropping an element of each branch in training."""
    numbers: Numbers = "piecewise"
    """Embedding of a number: linear (published), piecewise linear over quantiles, or periodic."""
    p_feature: float = 0.15
    """Probability that a known feature is hidden in training, to be predicted."""
    p_target: float = 0.5
    """Probability that a row's target is hidden in training; with 1 the model never reads a target.
    In an imputer: share of the rows of a step in which cells are hidden."""
    context: Context = "train"
    """What a row to predict attends to: training rows (train), or also the rows beside it, so that
    its prediction depends on them (transductive, published)."""
    semi_supervised: bool = False
    """Whether ``fit`` takes further rows without a target, as ``X_unlabeled``."""
    max_context: int = 4096
    """Most training rows that a prediction attends to; a larger table is sampled. ``primal-dual``
    uses all rows."""
    epoch_steps: int = 50
    """Training steps of an epoch."""
    optimizer: Literal["adamw", "lamb-lookahead"] = "adamw"
    """Optimiser; the second is the published one, with its schedule."""
    validation: float = 0.15
    """Share of the rows that choose the epoch and calibrate; they join the context after training.
    None of a table with fewer than 20 rows. An imputer holds out none."""
    categorical_features: Categorical = "auto"
    """Columns of numbers that are categories; words and booleans always are."""
    n_jobs: int | None = None
    """Threads of torch; by default unchanged."""

    def __post_init__(self) -> None:
        _check_share("validation", self.validation)
        threads = [] if self.n_jobs is None else ["n_jobs"]
        at_least_one(self, "max_context", "epoch_steps", *threads)


@dataclass(frozen=True, kw_only=True)
class AlignedFitOptions:
    """What is rarely changed in ``OTAlignedRegressor``.

    Example:
        >>> AlignedFitOptions(match="random").ot_batch
        512
    """

    match: Match = "ot"
    """How a row finds its target among the dummies; random and centre are for comparison."""
    ot_batch: int = 512
    """Largest number of points that are matched at once; larger classes are matched in random
    batches."""
    dummies: Dummies = "random"
    """How dummies are drawn; the second does not depend on ``random_state``."""
    patience: int | None = 15
    """Epochs without a better one after which training stops; None never stops."""
    validation: float = 0.2
    """Share of the instances that choose the epoch and the temperature."""
    categorical_features: Categorical = "auto"
    """Columns of numbers that are categories; words and booleans always are."""
    max_categories: int = 64
    """Most codes of a column; with more categories the last code is that of all rare ones."""

    def __post_init__(self) -> None:
        _check_share("validation", self.validation)
        at_least_one(self, "ot_batch")


@dataclass(frozen=True, kw_only=True)
class AlignedClassFitOptions(AlignedFitOptions):
    """What is rarely changed in ``OTAlignedClassifier``."""

    temperature: float | Literal["auto"] = "auto"
    """Scale of distances in probabilities; by default the one that suits the validation part."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature != "auto" and not self.temperature > 0:
            raise ValueError(f"temperature must be positive or 'auto', got {self.temperature!r}.")


def _check_share(name: str, share: float) -> None:
    if not 0 <= share < 1:
        raise ValueError(f"{name} must be a share from 0 to below 1, got {share}.")
