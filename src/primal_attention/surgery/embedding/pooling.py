"""From the hidden states of a text to its vector, as the folder of the model says.

A folder of sentence-transformers lists its modules in ``modules.json``: the encoder, a pooling and
sometimes a normalisation. Every other folder gets the mean over the real tokens.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from primal_attention.hosts import ConversionError
from primal_attention.support.command import UserError
from primal_attention.support.files import read_json

__all__ = ["Pooling", "read_pooling"]

Hidden = Float[Tensor, "b n c"]
Keep = Bool[Tensor, "b n 1"]


def _mean(hidden: Hidden, keep: Keep) -> Float[Tensor, "b c"]:
    # at least one: a text may have no token, and its vector is zero then
    return _sum(hidden, keep) / keep.sum(1).clamp(min=1)


def _sum(hidden: Hidden, keep: Keep) -> Float[Tensor, "b c"]:
    # where, not multiply: converted models leave padded tokens undefined
    return torch.where(keep, hidden, 0.0).sum(1)


def _sum_by_root(hidden: Hidden, keep: Keep) -> Float[Tensor, "b c"]:
    return _sum(hidden, keep) / keep.sum(1).clamp(min=1).sqrt()


def _largest(hidden: Hidden, keep: Keep) -> Float[Tensor, "b c"]:
    return torch.where(keep, hidden, -torch.inf).amax(1).nan_to_num(neginf=0.0)


def _first(hidden: Hidden, keep: Keep) -> Float[Tensor, "b c"]:
    return torch.where(keep[:, 0], hidden[:, 0], 0.0)


_MODES: dict[str, Callable[[Hidden, Keep], Tensor]] = {
    "cls": _first,
    "max": _largest,
    "mean": _mean,
    "mean_sqrt_len_tokens": _sum_by_root,
}
"""Poolings by their names in sentence-transformers, in the order in which it joins several."""

_OLD_NAMES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Switches of files before version 6 of sentence-transformers."""


class Pooling(NamedTuple):
    """How the hidden states of a text become its vector.

    Example:
        >>> hidden, keep = torch.arange(6.0).view(1, 3, 2), torch.tensor([[True, True, False]])
        >>> Pooling().apply(hidden, keep)
        tensor([[1., 2.]])
    """

    modes: tuple[str, ...] = ("mean",)
    """``cls``, ``max``, ``mean``, ``mean_sqrt_len_tokens``; the vectors of several are joined."""
    is_unit: bool = False
    """Whether vectors have length one."""

    def apply(self, hidden: Hidden, keep: Bool[Tensor, "b n"]) -> Float[Tensor, "b p"]:
        """Return the vectors of a batch, not yet of length one.

        Args:
            hidden: Last hidden states, padded at the end.
            keep: ``True`` where a token is real.
        """
        found = [_MODES[mode](hidden.float(), keep[..., None]) for mode in self.modes]
        return torch.cat(found, dim=-1)


def read_pooling(folder: Path) -> Pooling:
    """Return the pooling of the model in a folder; the mean if it is not of sentence-transformers.

    Raises:
        ConversionError: If the folder asks for something else than a pooling and a normalisation.
    """
    if not (folder / "modules.json").is_file():
        return Pooling()
    try:
        return _pooling_of(folder, read_json(folder / "modules.json", list))
    except UserError as error:
        raise ConversionError(str(error)) from error


def _pooling_of(folder: Path, modules: list[object]) -> Pooling:
    """Return the pooling that ``modules.json`` describes; its first module is the encoder."""
    pooling = Pooling()
    for module in modules[1:]:
        about = module if isinstance(module, dict) else {}
        # the module's path changed between versions, the name of its class did not
        kind = str(about.get("type")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = pooling._replace(modes=_modes(folder / str(about.get("path"))))
        elif kind == "Normalize":
            pooling = pooling._replace(is_unit=True)
        else:
            raise ConversionError(
                f"{folder / 'modules.json'} ends with a module {kind[:80]!r}; a pooling and a "
                "normalisation are understood. Embed with sentence-transformers, or remove the "
                "file to take the mean over the tokens."
            )
    return pooling


def _modes(folder: Path) -> tuple[str, ...]:
    path = folder / "config.json"
    content = read_json(path)
    found = content.get("pooling_mode")
    if found is None:
        found = [new for old, new in _OLD_NAMES.items() if content.get(old)]
    modes = [found] if isinstance(found, str) else [str(mode) for mode in found or ["mean"]]
    unknown = [mode for mode in modes if mode not in _MODES]
    if unknown:
        raise ConversionError(
            f"{path} asks for the pooling {unknown[0][:80]!r}; {', '.join(_MODES)} are understood. "
            "Embed with sentence-transformers, or remove modules.json to take the mean."
        )
    return tuple(sorted(modes, key=list(_MODES).index))
