"""Instability is what its closed form says, and compares models that start alike."""

import csv

import pytest
import torch
from torch import nn

from primal_attention.bench.instability import (
    MEASURE,
    OPTIONS,
    PUBLISHED,
    Plan,
    build,
    instability,
    main,
    measure,
    summarize,
)
from primal_attention.models import ModelOutput


class Linear(nn.Linear):
    def forward(self, x):
        return ModelOutput(super().forward(x))


@pytest.mark.parametrize("lr", [1e-3, 10.0])
def test_a_linear_model_moves_by_the_square_of_its_input(lr):
    # a step on one row is ΔW = −lr g xᵀ, so Δf = ΔW x = −lr g ‖x‖²
    model = Linear(5, 3, bias=False, dtype=torch.float64)
    batches = [
        {"x": torch.randn(1, 5, dtype=torch.float64), "labels": torch.tensor([i % 3])}
        for i in range(4)
    ]
    found = instability(model, batches, torch.optim.SGD(model.parameters(), lr))
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64),
        torch.stack([batch["x"].square().sum() for batch in batches]),
        rtol=1e-6,
        atol=0.0,
    )


def test_dropout_does_not_count_as_a_change():
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.drop = nn.Linear(5, 3, bias=False), nn.Dropout(0.5)

        def forward(self, x):
            return ModelOutput(self.linear(self.drop(x)))

    model = Dropping()
    batch = {"x": torch.randn(6, 5), "labels": torch.tensor([0, 1, 2, 0, 1, 2])}
    # whatever was dropped in the step, a linear map can move by no more than its inputs allow
    bound = torch.linalg.matrix_norm(batch["x"], 2).square()
    for value in instability(model, [batch] * 5, torch.optim.SGD(model.parameters(), 0.1)):
        assert 0 < value <= bound * (1 + 1e-4)


@pytest.mark.parametrize("name", OPTIONS)
def test_models_of_a_seed_share_what_they_can(name):
    model, softmax = (build(n, "listops", 1, std=0.02).state_dict() for n in (name, MEASURE))
    torch.testing.assert_close(model["embed.weight"], softmax["embed.weight"])
    assert softmax["embed.weight"].std() == pytest.approx(0.02, rel=0.1)
    for key in model.keys() & softmax.keys():
        assert model[key].shape != softmax[key].shape or torch.equal(model[key], softmax[key])


def test_published_ratios_belong_to_contestants():
    assert set(PUBLISHED) <= set(OPTIONS)


def test_runs_are_continued(tmp_path):
    plan = Plan(("listops",), ("gaussian", "primal-dual"), steps=2, seeds=1, shrink=20)
    path, lines = tmp_path / "runs.csv", []
    rows = measure(plan, path, progress=lines.append)
    assert [row["name"] for row in rows] == [MEASURE, "gaussian", "primal-dual"]
    assert measure(plan, path, progress=lines.append) == rows
    assert len(lines) == 3
    measure(Plan(("listops",), (), 2, 1, 1.0, 20), path, progress=lines.append)
    assert lines[3:] == ["listops, seed 0: softmax"]


def test_ratios_are_taken_seed_by_seed():
    def row(name, seed, value):
        key = {"task": "image", "std": 0.02, "tokens": 1024}
        return {**key, "name": name, "seed": seed, "instability": value}

    scores = {MEASURE: (1.0, 4.0), "skyformer-published": (0.5, 4.0)}
    rows = [row(n, s, v) for n, values in scores.items() for s, v in enumerate(values)]
    record = summarize(rows)[-1]
    assert (record["ratio"], record["published"]) == (0.75, 0.65)
    assert record["spread"] == pytest.approx(0.354, abs=1e-3)


def test_command_prints_a_table_and_saves_files(tmp_path, capsys):
    main(Plan(("listops",), ("skyformer",), steps=1, seeds=1, shrink=20, out=tmp_path))
    assert "as a multiple of softmax attention's" in capsys.readouterr().out
    assert {p.name for p in tmp_path.iterdir()} == {
        "instability.csv",
        "instability.md",
        "instability_runs.csv",
    }
    with (tmp_path / "instability_runs.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2


@pytest.mark.parametrize("wrong", [{"tasks": ("texts",)}, {"steps": 0}, {"std": 0.0}])
def test_plans_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match=r"Unknown tasks|must be"):
        Plan(**wrong)
