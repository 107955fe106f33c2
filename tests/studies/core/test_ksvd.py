"""The solvers of the kernel SVD agree on a kernel whose features are known."""

import pytest
import torch

from primal_attention.ksvd import named_kernel
from primal_studies.core import ksvd as benchmark


def test_quadratic_features_reproduce_their_kernel() -> None:
    x, y = benchmark._data(40)
    phi_x, phi_y = (benchmark._quadratic_features(t) for t in (x, y))
    kernel = named_kernel("polynomial", gamma=1.0, degree=2)
    assert phi_x.shape == (40, 231)
    torch.testing.assert_close(phi_x @ phi_y.T, kernel(x, y), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("solver", "tolerance"), [("dense", 1e-12), ("matrix_free", 1e-8), ("nystrom", 0.3)]
)
def test_measured_spectra_agree(solver: str, tolerance: float) -> None:
    exact, found = (benchmark.solve(name, 400, rank=5) for name in ("qr", solver))
    assert benchmark.spectrum_error(found, exact) < tolerance
    assert found.peak_mb > 0


def test_the_peer_finds_the_same_singular_values() -> None:
    threads = torch.get_num_threads()
    try:
        rows = benchmark.compare_with_peer(320, [2], repeats=1)
    finally:
        torch.set_num_threads(threads)
    assert [row["kernel"] for row in rows] == ["rbf", "cosine", "linear"]
    assert all(float(row["difference"]) < 1e-6 for row in rows)


@pytest.mark.slow
def test_memory_is_linear_in_the_rows() -> None:
    """8,000 × 8,000 doubles would take 488 MB; the solver needs a fraction of it beyond 2,000."""
    small, large = (benchmark.solve_apart("matrix_free", n, 16) for n in (2000, 8000))
    assert large.peak_mb - small.peak_mb < 150
