"""Options of estimators: a frozen dataclass, or a dictionary with some of its fields."""

import math
from collections.abc import Mapping
from dataclasses import fields
from numbers import Real
from typing import Any, TypeVar

from primal_attention.support.settings import build

__all__ = ["check_time_limit", "is_positive", "plain_options", "read_options"]

T = TypeVar("T")


def is_positive(value: object) -> bool:
    """Return whether something is a finite number above zero; booleans are none."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and 0 < float(value) < math.inf  # type: ignore[arg-type]


def check_time_limit(seconds: float | None) -> None:
    """Raise unless the time of a fit is None or a positive number of seconds."""
    if seconds is not None and not is_positive(seconds):
        raise ValueError(
            f"time_limit must be a positive number of seconds or None, got {seconds!r}."
        )


def read_options(kind: type[T], given: T | Mapping[str, object] | None) -> T:
    """Return the options of an estimator, checked field by field.

    Args:
        kind: Their dataclass.
        given: An instance, some of its fields by name, or None for the defaults.

    Raises:
        TypeError: If ``given`` is something else.
        UserError: A ``ValueError``, if a field is not known or has another type.

    Example:
        >>> from primal_attention.tasks.lists.settings import ListFitOptions
        >>> read_options(ListFitOptions, {"anchors": 32}).anchors
        32
    """
    return build(kind, _by_name(kind, given), "options")


def plain_options(kind: type[Any], given: object) -> dict[str, Any] | None:
    """Return options by name, as JSON has them; None stands for the defaults.

    Args:
        kind: Their dataclass.
        given: What the estimator was made with.
    """
    return None if given is None else _by_name(kind, read_options(kind, given))


def _by_name(kind: type[Any], given: object) -> dict[str, Any]:
    """Return the fields of options by name; nested values stay as they are."""
    if given is None:
        return {}
    if isinstance(given, kind):
        return {field.name: getattr(given, field.name) for field in fields(kind)}
    if isinstance(given, Mapping):
        return dict(given)
    raise TypeError(
        f"options must be {kind.__name__}, a dictionary of its fields, or None, got {given!r}."
    )
