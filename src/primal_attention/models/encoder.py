"""An encoder that classifies sequences of any length, with any attention in any layer.

PrimalFormer, Primal.+ and their softmax twin (Chen et al. 2023) are one line apart::

    EncoderConfig(num_classes=9, num_features=12)                          # every layer primal
    EncoderConfig(num_classes=9, num_features=12, primal_layers="last:1")  # softmax, primal on top
    EncoderConfig(num_classes=9, num_features=12, attention="softmax")     # the twin
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from primal_attention.attention import Aux, PublishesTerms, attention_entry
from primal_attention.functional.precision import accumulator
from primal_attention.models.blocks import EncoderBlock
from primal_attention.models.positions import sinusoidal_positions

__all__ = ["ClassifierOutput", "EncoderClassifier", "EncoderConfig"]


@dataclass(frozen=True)
class EncoderConfig:
    """What an :class:`EncoderClassifier` is made of.

    Example:
        >>> EncoderConfig(num_classes=9, num_features=12, primal_layers="last:1").layer_attentions
        ('softmax', 'primal')
    """

    num_classes: int
    """Classes to tell apart."""
    num_features: int | None = None
    """Channels of each token, for inputs ``[b n features]``; give this or ``vocab_size``."""
    vocab_size: int | None = None
    """Distinct token ids, for inputs ``[b n]``; give this or ``num_features``."""
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
    """Blocks that use ``attention``: ``"all"``, ``"last:k"`` or indices. The others use softmax."""
    is_causal: bool = False
    """Let no token see a later one; ``primal-static`` needs it to mix tokens at all."""
    dropout: float = 0.1
    """Probability of dropping an element of each branch in training."""
    checkpointing: bool = False
    """Recompute every block in backward: less memory, about a third more time."""

    def __post_init__(self) -> None:
        for name in ("num_classes", "num_features", "vocab_size", "dim", "num_heads", "num_layers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if (self.num_features is None) == (self.vocab_size is None):
            raise ValueError(
                f"Give exactly one of num_features and vocab_size, got {self.num_features} and "
                f"{self.vocab_size}: num_features for inputs [b n features], vocab_size for ids."
            )
        if self.hidden_dim is not None and self.hidden_dim < 1:
            raise ValueError(f"hidden_dim must be at least 1, got {self.hidden_dim}.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}.")
        attention_entry(self.attention)
        _chosen(self.primal_layers, self.num_layers)

    @property
    def layer_attentions(self) -> tuple[str, ...]:
        """The attention of every block, first to last."""
        chosen = _chosen(self.primal_layers, self.num_layers)
        return tuple(self.attention if i in chosen else "softmax" for i in range(self.num_layers))


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


@dataclass(frozen=True)
class ClassifierOutput:
    """What a classifier returns."""

    logits: Float[Tensor, "b classes"]
    """Unnormalised log-probabilities."""
    aux_loss: Float[Tensor, ""] | None = None
    """Mean regulariser of the layers, unweighted, as ``ksvd_loss`` returns it; ``None`` outside
    training or if no layer has one."""
    hidden: Float[Tensor, "b n c"] | None = None
    """Normalised stream after the last block, if it was asked for."""


torch.export.register_dataclass(ClassifierOutput)


class EncoderClassifier(PublishesTerms):
    """Classify sequences: project, add positions, ``num_layers`` blocks, mean over real tokens.

    Positions count real tokens only and the mean runs over them, so padding on either side changes
    nothing. In training the regularisers of all layers are published once, for ``ksvd_loss``.

    Args:
        config: What the model is made of.
        device: Where to create the parameters.
        dtype: Type of the parameters.

    Example:
        >>> import primal_attention as pa
        >>> model = EncoderClassifier(EncoderConfig(num_classes=3, num_features=5, dim=16))
        >>> x, keep = torch.randn(2, 9, 5), torch.arange(9) < torch.tensor([[9], [4]])
        >>> output = model(x, key_mask=keep)
        >>> loss = output.logits.logsumexp(-1).mean() + 0.1 * pa.ksvd_loss(model)
    """

    def __init__(self, config: EncoderConfig, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.config = config
        dim, factory = config.dim, {"device": device, "dtype": dtype}
        self.embed: nn.Module
        if config.vocab_size is not None:
            self.embed = nn.Embedding(config.vocab_size, dim, **factory)
        else:
            self.embed = nn.Linear(config.num_features or 0, dim, **factory)
        self.blocks = nn.ModuleList(
            EncoderBlock(
                dim,
                config.num_heads,
                attention=name,
                attention_options=config.attention_options if name == config.attention else None,
                hidden_dim=config.hidden_dim,
                dropout=config.dropout,
                **factory,
            )
            for name in config.layer_attentions
        )
        self.norm = nn.LayerNorm(dim, **factory)
        self.head = nn.Linear(dim, config.num_classes, **factory)

    def forward(
        self,
        x: Float[Tensor, "b n features"] | Int[Tensor, "b n"],
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        return_hidden: bool = False,
    ) -> ClassifierOutput:
        """Return the logits of every sequence.

        Args:
            x: Channels, or token ids if the model has a vocabulary.
            key_mask: ``True`` where a token is real; what the other slots hold does not matter.
            return_hidden: Also return the stream after the last block.
        """
        self._check(x, key_mask)
        x = self._embed(x, key_mask)
        terms: dict[str, Tensor] = {}
        for i, block in enumerate(self.blocks):
            x, aux = self._run(block, x, key_mask)
            if aux is not None:
                terms[f"blocks.{i}.attention"] = aux.loss
        x = self.norm(x)
        aux_loss = torch.stack(list(terms.values())).mean() if terms else None
        if terms:
            self.publish(terms)
        return ClassifierOutput(
            self.head(_masked_mean(x, key_mask)), aux_loss, x if return_hidden else None
        )

    def _embed(self, x: Tensor, key_mask: Tensor | None) -> Float[Tensor, "b n c"]:
        if key_mask is None:
            position = torch.arange(x.shape[1], device=x.device)
        else:
            # where, not multiply: a NaN or an id out of range in a padded slot must not survive
            keep = key_mask if x.dim() == 2 else key_mask[:, :, None]
            x = torch.where(keep, x, 0)
            position = (key_mask.cumsum(1) - 1).clamp_min(0)
        x = self.embed(x)
        return x + sinusoidal_positions(position, self.config.dim).to(x.dtype)

    def _run(self, block: Any, x: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Aux | None]:
        wants_term = self.training and block.attention.capabilities.aux_loss
        options: dict[str, Any] = {"key_mask": key_mask, "is_causal": self.config.is_causal}
        options["return_aux"] = wants_term
        if self.config.checkpointing and self.training:
            result = checkpoint(block, x, use_reentrant=False, **options)
        else:
            result = block(x, **options)
        return result if wants_term else (result, None)

    def _check(self, x: Tensor, key_mask: Tensor | None) -> None:
        config = self.config
        if config.vocab_size is not None:
            if x.dim() != 2 or x.is_floating_point():
                raise ValueError(
                    f"x must hold token ids of shape [batch, tokens], got {x.dtype} "
                    f"{tuple(x.shape)}; configure num_features for real-valued channels."
                )
        elif x.dim() != 3 or x.shape[-1] != config.num_features:
            raise ValueError(
                f"x must have shape [batch, tokens, {config.num_features}], got {tuple(x.shape)}; "
                "add the missing axis or set num_features."
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


def _masked_mean(
    x: Float[Tensor, "b n c"], key_mask: Bool[Tensor, "b n"] | None
) -> Float[Tensor, "b c"]:
    """Return the mean over real tokens; zero for a sequence without any."""
    wide = x.to(accumulator(x))
    if key_mask is None:
        return (wide.sum(1) / max(x.shape[1], 1)).to(x.dtype)
    total = torch.where(key_mask[:, :, None], wide, 0.0).sum(1)
    return (total / key_mask.sum(1, keepdim=True).clamp_min(1)).to(x.dtype)
