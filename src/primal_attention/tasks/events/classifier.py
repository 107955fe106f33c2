"""Classes of whole sequences as a scikit-learn classifier."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from primal_attention.datasets.events.log import EventSequences
from primal_attention.datasets.words import as_words
from primal_attention.models import PretrainedModel
from primal_attention.support.command import needs
from primal_attention.tasks.estimators import check_fit, restore_classes
from primal_attention.tasks.events.base import EventEstimator, check_log, find_references
from primal_attention.tasks.events.labels import EventLabelTask
from primal_attention.tasks.events.model import EventSequenceNetwork
from primal_attention.tasks.events.scheme import LogScheme
from primal_attention.tasks.events.settings import EventFitOptions, EventSettings
from primal_attention.tasks.task import Task
from primal_attention.tasks.trained import check_finite

with needs("sklearn", "An estimator of event logs"):
    from sklearn.base import ClassifierMixin
    from sklearn.utils.validation import check_is_fitted

__all__ = ["EventClassifier"]

_BATCH = 64
"""Sequences that are classified at once."""


class EventClassifier(ClassifierMixin, EventEstimator):  # type: ignore[misc]
    """Classes of whole sequences of events, from types and the time elapsed since each event.

    Parameters
    ----------
    attention : str, default="linear"
        A name of ``primal_attention.list_attentions()``.

    dim : int, default=64
        Model width.

    num_heads : int, default=4
        Heads; must divide ``dim``.

    num_layers : int, default=2
        Blocks.

    max_epochs : int, default=20
        Most passes over the log; at least 30 optimiser steps each.

    batch_size : int, default=32
        Sequences per step.

    learning_rate : float, default=4e-3
        Peak learning rate.

    options : EventFitOptions, dict or None, default=None
        What is rarely changed: features of the elapsed time (``time``), events that are read
        (``max_events``), dropout, validation, patience, options of the attention.

    random_state : int, RandomState instance or None, default=None
        Draws the parameters, the validation part, and the order of the batches.

    verbose : bool or None, default=None
        Whether to show progress; by default a bar if there is a terminal.

    Attributes
    ----------
    classes_ : ndarray
        Classes, in the order of the probabilities.

    model_ : EventSequenceNetwork
        The trained model.

    task_ : EventLabelTask
        Types, unit and scale of the training log.

    t_ref_ : str
        Reference time of the training: ``"last_event"``, or what was given.

    history_ : History
        Loss and scores, epoch by epoch; None after :meth:`load`.

    Examples
    --------
    >>> import numpy as np
    >>> from primal_attention.datasets import EventSequences
    >>> from primal_attention.tasks.events import EventClassifier
    >>> rng = np.random.default_rng(0)
    >>> labels = np.array(["slow", "fast"] * 10)
    >>> times = [np.cumsum(rng.exponential(3 if y == "slow" else 1, 15)) for y in labels]
    >>> log = EventSequences.from_arrays(times, [["tick"] * 15] * 20)
    >>> model = EventClassifier(dim=16, max_epochs=3, random_state=0).fit(log, labels)
    >>> model.predict_proba(log).shape
    (20, 2)
    """

    _task: ClassVar[type[Task]] = EventLabelTask
    _model: ClassVar[type[PretrainedModel]] = EventSequenceNetwork
    _options_type: ClassVar[type[EventFitOptions]] = EventFitOptions
    task_: EventLabelTask
    model_: EventSequenceNetwork

    def fit(
        self,
        log: EventSequences,
        labels: Any,
        *,
        t_ref: object = "last_event",
        time_limit: float | None = None,
    ) -> Self:
        """Train on a log with one label for each sequence.

        Parameters
        ----------
        log : EventSequences
            The sequences.

        labels : array-like of shape (n_sequences,)
            Labels of any type, in the order of ``log.keys``.

        t_ref : "last_event", time, date, or one of these for each sequence
            Reference time from which the model looks back. To classify prefixes at the time of
            the event that follows them (``t_ref="target"`` in the literature), give these times.

        time_limit : float or None, default=None
            Seconds of training after which it ends; the schedule is shortened to fit.

        Returns
        -------
        self : EventClassifier
            Fitted.
        """
        check_fit(self, time_limit)
        log, options = check_log(log), self._fit_options()
        given = np.asarray(labels)
        if given.shape != (len(log),):
            raise ValueError(
                f"labels must hold one label for each of the {len(log)} sequences, got shape "
                f"{given.shape}; bring them into the order of log.keys."
            )
        as_words(labels, "labels")
        classes, indices = np.unique(given, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"There must be at least two classes, got {classes.tolist()}.")
        references = find_references(log, t_ref)
        seed = self._seed()
        scheme = LogScheme.fit(log, EventSettings(length=options.max_events))
        task = EventLabelTask(scheme, tuple(map(str, classes)))
        parts = [
            task.windows(log.take(rows), indices[rows], references.times[rows])
            if len(rows)
            else None
            for rows in self._split(len(log), seed, options.validation, indices)
        ]
        assert parts[0] is not None
        self._train(task, parts[0], parts[1], seed, time_limit)
        self.classes_, self.t_ref_ = classes, references.words
        return self

    def predict_proba(
        self, log: EventSequences, *, t_ref: object = "last_event"
    ) -> NDArray[np.float64]:
        """Return the probability of every class.

        Parameters
        ----------
        log : EventSequences
            Types and columns as in the training log.

        t_ref : "last_event", time, date, or one of these for each sequence
            Reference time, as in :meth:`fit`.

        Returns
        -------
        probabilities : ndarray of shape (n_sequences, n_classes)
            In the order of ``classes_``.
        """
        check_is_fitted(self)
        references = find_references(check_log(log), t_ref)
        data = self.task_.windows(log, references=references.times)
        answers = self.task_.measure(self.model_, data, batch_size=_BATCH).answers
        check_finite(answers)
        return answers["logits"].double().softmax(-1).numpy()

    def predict(self, log: EventSequences, *, t_ref: object = "last_event") -> np.ndarray:
        """Return the most likely class of every sequence.

        Parameters
        ----------
        log : EventSequences
            Types and columns as in the training log.

        t_ref : "last_event", time, date, or one of these for each sequence
            Reference time, as in :meth:`fit`.

        Returns
        -------
        labels : ndarray of shape (n_sequences,)
            Classes.
        """
        best = self.predict_proba(log, t_ref=t_ref).argmax(1)
        return self.classes_[best]

    def score(self, log: EventSequences, labels: object, *, t_ref: object = "last_event") -> float:
        """Return the accuracy.

        Parameters
        ----------
        log : EventSequences
            Types and columns as in the training log.

        labels : array-like of shape (n_sequences,)
            True labels.

        t_ref : "last_event", time, date, or one of these for each sequence
            Reference time, as in :meth:`fit`.

        Returns
        -------
        accuracy : float
            Share of sequences whose class is right.
        """
        return float((self.predict(log, t_ref=t_ref) == np.asarray(labels)).mean())

    def _extra(self) -> dict[str, object]:
        plain = [c.item() if hasattr(c, "item") else c for c in self.classes_]
        dtype = self.classes_.dtype.str
        return {"extra": {"classes": plain, "dtype": dtype, "t_ref": self.t_ref_}}

    def _restore(self, content: Mapping[str, Any]) -> None:
        names = list(self.task_.classes)
        extra = content.get("extra", {})
        dtype = extra.get("dtype", np.array(names).dtype)
        self.classes_ = restore_classes(extra.get("classes", names), dtype, len(names))
        self.t_ref_ = str(extra.get("t_ref", "last_event"))
