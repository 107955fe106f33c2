"""What every model of sequences is made of: embedding, positions, blocks, a last norm.

PrimalFormer, Primal.+ and their softmax twin (Chen et al. 2023) are one line apart::

    EncoderConfig(num_classes=9, num_features=12)                          # every layer primal
    EncoderConfig(num_classes=9, num_features=12, primal_layers="last:1")  # softmax, primal on top
    EncoderConfig(num_classes=9, num_features=12, attention="softmax")     # the twin
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from primal_attention.attention import Aux, Rotary, attention_entry, list_attentions
from primal_attention.models.base import PretrainedModel
from primal_attention.models.blocks import EncoderBlock, Norm
from primal_attention.models.positions import (
    ROTARY_ATTENTIONS,
    Positions,
    rotary_positions,
    sinusoidal_positions,
)

__all__ = ["Encoded", "SequenceConfig", "SequenceModel"]


@dataclass(frozen=True, kw_only=True)
class SequenceConfig:
    """The fields that all models of sequences share."""

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
    positions: Positions = "sinusoidal"
    """Positions: sinusoidal or learned vectors, rotary queries and keys, or none."""
    max_length: int | None = None
    """Longest sequence that learned positions can tell; the others take any length."""
    norm: Norm = "pre"
    """Norm before each branch, or after it (post)."""
    dropout: float = 0.1
    """Probability of dropping an element of each branch in training."""
    checkpointing: bool = False
    """Recompute every block in backward: less memory, about a third more time."""

    def __post_init__(self) -> None:
        if isinstance(self.primal_layers, list):
            object.__setattr__(self, "primal_layers", tuple(self.primal_layers))
        for name in ("dim", "num_heads", "num_layers", "hidden_dim", "max_length"):
            self._check_count(name)
        for name, kind in (("positions", Positions), ("norm", Norm)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"{name} must be one of {', '.join(get_args(kind))}, got "
                    f"{getattr(self, name)!r}."
                )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}.")
        if (self.positions == "learned") != (self.max_length is not None):
            raise ValueError(
                f"Learned positions need max_length, and only they have one; got positions="
                f"{self.positions!r} and max_length={self.max_length}."
            )
        for name in self.layer_attentions:
            attention_entry(name)
            if self.positions == "rotary" and name not in ROTARY_ATTENTIONS:
                raise ValueError(
                    f"Rotary positions mean nothing to {name!r}, which does not compare tokens by "
                    f"inner products; use sinusoidal positions, or one of: "
                    f"{', '.join(ROTARY_ATTENTIONS)}."
                )

    def _check_count(self, name: str) -> None:
        value = getattr(self, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")

    def _check_causal(self) -> None:
        for name in self.layer_attentions:
            if not attention_entry(name).capabilities.causal:
                raise ValueError(
                    f"{name!r} cannot run causally: its outputs depend on later tokens. Use one "
                    f"of: {', '.join(list_attentions(causal=True))}."
                )

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


class Encoded(NamedTuple):
    """What the blocks made of a sequence."""

    hidden: Float[Tensor, "b n c"]
    """The normalised stream after the last block."""
    aux_loss: Float[Tensor, ""] | None
    """Mean regulariser of the layers; ``None`` outside training or if no layer has one."""


class SequenceModel(PretrainedModel):
    """Embedding, positions, blocks and a last norm; a subclass adds the head.

    Positions count real tokens only, so padding on either side changes nothing. In training the
    regularisers of all layers are published once, for ``ksvd_loss``.

    Args:
        config: What the model is made of.
        num_features: Channels of each token, for inputs ``[b n features]``.
        vocab_size: Distinct token ids, for inputs ``[b n]``.
        is_causal: Let no token see a later one.
        device: Where to create the parameters.
        dtype: Type of the parameters.
    """

    config: SequenceConfig
    embed_scale: float = 1.0
    """What the embedding is multiplied by."""

    def __init__(
        self,
        config: SequenceConfig,
        *,
        num_features: int | None = None,
        vocab_size: int | None = None,
        is_causal: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.config, self.is_causal = config, is_causal
        dim, factory = config.dim, {"device": device, "dtype": dtype}
        self.embed: nn.Module
        if vocab_size is not None:
            self.embed = nn.Embedding(vocab_size, dim, **factory)
        else:
            self.embed = nn.Linear(num_features or 0, dim, **factory)
        if config.max_length is not None:
            self.position_table = nn.Parameter(torch.empty(config.max_length, dim, **factory))
            nn.init.normal_(self.position_table, std=0.02)
        self.blocks = nn.ModuleList(
            EncoderBlock(
                dim,
                config.num_heads,
                attention=name,
                attention_options=options,
                hidden_dim=config.hidden_dim,
                norm=config.norm,
                dropout=config.dropout,
                **factory,
            )
            for name, options in zip(config.layer_attentions, config.layer_options, strict=True)
        )
        self.norm = nn.LayerNorm(dim, **factory)

    def encode(
        self,
        x: Float[Tensor, "b n features"] | Int[Tensor, "b n"],
        key_mask: Bool[Tensor, "b n"] | None = None,
    ) -> Encoded:
        """Return the stream after the last block, and publish the regularisers in training.

        Args:
            x: Channels, or token ids if the model has a vocabulary.
            key_mask: ``True`` where a token is real; what the other slots hold does not matter.
        """
        self._check(x, key_mask)
        position = _count(x, key_mask)
        x, rotary = self._embed(x, position, key_mask), self._rotary(position)
        terms: dict[str, Tensor] = {}
        for i, block in enumerate(self.blocks):
            x, aux = self._run(block, x, key_mask, rotary)
            if aux is not None:
                terms[f"blocks.{i}.attention"] = aux.loss
        if not terms:
            return Encoded(self.norm(x), None)
        self.publish(terms)
        return Encoded(self.norm(x), torch.stack(list(terms.values())).mean())

    def _embed(
        self, x: Tensor, position: Int[Tensor, "#b n"], key_mask: Tensor | None
    ) -> Float[Tensor, "b n c"]:
        """Return the stream before the first block."""
        if key_mask is not None:
            # where, not multiply: a NaN or an id out of range in a padded slot must not survive
            x = torch.where(key_mask if x.dim() == 2 else key_mask[:, :, None], x, 0)
        x = self.embed_scale * self.embed(x)
        if self.config.positions == "sinusoidal":
            x = x + sinusoidal_positions(position, self.config.dim).to(x.dtype)
        elif self.config.positions == "learned":
            x = x + self.position_table[position]
        return x

    def _rotary(self, position: Int[Tensor, "#b n"]) -> Rotary | None:
        if self.config.positions != "rotary":
            return None
        return rotary_positions(position, self.config.dim // self.config.num_heads)

    def _run(
        self, block: Any, x: Tensor, key_mask: Tensor | None, rotary: Rotary | None
    ) -> tuple[Tensor, Aux | None]:
        wants_term = self.training and block.attention.capabilities.aux_loss
        options: dict[str, Any] = {"key_mask": key_mask, "is_causal": self.is_causal}
        options |= {"rotary": rotary, "return_aux": wants_term}
        if self.config.checkpointing and self.training:
            result = checkpoint(block, x, use_reentrant=False, **options)
        else:
            result = block(x, **options)
        return result if wants_term else (result, None)

    def _check(self, x: Tensor, key_mask: Tensor | None) -> None:
        """Raise for inputs that do not fit the model."""
        if isinstance(self.embed, nn.Embedding):
            if x.dim() != 2 or x.is_floating_point():
                raise ValueError(
                    f"x must hold token ids of shape [batch, tokens], got {x.dtype} "
                    f"{tuple(x.shape)}; configure num_features for real-valued channels."
                )
        elif x.dim() != 3 or x.shape[-1] != self.embed.in_features:
            raise ValueError(
                f"x must have shape [batch, tokens, {self.embed.in_features}], got "
                f"{tuple(x.shape)}; add the missing axis or set num_features."
            )
        longest = self.config.max_length
        if longest is not None and x.shape[1] > longest:
            raise ValueError(
                f"x has {x.shape[1]} tokens, but learned positions end at max_length={longest}; "
                "cut the sequence, or use sinusoidal or rotary positions."
            )
        if key_mask is None:
            return
        if key_mask.dtype != torch.bool:
            raise TypeError(
                f"key_mask must be boolean with True for real tokens, got {key_mask.dtype}; "
                "write mask.bool(), or ~mask if your True marks padding."
            )
        if key_mask.shape != x.shape[:2]:
            raise ValueError(
                f"key_mask must have shape [batch, tokens] = {tuple(x.shape[:2])}, got "
                f"{tuple(key_mask.shape)}."
            )


def _count(x: Tensor, key_mask: Bool[Tensor, "b n"] | None) -> Int[Tensor, "#b n"]:
    """Return the position of every token among the real ones."""
    if key_mask is None:
        return torch.arange(x.shape[1], device=x.device)[None]
    return (key_mask.cumsum(1) - 1).clamp_min(0)
