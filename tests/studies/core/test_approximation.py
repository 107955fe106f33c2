"""Errors of features in attention: what the table must show."""

from primal_studies.core.approximation import METHODS, ApproximationOptions, ApproximationStudy


def _errors(tau, tmp_path):
    options = ApproximationOptions(draws=3)
    cell = {"tau": tau, "num_features": 128, "dim": 32, "tokens": 256, "draws": 3}
    rows = ApproximationStudy().run(cell, options, tmp_path)
    return {row["method"]: row["error"] for row in rows}, rows[0]["from_average"]


def test_exact_low_degrees_win_at_low_temperatures_and_positive_features_at_high(tmp_path):
    low, average = _errors(0.177, tmp_path)
    assert set(low) == set(METHODS)
    assert low["maclaurin"] < 0.25 * min(low["maclaurin-published"], low["favor"])
    assert low["maclaurin"] < average < low["favor"] * 2
    high, _ = _errors(4.0, tmp_path)
    assert high["favor"] < high["maclaurin-published"]
