"""Arithmetic modulo a prime, on arrays of int64, and the rank of a matrix there.

Polynomial networks can be computed modulo a prime without any rounding. The rank of a matrix of
random values over a large prime field equals the generic rank over the reals, except with
probability about (degree × rows) / prime.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["PRIME", "Integers", "PrimeField"]

Integers = NDArray[np.int64]
"""Array of elements of the field, each from 0 to the prime, exclusive."""

PRIME = 33554393
"""Largest prime below 2²⁵. A sum of 4096 products of elements fits in int64."""


class PrimeField:
    """Integers modulo a prime: random elements, products, and ranks.

    Args:
        seed: Seed of the random elements.
        prime: A prime below 2²⁵.

    Example:
        >>> field = PrimeField(seed=0)
        >>> x = field.random(5, 3)
        >>> field.rank(field.matmul(x, field.random(3, 5)))
        3
    """

    def __init__(self, seed: int = 0, prime: int = PRIME) -> None:
        if not 2 < prime < 2**25 or any(prime % k == 0 for k in range(2, int(prime**0.5) + 1)):
            raise ValueError(
                f"prime must be a prime from 3 to 2**25, got {prime}; the default is {PRIME}."
            )
        self.prime = prime
        self._random = np.random.default_rng(seed)

    def random(self, *shape: int) -> Integers:
        """Return uniform random elements."""
        return self._random.integers(0, self.prime, shape, dtype=np.int64)

    def reduce(self, x: ArrayLike) -> Integers:
        """Return integers as elements: their remainders, never negative."""
        return np.mod(np.asarray(x, dtype=np.int64), self.prime)

    def matmul(self, x: Integers, y: Integers) -> Integers:
        """Return the product of (batches of) matrices of elements."""
        if x.shape[-1] > 4096:
            raise ValueError(
                f"the inner size of a product must be at most 4096, got {x.shape[-1]}: longer sums "
                "overflow int64. Split the product."
            )
        return np.mod(np.matmul(x, y), self.prime)

    def inverse(self, x: int) -> int:
        """Return the element whose product with ``x`` is one."""
        if x % self.prime == 0:
            raise ZeroDivisionError("zero has no inverse in a field.")
        return pow(int(x), self.prime - 2, self.prime)

    def rank(self, matrix: Integers) -> int:
        """Return the rank of a matrix of elements, by Gaussian elimination."""
        rows = self.reduce(matrix).copy()
        rank = 0
        for column in range(rows.shape[1]):
            nonzero = np.flatnonzero(rows[rank:, column])
            if not len(nonzero):
                continue
            pivot = rank + int(nonzero[0])
            rows[[rank, pivot]] = rows[[pivot, rank]]
            scale = self.inverse(int(rows[rank, column]))
            line = np.mod(rows[rank, column:] * scale, self.prime)
            # in place, and with one remainder: a product of two elements is below 2⁵⁰
            below = rows[rank + 1 :, column:]
            below -= below[:, :1] * line
            np.mod(below, self.prime, out=below)
            rank += 1
            if rank == len(rows):
                break
        return rank
