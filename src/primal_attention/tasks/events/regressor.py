"""Values of irregular series at any time as a scikit-learn estimator."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted

from primal_attention.datasets.events.series import IrregularSeries
from primal_attention.models import PretrainedModel
from primal_attention.tasks.events.base import EventEstimator
from primal_attention.tasks.events.interpolation import InterpolationModel
from primal_attention.tasks.events.irregular import IrregularTask
from primal_attention.tasks.events.settings import WINDOW, InterpolationOptions
from primal_attention.tasks.task import Task
from primal_attention.tasks.trained import check_finite

__all__ = ["IrregularSeriesRegressor", "PredictedValues"]

_BATCH = 64


class PredictedValues(NamedTuple):
    """Values at the queries, one array ``[queries, channels]`` for every series."""

    mean: list[NDArray[np.float64]]
    """Expected values."""
    std: list[NDArray[np.float64]]
    """Standard deviations."""


class IrregularSeriesRegressor(EventEstimator):
    """Values of irregular multivariate series at any time: between, before and after observations.

    In training a part of every series is hidden, at random places or at its end, and predicted
    from the rest. Channels may be missing anywhere.

    Parameters
    ----------
    attention : str, default="softmax"
        Any name of ``primal_attention.list_attentions(cross=True)``.

    attention_options : dict, default=None
        Options of that attention.

    time : str, default="bochner"
        Features of time, as in :class:`NextEventPredictor`, except ``"position"`` and ``"none"``.

    dim : int, default=64
        Model width.

    num_heads : int, default=4
        Heads; must divide ``dim``.

    num_layers : int, default=1
        Blocks over the reference points.

    references : int, default=32
        Reference points, evenly spaced over the observations.

    dropout : float, default=0.0
        Dropout of every branch.

    max_events : int, default=128
        Most recent observations of a series that are read.

    epochs : int, default=60
        Most passes over the series; at least 30 optimiser steps each.

    patience : int, default=15
        Epochs without a better one on the validation part after which training ends.

    batch_size : int, default=32
        Series per step.

    lr : float, default=2e-3
        Peak learning rate.

    eta : float, default=0.1
        Weight of the KSVD term of primal layers.

    validation : float, default=0.1
        Share of the series that chooses the epoch; none if there are fewer than ten.

    time_limit : float, default=None
        Seconds of training after which it ends; the schedule is shortened to fit.

    verbose : bool or None, default=None
        Whether to show progress; by default a bar if there is a terminal.

    random_state : int, RandomState instance or None, default=None
        Draws the parameters, the hidden observations and the order of the batches.

    Attributes
    ----------
    model_ : InterpolationModel
        The trained model.

    task_ : IrregularTask
        Unit, scale and channels of the training series.

    history_ : History
        Loss and scores, epoch by epoch; None after :meth:`load`.

    Examples
    --------
    >>> from primal_attention.tasks.events import (
    ...     IrregularSeries, IrregularSeriesRegressor, IrregularSinusoids
    ... )
    >>> sampled = IrregularSinusoids().sample(20, 30)
    >>> series = IrregularSeries.from_arrays(sampled.times, sampled.values)
    >>> model = IrregularSeriesRegressor(dim=16, epochs=2, random_state=0).fit(series)
    >>> model.predict(series, [[3.0, 20.0]] * 20).mean[0].shape
    (2, 2)
    """

    _task: ClassVar[type[Task]] = IrregularTask
    _model: ClassVar[type[PretrainedModel]] = InterpolationModel
    task_: IrregularTask
    model_: InterpolationModel

    def __init__(
        self,
        attention: str = "softmax",
        attention_options: dict[str, Any] | None = None,
        time: str = "bochner",
        dim: int = 64,
        num_heads: int = 4,
        num_layers: int = 1,
        references: int = 32,
        dropout: float = 0.0,
        max_events: int = WINDOW,
        epochs: int = 60,
        patience: int | None = 15,
        batch_size: int = 32,
        lr: float = 2e-3,
        eta: float = 0.1,
        validation: float = 0.1,
        time_limit: float | None = None,
        verbose: bool | None = None,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.attention = attention
        self.attention_options = attention_options
        self.time = time
        self.dim = dim
        self.num_heads = num_heads
        self.num_layers = num_layers
        self.references = references
        self.dropout = dropout
        self.max_events = max_events
        self.epochs = epochs
        self.patience = patience
        self.batch_size = batch_size
        self.lr = lr
        self.eta = eta
        self.validation = validation
        self.time_limit = time_limit
        self.verbose = verbose
        self.random_state = random_state

    def fit(self, series: IrregularSeries, y: Any = None) -> Self:
        """Train on series.

        Parameters
        ----------
        series : IrregularSeries
            At least one series with two observations.

        y : None
            Ignored; hidden observations are the targets.

        Returns
        -------
        self : IrregularSeriesRegressor
            Fitted.
        """
        _check(series)
        seed = self._seed()
        task = IrregularTask.fit(series, self.max_events)
        train, valid = self._split(len(series), seed)
        held = task.items(series.take(valid)) if len(valid) else None
        self._train(task, task.items(series.take(train), is_fixed=False), held, seed)
        return self

    def predict(self, series: IrregularSeries, at: Sequence[Any]) -> PredictedValues:
        """Return the values of all channels at given times.

        Parameters
        ----------
        series : IrregularSeries
            Channels as in training.

        at : sequence
            For every series the times to predict, numbers or dates; between, before or after its
            observations.

        Returns
        -------
        values : PredictedValues
            Mean and standard deviation at every query, in units of the channels.
        """
        check_is_fitted(self)
        _check(series)
        if len(at) != len(series):
            raise ValueError(
                f"at must hold the times for each of the {len(series)} series, got {len(at)}."
            )
        queries = [np.array([series.log.moment(t) for t in np.asarray(ts)]) for ts in at]
        if 0 in map(len, queries):
            raise ValueError("Every series needs at least one time to predict.")
        data = self.task_.items(series, queries)
        answers = self.task_.measure(self.model_, data, batch_size=_BATCH).answers
        check_finite(answers)
        marks = self.task_.scheme.marks
        mean, std = (np.array([getattr(c, k) for c in marks]) for k in ("mean", "std"))
        cuts = np.cumsum([len(q) for q in queries])[:-1]
        return PredictedValues(
            np.split(mean + std * answers["query_mean"].double().numpy(), cuts),
            np.split(std * answers["query_std"].double().numpy(), cuts),
        )

    def score(self, series: IrregularSeries, y: Any = None) -> float:
        """Return R² of hidden values: of every series a part is hidden and predicted.

        Parameters
        ----------
        series : IrregularSeries
            Channels as in training.

        y : None
            Ignored.

        Returns
        -------
        score : float
            One for perfect predictions, zero for those of the mean.
        """
        check_is_fitted(self)
        _check(series)
        found = self.task_.measure(self.model_, self.task_.items(series), batch_size=_BATCH)
        check_finite(found.answers)
        return float(found.scores["R2"].value)

    def _options(self) -> InterpolationOptions:  # type: ignore[override]
        names = ("dim", "num_heads", "num_layers", "attention", "time", "dropout", "references")
        return InterpolationOptions(
            attention_options=self.attention_options or {},
            **{name: getattr(self, name) for name in names},
        )


def _check(series: Any) -> None:
    if not isinstance(series, IrregularSeries):
        raise TypeError(
            f"series must be IrregularSeries, got {type(series).__name__}; make one with "
            "IrregularSeries.from_frame(frame, values=[...])."
        )
