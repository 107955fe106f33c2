"""The unit of time: from timestamps in seconds, days or years to gaps of order one."""

import math
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.kernels.time_base import Gaps, TimeFeatures, observed_gaps

__all__ = ["TimeScaler"]


class TimeScaler(nn.Module):
    """Elapsed time in a unit that suits the data: float64 in, float32 out.

    Unix seconds have no correct fraction in float32, so timestamps are subtracted in float64 first.
    The unit is a buffer, is saved with the module, and stays float64 when a model is cast.

    Args:
        unit: Length of the unit in the units of the timestamps. ``"auto"``: the median positive
            gap, found by :meth:`fit`.

    Example:
        >>> scaler = TimeScaler().fit([60.0, 120.0, 180.0])
        >>> t = 1.7e9 + torch.tensor([0.0, 60.0, 180.0], dtype=torch.float64)
        >>> scaler(t, t[-1])
        tensor([1.5000, 1.0000, 0.0000])
    """

    unit: Tensor

    def __init__(self, unit: Literal["auto"] | float = "auto") -> None:
        super().__init__()
        self.is_auto = unit == "auto"
        value = math.nan if isinstance(unit, str) else float(unit)
        if not self.is_auto and not (math.isfinite(value) and value > 0):
            raise ValueError(f"unit is {unit!r}; it must be 'auto' or a positive number.")
        self.register_buffer("unit", torch.tensor(value, dtype=torch.float64))

    def fit(self, gaps: Gaps, features: TimeFeatures | None = None) -> "TimeScaler":
        """Find the unit from the gaps between consecutive events; return the scaler.

        Args:
            gaps: Gaps in the units of the timestamps; gaps of zero are left out.
            features: Time features that will receive the scaled times. If given, warn when their
                frequencies do not suit the scaled gaps.
        """
        gaps = observed_gaps(gaps)
        if self.is_auto:
            self.unit.fill_(gaps.median())
        if features is not None:
            features.warn_about(gaps / self.unit.cpu())
        return self

    def scale(
        self, time: Float[Tensor, "*batch n"], origin: Float[Tensor, "*batch"] | float = 0.0
    ) -> Float[Tensor, "*batch n"]:
        """Return ``(time − origin) / unit`` in float64, as attention takes its ``times``.

        Args:
            time: Timestamps.
            origin: A time for each sequence; attention does not depend on it.
        """
        if not torch.compiler.is_compiling() and self.unit.isnan():
            raise RuntimeError(
                "TimeScaler has no unit yet; call fit(gaps), or give the unit as a number."
            )
        if isinstance(origin, Tensor):
            origin = origin.double()[..., None]
        return (time.double() - origin) / self.unit

    def forward(
        self, time: Float[Tensor, "*batch n"], reference: Float[Tensor, "*batch"] | None = None
    ) -> Float[Tensor, "*batch n"]:
        """Return the time elapsed until the reference, or scaled gaps without one, in float32.

        Args:
            time: Timestamps; without a reference, gaps.
            reference: A time for each sequence.
        """
        if reference is None:
            return self.scale(time).float()
        return self.scale(reference.double()[..., None] - time).float()

    def extra_repr(self) -> str:
        """Return the unit."""
        return f"unit={self.unit.item():.6g}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "TimeScaler":
        unit = self.unit
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # a cast of the whole model must not round the unit
        self.unit = unit.to(self.unit.device)
        return self
