"""Attention matrices of a model on real data, and their singular values.

A matrix is computed from the inputs that reach the layer, so rotary positions, scales and causal
masks are part of it. It has one row and one column for every real token; padding is left
out. A *centred* matrix has its mean over queries and its mean over keys subtracted. This removes
the part of attention that is the same for all queries.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from primal_attention.attention import Attention, MultiHeadAttention, Rotary
from primal_attention.functional import effective_rank
from primal_attention.training.evaluation import eval_mode

__all__ = [
    "Batch",
    "LayerInputs",
    "MapSpectrum",
    "attention_maps",
    "batch_arguments",
    "layer_inputs",
    "map_spectra",
    "mass_at_rank",
    "rank_for_mass",
    "singular_values",
]

Batch = Mapping[str, Any] | Sequence[Any] | Tensor
"""Inputs of a model: keyword arguments, positional arguments, or one tensor."""


class MapSpectrum(NamedTuple):
    """Singular values of the attention matrices of one layer, per sequence and head."""

    plain: Float[Tensor, "b h k"]
    """Of the matrices as they are, largest first, zero beyond a sequence's length."""
    centred: Float[Tensor, "b h k"]
    """Of the centred matrices."""

    def ranks(self, centred: bool = False) -> Float[Tensor, " h"]:
        """Return the effective rank of each head, averaged over sequences."""
        return effective_rank(self.centred if centred else self.plain).mean(0)


class LayerInputs(NamedTuple):
    """Inputs of an attention layer in one forward."""

    x: Float[Tensor, "b n c"]
    context: Float[Tensor, "b m c"] | None
    key_mask: Bool[Tensor, "b m"] | None
    is_causal: bool
    rotary: Rotary | None = None

    @classmethod
    def of_call(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Self:
        """Return the inputs from the arguments of a layer's forward."""
        return cls(
            args[0] if args else kwargs["x"],
            args[1] if len(args) > 1 else kwargs.get("context"),
            kwargs.get("key_mask"),
            bool(kwargs.get("is_causal", False)),
            kwargs.get("rotary"),
        )

    def matrices(self, layer: MultiHeadAttention) -> list[Float[Tensor, "h n m"]]:
        """Return the attention matrix of each sequence, rows and columns of real tokens only.

        Sequences of one length are computed together and without a mask. Every mechanism gives the
        same result for a sequence alone as for the sequence in a padded batch.
        """
        q, k = layer.q_proj(self.x), layer.k_proj(self.x if self.context is None else self.context)
        q, k = (t.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for t in (q, k))
        if self.rotary is not None:
            q, k = self.rotary.turn(q), self.rotary.turn(k)
        keep, is_self = self.key_mask, self.context is None
        if keep is None:
            return list(layer.core.weights(q, k, is_causal=self.is_causal).float())
        lengths = keep.sum(1)
        found = [q.new_zeros(q.shape[1], 0 if is_self else q.shape[2], 0)] * len(q)
        for length in lengths[lengths > 0].unique().tolist():
            chosen = (lengths == length).nonzero().flatten()
            keys = _real_tokens(k, keep, chosen)
            queries = _real_tokens(q, keep, chosen) if is_self else q[chosen]
            weights = layer.core.weights(queries, keys, is_causal=self.is_causal)
            for i, matrix in zip(chosen.tolist(), weights.float(), strict=True):
                found[i] = matrix
        return found


def _real_tokens(t: Tensor, keep: Tensor, chosen: Tensor) -> Float[Tensor, "k h l d"]:
    """Return the real tokens of the chosen sequences, which all have the same number of them."""
    rows = t[chosen].transpose(1, 2)[keep[chosen]]
    return rows.unflatten(0, (len(chosen), -1)).transpose(1, 2)


def mass_at_rank(sigma: Float[Tensor, "*b k"], rank: int) -> Float[Tensor, "*b"]:
    """Return the share of ``Σσ`` in the first ``rank`` singular values.

    Example:
        >>> mass_at_rank(torch.tensor([3.0, 1.0]), 1)
        tensor(0.7500)
    """
    return sigma[..., :rank].sum(-1) / sigma.sum(-1).clamp_min(1e-12)


def rank_for_mass(sigma: Float[Tensor, "*b k"], mass: float) -> Float[Tensor, "*b"]:
    """Return the smallest number of singular values that hold the share ``mass`` of ``Σσ``.

    Example:
        >>> rank_for_mass(torch.tensor([3.0, 1.0]), 0.9)
        tensor(2.)
    """
    share = sigma.cumsum(-1) / sigma.sum(-1, keepdim=True).clamp_min(1e-12)
    return (share < mass).sum(-1).add(1).clamp_max(sigma.shape[-1]).float()


@torch.no_grad()
def layer_inputs(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, LayerInputs]:
    """Return the inputs of every attention layer of this library, in the order of the forward.

    The forward runs in evaluation mode. If it calls a layer twice, the last call counts.

    Example:
        >>> from primal_attention.attention import create_attention
        >>> layer_inputs(create_attention("softmax", 8, 2), torch.randn(1, 5, 8))[""].x.shape
        torch.Size([1, 5, 8])
    """
    found: dict[str, LayerInputs] = {}

    def record(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found[name] = LayerInputs.of_call(args, kwargs)

        return hook

    handles = [
        layer.register_forward_pre_hook(record(name), with_kwargs=True)
        for name, layer in model.named_modules()
        if isinstance(layer, Attention)
    ]
    try:
        with eval_mode(model):
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def batch_arguments(
    batch: Batch, sequences: int | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as positional and keyword arguments of a forward.

    Args:
        batch: Inputs of the model.
        sequences: Number of sequences to keep; by default all.

    Example:
        >>> batch_arguments({"x": torch.ones(3, 1), "is_causal": True}, 1)
        ((), {'x': tensor([[1.]]), 'is_causal': True})
    """

    def cut(value: Any) -> Any:
        return value[:sequences] if isinstance(value, Tensor) else value

    if isinstance(batch, Mapping):
        return (), {key: cut(value) for key, value in batch.items()}
    return tuple(map(cut, [batch] if isinstance(batch, Tensor) else batch)), {}


@torch.no_grad()
def attention_maps(
    model: nn.Module, batch: Batch, *, sequences: int = 8
) -> dict[str, list[Float[Tensor, "h n m"]]]:
    """Return the attention matrices of every layer of (q, k, v), one per sequence.

    Each matrix takes ``O(n²)`` memory: use a few sequences of moderate length.

    Args:
        model: Any model with layers of this library inside. Convert a model of another library to
            ``"softmax"`` first; this does not change its output.
        batch: Inputs of the model; the first axis of every tensor counts sequences.
        sequences: Number of sequences of the batch to measure.

    Returns:
        The matrices by the name of the layer's core, such as ``blocks.0.attention.core``.

    Example:
        >>> from primal_attention.attention import create_attention
        >>> layer = create_attention("softmax", 8, 2)
        >>> [m.shape for m in attention_maps(layer, torch.randn(1, 5, 8))["core"]]
        [torch.Size([2, 5, 5])]
    """
    args, kwargs = batch_arguments(batch, sequences)
    maps = {}
    for name, inputs in layer_inputs(model, *args, **kwargs).items():
        layer = model.get_submodule(name)
        if isinstance(layer, MultiHeadAttention):
            maps[f"{name}.core".lstrip(".")] = inputs.matrices(layer)
    return maps


def singular_values(matrices: Sequence[Float[Tensor, "h n m"]]) -> Float[Tensor, "b h k"]:
    """Return the singular values of each matrix, largest first, padded with zeros to one length.

    Example:
        >>> singular_values([torch.eye(2)[None], torch.ones(1, 1, 1)])
        tensor([[[1., 1.]],
        <BLANKLINE>
                [[1., 0.]]])
    """
    values = [torch.linalg.svdvals(matrix) for matrix in matrices]
    longest = max(v.shape[-1] for v in values)
    return torch.stack([nn.functional.pad(v, (0, longest - v.shape[-1])) for v in values])


def map_spectra(maps: Mapping[str, list[Float[Tensor, "h n m"]]]) -> dict[str, MapSpectrum]:
    """Return the singular values of attention matrices, as they are and centred.

    Example:
        >>> spectrum = map_spectra({"layer": [torch.full((1, 3, 3), 1 / 3)]})["layer"]
        >>> spectrum.plain.round(decimals=3)[0, 0], bool(spectrum.centred.abs().max() < 1e-6)
        (tensor([1., 0., 0.]), True)
    """
    return {
        name: MapSpectrum(
            singular_values(matrices), singular_values([_centre(m) for m in matrices])
        )
        for name, matrices in maps.items()
    }


def _centre(matrix: Float[Tensor, "h n m"]) -> Float[Tensor, "h n m"]:
    matrix = matrix - matrix.mean(1, keepdim=True)
    return matrix - matrix.mean(2, keepdim=True)
