"""What the estimators of event logs share: parameters, training, folders.

The classes need scikit-learn, the rest of the package does not: they are defined when their names
are first used.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from primal_attention.datasets.events.log import EventSequences
from primal_attention.support.command import needs
from primal_attention.support.options import read_options
from primal_attention.support.randomness import isolated
from primal_attention.tasks.estimators import SavedEstimator
from primal_attention.tasks.events.settings import WINDOW, EventFitOptions
from primal_attention.tasks.task import Task
from primal_attention.training.data import Item

with needs("sklearn", "An estimator of event logs"):
    from sklearn.base import BaseEstimator
    from sklearn.utils import check_random_state

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from primal_attention.training import History

__all__ = ["EventEstimator", "References", "find_references"]

_LEAST_STEPS = 30
"""Fewest optimiser steps of an epoch: a small log is read several times."""
_FEW = 10
"""Fewer sequences than this give no validation part."""


class References(NamedTuple):
    """Reference times of the sequences of a log."""

    times: NDArray[np.float64]
    """One time for each sequence, on the time axis of the log."""
    words: str
    """What they are, for results."""


def find_references(log: EventSequences, t_ref: object) -> References:
    """Return the reference times of a log.

    Args:
        log: The log.
        t_ref: ``"last_event"``, a time or date, or one for each sequence.

    Raises:
        ValueError: If a reference time comes before the last event of its sequence.
    """
    if isinstance(t_ref, str) and t_ref == "last_event":
        return References(log.last_times, "last_event")
    if isinstance(t_ref, str) and t_ref == "target":
        raise ValueError(
            "t_ref='target' is the time of the next event, which is not known here; use "
            "'last_event', or the time at which you predict. score and log_likelihood use 'target'."
        )
    if isinstance(t_ref, list | tuple | np.ndarray) or hasattr(t_ref, "to_numpy"):
        # not tolist: it would turn dates of numpy into numbers
        given = [log.moment(t) for t in np.asarray(t_ref)]
        if len(given) != len(log):
            raise ValueError(
                f"t_ref must be one time, or one for each of the {len(log)} sequences, got "
                f"{len(given)}."
            )
        times, words = np.array(given), "given times"
    else:
        moment = log.moment(t_ref)
        times, words = np.full(len(log), moment), str(t_ref)
    early = np.flatnonzero(times < log.last_times)
    if len(early):
        i = early[0]
        raise ValueError(
            f"t_ref comes before the last event of sequence {log.keys[i]!r} (gap "
            f"{times[i] - log.last_times[i]:g} {log.unit}); use log.before(t_ref) to leave later "
            "events out."
        )
    return References(times, words)


class EventEstimator(SavedEstimator, BaseEstimator):  # type: ignore[misc]
    """Base class of estimators of event logs; a subclass may have other defaults."""

    _options_type: ClassVar[type[EventFitOptions]]

    def __init__(
        self,
        attention: str = "linear",
        dim: int = 64,
        num_heads: int = 4,
        num_layers: int = 2,
        max_epochs: int = 20,
        batch_size: int = 32,
        learning_rate: float = 4e-3,
        options: EventFitOptions | Mapping[str, object] | None = None,
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

    @classmethod
    def _parameters_of(cls, task: Any, model: Any) -> dict[str, object]:
        config = {**vars(model.config), "max_events": task.scheme.length or WINDOW}
        known = {field.name for field in fields(cls._options_type)}
        options = {name: value for name, value in config.items() if name in known}
        found = {name: config[name] for name in cls._get_param_names() if name in config}
        return {**found, "options": cls._options_type(**options)}

    def _fit_options(self) -> Any:
        """Return the options, checked."""
        return read_options(self._options_type, self.options)

    def _model_options(self) -> Any:
        """Return the settings of the model: those of the estimator and of its options."""
        given = {**vars(self._fit_options()), **self.get_params(deep=False)}
        kind = self._task.Model
        return kind(**{f.name: given[f.name] for f in fields(kind) if f.name in given})

    def _split(
        self, count: int, seed: int, validation: float, strata: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the sequences to train on, and those that choose the epoch; perhaps none."""
        if validation == 0 or count < _FEW:
            return np.arange(count), np.zeros(0, np.int64)
        if strata is not None:
            from primal_attention.tasks.splits import stratified_split

            return stratified_split(strata, validation, seed=seed)
        held = np.random.default_rng(seed).permutation(count)[: max(1, round(validation * count))]
        return np.setdiff1d(np.arange(count), held), np.sort(held)

    def _train(
        self,
        task: Task,
        train: "Dataset[Item]",
        valid: "Dataset[Item] | None",
        seed: int,
        time_limit: float | None,
    ) -> None:
        """Train a new model for a task and set the fitted attributes."""
        from primal_attention.training import TrainingConfig, fit

        with isolated(seed):
            model = task.build(self._model_options())
        options = self._fit_options()
        steps = -(-len(train) // self.batch_size)  # type: ignore[arg-type]
        config = TrainingConfig(
            epochs=self.max_epochs,
            epoch_steps=max(steps, _LEAST_STEPS),
            batch_size=self.batch_size,
            lr=self.learning_rate,
            eta=options.eta,
            patience=options.patience if valid is not None else None,
            max_seconds=time_limit,
            seed=seed,
        )
        self.history_: History | None = fit(
            model,
            train,
            config=config,
            valid=valid,
            objective=task.objective,
            collate=task.collate,
            verbose=self.verbose,
        )
        self.model_, self.task_ = model, task

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))


def check_log(log: object) -> EventSequences:
    """Return a log, or raise with the way to make one."""
    if not isinstance(log, EventSequences):
        raise TypeError(
            f"log must be EventSequences, got {type(log).__name__}; make one with "
            "EventSequences.from_frame(frame, sequence=..., time=..., event=...)."
        )
    return log
