"""The block of the published code of functional time, for comparisons with it.

    standard:   x ← x + attention(norm(x))                 x ← x + mlp(norm(x))
    published:  x ← norm(x) + attention(norm(x), x)        x ← x + mlp(norm(x)),  last: mlp(norm(x))

Queries are normalised, keys and values are not. The normalised queries are added, and the last
block adds nothing to the output of its perceptron.
"""

from typing import Any, ClassVar, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.types import Device

from primal_attention.attention import Rotary, State, attention_entry, list_attentions
from primal_attention.attention.base import JOINED_TIME
from primal_attention.models import BlockStack, EncoderBlock, StackConfig

__all__ = ["PublishedBlock", "PublishedStack", "check_published"]


class PublishedBlock(EncoderBlock):
    """A block whose norms and residuals are those of the published code."""

    is_last: bool = False

    def forward(
        self,
        x: Float[Tensor, "b n c"],
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        is_causal: bool = False,
        rotary: Rotary | None = None,
        times: Float[Tensor, "b n"] | None = None,
        document_ids: Int[Tensor, "b n"] | None = None,
        return_aux: bool = False,
    ) -> Any:
        """Return the stream after the block; see :class:`EncoderBlock`.

        Queries and keys differ, so that ``is_causal``, ``rotary`` and ``document_ids`` are refused.
        """
        if document_ids is not None:
            raise ValueError(
                "A published block takes one document a row, got document_ids; use an EncoderBlock."
            )
        also = self._also(rotary, times)
        if "times" in also:
            also["context_times"] = times
        also.update(key_mask=key_mask, is_causal=is_causal, return_aux=return_aux)
        queries = self.attention_norm(x)
        y = self.attention(queries, x, **also)
        y, aux = y if return_aux else (y, None)
        x = queries + y
        y = self.mlp(self.mlp_norm(x))
        x = y if self.is_last else x + y
        return (x, aux) if return_aux else x

    def init_state(self, batch_size: int) -> State:
        """Refuse: the published block has no causal form here."""
        raise ValueError("A published block cannot decode step by step; use an EncoderBlock.")


class PublishedStack(BlockStack):
    """The blocks of the published code.

    Args:
        config: Widths, attentions and options of the blocks.
        device: Where to create the parameters.
        dtype: Type of the parameters.
    """

    block_class: ClassVar[type[EncoderBlock]] = PublishedBlock

    def __init__(
        self, config: StackConfig, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        cast(PublishedBlock, self[-1]).is_last = True


def check_published(config: StackConfig) -> None:
    """Raise if an attention cannot take queries that differ from its keys."""
    for name in config.layer_attentions:
        if not attention_entry(name).capabilities.cross:
            raise ValueError(
                f"A published block attends from normalised tokens to others, which {name!r} "
                f"cannot do; use one of: {', '.join(list_attentions(cross=True))}."
            )
    if config.time_fusion not in (None, *JOINED_TIME):
        raise ValueError(
            f"A published block allows time_fusion {', '.join(sorted(JOINED_TIME))} or none, got "
            f"{config.time_fusion!r}: queries and keys are not the same tokens."
        )
