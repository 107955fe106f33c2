"""Non-Parametric Transformers (Kossen et al., NeurIPS 2021, arXiv 2106.02584).

    cells [n d e]  →  (attention between rows, attention between cells) × layers  →  predictions

A row to predict attends to training rows, whose targets it reads. These rows are buffers of the
model: they are saved with it. With ``context="train"`` rows to predict do not see each other, in
training as in prediction: rows with a hidden target attend to the rows with a visible one. A row's
own cells pass on the residual path. With ``context="transductive"``, the published form, all rows
attend to all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from primal_attention.attention import PrimalAttention, State
from primal_attention.models import PretrainedModel
from primal_attention.support.randomness import isolated
from primal_attention.tasks.tables.blocks import Memory, RowBlock, TableBlock
from primal_attention.tasks.tables.cells import CellEmbedding, CellHeads
from primal_attention.tasks.tables.masking import (
    feature_share,
    hidden_feature_loss,
    hide_cells,
    target_losses,
)
from primal_attention.tasks.tables.settings import MAX_WIDTH, NPTOptions

__all__ = ["NPTConfig", "NPTModel", "NPTOutput"]

_CHUNK = 8192
"""Context rows that are computed at once."""
_LOG_DEVIATION = (-4.0, 3.0)
"""Smallest and largest logarithm of a predicted deviation, in deviations of the target."""


@dataclass(frozen=True, kw_only=True)
class NPTConfig(NPTOptions):
    """Configuration of an :class:`NPTModel`.

    Example:
        >>> NPTConfig(categories=(0, 4, 2)).num_features
        2
    """

    categories: tuple[int, ...]
    """Categories of every column, targets last; zero for a column of numbers."""
    num_targets: int = 1
    """How many of the last columns are targets: 1, or 0 for a model that only fills holes."""
    context_rows: int = 0
    """Training rows that the model keeps."""
    is_condensed: bool = False
    """Whether the model keeps the memories of its row attentions instead of rows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "categories", tuple(self.categories))
        if self.num_targets not in (0, 1) or len(self.categories) <= self.num_targets:
            raise ValueError(
                f"A model needs features and at most one target, got {len(self.categories)} "
                f"columns and num_targets={self.num_targets}."
            )
        width = len(self.categories) * self.dim
        if self.has_rows and self.row_dim is None and width > MAX_WIDTH:
            raise ValueError(
                f"Row attention of full width needs {len(self.categories)} columns × {self.dim} = "
                f"{width} channels, and at most {MAX_WIDTH} are allowed; set row_dim, such as 128, "
                "or a smaller dim."
            )

    @property
    def num_features(self) -> int:
        """Columns that are no targets."""
        return len(self.categories) - self.num_targets


@dataclass(frozen=True)
class NPTOutput:
    """Predictions of a table's rows."""

    logits: Float[Tensor, "n width"]
    """Logits of classes, or mean and logarithm of the deviation of a number; empty without a
    target."""
    hidden: Float[Tensor, "n d e"]
    """Vectors of the cells after the last layer."""
    loss: Float[Tensor, ""] | None = None
    """In training: the loss of the hidden targets and features."""
    aux_loss: Float[Tensor, ""] | None = None
    """Mean regulariser of the layers, unweighted."""


class _Split(NamedTuple):
    """A training table: what the model reads, and what it must predict."""

    values: Tensor
    hidden: Tensor
    selected: Tensor
    is_query: Tensor
    """Rows that attend to the other rows, and are not attended to."""


class NPTModel(PretrainedModel):
    """A Transformer that predicts hidden cells of a table from the other cells and rows.

    Time ``O(n m)`` with softmax between ``n`` rows and ``m`` context rows, ``O(n + m)`` with
    ``primal-dual``.

    Args:
        config: Configuration of the model.
        device: Where to create the parameters.
        dtype: Type of the parameters.

    Example:
        >>> model = NPTModel(NPTConfig(categories=(0, 0, 3), context_rows=20, dim=8)).eval()
        >>> values, missing = torch.randn(20, 3), torch.zeros(20, 3, dtype=torch.bool)
        >>> model.set_context(values, missing)
        >>> model(values[:5], missing[:5]).logits.shape
        torch.Size([5, 3])
    """

    config_class: ClassVar[type[NPTConfig]] = NPTConfig
    config: NPTConfig
    context_values: Tensor
    context_missing: Tensor
    temperature: Tensor

    def __init__(self, config: NPTConfig, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.config = config
        cells, rows = len(config.categories), config.context_rows
        self.embedding = CellEmbedding(config.categories, config.dim, config.numbers)
        self.dropout = nn.Dropout(config.dropout)
        self.row_blocks = nn.ModuleList(
            RowBlock(cells, config, name, options)
            for name, options in zip(config.layer_attentions, config.layer_options, strict=True)
            if config.has_rows
        )
        self.cell_blocks = nn.ModuleList(
            TableBlock(config.dim, config, config.cell_attention) for _ in range(config.num_layers)
        )
        self.norm = nn.Identity() if config.published else nn.LayerNorm(config.dim)
        self.heads = CellHeads(config.categories, config.dim, config.num_targets)
        self.register_buffer("context_values", torch.zeros(rows, cells))
        self.register_buffer("context_missing", torch.ones(rows, cells, dtype=torch.bool))
        self.register_buffer("temperature", torch.ones(()))
        self._memories: list[Memory] | None = None
        self._feature_share = config.feature_weight
        if config.is_condensed:
            self._create_memories()
        self.to(device=device, dtype=dtype)

    # context

    def keep_items(self, data: Any) -> None:
        """Keep training rows as context: all, or a sample with the same share of every class."""
        chosen = data.sample(self.config.context_rows)
        self.set_context(data.values[chosen], data.missing[chosen])

    def set_context(self, values: Float[Tensor, "m d"], missing: Bool[Tensor, "m d"]) -> None:
        """Set the rows that predictions attend to, with their targets in the last columns."""
        if values.shape != self.context_values.shape:
            raise ValueError(
                f"The context must have the shape {tuple(self.context_values.shape)} of the "
                f"configuration, got {tuple(values.shape)}; with_context makes a model of another."
            )
        self.context_values.copy_(values)
        self.context_missing.copy_(missing)
        self._memories = None

    def with_context(self, values: Tensor, missing: Tensor) -> "NPTModel":
        """Return a model with the same weights and another context, of any number of rows."""
        config = replace(self.config, context_rows=len(values), is_condensed=False)
        model = self._copy(config)
        model.set_context(values, missing)
        return model

    @torch.no_grad()
    def condense(self) -> "NPTModel":
        """Return a model that keeps no row: only the memories, whose size is constant.

        Predictions stay the same. For models whose row attentions are all ``primal-dual``.
        """
        blocks = self._row_attentions()
        if not all(isinstance(block, PrimalAttention) for block in blocks):
            raise ValueError(
                "Only models whose row attentions are all primal-dual can be condensed; others "
                "attend to single rows."
            )
        model = self._copy(replace(self.config, context_rows=0, is_condensed=True))
        for i, memory in enumerate(self.memories()):
            assert isinstance(memory, State)
            model.get_buffer(f"memory_{i}").copy_(memory.tensors[0])
        return model

    def _copy(self, config: NPTConfig) -> "NPTModel":
        """Return a model with the same weights and another configuration of the context."""
        like = self.embedding.slope
        with isolated():
            model = NPTModel(config, device=like.device, dtype=like.dtype)
        skipped = ("context_", "memory_")
        own = {k: v for k, v in self.state_dict().items() if not k.startswith(skipped)}
        rest = {k: v for k, v in model.state_dict().items() if k.startswith(skipped)}
        model.load_state_dict({**own, **rest})
        return model.train(self.training)

    def _row_attentions(self) -> list[Any]:
        return [block.block.attention for block in self.row_blocks]  # type: ignore[union-attr]

    def _create_memories(self) -> None:
        """Add an empty buffer for the memory of every row attention."""
        for i, attention in enumerate(self._row_attentions()):
            shape = attention.remember(torch.zeros(1, 1, attention.dim)).tensors[0].shape
            self.register_buffer(f"memory_{i}", torch.zeros(shape))

    def memories(self) -> list[Memory]:
        """Return what every row block keeps of the context, computed once in eval mode."""
        if self.config.is_condensed:
            ones = torch.ones(1, dtype=torch.long)
            buffers = (self.get_buffer(f"memory_{i}") for i in range(len(self.row_blocks)))
            return [State((buffer,), ones) for buffer in buffers]
        if self._memories is None or torch.is_grad_enabled():
            found = self.stream(self.context_values, self.context_missing)
            if torch.is_grad_enabled():
                return found
            self._memories = found
        return self._memories

    def stream(
        self,
        values: Float[Tensor, "m d"],
        missing: Bool[Tensor, "m d"],
        *,
        chunk: int = _CHUNK,
        keeps_rows: bool = False,
    ) -> list[Memory]:
        """Return the memories of a context, read in parts.

        Layer by layer: every part adds to the memory, then every part attends to it. So the
        result is that of all rows at once. Beside the memories only the cells of all rows are kept.

        Args:
            values: The rows, targets last.
            missing: Their holes.
            chunk: Rows of a part.
            keeps_rows: Keep the rows of every memory, also for attentions that need less.
        """
        parts = [
            self._embed(v, m)
            for v, m in zip(values.split(chunk), missing.split(chunk), strict=True)
        ]
        memories: list[Memory] = []
        for row, cell in zip(self.row_blocks, self.cell_blocks, strict=False):
            tokens = [row.tokens(x) for x in parts]  # type: ignore[operator]
            memory = row.block.remember(tokens, keeps_rows=keeps_rows)  # type: ignore[union-attr,operator]
            memories.append(memory)
            if len(memories) < len(self.row_blocks):
                parts = [
                    cell(row.cells(x, row.block(t, memory)))  # type: ignore[operator]
                    for x, t in zip(parts, tokens, strict=True)
                ]
        return memories

    # forward

    def forward(
        self,
        values: Float[Tensor, "n d"],
        missing: Bool[Tensor, "n d"],
        *,
        weight: Float[Tensor, " n"] | None = None,
    ) -> NPTOutput:
        """Return the predictions of rows; in training, of what was hidden in them.

        Args:
            values: Standardised numbers and codes of categories, targets last. Outside training
                the targets are not read.
            missing: ``True`` where there is no value.
            weight: Weight of every row in the loss of its target.
        """
        if values.shape[1:] != self.context_values.shape[1:]:
            raise ValueError(
                f"The model has {len(self.config.categories)} columns, targets included, got "
                f"{values.shape[-1]}."
            )
        if self.training:
            return self._forward_hidden(values, missing, weight)
        missing = missing.clone()
        missing[:, self.config.num_features :] = True
        return self.predict_from(self._embed(values, missing), values, missing)

    def predict_from(
        self,
        x: Float[Tensor, "n d e"],
        values: Tensor | None = None,
        missing: Tensor | None = None,
        memories: Sequence[Memory] | None = None,
        gates: Sequence[Tensor] | None = None,
    ) -> NPTOutput:
        """Return the predictions from embedded cells.

        Args:
            x: Embedded cells of the rows to predict.
            values: The rows themselves, which a transductive model adds to its context.
            missing: Their holes.
            memories: What the rows attend to; by default the model's own context.
            gates: Factors of the context rows in every row block.
        """
        if memories is None and self.config.context == "transductive" and values is not None:
            every = torch.cat([self.context_values, values])
            holes = torch.cat([self.context_missing, missing])  # type: ignore[list-item]
            memories = self.stream(every, holes)
        found = self.memories() if memories is None else memories
        for i, cell in enumerate(self.cell_blocks):
            if self.config.has_rows:
                row: Any = self.row_blocks[i]
                gate = None if gates is None else gates[i][None, :, None]
                x = row.cells(x, row.block(row.tokens(x), found[i], gate=gate))
            x = cell(x)
        x = self.norm(x)
        return NPTOutput(self._target(x), x)

    def _embed(self, values: Tensor, hidden: Tensor) -> Tensor:
        return self.dropout(self.embedding(values, hidden))

    def _target(self, x: Tensor) -> Tensor:
        if not self.config.num_targets:
            return x.new_zeros(len(x), 0)
        found = self.heads.column(x, len(self.config.categories) - 1)
        if self.config.categories[-1]:
            return found if self.training else found / self.temperature
        low, high = _LOG_DEVIATION
        log_std = low + (high - low) * torch.sigmoid(found[:, 1])
        return torch.stack(
            [found[:, 0], log_std if self.training else log_std + self.temperature.log()], 1
        )

    # training

    def set_progress(self, progress: float) -> None:
        """Set the weight of the features from the share of the training that is done."""
        self._feature_share = feature_share(self.config.feature_weight, progress)

    def _forward_hidden(self, values: Tensor, missing: Tensor, weight: Tensor | None) -> NPTOutput:
        split = self._hide(values, missing)
        order = torch.cat([(~split.is_query).nonzero()[:, 0], split.is_query.nonzero()[:, 0]])
        x = self._embed(split.values[order], split.hidden[order])
        first = len(x) - int(split.is_query.sum())
        terms: dict[str, Tensor] = {}
        for i, cell in enumerate(self.cell_blocks):
            if self.config.has_rows:
                x = self._attend_rows(i, x, first, terms)
            x = cell(x)
        x = self.norm(x)
        loss = self._loss(x, values[order], split.selected[order], weight, order)
        return NPTOutput(self._target(x), x, loss, self.collect("row_blocks", terms))

    def _attend_rows(self, i: int, x: Tensor, first: int, terms: dict[str, Tensor]) -> Tensor:
        """Return the cells after a row block; the first rows are the context of all."""
        row: Any = self.row_blocks[i]
        tokens = row.tokens(x)
        context = tokens[:, :first]
        name = f"{i}.block.attention"
        if row.block.has_term and first < 2:
            # one row has no kernel problem: its relative residual may be infinite
            terms[name] = tokens.new_zeros(())
            return row.cells(x, row.block(tokens, row.block.remember([context])))
        if row.block.has_term:
            y, terms[name] = row.block.with_term(context)
        else:
            y = row.block(context)
        if first < len(x):
            asked = row.block(tokens[:, first:], row.block.remember([context]))
            y = torch.cat([y, asked], dim=1)
        return row.cells(x, y)

    def _hide(self, values: Tensor, missing: Tensor) -> _Split:
        """Hide features and targets of a training table."""
        config, f = self.config, self.config.num_features
        n, is_split = len(values), config.context == "train" and config.p_target < 1
        is_query = torch.rand(n, device=values.device) < config.p_target
        if config.num_targets:
            is_query = is_query & ~missing[:, -1]
        if is_split:
            # a table needs both kinds of rows
            is_query[0] &= not bool(is_query.all()) or n == 1
            is_query[-1] |= not bool(is_query.any()) and not bool(missing[-1, f:].any())
        features = hide_cells(
            values[:, :f], missing[:, :f], config.categories[:f], config.p_feature
        )
        if not config.num_targets:
            # context rows stay whole, as in prediction
            hidden = torch.where(is_query[:, None], features.hidden, missing)
            changed = torch.where(is_query[:, None], features.values, values)
            selected = features.selected & is_query[:, None]
            return _Split(changed, hidden, selected, is_query & is_split)
        asked = hide_cells(values[:, f:], missing[:, f:], config.categories[f:], 1.0)
        keep = ~is_query[:, None]
        if is_split:
            # as in prediction, a target to predict is always hidden
            target, hidden = values[:, f:], missing[:, f:] | ~keep
        else:
            target = torch.where(keep, values[:, f:], asked.values)
            hidden = torch.where(keep, missing[:, f:], asked.hidden)
        return _Split(
            torch.cat([features.values, target], 1),
            torch.cat([features.hidden, hidden], 1),
            torch.cat([features.selected, ~keep], 1),
            is_query & is_split,
        )

    def _loss(
        self, x: Tensor, values: Tensor, selected: Tensor, weight: Tensor | None, order: Tensor
    ) -> Float[Tensor, ""]:
        """Return the weighted sum of the losses of targets and features."""
        config, f = self.config, self.config.num_features
        features = hidden_feature_loss(self.heads, x, values, selected, config.categories[:f])
        if not config.num_targets:
            return features
        losses = target_losses(self._target(x), values[:, -1], is_class=bool(config.categories[-1]))
        counted = selected[:, -1].to(losses.dtype)
        if weight is not None:
            counted = counted * weight[order]
        total = counted.sum()
        targets = (counted * losses).sum() / torch.where(total > 0, total, 1.0)
        return (1 - self._feature_share) * targets + self._feature_share * features

    def train(self, mode: bool = True) -> "NPTModel":
        """Set the mode; memories of the context are computed anew with the present weights."""
        self._memories = None
        return super().train(mode)
