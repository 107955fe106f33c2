"""The scikit-learn estimator."""

import itertools
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import scipy.sparse
import torch
from numpy.typing import NDArray
from tests.house.rows import each

from primal_attention.ksvd import KernelSVD
from primal_attention.ksvd import estimator as estimator_module

pytest.importorskip("sklearn")
from sklearn.base import clone
from sklearn.decomposition import PCA, KernelPCA
from sklearn.linear_model import Ridge
from sklearn.multioutput import MultiOutputRegressor
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator

FEW = {"n_landmarks": 20}


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def softmax_of(queries: NDArray[np.float64], keys: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.exp(queries @ np.triu(np.ones((3, 3))) @ keys.T / 3)


@pytest.mark.raw
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"solver": "matrix_free", "center": True},
        {"solver": "nystrom"},
        {"kernel": "linear", "solver": "qr"},
        {"kernel": "cosine", "solver": "lanczos", "center": True},
        {"kernel": "precomputed"},
    ],
    ids=["default", "matrix-free", "nystrom", "qr", "lanczos", "precomputed"],
)
def test_scikit_learn_estimator_checks(options) -> None:
    expected = {"check_nonsquare_error": "a kernel between two data sets is not square"}
    results = check_estimator(
        KernelSVD(**options),
        expected_failed_checks=expected if options.get("kernel") == "precomputed" else None,
        on_skip=None,
        on_fail=None,
    )
    failed = {r["check_name"]: r["exception"] for r in results if r["status"] == "failed"}
    assert not failed
    assert len(results) > 40


@pytest.mark.slow
def test_no_estimator_check_is_skipped() -> None:
    # one of them needs this variable before scipy is imported
    code = (
        "from sklearn.utils.estimator_checks import check_estimator\n"
        "from primal_attention.ksvd import KernelSVD\n"
        "results = check_estimator(KernelSVD(), on_fail=None)\n"
        "left = [r['check_name'] for r in results if r['status'] != 'passed']\n"
        "assert results and not left, left\n"
    )
    environment = {**os.environ, "SCIPY_ARRAY_API": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@pytest.mark.parametrize("solver", ["dense", "lanczos", "matrix_free"])
@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        ("rbf", {"gamma": 0.4}),
        ("linear", {}),
        ("cosine", {}),
        ("poly", {"gamma": 0.5, "degree": 2, "coef0": 1.0}),
    ],
)
def test_symmetric_positive_kernel_reproduces_kernel_pca(kernel, options, solver) -> None:
    # columns of different scale keep the leading eigenvalues apart
    x = rng().normal(size=(200, 3)) * [1.5, 1.0, 0.6]
    new = rng().normal(size=(9, 3))
    theirs = KernelPCA(3, kernel=kernel, eigen_solver="dense", **options).fit(x)
    ours = KernelSVD(
        3,
        kernel="polynomial" if kernel == "poly" else kernel,
        center=True,
        solver=solver,
        options={"tol": 1e-10},
        random_state=0,
        **options,
    ).fit(x)
    np.testing.assert_allclose(ours.singular_values_, theirs.eigenvalues_, rtol=1e-9)
    sign = np.sign((ours.transform(x) * theirs.transform(x)).sum(0))
    for rows in (x, new):
        np.testing.assert_allclose(ours.transform(rows), sign * theirs.transform(rows), atol=1e-7)
        np.testing.assert_allclose(ours.transform_right(rows), ours.transform(rows), atol=1e-7)


def test_linear_centered_kernel_is_pca() -> None:
    x = rng().normal(size=(100, 5)) * [5, 4, 3, 2, 1]
    ours = KernelSVD(3, kernel="linear", center=True).fit_transform(x)
    np.testing.assert_allclose(np.abs(ours), np.abs(PCA(3).fit_transform(x)), atol=1e-9)


@each("center", [False, True])
@pytest.mark.parametrize("kernel", ["cosine", "exponential", "laplacian", "rbf", softmax_of])
def test_both_transforms_multiply_to_the_kernel(kernel, center) -> None:
    x, y = rng().normal(size=(40, 3)), rng().normal(size=(25, 3))
    svd = KernelSVD(25, kernel=kernel, center=center).fit(x, right=y)
    k = svd._row_kernel().matrix(x, y, stores=True) @ np.eye(len(y))
    if center:
        k = k - k.mean(0) - k.mean(1, keepdims=True) + k.mean()
    np.testing.assert_allclose(svd.transform(x) @ svd.transform_right(y).T, k, atol=1e-9)


@each("center", [False, True])
@pytest.mark.parametrize("solver", ["dense", "lanczos", "matrix_free"])
def test_new_rows_on_both_sides_follow_the_training_kernel(solver, center) -> None:
    generator = rng()
    x, y = generator.normal(size=(150, 3)), generator.normal(size=(130, 3))
    new_x, new_y = generator.normal(size=(6, 3)), generator.normal(size=(4, 3))
    svd = KernelSVD(
        4, kernel=softmax_of, center=center, solver=solver, options={"tol": 1e-10}, random_state=0
    ).fit(x, right=y)
    k, left, right = softmax_of(x, y), softmax_of(new_x, y), softmax_of(x, new_y)
    if center:
        left = left - left.mean(1, keepdims=True) - k.mean(0) + k.mean()
        right = right - right.mean(0) - k.mean(1, keepdims=True) + k.mean()
    root = np.sqrt(svd.singular_values_)
    np.testing.assert_allclose(
        svd.transform(new_x), left @ svd.right_vectors_ / root, rtol=1e-6, atol=1e-7
    )
    np.testing.assert_allclose(
        svd.transform_right(new_y), right.T @ svd.left_vectors_ / root, rtol=1e-6, atol=1e-7
    )
    np.testing.assert_allclose(svd.transform(x), svd.left_vectors_ * root, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        svd.transform_right(y), svd.right_vectors_ * root, rtol=1e-5, atol=1e-6
    )


def test_row_normalized_attention_as_a_callable_kernel() -> None:
    # a kernel may close over training data: its normalizer is then part of its definition
    x, y = rng().normal(size=(50, 3)), rng().normal(size=(40, 3))

    def attention(queries, keys):
        return np.exp(queries @ keys.T) / np.exp(queries @ y.T).sum(1, keepdims=True)

    svd = KernelSVD(3, kernel=attention).fit(x, right=y)
    weights = attention(x, y)
    np.testing.assert_allclose(weights.sum(1), 1)
    np.testing.assert_allclose(
        svd.singular_values_, np.linalg.svd(weights, compute_uv=False)[:3], rtol=1e-10
    )


def test_sides_of_different_width_need_a_callable_kernel() -> None:
    x, y = rng().normal(size=(30, 3)), rng().normal(size=(20, 2))
    svd = KernelSVD(2, kernel=lambda a, b: np.cos(a[:, :1] - b[:, 1])).fit(x, right=y)
    assert svd.transform(x).shape == (30, 2)
    assert svd.transform_right(y).shape == (20, 2)
    with pytest.raises(ValueError, match="X has 3 features and right has 2"):
        KernelSVD(2).fit(x, right=y)
    with pytest.raises(ValueError, match="Y has 3 features, but KernelSVD was fitted with 2"):
        svd.transform_right(x)


def test_targets_of_a_pipeline_are_ignored() -> None:
    x = rng().normal(size=(30, 3))
    plain = KernelSVD(2).fit(x)
    for target in (np.arange(30), list(range(30))):
        other = KernelSVD(2).fit(x, target)
        np.testing.assert_array_equal(other.singular_values_, plain.singular_values_)
    scores = make_pipeline(KernelSVD(2), PCA(1)).fit_transform(x, np.arange(30))
    assert scores.shape == (30, 1)


@each("wrap", [np.asarray, np.ndarray.tolist, scipy.sparse.csr_array])
def test_a_target_with_two_dimensions_is_not_taken_for_the_right_side(wrap) -> None:
    x = rng().normal(size=(30, 3))
    target = wrap(rng().normal(size=(30, 3)))
    for model in (KernelSVD(2), make_pipeline(KernelSVD(2), Ridge())):
        with pytest.raises(ValueError, match=r"y has shape \(30, 3\).*fit\(X, right=keys\)"):
            model.fit(x, target)
    with pytest.raises(ValueError, match="y has shape"):
        KernelSVD(2).fit_transform(x, target)
    with pytest.raises(ValueError, match="y has shape"):
        KernelSVD(2).fit(x, np.zeros((30, 1)))
    # the way that the message names
    several = MultiOutputRegressor(make_pipeline(KernelSVD(2), Ridge()))
    assert several.fit(x, x).predict(x).shape == (30, 3)


def test_the_right_side_reaches_a_step_of_a_pipeline_by_name() -> None:
    x, y = rng().normal(size=(30, 3)), rng().normal(size=(20, 3))
    pipeline = make_pipeline(KernelSVD(2), PCA(1)).fit(x, kernelsvd__right=y)
    assert pipeline[0].right_vectors_.shape == (20, 2)


@pytest.mark.parametrize(
    ("kernel", "n", "d", "expected"),
    [
        ("rbf", 100, 3, "dense"),
        ("rbf", 400, 3, "lanczos"),
        ("rbf", 700, 3, "matrix_free"),
        ("linear", 100, 3, "qr"),
        ("cosine", 700, 3, "qr"),
        ("linear", 400, 300, "lanczos"),
        ("linear", 20, 30, "dense"),
    ],
)
def test_auto_chooses_the_cheapest_exact_solver(kernel, n, d, expected, monkeypatch) -> None:
    monkeypatch.setattr(estimator_module, "_MATRIX_BYTES", 600 * 600 * 8)
    x = rng().normal(size=(n, d))
    auto = KernelSVD(2, kernel=kernel, random_state=0).fit(x)
    assert auto.solver_ == expected
    dense = KernelSVD(2, kernel=kernel, solver="dense").fit(x)
    np.testing.assert_allclose(auto.singular_values_, dense.singular_values_, rtol=1e-8)


def test_directions_without_singular_value_are_dropped() -> None:
    x = rng().normal(size=(50, 3))
    for solver in ("dense", "lanczos", "qr", "matrix_free", "nystrom"):
        svd = KernelSVD(10, kernel="linear", solver=solver, random_state=0).fit(x)
        assert svd.n_components_ == 3
        assert svd.transform(x).shape == (50, 3)
        assert list(svd.get_feature_names_out()) == ["kernelsvd0", "kernelsvd1", "kernelsvd2"]


@each("dtype", [np.float32, np.float64])
@each("n", [20, 600])
@pytest.mark.parametrize(
    ("solver", "kernel"),
    [
        ("qr", "linear"),
        *itertools.product(
            ["dense", "lanczos", "matrix_free", "nystrom"], ["rbf", "linear", "exponential"]
        ),
    ],
)
def test_a_constant_kernel_has_no_directions_once_centered(solver, kernel, n, dtype) -> None:
    new = rng().normal(size=(9, 3)).astype(dtype)
    svd = KernelSVD(2, kernel=kernel, center=True, solver=solver, random_state=0)
    # numbers whose means round
    svd.fit(np.full((n, 3), [0.1, 0.7, -1.3], dtype=dtype))
    assert svd.singular_values_.tolist() == [0.0]
    assert not svd.transform(new).any()
    assert not svd.transform_right(new).any()


@pytest.mark.parametrize("solver", ["dense", "lanczos", "matrix_free", "nystrom"])
def test_overflowing_kernels_raise(solver) -> None:
    x = rng().normal(size=(400, 3))
    x[7] *= 1e3  # no landmark
    svd = KernelSVD(2, kernel="exponential", solver=solver, options=FEW, random_state=0)
    with pytest.raises(ValueError, match="NaN or infinite values; scale the data"):
        svd.fit(x)


@pytest.mark.parametrize("solver", ["dense", "lanczos", "matrix_free", "nystrom", "qr"])
def test_overflowing_features_raise(solver) -> None:
    x = 1e200 * rng().normal(size=(400, 3))
    with pytest.raises(ValueError, match="NaN or infinite values; scale the data"):
        KernelSVD(2, kernel="linear", solver=solver, random_state=0).fit(x)


def test_same_random_state_same_result() -> None:
    x = rng().normal(size=(600, 3))
    first, second = (KernelSVD(3, random_state=7).fit(x) for _ in range(2))
    np.testing.assert_array_equal(first.left_vectors_, second.left_vectors_)


@each("dtype", [np.float32, np.float64])
def test_dtype_is_kept_and_training_data_is_copied(dtype) -> None:
    x = rng().normal(size=(60, 3)).astype(dtype)
    svd = KernelSVD(2, center=True).fit(x)
    before = svd.transform(x.copy())
    new = x.copy()
    x[:] = 0
    assert before.dtype == dtype
    assert svd.left_vectors_.dtype == dtype
    np.testing.assert_array_equal(svd.transform(new), before)


@pytest.mark.parametrize("solver", ["dense", "lanczos", "matrix_free", "nystrom"])
def test_fit_transform_is_fit_and_transform(solver) -> None:
    x, y = rng().normal(size=(150, 3)), rng().normal(size=(130, 3))
    options = {"center": True, "solver": solver, "options": {**FEW, "tol": 1e-10}}
    first, second = (KernelSVD(3, random_state=0, **options) for _ in range(2))
    together = first.fit_transform(x, right=y)
    np.testing.assert_allclose(together, second.fit(x, right=y).transform(x), atol=1e-7)


def test_pickle_and_clone() -> None:
    x = rng().normal(size=(60, 3))
    svd = KernelSVD(2, kernel="laplacian", center=True).fit(x)
    again = pickle.loads(pickle.dumps(svd))
    np.testing.assert_array_equal(again.transform(x), svd.transform(x))
    assert clone(svd).get_params() == svd.get_params()


@pytest.mark.raw
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "gauss"}, "kernel is 'gauss'"),
        ({"solver": "lu"}, "solver is 'lu'; it must be one of"),
        ({"solver": "qr"}, "explicit features"),
        ({"n_components": 0}, "n_components must be at least 1, got 0"),
        ({"options": {"n_landmarks": 0}}, "n_landmarks must be at least 1"),
        ({"options": {"n_landmark": 20}}, "n_landmarks"),
        ({"kernel": lambda a, b: np.ones(3)}, r"kernel returned shape \(3,\) for 20 and 20 rows"),
    ],
)
def test_invalid_parameters_raise(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        KernelSVD(**options).fit(rng().normal(size=(20, 3)))


@pytest.mark.parametrize("solver", ["lanczos", "matrix_free"])
def test_a_fit_stops_at_its_time_limit_with_what_it_has(solver) -> None:
    x = rng().normal(size=(300, 5))
    svd = KernelSVD(3, solver=solver, random_state=0)
    with pytest.warns(RuntimeWarning, match="did not converge .* in 1 passes; raise time_limit"):
        svd.fit(x, time_limit=1e-9)
    assert np.isfinite(svd.singular_values_).all()
    # what it has is a part of the whole
    exact = KernelSVD(3, solver=solver, random_state=0).fit(x, time_limit=600.0)
    assert 0 < svd.singular_values_[0] / exact.singular_values_[0] <= 1 + 1e-9
    dense = KernelSVD(3, solver="dense").fit(x, time_limit=1e-9)
    np.testing.assert_allclose(exact.singular_values_, dense.singular_values_, rtol=1e-5)


@pytest.mark.raw
def test_a_time_limit_is_a_positive_number() -> None:
    with pytest.raises(ValueError, match="time_limit must be a positive number of seconds"):
        KernelSVD().fit(rng().normal(size=(20, 3)), time_limit=0)


def test_solvers_do_not_import_scikit_learn_and_the_estimator_names_its_extra() -> None:
    code = (
        "import sys, primal_attention.ksvd as k\n"
        "assert 'sklearn' not in sys.modules\n"
        "sys.modules['sklearn'] = None\n"
        "try:\n"
        "    k.KernelSVD\n"
        "except ModuleNotFoundError as e:\n"
        "    assert '[sklearn]' in str(e), e\n"
        "else:\n"
        "    raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("solver", ["dense", "qr"])
def test_read_only_arrays_do_not_warn(solver) -> None:
    X = rng().standard_normal((12, 3))
    X.flags.writeable = False
    torch.set_warn_always(True)  # torch warns of such arrays once in a process
    try:
        model = KernelSVD(kernel="linear", n_components=2, solver=solver, random_state=0)
        assert model.fit(X).transform(X).shape == (12, 2)
    finally:
        torch.set_warn_always(False)
