"""SchoenbAt: kernels ``f(q·k)`` by Maclaurin features (Guo et al. 2025, arXiv 2505.12252).

Queries and keys are centred and scaled to length ``√τ``, so ``q·k ∈ [−τ, τ]`` is where the series
of ``f`` converges. The output has a learned scale. In the paper ``τ = 1/√d`` is fixed, and two
weights of a row differ by a factor of at most ``f(τ)/f(−τ)``, which is 1.4 for a head width of 32:
the output is close to a plain mean. Here ``τ`` is learned per head, with an upper bound up to which
sampled weights keep their sign, and features of low degrees are exact. Features have both signs, so
the denominator is bounded away from zero.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.types import Device

from primal_attention.attention.base import SQUARES_FIT, Capabilities, State
from primal_attention.attention.features import KernelCore
from primal_attention.attention.multihead import MultiHeadAttention
from primal_attention.attention.registry import register_attention
from primal_attention.functional.precision import accumulator
from primal_attention.kernels import MaclaurinFeatures, PowerSeries, as_series
from primal_attention.kernels.base import Factory
from primal_attention.kernels.exact import unit

__all__ = ["SchoenbatAttention", "SchoenbatCore", "center_l2", "signed_power"]

OutputMap = Literal["scale", "power"]


def center_l2(x: Float[Tensor, "*batch d"], eps: float = 1e-12) -> Float[Tensor, "*batch d"]:
    """Return centred rows of length one; a constant row gives zero.

    Example:
        >>> center_l2(torch.tensor([1.0, 3.0]))
        tensor([-0.7071,  0.7071])
    """
    x = x.to(accumulator(x))
    return unit(x - x.mean(-1, keepdim=True), eps)


def signed_power(
    x: Float[Tensor, "*shape"], exponent: Float[Tensor, "*other"], eps: float = 1e-6
) -> Float[Tensor, "*shape"]:
    """Return ``sign(x) |x|^exponent``, smooth at zero; for exponent one exactly ``x``.

    Example:
        >>> signed_power(torch.tensor([-4.0, 4.0]), torch.tensor(0.5))
        tensor([-2.,  2.])
    """
    # not a power: torch takes its derivative at exponent zero, where training starts, as constant,
    # so that second derivatives would be wrong
    return x * ((x.square() + eps * eps).log() * ((exponent - 1) / 2)).exp()


class SchoenbatCore(KernelCore):
    """Attention with weights ``f(τ q̂·k̂)``: ``O((n + m) p (d + v))`` time, state ``p × (v + 1)``.

    Args:
        features: Maclaurin features of ``f``.
        num_heads: Number of heads; each has its own temperature and scale.
        temperature: Fixed ``τ``, or ``None`` to learn it.
        post: ``"scale"`` multiplies the output by ``γ``; ``"power"`` returns ``γ sign(y)|y|^β``.
        eps: Smallest magnitude of a denominator, relative to the weight of an orthogonal key.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    features: MaclaurinFeatures
    undecayed = ("gamma", "beta")
    capabilities = Capabilities(max_magnitude=SQUARES_FIT)

    def __init__(
        self,
        features: MaclaurinFeatures,
        num_heads: int,
        *,
        temperature: float | None = None,
        post: OutputMap = "scale",
        eps: float = 1e-3,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(features)
        if post not in ("scale", "power"):
            raise ValueError(f"post must be 'scale' or 'power', got {post!r}.")
        radius = features.series.radius
        if temperature is not None and not 0 < temperature < radius:
            raise ValueError(
                f"temperature is {temperature}; it must be between 0 and {radius:g}, where the "
                f"series {features.series.name!r} converges."
            )
        factory: Factory = {"device": device, "dtype": dtype}
        self.fixed_temperature, self.eps = temperature, eps
        self.max_temperature, start = temperature_range(features.series)
        if temperature is not None and temperature > self.max_temperature:
            warnings.warn(
                f"temperature={temperature:g} is above {self.max_temperature:g}; then weights of "
                f"the series {features.series.name!r} can be negative, and outputs unbounded. Use "
                "a smaller temperature, or None to learn it.",
                stacklevel=3,
            )
        if temperature is None:
            logit = math.log(start / (self.max_temperature - start))
            self.theta = nn.Parameter(torch.full((num_heads,), logit, **factory))
        self.gamma = nn.Parameter(torch.ones(num_heads, 1, 1, **factory))
        if post == "power":
            # softplus of this is one
            one = math.log(math.e - 1)
            self.beta = nn.Parameter(torch.full((num_heads, 1, features.dim), one, **factory))
        self.post: OutputMap = post

    @property
    def temperature(self) -> Float[Tensor, " h"]:
        """``τ`` of each head, in float32 or better."""
        if self.fixed_temperature is not None:
            return torch.full_like(self.gamma.flatten(), self.fixed_temperature)
        return self.max_temperature * self.theta.to(accumulator(self.theta)).sigmoid()

    def query_features(
        self, x: Float[Tensor, "b h n d"], position: Int[Tensor, "b n"]
    ) -> Float[Tensor, "b h n p"]:
        """Return the features of centred rows of length ``√τ``."""
        x = center_l2(x)
        return self.features.query_features(x * self.temperature.to(x).sqrt()[:, None, None])

    def key_features(
        self, x: Float[Tensor, "b h n d"], position: Int[Tensor, "b n"]
    ) -> Float[Tensor, "b h n p"]:
        """Return the same features for keys."""
        return self.query_features(x, position)

    def divide(self, sums: Float[Tensor, "b h n w"]) -> Float[Tensor, "b h n v"]:
        """Return the first columns divided by the last one, whose magnitude is at least ``eps``."""
        total = sums[..., -1:]
        floor = torch.where(total < 0, -self.eps, self.eps)
        return sums[..., :-1] / torch.where(total.abs() < self.eps, floor, total)

    def scale_output(self, y: Float[Tensor, "b h n v"]) -> Float[Tensor, "b h n v"]:
        """Return the output times ``γ``, after the power if there is one."""
        z = y.to(accumulator(y))
        if self.post == "power":
            z = signed_power(z, nn.functional.softplus(self.beta.to(z)))
        return (self.gamma.to(z) * z).to(y.dtype)

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        v: Float[Tensor, "b h m v"],
        *,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "b h n v"]:
        """Return the scaled weighted mean of the values; zero for a row without keys."""
        return self.scale_output(super().forward(q, k, v, key_mask=key_mask, is_causal=is_causal))

    def weights(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        *,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "b h n m"]:
        """Return the dense matrix times ``γ``, without the power."""
        b, h, m, _ = k.shape
        unit = torch.eye(m, dtype=q.dtype, device=q.device).expand(b, h, m, m)
        matrix = super().forward(q, k, unit, key_mask=key_mask, is_causal=is_causal)
        return self.gamma.to(matrix) * matrix

    def step(
        self,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b h t d"],
        v: Float[Tensor, "b h t v"],
        state: State,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b h t v"], State]:
        """Continue a causal forward by ``t`` tokens, at constant cost per token."""
        y, state = super().step(q, k, v, state, key_mask=key_mask)
        return self.scale_output(y), state


def temperature_range(series: PowerSeries) -> tuple[float, float]:
    """Return the upper bound of the learned ``τ``, and its initial value."""
    # above 1.5 sampled weights can be negative; some series converge only within their radius
    top = min(1.5, 0.9 * series.radius)
    return top, 2 / 3 * top


class SchoenbatAttention(MultiHeadAttention):
    """Multi-head attention with any dot-product kernel, in linear time.

    Args:
        dim: Model width.
        num_heads: Number of heads; must divide ``dim``.
        kernel: ``"exp"``, ``"inverse"``, ``"logi"``, ``"sqrt"``, ``"trigh"``, a series, or the
            coefficients ``a_0, a_1, …``.
        num_features: Number of features per head; by default 128 or twice the head width, the
            larger of both.
        temperature: Fixed ``τ``, or ``None`` to learn one per head. Above 1.5 (0.9 for series of
            radius one) weights can be negative, and the layer warns.
        post: Map of the output of a head: ``"scale"`` or ``"power"``.
        generator: Random generator of the features.
        bias: Whether the four projections have a bias.
        dropout: Probability of dropping an element of the output in training.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Example:
        >>> layer = SchoenbatAttention(16, 4, kernel="logi")
        >>> layer(torch.randn(2, 5, 16), is_causal=True).shape
        torch.Size([2, 5, 16])
    """

    core: SchoenbatCore

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        kernel: str | PowerSeries | Sequence[float] = "exp",
        num_features: int | None = None,
        temperature: float | None = None,
        post: OutputMap = "scale",
        generator: torch.Generator | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        head_dim = max(dim // max(num_heads, 1), 1)
        series = as_series(kernel)
        features = MaclaurinFeatures(
            head_dim,
            max(128, 2 * head_dim) if num_features is None else num_features,
            series,
            scale=temperature_range(series)[1] if temperature is None else temperature,
            generator=generator,
            device=device,
            dtype=dtype,
        )
        core = SchoenbatCore(
            features,
            max(num_heads, 1),
            temperature=temperature,
            post=post,
            device=device,
            dtype=dtype,
        )
        super().__init__(
            dim, num_heads, core, bias=bias, dropout=dropout, device=device, dtype=dtype
        )

    @classmethod
    def published(
        cls,
        dim: int,
        num_heads: int = 8,
        *,
        kernel: str | PowerSeries | Sequence[float] = "exp",
        num_features: int = 128,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> Self:
        """Return the layer with the published features, temperature ``1/√d`` and output power.

        Two details differ from the published code: the layer is causal only if asked, and its
        denominator is not clamped at one.

        Args:
            dim: Model width.
            num_heads: Number of heads; must divide ``dim``.
            kernel: As in the constructor.
            num_features: Number of features per head, including the constant.
            generator: Random generator of degrees and signs.
            options: ``bias``, ``dropout``, ``device`` and ``dtype`` of the constructor.

        Example:
            >>> SchoenbatAttention.published(16, 4).core.features.law
            'geometric'
        """
        head_dim = max(dim // max(num_heads, 1), 1)
        tau = head_dim**-0.5 if head_dim > 1 else 0.5
        layer = cls(dim, num_heads, kernel=kernel, temperature=tau, post="power", **options)
        layer.core.features = MaclaurinFeatures(
            head_dim,
            num_features,
            kernel,
            scale=tau,
            exact_degree=0,
            law="geometric",
            stratified=False,
            generator=generator,
            device=options.get("device"),
            dtype=options.get("dtype"),
        )
        return layer


register_attention(
    "schoenbat",
    SchoenbatAttention,
    capabilities=SchoenbatCore.capabilities,
    cost="n",
    summary="any dot-product kernel by Maclaurin features, learned temperature",
)
