"""What every token receives from each modality, read from a layer by blocks of rows.

Four weightings say what a key contributes to a receiver:

- ``"attention"``: the weight ``A_ij``; rows are normalised;
- ``"norm"``: ``‖A_ij v_j W_o‖``, so that a key with a tiny value counts little;
- ``"energy"``: ``A_ij²``, which also exists for signed weights;
- ``"gradient"``: ``max(0, A_ij ∂L/∂A_ij)``, relevance for one output.

Layers of this library of the form ``A v`` are read by putting indicators of modalities in place of
the values, which costs one forward of the layer and forms no ``n × n`` matrix.
"""

import copy
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from primal_attention.analysis.flow.shares import (
    SampleFlow,
    expected_sums,
    membership,
    visible_counts,
)
from primal_attention.attention import MultiHeadAttention
from primal_attention.hosts import CapturedLayer
from primal_attention.hosts.captured import WeightsLayer

__all__ = [
    "FlowWeighting",
    "GivenLayer",
    "LayerReader",
    "SignedWeightsError",
    "Visibility",
    "value_norms",
]

FlowWeighting = Literal["attention", "norm", "energy", "gradient"]
Visibility = Literal["all", "causal", "weights"]
"""What a token can see: every key, no later key, or every key with a weight above zero."""

_NUMBERS = 2**22
"""Numbers in a block of rows: 32 MB in float64."""


_PROBES = 16
"""Columns of weights that are looked at where the others are not formed."""


class SignedWeightsError(ValueError):
    """Weights below zero have no shares."""


class GivenLayer(WeightsLayer):
    """Attention weights that are given as a tensor.

    Args:
        weights: Weights of all heads; receivers are rows.
        keep: ``True`` where a key is a real token.
        query_keep: The same for queries; by default that of the keys.
        name: Name of the layer.
        is_causal: Whether no query attends to a later key.
        output: Output of the layer, where it is needed.
        values: Values of the heads, where they are needed.

    Example:
        >>> layer = GivenLayer(torch.eye(3).expand(1, 2, 3, 3), torch.tensor([[True, True, False]]))
        >>> layer.weights().shape
        torch.Size([2, 2, 2])
    """

    def __init__(
        self,
        weights: Float[Tensor, "b h n m"],
        keep: Bool[Tensor, "b m"],
        *,
        query_keep: Bool[Tensor, "b n"] | None = None,
        name: str = "",
        is_causal: bool = False,
        output: Tensor | None = None,
        values: Float[Tensor, "b h m v"] | None = None,
    ) -> None:
        query_keep = keep if query_keep is None else query_keep
        super().__init__(weights, values, keep=keep, query_keep=query_keep, is_causal=is_causal)
        self.name = name
        if output is not None:
            self.output = output

    def values(self, sequence: int = 0) -> Float[Tensor, "h m v"]:
        """Return the values of the real keys."""
        if self._v is None:
            raise ValueError(
                f"{self.name or 'The layer'} is given by its weights alone; weighting='norm' needs "
                "values: call modality_flow(model, batch)."
            )
        return super().values(sequence)

    def is_triangular(self) -> bool:
        """Return whether no query has a weight on a later key; queries are the last tokens."""
        if int(self.query_keep.sum(1).max()) < 2:
            return False
        before = (self.keep.sum(1) - self.query_keep.sum(1)).tolist()
        return not any(
            bool(weights[:, :, before[sequence] + rows.start + 1 :].triu(0).any())
            for sequence in range(len(self))
            for rows, weights in self.row_blocks(sequence)
        )


def value_norms(
    values: Float[Tensor, "h m v"], out: Float[Tensor, "c hv"] | None
) -> Float[Tensor, "h m"]:
    """Return ``‖v_j W_o‖`` of every head and key; without an output map, ``‖v_j‖``."""
    if out is None:
        return values.norm(dim=-1)
    h, _, v = values.shape
    by_head = out.double().unflatten(1, (h, v))  # [c h v]
    # ‖v W‖² from the v × v Gram matrix, so that no [h m c] tensor is formed
    gram = torch.einsum("chv,chw->hvw", by_head, by_head)
    return torch.einsum("hmv,hvw,hmw->hm", values, gram, values).clamp_min(0).sqrt()


@dataclass(frozen=True)
class LayerReader:
    """One layer, ready to be read: what it weighs, and what its tokens can see."""

    layer: CapturedLayer
    receivers: Int[Tensor, "b n"]
    """Modality of the queries; negative for none."""
    senders: Int[Tensor, "b m"]
    """Modality of the keys."""
    count: int
    """Number of modalities."""
    weighting: FlowWeighting = "attention"
    visibility: Visibility = "all"
    out: Float[Tensor, "c hv"] | None = None
    """Output map of the layer, for norms."""
    has_norms: bool = False
    """Whether the weights hold the norms already."""

    def received_by(self, sequence: int) -> Float[Tensor, "n M"]:
        """Return the indicator of the queries of a sequence."""
        keep = self.layer.query_keep[sequence]
        return membership(self.receivers[sequence][keep], self.count)

    def sent_by(self, sequence: int) -> Float[Tensor, "m M"]:
        """Return the indicator of the keys of a sequence."""
        return membership(self.senders[sequence][self.layer.keep[sequence]], self.count)

    def sample(self, sequence: int) -> SampleFlow:
        """Return the sums of one sequence."""
        receivers, senders = self.received_by(sequence), self.sent_by(sequence)
        sums, counts = self.sums(sequence, senders)
        if self.weighting == "attention":
            sums = _stochastic(sums)
        power = 2 if self.weighting == "energy" else 1
        return SampleFlow(
            torch.einsum("na,hnc->hac", receivers, sums),
            expected_sums(receivers, counts, power=power),
        )

    def sums(
        self, sequence: int, columns: Float[Tensor, "m k"]
    ) -> tuple[Float[Tensor, "h n k"], Float[Tensor, "n M"]]:
        """Return the weighted sums of columns for every query, and what each query can see.

        Columns of keys without a modality must be zero.
        """
        senders = self.sent_by(sequence)
        if not self._is_own:
            return self._block_sums(sequence, columns, senders)
        # some columns of the weights themselves show whether there are any below zero
        m, k = columns.shape
        count = min(m, _PROBES)
        seen = columns.new_zeros(m, count)
        seen[torch.arange(count) * m // max(count, 1), torch.arange(count)] = 1
        found = self._own_sums(sequence, torch.cat([columns, seen], 1))
        self._check_sign(found)
        counts = visible_counts(senders, found.shape[1], is_causal=self.visibility == "causal")
        return found[..., :k], counts

    def _check_sign(self, weights: Tensor) -> None:
        if self.weighting == "attention" and bool((weights < -1e-9 * weights.abs().max()).any()):
            raise SignedWeightsError(
                f"{self.layer.name or 'The layer'} has weights below zero, which have no shares; "
                "use weighting='energy'."
            )

    def _block_sums(
        self, sequence: int, columns: Tensor, senders: Tensor
    ) -> tuple[Float[Tensor, "h n k"], Float[Tensor, "n M"]]:
        norms = None
        if self.weighting == "norm" and not self.has_norms:
            norms = value_norms(self.layer.values(sequence), self.out)
        size = max(16, min(512, _NUMBERS // max(self.layer.num_heads * len(columns), 1)))
        n = int(self.layer.query_keep[sequence].sum())
        sums = columns.new_zeros(self.layer.num_heads, n, columns.shape[1])
        counts = visible_counts(senders, n, is_causal=self.visibility == "causal").clone()
        for rows, weights in self.layer.row_blocks(sequence, size=size):
            if self.visibility == "weights":
                counts[rows] = (weights > 0).any(0).double() @ senders
            self._check_sign(weights)
            if self.weighting == "energy":
                weights = weights.square()
            elif norms is not None:
                weights = weights * norms[:, None]
            sums[:, rows] = weights @ columns
        return sums, counts

    @property
    def _is_own(self) -> bool:
        """Whether the layer computes ``A v`` for any values."""
        layer = self.layer.layer
        # a layer that projects values in its own way is read by rows
        is_plain = isinstance(layer, MultiHeadAttention) and (
            type(layer)._attend is MultiHeadAttention._attend
        )
        return is_plain and self.weighting in ("attention", "norm")

    @torch.no_grad()
    def _own_sums(self, sequence: int, columns: Float[Tensor, "m k"]) -> Float[Tensor, "h n k"]:
        """Return ``A`` times the columns from one forward of the layer."""
        layer = self.layer.layer
        if not isinstance(layer, MultiHeadAttention):
            raise TypeError(f"{type(layer).__name__} does not mix given values.")
        values = columns.expand(layer.num_heads, -1, -1)
        if self.weighting == "norm":
            norms = value_norms(self.layer.values(sequence), self.out)
            values = values * norms[:, :, None]
        # padding is cut: then the order of the values is that of the keys for every mechanism
        x, context, _, is_causal, rotary = self.layer.real_inputs(sequence)[:5]
        extra = {"is_causal": is_causal} | ({} if rotary is None else {"rotary": rotary})
        twin = _with_values(layer, values.transpose(0, 1).flatten(1)[None])
        other = None if context is None else context.double()
        found: Tensor = twin(x.double(), other, **extra)[0]
        return found.unflatten(-1, (layer.num_heads, -1)).transpose(0, 1)


class _Values(nn.Module):
    """A projection that returns given values, whatever the tokens."""

    def __init__(self, values: Float[Tensor, "1 m hv"]) -> None:
        super().__init__()
        self.values = values

    def forward(self, x: Tensor) -> Tensor:
        return self.values


def _with_values(layer: MultiHeadAttention, values: Float[Tensor, "1 m hv"]) -> nn.Module:
    """Return a copy of a layer in float64 that mixes given values and has no output map."""
    twin = copy.deepcopy(layer).double().eval()
    twin.set_submodule("v_proj", _Values(values))
    twin.set_submodule("out_proj", nn.Identity())
    return twin


def _stochastic(sums: Float[Tensor, "h n k"]) -> Float[Tensor, "h n k"]:
    """Return rows that sum to one, or to zero where a query sees nothing."""
    total = sums.sum(-1, keepdim=True)
    return sums / torch.where(total > 0, total, 1.0)
