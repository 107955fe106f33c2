"""Values of irregular series at any time as a scikit-learn estimator."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted

from primal_attention.datasets.events.series import IrregularSeries
from primal_attention.models import PretrainedModel
from primal_attention.tasks.estimators import check_fit
from primal_attention.tasks.events.base import EventEstimator
from primal_attention.tasks.events.interpolation import InterpolationModel
from primal_attention.tasks.events.irregular import IrregularTask
from primal_attention.tasks.events.settings import IrregularFitOptions
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
        A name of ``primal_attention.list_attentions(cross=True)``.

    dim : int, default=64
        Model width.

    num_heads : int, default=4
        Heads; must divide ``dim``.

    num_layers : int, default=1
        Blocks over the reference points.

    max_epochs : int, default=60
        Most passes over the series; at least 30 optimiser steps each.

    batch_size : int, default=32
        Series per step.

    learning_rate : float, default=2e-3
        Peak learning rate.

    options : IrregularFitOptions, dict or None, default=None
        What is rarely changed: reference points (``references``), features of time
        (``time``, but not ``"position"`` or ``"none"``), observations that are read
        (``max_events``), dropout, validation, patience, options of the attention.

    random_state : int, RandomState instance or None, default=None
        Draws the parameters, the hidden observations and the order of the batches.

    verbose : bool or None, default=None
        Whether to show progress; by default a bar if there is a terminal.

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
    >>> from primal_attention.datasets.events.generators import IrregularSinusoids
    >>> from primal_attention.datasets.events.series import IrregularSeries
    >>> sampled = IrregularSinusoids().sample(20, 30)
    >>> series = IrregularSeries.from_arrays(sampled.times, sampled.values)
    >>> model = IrregularSeriesRegressor(dim=16, max_epochs=2, random_state=0).fit(series)
    >>> model.predict(series, [[3.0, 20.0]] * 20).mean[0].shape
    (2, 2)
    """

    _task: ClassVar[type[Task]] = IrregularTask
    _model: ClassVar[type[PretrainedModel]] = InterpolationModel
    _options_type: ClassVar[type[IrregularFitOptions]] = IrregularFitOptions
    task_: IrregularTask
    model_: InterpolationModel

    def __init__(
        self,
        attention: str = "softmax",
        dim: int = 64,
        num_heads: int = 4,
        num_layers: int = 1,
        max_epochs: int = 60,
        batch_size: int = 32,
        learning_rate: float = 2e-3,
        options: IrregularFitOptions | Mapping[str, object] | None = None,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool | None = None,
    ) -> None:
        super().__init__(
            attention=attention,
            dim=dim,
            num_heads=num_heads,
            num_layers=num_layers,
            max_epochs=max_epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            options=options,
            random_state=random_state,
            verbose=verbose,
        )

    def fit(
        self, series: IrregularSeries, y: object = None, *, time_limit: float | None = None
    ) -> Self:
        """Train on series.

        Parameters
        ----------
        series : IrregularSeries
            At least one series with two observations.

        y : None
            Ignored; hidden observations are the targets.

        time_limit : float or None, default=None
            Seconds of training after which it ends; the schedule is shortened to fit.

        Returns
        -------
        self : IrregularSeriesRegressor
            Fitted.
        """
        _check(series)
        check_fit(self, time_limit)
        options, seed = self._fit_options(), self._seed()
        task = IrregularTask.fit(series, options.max_events)
        train, valid = self._split(len(series), seed, options.validation)
        held = task.items(series.take(valid)) if len(valid) else None
        self._train(task, task.items(series.take(train), is_fixed=False), held, seed, time_limit)
        return self

    def predict(self, series: IrregularSeries, at: Sequence[object]) -> PredictedValues:
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

    def score(self, series: IrregularSeries, y: object = None) -> float:
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


def _check(series: object) -> None:
    if not isinstance(series, IrregularSeries):
        raise TypeError(
            f"series must be IrregularSeries, got {type(series).__name__}; make one with "
            "IrregularSeries.from_frame(frame, values=[...])."
        )
