import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from primal_attention.tasks.series import load_series
from primal_attention.tasks.study import run_study
from primal_studies.series import uea as study
from primal_studies.series.uea import (
    Ablation,
    SetOptions,
    TableOne,
    TableOptions,
    Trainings,
)
from primal_studies.series.uea_pages import table_one
from primal_studies.series.uea_table import (
    ABLATION,
    GRID,
    MODELS,
    PUBLISHED_SETTINGS,
    SETS,
    SETTINGS,
    UeaSettings,
    published_choice,
    setting_mark,
)

TINY = UeaSettings(dim=8, num_heads=2, num_layers=1, max_tokens=8, steps=4, min_passes=1, epochs=2)


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


def options(root, **changes):
    return TableOptions(
        **{"sets": ("BasicMotions",), "seeds": (0,), "root": root, "quick": True, **changes}
    )


def quiet(_):
    pass


def without_time(rows):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def test_a_stopped_table_continues_to_the_same_numbers(root, tmp_path):
    both = options(root, models=("softmax", "primal"), seeds=(0, 1))
    whole = run_study(TableOne(), both, out=tmp_path / "a", report=quiet)
    assert len(whole) == 8
    run_study(TableOne(), replace(both, seeds=(0,)), out=tmp_path / "b", report=quiet)
    said = []
    again = run_study(TableOne(), both, out=tmp_path / "b", report=said.append)
    assert len(said) == 4
    assert without_time(again) == without_time(whole)
    table = (tmp_path / "a" / "table.md").read_text()
    assert table.count("| BasicMotions") == 3
    assert "± " in table
    assert table == (tmp_path / "b" / "table.md").read_text()


def test_the_tables_say_who_reaches_the_published_figure():
    def rows(protocol, scores):
        shared = {"set": "Handwriting", "passes": 1.0, "patch": 4, "protocol": protocol}
        return [
            {**shared, "model": model, "seed": seed, "best_test": score}
            for model, found in scores.items()
            for seed, score in enumerate(found)
        ]

    scores = {"softmax": (0.2864, 0.2864), "ours": (0.287, 0.2868), "dual": (0.5, 0.0)}
    text = table_one(rows("best", scores), SETTINGS, PUBLISHED_SETTINGS)
    expected = "Means at or above the published Primal.+: Handwriting (28.7): ours."
    assert text.splitlines()[-1] == expected

    pairs = {pair: (0.2 + i / 100, 0.3 - i / 50) for i, pair in enumerate(GRID)}
    grid = rows("grid", pairs)
    line = table_one(grid, SETTINGS, PUBLISHED_SETTINGS).splitlines()[-1]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    each = ["29.0 ± 1.4 (2 seeds)", "28.7"]  # of the last pair and of the first
    assert cells == ["Handwriting", "23.0", "25.0 ± 7.1 (2 seeds)", next(iter(GRID)), *each]
    del grid[-1]  # a choice among some of the pairs is not the published one
    assert "Handwriting" not in table_one(grid, SETTINGS, PUBLISHED_SETTINGS)


def test_the_published_choice_of_pairs_is_repeated(root, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "GRID_SETS", ("BasicMotions",))
    chosen = options(root, models=("primal-plus",))
    rows = run_study(TableOne(), chosen, out=tmp_path, report=quiet)
    assert [row["model"] for row in rows] == ["primal-plus", "primal-plus", *GRID]


def test_rows_of_other_settings_are_in_no_table(root, tmp_path, monkeypatch):
    chosen = options(root, models=("primal",))
    run_study(TableOne(), chosen, out=tmp_path, report=quiet)
    before = (tmp_path / "table.md").read_text()
    changed = {**SETTINGS, "BasicMotions": replace(SETTINGS["BasicMotions"], lr=1e-4)}
    monkeypatch.setattr(study, "SETTINGS", changed)
    run_study(TableOne(), chosen, out=tmp_path, report=quiet)
    after = (tmp_path / "table.md").read_text()
    assert "AdamW with peak 0.0001" in after
    assert "(2 seeds)" not in after
    assert before != after


def test_finished_rows_stay_valid():
    def marks(settings):
        return {name: setting_mark(choice, settings) for name, choice in MODELS.items()}

    # rows of finished runs carry these: a change throws hours of training away
    small, larger = marks(SETTINGS["SpokenArabicDigits"]), marks(SETTINGS["JapaneseVowels"])
    assert small["softmax"] == "3813299eb4a1"
    assert small["primal"] == "919f791398a6"
    assert larger["softmax"] == "73335702eab2"
    assert larger["primal"] == "e8b0186332d0"
    assert len({*small.values(), *larger.values()}) == 2 * len(MODELS)


def test_the_published_protocol_has_the_published_training(root, monkeypatch):
    from primal_attention import training

    asked = []
    fit = training.fit

    def watch(model, data, *, config, **also):
        asked.append(config)
        return fit(model, data, config=config, **also)

    monkeypatch.setattr(training, "fit", watch)
    settings = replace(PUBLISHED_SETTINGS["Handwriting"], min_passes=1)
    choice = published_choice("primal-plus", "Handwriting")
    parts = (load_series("BasicMotions", part, root=root) for part in ("train", "test"))
    study.run_on_all(choice, *parts, settings, 0)
    (config,) = asked
    assert config.eta == 0.5
    assert (config.optimizer, config.schedule, config.lr) == ("radam", "constant", 1e-3)
    assert (config.warmup, config.weight_decay, config.clip) == (0.0, 0.0, 4.0)
    assert config.batch_size == 16
    # two passes between scores, as published
    whole = PUBLISHED_SETTINGS["JapaneseVowels"]
    assert (whole.epochs, whole.epoch_steps(270)) == (50, 34)


def test_the_selected_epoch_is_chosen_on_training_data(root, tmp_path):
    train = load_series("BasicMotions", root=root)
    chosen = options(root, models=("primal",))
    settings = chosen.shorten(SETTINGS["BasicMotions"])
    epoch = study.select_epoch(MODELS["primal"], train, settings, 0)
    row = run_study(TableOne(), chosen, out=tmp_path, report=quiet)[0]
    assert (row["selected_epoch"], row["valid"]) == epoch
    assert row["best_test"] >= max(row["selected_test"], row["last_test"])


def test_the_ablation_has_one_line_a_variant(root, tmp_path):
    chosen = SetOptions(sets=("BasicMotions",), seeds=(0,), root=root, quick=True)
    rows = run_study(Ablation(), chosen, out=tmp_path, report=quiet)
    assert [row["model"] for row in rows] == list(ABLATION)
    table = (tmp_path / "table.md").read_text()
    assert all(f"| {variant} " in table for variant in ABLATION)


def test_the_choice_of_training_reads_no_test_part(root, tmp_path, monkeypatch):
    read = SetOptions.read

    def broken(self, name):
        train, test = read(self, name)
        return train, replace(test, x=np.full_like(test.x, np.nan))

    chosen = SetOptions(sets=("BasicMotions",), seeds=(0,), root=root, quick=True)
    monkeypatch.setattr(study, "GRID_SETS", ("BasicMotions",))
    whole = run_study(Trainings(), chosen, out=tmp_path / "a", report=quiet)
    assert {(r["training"], r["third"]) for r in whole} == {
        (training, third) for training in ("published", "ours") for third in range(3)
    }
    monkeypatch.setattr(SetOptions, "read", broken)
    assert run_study(Trainings(), chosen, out=tmp_path / "b", report=quiet) == whole


def test_without_r_the_key_side_scores_reach_nothing(root):
    series = load_series("BasicMotions", root=root)
    model = study.build_model(ABLATION["without r"], series, TINY, 0)
    layer = model.blocks[0].attention
    model(torch.randn(2, 20, 2)).logits.sum().backward()
    rank = layer.rank
    gradient = layer.concat.parametrizations.weight.original.grad
    assert gradient[:, :rank].any()
    assert not gradient[:, rank:].any()
    assert layer.k_proj.weight.grad is None or not layer.k_proj.weight.grad.any()


@pytest.mark.raw
def test_unknown_names_list_what_there_is():
    with pytest.raises(ValueError, match="No set named Basic; there are: UWave"):
        TableOptions(sets=("Basic",))
    with pytest.raises(ValueError, match="No model named mamba; there are: softmax, primal"):
        TableOptions(models=("mamba",))


def test_every_set_of_the_study_is_in_the_data_folder():
    folder = Path(os.environ.get("PRIMAL_DATA", "../shared/data")) / "uea"
    if not folder.is_dir():
        pytest.skip("the UEA sets are not here; set PRIMAL_DATA")
    for name in SETS:
        for part in ("train", "test"):
            series = load_series(name, part, root=folder)
            assert series.y is not None
            assert set(np.unique(series.y)) == set(range(len(series.classes)))
