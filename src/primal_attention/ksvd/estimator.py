"""The asymmetric kernel SVD as a scikit-learn estimator."""

import time
from collections.abc import Mapping
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array, issparse, sparray, spmatrix
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import Tags, check_array, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from primal_attention.ksvd.kernels import FEATURE_MAPS, KERNELS
from primal_attention.ksvd.operators import is_symmetric, operator_svd
from primal_attention.ksvd.options import KernelSVDOptions
from primal_attention.ksvd.rows import (
    CallableKernel,
    DataRows,
    Matrix,
    RowKernel,
    Sides,
    matrix_sides,
    to_array,
)
from primal_attention.ksvd.solvers import (
    KernelMeans,
    KernelTriplets,
    count_nonzero,
    dense_svd,
    feature_svd,
    kernel_means,
    matrix_free_svd,
    nystrom_svd,
)
from primal_attention.support.options import check_time_limit, read_options

__all__ = ["KernelSVD"]

Data: TypeAlias = ArrayLike | sparray | spmatrix
"""What scikit-learn reads as a matrix."""

_SOLVERS = ("auto", "dense", "lanczos", "matrix_free", "nystrom", "qr")
# number of rows on the shorter side up to which a full SVD takes milliseconds
_DENSE_ROWS = 200
# number of features up to which thin QR is the fastest solver, whatever the rank
_QR_FEATURES = 64
# largest kernel matrix that solver="auto" stores
_MATRIX_BYTES = 512 * 2**20


class KernelSVD(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Singular value decomposition of a kernel between two data sets.

    Solves ``K H_r = H_e Σ`` and ``Kᵀ H_e = H_r Σ`` for ``K_ij = κ(x_i, y_j)``. The two sides may
    hold different data, and ``κ(x, y)`` may differ from ``κ(y, x)``. With one data set, a symmetric
    positive kernel and ``center=True`` this is kernel PCA.

    Parameters
    ----------
    n_components : int, default=2
        Number of singular triplets. Only triplets with a positive singular value are returned, so
        there may be fewer. If all singular values are zero (a zero kernel, or a constant one with
        ``center=True``), one component with singular value and scores zero is returned.

    kernel : {"cosine", "exponential", "laplacian", "linear", "polynomial", "precomputed", "rbf"} \
            or callable, default="rbf"
        ``"exponential"`` is ``exp(γ ⟨x, y⟩)``, softmax attention before normalization. With
        ``"precomputed"`` the data are kernel values: ``K`` of shape (n_samples, n_samples_right) in
        :meth:`fit`, which need not be square or symmetric. A callable is called as ``kernel(X, Y)``
        with two-dimensional arrays, or CSR arrays if the data of :meth:`fit` are sparse. It returns
        the matrix of shape (rows of X, rows of Y), which may be asymmetric. Each value must depend
        only on its own two rows, because solvers pass blocks of rows.

    gamma : float, default=None
        Scale inside the kernel: ``1 / n_features`` if None, ``1 / sqrt(n_features)`` for
        ``"exponential"``.

    degree : int, default=3
        Degree of the polynomial kernel.

    coef0 : float, default=1.0
        Constant of the polynomial kernel.

    center : bool, default=False
        Center the features of both sides, that is, decompose ``C K C``.

    solver : {"auto", "dense", "lanczos", "matrix_free", "nystrom", "qr"}, default="auto"
        ``"dense"`` is the complete SVD of the matrix. ``"lanczos"`` multiplies with the stored
        matrix, or with the rows themselves for a linear or cosine kernel. ``"matrix_free"``
        evaluates the kernel in blocks of rows in every pass and needs memory linear in the number
        of rows. ``"qr"`` uses the features of a linear or cosine kernel; the data must be dense.
        ``"nystrom"`` is approximate: it uses some rows of each side as landmarks. ``"auto"``
        chooses the cheapest of the others, which are exact.

    options : KernelSVDOptions or dict, default=None
        What is rarely touched: ``n_landmarks``, ``tol`` and ``max_passes``; see
        :class:`~primal_attention.ksvd.options.KernelSVDOptions`.

    random_state : int, RandomState instance or None, default=None
        Random start of ``"lanczos"`` and ``"matrix_free"``, random landmarks of ``"nystrom"``.

    Attributes
    ----------
    singular_values_ : ndarray of shape (n_components_,)
        The singular values ``Σ``, descending.

    left_vectors_ : ndarray of shape (n_samples, n_components_)
        ``H_e``, orthonormal columns. The entry of largest magnitude in a column is positive.

    right_vectors_ : ndarray of shape (n_samples_right, n_components_)
        ``H_r``, orthonormal columns.

    X_fit_, Y_fit_ : ndarray or CSR array
        The data of both sides; None with ``kernel="precomputed"``.

    n_components_ : int
        Number of triplets found.

    n_features_in_ : int
        Number of columns of ``X``.

    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the columns of ``X``, if it had string names.

    solver_ : str
        The solver that was used.

    See Also
    --------
    sklearn.decomposition.KernelPCA : The symmetric special case.

    Notes
    -----
    Both transforms are scaled so that their inner product approximates the kernel:
    ``transform(X) @ transform_right(Y).T ≈ κ(X, Y)``. The projection scores of the KSVD literature,
    ``e = κ(x, Y) H_r``, are ``transform(X) * sqrt(singular_values_)``.

    References
    ----------
    J. A. K. Suykens, "SVD revisited: a new variational principle, compatible feature maps and
    nonlinear extensions", Applied and Computational Harmonic Analysis, 2016.

    Q. Tao, F. Tonin, A. Lambert, Y. Chen, P. Patrinos, J. A. K. Suykens, "Learning in feature
    spaces via coupled covariances: asymmetric kernel SVD and Nyström method", ICML 2024.

    Examples
    --------
    >>> import numpy as np
    >>> from primal_attention.ksvd import KernelSVD
    >>> rng = np.random.default_rng(0)
    >>> queries, keys = rng.normal(size=(60, 3)), rng.normal(size=(40, 3))
    >>> svd = KernelSVD(n_components=4, kernel="exponential").fit(queries, right=keys)
    >>> svd.transform(queries).shape, svd.transform_right(keys).shape
    ((60, 4), (40, 4))
    """

    def __init__(
        self,
        n_components: int = 2,
        *,
        kernel: str | CallableKernel = "rbf",
        gamma: float | None = None,
        degree: int = 3,
        coef0: float = 1.0,
        center: bool = False,
        solver: Literal["auto", "dense", "lanczos", "matrix_free", "nystrom", "qr"] = "auto",
        options: KernelSVDOptions | Mapping[str, object] | None = None,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.n_components = n_components
        self.kernel = kernel
        self.gamma = gamma
        self.degree = degree
        self.coef0 = coef0
        self.center = center
        self.solver = solver
        self.options = options
        self.random_state = random_state

    def fit(
        self,
        X: Data,
        y: Data | None = None,
        *,
        right: Data | None = None,
        time_limit: float | None = None,
    ) -> "KernelSVD":
        """Decompose the kernel between the rows of ``X`` and the rows of ``right``.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_samples, n_features)
            Data of the left side (queries). With ``kernel="precomputed"`` the kernel matrix of
            shape (n_samples, n_samples_right).

        y : array-like of shape (n_samples,), default=None
            Ignored: pipelines pass the target to every step. Two dimensions raise an error, because
            they could be meant as ``right``.

        right : {array-like, sparse matrix} of shape (n_samples_right, n_features_right), \
                default=None
            Data of the right side (keys); ``X`` if None. Only a callable kernel can compare rows of
            different width.

        time_limit : float, default=None
            Seconds after which ``"lanczos"`` and ``"matrix_free"`` begin no further pass: they
            warn and return the triplets that they have. The other solvers take their one pass.

        Returns
        -------
        self : KernelSVD
            The fitted estimator.
        """
        self._fit(X, y, right, time_limit)
        return self

    def fit_transform(
        self,
        X: Data,
        y: Data | None = None,
        *,
        right: Data | None = None,
        time_limit: float | None = None,
    ) -> NDArray[np.floating]:
        """Fit and return the scores of ``X``, without evaluating the kernel again.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_samples, n_features)
            As in :meth:`fit`.

        y : array-like of shape (n_samples,), default=None
            As in :meth:`fit`.

        right : {array-like, sparse matrix} of shape (n_samples_right, n_features_right), \
                default=None
            As in :meth:`fit`.

        time_limit : float, default=None
            As in :meth:`fit`.

        Returns
        -------
        scores : ndarray of shape (n_samples, n_components_)
            As in :meth:`transform`.
        """
        x = self._fit(X, y, right, time_limit)
        if self.solver_ == "nystrom":
            # its vectors are approximate; the scores of transform use the kernel itself
            return self._left_scores(x)
        scores: NDArray[np.floating] = self.left_vectors_ * np.sqrt(self.singular_values_)
        return scores

    def _fit(
        self, X: Data, y: Data | None, right: Data | None, time_limit: float | None
    ) -> DataRows:
        """Fit and return the checked data of the left side."""
        check_time_limit(time_limit)
        deadline = None if time_limit is None else time.monotonic() + time_limit
        shape = y.shape if isinstance(y, sparray | spmatrix) else np.asarray(y).shape
        if len(shape) > 1:
            raise ValueError(
                f"y has shape {shape}; KernelSVD ignores a target of one dimension and "
                "refuses others. Pass the data of the right side by name: fit(X, right=keys). "
                "For targets with several columns, wrap the pipeline in "
                "sklearn.multioutput.MultiOutputRegressor or MultiOutputClassifier."
            )
        self._check_parameters()
        x, keys = self._check_data(X, right)
        self.X_fit_: DataRows | None = None if self._is_precomputed else x
        self.Y_fit_: DataRows | None = None if self._is_precomputed else keys
        sides = matrix_sides(x) if self._is_precomputed else self._row_kernel().sides(x, keys)
        self.solver_ = self._choose_solver(x, keys)
        matrix = self._matrix(x, keys, sides)

        triplets = self._solve(x, keys, sides, matrix, deadline)
        sigma = triplets.singular_values
        # centring keeps the rounding error of the whole kernel; its norm is at least that of a row
        norm = float(sides.kernel(sides.x[:1], sides.y).norm()) if self.center else 0.0
        found = count_nonzero(sigma, max(len(sides.x), len(sides.y)), norm=norm)
        if not found:
            found, sigma = 1, torch.zeros_like(sigma)
        self.n_components_ = found
        self.singular_values_ = sigma[:found].numpy()
        self.left_vectors_ = triplets.left[:, :found].numpy()
        self.right_vectors_ = triplets.right[:, :found].numpy()

        # singular vectors of C K C sum to zero, so centring a new row only shifts its scores
        self._left_offset = self._right_offset = np.zeros(found, dtype=x.dtype)
        if self.center:
            means = _matrix_means(matrix) if matrix is not None else kernel_means(*sides)
            self._left_offset = means.columns.numpy() @ self._scaled(self.right_vectors_)
            self._right_offset = means.rows.numpy() @ self._scaled(self.left_vectors_)
        return x

    def transform(self, X: Data) -> NDArray[np.floating]:
        """Project rows of the left side.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_samples, n_features)
            Old or new rows. With ``kernel="precomputed"`` their kernel values with the right side
            of :meth:`fit`, of shape (n_samples, n_samples_right).

        Returns
        -------
        scores : ndarray of shape (n_samples, n_components_)
            ``κ(X, Y_fit_) H_r Σ^(-1/2)``; equals ``H_e Σ^(1/2)`` on the data of :meth:`fit`.
        """
        check_is_fitted(self)
        options = {"accept_sparse": "csr", "dtype": self.left_vectors_.dtype}
        return self._left_scores(validate_data(self, X, reset=False, **options))

    def transform_right(self, Y: Data) -> NDArray[np.floating]:
        """Project rows of the right side.

        Parameters
        ----------
        Y : {array-like, sparse matrix} of shape (n_samples, n_features_right)
            Old or new rows. With ``kernel="precomputed"`` one row for each new item of the right
            side, with its kernel values to the left side of :meth:`fit`: ``κ(X, Y)ᵀ``, of shape
            (n_samples, n_samples_left).

        Returns
        -------
        scores : ndarray of shape (n_samples, n_components_)
            ``κ(X_fit_, Y)ᵀ H_e Σ^(-1/2)``; equals ``H_r Σ^(1/2)`` on the data of :meth:`fit`.
        """
        check_is_fitted(self)
        dtype = self.right_vectors_.dtype
        y = check_array(Y, accept_sparse="csr", dtype=dtype, input_name="Y")
        width = len(self.left_vectors_) if self.Y_fit_ is None else self.Y_fit_.shape[1]
        if y.shape[1] != width:
            raise ValueError(
                f"Y has {y.shape[1]} features, but KernelSVD was fitted with {width} on the right "
                "side; pass rows of that width."
            )
        return self._right_scores(y)

    def _left_scores(self, x: DataRows) -> NDArray[np.floating]:
        scores = self._project(x, self.Y_fit_, self.right_vectors_, like=self.X_fit_)
        return scores - self._left_offset

    def _right_scores(self, y: DataRows) -> NDArray[np.floating]:
        scores = self._project(y, self.X_fit_, self.left_vectors_, like=self.Y_fit_, swapped=True)
        return scores - self._right_offset

    def _project(
        self,
        new: DataRows,
        old: DataRows | None,
        vectors: NDArray[np.floating],
        *,
        like: DataRows | None,
        swapped: bool = False,
    ) -> NDArray[np.floating]:
        """Return ``κ(new, old) vectors Σ^(-1/2)``."""
        coefficients = self._scaled(vectors)
        if old is None:
            return np.asarray(new @ coefficients)  # rows of the kernel itself
        if callable(self.kernel) and issparse(new) != issparse(like):
            new = csr_array(new) if issparse(like) else to_array(new)
        return self._row_kernel().apply(new, old, coefficients, swapped=swapped)

    def _scaled(self, vectors: NDArray[np.floating]) -> NDArray[np.floating]:
        sigma = self.singular_values_
        # if all singular values are zero, all scores are zero
        scaled: NDArray[np.floating] = vectors / np.sqrt(np.where(sigma > 0, sigma, np.inf))
        return scaled

    def _check_data(self, X: Data, right: Data | None) -> tuple[DataRows, DataRows]:
        """Return copies of both sides; a kernel matrix is not kept, so it is not copied."""
        options = {
            "accept_sparse": False if self.solver == "qr" else "csr",
            "copy": not self._is_precomputed,
        }
        x = validate_data(self, X, dtype=[np.float64, np.float32], **options)
        if right is None:
            return x, x
        if self._is_precomputed:
            raise ValueError(
                "right was given with kernel='precomputed', where X has the kernel values of both "
                "sides. Leave right out: fit(K)."
            )
        keys = check_array(right, dtype=x.dtype, input_name="right", **options)
        if not callable(self.kernel) and x.shape[1] != keys.shape[1]:
            raise ValueError(
                f"X has {x.shape[1]} features and right has {keys.shape[1]}; named kernels need "
                "the same number. Use a callable kernel to compare rows of different width."
            )
        return x, keys

    def _choose_solver(self, x: DataRows, keys: DataRows) -> str:
        if self.solver != "auto":
            return self.solver
        n, m = x.shape if self._is_precomputed else (x.shape[0], keys.shape[0])
        has_features = self._has_features
        width = x.shape[1]
        few = width <= max(_QR_FEATURES, 4 * self.n_components) and width < min(n, m)
        # QR costs (n + m) p²: it wins while the features are fewer than the rows
        if has_features and few and not (issparse(x) or issparse(keys)):
            return "qr"
        fits = n * m * x.dtype.itemsize <= _MATRIX_BYTES
        if min(n, m) <= _DENSE_ROWS and fits:
            return "dense"
        return "lanczos" if fits or has_features or self._is_precomputed else "matrix_free"

    def _matrix(self, x: DataRows, keys: DataRows, sides: Sides) -> Matrix | None:
        """Return the kernel for products with it; None if the solver evaluates it in blocks."""
        if self.solver_ in ("matrix_free", "nystrom"):
            return None
        if self.solver_ == "dense":
            return sides.kernel(sides.x, sides.y).numpy()
        if self._is_precomputed:
            return x
        fits = x.shape[0] * keys.shape[0] * x.dtype.itemsize <= _MATRIX_BYTES
        return self._row_kernel().matrix(x, keys, stores=fits)

    def _solve(
        self,
        x: DataRows,
        keys: DataRows,
        sides: Sides,
        matrix: Matrix | None,
        deadline: float | None,
    ) -> KernelTriplets:
        random_state = check_random_state(self.random_state)
        options = read_options(KernelSVDOptions, self.options)
        rank, center = self.n_components, self.center
        if self.solver_ == "qr":
            features = FEATURE_MAPS[str(self.kernel)]
            return feature_svd(features(sides.x), features(sides.y), rank, center=center)
        if self.solver_ == "dense":
            return dense_svd(torch.from_numpy(matrix), rank, center=center)
        if self.solver_ == "lanczos":
            is_named = not callable(self.kernel) and not self._is_precomputed
            return operator_svd(
                matrix,
                rank,
                symmetric=x is keys if is_named else is_symmetric(matrix),
                center=center,
                tol=options.tol,
                max_passes=options.max_passes,
                deadline=deadline,
                random_state=random_state,
            )
        # torch has a generator of its own: one draw of the caller's makes it repeatable
        seed = random_state.randint(np.iinfo(np.int32).max)
        generator = torch.Generator().manual_seed(int(seed))
        if self.solver_ == "nystrom":
            return nystrom_svd(
                *sides,
                rank,
                num_landmarks=options.n_landmarks,
                center=center,
                generator=generator,
            )
        return matrix_free_svd(
            *sides,
            rank,
            center=center,
            tol=options.tol,
            max_passes=options.max_passes,
            deadline=deadline,
            generator=generator,
        )

    @property
    def _is_precomputed(self) -> bool:
        return isinstance(self.kernel, str) and self.kernel == "precomputed"

    @property
    def _has_features(self) -> bool:
        return isinstance(self.kernel, str) and self.kernel in FEATURE_MAPS

    def _row_kernel(self) -> RowKernel:
        return RowKernel(self.kernel, gamma=self.gamma, degree=self.degree, coef0=self.coef0)

    def _check_parameters(self) -> None:
        names = [*sorted(KERNELS), "precomputed"]
        if not callable(self.kernel) and self.kernel not in names:
            raise ValueError(f"kernel is {self.kernel!r}; it must be a callable or one of {names}.")
        if self.solver not in _SOLVERS:
            raise ValueError(f"solver is {self.solver!r}; it must be one of {_SOLVERS}.")
        if self.solver == "qr" and not self._has_features:
            raise ValueError(
                f"solver='qr' cannot use the kernel {self.kernel!r}; it needs one with explicit "
                f"features: {sorted(FEATURE_MAPS)}. Use solver='auto'."
            )
        if self.n_components < 1:
            raise ValueError(f"n_components must be at least 1, got {self.n_components}.")
        read_options(KernelSVDOptions, self.options)  # raises for those that cannot be

    @property
    def _n_features_out(self) -> int:
        return self.n_components_

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        tags.input_tags.sparse = self.solver != "qr"
        tags.input_tags.pairwise = self._is_precomputed
        return tags


def _matrix_means(matrix: Matrix) -> KernelMeans:
    n, m = matrix.shape
    columns = matrix.T @ np.full(n, 1 / n, dtype=matrix.dtype)
    rows = matrix @ np.full(m, 1 / m, dtype=matrix.dtype)
    return KernelMeans(torch.from_numpy(columns), torch.from_numpy(rows))
