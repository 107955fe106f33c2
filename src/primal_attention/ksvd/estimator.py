"""The asymmetric kernel SVD as a scikit-learn estimator."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from primal_attention.ksvd.kernels import FEATURE_MAPS, KernelFunction, named_kernel
from primal_attention.ksvd.solvers import (
    KernelTriplets,
    apply_kernel,
    count_nonzero,
    dense_svd,
    feature_svd,
    matrix_free_svd,
    nystrom_svd,
    swap_sides,
)

__all__ = ["KernelSVD"]

_SOLVERS = ("auto", "dense", "matrix_free", "nystrom", "qr")
# number of rows on the shorter side up to which a full SVD takes well under a second
_DENSE_ROWS = 500


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

    kernel : {"cosine", "exponential", "laplacian", "linear", "polynomial", "rbf"} or callable, \
            default="rbf"
        ``"exponential"`` is ``exp(γ ⟨x, y⟩)``, softmax attention before normalization. A callable
        is called as ``kernel(X, Y)`` with two-dimensional arrays and returns the matrix of shape
        (rows of X, rows of Y). It may be asymmetric. Each value must depend only on its own two
        rows, because solvers pass blocks of rows.

    gamma : float, default=None
        Scale inside the kernel: ``1 / n_features`` if None, ``1 / sqrt(n_features)`` for
        ``"exponential"``.

    degree : int, default=3
        Degree of the polynomial kernel.

    coef0 : float, default=1.0
        Constant of the polynomial kernel.

    center : bool, default=False
        Center the features of both sides, that is, decompose ``C K C``.

    solver : {"auto", "dense", "matrix_free", "nystrom", "qr"}, default="auto"
        ``"dense"`` forms the matrix. ``"matrix_free"`` evaluates it in blocks of rows and needs
        memory linear in the number of rows. ``"qr"`` uses the features of a linear or cosine
        kernel. ``"nystrom"`` is approximate: it uses ``n_landmarks`` rows of each side. ``"auto"``
        chooses the cheapest of the first three, which are exact.

    n_landmarks : int, default=256
        Number of landmarks of each side for ``solver="nystrom"``.

    tol : float, default=1e-6
        Relative residual at which ``solver="matrix_free"`` stops.

    max_passes : int, default=50
        Largest number of passes over the kernel for ``solver="matrix_free"``.

    random_state : int, RandomState instance or None, default=None
        Random start of ``"matrix_free"`` and random landmarks of ``"nystrom"``.

    Attributes
    ----------
    singular_values_ : ndarray of shape (n_components_,)
        The singular values ``Σ``, descending.

    left_vectors_ : ndarray of shape (n_samples, n_components_)
        ``H_e``, orthonormal columns. The entry of largest magnitude in a column is positive.

    right_vectors_ : ndarray of shape (n_samples_right, n_components_)
        ``H_r``, orthonormal columns.

    X_fit_, Y_fit_ : ndarray
        The data of both sides.

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
    >>> svd = KernelSVD(n_components=4, kernel="exponential").fit(queries, keys)
    >>> svd.transform(queries).shape, svd.transform_right(keys).shape
    ((60, 4), (40, 4))
    """

    def __init__(
        self,
        n_components: int = 2,
        *,
        kernel: str | Callable[[NDArray[Any], NDArray[Any]], ArrayLike] = "rbf",
        gamma: float | None = None,
        degree: int = 3,
        coef0: float = 1.0,
        center: bool = False,
        solver: Literal["auto", "dense", "matrix_free", "nystrom", "qr"] = "auto",
        n_landmarks: int = 256,
        tol: float = 1e-6,
        max_passes: int = 50,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.n_components = n_components
        self.kernel = kernel
        self.gamma = gamma
        self.degree = degree
        self.coef0 = coef0
        self.center = center
        self.solver = solver
        self.n_landmarks = n_landmarks
        self.tol = tol
        self.max_passes = max_passes
        self.random_state = random_state

    def fit(self, X: ArrayLike, Y: ArrayLike | None = None) -> "KernelSVD":
        """Decompose the kernel between the rows of ``X`` and the rows of ``Y``.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Data of the left side (queries).

        Y : array-like of shape (n_samples_right, n_features_right), default=None
            Data of the right side (keys); ``X`` if None. Only a callable kernel can compare rows of
            different width. A one-dimensional ``Y`` is ignored: pipelines pass the target to every
            step.

        Returns
        -------
        self : KernelSVD
            The fitted estimator.
        """
        x: NDArray[Any] = validate_data(self, X, dtype=[np.float64, np.float32], copy=True)
        y = x
        if Y is not None and np.asarray(Y).ndim != 1:
            y = check_array(Y, dtype=x.dtype, copy=True, input_name="Y")
        kernel, features = self._kernel(), self._features()
        self._check_parameters(features)
        if not callable(self.kernel) and x.shape[1] != y.shape[1]:
            raise ValueError(
                f"X has {x.shape[1]} features and Y has {y.shape[1]}; named kernels need the same "
                "number. Use a callable kernel to compare rows of different width."
            )
        self.X_fit_, self.Y_fit_ = x, y
        self.solver_ = self._choose_solver(features)

        triplets = self._solve(kernel, features)
        sigma = triplets.singular_values
        # centring keeps the rounding error of the whole kernel; its norm is at least that of a row
        norm = float(kernel(_to_tensor(x[:1]), _to_tensor(y)).norm()) if self.center else 0.0
        found = count_nonzero(sigma, max(len(x), len(y)), norm=norm)
        if not found:
            found, sigma = 1, torch.zeros_like(sigma)
        self.n_components_ = found
        self.singular_values_ = sigma[:found].numpy()
        self.left_vectors_ = triplets.left[:, :found].numpy()
        self.right_vectors_ = triplets.right[:, :found].numpy()

        # singular vectors of C K C sum to zero, so centring a new row only shifts its scores
        self._left_offset = self._right_offset = np.zeros(found, dtype=x.dtype)
        if self.center:
            self._left_offset = self._left_scores(x).mean(0)
            self._right_offset = self._right_scores(y).mean(0)
        return self

    def transform(self, X: ArrayLike) -> NDArray[Any]:
        """Project rows of the left side.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Old or new rows.

        Returns
        -------
        scores : ndarray of shape (n_samples, n_components_)
            ``κ(X, Y_fit_) H_r Σ^(-1/2)``; equals ``H_e Σ^(1/2)`` on the data of :meth:`fit`.
        """
        check_is_fitted(self)
        return self._left_scores(validate_data(self, X, dtype=self.X_fit_.dtype, reset=False))

    def transform_right(self, Y: ArrayLike) -> NDArray[Any]:
        """Project rows of the right side.

        Parameters
        ----------
        Y : array-like of shape (n_samples, n_features_right)
            Old or new rows.

        Returns
        -------
        scores : ndarray of shape (n_samples, n_components_)
            ``κ(X_fit_, Y)ᵀ H_e Σ^(-1/2)``; equals ``H_r Σ^(1/2)`` on the data of :meth:`fit`.
        """
        check_is_fitted(self)
        y: NDArray[Any] = check_array(Y, dtype=self.Y_fit_.dtype, input_name="Y")
        if y.shape[1] != self.Y_fit_.shape[1]:
            raise ValueError(
                f"Y has {y.shape[1]} features, but KernelSVD was fitted with "
                f"{self.Y_fit_.shape[1]} on the right side; pass rows of that width."
            )
        return self._right_scores(y)

    def _left_scores(self, x: NDArray[Any]) -> NDArray[Any]:
        scores = self._project(self._kernel(), x, self.Y_fit_, self.right_vectors_)
        return scores - self._left_offset

    def _right_scores(self, y: NDArray[Any]) -> NDArray[Any]:
        scores = self._project(swap_sides(self._kernel()), y, self.X_fit_, self.left_vectors_)
        return scores - self._right_offset

    def _project(
        self, kernel: KernelFunction, new: NDArray[Any], old: NDArray[Any], vectors: NDArray[Any]
    ) -> NDArray[Any]:
        """Return ``κ(new, old) vectors Σ^(-1/2)``, from features if the kernel has them."""
        sigma = self.singular_values_
        # if all singular values are zero, all scores are zero
        coefficients = torch.from_numpy(vectors / np.sqrt(np.where(sigma > 0, sigma, np.inf)))
        x, y = _to_tensor(new), _to_tensor(old)
        features = self._features()
        if features is not None:
            return (features(x) @ (features(y).T @ coefficients)).numpy()
        return apply_kernel(kernel, x, y, coefficients).numpy()

    def _solve(
        self, kernel: KernelFunction, features: Callable[[Tensor], Tensor] | None
    ) -> KernelTriplets:
        x = _to_tensor(self.X_fit_)
        y = x if self.Y_fit_ is self.X_fit_ else _to_tensor(self.Y_fit_)
        seed = check_random_state(self.random_state).randint(np.iinfo(np.int32).max)
        generator = torch.Generator().manual_seed(int(seed))
        rank, center = self.n_components, self.center
        if self.solver_ == "qr" and features is not None:
            return feature_svd(features(x), features(y), rank, center=center)
        if self.solver_ == "dense":
            return dense_svd(kernel(x, y), rank, center=center)
        if self.solver_ == "nystrom":
            return nystrom_svd(
                kernel,
                x,
                y,
                rank,
                num_landmarks=self.n_landmarks,
                center=center,
                generator=generator,
            )
        return matrix_free_svd(
            kernel,
            x,
            y,
            rank,
            center=center,
            tol=self.tol,
            max_passes=self.max_passes,
            generator=generator,
        )

    def _choose_solver(self, features: Callable[[Tensor], Tensor] | None) -> str:
        if self.solver != "auto":
            return self.solver
        shorter = min(self.X_fit_.shape[0], self.Y_fit_.shape[0])
        if features is not None and self.X_fit_.shape[1] < shorter:
            return "qr"
        return "dense" if shorter <= _DENSE_ROWS else "matrix_free"

    def _kernel(self) -> KernelFunction:
        if not callable(self.kernel):
            return named_kernel(self.kernel, gamma=self.gamma, degree=self.degree, coef0=self.coef0)
        user_kernel = self.kernel

        def call(x: Tensor, y: Tensor) -> Tensor:
            values = np.asarray(user_kernel(x.numpy(), y.numpy()), dtype=x.numpy().dtype)
            if values.shape != (x.shape[0], y.shape[0]):
                raise ValueError(
                    f"kernel returned shape {values.shape} for {x.shape[0]} and {y.shape[0]} "
                    f"rows; it must return shape {(x.shape[0], y.shape[0])}."
                )
            return _to_tensor(values)

        return call

    def _features(self) -> Callable[[Tensor], Tensor] | None:
        return None if callable(self.kernel) else FEATURE_MAPS.get(self.kernel)

    def _check_parameters(self, features: Callable[[Tensor], Tensor] | None) -> None:
        if self.solver not in _SOLVERS:
            raise ValueError(f"solver is {self.solver!r}; it must be one of {_SOLVERS}.")
        if self.solver == "qr" and features is None:
            raise ValueError(
                f"solver='qr' cannot use the kernel {self.kernel!r}; it needs one with explicit "
                f"features: {sorted(FEATURE_MAPS)}. Use solver='matrix_free'."
            )
        for name in ("n_components", "n_landmarks", "max_passes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")

    @property
    def _n_features_out(self) -> int:
        return self.n_components_

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def _to_tensor(array: NDArray[Any]) -> Tensor:
    """Return a tensor that shares the array's memory; a read-only array is copied."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
