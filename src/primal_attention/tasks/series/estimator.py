"""Estimators of whole series for aeon: a classifier and a regressor.

The classes need aeon, the rest of the package does not: they are defined when first used.
"""

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from primal_attention.models import PretrainedModel
from primal_attention.support.command import UserError, needs, progress
from primal_attention.support.options import plain_options, read_options
from primal_attention.support.randomness import isolated
from primal_attention.tasks.estimators import SavedEstimator, check_fit, restore_classes
from primal_attention.tasks.series.blend.fitting import (
    Closed,
    add_attention,
    fit_closed,
    score_series,
)
from primal_attention.tasks.series.blend.model import SeriesBlend
from primal_attention.tasks.series.blend.shares import explained
from primal_attention.tasks.series.data import (
    SeriesCollection,
    SeriesDataset,
    check_filled,
    series_from_arrays,
)
from primal_attention.tasks.series.regression import SeriesValueTask
from primal_attention.tasks.series.settings import SeriesFitOptions, SeriesOptions
from primal_attention.tasks.series.task import SeriesTask, WholeSeriesTask
from primal_attention.tasks.task import Task
from primal_attention.tasks.trained import check_finite

with needs("series", "An estimator of time series"):
    from aeon.classification.base import BaseClassifier
    from aeon.regression.base import BaseRegressor

if TYPE_CHECKING:
    from typing import Self

    from primal_attention.tasks.series.model import SeriesNetwork
    from primal_attention.training import History
    from primal_attention.training.scores import Answers

__all__ = ["SeriesClassifier", "SeriesRegressor"]

_FOLDS = 3
"""Models of the attention part; each holds out its share of the series."""
_FEWEST = 100
"""Series below which the attention part is left out: it learns little from fewer."""
_EXPLAINED = 0.1
"""If the other parts explain less than this share of the uncertainty, attention trains longer. If
they explain more, it is left out for series of one channel: it brought nothing on such sets."""
_EPOCHS, _STEPS, _LONG_STEPS = 20, 240, 800
"""Epochs and steps of one model by default; with many series there are more steps."""
_JITTER = 0.1
"""Change of the series in a long training, which would learn the series by heart."""
_PASSES = 6
"""Fewest passes over the series in a training."""
_PREDICT_BATCH = 512
"""Series that are predicted at once."""


class _SeriesEstimator(SavedEstimator):
    """What classifier and regressor share: parameters, the fit of the parts, folders."""

    _task: ClassVar[type[Task]]
    _model: ClassVar[type[PretrainedModel]] = SeriesBlend
    _options_type: ClassVar[type[SeriesFitOptions]] = SeriesFitOptions
    task_: WholeSeriesTask
    model_: SeriesBlend
    history_: "History | None"
    metadata_: dict[str, object]
    # aeon's fit takes no more arguments; it deletes attributes that the class does not have
    _time_limit: float | None = None

    def __init__(
        self,
        attention: str = "primal-dual",
        dim: int = 64,
        num_heads: int = 4,
        num_layers: int = 2,
        max_epochs: int = _EPOCHS,
        batch_size: int = 32,
        learning_rate: float = 2e-3,
        options: SeriesFitOptions | Mapping[str, object] | None = None,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool | None = None,
    ) -> None:
        self.attention = attention
        self.dim = dim
        self.num_heads = num_heads
        self.num_layers = num_layers
        self.max_epochs = max_epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.options = options
        self.random_state = random_state
        self.verbose = verbose
        super().__init__()

    def fit(self, X: object, y: object, *, time_limit: float | None = None) -> "Self":
        """Fit the parts and choose their shares.

        Parameters
        ----------
        X : array of shape (n_cases, n_channels, n_timepoints), or list of arrays
            The series; in a list their lengths may differ.

        y : array-like of shape (n_cases,)
            Class or number of every series.

        time_limit : float or None, default=None
            Seconds that the fit may take. The convolutions are always fitted; the other parts get
            what is left. None takes as long as the parts need.

        Returns
        -------
        self : the estimator
            Fitted.
        """
        check_fit(self, time_limit)
        self._time_limit = time_limit
        try:
            return super().fit(X, y)  # type: ignore[misc]
        finally:
            del self._time_limit

    def _preprocess_collection(self, X: object, store_metadata: bool = True) -> Any:
        # aeon takes minima and types of the series before it calls us, which fails without any
        if isinstance(X, list | np.ndarray):
            check_filled(X)
        return super()._preprocess_collection(X, store_metadata)  # type: ignore[misc]

    @property
    def shares_(self) -> dict[str, float]:
        """Share of every part in the answers, by name; parts without one are not there."""
        parts = self.model_.config.parts
        return dict(zip(parts, self.model_.shares.tolist(), strict=True))

    def _fit_series(self, series: SeriesCollection) -> None:
        from sklearn.utils import check_random_state

        begun = time.monotonic()
        options, network = self._settings()
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        task: Any = self._task.fit(series)  # type: ignore[attr-defined]
        series = task.prepare(series).series
        config = _build(task, network, seed).config
        closed = fit_closed(
            series,
            config,
            parts=options.parts,
            seed=seed,
            seconds=self._time_limit,
            report=lambda part: self._tell(f"{part} of {len(series)} series"),
        )
        self.task_, self.model_, self.history_ = task, closed.model, None
        limit = self._time_limit
        left = None if limit is None else limit - (time.monotonic() - begun)
        is_hard = explained(closed.answers, closed.y) < _EXPLAINED
        if "attention" in options.parts and self._needs_attention(closed, left, is_hard):
            models, scores = self._train(series, network, seed, left, is_hard)
            self.model_ = add_attention(closed, models, scores)
        self._tell("shares " + ", ".join(f"{k} {v:.2f}" for k, v in self.shares_.items()))

    def _needs_attention(self, closed: Closed, left: float | None, is_hard: bool) -> bool:
        """Return whether to train the attention part beside the others."""
        if not closed.model.config.parts:
            return True
        is_late = left is not None and left < 0.1 * (self._time_limit or 0)
        has_channels = closed.model.config.num_channels > 1
        return len(closed.y) >= _FEWEST and not is_late and (has_channels or is_hard)

    def _train(
        self,
        series: SeriesCollection,
        network: SeriesOptions,
        seed: int,
        left: float | None,
        is_hard: bool,
    ) -> "tuple[list[SeriesNetwork], NDArray[np.float64]]":
        """Return the models of the attention part, and scores of the series held out of each."""
        from primal_attention.training import TrainingConfig, fit

        task = self.task_
        fold = _folds(task.strata(series), min(_FOLDS, len(series)), seed)
        models: list[SeriesNetwork] = []
        scores = np.zeros((len(series), task.sizes["num_classes"]))
        for k in range(fold.max() + 1):
            self._tell(f"attention, {k + 1} of {fold.max() + 1} models")
            held, rest = np.flatnonzero(fold == k), np.flatnonzero(fold != k)
            model = _build(task, network, seed + k)
            passes = _PASSES * -(-len(rest) // self.batch_size)
            steps = max(_LONG_STEPS if is_hard else _STEPS, passes)
            config = TrainingConfig(
                epochs=self.max_epochs,
                epoch_steps=-(-steps // _EPOCHS),
                batch_size=self.batch_size,
                lr=self.learning_rate,
                max_seconds=None if left is None else max(left / _FOLDS, 0.1),
                seed=seed,
            )
            # the weights of the last epoch: calibration mends a loss that rises again
            self.history_ = fit(
                model,
                SeriesDataset(series.take(rest), _JITTER if is_hard else 0.0),
                config=config,
                objective=task.objective,
                collate=task.collate,
                verbose=self.verbose,
            )
            scores[held] = score_series(model, series.take(held))
            models.append(model)
        return models, scores

    def _settings(self) -> tuple[SeriesFitOptions, SeriesOptions]:
        """Return the options, and the settings of the attention part's network."""
        if not isinstance(self.attention, str):
            raise TypeError(
                f"attention must be a name of list_attentions(), got {self.attention!r}."
            )
        options = read_options(self._options_type, self.options)
        network = SeriesOptions(
            attention=self.attention,
            dim=self.dim,
            num_heads=self.num_heads,
            num_layers=self.num_layers,
            attention_options=options.attention_options,
            dropout=options.dropout,
        )
        return options, network

    def _tell(self, line: str) -> None:
        if self.verbose or (self.verbose is None and sys.stderr.isatty()):
            progress(line)

    def _answers(self, X: object) -> "Answers":
        data = self.task_.prepare(self.task_.without_labels(_series(X)))
        answers = self.task_.measure(self.model_, data, batch_size=_PREDICT_BATCH).answers
        check_finite(answers)
        return answers

    def _check_fitted(self) -> None:
        self._check_is_fitted()  # type: ignore[attr-defined]

    @classmethod
    def _parameters_of(cls, task: object, model: Any) -> dict[str, object]:
        names = ("attention", "dim", "num_heads", "num_layers")
        options = SeriesFitOptions(
            attention_options=model.config.attention_options, dropout=model.config.dropout
        )
        return {**{name: getattr(model.config, name) for name in names}, "options": options}

    def _plain_parameters(self) -> dict[str, object]:
        options = plain_options(self._options_type, self.options)
        return {**super()._plain_parameters(), "options": options}

    def _extra(self) -> dict[str, object]:
        return {"metadata": {key: _plain(value) for key, value in self.metadata_.items()}}

    def _restore(self, content: Mapping[str, object]) -> None:
        self.metadata_ = _part_of(content, "metadata") if content else self._metadata()
        if not isinstance(self.metadata_, dict):
            raise UserError("its metadata are not names with values.")
        self.is_fitted = True

    def _metadata(self) -> dict[str, object]:
        """Return what aeon knows of the training series, from a folder of ``primal train``."""
        channels = len(self.task_.mean)
        return {"multivariate": channels > 1, "n_channels": channels}

    @classmethod
    def _get_test_params(cls, parameter_set: str = "default") -> dict[str, object]:
        """Return the parameters of aeon's checks."""
        return {}


_TAGS = {
    "X_inner_type": ["np-list", "numpy3D"],
    "algorithm_type": "hybrid",
    "capability:missing_values": True,
    "capability:multivariate": True,
    "capability:unequal_length": True,
}


class SeriesClassifier(_SeriesEstimator, BaseClassifier):  # type: ignore[misc]
    """Classifier for series of any length, number of channels and gaps.

    A blend of three parts: convolutions with a ridge head, quantiles with a forest, and a
    transformer with linear attention. Every part answers for training series that it did not
    learn from, and the likelihood of these answers decides its share. The attention part joins in
    with at least 100 series, if it helps; it does where channels or distant steps must be compared.

    Missing values are interpolated. For the first two parts series of unequal length are padded to
    the longest of the training data; what is longer is cut. Probabilities are calibrated. There is
    nothing to tune.

    Parameters
    ----------
    attention : str, default="primal-dual"
        A name of ``primal_attention.list_attentions()``, such as ``"softmax"``.

    dim : int, default=64
        Width of the attention part.

    num_heads : int, default=4
        Its heads; must divide ``dim``.

    num_layers : int, default=2
        Its blocks.

    max_epochs : int, default=20
        Epochs of the attention part. An epoch has at least 12 steps, and more with many series.

    batch_size : int, default=32
        Series per step.

    learning_rate : float, default=2e-3
        Peak learning rate.

    options : SeriesFitOptions, dict or None, default=None
        What is rarely changed: which parts to fit, options of the attention, dropout.

    random_state : int, RandomState instance or None, default=None
        Draws thresholds, trees and weights. An integer gives the same classifier each time, unless
        a ``time_limit`` ends its fit.

    verbose : bool or None, default=None
        Whether ``fit`` tells what it does. None does so on a terminal only.

    Attributes
    ----------
    shares_ : dict
        Share of every part in the probabilities.

    model_ : SeriesBlend
        The fitted parts.

    task_ : SeriesTask
        Classes, and mean and deviation of every channel of the training data.

    history_ : History or None
        Training of the attention part's last model; None without one, and after :meth:`load`.

    References
    ----------
    Y. Chen, Q. Tao, F. Tonin, J. A. K. Suykens, "Primal-Attention: Self-attention through
    Asymmetric Kernel SVD in Primal Representation", NeurIPS 2023.

    A. Dempster, D. F. Schmidt, G. I. Webb, "MiniRocket: A Very Fast (Almost) Deterministic
    Transform for Time Series Classification", KDD 2021; "QUANT: A Minimalist Interval Method for
    Time Series Classification", DMKD 2024.

    Examples
    --------
    >>> import numpy as np
    >>> from primal_attention.tasks.series import SeriesClassifier
    >>> rng = np.random.default_rng(0)
    >>> y = np.array(["rising", "falling"] * 10)
    >>> slope = np.where(y == "rising", 1.0, -1.0)[:, None, None]
    >>> X = slope * np.linspace(-1, 1, 20) + 0.1 * rng.normal(size=(20, 1, 20))
    >>> clf = SeriesClassifier(random_state=0).fit(X, y)
    >>> float(clf.score(X, y)), sorted(clf.shares_)
    (1.0, ['convolutions', 'quantiles'])
    """

    _task: ClassVar[type[Task]] = SeriesTask
    _tags = _TAGS

    def _fit(self, X: object, y: np.ndarray) -> "Self":
        labels = np.searchsorted(self.classes_, y).astype(np.int64)
        names = tuple(map(str, self.classes_))
        self._fit_series(replace(_series(X), y=labels, classes=names))
        return self

    def _predict(self, X: object) -> np.ndarray:
        return self.classes_[self._predict_proba(X).argmax(1)]

    def _predict_proba(self, X: object) -> NDArray[np.float64]:
        return self._answers(X)["logits"].double().softmax(-1).numpy()

    def _extra(self) -> dict[str, object]:
        return {
            "classes": [_plain(c) for c in self.classes_],
            "classes_dtype": self.classes_.dtype.str,
            **super()._extra(),
        }

    def _restore(self, content: Mapping[str, object]) -> None:
        self.classes_ = np.array(self.task_.classes)  # type: ignore[attr-defined]
        if content:
            values, dtype = (_part_of(content, key) for key in ("classes", "classes_dtype"))
            self.classes_ = restore_classes(values, dtype, len(self.classes_))
        self.n_classes_ = len(self.classes_)
        self._class_dictionary = {c: i for i, c in enumerate(self.classes_)}
        super()._restore(content)


class SeriesRegressor(_SeriesEstimator, BaseRegressor):  # type: ignore[misc]
    """Regressor for series of any length, number of channels and gaps: one number a series.

    The same three parts as in :class:`SeriesClassifier`; the squared error on series that
    a part did not learn from decides its share.

    Parameters
    ----------
    attention : str, default="primal-dual"
        A name of ``primal_attention.list_attentions()``, such as ``"softmax"``.

    dim : int, default=64
        Width of the attention part.

    num_heads : int, default=4
        Its heads; must divide ``dim``.

    num_layers : int, default=2
        Its blocks.

    max_epochs : int, default=20
        Epochs of the attention part. An epoch has at least 12 steps, and more with many series.

    batch_size : int, default=32
        Series per step.

    learning_rate : float, default=2e-3
        Peak learning rate.

    options : SeriesFitOptions, dict or None, default=None
        What is rarely changed: which parts to fit, options of the attention, dropout.

    random_state : int, RandomState instance or None, default=None
        Draws thresholds, trees and weights. An integer gives the same regressor each time, unless
        a ``time_limit`` ends its fit.

    verbose : bool or None, default=None
        Whether ``fit`` tells what it does. None does so on a terminal only.

    Attributes
    ----------
    shares_ : dict
        Share of every part in the answers.

    model_ : SeriesBlend
        The fitted parts.

    task_ : SeriesValueTask
        Mean and deviation of the targets and of every channel of the training data.

    history_ : History or None
        Training of the attention part's last model; None without one, and after :meth:`load`.

    Examples
    --------
    >>> import numpy as np
    >>> from primal_attention.tasks.series import SeriesRegressor
    >>> rng = np.random.default_rng(0)
    >>> y = rng.uniform(1, 3, size=40)
    >>> X = np.sin(y[:, None, None] * np.linspace(0, 6, 50)) + 0.1 * rng.normal(size=(40, 1, 50))
    >>> reg = SeriesRegressor(random_state=0).fit(X[:30], y[:30])
    >>> bool(np.abs(reg.predict(X[30:]) - y[30:]).mean() < 0.15)
    True
    """

    _task: ClassVar[type[Task]] = SeriesValueTask
    _tags = _TAGS

    def _fit(self, X: object, y: np.ndarray) -> "Self":
        self._fit_series(replace(_series(X), y=np.asarray(y, np.float64)))
        return self

    def _predict(self, X: object) -> NDArray[np.float64]:
        return self._answers(X)["values"].double().numpy()


def _series(X: Any) -> SeriesCollection:
    return series_from_arrays(list(X))


def _build(task: WholeSeriesTask, options: SeriesOptions, seed: int) -> "SeriesNetwork":
    with isolated(seed):
        return task.build(options)


def _folds(strata: np.ndarray, count: int, seed: int) -> NDArray[np.int64]:
    """Return the fold of every case; each has about the same share of every group."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(strata))
    order = order[np.argsort(strata[order], kind="stable")]
    fold = np.empty(len(strata), np.int64)
    fold[order] = np.arange(len(strata)) % count
    return fold


def _part_of(content: Mapping[str, object], key: str) -> Any:
    if key not in content:
        raise UserError(f"it has no {key}.")
    return content[key]


def _plain(value: object) -> object:
    """Return a number of numpy as one of Python."""
    return value.item() if isinstance(value, np.generic) else value
