"""One row for values that never fail apart, and few combinations of many options."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch


def each(
    names: str, values: Iterable[Any] | Callable[[Any], Iterable[Any]], *, of: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test once for every value, all in one row; the failure says for which values.

    Use ``parametrize`` where values can fail apart, or where one takes seconds. Every value starts
    from the same seed. A value must not skip the test.

    Args:
        names: Arguments of the test, separated by commas.
        values: A value or a tuple of values for each run; or a function that returns them.
        of: Argument of the test that the function takes.
    """
    split = [name.strip() for name in names.split(",")]
    given = values if callable(values) else list(values)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(test).parameters
        assert set(split) <= set(parameters), f"{test.__name__} does not take {names}"

        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            runs = given
            if callable(given):
                runs = given(arguments[of] if of in parameters else arguments.pop(of))
            failed: list[str] = []
            first: Exception | None = None
            for value in runs:
                row = dict(zip(split, value if len(split) > 1 else [value], strict=True))
                torch.manual_seed(0)
                np.random.seed(0)
                try:
                    test(**arguments, **row)
                except Exception as error:
                    failed.append(", ".join(f"{name}={row[name]}" for name in split))
                    first = first or error
            if first is not None:
                first.add_note(f"fails with {'; '.join(failed)}")
                raise first

        kept = [p for name, p in parameters.items() if name not in split]
        if of is not None and of not in parameters:
            kept.append(inspect.Parameter(of, inspect.Parameter.POSITIONAL_OR_KEYWORD))
        run.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
        return run

    return decorate


def cover(strength: int, *axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return few combinations of values that contain all combinations of every ``strength`` axes.

    Most faults need two or three options together, so the whole product finds hardly more.
    """
    values = [list(axis) for axis in axes]
    product = list(itertools.product(*(range(len(axis)) for axis in values)))
    parts = list(itertools.combinations(range(len(values)), strength))
    left = {row: {(part, *(row[i] for i in part)) for part in parts} for row in product}
    missing = set().union(*left.values())
    chosen = []
    while missing:
        best = max(product, key=lambda row: len(left[row] & missing))
        chosen.append(tuple(axis[i] for axis, i in zip(values, best, strict=True)))
        missing -= left[best]
    return chosen
