"""Random features of the exponential and the Gaussian kernel.

    positive        φ(x) = exp(w·x − ‖x‖²/2) / √p                    (Choromanski et al. 2021)
    trigonometric   φ(x) = exp(+‖x‖²/2) [cos w·x, sin w·x] / √(p/2)  (Rahimi & Recht 2007)

with ``w ~ N(0, I)``; for both ``E φ(x)·φ(y) = exp(x·y)``. Another factor ``exp(−‖x‖²/2)`` gives the
Gaussian kernel. The variance of one positive feature,

    Var = (exp(‖x+y‖²) − 1) exp(2 x·y),

is exponential in the norms: scale rows to length one, or use a small scale. Three choices lower it:
directions that are orthogonal in blocks, directions in pairs ``±w``, and the tilted density of
Likhosherstov et al. (2022): ``exp(A‖w‖² + √(1−4A) w·x − ‖x‖²/2) (1−4A)^{d/4}``, ``A < 0``.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.types import Device

from primal_attention.functional.precision import full_precision
from primal_attention.kernels.base import Kernel, RandomFeatureMap, widen
from primal_attention.kernels.exact import Exponential, Gaussian, unit

__all__ = ["Directions", "PositiveFeatures", "TrigonometricFeatures", "draw_directions"]

Directions = Literal["iid", "orthogonal", "sphere"]
KernelName = Literal["exponential", "gaussian"]


def draw_directions(
    num: int,
    dim: int,
    *,
    directions: Directions = "orthogonal",
    antithetic: bool = False,
    num_sets: int | None = None,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "*sets p d"]:
    """Return ``num`` directions ``w ~ N(0, I)``, one per row, in float64 on the CPU.

    Args:
        num: Number of rows.
        dim: Width of a row.
        directions: ``"iid"``: independent rows. ``"orthogonal"``: rows that are orthogonal within
            blocks of ``dim``, with the norms of independent rows; each single row is normal.
            ``"sphere"``: independent rows scaled to length ``√dim``; features then approximate the
            exponential kernel only if ``‖x + y‖⁴`` is small against ``dim``.
        antithetic: Make the second half the negative of the first.
        num_sets: Number of independent sets, on a new first axis; by default one set without
            that axis.
        generator: Random generator; by default torch's global one.

    Example:
        >>> w = draw_directions(4, 8, generator=torch.Generator().manual_seed(0))
        >>> gram = w @ w.T
        >>> bool((gram - gram.diag().diag()).abs().max() < 1e-12)
        True
    """
    if directions not in ("iid", "orthogonal", "sphere"):
        raise ValueError(f"directions must be 'iid', 'orthogonal' or 'sphere', got {directions!r}.")
    if num < 1 or (antithetic and num % 2):
        raise ValueError(
            f"num is {num}; the number of directions must be positive, and even with "
            "antithetic=True."
        )
    if num_sets is not None:
        sets = [
            draw_directions(
                num, dim, directions=directions, antithetic=antithetic, generator=generator
            )
            for _ in range(num_sets)
        ]
        return torch.stack(sets)
    if antithetic:
        half = draw_directions(num // 2, dim, directions=directions, generator=generator)
        return torch.cat([half, -half])

    # float64 on the CPU: a seed gives the same draw for every type and device
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if directions != "orthogonal":
        rows = normal(num, dim)
        return rows if directions == "iid" else dim**0.5 * rows / rows.norm(dim=-1, keepdim=True)
    q, r = torch.linalg.qr(normal(-(-num // dim), dim, dim))
    # the sign of R's diagonal makes the directions uniform on the sphere
    q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
    rows = q.transpose(-1, -2).flatten(0, 1)[:num]
    # orthogonal rows with the lengths of independent ones: each row alone stays normal
    return rows * normal(num, dim).norm(dim=-1, keepdim=True)


class _DirectionFeatures(RandomFeatureMap):
    """Base of the maps with directions: draw, scale, normalisation and exact kernel."""

    def __init__(
        self,
        dim: int,
        num_directions: int,
        *,
        kernel: KernelName,
        scale: float,
        normalize: bool,
        directions: Directions,
        antithetic: bool,
        num_heads: int | None,
        generator: torch.Generator | None,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        if kernel not in ("exponential", "gaussian"):
            raise ValueError(f"kernel must be 'exponential' or 'gaussian', got {kernel!r}.")
        if not scale > 0:
            raise ValueError(f"scale must be positive, got {scale}.")
        if directions == "sphere":
            # rows of one length match only the second moment of the normal distribution
            self.relation = "near"
        self.dim, self.scale, self.normalize = dim, scale, normalize
        self.kernel_name: KernelName = kernel
        exact = Exponential if kernel == "exponential" else Gaussian
        self.kernel: Kernel = exact(scale, normalize=normalize)
        self._num_directions, self._num_heads = num_directions, num_heads
        self._directions: Directions = directions
        self._antithetic = antithetic
        self._draw(generator, device, dtype)

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draw new directions, in place."""
        self._draw(generator)

    def _draw(
        self,
        generator: torch.Generator | None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        draw = draw_directions(
            self._num_directions,
            self.dim,
            directions=self._directions,
            antithetic=self._antithetic,
            num_sets=self._num_heads,
            generator=generator,
        )
        self._store("directions", draw, device, dtype)

    def extra_repr(self) -> str:
        """Return the options of the map."""
        heads = "" if self._num_heads is None else f", num_heads={self._num_heads}"
        return (
            f"{self.dim}, {self.num_features}, kernel={self.kernel_name!r}, "
            f"scale={self.scale:.4g}, normalize={self.normalize}, directions={self._directions!r}, "
            f"antithetic={self._antithetic}{heads}"
        )


class PositiveFeatures(_DirectionFeatures):
    """Positive random features of ``exp(scale · x·y)`` or of the Gaussian kernel.

    Args:
        dim: Width of the rows; in attention the head width.
        num_features: Width of the features.
        kernel: ``"exponential"`` or ``"gaussian"``.
        scale: Factor on the inner product; ``d ** -0.5`` in softmax attention.
        normalize: Scale rows to length one first.
        directions: See :func:`draw_directions`.
        antithetic: Use pairs ``±w``.
        spread: Expected ``scale · ‖x + y‖²``. If given, directions have the tilted density with the
            lowest variance for it; features stay unbiased. Use ``2`` for rows of length one and
            scale one.
        num_heads: Draw separate directions for each head; rows are then ``[... h n d]``.
        generator: Random generator of the draw.
        device: Device of the buffer.
        dtype: Dtype of the buffer.

    Example:
        >>> phi = PositiveFeatures(8, 64, generator=torch.Generator().manual_seed(0))
        >>> phi.query_features(torch.zeros(3, 8)).shape
        torch.Size([3, 64])
    """

    is_positive = True

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        kernel: KernelName = "exponential",
        scale: float = 1.0,
        normalize: bool = False,
        directions: Directions = "orthogonal",
        antithetic: bool = False,
        spread: float | None = None,
        num_heads: int | None = None,
        generator: torch.Generator | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            dim,
            num_features,
            kernel=kernel,
            scale=scale,
            normalize=normalize,
            directions=directions,
            antithetic=antithetic,
            num_heads=num_heads,
            generator=generator,
            device=device,
            dtype=dtype,
        )
        if spread is not None and directions == "sphere":
            raise ValueError(
                f"spread={spread} cannot be used with directions='sphere', which are not normal; "
                "leave spread out, or use directions='orthogonal'."
            )
        self.num_features = num_features
        self._tilt = 0.0 if spread is None else _optimal_tilt(spread, dim)

    def log_features(
        self, x: Float[Tensor, "*batch n d"], *, up_to_rows: bool = False
    ) -> Float[Tensor, "*batch n p"]:
        """Return the logarithm of the features; it does not overflow.

        Args:
            x: Rows.
            up_to_rows: Leave out the factor of each row. It cancels for queries in normalised
                attention.
        """
        with full_precision(x):
            x = unit(x) if self.normalize else widen(x)
            w = self.get_buffer("directions").to(x.dtype)
            # the tilted density draws longer or shorter directions; this factor undoes it
            root = math.sqrt(1 - 4 * self._tilt)
            level = 0.5 * self.dim * math.log(root) - 0.5 * math.log(self.num_features)
            # scale the directions, not the features, and subtract in place: the features are the
            # largest tensor of the layer
            logs = x @ (root * self.scale**0.5 * w).transpose(-1, -2)
            if not up_to_rows:
                weight = self.scale if self.kernel_name == "gaussian" else 0.5 * self.scale
                logs = logs.sub_(weight * x.square().sum(-1, keepdim=True) - level)
            if self._tilt:
                logs = logs.add_(self._tilt * w.square().sum(-1)[..., None, :])
            return logs

    def query_features(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n p"]:
        """Return the features. They overflow for rows of huge norm; then use ``log_features``."""
        return self.log_features(x).exp()


def _optimal_tilt(spread: float, dim: int) -> float:
    """Return the ``A`` of the density with the lowest variance."""
    if not spread > 0:
        raise ValueError(f"spread is {spread}; it must be positive, or None for plain features.")
    root = math.sqrt((2 * spread + dim) ** 2 + 8 * dim * spread)
    rho = (root - 2 * spread - dim) / (4 * spread)
    return (1 - 1 / rho) / 8


class TrigonometricFeatures(_DirectionFeatures):
    """Random Fourier features, mainly for the Gaussian kernel; bounded, of both signs.

    Args:
        dim: Width of the rows.
        num_features: Width of the features; even: half cosines, half sines.
        kernel: ``"gaussian"`` or ``"exponential"``.
        scale: Factor on the squared distance or the inner product.
        normalize: Scale rows to length one first.
        directions: See :func:`draw_directions`.
        num_heads: Draw separate directions for each head; rows are then ``[... h n d]``.
        generator: Random generator of the draw.
        device: Device of the buffer.
        dtype: Dtype of the buffer.

    Example:
        >>> phi = TrigonometricFeatures(8, 64)
        >>> bool((phi.query_features(torch.randn(3, 8)).square().sum(-1) - 1).abs().max() < 1e-5)
        True
    """

    is_positive = False

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        kernel: KernelName = "gaussian",
        scale: float = 1.0,
        normalize: bool = False,
        directions: Directions = "orthogonal",
        num_heads: int | None = None,
        generator: torch.Generator | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if num_features < 2 or num_features % 2:
            raise ValueError(
                f"num_features is {num_features}; it must be even and positive: each direction "
                "has a cosine and a sine."
            )
        super().__init__(
            dim,
            num_features // 2,
            kernel=kernel,
            scale=scale,
            normalize=normalize,
            directions=directions,
            antithetic=False,
            num_heads=num_heads,
            generator=generator,
            device=device,
            dtype=dtype,
        )
        self.num_features = num_features

    def query_features(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n p"]:
        """Return cosines, then sines; for the exponential kernel times ``exp(‖x‖²/2)``."""
        with full_precision(x):
            x = (unit(x) if self.normalize else widen(x)) * self.scale**0.5
            project = x @ self.get_buffer("directions").to(x.dtype).transpose(-1, -2)
            waves = torch.cat([project.cos(), project.sin()], dim=-1)
            waves = waves * self._num_directions**-0.5
            if self.kernel_name == "gaussian":
                return waves
            return waves * (0.5 * x.square().sum(-1, keepdim=True)).exp()
