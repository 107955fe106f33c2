"""Sparse rows and precomputed kernels give the results of dense rows."""

import numpy as np
import pytest
import scipy.sparse
import torch
from tests.house.rows import each

from primal_attention.ksvd import KERNELS, KernelSVD

pytest.importorskip("sklearn")
from sklearn.decomposition import KernelPCA
from sklearn.linear_model import LogisticRegression
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline

FORMS = [
    getattr(scipy.sparse, f"{form}_{kind}")
    for form in ("csr", "csc", "coo")
    for kind in ("array", "matrix")
]


def sparse_rows(n: int, d: int = 30, seed: int = 0) -> np.ndarray:
    """Rows with a fifth of nonzero values; the first one is zero."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(n, d)) * (rng.random((n, d)) < 0.2)
    rows[0] = 0
    return rows


def dot(x, y):
    """A kernel of dense or sparse rows that is not symmetric."""
    product = x @ y.T
    return (product.toarray() if scipy.sparse.issparse(product) else product) + x.sum(1)[:, None]


@each("form", FORMS)
@pytest.mark.parametrize("kernel", [*sorted(KERNELS), dot])
def test_sparse_rows_give_the_results_of_dense_rows(kernel, form) -> None:
    if kernel is dot and "matrix" in form.__name__:
        return  # the sum of a sparse matrix has two dimensions
    x, y, new = sparse_rows(60), sparse_rows(50, seed=1), sparse_rows(7, seed=2)
    options = {"kernel": kernel, "center": True, "solver": "dense"}
    dense = KernelSVD(3, **options).fit(x, right=y)
    sparse = KernelSVD(3, **options).fit(form(x), right=form(y))
    np.testing.assert_allclose(sparse.singular_values_, dense.singular_values_, rtol=1e-10)
    for rows in (new, form(new)):  # any mix of sparse and dense
        for fitted in (dense, sparse):
            np.testing.assert_allclose(fitted.transform(rows), dense.transform(new), atol=1e-10)
            np.testing.assert_allclose(
                fitted.transform_right(rows), dense.transform_right(new), atol=1e-10
            )


@pytest.mark.parametrize("solver", ["auto", "dense", "lanczos", "matrix_free", "nystrom"])
@each(
    "kernel, dtype",
    # products of sparse rows with both types, and kernels of distances
    [
        ("linear", np.float32),
        ("cosine", np.float64),
        ("rbf", np.float32),
        ("laplacian", np.float64),
    ],
)
def test_every_solver_takes_sparse_rows(kernel, solver, dtype) -> None:
    x, y = sparse_rows(260, 12).astype(dtype), sparse_rows(240, 12, seed=1).astype(dtype)
    for right in (None, y):
        keys = None if right is None else scipy.sparse.csr_array(right)
        options = {"kernel": kernel, "center": True, "options": {"tol": 1e-10}, "random_state": 0}
        found = KernelSVD(3, solver=solver, **options)
        same = solver if solver == "nystrom" else "dense"  # landmarks are the same
        exact = KernelSVD(3, solver=same, **options).fit(x, right=right)
        scores = found.fit_transform(scipy.sparse.csr_array(x), right=keys)
        assert scores.dtype == dtype
        tolerance = 1e-10 if dtype is np.float64 else 1e-4
        np.testing.assert_allclose(found.singular_values_, exact.singular_values_, rtol=tolerance)


@pytest.mark.parametrize("kernel", ["linear", "cosine"])
def test_linear_kernels_of_sparse_rows_need_no_matrix(kernel) -> None:
    # the matrix would have 3.6e9 values, 29 GB
    noise = scipy.sparse.random_array((60_000, 5000), density=1e-5, rng=np.random.default_rng(0))
    shared = scipy.sparse.coo_array(np.ones((60_000, 1)))
    x = scipy.sparse.hstack([shared, noise], format="csr")
    svd = KernelSVD(1, kernel=kernel, random_state=0, options={"tol": 1e-4}).fit(x)
    assert svd.solver_ == "lanczos"
    assert svd.left_vectors_.shape == (60_000, 1)
    assert svd.transform(x[:5]).shape == (5, 1)


def test_sparse_rows_are_never_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    x = scipy.sparse.csr_array(sparse_rows(260, 40))
    blocks = []
    wide = type(x).toarray

    def watched(self, *args, **kwargs):
        blocks.append(self.shape)
        return wide(self, *args, **kwargs)

    monkeypatch.setattr(type(x), "toarray", watched)
    for kernel in sorted(KERNELS):
        for solver in ("lanczos", "matrix_free"):
            KernelSVD(2, kernel=kernel, solver=solver, random_state=0, center=True).fit(x)
    assert all(shape[1] == 260 for shape in blocks)  # kernel values, not features


def test_solver_qr_refuses_sparse_rows() -> None:
    x = scipy.sparse.csr_array(sparse_rows(30))
    with pytest.raises(TypeError, match="Sparse data was passed"):
        KernelSVD(2, kernel="linear", solver="qr").fit(x)


SOLVERS = ["auto", "dense", "lanczos", "matrix_free", "nystrom"]


@each("form", [np.asarray, scipy.sparse.csr_array])
@each("center", [False, True])
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_precomputed_kernel_gives_the_results_of_its_rows(solver, center, form) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(260, 3)), rng.normal(size=(240, 3))
    new_x, new_y = rng.normal(size=(6, 3)), rng.normal(size=(5, 3))
    options = {"center": center, "options": {"tol": 1e-10}, "random_state": 0}
    same = solver if solver == "nystrom" else "dense"  # landmarks are the same
    exact = KernelSVD(4, gamma=0.4, solver=same, **options).fit(x, right=y)
    found = KernelSVD(4, kernel="precomputed", solver=solver, **options)
    scores = found.fit_transform(form(rbf_kernel(x, y, gamma=0.4)))
    assert found.n_features_in_ == 240
    np.testing.assert_allclose(found.singular_values_, exact.singular_values_, rtol=1e-9)
    np.testing.assert_allclose(scores, exact.transform(x), atol=1e-7)
    # one row for each new item, on both sides
    left, right = rbf_kernel(new_x, y, gamma=0.4), rbf_kernel(new_y, x, gamma=0.4)
    np.testing.assert_allclose(found.transform(form(left)), exact.transform(new_x), atol=1e-7)
    np.testing.assert_allclose(
        found.transform_right(form(right)), exact.transform_right(new_y), atol=1e-7
    )


def test_a_symmetric_precomputed_kernel_is_kernel_pca_and_can_be_cross_validated() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 3)) * [1.5, 1.0, 0.6]
    labels = (x[:, 0] > 0).astype(int)
    k = rbf_kernel(x, gamma=0.4)
    ours = KernelSVD(3, kernel="precomputed", center=True)
    theirs = KernelPCA(3, kernel="precomputed")
    a, b = ours.fit_transform(k), theirs.fit_transform(k)
    np.testing.assert_allclose(np.abs(a), np.abs(b), atol=1e-9)
    np.testing.assert_allclose(np.abs(ours.transform(k[:5])), np.abs(b[:5]), atol=1e-9)
    # rows and columns of the matrix are split alike
    scores = [
        cross_val_score(make_pipeline(model, LogisticRegression()), k, labels, cv=3)
        for model in (ours, theirs)
    ]
    np.testing.assert_array_equal(*scores)


def test_a_precomputed_kernel_has_no_right_side_and_is_not_changed() -> None:
    k = np.random.default_rng(0).normal(size=(40, 30))
    before = k.copy()
    with pytest.raises(ValueError, match=r"right was given.*Leave right out: fit\(K\)"):
        KernelSVD(2, kernel="precomputed").fit(k, right=k)
    svd = KernelSVD(2, kernel="precomputed", center=True).fit(k)
    np.testing.assert_array_equal(k, before)
    with pytest.raises(ValueError, match="Y has 30 features, but KernelSVD was fitted with 40"):
        svd.transform_right(k)
    with pytest.raises(ValueError, match="qr"):
        KernelSVD(2, kernel="precomputed", solver="qr").fit(k)


def test_negative_eigenvalues_of_a_symmetric_kernel_are_singular_values() -> None:
    rng = np.random.default_rng(0)
    q, _ = np.linalg.qr(rng.normal(size=(300, 300)))
    values = np.r_[-5.0, 4.0, -3.0, rng.uniform(-1, 1, 297)]
    k = (q * values) @ q.T
    for scale in (1e-200, 1.0, 1e100):  # results do not depend on the unit
        svd = KernelSVD(3, kernel="precomputed", options={"tol": 1e-12}, random_state=0).fit(
            scale * k
        )
        assert svd.solver_ == "lanczos"
        np.testing.assert_allclose(svd.singular_values_, scale * np.array([5.0, 4.0, 3.0]))
        approximation = svd.left_vectors_ * svd.singular_values_ @ svd.right_vectors_.T
        np.testing.assert_allclose(
            approximation / scale, (q[:, :3] * values[:3]) @ q[:, :3].T, atol=1e-9
        )


@each("rank", [10, 50])
def test_no_copy_of_a_multiple_eigenvalue_is_missed(rank) -> None:
    # all corners of a cube: eigenvalues are 10, 45, 120 … times the same
    x = (np.arange(1024)[:, None] >> np.arange(10) & 1).astype(float)
    svd = KernelSVD(rank, kernel="rbf", gamma=1.0, center=True, random_state=0).fit(x)
    e = np.exp(-1.0)
    levels = [1024 * ((1 - e) / 2) ** i * ((1 + e) / 2) ** (10 - i) for i in range(1, 3)]
    expected = np.repeat(levels, [10, 45])[:rank]
    np.testing.assert_allclose(svd.singular_values_, expected, rtol=1e-8)


def test_products_with_a_stored_matrix_do_not_evaluate_the_kernel_again() -> None:
    x = torch.randn(300, 3, dtype=torch.float64).numpy()
    values = 0

    def kernel(a, b):
        nonlocal values
        values += len(a) * len(b)
        return rbf_kernel(a, b)

    KernelSVD(3, kernel=kernel, center=True, random_state=0).fit_transform(x)
    assert values <= 300 * 300 + 300
