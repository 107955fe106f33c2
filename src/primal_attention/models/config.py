"""Configurations of models, as frozen dataclasses.

PrimalFormer, Primal.+ and their softmax twin (Chen et al. 2023) are one line apart::

    EncoderConfig(num_classes=9, num_features=12)                          # every layer primal
    EncoderConfig(num_classes=9, num_features=12, primal_layers="last:1")  # softmax, primal on top
    EncoderConfig(num_classes=9, num_features=12, attention="softmax")     # the twin

This module imports torch only when a configuration is made, so that ``--help`` answers at once.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from primal_attention.support.command import did_you_mean
from primal_attention.support.settings import check_value

__all__ = [
    "DecoderConfig",
    "EncoderConfig",
    "EncoderOptions",
    "SequenceConfig",
    "StackConfig",
]

Norm = Literal["pre", "post"]
Pooling = Literal["mean", "last"]
TimeFusion = Literal["add", "concat", "concat-mlp", "product", "rotary", "stationary-bias"]
Positions = Literal["sinusoidal", "learned", "rotary", "none"]

_MAX_LAYERS = 10_000
"""More blocks are a mistake; they would fill the memory before anything is trained."""


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """The blocks of a model; the fields that all models share.

    Example:
        >>> StackConfig(primal_layers="last:1").layer_attentions
        ('softmax', 'primal')
    """

    hidden_ratio: ClassVar[int] = 4
    """Default width inside a block's perceptron, as a multiple of ``dim``."""

    dim: int = 128
    """Model width."""
    num_heads: int = 8
    """Heads; must divide ``dim``."""
    num_layers: int = 2
    """Blocks."""
    hidden_dim: int | None = None
    """Width inside each block's perceptron; by default ``4 * dim``."""
    attention: str = "primal"
    """Name of an attention in the registry."""
    attention_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Options of that attention's constructor, such as ``{"rank": 16}``."""
    primal_layers: str | tuple[int, ...] = "all"
    """Blocks that use ``attention``: ``"all"``, ``"last:k"`` or indices."""
    other_attention: str = "softmax"
    """Attention of the other blocks."""
    other_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Options of the other attention's constructor."""
    time_fusion: TimeFusion | None = None
    """How times enter the attentions of all blocks; for models whose tokens have times."""
    norm: Norm = "pre"
    """Norm before each branch, or after it (post)."""
    dropout: float = 0.1
    """Probability of dropping an element of each branch in training."""
    checkpointing: bool = False
    """Recompute every block in backward: less memory, about a third more time."""

    def __post_init__(self) -> None:
        if isinstance(self.primal_layers, list):
            object.__setattr__(self, "primal_layers", tuple(self.primal_layers))
        for name in ("dim", "num_heads", "num_layers", "hidden_dim"):
            self._check_count(name)
        if self.num_layers > _MAX_LAYERS:
            raise ValueError(
                f"num_layers must be at most {_MAX_LAYERS:,}, got {self.num_layers:,}."
            )
        self._check_choice("norm", Norm)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}.")
        for name, options in zip(self.layer_attentions, self.layer_options, strict=True):
            _check_options(name, options)
        if self.time_fusion is not None:
            self._check_time_fusion(self.time_fusion)

    def _check_choice(self, name: str, kind: Any) -> None:
        if getattr(self, name) not in get_args(kind):
            raise ValueError(
                f"{name} must be one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}."
            )

    def _check_count(self, name: str) -> None:
        value = getattr(self, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")

    def _check_time_fusion(self, fusion: str) -> None:
        from primal_attention.attention import attention_entry, list_attentions

        self._check_choice("time_fusion", TimeFusion)
        for name in self.layer_attentions:
            allowed = attention_entry(name).capabilities.time
            if fusion not in allowed:
                raise ValueError(
                    f"{name!r} does not allow time_fusion={fusion!r}, only "
                    f"{', '.join(sorted(allowed))}. Attentions that do: "
                    f"{', '.join(list_attentions(time=fusion))}."
                )

    def _check_causal(self) -> None:
        from primal_attention.attention import attention_entry, list_attentions

        for name in self.layer_attentions:
            if not attention_entry(name).capabilities.causal:
                raise ValueError(
                    f"{name!r} cannot run causally: its outputs depend on later tokens. Use one "
                    f"of: {', '.join(list_attentions(causal=True))}."
                )

    @property
    def mlp_dim(self) -> int:
        """Width inside each block's perceptron."""
        return self.hidden_ratio * self.dim if self.hidden_dim is None else self.hidden_dim

    @property
    def layer_attentions(self) -> tuple[str, ...]:
        """The attention of every block, first to last."""
        chosen = _chosen(self.primal_layers, self.num_layers)
        names = self.attention, self.other_attention
        return tuple(names[i not in chosen] for i in range(self.num_layers))

    @property
    def layer_options(self) -> tuple[Mapping[str, Any], ...]:
        """The options of every block's attention, first to last."""
        chosen = _chosen(self.primal_layers, self.num_layers)
        options = self.attention_options, self.other_options
        return tuple(options[i not in chosen] for i in range(self.num_layers))


def _check_options(attention: str, options: Mapping[str, Any]) -> None:
    """Raise for options that an attention does not have, and values of another type."""
    from primal_attention.attention import attention_entry

    given = {"dim", "num_heads", "generator", "device", "dtype"}
    parameters = inspect.signature(attention_entry(attention).factory).parameters
    known = {name: p.annotation for name, p in parameters.items() if name not in given}
    for key, value in options.items():
        if key not in known:
            raise ValueError(
                f"the attention {attention} has no option {key!r}.{did_you_mean(key, known)} "
                f"Its options: {', '.join(known)}."
            )
        check_value(value, known[key], f"the option {key} of the attention {attention}")


def _chosen(layers: str | tuple[int, ...], num_layers: int) -> frozenset[int]:
    """Return the indices that ``primal_layers`` names."""
    every = range(num_layers)
    if isinstance(layers, str):
        if layers == "all":
            return frozenset(every)
        word, _, count = layers.partition(":")
        if word == "last" and count.isdigit() and 0 < int(count) <= num_layers:
            return frozenset(every[-int(count) :])
    elif all(isinstance(i, int) and -num_layers <= i < num_layers for i in layers):
        return frozenset(every[i] for i in layers)
    raise ValueError(
        f"primal_layers must be 'all', 'last:k' with k from 1 to {num_layers}, or a tuple of "
        f"indices below {num_layers}, got {layers!r}."
    )


@dataclass(frozen=True, kw_only=True)
class SequenceConfig(StackConfig):
    """Blocks and positions; the fields that all models of sequences share."""

    positions: Positions = "sinusoidal"
    """Positions: sinusoidal or learned vectors, rotary queries and keys, or none."""
    max_length: int | None = None
    """Number of learned positions; the other kinds of positions take any length."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("max_length")
        self._check_choice("positions", Positions)
        if self.time_fusion is not None:
            raise ValueError(
                f"time_fusion is {self.time_fusion!r}, but this model takes no times; leave it "
                "out, or use a model of events."
            )
        if (self.positions == "learned") != (self.max_length is not None):
            raise ValueError(
                f"Learned positions need max_length, and only they have one; got positions="
                f"{self.positions!r} and max_length={self.max_length}."
            )
        from primal_attention.attention import attention_entry, list_attentions

        for name in self.layer_attentions if self.positions == "rotary" else ():
            if not attention_entry(name).capabilities.rotary:
                raise ValueError(
                    f"Rotary positions need an attention that compares tokens by inner products, "
                    f"got {name!r}; use sinusoidal positions, or one of: "
                    f"{', '.join(list_attentions(rotary=True))}."
                )


@dataclass(frozen=True, kw_only=True)
class EncoderOptions(SequenceConfig):
    """An encoder without what the data decide: its inputs and its classes."""

    is_causal: bool = False
    """Let no output depend on a later token; ``primal-static`` mixes tokens only then."""
    pooling: Pooling = "mean"
    """Input of the head: the mean over real tokens, or the last of them."""
    head_dim: int | None = None
    """Width of a hidden layer in the head; by default the head is linear."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("head_dim")
        self._check_choice("pooling", Pooling)
        if self.is_causal:
            self._check_causal()


@dataclass(frozen=True)
class EncoderConfig(EncoderOptions):
    """Configuration of an :class:`EncoderClassifier` or a :class:`DualTowerClassifier`.

    Example:
        >>> EncoderConfig(num_classes=9, num_features=12, primal_layers="last:1").layer_attentions
        ('softmax', 'primal')
    """

    num_classes: int
    """Number of classes."""
    num_features: int | None = None
    """Channels of each token, for inputs ``[b n features]``; give this or ``vocab_size``."""
    vocab_size: int | None = None
    """Distinct token ids, for inputs ``[b n]``; give this or ``num_features``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_classes", "num_features", "vocab_size"):
            self._check_count(name)
        if (self.num_features is None) == (self.vocab_size is None):
            raise ValueError(
                f"Give exactly one of num_features and vocab_size, got {self.num_features} and "
                f"{self.vocab_size}: num_features for inputs [b n features], vocab_size for ids."
            )


@dataclass(frozen=True)
class DecoderConfig(SequenceConfig):
    """Configuration of a :class:`CausalDecoder`.

    Example:
        >>> DecoderConfig(vocab_size=256, attention="primal-dual", positions="rotary").dim
        128
    """

    vocab_size: int
    """Distinct token ids."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("vocab_size")
        self._check_causal()
