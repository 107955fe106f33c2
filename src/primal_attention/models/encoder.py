"""Encoders that classify sequences of any length, one at a time or in pairs."""

from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.types import Device

from primal_attention.attention.documents import Documents
from primal_attention.functional.precision import accumulator
from primal_attention.kernels.base import Factory
from primal_attention.models.base import ModelOutput
from primal_attention.models.config import EncoderConfig
from primal_attention.models.sequence import SequenceModel

__all__ = ["DualTowerClassifier", "EncoderClassifier"]


class _Classifier(SequenceModel):
    """A head on one vector per sequence."""

    config_class: ClassVar[type[EncoderConfig]] = EncoderConfig
    config: EncoderConfig
    vectors: ClassVar[int] = 1
    """Vectors of the model's width in the input of the head."""

    def __init__(
        self, config: EncoderConfig, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        factory: Factory = {"device": device, "dtype": dtype}
        super().__init__(
            config,
            num_features=config.num_features,
            vocab_size=config.vocab_size,
            is_causal=config.is_causal,
            **factory,
        )
        width = self.vectors * config.dim
        self.head: nn.Module
        if config.head_dim is None:
            self.head = nn.Linear(width, config.num_classes, **factory)
        else:
            self.head = nn.Sequential(
                nn.Linear(width, config.head_dim, **factory),
                nn.GELU(),
                nn.Linear(config.head_dim, config.num_classes, **factory),
            )

    def _pool(
        self,
        x: Float[Tensor, "b n c"],
        key_mask: Bool[Tensor, "b n"] | None,
        document_ids: Int[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "_ c"]:
        """Return one vector for each row, or for each document."""
        pool = _mean if self.config.pooling == "mean" else _last
        if document_ids is None:
            return pool(x, key_mask)
        return Documents.find(document_ids).reduce(x, key_mask, pool)


class EncoderClassifier(_Classifier):
    """Classify sequences: embed, ``num_layers`` blocks, mean over real tokens, linear head.

    Padding on either side changes nothing. In training the regularisers of all layers are
    published once, for ``ksvd_loss``.

    Args:
        config: Configuration of the model.
        device: Where to create the parameters.
        dtype: Type of the parameters.

    Example:
        >>> import primal_attention as pa
        >>> model = EncoderClassifier(EncoderConfig(num_classes=3, num_features=5, dim=16))
        >>> x, keep = torch.randn(2, 9, 5), torch.arange(9) < torch.tensor([[9], [4]])
        >>> output = model(x, key_mask=keep)
        >>> loss = output.logits.logsumexp(-1).mean() + 0.1 * pa.ksvd_loss(model)
    """

    def forward(
        self,
        x: Float[Tensor, "b n features"] | Int[Tensor, "b n"],
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        document_ids: Int[Tensor, "b n"] | None = None,
        return_hidden: bool = False,
    ) -> ModelOutput:
        """Return the logits ``[b classes]`` of every sequence, or of every document.

        Args:
            x: Channels, or token ids if the model has a vocabulary.
            key_mask: ``True`` where a token is real; the content of the other slots is ignored.
            document_ids: Document of each token, if rows hold several. The logits are those of the
                documents, in the order of rows and, in a row, of ids.
            return_hidden: Also return the stream after the last block.
        """
        hidden, aux_loss = self.encode(x, key_mask, document_ids)
        logits = self.head(self._pool(hidden, key_mask, document_ids))
        return ModelOutput(logits, aux_loss, hidden if return_hidden else None)


class DualTowerClassifier(_Classifier):
    """Classify pairs of sequences, read by one encoder: the Retrieval task of Long Range Arena.

    The input of the head is ``[a, b, a · b, a − b]`` of the two vectors. Both sequences run in one
    batch, so the regulariser is the mean over both.

    Args:
        config: Configuration of the model.
        device: Where to create the parameters.
        dtype: Type of the parameters.

    Example:
        >>> model = DualTowerClassifier(EncoderConfig(num_classes=2, vocab_size=9, dim=16))
        >>> x, other = torch.randint(9, (3, 7)), torch.randint(9, (3, 5))
        >>> model(x, other).logits.shape
        torch.Size([3, 2])
    """

    vectors: ClassVar[int] = 4

    def forward(
        self,
        x: Float[Tensor, "b n features"] | Int[Tensor, "b n"],
        other: Float[Tensor, "b m features"] | Int[Tensor, "b m"],
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        other_mask: Bool[Tensor, "b m"] | None = None,
    ) -> ModelOutput:
        """Return the logits ``[b classes]`` of every pair.

        Args:
            x: First sequences: channels, or token ids if the model has a vocabulary.
            other: Second sequences, of any length.
            key_mask: ``True`` where a token of ``x`` is real.
            other_mask: ``True`` where a token of ``other`` is real.
        """
        self._check(x, key_mask)
        self._check(other, other_mask)
        both, mask = _stack(x, other, key_mask, other_mask)
        hidden, aux_loss = self.encode(both, mask)
        a, b = self._pool(hidden, mask).chunk(2)
        return ModelOutput(self.head(torch.cat([a, b, a * b, a - b], dim=-1)), aux_loss)


def _stack(
    x: Tensor, other: Tensor, key_mask: Tensor | None, other_mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return two batches as one, the shorter padded at the end; no mask if none is needed."""
    if key_mask is None and other_mask is None and x.shape[1] == other.shape[1]:
        return torch.cat([x, other]), None
    n = max(x.shape[1], other.shape[1])
    tokens, masks = [], []
    for sequence, mask in ((x, key_mask), (other, other_mask)):
        missing = n - sequence.shape[1]
        real = torch.ones(sequence.shape[:2], dtype=torch.bool, device=x.device)
        tail = (0, missing) if sequence.dim() == 2 else (0, 0, 0, missing)
        tokens.append(nn.functional.pad(sequence, tail))
        masks.append(nn.functional.pad(real if mask is None else mask, (0, missing)))
    return torch.cat(tokens), torch.cat(masks)


def _mean(x: Float[Tensor, "b n c"], key_mask: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b c"]:
    """Return the mean over real tokens; zero for a sequence without any."""
    wide = x.to(accumulator(x))
    if key_mask is None:
        return (wide.sum(1) / max(x.shape[1], 1)).to(x.dtype)
    total = torch.where(key_mask[:, :, None], wide, 0.0).sum(1)
    return (total / key_mask.sum(1, keepdim=True).clamp_min(1)).to(x.dtype)


def _last(x: Float[Tensor, "b n c"], key_mask: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b c"]:
    """Return the last real token; zero for a sequence without any."""
    if key_mask is None:
        key_mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    # real, and no real one after it
    is_last = key_mask & (key_mask.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(is_last[:, :, None], x, 0.0).sum(1)
