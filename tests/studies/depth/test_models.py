"""Sweeps over depth at equal size: shapes, the fit of the best depth, and short trainings."""

import math

import numpy as np
import pytest
import torch

from primal_attention.analysis.depth import optimal_depth
from primal_studies.depth.models import (
    SweepText,
    _decoder,
    fit_best_depth,
    iso_shape,
    sweep,
    train_shape,
)


@pytest.mark.parametrize("budget", [4e5, 1e6, 3.3e6, 1e7])
def test_shapes_of_one_budget_have_equal_size(budget):
    for layers in (1, 2, 4, 6, 8, 12):
        shape = iso_shape(budget, layers)
        assert shape.params == pytest.approx(budget, rel=0.02)
        assert shape.hidden / shape.width == pytest.approx(4, rel=0.4)
        with torch.device("meta"):
            blocks = _decoder(shape, 50, 0).blocks
        assert sum(p.numel() for p in blocks.parameters()) == shape.params
    with pytest.raises(ValueError, match="too small for 40 layers"):
        iso_shape(3e4, 40)


def test_predicted_optima_of_the_small_preset():
    found = [optimal_depth(budget) for budget in (4e5, 1e6, 3.3e6, 1e7)]
    assert found == pytest.approx([1.2, 2.6, 6.0, 10.7], abs=0.06)


def test_best_depth_of_a_parabola():
    def curve(depth, at):
        return 2 + 0.1 * math.log(depth / at) ** 2

    losses = {depth: [curve(depth, 3.7)] for depth in (1, 2, 6, 12)}
    found = fit_best_depth(losses)
    assert found.depth == pytest.approx(3.7)
    assert found.low == found.high == found.depth
    assert found.is_inside
    outside = fit_best_depth({depth: [curve(depth, 30)] for depth in (1, 2, 6)})
    assert (outside.depth, outside.is_inside) == (6, False)
    bent = fit_best_depth({depth: [-curve(depth, 3)] for depth in (1, 2, 6)})
    assert (bent.depth, bent.is_inside) == (1, False)


def test_interval_covers_the_seeds():
    rng = np.random.default_rng(1)
    places = rng.uniform(2, 6, 5)
    losses = {d: [0.1 * math.log(d / at) ** 2 for at in places] for d in (1, 2, 4, 8)}
    found = fit_best_depth(losses)
    # parabolas of one curvature: the mean has its minimum at the mean of the logarithms
    assert found.depth == pytest.approx(math.exp(np.log(places).mean()))
    assert min(places) <= found.low < found.depth < found.high <= max(places)
    with pytest.raises(ValueError, match="three depths or more"):
        fit_best_depth({1: [1.0], 2: [1.0]})
    with pytest.raises(ValueError, match="equally many seeds"):
        fit_best_depth({1: [1.0], 2: [1.0], 4: [1.0, 2.0]})


def periodic(length=2000, vocab=5):
    ids = torch.arange(length) % vocab
    return SweepText(ids, ids[:300], vocab)


def test_training_learns_and_is_deterministic():
    settings = {"rate": 2e-3, "steps": 60, "seed": 0, "context": 12, "batch": 4}
    shape, text = iso_shape(1.5e4, 1), periodic()
    state = torch.get_rng_state()
    loss = train_shape(shape, text, **settings)
    assert loss < 0.1 < math.log(5)
    assert train_shape(shape, text, **settings) == loss
    assert torch.equal(torch.get_rng_state(), state)


def test_too_short_a_text_is_refused():
    text = periodic(length=40)._replace(valid=torch.zeros(5, dtype=torch.long))
    with pytest.raises(ValueError, match="5 validation tokens"):
        sweep(text, budget=1.5e4, depths=(1, 2), steps=1, context=8, batch=2)


def test_sweep_tunes_once_and_continues():
    seen = []
    settings = {"budget": 1.5e4, "depths": (1, 2, 3), "steps": 6, "context": 8, "batch": 2}
    runs = sweep(periodic(), **settings, report=seen.append)
    assert seen == runs
    assert [run.shape.layers for run in runs] == [1, 2, 3]
    assert len({run.rate for run in runs}) == 1
    # what is finished is not trained again
    again = sweep(periodic(), **settings, done={1: runs[0], 2: runs[1]}, report=seen.append)
    assert again == runs
    assert len(seen) == 4
