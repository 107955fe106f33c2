"""Numbers of parameters of Transformer blocks, and sizes written as ``"30M"``."""

import math
import re
from dataclasses import dataclass

from primal_attention.support.command import did_you_mean

__all__ = ["Block", "parse_params", "show_params"]

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_LOW_RANK = ("linformer", "nystromformer", "skyformer")
_KNOWN = ("softmax", "linear", "primal", *_LOW_RANK)


def parse_params(params: str | float) -> float:
    """Return a number of parameters from a number or a text such as ``"30M"`` or ``"1.5B"``.

    Example:
        >>> parse_params("1.5B"), parse_params(30_000_000)
        (1500000000.0, 30000000.0)
    """
    if isinstance(params, str):
        found = re.fullmatch(r"\s*([\d_.]+(?:e[+-]?\d+)?)\s*([kmbgt]?)\s*", params, re.IGNORECASE)
        try:
            value = float(found[1]) * _UNITS[found[2].upper()] if found else math.nan
        except ValueError:
            value = math.nan
    else:
        value = float(params)
    if not 0 < value < math.inf:
        raise ValueError(
            f"params must be a positive number of parameters, got {params!r}; write 30000000, "
            "'30M' or '1.5B'."
        )
    return value


def show_params(params: float) -> str:
    """Return a number of parameters as short text.

    Example:
        >>> show_params(29_900_000), show_params(1.5e9), show_params(800)
        ('29.9M', '1.5B', '800')
    """
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if params >= 0.9995 * scale:
            return f"{params / scale:.3g}{unit}"
    return f"{params:.0f}"


@dataclass(frozen=True)
class Block:
    """Parameters of one block: attention, perceptron and two norms."""

    attention: str = "softmax"
    """``softmax``, ``linear``, ``primal``, or a low-rank mechanism with the maps of softmax."""
    head_width: int = 64
    """Width of a head."""
    rank: int | None = None
    """Directions of a primal head (by default half its width), or rank of a low-rank one."""
    ffn_ratio: float = 4.0
    """Width inside the perceptron over the model width."""
    gated: bool = False
    """Whether the perceptron has a gate, and with it a third matrix."""

    def __post_init__(self) -> None:
        if self.attention == "primal-static":
            raise ValueError(
                "primal-static mixes no tokens without order, so its layers are no depth of "
                "attention: their separation rank is 1 at every depth. Plan for 'primal' instead."
            )
        if self.attention not in _KNOWN:
            raise ValueError(
                f"attention must be one of {', '.join(_KNOWN)}, got {self.attention!r}."
                f"{did_you_mean(self.attention, _KNOWN)} Mechanisms with four square maps count as "
                "'softmax'."
            )
        for name in ("head_width", "rank", "ffn_ratio"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}.")

    @property
    def is_low_rank(self) -> bool:
        """Whether the mechanism limits the rank of the attention matrix."""
        return self.attention in _LOW_RANK

    def params(self, width: float, hidden: float | None = None) -> float:
        """Return the number of parameters of a block.

        Args:
            width: Model width; need not be an integer.
            hidden: Width inside the perceptron; by default from ``ffn_ratio``.

        Example:
            >>> Block().params(768) / 768**2 > 12
            True
        """
        hidden = self.ffn_ratio * width if hidden is None else hidden
        if self.gated:
            # as in today's decoders: no biases, norms without shift
            return self._attention(width) + 3 * width * hidden + 2 * width
        return self._attention(width) + 2 * width * hidden + hidden + width + 4 * width

    def hidden_for(self, width: float, params: float) -> float:
        """Return the width inside the perceptron that gives a block this many parameters."""
        rest = params - self.params(width, 0.0)
        return rest / (3 * width if self.gated else 2 * width + 1)

    def _attention(self, width: float) -> float:
        bias = 0 if self.gated else 1
        if self.attention != "primal":
            return 4 * (width**2 + bias * width)
        p = self.head_width
        heads, s = width / p, self.rank or max(p // 2, 1)
        # the default layer has 2 s codes for each direction
        return 3 * (width**2 + width) + 4 * heads * s * s + heads * s + (2 * s + 1) * p
