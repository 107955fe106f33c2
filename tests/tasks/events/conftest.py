"""Small logs and estimators that train in a second."""

import numpy as np
import pandas as pd
import pytest

from primal_attention.datasets import EventSequences, HawkesProcess
from primal_attention.tasks.events import EventPredictor

SMALL = {
    "dim": 16,
    "num_heads": 2,
    "num_layers": 1,
    "max_epochs": 2,
    "options": {"components": 4},
}


@pytest.fixture(scope="session")
def hawkes() -> EventSequences:
    """A log of two types in hours."""
    times, types = HawkesProcess().sample(24, 30, seed=0)
    return EventSequences.from_arrays(times, types, unit="hours")


@pytest.fixture(scope="session")
def predictor(hawkes) -> EventPredictor:
    """A trained predictor of that log."""
    return EventPredictor(**SMALL, random_state=0).fit(hawkes)


@pytest.fixture(scope="session")
def frame() -> pd.DataFrame:
    """A log with dates, marks and covariates, as a user has it."""
    rng = np.random.default_rng(0)
    rows = []
    for user in range(20):
        when = pd.Timestamp("2024-03-01", tz="Europe/Berlin")
        for _ in range(rng.integers(5, 12)):
            when += pd.Timedelta(hours=float(rng.exponential(30)))
            kind = rng.choice(["view", "cart", "buy"], p=[0.6, 0.3, 0.1])
            rows.append(
                (f"u{user}", when, kind, rng.normal(10, 3), rng.choice(["phone", "desk"]), user % 3)
            )
    columns = ["user", "time", "event", "price", "device", "region"]
    return pd.DataFrame(rows, columns=columns)


@pytest.fixture
def dated(frame) -> EventSequences:
    return EventSequences.from_frame(
        frame, marks=["price", "device"], covariates=["region"], unit="days"
    )
