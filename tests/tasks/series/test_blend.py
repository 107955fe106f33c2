"""Shares and sharpness, the two closed-form parts, and the blend as a model in a folder."""

import json
import re

import numpy as np
import pytest
import torch
from aeon.transformations.collection.convolution_based import MiniRocket
from safetensors.torch import load_file, save_file
from torch.utils.data import Subset

from primal_attention.models import ModelFileError, PretrainedModel
from primal_attention.support.files import write_sealed
from primal_attention.tasks.series import (
    SeriesConfig,
    SeriesNetwork,
    SeriesOptions,
    SeriesTask,
    series_from_arrays,
)
from primal_attention.tasks.series.blend.convolutions import Convolutions, _Rocket
from primal_attention.tasks.series.blend.fitting import add_attention, fit_closed
from primal_attention.tasks.series.blend.model import BlendConfig, SeriesBlend, padded
from primal_attention.tasks.series.blend.shares import (
    choose_share,
    choose_sharpness,
    explained,
    likelihood,
    noise,
    sharpened,
)
from primal_attention.tasks.series.data import SeriesCollection
from primal_attention.tasks.task import Parts

# shares


def drawn(count, classes=3, seed=0):
    """Probabilities, and classes drawn from them."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(classes), count)
    return p, (rng.random((count, 1)) > p.cumsum(1)).sum(1)


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
def test_calibrated_scores_have_a_sharpness_of_one(factor):
    p, y = drawn(4000)
    assert choose_sharpness(np.log(p) / factor, y) == pytest.approx(factor, rel=0.1)


def test_a_few_right_cases_are_no_certainty():
    scores = 0.5 * np.eye(2)[[0, 1] * 5]
    sharpness = choose_sharpness(scores, np.array([0, 1] * 5))
    assert 1 < sharpness < 50
    wrong = choose_sharpness(scores, np.array([1, 0] * 5))
    assert wrong < 0.2


def test_a_share_of_constant_answers_is_that_of_the_classes():
    # (1 - s) a + s b is the share of the class where it is most likely
    y = np.arange(40) < 13
    first, second = (np.tile([1 - p, p], (40, 1)) for p in (0.1, 0.6))
    expected = (13 / 40 - 0.1) / (0.6 - 0.1)
    assert choose_share(first, second, y.astype(int)) == pytest.approx(expected, abs=0.0126)
    assert choose_share(first, second, np.zeros(40, int)) == 0
    assert choose_share(first, second, np.ones(40, int)) == 1


def test_a_share_of_numbers_is_that_of_least_squares():
    rng = np.random.default_rng(0)
    y = rng.normal(size=200)
    first, second = (y[:, None] + s * rng.normal(size=(200, 1)) for s in (0.5, 0.7))
    gap = (second - first)[:, 0]
    expected = ((y - first[:, 0]) @ gap) / (gap @ gap)
    assert choose_share(first, second, y) == pytest.approx(expected, abs=0.0126)
    assert noise(first, second, y) == pytest.approx(np.mean((y - first[:, 0]) ** 2))
    assert noise(*(np.zeros((3, 2)),) * 2, np.zeros(3, int)) == 1


def test_the_prior_draws_to_equal_shares_and_leaves_no_part_out():
    y = np.array([0, 1] * 10)
    right, wrong = np.eye(2)[y] * 0.8 + 0.1, np.full((20, 2), 0.5)
    found = [choose_share(wrong, right, y, prior) for prior in (0, 1, 10, 1e6)]
    assert found[0] == 1
    assert found[-1] == 0.5
    assert sorted(found, reverse=True) == found
    assert 0.5 < found[1] < 1
    # a closed form: d/ds of n log(a + b s) + prior log(4 s (1 - s)) is zero
    s = np.linspace(0.001, 0.999, 9999)
    naive = s[np.argmax(20 * np.log(0.5 + 0.4 * s) + 10 * np.log(s * (1 - s)))]
    assert found[2] == pytest.approx(naive, abs=0.0126)


def test_likelihood_and_explained_share_in_closed_form():
    answers, y = np.array([[0.5, 0.5], [0.25, 0.75], [1, 0]]), np.array([0, 1, 1])
    assert likelihood(answers, y) == pytest.approx(np.log([0.5, 0.75, 1e-4]).sum())
    numbers = np.array([[1.0], [4.0]])
    assert likelihood(numbers, np.array([0.0, 2.0]), 2.0) == pytest.approx(-(1 + 4) / 4)
    y = np.array([0, 0, 0, 1])
    assert explained(np.eye(2)[y], y) == pytest.approx(1)
    assert explained(np.tile([0.75, 0.25], (4, 1)), y) == pytest.approx(0)
    z = np.array([1.0, 2.0, 4.0])
    assert explained(z[:, None], z) == pytest.approx(1)
    assert explained(np.full((3, 1), z.mean()), z) == pytest.approx(0)
    p, y = drawn(50)
    np.testing.assert_allclose(sharpened(np.log(p), 1.0), p)
    np.testing.assert_allclose(sharpened(np.log(p), 2.0), p**2 / (p**2).sum(1, keepdims=True))


# convolutions


def series(count=24, channels=1, steps=30, seed=0):
    """Slow and fast sines."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % 2
    t = np.arange(steps) + rng.uniform(0, 9, (count, channels, 1))
    x = np.sin((0.3 + 0.4 * y)[:, None, None] * t) + 0.2 * rng.normal(size=t.shape)
    return x.astype(np.float32), y


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("channels", [1, 3])
def test_features_are_those_of_aeons_minirocket(order, channels):
    x, _ = series(channels=channels)
    count = (10_000, 5_000)[order]
    expected = MiniRocket(n_kernels=count, random_state=3).fit_transform(np.diff(x, n=order))
    np.random.seed(5)
    before = np.random.get_state()[1].copy()
    rocket = _Rocket.fit(x, order, 3)
    np.testing.assert_array_equal(np.random.get_state()[1], before)
    np.testing.assert_array_equal(rocket(x), expected)


def test_scores_are_those_of_the_ridge_head():
    x, y = series()
    targets = np.where(y[:, None] == np.arange(2), 1.0, -1.0)
    part, held_out = Convolutions.fit(x, targets, 0)
    features = np.concatenate([rocket(x) for rocket in part.rockets], axis=1)
    expected = features.astype(float) @ part.weight.numpy() + part.bias.numpy()
    np.testing.assert_allclose(part(x), expected, rtol=1e-6, atol=1e-6)
    assert np.abs(part(x) - targets).mean() < np.abs(held_out - targets).mean() < 0.5


# the model


def collection(x, y=None, classes=("a", "b")):
    return SeriesCollection(
        np.ascontiguousarray(x.transpose(0, 2, 1)), np.full(len(x), x.shape[2]), y, classes
    )


def config(channels=1, classes=2, **options):
    sizes = {"dim": 8, "num_heads": 2, "num_layers": 1}
    return SeriesConfig(num_classes=classes, num_channels=channels, **(sizes | options))


@pytest.fixture(scope="module")
def blend():
    """All three parts for two channels, and their training series."""
    torch.manual_seed(0)
    x, y = series(channels=2)
    y = np.where(np.arange(24) % 4, y, 1 - y)  # the others do not learn these labels
    closed = fit_closed(collection(x, y), config(2), parts=("convolutions", "quantiles"), seed=0)
    models = [SeriesNetwork(config(2)) for _ in range(2)]
    scores = np.eye(2)[y]
    return add_attention(closed, models, scores), torch.from_numpy(x.transpose(0, 2, 1).copy())


@pytest.mark.parametrize("steps", [1, 9, 20, 33])
def test_short_series_are_padded_and_long_ones_cut(steps):
    rng = np.random.default_rng(0)
    x, length = rng.normal(size=(5, 20, 2)).astype(np.float32), np.array([20, 1, 2, 13, 19])
    found = padded(x, length, steps)
    assert found.shape == (5, 2, steps)
    for i, n in enumerate(length):
        kept = min(n, steps)
        np.testing.assert_array_equal(found[i, :, :kept], x[i, :kept].T)
        assert (found[i, :, kept:] == 0).all()


def test_the_answer_is_the_formula_of_the_module(blend):
    model, x = blend
    assert model.config.parts == ("convolutions", "quantiles", "attention")
    parts = model.answers(x, torch.ones(x.shape[:2], dtype=torch.bool))
    for answers in parts.values():
        np.testing.assert_allclose(answers.sum(1), 1, atol=1e-6)
    shares = model.shares.numpy()
    assert shares.sum() == pytest.approx(1)
    mean = sum(s * parts[name] for s, name in zip(shares, model.config.parts, strict=True))
    expected = np.maximum(mean, 1e-4) ** float(model.final)
    expected = expected / expected.sum(1, keepdims=True)
    found = model(x).logits
    np.testing.assert_allclose(found.double().exp(), expected, rtol=1e-5)
    raw = [m(x).logits.double() * float(model.sharpness[1]) for m in model.attention]
    mean = torch.stack([r.softmax(-1) for r in raw]).mean(0).detach()
    np.testing.assert_allclose(parts["attention"], mean, rtol=1e-4)


def test_padding_changes_nothing(blend):
    model, x = blend
    lengths = [30, 1, 17, 29]
    padded = torch.full((4, 41, 2), float("nan"))
    keep = torch.arange(41) < torch.tensor(lengths)[:, None]
    for i, n in enumerate(lengths):
        padded[i, :n] = x[i, :n]
    alone = torch.cat([model(x[i : i + 1, :n]).logits for i, n in enumerate(lengths)])
    torch.testing.assert_close(model(padded, key_mask=keep).logits, alone, atol=1e-5, rtol=1e-5)


def test_a_blend_survives_saving(blend, tmp_path):
    model, x = blend
    model.save_pretrained(tmp_path)
    back = PretrainedModel.from_pretrained(tmp_path)
    assert isinstance(back, SeriesBlend)
    assert back.config == model.config
    torch.testing.assert_close(back(x).logits, model(x).logits, rtol=0, atol=0)


def test_a_series_far_longer_than_those_that_chose_the_patch_is_cut():
    # primal train holds series out before it chooses the patch, and adds them for these parts
    x, y = series(steps=300)
    closed = fit_closed(collection(x, y), config(max_tokens=20), parts=("convolutions",), seed=0)
    assert closed.model.config.length == 80
    cut = torch.from_numpy(x[:, :, :80].transpose(0, 2, 1).copy())
    whole = torch.from_numpy(x.transpose(0, 2, 1).copy())
    torch.testing.assert_close(closed.model(whole).logits, closed.model(cut).logits)


def test_attention_that_brings_nothing_gets_no_share():
    x, y = series()
    series_ = collection(x, y)
    closed = fit_closed(series_, config(), parts=("convolutions",), seed=0)
    lots = np.random.default_rng(0).normal(size=(24, 2))
    assert add_attention(closed, [SeriesNetwork(config())], lots) is closed.model
    # labels that no other part can learn, and scores that know half of them
    lots = np.random.default_rng(1).integers(0, 2, 24)
    closed = fit_closed(collection(x, lots), config(), parts=("convolutions",), seed=0)
    held = np.arange(12)
    model = add_attention(closed, [SeriesNetwork(config())], np.eye(2)[lots[:12]], held)
    assert model.config.parts == ("convolutions", "attention")
    assert model.shares[1] > 0.6


def test_numbers_are_the_mean_of_the_parts():
    x, _ = series()
    numbers = x[:, 0].mean(1).astype(np.float64)
    numbers = (numbers - numbers.mean()) / numbers.std()
    closed = fit_closed(
        collection(x, numbers, ()), config(classes=1), parts=("convolutions", "quantiles"), seed=0
    )
    model = closed.model
    batch = torch.from_numpy(x.transpose(0, 2, 1).copy())
    parts = model.answers(batch, torch.ones(batch.shape[:2], dtype=torch.bool))
    mean = sum(s * parts[n] for s, n in zip(model.shares.numpy(), model.config.parts, strict=True))
    np.testing.assert_allclose(model(batch).logits, mean, rtol=1e-5, atol=1e-6)
    assert explained(closed.answers, numbers) > 0.3


# damaged files

POINTERS = {
    "convolutions.rockets.0.dilations": ("convolutions of the model do not belong", 2**30),
    "convolutions.rockets.0.features": ("convolutions of the model do not belong", 10**6),
    "convolutions.rockets.0.channels": ("convolutions of the model do not belong", 2),
    "convolutions.rockets.0.channel_counts": ("convolutions of the model do not belong", 10**6),
    "quantiles.forest.left": ("trees of the model do not belong", -1),
    "quantiles.forest.root": ("trees of the model do not belong", 10**7),
    "quantiles.forest.feature": ("trees of the model do not belong", 10**7),
}


@pytest.mark.parametrize("name", POINTERS)
def test_wrong_indices_in_a_file_are_refused_before_compiled_code_runs(blend, tmp_path, name):
    model, x = blend
    message, value = POINTERS[name]
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for wrong in (value, -(2**31)):
        if name == "quantiles.forest.feature" and wrong < 0:
            continue  # a leaf
        weights[name][-1] = wrong
        save_file(weights, tmp_path / "model.safetensors")
        write_sealed(tmp_path, {"model.safetensors": (tmp_path / "model.safetensors").read_bytes()})
        damaged = PretrainedModel.from_pretrained(tmp_path)
        with pytest.raises(ValueError, match=message):
            damaged(x)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["rockets", 0, "order"], 10**9, "order must be 0 or 1, got 1000000000"),
        (["rockets", 0, "features"], 10**9, "does not belong to"),
        (["rockets", 0, "dilations"], -1, "describes no valid SeriesBlend"),
        (["rockets"], None, "does not belong to"),
        (["forest", "nodes"], 10**9, "does not belong to"),
        (["forest"], {"trees": 1}, "describes no valid SeriesBlend"),
        (["num_attentions"], 10**9, "num_attentions must be from 0 to 64"),
        (["num_attentions"], -1, "num_attentions must be from 0 to 64"),
        (["length"], 10**9, "length must be at most"),
        (["length"], 0, "length must be at least 1"),
        (["num_classes"], 3, "does not belong to"),
    ],
)
def test_wrong_sizes_in_a_configuration_are_refused(blend, tmp_path, path, value, message):
    blend[0].save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    part = content["config"]
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    write_sealed(tmp_path, {"config.json": json.dumps(content)})
    with pytest.raises(ModelFileError, match=message) as told:
        PretrainedModel.from_pretrained(tmp_path)
    assert re.search(re.escape(str(tmp_path)), str(told.value))
    assert "\n" not in str(told.value)


def test_a_configuration_names_its_parts():
    assert BlendConfig(num_classes=2, num_channels=1, length=16).parts == ()
    assert BlendConfig(num_classes=2, num_channels=1, length=16, num_attentions=1).parts == (
        "attention",
    )


def test_parts_that_are_no_series_leave_the_trained_model_alone():
    rng = np.random.default_rng(0)
    series = series_from_arrays(rng.normal(size=(12, 1, 20)), ["a", "b"] * 6)
    task = SeriesTask.fit(series)
    data = task.prepare(series)
    model = task.build(SeriesOptions(dim=8, num_heads=2, num_layers=1))
    part = Subset(data, range(len(data)))
    assert task.finish(model, Parts(part, part, data)).model is model
    assert isinstance(task.finish(model, Parts(data, data, data)).model, SeriesBlend)
