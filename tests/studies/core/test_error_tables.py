"""The error tables of the kernel attentions reproduce what the papers and their checks report."""

import pytest

from primal_studies.core import nystrom, toeplitz


def test_more_landmarks_and_better_inverses_give_less_error():
    for data in nystrom.DATA:
        few, many = (nystrom.by_inverse(data, size, 128, seeds=1) for size in (16, 64))
        assert many["exact 1e-3"] < few["exact 1e-3"]
        assert many["exact 1e-3"] <= many["exact 0.1"] + 1e-6
        assert many["identity, 6 steps"] <= many["published, 6 steps"] + 1e-6


def test_schulz_residuals_are_those_of_the_derivation():
    small, large = nystrom.by_steps("s=0.1"), nystrom.by_steps("s=1")
    # spec 02 §8.2
    assert small["smallest eigenvalue"] == pytest.approx(8.2e-4, rel=0.05)
    assert small["published, 6 steps"] == pytest.approx(1.0, abs=0.01)
    assert small["published, 10 steps"] == pytest.approx(0.91, abs=0.03)
    assert small["identity, 6 steps"] == pytest.approx(0.38, abs=0.05)
    assert small["identity, 8 steps"] < 5e-4
    assert large["published, 6 steps"] == pytest.approx(0.54, abs=0.1)


def test_cluster_means_beat_tokens_as_landmarks():
    for data in ("s=0.5", "s=1"):
        row = nystrom.by_landmarks(data, 32, 128, seeds=1)
        assert row["best"] < row["kmeans"] < row["strided"]


def test_positive_features_have_the_error_of_the_papers_figure():
    # spec 03 §8.2, R = 1: 0.530, 0.319, 0.182, 0.100 for 4, 16, 64, 256 features
    row = toeplitz.feature_error(1.0, [4, 16, 64, 256])
    errors = [row[f"{m} features"] for m in (4, 16, 64, 256)]
    assert errors == sorted(errors, reverse=True)
    assert errors == pytest.approx([0.530, 0.319, 0.182, 0.100], rel=0.2)


def test_blocks_hold_where_one_transform_fails():
    mild, hard = toeplitz.range_error(2), toeplitz.range_error(8)
    # spec 03 §8.3: 1e-4 and 4e-7, then 44 and 1e-4
    assert mild["rising, one transform"] < 5e-3
    assert hard["rising, one transform"] > 0.1
    assert hard["rising, blocks"] < 1e-3
    assert hard["random, blocks"] < 1e-5
    assert hard["rising, bidirectional"] < 1e-3
