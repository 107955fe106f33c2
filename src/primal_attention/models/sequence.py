"""Models of sequences: embedding, positions, blocks, a last norm."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.types import Device

from primal_attention.attention import Rotary, attention_entry
from primal_attention.attention.documents import Documents, check_document_ids
from primal_attention.kernels.base import Factory
from primal_attention.models.base import PretrainedModel
from primal_attention.models.config import SequenceConfig
from primal_attention.models.depth_rule import warn_of_depth
from primal_attention.models.positions import rotary_positions, sinusoidal_positions
from primal_attention.models.stack import BlockStack

__all__ = ["Encoded", "SequenceModel"]


class Encoded(NamedTuple):
    """Output of the blocks for a sequence."""

    hidden: Float[Tensor, "b n c"]
    """The normalised stream after the last block."""
    aux_loss: Float[Tensor, ""] | None
    """Mean regulariser of the layers; ``None`` outside training or if no layer has one."""


class SequenceModel(PretrainedModel):
    """Embedding, positions, blocks and a last norm; a subclass adds the head.

    Positions count real tokens only, so padding on either side changes nothing. In training the
    regularisers of all layers are published once, for ``ksvd_loss``. A model of tokens that is much
    shallower or deeper than its size suggests gives a
    :class:`~primal_attention.models.depth_rule.DepthNotice`.

    Args:
        config: Configuration of the model.
        num_features: Channels of each token, for inputs ``[b n features]``.
        vocab_size: Distinct token ids, for inputs ``[b n]``.
        is_causal: Let no output depend on a later token.
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
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config, self.is_causal = config, is_causal
        factory: Factory = {"device": device, "dtype": dtype}
        dim = config.dim
        self.embed: nn.Module
        if vocab_size is not None:
            self.embed = nn.Embedding(vocab_size, dim, **factory)
        else:
            self.embed = nn.Linear(num_features or 0, dim, **factory)
        if config.max_length is not None:
            self.position_table = nn.Parameter(torch.empty(config.max_length, dim, **factory))
            nn.init.normal_(self.position_table, std=0.02)
        self.blocks = BlockStack(config, **factory)
        self.norm = nn.LayerNorm(dim, **factory)
        warn_of_depth(self.mixing_layers, dim, vocab_size)

    @property
    def mixing_layers(self) -> int:
        """Number of blocks whose attention lets tokens influence each other."""
        return sum(
            self.is_causal or attention_entry(name).capabilities.mixes_without_order
            for name in self.config.layer_attentions
        )

    def encode(
        self,
        x: Float[Tensor, "b n features"] | Int[Tensor, "b n"],
        key_mask: Bool[Tensor, "b n"] | None = None,
        document_ids: Int[Tensor, "b n"] | None = None,
    ) -> Encoded:
        """Return the stream after the last block, and publish the regularisers in training.

        Args:
            x: Channels, or token ids if the model has a vocabulary.
            key_mask: ``True`` where a token is real; the content of the other slots is ignored.
            document_ids: Document of each token, if rows hold several; positions begin again in
                each.
        """
        self._check(x, key_mask, document_ids)
        real = _real(key_mask, document_ids)
        position = _count(x, real, document_ids)
        if document_ids is not None and position.numel():
            self._check_length(int(position.max()) + 1)
        hidden, terms = self.blocks(
            self._embed(x, position, real),
            key_mask=key_mask,
            is_causal=self.is_causal,
            rotary=self._rotary(position),
            document_ids=document_ids,
        )
        return Encoded(self.norm(hidden), self.collect("blocks", terms))

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

    def _check(
        self, x: Tensor, key_mask: Tensor | None, document_ids: Tensor | None = None
    ) -> None:
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
        if document_ids is not None:
            check_document_ids(document_ids, x.shape[:2])
        else:
            self._check_length(x.shape[1])
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

    def _check_length(self, tokens: int) -> None:
        longest = self.config.max_length
        if longest is not None and tokens > longest:
            raise ValueError(
                f"x has {tokens} tokens, but learned positions end at max_length={longest}; "
                "cut the sequence, or use sinusoidal or rotary positions."
            )


def _real(
    key_mask: Bool[Tensor, "b n"] | None, document_ids: Int[Tensor, "b n"] | None
) -> Bool[Tensor, "b n"] | None:
    """Return which tokens are real by both; ``None`` if all are."""
    if document_ids is None:
        return key_mask
    real = document_ids >= 0
    return real if key_mask is None else real & key_mask


def _count(
    x: Tensor, key_mask: Bool[Tensor, "b n"] | None, document_ids: Int[Tensor, "b n"] | None = None
) -> Int[Tensor, "#b n"]:
    """Return the position of every token among the real ones, of its document."""
    if document_ids is not None and key_mask is not None:
        return Documents.find(document_ids.where(key_mask, -1)).positions()
    if key_mask is None:
        return torch.arange(x.shape[1], device=x.device)[None]
    return (key_mask.cumsum(1) - 1).clamp_min(0)
