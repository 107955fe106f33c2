"""Decompose a kernel between two different data sets.

The kernel need not be symmetric: left and right singular vectors describe one data set each.
"""

import numpy as np

from primal_attention.ksvd import KernelSVD

rng = np.random.default_rng(0)
queries, keys = rng.normal(size=(200, 3)), rng.normal(size=(150, 3))

svd = KernelSVD(n_components=16, kernel="exponential", gamma=1.0).fit(queries, right=keys)
left, right = svd.transform(queries), svd.transform_right(keys)
print("singular values:", svd.singular_values_.round(1))

exact = np.exp(queries @ keys.T)
error = np.linalg.norm(left @ right.T - exact) / np.linalg.norm(exact)
print(f"relative error with 16 components: {error:.3f}")
