"""Instability is what its closed form says, and compares models that start alike."""

import pytest
import torch
from torch import nn

from primal_attention.models import ModelOutput
from primal_studies.core.instability import (
    BASE,
    MODELS,
    PUBLISHED,
    InstabilityOptions,
    InstabilityStudy,
    build_classifier,
    instability,
    ratios,
)


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


@pytest.mark.parametrize("name", MODELS)
def test_models_of_a_seed_share_what_they_can(name):
    model, softmax = (
        build_classifier(n, "listops", 1, std=0.02).state_dict() for n in (name, BASE)
    )
    torch.testing.assert_close(model["embed.weight"], softmax["embed.weight"])
    assert softmax["embed.weight"].std() == pytest.approx(0.02, rel=0.1)
    for key in model.keys() & softmax.keys():
        assert model[key].shape != softmax[key].shape or torch.equal(model[key], softmax[key])


def test_softmax_always_takes_part():
    assert set(PUBLISHED) <= set(MODELS)
    (cell,) = InstabilityStudy().cells(InstabilityOptions(("listops",), ("primal",)))
    assert cell["names"] == [BASE, "primal"]


def test_ratios_are_taken_seed_by_seed():
    row = ratios({BASE: [1.0, 4.0], "skyformer-published": [0.5, 4.0]})[-1]
    assert row["ratio"] == 0.75
    assert row["spread"] == pytest.approx(0.354, abs=1e-3)


@pytest.mark.parametrize("wrong", [{"tasks": ("texts",)}, {"steps": 0}, {"std": 0.0}])
def test_options_that_cannot_run_are_refused(wrong):
    with pytest.raises(ValueError, match=r"tasks has no|must be"):
        InstabilityOptions(**wrong)
