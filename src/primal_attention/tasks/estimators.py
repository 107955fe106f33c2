"""What all estimators share: checks of their parameters, options, folders.

A folder holds the task, the model, and ``estimator.json`` with the parameters.
"""

from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, get_type_hints

import numpy as np
from numpy.typing import NDArray

from primal_attention.support.command import UserError, did_you_mean, user_errors
from primal_attention.support.files import parse_json
from primal_attention.support.options import check_time_limit, is_positive, plain_options
from primal_attention.support.output import to_json
from primal_attention.support.settings import check_value
from primal_attention.tasks.task import ESTIMATOR, Task, open_folder
from primal_attention.tasks.trained import read_trained, save_trained

if TYPE_CHECKING:
    from primal_attention.models import PretrainedModel

__all__ = [
    "SavedEstimator",
    "check_fit",
    "check_parameters",
    "plain_parameters",
    "restore_classes",
]


class Trains(Protocol):
    """An estimator that trains in epochs."""

    # properties, because those of an estimator may be narrower than these
    @property
    def max_epochs(self) -> int: ...
    @property
    def batch_size(self) -> int | None: ...
    @property
    def learning_rate(self) -> float: ...


def check_fit(estimator: Trains, time_limit: float | None, *, any_batch: bool = False) -> None:
    """Raise if an estimator cannot train with its parameters, or within its time.

    Args:
        estimator: Its ``max_epochs``, ``batch_size`` and ``learning_rate`` are checked.
        time_limit: Seconds of the fit, or None.
        any_batch: Whether ``batch_size`` may be None.
    """
    for name in ("max_epochs", "batch_size"):
        count = getattr(estimator, name)
        if count is None and any_batch and name == "batch_size":
            continue
        if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {count!r}.")
    if not is_positive(estimator.learning_rate):
        raise ValueError(
            f"learning_rate must be a positive number, got {estimator.learning_rate!r}."
        )
    check_time_limit(time_limit)


class SavedEstimator:
    """``save`` and ``load`` of estimators that have a task and a model.

    A subclass is also one of scikit-learn's or aeon's estimators.
    """

    _task: ClassVar[type[Task]]
    _model: "ClassVar[type[PretrainedModel]]"
    _options_type: ClassVar[type[Any]]
    task_: Any
    model_: Any
    history_: Any

    def save(self, path: str | Path) -> None:
        """Write the fitted estimator to a folder, which ``primal predict`` reads too.

        Parameters
        ----------
        path : str or Path
            Folder, made if it is not there. Read it with :meth:`load`.
        """
        self._check_fitted()
        parameters = self._plain_parameters()
        content = {"class": type(self).__name__, "parameters": parameters, **self._extra()}
        save_trained(Path(path), self.task_, self.model_, {ESTIMATOR: to_json(content)})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the estimator in a folder that :meth:`save` or ``primal train`` wrote.

        Parameters
        ----------
        path : str or Path
            The folder, such as ``outputs/my/primal``.

        Returns
        -------
        estimator : the same class
            Fitted, ready to predict.

        Raises
        ------
        UserError
            A ``ValueError``, if the folder holds something else, or a file in it was changed or
            damaged after it was saved.
        """
        folder = open_folder(Path(path))
        task, model = read_trained(folder)
        if not (isinstance(task, cls._task) and isinstance(model, cls._model)):
            raise UserError(
                f"{folder.path} holds a {type(model).__name__}, not what {cls.__name__} saves."
            )
        file = folder.path / ESTIMATOR
        has_file = file.is_file() or ESTIMATOR in (folder.sums or {})
        content = parse_json(folder.read(ESTIMATOR), file) if has_file else {}
        with user_errors(f"{file} is damaged", UserError, ValueError, TypeError, LookupError):
            if has_file:
                estimator = cls(**check_parameters(cls, content.get("parameters")))
            else:  # a folder of primal train
                estimator = cls(**cls._parameters_of(task, model))
            estimator.task_, estimator.model_, estimator.history_ = task, model, None
            estimator._restore(content)
        return estimator

    def _check_fitted(self) -> None:
        from sklearn.utils.validation import check_is_fitted

        check_is_fitted(self)

    def _plain_parameters(self) -> dict[str, Any]:
        """Return the parameters as JSON has them."""
        return plain_parameters(self)

    @classmethod
    def _parameters_of(cls, task: Any, model: Any) -> dict[str, Any]:
        """Return the parameters of an estimator for a model of ``primal train``."""
        raise NotImplementedError  # abstract

    def _extra(self) -> dict[str, Any]:
        """Return what a folder must hold besides parameters, task and model."""
        return {}

    def _restore(self, content: Mapping[str, Any]) -> None:
        """Set the other fitted attributes, or raise if the folder is of another estimator."""


def plain_parameters(estimator: Any) -> dict[str, Any]:
    """Return the parameters of an estimator as JSON has them."""
    found: dict[str, Any] = estimator.get_params(deep=False)
    if not isinstance(found["random_state"], int | None):
        found["random_state"] = None  # a generator is not part of the result
    if found.get("verbose") is not None:
        found["verbose"] = bool(found["verbose"])
    found["options"] = plain_options(estimator._options_type, estimator.options)
    return found


def check_parameters(kind: Any, given: Any) -> dict[str, Any]:
    """Return the parameters of an estimator from a file, of the types that it declares.

    Raises:
        UserError: If there is none, a parameter is not known, or has another type.
    """
    if not isinstance(given, dict):
        raise UserError("it has no parameters.")
    # a base class may have the constructor, but each estimator has options of its own
    hints = {**get_type_hints(kind.__init__), "options": kind._options_type | None}
    for name in given:
        if name not in kind._get_param_names():
            hint = did_you_mean(name, kind._get_param_names())
            raise UserError(f"{kind.__name__} has no parameter {name!r}.{hint}")
    return {name: check_value(value, hints[name], name) for name, value in given.items()}


def restore_classes(values: Any, dtype: Any, count: int) -> NDArray[Any]:
    """Return the classes of a classifier from a file.

    Args:
        values: The classes as the user has them.
        dtype: Their type in numpy.
        count: Classes of the model.

    Raises:
        UserError: If they are no classes, or not as many.

    Example:
        >>> restore_classes([3, 7], "<i8", 2)
        array([3, 7])
    """
    plain = isinstance(values, list) and all(isinstance(v, str | int | float) for v in values)
    if not plain or len(values) != count:
        found = len(values) if isinstance(values, list) else "no"
        raise UserError(f"it has {found} classes, the model {count}.")
    kind = np.dtype(dtype)
    # a type may ask for any number of bytes
    if kind.kind not in "biufUO" or kind.itemsize > 4 * max(4, *(len(str(v)) for v in values)):
        raise UserError(f"its classes have the type {dtype!r}, which is not theirs.")
    return np.array(values, kind)
