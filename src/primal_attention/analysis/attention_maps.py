"""The attention matrices of a model on real data, seen through their singular values.

Matrices are taken where they arise, from the queries and keys that reach a mechanism, so rotary
positions, scales and masks are in them. Each is cut to the real tokens of its sequence. *Centred*
means that the mean over queries and the mean over keys are taken away: what is left is what
attention does beyond looking at the same tokens from everywhere.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.attention import Core
from primal_attention.functional import effective_rank

__all__ = ["MapSpectrum", "attention_maps", "map_spectra", "mass_at_rank", "rank_for_mass"]


class MapSpectrum(NamedTuple):
    """Singular values of the attention matrices of one layer, per sequence and head."""

    plain: Float[Tensor, "b h k"]
    """Of the matrices as they are, largest first, zero beyond a sequence's length."""
    centred: Float[Tensor, "b h k"]
    """Of the matrices without their means over queries and over keys."""

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
    """Return how many singular values it takes to hold a share of ``Σσ``.

    Example:
        >>> rank_for_mass(torch.tensor([3.0, 1.0]), 0.9)
        tensor(2.)
    """
    share = sigma.cumsum(-1) / sigma.sum(-1, keepdim=True).clamp_min(1e-12)
    return (share < mass).sum(-1).add(1).clamp_max(sigma.shape[-1]).float()


@torch.no_grad()
def attention_maps(
    model: nn.Module, batch: Mapping[str, Any] | Sequence[Any] | Tensor, *, sequences: int = 8
) -> dict[str, list[Float[Tensor, "h n m"]]]:
    """Return the attention matrices of every mechanism of (q, k, v) in a model, cut to real tokens.

    ``O(n²)`` memory: meant for a few sequences of moderate length.

    Args:
        model: Any model with layers of this library inside; a model of another library, converted
            to ``"softmax"``, which changes nothing it computes.
        batch: Keyword arguments of its forward, positional ones, or one tensor.
        sequences: How many sequences of the batch to look at.

    Example:
        >>> from primal_attention.attention import create_attention
        >>> layer = create_attention("softmax", 8, 2)
        >>> [m.shape for m in attention_maps(layer, torch.randn(1, 5, 8))["core"]]
        [torch.Size([2, 5, 5])]
    """
    found: dict[str, list[Tensor]] = {}

    def hook(name: str) -> Any:
        def keep(core: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not isinstance(core, Core) or name in found:
                return
            q, k = (t[:sequences] for t in args[:2])
            mask, causal = kwargs.get("key_mask"), bool(kwargs.get("is_causal", False))
            found[name] = []
            for i in range(len(q)):
                qi, ki = q[i : i + 1], k[i : i + 1]
                if mask is not None:
                    same = q.shape[2] == k.shape[2]
                    qi, ki = qi[:, :, mask[i]] if same else qi, ki[:, :, mask[i]]
                # within the hook a call of the core would call the hook
                found[name].append(_weights(core, qi, ki, causal)[0].float())

        return keep

    cores = {n: m for n, m in model.named_modules() if isinstance(m, Core)}
    handles = [m.register_forward_pre_hook(hook(n), with_kwargs=True) for n, m in cores.items()]
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        if isinstance(batch, Mapping):
            model(**batch)
        elif isinstance(batch, Tensor):
            model(batch)
        else:
            model(*batch)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    return found


def _weights(core: Core, q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    unit = torch.eye(k.shape[2], dtype=q.dtype, device=q.device)
    unit = unit.expand(*k.shape[:2], *unit.shape)
    return core.forward(q, k, unit, is_causal=is_causal)


def map_spectra(maps: Mapping[str, list[Float[Tensor, "h n m"]]]) -> dict[str, MapSpectrum]:
    """Return the singular values of attention matrices, as they are and centred.

    Example:
        >>> spectrum = map_spectra({"layer": [torch.full((1, 3, 3), 1 / 3)]})["layer"]
        >>> spectrum.plain.round(decimals=3)[0, 0], bool(spectrum.centred.abs().max() < 1e-6)
        (tensor([1., 0., 0.]), True)
    """
    spectra = {}
    for name, matrices in maps.items():
        longest = max((min(m.shape[1:]) for m in matrices), default=0)
        rows = []
        for matrix in matrices:
            centred = matrix - matrix.mean(1, keepdim=True)
            centred = centred - centred.mean(2, keepdim=True)
            values = [torch.linalg.svdvals(m) for m in (matrix, centred)]
            pad = longest - values[0].shape[-1]
            rows.append([nn.functional.pad(v, (0, pad)) for v in values])
        spectra[name] = MapSpectrum(*(torch.stack(side) for side in zip(*rows, strict=True)))
    return spectra
