import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from primal_attention.tasks.timeseries.repro import ablate_uea, reproduce_uea

from primal_attention.tasks.timeseries import repro
from primal_attention.tasks.timeseries.settings import (
    ABLATION,
    GRID,
    MODELS,
    PUBLISHED_SETTINGS,
    SETS,
    SETTINGS,
    Settings,
    fingerprint,
    published_choice,
)
from primal_attention.tasks.timeseries.tables import write_tables

TINY = Settings(dim=8, num_heads=2, num_layers=1, max_tokens=8, steps=4, min_passes=1, epochs=2)
PARTS = {"sets": ["BasicMotions"], "seeds": [0, 1], "settings": TINY}


@pytest.fixture
def root(tmp_path):
    """A folder of sets with one small set under a real name."""
    rng = np.random.default_rng(0)
    arrays = {"classes": np.array(["p", "q"])}
    for part, cases in (("train", 12), ("test", 10)):
        y = np.arange(cases) % 2
        t = np.arange(20)[None, :, None]
        rate = (0.3 + 0.5 * y)[:, None, None]
        x = np.sin(rate * t) + 0.1 * rng.normal(size=(cases, 20, 2))
        arrays[f"X_{part}"], arrays[f"y_{part}"] = x.astype(np.float32), y
    folder = tmp_path / "uea" / "BasicMotions"
    folder.mkdir(parents=True)
    np.savez(folder / "BasicMotions.npz", **arrays)
    return tmp_path / "uea"


def quiet(_):
    pass


def without_time(rows):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def test_a_stopped_study_continues_to_the_same_table(root, tmp_path):
    options = PARTS | {"models": ["softmax", "primal"], "root": root}
    whole = reproduce_uea(**options, out=tmp_path / "a", report=quiet)
    assert len(whole) == 8
    first = reproduce_uea(**(options | {"seeds": [0]}), out=tmp_path / "b", report=quiet)
    # a crash in the middle of a line loses that line only
    with (tmp_path / "b" / "uea.jsonl").open("a") as file:
        file.write('{"set": "BasicMo')
    told = []
    again = reproduce_uea(**options, out=tmp_path / "b", report=told.append)
    assert len(told) == 4
    assert without_time(again) == without_time(whole)
    assert [again[0], again[1], again[4], again[5]] == first
    table = (tmp_path / "a" / "uea.md").read_text()
    assert table.count("| BasicMotions") == 3
    assert "± " in table
    for name in ("uea", "uea_published"):
        assert len((tmp_path / "a" / f"{name}.csv").read_text().splitlines()) == 6


def test_the_tables_tell_who_reaches_the_published_figure(tmp_path):
    def rows(**scores):
        shared = {"set": "Handwriting", "passes": 1.0, "patch": 4}
        return [
            {**shared, "model": model, "seed": seed, "best_test": score}
            for model, found in scores.items()
            for seed, score in enumerate(found)
        ]

    best = rows(softmax=(0.2864, 0.2864), ours=(0.287, 0.2868), dual=(0.5, 0.0))
    write_tables([], best, [], SETTINGS, PUBLISHED_SETTINGS, tmp_path)
    lines = (tmp_path / "uea.md").read_text().splitlines()
    assert lines[-1] == "Means at or above the published Primal.+: Handwriting (28.7): ours."

    grid = rows(**{pair: (0.2 + i / 100, 0.3 - i / 50) for i, pair in enumerate(GRID)})
    write_tables([], [], grid, SETTINGS, PUBLISHED_SETTINGS, tmp_path)
    line = (tmp_path / "uea.md").read_text().splitlines()[-1]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    each = ["29.0 ± 1.4 (2 seeds)", "28.7"]  # of the last pair and of the first
    assert cells == ["Handwriting", "23.0", "25.0 ± 7.1 (2 seeds)", next(iter(GRID)), *each]
    del grid[-1]  # a choice among some of the pairs is not the published one
    write_tables([], [], grid, SETTINGS, PUBLISHED_SETTINGS, tmp_path)
    assert "Handwriting" not in (tmp_path / "uea.md").read_text()


def test_the_published_choice_of_pairs_is_repeated(root, tmp_path, monkeypatch):
    monkeypatch.setattr(repro, "GRID_SETS", ("BasicMotions",))
    options = PARTS | {"models": ["primal-plus"], "seeds": [0], "root": root, "out": tmp_path}
    settings = replace(TINY, dim=20)  # heads as wide as the largest rank
    rows = reproduce_uea(**(options | {"settings": settings}), report=quiet)
    assert [row["model"] for row in rows] == ["primal-plus", "primal-plus", *GRID]


def test_no_time_left_starts_nothing(root, tmp_path):
    told = []
    rows = reproduce_uea(
        **PARTS, root=root, out=tmp_path / "a", max_seconds=-1.0, report=told.append
    )
    assert rows == []
    assert ["the same command continues" in line for line in told] == [True, True]


def test_rows_of_other_settings_are_not_mixed_in(root, tmp_path):
    options = PARTS | {"models": ["primal"], "seeds": [0], "root": root, "out": tmp_path / "a"}
    reproduce_uea(**options, report=quiet)
    reproduce_uea(**(options | {"settings": replace(TINY, lr=1e-4)}), report=quiet)
    for name in ("uea", "uea_published"):
        lines = (tmp_path / "a" / f"{name}.jsonl").read_text().splitlines()
        assert len({json.loads(line)["settings"] for line in lines}) == 2


def test_finished_rows_stay_valid():
    def marks(settings):
        return {name: fingerprint(choice, settings) for name, choice in MODELS.items()}

    # rows of finished runs carry these: a change throws hours of training away
    small, larger = marks(SETTINGS["SpokenArabicDigits"]), marks(SETTINGS["JapaneseVowels"])
    assert small["softmax"] == "3813299eb4a1"
    assert small["primal"] == "919f791398a6"
    assert larger["softmax"] == "73335702eab2"
    assert larger["primal"] == "e8b0186332d0"
    assert len({*small.values(), *larger.values()}) == 2 * len(MODELS)


def test_the_published_protocol_has_the_published_training(root, monkeypatch):
    asked = []

    def watch(model, data, *, config, **options):
        asked.append(config)
        return fit(model, data, config=config, **options)

    fit = repro.fit
    monkeypatch.setattr(repro, "fit", watch)
    settings = replace(PUBLISHED_SETTINGS["Handwriting"], min_passes=1)
    choice = published_choice("primal-plus", "Handwriting")
    row = repro.run_published("BasicMotions", choice, 0, settings, root=root)
    (config,) = asked
    assert config.eta == 0.5
    assert (config.optimizer, config.schedule, config.lr) == ("radam", "constant", 1e-3)
    assert (config.warmup, config.weight_decay, config.clip) == (0.0, 0.0, 4.0)
    assert config.batch_size == 16
    assert row["best_test"] >= row["last_test"]
    # two passes between scores, as published
    whole = PUBLISHED_SETTINGS["JapaneseVowels"]
    assert (whole.epochs, whole.epoch_steps(270)) == (50, 34)


def test_the_selected_epoch_never_sees_the_test_part(root, tmp_path):
    train = repro.load_series("BasicMotions", root=root)
    choice = MODELS["primal"]
    once = repro._select_epoch(choice, train, TINY, 0)
    assert once == repro._select_epoch(choice, train, TINY, 0)
    row = repro.run_combination("BasicMotions", choice, 0, TINY, root=root)
    assert (row["selected_epoch"], row["valid"]) == once
    assert row["best_test"] >= max(row["selected_test"], row["last_test"])


def test_ablation_writes_one_line_a_variant(root, tmp_path):
    settings = replace(TINY, num_heads=1)
    rows = ablate_uea(
        ["BasicMotions"], seeds=[0], settings=settings, root=root, out=tmp_path, report=quiet
    )
    assert [row["model"] for row in rows] == list(ABLATION)
    table = (tmp_path / "uea_ablation.md").read_text()
    assert all(f"| {variant} " in table for variant in ABLATION)


def test_without_r_the_key_side_scores_reach_nothing(root):
    series = repro.load_series("BasicMotions", root=root)
    model = repro.build_model(ABLATION["without r"], series, TINY, 0)
    layer = model.blocks[0].attention
    model(torch.randn(2, 20, 2)).logits.sum().backward()
    rank = layer.rank
    gradient = layer.concat.parametrizations.weight.original.grad
    assert gradient[:, :rank].any()
    assert not gradient[:, rank:].any()
    assert layer.k_proj.weight.grad is None or not layer.k_proj.weight.grad.any()


@pytest.mark.raw
def test_unknown_names_list_what_there_is(tmp_path):
    with pytest.raises(ValueError, match="No set named Basic; there are: UWave"):
        reproduce_uea(["Basic"], out=tmp_path)
    with pytest.raises(ValueError, match="No model named mamba; there are: softmax, primal"):
        reproduce_uea(models=["mamba"], out=tmp_path)


def test_every_set_of_the_study_is_in_the_data_folder():
    folder = Path(os.environ.get("PRIMAL_DATA", "../shared/data")) / "uea"
    if not folder.is_dir():
        pytest.skip("the UEA sets are not here; set PRIMAL_DATA")
    for name in SETS:
        for part in ("train", "test"):
            series = repro.load_series(name, part, root=folder)
            assert series.y is not None
            assert set(np.unique(series.y)) == set(range(len(series.classes)))
