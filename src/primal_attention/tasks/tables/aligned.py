"""A classifier that carries rows to matched targets.

Each class has a cloud of dummies around its centre. Optimal transport matches rows with dummies of
their class, and a small network learns the matching. A row has the class of the nearest centre.
The matching changes the geometry of the learned map, not the accuracy.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike

from primal_attention.support.command import needs
from primal_attention.tasks.estimators import restore_classes
from primal_attention.tasks.tables.aligned_base import AlignedEstimator, Problem
from primal_attention.tasks.tables.aligned_geometry import (
    Floats,
    Geometry,
    Labels,
    MatchedClasses,
    class_means,
    num_outputs,
    place_centres,
)
from primal_attention.tasks.tables.aligned_model import AlignedConfig
from primal_attention.tasks.tables.columns import TableLike
from primal_attention.tasks.tables.settings import AlignedClassFitOptions

with needs("sklearn", "An estimator of aligned classes"):
    from scipy.optimize import minimize_scalar
    from scipy.special import logsumexp, softmax
    from sklearn.base import ClassifierMixin
    from sklearn.utils import assert_all_finite, column_or_1d
    from sklearn.utils.multiclass import check_classification_targets

__all__ = ["OTAlignedClassifier"]

_TEMPERATURES = (0.05, 50.0)
"""Range of calibrated temperatures."""


class OTAlignedClassifier(ClassifierMixin, AlignedEstimator):  # type: ignore[misc]
    """Classifier by the nearest centre after a learned map that optimal transport aligns.

    A geometric baseline, and a supervised embedding that can be drawn. It is not more accurate than
    the same network trained with cross-entropy. Do not use it with many irrelevant
    features, because matching uses Euclidean distances, nor if errors have unequal costs.

    Parameters
    ----------
    geometry : {"aligned-simplex", "simplex", "circle", "class-means", "learned"}, \
            default="aligned-simplex"
        Where the centres of the classes are. ``"aligned-simplex"``: a regular simplex, turned to
        the class means. ``"class-means"``: the means, pushed apart. ``"learned"``: an aligned
        simplex that training moves. ``"circle"`` is the published geometry, which fails with many
        classes: between two centres lie those of others.

    hidden : sequence of int, default=(32, 32)
        Widths of the hidden layers.

    n_components : int, default=None
        Coordinates of a mapped point; by default those of an encoded row, and more if the centres
        need them. With fewer, rows start from their principal components.

    max_epochs : int, default=60
        Most passes over the training part.

    batch_size : int, default=None
        Instances of an optimiser step; by default a tenth of the training part.

    learning_rate : float, default=0.01
        Learning rate.

    options : AlignedClassFitOptions, dict or None, default=None
        What is rarely changed: how rows are matched with dummies, temperature, patience,
        validation, categorical features.

    random_state : int, RandomState instance or None, default=None
        Seed of dummies, weights and batches.

    verbose : bool or None, default=None
        Whether to show progress; by default on a terminal only.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        The classes.

    temperature_ : float
        Scale of distances in probabilities.

    targets_ : ndarray of shape (n_instances, n_tokens, n_outputs)
        Targets of the distinct instances of the training part.

    encoder_ : TableEncoder
        The fitted encoder.

    model_ : AlignedMap
        The fitted network.

    history_ : History
        Losses of the training; ``None`` after :meth:`load`.

    n_features_in_ : int
        Number of columns.

    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the columns, if the training table was a frame with string names.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = OTAlignedClassifier(max_epochs=20, random_state=0).fit(X, y)
    >>> bool(model.score(X, y) > 0.9), model.transform(X).shape
    (True, (150, 4))
    """

    _options_type: ClassVar[type[AlignedClassFitOptions]] = AlignedClassFitOptions
    classes_: np.ndarray
    temperature_: float

    def __init__(
        self,
        geometry: Geometry = "aligned-simplex",
        *,
        hidden: Sequence[int] = (32, 32),
        n_components: int | None = None,
        max_epochs: int = 60,
        batch_size: int | None = None,
        learning_rate: float = 0.01,
        options: AlignedClassFitOptions | Mapping[str, object] | None = None,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool | None = None,
    ) -> None:
        super().__init__(
            hidden=hidden,
            n_components=n_components,
            max_epochs=max_epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            options=options,
            random_state=random_state,
            verbose=verbose,
        )
        self.geometry = geometry

    def fit(
        self,
        X: TableLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        *,
        time_limit: float | None = None,
    ) -> Self:
        """Train the map.

        Parameters
        ----------
        X : frame or array-like of shape (n_samples, n_features) or \
                (n_samples, n_tokens, n_features)
            A table; or instances with several rows each, which share a class.

        y : array-like of shape (n_samples,)
            Classes.

        sample_weight : array-like of shape (n_samples,), default=None
            Weight of each instance; zero leaves it out.

        time_limit : float or None, default=None
            Seconds of training after which it ends; the schedule is shortened to fit.

        Returns
        -------
        self : OTAlignedClassifier
            The fitted classifier.
        """
        self._check(y, time_limit)
        target = column_or_1d(y, warn=True)
        assert_all_finite(target, input_name="y")
        check_classification_targets(target)
        instances, kept, mass = self._distinct(X, target, sample_weight)
        self.classes_, codes = np.unique(kept, return_inverse=True)
        self._train(instances, codes, mass, codes, time_limit)
        return self

    def predict_proba(self, X: TableLike) -> Floats:
        """Return the probabilities of the classes.

        Parameters
        ----------
        X : frame or array-like
            Rows as in :meth:`fit`. Tokens of an instance add their log-scores.

        Returns
        -------
        probabilities : ndarray of shape (n_samples, n_classes)
            In the order of ``classes_``; rows have sum one.
        """
        distances = self._distances(self._dense(self._read(X, reset=False)))
        return softmax(-distances / self.temperature_, axis=1)

    def predict(self, X: TableLike) -> np.ndarray:
        """Return the class of the nearest centre.

        Parameters
        ----------
        X : frame or array-like
            Rows as in :meth:`fit`.

        Returns
        -------
        y : ndarray of shape (n_samples,)
            Classes.
        """
        nearest = self.predict_proba(X).argmax(1)
        return self.classes_[nearest]

    @property
    def centres_(self) -> Floats:
        """Centres of the classes ``[k q]``."""
        return self.model_.centres.detach().numpy()

    @property
    def _learns_centres(self) -> bool:
        return self.geometry == "learned"

    def _config(self, num_inputs: int) -> AlignedConfig:
        count = len(self.classes_)
        width = num_outputs(self.n_components or num_inputs, count, self.geometry)
        return AlignedConfig(num_inputs, width, count, tuple(self.hidden), self._learns_centres)

    def _place(self, whole: Problem) -> Floats:
        count = len(self.classes_)
        means = class_means(whole.points, whole.y, count, whole.weights)
        return place_centres(means, self.geometry)

    def _codes(self, y: np.ndarray) -> Labels:
        return y

    def _match(self, part: Problem, seed: int) -> MatchedClasses:
        return self._match_classes(part.points, part.y, self.centres_, part.weights, seed)

    def _distances(self, dense: Floats) -> Floats:
        """Return the distance of every instance to every centre, summed over tokens ``[n k]``."""
        offsets = self._mapped(dense)[:, :, None] - self.centres_  # [n t k q]
        return np.linalg.norm(offsets, axis=-1).sum(1)

    def _calibrate(self, part: Problem) -> None:
        """Set the temperature of the smallest cross-entropy."""
        options = self._fit_options()
        assert isinstance(options, AlignedClassFitOptions)
        if options.temperature != "auto":
            self.temperature_ = options.temperature
            return
        distances = self._distances(part.x)
        count, k = distances.shape
        # Platt's targets: a few correct answers do not prove that all are
        wanted = np.full((count, k), 1 / (count + k))
        wanted[np.arange(count), part.y] = (count + 1) / (count + k)

        def entropy(log_temperature: float) -> float:
            scores = -distances / np.exp(log_temperature)
            logs = scores - logsumexp(scores, axis=1, keepdims=True)
            return float(-part.weights @ (wanted * logs).sum(1))

        bounds = np.log(_TEMPERATURES)
        self.temperature_ = float(np.exp(minimize_scalar(entropy, bounds=bounds).x))

    def _groups(self, y: np.ndarray) -> np.ndarray:
        unseen = np.setdiff1d(y, self.classes_)
        if len(unseen):
            raise ValueError(
                f"y holds the class {unseen[0]}, which training has not seen; classes are "
                f"{self.classes_.tolist()}."
            )
        return y

    def _fitted(self) -> dict[str, Any]:
        return {
            "classes": self.classes_.tolist(),
            "dtype": self.classes_.dtype.str,
            "temperature": self.temperature_,
        }

    def _restore(self, fitted: dict[str, Any]) -> None:
        count = self.model_.config.num_centres
        self.classes_ = restore_classes(fitted["classes"], fitted["dtype"], count)
        self.temperature_ = float(fitted["temperature"])
