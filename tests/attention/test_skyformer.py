"""Skyformer and exact Gaussian attention as layers."""

import copy

import pytest
import torch
from tests.house.rows import each
from torch.testing import assert_close

from primal_attention.attention import GaussianAttention, SkyformerAttention

LANDMARKS = ["strided", "segments", "kmeans", "learned"]


def layer(landmarks="strided", **options):
    torch.manual_seed(0)
    return SkyformerAttention(16, 2, num_landmarks=12, landmarks=landmarks, **options).eval()


def exact_twin(sky):
    """Return the exact layer with the same projections."""
    twin = GaussianAttention(16, 2, normalize=sky.core.normalize)
    state = {k: v for k, v in sky.state_dict().items() if not k.startswith("core")}
    twin.load_state_dict(state)
    return twin.eval()


@each("landmarks", ["strided", "segments"])
@each("normalize", [False, True])
def test_enough_landmarks_reproduce_exact_gaussian_attention(landmarks, normalize):
    sky = layer(landmarks, normalize=normalize, ridge=1e-7).double()
    x = torch.randn(2, 6, 16, dtype=torch.float64)  # 6 queries and 6 keys, 12 landmarks
    assert_close(sky(x), exact_twin(sky).double()(x), atol=1e-4, rtol=1e-4)


@each("landmarks", LANDMARKS)
@each("side", ["left", "right"])
def test_a_masked_run_is_the_truncated_run_with_the_same_landmarks(landmarks, side):
    sky, x = layer(landmarks), torch.randn(1, 20, 16)
    keep = torch.ones(1, 20, dtype=torch.bool)
    keep[:, slice(0, 7) if side == "left" else slice(13, 20)] = False
    assert_close(sky(x, key_mask=keep)[keep], sky(x[keep][None])[0], atol=1e-5, rtol=1e-5)


@each("landmarks", LANDMARKS)
def test_eval_is_deterministic_and_independent_of_the_batch(landmarks):
    sky, x = layer(landmarks), torch.randn(3, 20, 16)
    y = sky(x)
    assert torch.equal(y, sky(x))
    assert_close(sky(x[1:2]), y[1:2], atol=1e-6, rtol=1e-5)


@each("landmarks", LANDMARKS)
def test_fewer_tokens_than_landmarks_and_huge_tokens_stay_finite(landmarks):
    sky = layer(landmarks).train()
    for n, scale in ((1, 1.0), (5, 1.0), (40, 30.0), (40, 1e4)):
        x = (torch.randn(2, n, 16) * scale).requires_grad_()
        y = sky(x)
        y.sum().backward()
        assert y.isfinite().all()
        assert x.grad.isfinite().all()


@each("inverse", ["schulz", "published"])
def test_iterated_inverses_stay_close_to_cholesky(inverse):
    x = torch.randn(2, 30, 16)
    assert_close(layer(inverse=inverse, ridge=0.1)(x), layer(ridge=0.1)(x), atol=5e-2, rtol=0)


def test_only_learned_landmarks_run_causally():
    x = torch.randn(1, 5, 16)
    with pytest.raises(ValueError, match="cannot run causally"):
        layer()(x, is_causal=True)
    with pytest.raises(ValueError, match="cannot decode"):
        layer().init_state(1)
    assert layer("learned")(x, is_causal=True).shape == x.shape


def test_causal_attention_is_exact_while_the_window_covers_the_sequence():
    sky = layer("learned", window=16, ridge=1e-6)
    x = torch.randn(2, 16, 16)
    got = sky(x, is_causal=True)
    assert_close(got, exact_twin(sky)(x, is_causal=True), atol=1e-5, rtol=1e-5)


def test_steps_with_padding_anywhere_equal_the_run_without():
    sky = layer("learned", window=3)
    x = torch.randn(2, 12, 16)
    keep = torch.tensor(
        [[1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0], [0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1]]
    )
    keep = keep.bool()
    state, pieces = sky.init_state(2), [5, 1, 4, 2]
    outputs = []
    for a, b in zip(x.split(pieces, 1), keep.split(pieces, 1), strict=True):
        y, state = sky.step(a, state, key_mask=b)
        outputs.append(y)
    y = torch.cat(outputs, 1)
    for i in range(2):
        alone = sky(x[i : i + 1, keep[i]], is_causal=True)[0]
        assert_close(y[i, keep[i]], alone, atol=1e-5, rtol=1e-5)
    assert state.seen.tolist() == keep.sum(1).tolist()
    assert state.numel == sky.init_state(2).numel


def test_a_learned_norm_avoids_zero_rows_for_large_tokens():
    x = torch.randn(1, 30, 16) * 100
    torch.manual_seed(0)
    dead = GaussianAttention(16, 2, normalize=False, bias=False)
    alive = GaussianAttention(16, 2, normalize=False, bias=False, qk_norm=True)
    alive.load_state_dict({**dead.state_dict(), "core.scale": alive.core.scale})
    size = [(layer(x) / 100).norm().item() for layer in (dead, alive)]
    assert size[0] < 1e-3 * size[1]


@each("masked", [False, True])
@each("crossed", [False, True])
def test_diagnosis_reports_residuals_and_error(masked, crossed):
    x, context = torch.randn(2, 9, 16), torch.randn(2, 7, 16) if crossed else None
    m = 7 if crossed else 9
    keep = torch.arange(m) < torch.tensor([[m], [4]]) if masked else None
    few, many = (
        layer(ridge=1e-6).diagnose(x, context, key_mask=keep),
        SkyformerAttention(16, 2, num_landmarks=4).diagnose(x, context, key_mask=keep),
    )
    assert few.residual_q.shape == (2, 2, 9)
    assert few.residual_k.shape == (2, 2, m)
    assert few.error.shape == (2, 2)
    assert (few.error < many.error).all()


@each("landmarks", LANDMARKS)
def test_diagnosis_of_a_padded_sequence_is_that_of_its_real_tokens(landmarks):
    sky, x = layer(landmarks).double(), torch.randn(1, 20, 16, dtype=torch.float64)
    keep = torch.rand(1, 20) > 0.4
    got, alone = sky.diagnose(x, key_mask=keep), sky.diagnose(x[keep][None])
    assert_close(got.error, alone.error)
    for padded, expected in (
        (got.residual_q, alone.residual_q),
        (got.residual_k, alone.residual_k),
    ):
        assert_close(padded[:, :, keep[0]], expected)
        assert (padded[:, :, ~keep[0]] == 0).all()


def test_options_without_effect_raise():
    with pytest.raises(ValueError, match="cannot be used with landmarks"):
        SkyformerAttention(16, 2, window=8)
    with pytest.raises(ValueError, match="cannot be used with landmarks='learned'"):
        SkyformerAttention(16, 2, landmarks="learned", inverse="published")


def test_invalid_options_raise():
    with pytest.raises(ValueError, match="landmarks must be one of"):
        SkyformerAttention(16, 2, landmarks="random")
    with pytest.raises(ValueError, match="inverse must be one of"):
        SkyformerAttention(16, 2, inverse="lu")
    with pytest.raises(ValueError, match="ridge must be positive"):
        SkyformerAttention(16, 2, ridge=0.0)
    with pytest.raises(ValueError, match="ridge must be positive and finite, got nan"):
        SkyformerAttention(16, 2, ridge=float("nan"))
    with pytest.raises(ValueError, match="num_landmarks is 1"):
        SkyformerAttention(16, 2, num_landmarks=1)


def test_copies_keep_their_landmarks():
    sky, x = layer("learned"), torch.randn(1, 9, 16)
    assert torch.equal(copy.deepcopy(sky)(x), sky(x))
