"""The next event of a log as a scikit-learn estimator."""

from collections.abc import Iterator
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from primal_attention.datasets.events.log import EventSequences
from primal_attention.datasets.events.units import duration
from primal_attention.models import PretrainedModel
from primal_attention.support.command import needs
from primal_attention.tasks.estimators import check_fit
from primal_attention.tasks.events.base import (
    EventEstimator,
    References,
    check_log,
    find_references,
)
from primal_attention.tasks.events.model import NextEventModel
from primal_attention.tasks.events.results import (
    EventSamples,
    EventScores,
    LogLikelihood,
    NextEvents,
)
from primal_attention.tasks.events.sampling import sample_paths
from primal_attention.tasks.events.scheme import LogScheme
from primal_attention.tasks.events.scoring import next_event
from primal_attention.tasks.events.settings import EventSettings, NextEventFitOptions
from primal_attention.tasks.events.task import NextEventTask
from primal_attention.tasks.events.windows import EventWindows, collate_events, tile_windows
from primal_attention.tasks.task import Task
from primal_attention.tasks.trained import check_finite
from primal_attention.training.scores import Answers

with needs("sklearn", "An estimator of event logs"):
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_is_fitted

__all__ = ["EventPredictor"]

_BATCH = 64
"""Sequences that are read at once."""
_PATHS = 8192
"""Paths that are sampled at once."""


class EventPredictor(EventEstimator):
    """Type and time of the next event, from a Transformer that knows how long ago things happened.

    The waiting time is a mixture of log-normal distributions, the type depends on the past and on
    the waiting time. Only differences of times enter, in the unit of the log.

    Parameters
    ----------
    attention : str, default="linear"
        A causal name of ``primal_attention.list_attentions(causal=True)``.

    dim : int, default=64
        Model width.

    num_heads : int, default=4
        Heads; must divide ``dim``.

    num_layers : int, default=2
        Blocks.

    max_epochs : int, default=20
        Most passes over the log; at least 30 optimiser steps each.

    batch_size : int, default=32
        Windows per step.

    learning_rate : float, default=4e-3
        Peak learning rate.

    options : NextEventFitOptions, dict or None, default=None
        What is rarely changed: features of time (``time``), length of a window
        (``max_events``), components of a waiting time, dropout, validation, patience, options of
        the attention.

    random_state : int, RandomState instance or None, default=None
        Draws the parameters, the validation part, and the order of the batches.

    verbose : bool or None, default=None
        Whether to show progress; by default a bar if there is a terminal.

    Attributes
    ----------
    model_ : NextEventModel
        The trained model.

    task_ : NextEventTask
        Types, unit and scale of the training log.

    history_ : History
        Loss and scores, epoch by epoch; None after :meth:`load`.

    Examples
    --------
    >>> from primal_attention.datasets import EventSequences, HawkesProcess
    >>> from primal_attention.tasks.events import EventPredictor
    >>> times, types = HawkesProcess().sample(20, 30)
    >>> log = EventSequences.from_arrays(times, types, unit="hours")
    >>> model = EventPredictor(dim=16, max_epochs=2, random_state=0).fit(log)
    >>> model.predict_next(log).probabilities.shape
    (20, 2)
    """

    _task: ClassVar[type[Task]] = NextEventTask
    _model: ClassVar[type[PretrainedModel]] = NextEventModel
    _options_type: ClassVar[type[NextEventFitOptions]] = NextEventFitOptions
    task_: NextEventTask
    model_: NextEventModel

    def fit(
        self, log: EventSequences, y: object = None, *, time_limit: float | None = None
    ) -> Self:
        """Train on a log.

        Parameters
        ----------
        log : EventSequences
            At least one sequence with two events at different times. Sequences with a single
            event have no waiting time and do not count.

        y : None
            Ignored; the log holds its own targets.

        time_limit : float or None, default=None
            Seconds of training after which it ends; the schedule is shortened to fit.

        Returns
        -------
        self : EventPredictor
            Fitted.
        """
        log = check_log(log)
        check_fit(self, time_limit)
        options, seed = self._fit_options(), self._seed()
        task = NextEventTask(LogScheme.fit(log, EventSettings(length=options.max_events)))
        prepared, scale = task.scheme.prepare(log), task.scheme.scale
        # a single event has no target
        long = np.flatnonzero(log.lengths > 1)
        train, valid = (long[part] for part in self._split(len(long), seed, options.validation))
        parts = [prepared.take(rows) if len(rows) else None for rows in (train, valid)]
        data = [
            None
            if part is None
            else EventWindows(part, tile_windows(part, options.max_events, context=i > 0), scale)
            for i, part in enumerate(parts)
        ]
        assert data[0] is not None
        self._train(task, data[0], data[1], seed, time_limit)
        return self

    def predict_next(
        self, log: EventSequences, *, t_ref: object = "last_event", level: float = 0.8
    ) -> NextEvents:
        """Return the next event of every sequence.

        Parameters
        ----------
        log : EventSequences
            Types and columns as in the training log.

        t_ref : "last_event", time, date, or one of these for each sequence
            Reference time. ``"last_event"``: nothing is known after the last event. A time: no
            event has happened since the last one until that time. Waits count from it.

        level : float, default=0.8
            Probability that the wait lies in the interval.

        Returns
        -------
        prediction : NextEvents
            Most likely type, probabilities, expected and median wait, interval; prints as a table.
        """
        check_is_fitted(self)
        if not 0 < level < 1:
            raise ValueError(f"level must lie between 0 and 1, got {level}.")
        references = find_references(check_log(log), t_ref)
        scheme = self.task_.scheme
        gone = (references.times - log.last_times) / scheme.scale
        rows = []
        for batch, at in self._batches(log):
            with torch.no_grad():
                rows.append(
                    next_event(
                        self.model_,
                        self.model_(**batch),
                        batch["key_mask"].sum(1) - 1,
                        longest=scheme.longest_gap / scheme.scale,
                        gone=torch.from_numpy(gone[at]),
                        level=level,
                    )
                )
        joined = {k: torch.cat([r[k] for r in rows]) for k in rows[0]}
        check_finite(joined)
        found = {k: v.numpy() for k, v in joined.items()}
        waits: dict[str, Any] = {
            k: (found[k] - gone) * scheme.scale for k in ("mean", "median", "lower", "upper")
        }
        return NextEvents(
            keys=log.keys,
            names=scheme.names,
            probabilities=found["probabilities"],
            level=level,
            **waits,
            **self._stated(references),
        )

    def sample(
        self,
        log: EventSequences,
        n: int = 100,
        horizon: str | float | None = None,
        *,
        t_ref: object = "last_event",
        max_events: int = 1000,
        random_state: int | np.random.RandomState | None = 0,
    ) -> EventSamples:
        """Return sampled futures of every sequence, several events ahead.

        Parameters
        ----------
        log : EventSequences
            Types and columns as in the training log.

        n : int, default=100
            Paths of every sequence.

        horizon : str or float
            How far to go from the reference time: ``"7D"``, or a number in the unit of the log.
            By default ten median gaps of the training log.

        t_ref : "last_event", time, date, or one of these for each sequence
            Reference time, as in :meth:`predict_next`.

        max_events : int, default=1000
            Most events of a path; more is an error.

        random_state : int, RandomState instance or None, default=0
            Draws the paths.

        Returns
        -------
        samples : EventSamples
            All sampled events; ``counts()`` and ``chances()`` summarise them. Marks of sampled
            events are not predicted; the model takes them as missing.
        """
        check_is_fitted(self)
        if n < 1 or max_events < 1:
            raise ValueError(f"n and max_events must be at least 1, got {n} and {max_events}.")
        references = find_references(check_log(log), t_ref)
        scheme = self.task_.scheme
        length = 10 * scheme.scale if horizon is None else duration(horizon, scheme.unit)
        gone = torch.from_numpy((references.times - log.last_times) / scheme.scale)
        seed = int(check_random_state(random_state).randint(np.iinfo(np.int32).max))
        generator = torch.Generator().manual_seed(seed)
        found = []
        for batch, at in self._batches(log, max(1, _PATHS // n)):
            paths = sample_paths(
                self.model_,
                batch,
                n=n,
                horizon=length / scheme.scale,
                gone=gone[at],
                generator=generator,
                max_events=max_events,
            )
            found.append((paths.row + int(at.start) * n, *paths[1:]))
        row, step, wait, kind = (torch.cat(c).numpy() for c in zip(*found, strict=True))
        order = np.lexsort((step, row))
        return EventSamples(
            keys=log.keys,
            names=scheme.names,
            sequence=row[order] // n,
            path=row[order] % n,
            step=step[order],
            wait=wait[order] * scheme.scale,
            type=kind[order],
            n=n,
            horizon=length,
            **self._stated(references),
        )

    def log_likelihood(self, log: EventSequences) -> LogLikelihood:
        """Return the log-likelihood of a log in nats, per unit of its time.

        Parameters
        ----------
        log : EventSequences
            At least one sequence with two events. Gaps below ``task_.scheme.smallest_gap``, such
            as those of events at the same time, count as that.

        Returns
        -------
        likelihood : LogLikelihood
            Per event, split into time and type, and by sequence; states its unit.
        """
        answers, data = self._answers(log)
        joint = answers["log_time"] + answers["log_type"]
        owner = np.repeat([w.sequence for w in data.windows], answers["events"].numpy())
        sums = np.zeros(len(log))
        np.add.at(sums, owner, joint.numpy())
        return LogLikelihood(
            float(joint.mean()),
            float(answers["log_time"].mean()),
            float(answers["log_type"].mean()),
            sums,
            len(joint),
            self.task_.scheme.unit,
        )

    def evaluate(self, log: EventSequences) -> EventScores:
        """Return named scores of all events of a log: likelihoods, accuracy, calibration.

        Parameters
        ----------
        log : EventSequences
            At least one sequence with two events.

        Returns
        -------
        scores : EventScores
            Accuracy with ``t_ref="last_event"`` and ``t_ref="target"``, log-likelihoods, error of
            the waiting time, with standard errors; prints as a table.
        """
        answers, _ = self._answers(log)
        scores = self.task_.score(answers)
        return EventScores(scores, len(answers["type"]), self.task_.scheme.unit)

    def score(self, log: EventSequences, y: object = None) -> float:
        """Return the log-likelihood per event in nats, larger is better.

        Parameters
        ----------
        log : EventSequences
            At least one sequence with two events.

        y : None
            Ignored.

        Returns
        -------
        score : float
            ``log_likelihood(log).per_event``.
        """
        return self.log_likelihood(log).per_event

    def _stated(self, references: References) -> dict[str, Any]:
        scheme = self.task_.scheme
        return {
            "references": references.times,
            "t_ref": references.words,
            "unit": scheme.unit,
            "is_dated": scheme.is_dated,
        }

    def _answers(self, log: EventSequences) -> "tuple[Answers, EventWindows]":
        check_is_fitted(self)
        data = self.task_.windows(check_log(log), labelled=True)
        answers = self.task_.measure(self.model_, data, batch_size=_BATCH).answers
        check_finite(answers)
        return answers, data

    def _batches(
        self, log: EventSequences, size: int = _BATCH
    ) -> Iterator[tuple[dict[str, Tensor], slice]]:
        """Yield the most recent windows of the sequences in batches, and which they are."""
        data = self.task_.windows(log, labelled=False)
        for start in range(0, len(data), size):
            at = slice(start, min(start + size, len(data)))
            batch = collate_events([data[i] for i in range(at.start, at.stop)])
            del batch["labels"]
            yield batch, at
