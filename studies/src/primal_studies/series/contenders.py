"""Sets and methods of the comparison of time-series classifiers, by name.

Nothing here imports torch, so that the studies show their options at once.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["HYDRA", "METHODS", "MINIROCKET", "OURS", "SETS", "Contender"]

SETS = {
    "ACSF1": 100, "Adiac": 390, "AllGestureWiimoteX": 300, "AllGestureWiimoteY": 300,
    "AllGestureWiimoteZ": 300, "ArrowHead": 36, "BME": 30, "Beef": 30, "BeetleFly": 20,
    "BirdChicken": 20, "CBF": 30, "Car": 60, "Chinatown": 20, "ChlorineConcentration": 467,
    "CinCECGTorso": 40, "Coffee": 28, "Computers": 250, "CricketX": 390, "CricketY": 390,
    "CricketZ": 390, "Crop": 7200, "DiatomSizeReduction": 16, "DistalPhalanxOutlineAgeGroup": 400,
    "DistalPhalanxOutlineCorrect": 600, "DistalPhalanxTW": 400, "DodgerLoopDay": 78,
    "DodgerLoopGame": 20, "DodgerLoopWeekend": 20,
}  # fmt: skip
"""The sets of the package whose names begin with A to D, and their training series."""
OURS, MINIROCKET, HYDRA = "ours", "minirocket", "multirocket-hydra"


class Contender(NamedTuple):
    """A classifier of the comparison."""

    title: str
    """Name in tables."""
    options: Mapping[str, Any]
    """Arguments besides the seed."""
    has_gaps: bool = False
    """Whether it takes missing values."""
    has_lengths: bool = False
    """Whether it takes series of unequal length."""
    has_chances: bool = False
    """Whether its probabilities are more than zeros and ones."""
    is_random: bool = True
    """Whether a seed changes it."""


METHODS = {
    OURS: Contender("ours", {}, has_gaps=True, has_lengths=True, has_chances=True),
    MINIROCKET: Contender("MiniRocket", {}),
    HYDRA: Contender("MultiRocketHydra", {}),
    "quant": Contender("QUANT", {}, has_chances=True),
    "dtw": Contender(
        "1-NN DTW",
        {"distance": "dtw", "distance_params": {"window": 0.1}},
        has_lengths=True,
        is_random=False,
    ),
}
"""Methods by name, in the order of the tables."""
