"""The blocks of a model, one after the other, and the regularisers of their layers."""

from typing import Any, ClassVar, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.types import Device
from torch.utils.checkpoint import checkpoint

from primal_attention.attention import Rotary, State
from primal_attention.models.blocks import EncoderBlock
from primal_attention.models.config import StackConfig

__all__ = ["BlockStack", "StackOutput"]


class StackOutput(NamedTuple):
    """The stream after the last block, and the layers' regularisers."""

    hidden: Float[Tensor, "b n c"]
    """The stream, not normalised."""
    terms: dict[str, Float[Tensor, ""]]
    """Regularisers by layer; empty outside training. The model publishes them."""


class BlockStack(nn.ModuleList):
    """A list of blocks that runs as one module; every model of the library uses it.

    Args:
        config: Widths, attentions and options of the blocks.
        device: Where to create the parameters.
        dtype: Type of the parameters.

    Example:
        >>> import torch
        >>> stack = BlockStack(StackConfig(dim=16, num_heads=2, num_layers=3))
        >>> hidden, terms = stack(torch.randn(2, 7, 16))
        >>> hidden.shape, list(terms)[0]
        (torch.Size([2, 7, 16]), '0.attention')
    """

    block_class: ClassVar[type[EncoderBlock]] = EncoderBlock

    def __init__(
        self, config: StackConfig, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(
            self.block_class(
                config.dim,
                config.num_heads,
                attention=name,
                attention_options=options,
                time=config.time_fusion,
                hidden_dim=config.mlp_dim,
                norm=config.norm,
                dropout=config.dropout,
                device=device,
                dtype=dtype,
            )
            for name, options in zip(config.layer_attentions, config.layer_options, strict=True)
        )
        self.checkpointing = config.checkpointing

    def forward(
        self,
        x: Float[Tensor, "b n c"],
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        is_causal: bool = False,
        rotary: Rotary | None = None,
        times: Float[Tensor, "b n"] | None = None,
        document_ids: Int[Tensor, "b n"] | None = None,
    ) -> StackOutput:
        """Return the stream after the last block, and the regularisers in training.

        Args:
            x: The stream before the first block; finite, also at padded positions.
            key_mask: ``True`` where a token is real.
            is_causal: Let no output depend on a later token.
            rotary: Turns of queries and keys, for attentions that take them.
            times: Times of the tokens, for attentions that take them.
            document_ids: Document of each token, if rows hold several.
        """
        options: dict[str, Any] = {"key_mask": key_mask, "is_causal": is_causal}
        options.update(rotary=rotary, times=times)
        if document_ids is not None:
            options["document_ids"] = document_ids
        terms: dict[str, Tensor] = {}
        for i, block in enumerate(self._blocks):
            has_term = self.training and block.attention.capabilities.aux_loss
            if self.checkpointing and self.training:
                x = checkpoint(block, x, use_reentrant=False, return_aux=has_term, **options)
            else:
                x = block(x, return_aux=has_term, **options)
            if has_term:
                x, aux = cast(Any, x)
                terms[f"{i}.attention"] = aux.loss
        return StackOutput(x, terms)

    def init_state(self, batch_size: int) -> tuple[State, ...]:
        """Return the state of every block before the first token."""
        return tuple(block.init_state(batch_size) for block in self._blocks)

    def step(
        self,
        x: Float[Tensor, "b t c"],
        states: tuple[State, ...],
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
        rotary: Rotary | None = None,
        times: Float[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t c"], tuple[State, ...]]:
        """Return the stream of the next tokens, and the states after them."""
        after = []
        for block, state in zip(self._blocks, states, strict=True):
            x, state = block.step(x, state, key_mask=key_mask, rotary=rotary, times=times)
            after.append(state)
        return x, tuple(after)

    @property
    def _blocks(self) -> list[EncoderBlock]:
        return cast(list[EncoderBlock], list(self))
