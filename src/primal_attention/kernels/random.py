"""Random features of the exponential and of the Gaussian kernel.

    positive        φ(x) = exp(w·x − ‖x‖²/2) / √p                    (Choromanski et al. 2021)
    trigonometric   φ(x) = exp(+‖x‖²/2) [cos w·x, sin w·x] / √(p/2)  (Rahimi & Recht 2007)

with ``w ~ N(0, I)``; in both ``E φ(x)·φ(y) = exp(x·y)``. Another factor ``exp(−‖x‖²/2)`` gives the
Gaussian kernel. The variance of one positive feature,

    Var = (exp(‖x+y‖²) − 1) exp(2 x·y),

is exponential in the norms, so bring rows to length one, or keep the scale small. It falls with
directions that are orthogonal in blocks, that come in pairs ``±w``, and with the tilted density
of Likhosherstov et al. (2022): ``exp(A‖w‖² + √(1−4A) w·x − ‖x‖²/2) (1−4A)^{d/4}``, ``A < 0``.
"""

import math
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from primal_attention.functional.precision import full_precision
from primal_attention.kernels.base import Kernel, RandomFeatureMap, wide
from primal_attention.kernels.exact import Exponential, Gaussian, unit

__all__ = ["Directions", "PositiveFeatures", "TrigonometricFeatures", "draw_directions"]

Directions = Literal["iid", "orthogonal", "sphere"]
Shape = Literal["exponential", "gaussian"]


def draw_directions(
    num: int,
    dim: int,
    *,
    directions: Directions = "orthogonal",
    antithetic: bool = False,
    num_sets: int | None = None,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "*sets p d"]:
    """Return ``num`` directions ``w ~ N(0, I)``, one a row, in float64 on the CPU.

    Args:
        num: Number of rows.
        dim: Width of a row.
        directions: Independent rows (``"iid"``), or rows orthogonal inside blocks of ``dim`` with
            the norms of independent ones. Each row alone is normal in both cases. ``"sphere"``
            brings independent rows to length ``√dim``: then the features stand for the exponential
            kernel only as far as ``‖x + y‖⁴`` is small against ``dim``.
        antithetic: Let the second half be the negative of the first.
        num_sets: Draw that many independent sets, on a new first axis.
        generator: Where the numbers come from; torch's own generator without one.

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
            f"The number of features must be positive, and even in antithetic pairs, got {num}."
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

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if directions != "orthogonal":
        rows = normal(num, dim)
        return rows if directions == "iid" else dim**0.5 * rows / rows.norm(dim=-1, keepdim=True)
    q, r = torch.linalg.qr(normal(-(-num // dim), dim, dim))
    # the sign of R's diagonal makes the directions uniform on the sphere
    q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
    rows = q.transpose(-1, -2).flatten(0, 1)[:num]
    return rows * normal(num, dim).norm(dim=-1, keepdim=True)


class _Gaussian(RandomFeatureMap):
    """What both maps share: the draw, the scale, the normalisation and the exact kernel."""

    def __init__(
        self,
        dim: int,
        num_directions: int,
        *,
        kernel: Shape,
        scale: float,
        normalize: bool,
        directions: Directions,
        antithetic: bool,
        num_heads: int | None,
        generator: torch.Generator | None,
        device: Any,
        dtype: Any,
    ) -> None:
        super().__init__()
        if kernel not in ("exponential", "gaussian"):
            raise ValueError(f"kernel must be 'exponential' or 'gaussian', got {kernel!r}.")
        if not scale > 0:
            raise ValueError(f"scale must be positive, got {scale}.")
        if directions == "sphere":
            # rows of one length know one moment of the normal density: a kernel of their own
            self.relation = "near"
        self.dim, self.scale, self.normalize = dim, scale, normalize
        self.shape: Shape = kernel
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
        self, generator: torch.Generator | None, device: Any = None, dtype: Any = None
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
        """Describe the draw."""
        heads = "" if self._num_heads is None else f", num_heads={self._num_heads}"
        return (
            f"{self.dim}, {self.num_features}, kernel={self.shape!r}, scale={self.scale:.4g}, "
            f"normalize={self.normalize}, directions={self._directions!r}, "
            f"antithetic={self._antithetic}{heads}"
        )


class PositiveFeatures(_Gaussian):
    """Positive random features of ``exp(scale · x·y)`` or of the Gaussian kernel.

    Args:
        dim: Width of the rows, the head width in attention.
        num_features: Width of the features.
        kernel: ``"exponential"`` or ``"gaussian"``.
        scale: Factor on the inner product, ``d ** -0.5`` in softmax attention.
        normalize: Bring rows to length one first.
        directions: See :func:`draw_directions`.
        antithetic: Use pairs ``±w``.
        spread: Expected ``scale · ‖x + y‖²``. Given one, features are drawn from the density that
            is best for it: lower variance for large norms, and still unbiased. ``2`` suits unit
            rows with scale one.
        num_heads: Draw directions of their own for each head; rows are then ``[... h n d]``.
        generator: Where the draw comes from.
        device: Where to keep it.
        dtype: In which type to keep it.

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
        kernel: Shape = "exponential",
        scale: float = 1.0,
        normalize: bool = False,
        directions: Directions = "orthogonal",
        antithetic: bool = False,
        spread: float | None = None,
        num_heads: int | None = None,
        generator: torch.Generator | None = None,
        device: Any = None,
        dtype: Any = None,
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
                f"spread= tilts a normal density, which directions='sphere' has not; got {spread}. "
                "Leave it out, or use directions='orthogonal'."
            )
        self.num_features = num_features
        self._tilt = 0.0 if spread is None else _tilt(spread, dim)

    def log_features(
        self, x: Float[Tensor, "*batch n d"], *, up_to_rows: bool = False
    ) -> Float[Tensor, "*batch n p"]:
        """Return the logarithm of the features, for sums that must not overflow.

        Args:
            x: Rows.
            up_to_rows: Leave out the factor of each row, as the queries of a ratio may.
        """
        with full_precision(x):
            x = unit(x) if self.normalize else wide(x)
            w = self.get_buffer("directions").to(x.dtype)
            root = math.sqrt(1 - 4 * self._tilt)
            level = 0.5 * self.dim * math.log(root) - 0.5 * math.log(self.num_features)
            # factors go to the few directions, and what is subtracted goes in place: the features
            # are the largest tensor of the layer
            logs = x @ (root * self.scale**0.5 * w).transpose(-1, -2)
            if not up_to_rows:
                weight = self.scale if self.shape == "gaussian" else 0.5 * self.scale
                logs = logs.sub_(weight * x.square().sum(-1, keepdim=True) - level)
            if self._tilt:
                logs = logs.add_(self._tilt * w.square().sum(-1)[..., None, :])
            return logs

    def query_features(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n p"]:
        """Return the features; they overflow for rows of huge norm, ``log_features`` does not."""
        return self.log_features(x).exp()


def _tilt(spread: float, dim: int) -> float:
    if not spread > 0:
        raise ValueError(f"spread must be positive, got {spread}; pass None for plain features.")
    root = math.sqrt((2 * spread + dim) ** 2 + 8 * dim * spread)
    rho = (root - 2 * spread - dim) / (4 * spread)
    return (1 - 1 / rho) / 8


class TrigonometricFeatures(_Gaussian):
    """Random Fourier features: bounded and of both signs, for the Gaussian kernel above all.

    Args:
        dim: Width of the rows.
        num_features: Width of the features; even, half of them sines.
        kernel: ``"gaussian"`` or ``"exponential"``.
        scale: Factor on the squared distance, or on the inner product.
        normalize: Bring rows to length one first.
        directions: See :func:`draw_directions`.
        num_heads: Draw directions of their own for each head; rows are then ``[... h n d]``.
        generator: Where the draw comes from.
        device: Where to keep it.
        dtype: In which type to keep it.

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
        kernel: Shape = "gaussian",
        scale: float = 1.0,
        normalize: bool = False,
        directions: Directions = "orthogonal",
        num_heads: int | None = None,
        generator: torch.Generator | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        if num_features < 2 or num_features % 2:
            raise ValueError(
                f"num_features must be even, a cosine and a sine a direction, got {num_features}."
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
        """Return cosines, then sines; times ``exp(‖x‖²/2)`` for the exponential kernel."""
        with full_precision(x):
            x = (unit(x) if self.normalize else wide(x)) * self.scale**0.5
            project = x @ self.get_buffer("directions").to(x.dtype).transpose(-1, -2)
            waves = torch.cat([project.cos(), project.sin()], dim=-1)
            waves = waves * self._num_directions**-0.5
            if self.shape == "gaussian":
                return waves
            return waves * (0.5 * x.square().sum(-1, keepdim=True)).exp()
