"""The study of aligned classes: its data, its folds, its tables."""

import gzip

import numpy as np
import pytest

from primal_attention.tasks.study import find_study, run_study
from primal_studies.tables import aligned as aligned_study
from primal_studies.tables.aligned import (
    AlignedAccuracy,
    AlignedOptions,
    load_rows,
    make_clouds,
)


def test_clouds_have_the_published_centres_and_covariance():
    points, classes = make_clouds(3, 2.0, rows=60_000)
    x = 6 / (1 + 2**0.5)
    for c, centre in enumerate([(-x, 0), (x, 0), (0, x)]):
        np.testing.assert_allclose(points[classes == c].mean(0), centre, atol=0.05)
        np.testing.assert_allclose(np.cov(points[classes == c].T), 2 * np.eye(2), atol=0.08)
    points, classes = make_clouds(2, 3.0, rows=60_000)
    np.testing.assert_allclose(points[classes == 1].mean(0), [3, 0], atol=0.05)
    with pytest.raises(ValueError, match="count must be 2 or 3"):
        make_clouds(4, 1.0)


def test_blocked_folds_of_eeg_are_contiguous_and_random_ones_are_not(tmp_path):
    folder = tmp_path / "tabular" / "eeg-epilepsy"
    folder.mkdir(parents=True)
    lines = [",".join(f"X{i}" for i in range(16)) + ",y"]
    lines += [",".join([str(i)] * 16 + [str(i // 50)]) for i in range(200)]
    (folder / "BEED_Data.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    blocked = load_rows("EEG blocked", 0, tmp_path)
    test = blocked.folds[0][1]
    assert test.tolist() == [50 * c + i for c in range(4) for i in range(40, 50)]
    shuffled = load_rows("EEG random", 0, tmp_path)
    assert shuffled.folds[0][1].tolist() != test.tolist()
    for rows in (blocked, shuffled):
        everything = np.sort(np.concatenate([fold[1] for fold in rows.folds]))
        np.testing.assert_array_equal(everything, np.arange(200))


def test_the_study_writes_tables_and_pictures_and_pairs_its_folds(tmp_path, monkeypatch):
    monkeypatch.setattr(aligned_study, "_ROWS", 90)
    options = AlignedOptions(sets=("3 clouds",), seeds=(0,), epochs=2)
    rows = run_study(find_study("ot-accuracy", "repro"), options, out=tmp_path, report=str)
    assert {row["method"] for row in rows} >= {"OT circle", "OT aligned", "MLP", "logistic"}
    assert all(len(row["accuracy"]) == 5 for row in rows)
    ours = next(row for row in rows if row["method"] == "OT aligned")
    assert len(ours["arrows"]) == 18
    assert all(0 < value <= 1 for value in ours["optimality"])
    for name in ("accuracy.md", "differences.md", "geometry.md", "picture.png", "maps.png"):
        assert (tmp_path / name).stat().st_size > 100
    circle, random = (
        next(row["accuracy"] for row in rows if row["method"] == m)
        for m in ("OT circle", "random circle")
    )
    mean = 100 * np.mean(np.subtract(circle, random))
    line = next(
        line
        for line in (tmp_path / "differences.md").read_text().split("\n")
        if line.startswith("| OT circle − random circle")
    )
    assert float(line.split("|")[2].split("±")[0]) == pytest.approx(mean, abs=0.05)


def test_errors_of_overlapping_folds_are_corrected():
    values = [0.0, 1.0, 0.0, 1.0, 0.5]
    plain = np.std(values, ddof=1) / 5**0.5
    assert aligned_study._error(values) == pytest.approx(plain * 1.5)


def test_options_are_checked():
    with pytest.raises(ValueError, match="sets has no 'irs'"):
        AlignedOptions(sets=("irs",))
    with pytest.raises(ValueError, match="must not be empty"):
        AlignedOptions(seeds=())
    assert len(AlignedAccuracy().cells(AlignedOptions())) == 9 * 3
