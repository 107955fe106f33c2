"""Models of event sequences, with any attention of the registry::

    next event:  [type ; features of the gap before ; marks] → causal blocks → h_i
                 p(gap, type | history) = p(gap | h_i) · p(type | gap, h_i)
    classifier:  [type ; features of t_ref − t ; marks], a summary token at t_ref → blocks → classes

Only differences of times enter, so a shift of all times changes nothing. Times are float64 in
scaled units: the median gap is one.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.types import Device

from primal_attention.attention import State
from primal_attention.kernels import TimeFeatures, create_time
from primal_attention.models import (
    BlockStack,
    ModelOutput,
    PretrainedModel,
    sinusoidal_positions,
)
from primal_attention.tasks.events.embedding import EventConfig, EventEmbedding
from primal_attention.tasks.events.heads import (
    GapFeatures,
    LogNormalMixture,
    Nodes,
    TypeHead,
    WaitingHead,
)
from primal_attention.tasks.events.published import PublishedStack, check_published

__all__ = [
    "EventSequenceConfig",
    "EventSequenceNetwork",
    "NextEventConfig",
    "NextEventModel",
    "NextEventOutput",
    "Past",
]


_PLACES = 512
"""Places of which the type is integrated over the gap at once."""


@dataclass(frozen=True, kw_only=True)
class NextEventConfig(EventConfig):
    """Configuration of a :class:`NextEventModel`.

    Example:
        >>> NextEventConfig(num_types=22).layer_attentions
        ('linear', 'linear')
    """

    smallest_gap: float = 1e-6
    """Shorter gaps count as this, in scaled units; a density of zero gaps would be infinite."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_causal()
        if not self.smallest_gap > 0:
            raise ValueError(f"smallest_gap must be positive, got {self.smallest_gap}.")


@dataclass(frozen=True, kw_only=True)
class EventSequenceConfig(EventConfig):
    """Configuration of an :class:`EventSequenceNetwork`.

    Example:
        >>> EventSequenceConfig(num_types=5, num_classes=2, time="mercer").time
        'mercer'
    """

    num_classes: int
    """Classes of sequences."""
    legacy_block: bool = False
    """Norms and residuals of the published code, to compare with it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("num_classes")
        if self.legacy_block:
            check_published(self)


@dataclass(frozen=True)
class NextEventOutput:
    """Distributions of the next event after every event."""

    logits: Float[Tensor, "b n types"]
    """Type of the next event, given the true gap; without meaning where there is no next event."""
    log_density: Float[Tensor, "b n"]
    """Log-density of the true gap, per scaled unit; zero where there is no next event."""
    waiting: LogNormalMixture
    """Distributions of the next gap, in scaled units."""
    gap: Float[Tensor, "b n"]
    """True gap until the next event in scaled units, float64; one where there is none."""
    hidden: Float[Tensor, "b n c"]
    """The history at every event."""
    keep: Bool[Tensor, "b n"]
    """Where an event is real."""
    aux_loss: Float[Tensor, ""] | None = None
    """Mean regulariser of the layers, unweighted."""


class Past(NamedTuple):
    """What a model keeps of the events it has read. Its size does not grow with their number."""

    hidden: Float[Tensor, "b c"]
    """The history at the last event."""
    states: tuple[State, ...]
    """States of the blocks."""
    elapsed: Float[Tensor, " b"]
    """Time since the first event, in scaled units."""
    seen: Int[Tensor, " b"]
    """Events so far."""
    covariates: dict[str, Tensor]
    """Covariates of the sequences."""

    def reorder(self, index: Int[Tensor, " k"]) -> "Past":
        """Return the sequences in ``index``."""
        return Past(
            self.hidden[index],
            tuple(state.reorder(index) for state in self.states),
            self.elapsed[index],
            self.seen[index],
            {name: column[index] for name, column in self.covariates.items()},
        )


class _EventModel(PretrainedModel):
    """Blocks over embedded events."""

    config: EventConfig

    def __init__(self, config: EventConfig, extra_types: int, flags: int) -> None:
        super().__init__()
        self.config = config
        is_time = config.time not in ("none", "position")
        time = create_time(config.time, config.time_features) if is_time else None
        self.features = GapFeatures(time, log=config.log_time and config.time != "none")
        width = config.dim if config.time == "position" else 0
        self.embed = EventEmbedding(config, self.features.num_features + width + flags, extra_types)
        self.blocks = BlockStack(config)
        self.norm = nn.LayerNorm(config.dim)

    def start_from(self, gaps: Float[Tensor, " k"], span: float) -> None:
        """Set frequencies and scales from the data.

        Args:
            gaps: Gaps of the training log in scaled units, or quantiles of them.
            span: Longest sequence in scaled units.
        """
        gaps = gaps.double()
        self.features.start_from(gaps)
        for module in self.modules():
            if isinstance(module, TimeFeatures):  # before the blocks and inside attentions
                module.start_from(gaps[gaps > 0], span)

    def _position(self, count: Int[Tensor, "b n"]) -> list[Tensor]:
        """Return codes of positions, if the model uses them."""
        if self.config.time != "position":
            return []
        return [sinusoidal_positions(count.clamp_min(0), self.config.dim)]

    def _check(self, types: Tensor, times: Tensor, keep: Tensor | None) -> Bool[Tensor, "b n"]:
        if types.dim() != 2 or types.is_floating_point():
            raise ValueError(
                f"types must hold ids of shape [batch, events], got {types.dtype} "
                f"{tuple(types.shape)}."
            )
        if times.shape != types.shape or not times.is_floating_point():
            raise ValueError(
                f"times must be floating point of shape {tuple(types.shape)}, got {times.dtype} "
                f"{tuple(times.shape)}."
            )
        if keep is None:
            return torch.ones(types.shape, dtype=torch.bool, device=types.device)
        if keep.dtype != torch.bool or keep.shape != types.shape:
            raise ValueError(
                f"key_mask must be boolean of shape {tuple(types.shape)}, got {keep.dtype} "
                f"{tuple(keep.shape)}."
            )
        return keep


class NextEventModel(_EventModel):
    """Distribution of the next gap and the next type after every event, in one causal pass.

    Args:
        config: Configuration of the model.
        device: Where to create the parameters.
        dtype: Type of the parameters.

    Example:
        >>> model = NextEventModel(NextEventConfig(num_types=3, dim=16))
        >>> types, times = torch.tensor([[0, 2, 1]]), torch.tensor([[0.0, 1.5, 2.0]])
        >>> output = model(types, times.double())
        >>> output.logits.shape, output.log_density.shape
        (torch.Size([1, 3, 3]), torch.Size([1, 3]))
    """

    config_class: ClassVar[type[NextEventConfig]] = NextEventConfig
    config: NextEventConfig

    def __init__(
        self, config: NextEventConfig, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, extra_types=0, flags=1)
        self.waiting = WaitingHead(config.dim, config.components)
        self.type_head = TypeHead(config.dim, self.features.num_features, config.num_types)
        self.to(device=device, dtype=dtype)

    def start_from(self, gaps: Float[Tensor, " k"], span: float) -> None:
        """Set frequencies, scales and the first distribution of gaps from the data."""
        super().start_from(gaps, span)
        self.waiting.start_from(gaps.clamp_min(self.config.smallest_gap))

    def forward(
        self,
        types: Int[Tensor, "b n"],
        times: Float[Tensor, "b n"],
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        **columns: Tensor,
    ) -> NextEventOutput:
        """Return the distributions of the next event after every event.

        Args:
            types: Types of events.
            times: Their times in scaled units, sorted, in float64.
            key_mask: ``True`` where an event is real; times and types elsewhere are ignored.
            columns: Marks and covariates, see :class:`EventEmbedding`.
        """
        keep = self._check(types, times, key_mask)
        gap, is_next = _gaps(times, keep)
        hidden, aux_loss = self.encode(types, times, key_mask=keep, **columns)
        ahead = torch.cat([gap[:, 1:], gap[:, :1]], 1)
        known = torch.cat([is_next[:, 1:], torch.zeros_like(is_next[:, :1])], 1) & keep
        ahead = torch.where(known, ahead.clamp_min(self.config.smallest_gap), 1.0)
        waiting = self.waiting(hidden)
        density = waiting.log_prob(ahead.to(waiting.location.dtype))
        return NextEventOutput(
            self.type_logits(hidden, ahead),
            torch.where(known, density, 0.0),
            waiting,
            ahead,
            hidden,
            keep,
            aux_loss,
        )

    def encode(
        self,
        types: Int[Tensor, "b n"],
        times: Float[Tensor, "b n"],
        *,
        key_mask: Bool[Tensor, "b n"],
        **columns: Tensor,
    ) -> tuple[Float[Tensor, "b n c"], Float[Tensor, ""] | None]:
        """Return the history at every event, and the regulariser of the layers."""
        gap, is_next = _gaps(times, key_mask)
        count = key_mask.cumsum(1) - 1
        x = self._embed(torch.where(key_mask, types, 0), gap, is_next, count, columns)
        # gaps are zero at padded positions, so sums of them are finite
        hidden, terms = self.blocks(x, key_mask=key_mask, is_causal=True, times=gap.cumsum(1))
        return self.norm(hidden), self.collect("blocks", terms)

    def read_past(
        self,
        types: Int[Tensor, "b n"],
        times: Float[Tensor, "b n"],
        *,
        key_mask: Bool[Tensor, "b n"],
        **columns: Tensor,
    ) -> Past:
        """Return what the model keeps of the events so far, to continue them one by one.

        Args:
            types: Types of events.
            times: Their times in scaled units, sorted, in float64.
            key_mask: ``True`` where an event is real; padding comes at the end.
            columns: Marks and covariates, see :class:`EventEmbedding`.
        """
        # decoding takes prompts that are padded on the left
        n = key_mask.shape[1]
        turn = (torch.arange(n, device=types.device) + key_mask.sum(1, keepdim=True)) % n
        types, times, key_mask = (t.gather(1, turn) for t in (types, times, key_mask))
        own = {k: v for k, v in columns.items() if k.startswith("covariates")}
        for name in columns.keys() - own.keys():
            columns[name] = columns[name].gather(1, turn[..., None].expand_as(columns[name]))
        gap, is_next = _gaps(times, key_mask)
        count = key_mask.cumsum(1)
        x = self._embed(torch.where(key_mask, types, 0), gap, is_next, count - 1, columns)
        states = self.blocks.init_state(len(types))
        hidden, states = self.blocks.step(x, states, key_mask=key_mask, times=gap.cumsum(1))
        return Past(self.norm(hidden[:, -1]), states, gap.sum(1), count[:, -1], own)

    def read_next(self, types: Int[Tensor, " b"], gap: Float[Tensor, " b"], past: Past) -> Past:
        """Return what the model keeps after one more event of every sequence, without marks."""
        sizes = self.config.mark_numbers, len(self.config.mark_levels)
        columns = dict(past.covariates)
        if sizes[0]:
            columns["marks_numbers"] = past.hidden.new_full((len(types), 1, sizes[0]), torch.nan)
        if sizes[1]:
            columns["marks_levels"] = types.new_full((len(types), 1, sizes[1]), -1)
        is_next = torch.ones_like(types[:, None], dtype=torch.bool)
        x = self._embed(types[:, None], gap.double()[:, None], is_next, past.seen[:, None], columns)
        now = past.elapsed + gap
        hidden, states = self.blocks.step(x, past.states, times=now[:, None])
        return Past(self.norm(hidden[:, 0]), states, now, past.seen + 1, past.covariates)

    def type_logits(
        self, hidden: Float[Tensor, "*batch c"], gap: Float[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch types"]:
        """Return the logits of the next type, given the gap in scaled units."""
        # the same features of time as before the blocks: one kernel to look at
        return self.type_head(hidden, self.features(gap))

    def type_marginal(
        self, hidden: Float[Tensor, "*batch c"], nodes: Nodes
    ) -> Float[Tensor, "*batch types"]:
        """Return log-probabilities of the next type in float64, the gap integrated out."""
        rows = hidden.flatten(0, -2), *(t.flatten(0, -2) for t in nodes)
        parts = []
        # all nodes of all places at once would take gigabytes
        for h, gap, log_weight in zip(*(t.split(_PLACES) for t in rows), strict=True):
            logp = self.type_head(h, self.features(gap)).double().log_softmax(-1)
            parts.append((logp + log_weight.double()[..., None]).logsumexp(-2))
        return torch.cat(parts).unflatten(0, hidden.shape[:-1])

    def _embed(
        self, types: Tensor, gap: Tensor, is_next: Tensor, count: Tensor, columns: dict[str, Tensor]
    ) -> Float[Tensor, "b n c"]:
        features = self.features(gap)
        if self.features.num_features:
            # the first event has no gap: no features of one either
            features = torch.where(is_next[..., None], features, 0.0)
        parts = [features, *self._position(count), is_next[..., None].to(features.dtype)]
        return self.embed(types, torch.cat(parts, -1), **columns)


class EventSequenceNetwork(_EventModel):
    """Classes of whole sequences, read by a token at the reference time.

    Without positions, events at the same time can be exchanged.

    Args:
        config: Configuration of the model.
        device: Where to create the parameters.
        dtype: Type of the parameters.

    Example:
        >>> model = EventSequenceNetwork(EventSequenceConfig(num_types=3, num_classes=2, dim=16))
        >>> types, times = torch.tensor([[0, 2, 1]]), torch.tensor([[0.0, 1.5, 2.0]])
        >>> model(types, times.double()).logits.shape
        torch.Size([1, 2])
    """

    config_class: ClassVar[type[EventSequenceConfig]] = EventSequenceConfig
    config: EventSequenceConfig

    def __init__(
        self,
        config: EventSequenceConfig,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, extra_types=1, flags=0)
        if config.legacy_block:
            self.blocks = PublishedStack(config)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(2 * config.dim, config.num_classes)
        self.to(device=device, dtype=dtype)

    def forward(
        self,
        types: Int[Tensor, "b n"],
        times: Float[Tensor, "b n"],
        *,
        t_ref: Float[Tensor, "b 1"] | None = None,
        key_mask: Bool[Tensor, "b n"] | None = None,
        **columns: Tensor,
    ) -> ModelOutput:
        """Return the logits of every sequence, and the stream of its events.

        Args:
            types: Types of events.
            times: Their times in scaled units, in float64.
            t_ref: Reference time of every sequence; by default its last event.
            key_mask: ``True`` where an event is real; times and types elsewhere are ignored.
            columns: Marks and covariates, see :class:`EventEmbedding`.
        """
        keep = self._check(types, times, key_mask)
        if t_ref is None:
            t_ref = torch.where(keep, times, -torch.inf).amax(1, keepdim=True)
        elapsed = torch.where(keep, t_ref - times, 0.0)
        # the summary token: a type of its own, at the reference time, never padded
        types = torch.where(keep, types, 0)
        token = torch.full_like(types[:, :1], self.config.num_types)
        types = torch.cat([types, token], 1)
        elapsed = torch.cat([elapsed, torch.zeros_like(elapsed[:, :1])], 1)
        keep = torch.cat([keep, torch.ones_like(keep[:, :1])], 1)
        for name, missing in (("marks_numbers", torch.nan), ("marks_levels", -1)):
            if name in columns:
                row = torch.full_like(columns[name][:, :1], missing)
                columns[name] = torch.cat([columns[name], row], 1)
        left = keep.flip(1).cumsum(1).flip(1) - 1
        features = torch.cat([self.features(elapsed), *self._position(left)], -1)
        x = self.embed(types, features, **columns)
        hidden, terms = self.blocks(x, key_mask=keep, times=-elapsed)
        hidden = self.norm(hidden)
        events = torch.where(keep[:, :-1, None], hidden[:, :-1], 0.0)
        mean = events.sum(1) / keep[:, :-1].sum(1, keepdim=True).clamp_min(1)
        logits = self.head(self.dropout(torch.cat([hidden[:, -1], mean], -1)))
        return ModelOutput(logits, self.collect("blocks", terms), hidden[:, :-1])


def _gaps(
    times: Float[Tensor, "b n"], keep: Bool[Tensor, "b n"]
) -> tuple[Float[Tensor, "b n"], Bool[Tensor, "b n"]]:
    """Return the gap before every event, zero if there is none, and where there is one."""
    times = torch.where(keep, times.double(), 0.0)
    is_next = torch.cat([torch.zeros_like(keep[:, :1]), keep[:, 1:] & keep[:, :-1]], 1)
    gap = torch.cat([torch.zeros_like(times[:, :1]), times.diff(dim=1)], 1)
    return torch.where(is_next, gap.clamp_min(0), 0.0), is_next
