"""Configuration of a :class:`VisualParser`.

This module imports torch only when a configuration is made, so that ``--help`` answers at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Self, get_args

from primal_attention.models.config import StackConfig
from primal_attention.support.command import did_you_mean

__all__ = ["CONFIGS", "MultimodalConfig"]

Objective = Literal["mlm", "itm", "mfr", "itc"]
Masks = Literal["groups", "random"]
ParserAttention = Literal["last", "rollout"]
Distance = Literal["squared", "cosine"]
Negatives = Literal["random", "in-batch-hard"]

PARSERS = ("vit", "linear", "cnn")
"""Parsers of this library; ``timm:NAME`` and ``module`` are the others."""

CONFIGS: Mapping[str, Mapping[str, object]] = {
    "tiny": {},
    "small": {"image_size": 48, "dim": 96, "parser_layers": 3, "dropout": 0.1, "vocab_size": 4096},
}
"""Named configurations: changes of the defaults."""


@dataclass(frozen=True, kw_only=True)
class MultimodalConfig(StackConfig):
    """Configuration of a :class:`VisualParser`; the fields of the stack are the joint encoder.

    Example:
        >>> config = MultimodalConfig.from_config("tiny", vocab_size=50)
        >>> config.dim, config.num_patches, config.layer_attentions
        (64, 16, ('softmax', 'softmax', 'softmax'))
    """

    dim: int = 64
    """Width of the joint encoder."""
    num_heads: int = 4
    """Heads; must divide ``dim``."""
    num_layers: int = 3
    """Blocks of the joint encoder."""
    attention: str = "softmax"
    """Attention of the joint encoder: any name of the registry."""
    dropout: float = 0.0
    """Probability of dropping an element of each branch in training."""
    vocab_size: int = 1024
    """Distinct token ids of the texts."""
    max_words: int = 16
    """Longest text in tokens, with [CLS] and [SEP]."""
    image_size: int | tuple[int, int] = 32
    """Height and width of the images in pixels; one number for squares."""
    num_channels: int = 3
    """Channels of the images."""
    patch_size: int = 8
    """Pixels of a side of a patch; every patch becomes one visual token."""
    parser: str = "vit"
    """What turns an image into tokens: ``"vit"`` (blocks of attention), ``"linear"`` (patches),
    ``"cnn"`` (three convolutions), ``"timm:NAME"``, or ``"module"`` for one of your own."""
    parser_attention: str = "softmax"
    """Attention of the ``vit`` parser: any name of the registry, such as ``"primal-dual"``."""
    parser_options: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Options of that attention's constructor."""
    parser_layers: int = 2
    """Blocks of the ``vit`` parser."""
    parser_dim: int | None = None
    """Width of the parser; by default ``dim``."""
    parser_hidden: int | None = None
    """Inner width of ``linear`` and ``cnn``; by default as many parameters as the ``vit``."""
    objectives: tuple[Objective, ...] = ("mlm", "itm", "mfr")
    """Losses of a forward in training: masked words, matching, masked features, contrast."""
    loss_weights: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Weights of the losses by name; by default 1."""
    negatives: Negatives = "random"
    """Where mismatched texts come from: ``"in-batch-hard"`` draws similar ones more often."""
    mask_share: float = 0.15
    """Share of words that are hidden."""
    mfr_masks: Masks = "groups"
    """Hide visual tokens that attend to each other, or tokens drawn at random."""
    mfr_attention: ParserAttention = "last"
    """Which attention makes groups: that of the parser's last block, or the roll-out of all."""
    mfr_share: float = 0.2
    """Share of visual tokens that sets the number of groups."""
    mfr_group: int = 5
    """Visual tokens in a group, the seed included."""
    mfr_distance: Distance = "squared"
    """How far a predicted feature is from its target: squared error, or one minus cosine."""
    pad_token_id: int = 0
    """Id of padding."""
    cls_token_id: int = 1
    """Id of the first token, from which matching is read."""
    sep_token_id: int = 2
    """Id of the last token."""
    mask_token_id: int = 3
    """Id that hides a word."""
    unk_token_id: int = 4
    """Id of unknown words."""

    def __post_init__(self) -> None:
        for name in ("image_size", "objectives"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        super().__post_init__()
        counts = "vocab_size max_words num_channels patch_size parser_layers parser_dim"
        for name in (*counts.split(), "parser_hidden", "mfr_group"):
            self._check_count(name)
        for name, kind in (
            ("negatives", Negatives),
            ("mfr_masks", Masks),
            ("mfr_attention", ParserAttention),
            ("mfr_distance", Distance),
        ):
            self._check_choice(name, kind)
        for name in ("mask_share", "mfr_share"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}.")
        if self.time_fusion is not None:
            raise ValueError(f"time_fusion is {self.time_fusion!r}, but pairs have no times.")
        self._check_image()
        self._check_names()
        _ = self.parser_stack  # raises for widths and options that do not fit

    def _check_image(self) -> None:
        if len(self.image_shape) != 2 or any(
            side < 1 or side % self.patch_size for side in self.image_shape
        ):
            raise ValueError(
                f"image_size must be one or two multiples of patch_size={self.patch_size}, got "
                f"{self.image_size}; resize the images, or change patch_size."
            )
        if self.parser not in (*PARSERS, "module") and not self.parser.startswith("timm:"):
            known = (*PARSERS, "timm:NAME", "module")
            raise ValueError(
                f"parser must be one of {', '.join(known)}, got {self.parser!r}."
                f"{did_you_mean(self.parser, PARSERS)}"
            )

    def _check_names(self) -> None:
        known = get_args(Objective)
        for name, given in (("objectives", self.objectives), ("loss_weights", self.loss_weights)):
            if wrong := sorted(set(given) - set(known)):
                raise ValueError(f"{name} has {wrong[0]!r}; known are {', '.join(known)}.")
        for name in self.special_names:
            if not 0 <= getattr(self, name) < self.vocab_size:
                raise ValueError(
                    f"{name} must be an id below vocab_size={self.vocab_size}, got "
                    f"{getattr(self, name)}."
                )
        if len(set(self.special_ids)) < len(self.special_ids):
            raise ValueError(f"Special tokens must have different ids, got {self.special_ids}.")

    @classmethod
    def from_config(cls, name: str, **changes: Any) -> Self:
        """Return a named configuration, with changes.

        Args:
            name: ``"tiny"`` (32 pixels, 2 + 3 blocks of width 64) or ``"small"`` (48 pixels,
                3 + 3 blocks of width 96).
            changes: Fields that differ.
        """
        if name not in CONFIGS:
            raise ValueError(
                f"There is no configuration named {name!r}; known are {', '.join(CONFIGS)}."
            )
        known = {one.name for one in fields(cls)}
        for key in changes:
            if key not in known:
                raise ValueError(f"{cls.__name__} has no field {key!r}.{did_you_mean(key, known)}")
        return cls(**{**CONFIGS[name], **changes})

    special_names: ClassVar[tuple[str, ...]] = (
        "pad_token_id",
        "cls_token_id",
        "sep_token_id",
        "mask_token_id",
        "unk_token_id",
    )

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids that are no words: padding, [CLS], [SEP], [MASK] and unknown."""
        return tuple(getattr(self, name) for name in self.special_names)

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Height and width of the images."""
        size = self.image_size
        return (size, size) if isinstance(size, int) else tuple(size)

    @property
    def grid(self) -> tuple[int, ...]:
        """Rows and columns of patches."""
        return tuple(side // self.patch_size for side in self.image_shape)

    @property
    def num_patches(self) -> int:
        """Number of patches of an image."""
        return self.grid[0] * self.grid[1]

    @property
    def parser_stack(self) -> StackConfig:
        """The blocks of the ``vit`` parser."""
        return StackConfig(
            dim=self.dim if self.parser_dim is None else self.parser_dim,
            num_heads=self.num_heads,
            num_layers=self.parser_layers,
            attention=self.parser_attention,
            attention_options=self.parser_options,
            norm=self.norm,
            dropout=self.dropout,
            checkpointing=self.checkpointing,
        )
