"""Irregular series with missing channels: values at any time."""

import csv
import math

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from primal_attention.cli.main import main
from primal_attention.datasets import IrregularSeries, IrregularSinusoids
from primal_attention.tasks.events import (
    InterpolationConfig,
    InterpolationModel,
    IrregularFitOptions,
    IrregularSeriesRegressor,
)

NETWORK = {"dim": 16, "num_heads": 2, "references": 8}
SMALL = {"dim": 16, "num_heads": 2, "options": IrregularFitOptions(references=8)}


def sinusoids(count=24, seed=0):
    sampled = IrregularSinusoids().sample(count, 40, seed=seed)
    return IrregularSeries.from_arrays(sampled.times, sampled.values, unit="hours"), sampled


@pytest.fixture(scope="module")
def trained():
    return IrregularSeriesRegressor(**SMALL, max_epochs=3, random_state=0).fit(sinusoids()[0])


def model(**options):
    made = InterpolationModel(InterpolationConfig(num_channels=2, **NETWORK | options)).eval()
    for parameter in made.head[-1].parameters():
        torch.nn.init.normal_(parameter)
    return made


def batch(b=2, n=9):
    times = torch.rand(b, n, dtype=torch.float64).cumsum(1)
    values = torch.randn(b, n, 2)
    values[torch.rand(b, n, 2) < 0.3] = math.nan
    return times, values, 5 * torch.rand(b, 6, dtype=torch.float64)


def test_an_untrained_model_interpolates_linearly():
    made = InterpolationModel(InterpolationConfig(num_channels=1, **NETWORK)).eval()
    times = torch.tensor([[0.0, 1.0, 2.0, 4.0]], dtype=torch.float64)
    values = torch.tensor([[[0.0], [1.0], [math.nan], [5.0]]])
    queries = torch.tensor([[-1.0, 0.5, 1.0, 2.5, 4.0, 9.0]], dtype=torch.float64)
    found = made(times, values, queries).mean[0, :, 0]
    torch.testing.assert_close(found, torch.tensor([0.0, 0.5, 1.0, 3.0, 5.0, 5.0]))


@pytest.mark.parametrize("attention", ["softmax", "linear", "primal-dual"])
def test_padding_a_shift_of_times_and_other_queries_change_nothing(attention):
    made = model(attention=attention)
    times, values, queries = batch()
    alone = made(times, values, queries).mean
    torch.testing.assert_close(
        made(times + 1e4, values, queries + 1e4).mean, alone, atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(
        made(times, values, queries[:, 2:3]).mean, alone[:, 2:3], atol=1e-5, rtol=1e-4
    )
    junk = torch.full((2, 3), math.nan, dtype=torch.float64)
    keep = (torch.arange(12) < 9).expand(2, -1)
    padded = torch.cat([times, junk], 1), torch.cat([values, junk[..., None].expand(2, 3, 2)], 1)
    got = made(padded[0], padded[1].float(), queries, key_mask=keep).mean
    torch.testing.assert_close(got, alone, atol=1e-5, rtol=1e-4)


def test_values_and_times_of_observations_matter():
    made = model()
    times, values, queries = batch()
    base = made(times, values, queries).mean
    assert not torch.allclose(made(times, values + 1, queries).mean, base)
    assert not torch.allclose(made(times**1.5, values, queries).mean, base)


def test_predictions_are_in_units_of_the_channels_at_the_times_asked_for(trained):
    series, _ = sinusoids()
    asked = [[1.0, 30.0]] * 23 + [[2.0]]
    found = trained.predict(series, asked)
    assert [m.shape for m in found.mean[-2:]] == [(2, 2), (1, 2)]
    assert all((s > 0).all() for s in found.std)
    # one series alone has the predictions it has among others
    alone = trained.predict(series.take([4]), [asked[4]])
    np.testing.assert_allclose(alone.mean[0], found.mean[4], atol=1e-4)


@pytest.mark.slow
def test_training_beats_linear_interpolation():
    series, _ = sinusoids(200)
    test, _ = sinusoids(60, seed=1)
    model = IrregularSeriesRegressor(max_epochs=20, random_state=0).fit(series)
    start = clone(model)
    start.model_ = model.task_.build(model._model_options())
    start.task_ = model.task_
    assert model.score(test) > start.score(test) + 0.3


def test_seeds_folders_and_conventions(trained, tmp_path):
    series, _ = sinusoids()
    again = IrregularSeriesRegressor(**SMALL, max_epochs=3, random_state=0).fit(series)
    assert again.score(series) == trained.score(series)
    trained.save(tmp_path)
    loaded = IrregularSeriesRegressor.load(tmp_path)
    assert loaded.get_params() == trained.get_params()
    assert loaded.score(series) == trained.score(series)
    with pytest.raises(NotFittedError):
        clone(trained).predict(series, [[1.0]] * 24)


def test_what_is_wrong_is_an_error(trained):
    series, _ = sinusoids()
    with pytest.raises(TypeError, match="IrregularSeries"):
        trained.predict([1], [1])
    with pytest.raises(ValueError, match="each of the 24 series"):
        trained.predict(series, [[1.0]])
    with pytest.raises(ValueError, match="at least one time"):
        trained.predict(series, [[]] * 24)
    with pytest.raises(ValueError, match=r"shape \[times, channels\]"):
        IrregularSeries.from_arrays([[0.0, 1.0]], [[1.0, 2.0]])
    with pytest.raises(ValueError, match="Channels must hold numbers; a"):
        IrregularSeries.from_frame(pd.DataFrame({"time": [1.0], "a": ["x"]}), values=["a"])
    with pytest.raises(ValueError, match="cannot attend to other tokens"):
        IrregularSeriesRegressor(attention="nystromformer").fit(series)
    with pytest.raises(ValueError, match="need features of time"):
        IrregularSeriesRegressor(options={"time": "none"}).fit(series)


def test_a_table_is_trained_on_and_its_empty_rows_are_filled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    series, _ = sinusoids(12)
    owner = np.repeat(series.log.keys, series.log.lengths)
    table = pd.DataFrame(series.values, columns=["x", "y"]).assign(id=owner, time=series.log.times)
    table.to_csv("s.csv", index=False)
    given = ["--data.values", "x", "y", "--model.dim", "16", "--training.epochs", "1"]
    assert main(["train", "--task", "irregular-series", "s.csv", "--out", "run", *given]) == 0
    asked = pd.concat([table, pd.DataFrame({"id": ["0", "3"], "time": [99.0, 98.0]})])
    asked.to_csv("asked.csv", index=False)
    assert main(["predict", "run/softmax", "asked.csv"]) == 0
    with open("predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    empty = table[["x", "y"]].isna().all(axis=1).sum()
    assert len(rows) == empty + 2
    assert list(rows[0]) == ["index", "x", "sd(x)", "y", "sd(y)"]
