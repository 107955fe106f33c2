"""The encoder of a list: affinities, blocks of attention, cosine with the refined query.

    u = W dropout(a) + b        z = Block₂(Block₁(u))        score_i = cos(z₀, z_i)

The encoder is equivariant in the candidates: it has no positions, and the rank of a result enters
only through the anchors. (Ouyang et al., NeurIPS 2021.) The published form has ``input="linear"``,
``affinity="inner"`` and softmax. The default input, means over the first anchors, serves lists with
any number of anchors.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.types import Device

from primal_attention.attention.primal import merge_memories
from primal_attention.models.base import PretrainedModel
from primal_attention.models.stack import BlockStack
from primal_attention.tasks.lists.affinity import Anchors, affinities, running_means
from primal_attention.tasks.lists.settings import ContextConfig

__all__ = [
    "ContextConfig",
    "ContextEncoder",
    "ContextOutput",
    "contrastive_loss",
    "list_loss",
    "reconstruction_loss",
]

_RECONSTRUCTION = 0.2
"""Weight of the reconstruction loss."""


@dataclass(frozen=True)
class ContextOutput:
    """Output of a :class:`ContextEncoder`."""

    scores: Float[Tensor, "b n"]
    """Cosine of each refined token with the refined query, which is token 0."""
    keep: Bool[Tensor, "b n"]
    """Tokens that took part."""
    reconstruction: Float[Tensor, ""] | None = None
    """Mean distance between affinities and their reconstruction, in training."""
    aux_loss: Float[Tensor, ""] | None = None
    """Mean regulariser of primal layers, in training."""


class ContextEncoder(PretrainedModel):
    """Scores of candidates from their affinities to the top of the list.

    Args:
        config: Widths, attention, affinities.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Example:
        >>> encoder = ContextEncoder(ContextConfig()).eval()
        >>> tokens = normalize(torch.randn(2, 9, 5), dim=-1)
        >>> encoder(tokens).scores.shape
        torch.Size([2, 9])
    """

    config_class: ClassVar[type[ContextConfig]] = ContextConfig
    config: ContextConfig

    def __init__(
        self, config: ContextConfig, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.drop = nn.Dropout(config.dropout)
        self.embed = nn.Linear(config.num_inputs, config.dim, **factory)
        self.blocks = BlockStack(config, **factory)
        self.reconstruct = nn.Linear(config.dim, config.num_inputs, **factory)

    def forward(
        self, tokens: Float[Tensor, "b n d"], keep: Bool[Tensor, "b n"] | None = None
    ) -> ContextOutput:
        """Return the scores of all tokens.

        Args:
            tokens: Query and candidates as unit vectors, best first.
            keep: ``True`` where there is a token; real tokens come first.
        """
        if keep is None:
            keep = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        if self.training and self.config.augment:
            tokens, keep = _vary(tokens, keep)
        a = affinities(tokens, keep, self.config.anchors, self.config.affinity)
        return self.score_affinities(a, keep)

    def score_affinities(
        self, a: Float[Tensor, "b n kernels l"], keep: Bool[Tensor, "b n"]
    ) -> ContextOutput:
        """Return the scores of all tokens from their affinities."""
        known = keep.sum(1).clamp_max(self.config.anchors)
        features = torch.where(keep[:, :, None], self.features(a, known), 0.0)
        stream = self.drop(self.embed(self.drop(features)))
        with warnings.catch_warnings():
            if self.config.attention == "primal-static":
                warnings.filterwarnings("ignore", message="static weights")
            hidden, terms = self.blocks(stream, key_mask=keep)
        z = normalize(hidden, dim=-1)
        scores = torch.einsum("bc,bnc->bn", z[:, 0], z)
        distance = None
        if self.training:
            distance = reconstruction_loss(features, self.reconstruct(hidden), keep)
        return ContextOutput(scores, keep, distance, self.collect("blocks", terms))

    def features(
        self, a: Float[Tensor, "b n kernels l"], known: Int[Tensor, " b"]
    ) -> Float[Tensor, "b n f"]:
        """Return the input features of tokens, from affinities to ``known`` anchors."""
        return a.flatten(2) if self.config.input == "linear" else running_means(a, known)

    @torch.no_grad()
    def score_stream(self, blocks: Iterable[Float[Tensor, "n d"]]) -> Float[Tensor, " n"]:
        """Return the scores of one list that is read in blocks; the result is the same.

        Memory ``O(n c)`` for ``n`` tokens, whatever the width of the vectors: each block is read
        once. Softmax attention needs the whole list at once and is refused.

        Args:
            blocks: Tokens in their order; the first block begins with the query and holds all
                anchors, and the graph of the list too if it can (2048 tokens).
        """
        if self.config.attention == "softmax":
            raise ValueError(
                "Softmax attention cannot stream; use attention='primal-dual', or a larger "
                "max_memory."
            )
        streams: list[Tensor] = []
        start, anchors, known = 0, None, torch.zeros(1)
        for block in blocks:
            tokens = block[None]
            if anchors is None:
                keep = torch.ones(tokens.shape[:2], dtype=torch.bool)
                anchors = Anchors(tokens, keep, self.config.anchors, self.config.affinity)
                known = torch.tensor([min(tokens.shape[1], self.config.anchors)])
            a = anchors.compare(tokens, start)
            streams.append(self.embed(self.features(a, known)))
            start += tokens.shape[1]
        for layer in self.blocks:
            streams = _stream_block(layer, streams)
        z = normalize(torch.cat(streams, 1)[0], dim=-1)
        return z @ z[0]


def _stream_block(block: Any, streams: list[Tensor]) -> list[Tensor]:
    """Return the streams after a block; only sums over tokens pass between them."""
    attention = block.attention
    if attention.weights == "static":  # no token sees another
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="static weights")
            return [block(x) for x in streams]
    memory = merge_memories([attention.remember(block._before(x)) for x in streams])
    return [block._after(x, attention.recall(block._before(x), memory)) for x in streams]


def _vary(tokens: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Return lists with noisy vectors, fewer dimensions and random lengths.

    Each list gets its own strength, so the model meets descriptors of many qualities.
    """
    b, n, d = tokens.shape
    device = tokens.device
    noise = 0.4 * torch.rand(b, 1, 1, device=device) / max(d, 1) ** 0.5
    share = 0.5 + 0.5 * torch.rand(b, 1, 1, device=device)
    dimensions = torch.rand(b, 1, d, device=device) < share
    varied = (tokens + noise * torch.randn_like(tokens)) * dimensions
    lengths = torch.randint(-(-n // 4), n + 1, (b, 1), device=device).clamp_min(2)
    keep = keep & (torch.arange(n, device=device) < lengths)
    return normalize(varied, dim=-1), keep


def contrastive_loss(
    scores: Float[Tensor, "b n"],
    relevant: Bool[Tensor, "b n"],
    keep: Bool[Tensor, "b n"],
    *,
    temperature: float = 2.0,
) -> Float[Tensor, ""]:
    """Return ``−log (Σ_relevant e^{s/τ} / Σ_all e^{s/τ})``, mean over lists.

    The query itself is relevant, so no list is without a positive.

    Args:
        scores: Cosines with the query.
        relevant: Which tokens are relevant; token 0, the query, is.
        keep: ``True`` where there is a token.
        temperature: ``τ``.

    Example:
        >>> scores, relevant = torch.zeros(1, 8), torch.arange(8)[None] < 2
        >>> contrastive_loss(scores, relevant, torch.ones(1, 8, dtype=torch.bool)).exp()  # n / P
        tensor(4.)
    """
    logits = (scores / temperature).masked_fill(~keep, -torch.inf)
    relevant = relevant.clone()
    relevant[:, 0] = True
    positive = logits.masked_fill(~relevant, -torch.inf)
    return (logits.logsumexp(1) - positive.logsumexp(1)).mean()


def reconstruction_loss(
    a: Float[Tensor, "b n f"], guess: Float[Tensor, "b n f"], keep: Bool[Tensor, "b n"]
) -> Float[Tensor, ""]:
    """Return the mean distance between affinities and their reconstruction, both of norm one.

    Distances below 0.01 count as 0.01, so the value lies between 0.01 and 2.

    Example:
        >>> a = torch.ones(1, 2, 3)
        >>> reconstruction_loss(a, 2 * a, torch.ones(1, 2, dtype=torch.bool))
        tensor(0.0100)
    """
    squared = (normalize(a, dim=-1) - normalize(guess, dim=-1)).square().sum(-1)
    distances = squared.clamp_min(1e-4).sqrt()
    return distances[keep].mean()


def list_loss(
    output: ContextOutput, labels: Int[Tensor, "b n"], *, temperature: float = 2.0
) -> Float[Tensor, ""]:
    """Return the contrastive loss, and in training a fifth of the reconstruction loss.

    Args:
        output: Output of the encoder.
        labels: 1 for relevant tokens.
        temperature: Temperature of the contrastive loss.

    Example:
        >>> keep = torch.ones(1, 8, dtype=torch.bool)
        >>> output = ContextOutput(torch.zeros(1, 8), keep, torch.tensor(0.5))
        >>> list_loss(output, torch.ones(1, 8, dtype=torch.long))
        tensor(0.1000)
    """
    loss = contrastive_loss(output.scores, labels == 1, output.keep, temperature=temperature)
    if output.reconstruction is None:
        return loss
    return loss + _RECONSTRUCTION * output.reconstruction
