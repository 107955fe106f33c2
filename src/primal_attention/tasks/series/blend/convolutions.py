"""The convolution part: MiniRocket of the series and of their steps, and a ridge head.

A feature is the share of a series in which a dilated convolution exceeds a threshold from the
training data. The features are a feature map, the ridge head its primal solution.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from primal_attention.support.command import UserError, needs
from primal_attention.support.compiled import numba_threads
from primal_attention.support.randomness import isolated
from primal_attention.tasks.series.blend.ridge import fit_ridge

if TYPE_CHECKING:
    from aeon.transformations.collection.convolution_based import MiniRocket

__all__ = ["Convolutions", "RocketSizes"]

_KERNELS = 84
"""Kernels of MiniRocket, at every dilation."""
_FEATURES = (10_000, 5_000)
"""Features of the series and of their steps."""


@dataclass(frozen=True)
class RocketSizes:
    """Sizes of the arrays of one MiniRocket transform."""

    order: int
    """0 for the series, 1 for the differences of neighbouring values."""
    dilations: int
    """Different dilations."""
    channels: int
    """Channels of all kernels together."""
    features: int
    """Features, and thresholds."""

    def __post_init__(self) -> None:
        if self.order not in (0, 1):
            raise ValueError(f"order must be 0 or 1, got {self.order}.")


class _Rocket(nn.Module):
    """A fitted MiniRocket transform of aeon."""

    names = ("channel_counts", "channels", "dilations", "features", "thresholds")

    def __init__(self, sizes: RocketSizes) -> None:
        super().__init__()
        self.sizes = sizes
        counts = (_KERNELS * sizes.dilations, sizes.channels, sizes.dilations, sizes.dilations)
        for name, count in zip(self.names, counts, strict=False):
            self.register_buffer(name, torch.zeros(count, dtype=torch.int32))
        self.register_buffer("thresholds", torch.zeros(sizes.features))

    @classmethod
    def fit(cls, x: NDArray[np.float32], order: int, seed: int) -> "_Rocket":
        rocket: Any = _mini_rocket(_FEATURES[order], seed)
        with numba_threads(), isolated():  # aeon seeds the generator of the caller
            rocket._fit(np.diff(x, n=order))  # fit would warn of constant steps
        arrays = dict(zip(cls.names, rocket.parameters, strict=True))
        sizes = RocketSizes(
            order, *(len(arrays[name]) for name in ("dilations", "channels", "thresholds"))
        )
        made = cls(sizes)
        for name, array in arrays.items():
            setattr(made, name, torch.from_numpy(np.ascontiguousarray(array)))
        return made

    def forward(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        x = np.diff(x, n=self.sizes.order)
        arrays = {name: getattr(self, name).numpy() for name in self.names}
        _check_arrays(arrays, *x.shape[1:])
        rocket: Any = _mini_rocket(self.sizes.features, 0)
        rocket.parameters = tuple(arrays.values())
        rocket._n_jobs = 1
        with numba_threads():
            found: NDArray[np.float32] = rocket._transform(x)
        return found


class Convolutions(nn.Module):
    """Scores of series from the features of one or two MiniRocket transforms.

    Args:
        rockets: Sizes of the transforms.
        outputs: Scores of a series.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, rockets: Sequence[RocketSizes], outputs: int) -> None:
        super().__init__()
        self.rockets = nn.ModuleList(_Rocket(sizes) for sizes in rockets)
        self.register_buffer("weight", torch.zeros(sum(s.features for s in rockets), outputs))
        self.register_buffer("bias", torch.zeros(outputs))

    @property
    def sizes(self) -> tuple[RocketSizes, ...]:
        """Sizes of the transforms."""
        return tuple(rocket.sizes for rocket in self.rockets)  # type: ignore[misc]

    @classmethod
    def fit(
        cls,
        x: NDArray[np.float32],
        targets: NDArray[np.float64],
        seed: int,
        seconds: float | None = None,
    ) -> "tuple[Convolutions, NDArray[np.float64]]":
        """Return the part and its leave-one-out answers to the training series.

        Args:
            x: Series ``[cases, channels, time]`` of one length.
            targets: What to predict, ``[cases, outputs]``.
            seed: Seed of the thresholds.
            seconds: Limit of the time; with many series the head then uses fewer features.
        """
        rockets = [_Rocket.fit(x, order, seed) for order in (0, 1)]
        features = [rocket(x) for rocket in rockets]
        ridge = fit_ridge(features, targets, np.random.default_rng(seed), seconds=seconds)
        used = [(r, w) for r, w in zip(rockets, ridge.weights, strict=True) if w is not None]
        made = cls([rocket.sizes for rocket, _ in used], targets.shape[1])
        made.rockets = nn.ModuleList(rocket for rocket, _ in used)
        made.weight = torch.from_numpy(np.concatenate([w for _, w in used])).float()
        made.bias = torch.from_numpy(ridge.bias).float()
        return made, ridge.held_out

    def forward(self, x: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the scores of series ``[cases, channels, time]``."""
        features = np.concatenate([rocket(x) for rocket in self.rockets], axis=1)
        # double precision: the order of sums, and so a rounding, depends on the number of cases
        return features.astype(np.float64) @ self.weight.double().numpy() + self.bias.numpy()


def _check_arrays(arrays: Mapping[str, np.ndarray], channels: int, steps: int) -> None:
    """Raise if an array of a transform points outside another: compiled code does not check."""
    counts, dilations, features = (
        arrays[name].astype(np.int64) for name in ("channel_counts", "dilations", "features")
    )
    index = arrays["channels"]
    is_whole = (
        (dilations > 0).all()
        and (8 * dilations < steps).all()
        and (features >= 0).all()
        and _KERNELS * features.sum() == len(arrays["thresholds"])
        and (counts > 0).all()
        and counts.sum() == len(index)
        and ((index >= 0) & (index < channels)).all()
    )
    if not is_whole:
        raise UserError(
            f"the convolutions of the model do not belong to series of {channels} channels and "
            f"{steps} steps; its file is damaged."
        )


def _mini_rocket(features: int, seed: int) -> "MiniRocket":
    with needs("series", "The convolution part of a model of series"):
        from aeon.transformations.collection.convolution_based import MiniRocket
    return MiniRocket(n_kernels=features, random_state=seed)
