"""Random Maclaurin features of ``f(x·y)``, ``f(s) = Σ_N a_N s^N`` (Kar & Karnick 2012).

    Z(x) = √(a_N / η_N) Π_{i=1..N} (ω_i·x),     N ~ η,   ω ∈ {±1}^d,     E Z(x) Z(y) = f(x·y)

The variance of one such feature, for degrees from one up, is

    Σ_N (a_N² / η_N) μ^N − (f(x·y) − a_0)²,     μ = ‖x‖²‖y‖² + 2 (x·y)² − 2 Σ_k x_k² y_k².

It is smallest for ``η_N ∝ a_N μ^{N/2}``. Rows of length ``√τ`` have ``μ ≈ τ²``, so the best
distribution is ``η_N ∝ a_N τ^N``. Low degrees need no draw: ``√a_0``, ``√a_1 x`` and the products
``x_i x_j`` are exact features, and this removes most of the variance. For higher degrees a fixed
number of features per degree replaces random degrees.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.types import Device

from primal_attention.functional.precision import full_precision
from primal_attention.kernels.base import RandomFeatureMap, Relation, widen
from primal_attention.kernels.exact import DotProduct
from primal_attention.kernels.series import PowerSeries, as_series

__all__ = ["Law", "MaclaurinFeatures"]

Law = Literal["optimal", "geometric"]


class MaclaurinFeatures(RandomFeatureMap):
    """Features of a dot-product kernel: low degrees exact, high degrees by random signs.

    Args:
        dim: Width ``d`` of the rows.
        num_features: Total width of the features. A polynomial that needs fewer gets fewer; see the
            attribute of the same name.
        series: A name in :data:`~primal_attention.kernels.series.SERIES`, a series, or its
            coefficients.
        scale: Largest expected ``‖x‖‖y‖``; it determines the number of features per degree.
        exact_degree: Last degree with exact features: 0, 1 or 2. By default the largest that fits.
        law: Distribution of the degrees: ``"optimal"`` for ``scale``, or ``"geometric"``, the
            published ``η_N ∝ 2^{-(N+1)}``.
        stratified: Give each degree a fixed share of the features instead of drawing degrees.
        max_degree: Last degree; higher ones are cut off.
        num_heads: Draw separate signs for each head; rows are then ``[... h n d]``.
        generator: Random generator of the draw.
        device: Device of the buffers.
        dtype: Dtype of the buffers.

    Example:
        >>> phi = MaclaurinFeatures(4, 15, "exp", exact_degree=2)
        >>> x = torch.eye(4)[:1]
        >>> phi.approximate(x, x)
        tensor([[2.5000]])
    """

    relation: Relation = "truncated"
    is_positive = False
    kernel: DotProduct

    def __init__(
        self,
        dim: int,
        num_features: int,
        series: str | PowerSeries | Sequence[float] = "exp",
        *,
        scale: float = 1.0,
        exact_degree: int | None = None,
        law: Law = "optimal",
        stratified: bool = True,
        max_degree: int = 20,
        num_heads: int | None = None,
        generator: torch.Generator | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if law not in ("optimal", "geometric"):
            raise ValueError(f"law must be 'optimal' or 'geometric', got {law!r}.")
        self.series = as_series(series)
        self._coefficients = self.series.coefficients(max_degree)
        last = max((n for n, a in enumerate(self._coefficients) if a), default=0)
        sizes = [1, 1 + dim, 1 + dim + dim * (dim + 1) // 2]
        if exact_degree is None:
            fit = (n for n in range(min(last, 2) + 1) if sizes[n] <= num_features)
            exact_degree = max(fit, default=0)
            # with no features left for higher degrees the kernel would be linear
            if exact_degree == 1 < last and num_features <= dim + 1:
                exact_degree = 0
        if exact_degree not in (0, 1, 2) or sizes[exact_degree] > num_features:
            raise ValueError(
                f"exact_degree={exact_degree} needs "
                f"{sizes[min(max(exact_degree, 0), 2)]} features for rows of width {dim}, but "
                f"num_features is {num_features}; exact_degree must be 0, 1 or 2 and must fit."
            )
        # no random degree is left, and unused features would be zeros
        if last <= exact_degree:
            num_features = sizes[exact_degree]  # all features are exact
        self.dim, self.num_features = dim, num_features
        self.kernel = DotProduct(self.series)
        self.scale, self.exact_degree, self.max_degree = scale, exact_degree, max_degree
        self.law: Law = law
        self.stratified = stratified
        self._num_heads = num_heads
        self._num_random = num_features - sizes[exact_degree]
        self.counts: tuple[tuple[int, int], ...] = ()
        """Number of random features of each degree, as pairs (degree, number)."""
        self._draw(generator, device, dtype)

    def degree_law(self) -> dict[int, float]:
        """Return the probability ``η_N`` of each random degree."""
        degrees = range(self.exact_degree + 1, self.max_degree + 1)
        if self.law == "geometric":
            mass = {n: 2.0 ** -(n + 1) for n in degrees}
        else:
            mass = {n: self._coefficients[n] * self.scale**n for n in degrees}
        total = sum(mass.values())
        return {n: value / total for n, value in mass.items() if value > 0}

    def expected_gram(
        self, x: Float[Tensor, "*batch n d"], y: Float[Tensor, "*batch m d"]
    ) -> Float[Tensor, "*batch n m"]:
        """Return the mean of ``approximate`` over draws: the kernel up to the last degree."""
        degrees = {n for n, _ in self.counts} if self.stratified else set(self.degree_law())
        kept = [
            a if n <= self.exact_degree or (n in degrees and self._num_random) else 0.0
            for n, a in enumerate(self._coefficients)
        ]
        return DotProduct(kept).gram(x, y)

    def variance(
        self, x: Float[Tensor, "*batch n d"], y: Float[Tensor, "*batch m d"]
    ) -> Float[Tensor, "*batch n m"]:
        """Return the exact variance of ``approximate`` over draws."""
        x, y = widen(x), widen(y)
        inner = x @ y.transpose(-1, -2)
        square = x.square().sum(-1)[..., :, None] * y.square().sum(-1)[..., None, :]
        # E[(s·x)² (s·y)²] for independent signs s
        mu = square + 2 * inner**2 - 2 * (x**2 @ (y**2).transpose(-1, -2))
        total, mean = torch.zeros_like(inner), torch.zeros_like(inner)
        if self.stratified:
            for n, count in self.counts:
                total = total + self._coefficients[n] ** 2 * (mu**n - inner ** (2 * n)) / count
            return total
        for n, eta in self.degree_law().items():
            total = total + self._coefficients[n] ** 2 / eta * mu**n
            mean = mean + self._coefficients[n] * inner**n
        return (total - mean**2) / max(self._num_random, 1)

    def query_features(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n p"]:
        """Return the features, ordered by degree."""
        with full_precision(x):
            x = widen(x)
            a = self._coefficients
            parts = [torch.full_like(x[..., :1], math.sqrt(a[0]))]
            if self.exact_degree >= 1:
                parts.append(math.sqrt(a[1]) * x)
            if self.exact_degree == 2:
                parts.append(math.sqrt(a[2]) * x.square())
                row, column = torch.triu_indices(self.dim, self.dim, 1, device=x.device)
                parts.append(math.sqrt(2 * a[2]) * x[..., row] * x[..., column])
            signs = self.get_buffer("signs").to(x.dtype)
            project, law = x @ signs.transpose(-1, -2), self.degree_law()
            # one split instead of many slices: its backward is one concatenation
            factors = list(project.split([c for n, c in self.counts for _ in range(n)], dim=-1))
            for n, count in self.counts:
                share = count if self.stratified else law[n] * self._num_random
                product = factors.pop(0) * math.sqrt(a[n] / share)
                for _ in range(1, n):
                    product = product * factors.pop(0)
                parts.append(product)
            return torch.cat(parts, dim=-1)

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draw new signs in place, and new degrees if not stratified."""
        self._draw(generator)

    def _draw(
        self,
        generator: torch.Generator | None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        counts = self._share_counts() if self.stratified else self._draw_counts(generator)
        self.counts = tuple((n, c) for n, c in sorted(counts.items()) if c)
        sets = () if self._num_heads is None else (self._num_heads,)
        rows = sum(n * c for n, c in self.counts)
        # on the CPU, so that a seed gives the same signs on every device
        coins = torch.randint(2, (*sets, rows, self.dim), generator=generator)
        self._store("signs", (2 * coins - 1).double(), device, dtype)
        degrees = torch.tensor([n for n, c in self.counts for _ in range(c)], dtype=torch.long)
        where = self.get_buffer("signs").device
        self.register_buffer("degrees", degrees.to(where))

    def _share_counts(self) -> dict[int, int]:
        """Return the number of features of each degree: shares rounded by largest remainder."""
        if not self._num_random:
            return {}
        ideal = {n: self._num_random * eta for n, eta in self.degree_law().items()}
        counts = {n: int(value) for n, value in ideal.items()}
        left = self._num_random - sum(counts.values())
        for n in sorted(ideal, key=lambda n: counts[n] - ideal[n])[:left]:
            counts[n] += 1
        return counts

    def _draw_counts(self, generator: torch.Generator | None) -> dict[int, int]:
        law = self.degree_law()
        if not self._num_random:
            return {}
        # float64: shares of high degrees differ by many orders of magnitude
        mass = torch.tensor(list(law.values()), dtype=torch.float64)
        drawn = torch.multinomial(mass, self._num_random, replacement=True, generator=generator)
        found = torch.bincount(drawn, minlength=len(law)).tolist()
        return dict(zip(law, found, strict=True))

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *args: object
    ) -> None:
        # the number of signs depends on the drawn degrees, so it can differ from the saved one
        degrees = state_dict.get(f"{prefix}degrees")
        signs = state_dict.get(f"{prefix}signs")
        if degrees is not None and signs is not None:
            found = degrees.tolist()
            if len(found) == self._num_random:
                self.counts = tuple((n, found.count(n)) for n in sorted(set(found)))
                for name, value in (("degrees", degrees), ("signs", signs)):
                    old = self.get_buffer(name)
                    if old.shape != value.shape:
                        self._buffers[name] = value.new_empty(value.shape).to(old)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Return the options of the map."""
        return (
            f"{self.dim}, {self.num_features}, {self.series.name!r}, scale={self.scale:.4g}, "
            f"exact_degree={self.exact_degree}, law={self.law!r}, stratified={self.stratified}"
        )
