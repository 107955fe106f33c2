"""Attention matrices of a model on real data, and their singular values.

A matrix is computed from the inputs that reach the layer, so rotary positions, scales and causal
masks are part of it. It has one row and one column for every real token; padding is left
out. A *centred* matrix has its mean over queries and its mean over keys subtracted. This removes
the part of attention that is the same for all queries.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.attention import MultiHeadAttention
from primal_attention.functional import effective_rank
from primal_attention.hosts import Batch, batch_arguments, layer_inputs

__all__ = [
    "MapSpectrum",
    "attention_maps",
    "map_spectra",
    "mass_at_rank",
    "rank_for_mass",
    "singular_values",
]


class MapSpectrum(NamedTuple):
    """Singular values of the attention matrices of one layer, per sequence and head."""

    plain: Float[Tensor, "b h k"]
    """Of the matrices as they are, largest first, zero beyond a sequence's length."""
    centred: Float[Tensor, "b h k"]
    """Of the centred matrices."""

    def ranks(self, centred: bool = False) -> Float[Tensor, " h"]:
        """Return the effective rank of each head, averaged over sequences."""
        return effective_rank(self.centred if centred else self.plain).mean(0)


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
def attention_maps(
    model: nn.Module, batch: Batch, *, sequences: int = 8
) -> dict[str, list[Float[Tensor, "h n m"]]]:
    """Return the attention matrices of every layer of (q, k, v), one per sequence.

    Each matrix takes ``O(n²)`` memory: use a few sequences of moderate length.

    Args:
        model: A model with layers of this library inside. Convert a model of another library to
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
