"""Gaussian attention, exact and through landmarks: spec 02 §9 and the truth in naive_nystrom."""

import pytest
import torch
from torch.testing import assert_close

from primal_attention.functional import naive_nystrom as naive
from primal_attention.functional.linear import with_ones
from primal_attention.functional.nystrom import (
    gaussian_attention,
    gaussian_gram,
    kmeans_landmarks,
    landmark_gram,
    nystrom_attention,
    nystrom_error,
    nystrom_features,
    nystrom_residual,
    row_average,
    schulz_inverse,
    segment_means,
    strided_landmarks,
    token_convolution,
    windowed_nystrom,
)

F64 = {"dtype": torch.float64}


def draw(*lengths, d=5, scale=1.0, **factory):
    return [torch.randn(2, 3, n, d, **(factory or F64)) * scale for n in lengths]


def data_set(kind, n=512, d=32, seed=0):
    """The three data sets of spec 02 §8.1, scaled as a layer scales its queries and keys."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, 1, n, d, generator=generator, **F64) for _ in range(2))
    if kind == "clusters":
        centres = torch.randn(32, d, generator=generator, **F64)
        pick = torch.randint(32, (2, n), generator=generator)
        q, k = centres[pick[0]] + 0.3 * q, centres[pick[1]] + 0.3 * k
    else:
        q, k = kind * q, kind * k
    return q * d**-0.25, k * d**-0.25


def masks(b, n):
    keep = torch.rand(b, n) > 0.3
    keep[0] = False
    return keep


def gradients(y, inputs, seed=0):
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=y.dtype)
    return torch.autograd.grad((y * weight).sum(), inputs)


# the exact kernel


def test_kernel_is_softmax_scores_normalized_from_both_sides():
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        q, k = draw(9, 7, d=8, dtype=dtype)
        a = torch.exp(q @ k.mT / 8**0.5)
        d_q, d_k = (torch.exp(t.square().sum(-1) / 8**0.5) for t in (q, k))
        expected = d_q[..., :, None] ** -0.5 * a * d_k[..., None, :] ** -0.5
        got = gaussian_gram(q * 8**-0.25, k * 8**-0.25)
        assert_close(got, expected, atol=tolerance, rtol=tolerance)


def test_gram_matches_naive_in_values_and_gradients():
    x, y = (t.requires_grad_() for t in draw(9, 7))
    fast, slow = gaussian_gram(x, y), naive.gaussian_gram(x, y)
    assert_close(fast, slow)
    for a, b in zip(gradients(fast, (x, y)), gradients(slow, (x, y)), strict=True):
        assert_close(a, b)
    assert torch.autograd.gradcheck(gaussian_gram, (x, y))


def test_gram_never_exceeds_one_for_large_norms():
    x = torch.randn(1, 1, 50, 8) * 1e4
    gram = gaussian_gram(x, x)
    assert gram.isfinite().all()
    assert gram.max() <= 1


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("width", [3, 11])
def test_exact_attention_matches_naive_in_values_and_gradients(normalize, is_causal, masked, width):
    q, k = (t.requires_grad_() for t in draw(9, 9))
    v = torch.randn(2, 3, 9, width, **F64, requires_grad=True)
    keep = masks(2, 9) if masked else None
    fast = gaussian_attention(q, k, v, key_mask=keep, is_causal=is_causal, normalize=normalize)
    slow = naive.gaussian_attention(q, k, v, keep, is_causal, normalize)
    assert_close(fast, slow)
    for a, b in zip(gradients(fast, (q, k, v)), gradients(slow, (q, k, v)), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("normalize", [False, True])
def test_exact_attention_holds_for_rectangular_pairs_and_pair_masks(normalize):
    q, k, v = draw(6, 9, 9)
    pairs = torch.rand(2, 6, 9) > 0.4
    pairs[0, 2] = False
    weights = torch.where(pairs[:, None], naive.gaussian_gram(q, k), 0.0)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    assert_close(gaussian_attention(q, k, v, pair_mask=pairs, normalize=normalize), weights @ v)


def test_row_sums_run_from_nothing_to_n_in_float32():
    # both ends of the range of the sink trick: no key near, and every key at the query
    ones = torch.ones(1, 1, 4096, 1)
    x = torch.randn(1, 1, 1, 8).expand(-1, -1, 4096, -1)
    assert_close(gaussian_attention(x, x, ones), 4096 * ones, rtol=1e-5, atol=0)
    assert_close(gaussian_attention(x + 20, x, ones), 0 * ones)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_an_offset_common_to_queries_and_keys_costs_no_accuracy(normalize, is_causal, masked):
    # on a grid that float32 still has at 3,000: both precisions see the same points
    q, k = ((t * 1024).round() / 1024 for t in draw(50, 50, dtype=torch.float32))
    (v,) = draw(50, dtype=torch.float32)
    options = {"is_causal": is_causal, "normalize": normalize}
    keep = masks(2, 50) if masked else None
    got = gaussian_attention(q + 3000, k + 3000, v, key_mask=keep, **options)
    exact = naive.gaussian_attention(q.double(), k.double(), v.double(), keep, **options)
    assert_close(got.double(), exact, atol=1e-4, rtol=1e-4)


def test_an_offset_costs_no_accuracy_through_landmarks_and_in_windows_either():
    q, k, z = ((t * 1024).round() / 1024 for t in draw(50, 50, 8, dtype=torch.float32))
    v = torch.randn(2, 3, 50, 4)
    got = nystrom_attention(q + 3000, k + 3000, v, z + 3000, ridge=0.1)
    assert_close(got, nystrom_attention(q, k, v, z, ridge=0.1), atol=1e-4, rtol=1e-4)
    moved = kmeans_landmarks(k + 3000, z + 3000, steps=1) - 3000
    assert_close(moved, kmeans_landmarks(k, z, steps=1), atol=1e-3, rtol=0)
    expected = windowed_nystrom(q, k, v, z[0], window=7, ridge=0.1)
    pieces, state = [], None
    for i in range(0, 50, 5):
        t = slice(i, i + 5)
        given = (x[:, :, t] + 3000 for x in (q, k))
        y, state = windowed_nystrom(
            *given, v[:, :, t], z[0] + 3000, window=7, ridge=0.1, state=state
        )
        pieces.append(y)
    assert_close(torch.cat(pieces, dim=2), expected.values, atol=1e-4, rtol=1e-4)
    got = windowed_nystrom(q + 3000, k + 3000, v, z[0] + 3000, window=7, ridge=0.1).values
    assert_close(got, expected.values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("d", [8, 64, 128])
def test_spread_points_keep_weights_accurate_while_float32_can(d, is_causal):
    direction = torch.randn(1, 2, 200, d)
    x = 50 * direction / direction.norm(dim=-1, keepdim=True)
    near = x + 0.3 * torch.randn_like(x) / d**0.5
    ones = torch.ones(1, 2, 200, 1)
    got = gaussian_attention(x, near, ones, is_causal=is_causal)
    exact = naive.gaussian_attention(x.double(), near.double(), ones.double(), None, is_causal)
    assert_close(got.double(), exact, atol=0, rtol=1e-2)


@pytest.mark.parametrize("scale", [1e3, 1e4, 1e6])
@pytest.mark.parametrize("is_causal", [False, True])
def test_no_weight_exceeds_one_however_far_points_lie_apart(scale, is_causal):
    # every point is its own only neighbour, so each row sum is the weight of one pair
    x = (scale * torch.randn(1, 2, 200, 32)).requires_grad_()
    total = gaussian_attention(x, x, torch.ones(1, 2, 200, 1), is_causal=is_causal)
    assert total.max() <= 1.02
    total.sum().backward()
    assert x.grad.isfinite().all()
    # twice the same points: two neighbours each, and a sum that says so as well as it can
    pair = torch.cat([x, x], dim=2).detach()
    assert gaussian_attention(pair, pair, torch.ones(1, 2, 400, 1)).max() <= 2.04


# the inverse


def test_preconditioned_eigenvalues_lie_in_the_unit_interval_and_reach_one():
    for s, scale, ridge in ((2, 1.0, 1e-3), (16, 0.1, 0.1), (64, 3.0, 1e-3), (64, 0.5, 1e-6)):
        (z,) = draw(s, scale=scale)
        m = landmark_gram(z, ridge)
        root = m.sum(-1).rsqrt()
        values = torch.linalg.eigvalsh(root[..., :, None] * m * root[..., None, :])
        assert values.min() > 0
        assert_close(values[..., -1], torch.ones(2, 3, **F64), atol=1e-10, rtol=0)


def test_one_schulz_step_maps_the_residual_as_derived():
    # a diagonal N_M is its own degree matrix, so feed the iteration a matrix scaled back
    lam = torch.linspace(0.05, 1, 8, **F64)
    m = torch.diag(lam)[None, None]
    got = schulz_inverse(m, 1)[0, 0].diagonal() * lam
    # after degree scaling a diagonal matrix is the identity: residual 0 stays 0
    assert_close(got, torch.ones(8, **F64), atol=1e-14, rtol=0)
    n_m = torch.tensor([[0.6, 0.4], [0.4, 0.6]], **F64)  # row sums 1, eigenvalues 1 and 0.2
    residual = torch.eye(2, **F64) - n_m @ schulz_inverse(n_m[None, None], 1)[0, 0]
    r = 0.8
    assert_close(
        torch.linalg.eigvalsh(residual),
        torch.tensor([0.0, (3 * r**3 + r**4) / 4], **F64),
        atol=1e-14,
        rtol=0,
    )


@pytest.mark.parametrize("published", [False, True])
def test_schulz_matches_naive_and_ignores_batch_mates(published):
    (z,) = draw(12)
    m = landmark_gram(z, 0.1)
    got = schulz_inverse(m, 6, published_start=published)
    for i in range(2):
        for j in range(3):
            assert_close(got[i, j], naive.schulz_inverse(m[i, j], 6, published))
    m[1] *= 100
    assert torch.equal(schulz_inverse(m, 6, published_start=published)[0], got[0])


def test_schulz_converges_to_the_inverse():
    q, k, v, z = draw(20, 20, 20, 12)
    exact = nystrom_attention(q, k, v, z, ridge=0.1)
    m = landmark_gram(z, 0.1)
    w = schulz_inverse(m, 20) @ (gaussian_gram(k, z).mT @ v)
    assert_close(gaussian_gram(q, z) @ w, exact, atol=1e-8, rtol=0)


def test_the_identity_start_needs_half_the_steps_of_the_published_one():
    # spec 02 §8.2, s = 0.1: residual 1.0 after 6 published steps, 8e-5 after 8 from the identity
    z = torch.cat(data_set(0.1, n=64), dim=2)
    m = landmark_gram(z, 0.1)
    root = m.sum(-1).rsqrt()
    n_m = root[..., :, None] * m * root[..., None, :]
    eye = torch.eye(128, **F64)

    def residual(steps, published):
        inverse = schulz_inverse(m, steps, published_start=published)
        inverse = inverse / (root[..., :, None] * root[..., None, :])
        return torch.linalg.matrix_norm(n_m @ inverse - eye, 2).item()

    assert residual(6, True) > 0.99
    assert 0.25 < residual(6, False) < 0.5
    assert residual(8, False) < 2e-4
    assert residual(15, True) < 1e-10


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, 1e6])
def test_landmark_gram_can_always_be_factored_in_float32(scale):
    z = torch.randn(4, 2, 128, 32) * scale + 10 * scale
    z = torch.cat([z, z[:, :, :64]], dim=2)  # duplicates
    factor, info = torch.linalg.cholesky_ex(landmark_gram(z, 0.0))
    assert (info == 0).all()
    assert factor.isfinite().all()


# the lifted Nyström method


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_nystrom_matches_naive_in_values_and_gradients(normalize, masked):
    q, k, v, z = (t.requires_grad_() for t in draw(9, 7, 7, 4))
    keep = masks(2, 7) if masked else None
    fast = nystrom_attention(q, k, v, z, key_mask=keep, normalize=normalize)
    slow = naive.nystrom_attention(q, k, v, z, 1e-3, keep, normalize)
    assert_close(fast, slow, atol=1e-10, rtol=1e-10)
    for a, b in zip(gradients(fast, (q, k, v, z)), gradients(slow, (q, k, v, z)), strict=True):
        assert_close(a, b, atol=1e-9, rtol=1e-8)


def test_cholesky_path_equals_the_dense_formula_in_float32():
    q, k, v, z = draw(40, 30, 30, 16, dtype=torch.float32)
    slow = naive.nystrom_attention(*(t.double() for t in (q, k, v, z)), 1e-3)
    assert_close(nystrom_attention(q, k, v, z).double(), slow, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("inverse", ["cholesky", "schulz", "published"])
def test_gradcheck_with_fixed_landmarks_and_bandwidth(inverse):
    q, k, v, z = (t[:1, :1].requires_grad_() for t in draw(5, 4, 4, 3, d=2))
    bandwidth = torch.tensor(0.7, **F64, requires_grad=True)

    def run(q, k, v, z, bandwidth):
        return nystrom_attention(q * bandwidth, k * bandwidth, v, z, inverse=inverse)

    assert torch.autograd.gradcheck(run, (q, k, v, z, bandwidth))


def test_all_points_as_landmarks_give_the_exact_kernel():
    q, k, v = draw(12, 9, 9)
    z = torch.cat([q, k], dim=2)
    got = nystrom_attention(q, k, v, z, ridge=1e-8)
    assert_close(got, gaussian_attention(q, k, v), atol=1e-6, rtol=0)
    # the ridge enters linearly, so a hundredth of it leaves a hundredth of the error
    assert_close(
        nystrom_attention(q, k, v, z, ridge=1e-11),
        naive.gaussian_attention(q, k, v),
        atol=1e-8,
        rtol=0,
    )


def test_nested_landmarks_never_increase_the_lifted_error_which_bounds_the_block():
    q, k = (t[:1, :1] for t in draw(20, 20))
    x = torch.cat([q, k], dim=2)
    exact = naive.gaussian_gram(x, x)[0, 0]
    order, last = torch.randperm(40), float("inf")
    for s in (1, 3, 8, 15, 25):
        z = x[:, :, order[:s]]
        low = (
            gaussian_gram(x, z)
            @ torch.linalg.pinv(gaussian_gram(z, z), hermitian=True)
            @ gaussian_gram(z, x)
        )[0, 0]
        error = torch.linalg.matrix_norm(exact - low, 2).item()
        block = torch.linalg.matrix_norm((exact - low)[:20, 20:], 2).item()
        assert error <= last + 1e-8
        assert block <= error + 1e-8
        assert torch.linalg.eigvalsh(exact - low).min() >= -1e-8
        last = error


@pytest.mark.parametrize("kind", [0.5, 1.0, "clusters"])
def test_more_landmarks_give_less_error(kind):
    q, k = data_set(kind)
    errors = [
        nystrom_error(
            q, k, torch.cat([strided_landmarks(q, s // 2), strided_landmarks(k, s // 2)], dim=2)
        ).item()
        for s in (16, 64, 256)
    ]
    assert errors[0] > errors[1] > errors[2]


def test_error_against_the_exact_kernel_is_that_of_the_tables():
    # spec 02 §8.1: 0.0424 at s = 0.5, d = 64, mean of two draws with uniform landmarks
    errors = []
    for seed in range(2):
        q, k = data_set(0.5, seed=seed)
        z = torch.cat([strided_landmarks(q, 32), strided_landmarks(k, 32)], dim=2)
        errors.append(nystrom_error(q, k, z).item())
    assert 0.03 < sum(errors) / 2 < 0.055


def test_residual_is_the_diagonal_that_the_landmarks_leave():
    x, z = draw(9, 4)
    low = naive.nystrom_matrix(x, x, z, 1e-3).diagonal(dim1=-2, dim2=-1)
    residual = nystrom_residual(x, z, 1e-3)
    assert_close(residual, 1 - low, atol=1e-10, rtol=0)
    assert_close(nystrom_residual(z, z, 1e-9), torch.zeros(2, 3, 4, **F64), atol=1e-8, rtol=0)
    far = nystrom_residual(x + 100, z)
    assert_close(far, torch.ones_like(far))


def test_features_reproduce_the_nystrom_kernel():
    q, k, z = draw(9, 7, 4)
    got = nystrom_features(q, z) @ nystrom_features(k, z).mT
    assert_close(got, naive.nystrom_matrix(q, k, z, 1e-3), atol=1e-10, rtol=0)


def test_autocast_leaves_the_kernel_in_float32():
    q, k, v, z = draw(20, 20, 20, 8, dtype=torch.float32)
    exact = nystrom_attention(q, k, v, z)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(nystrom_attention(q, k, v, z), exact)


# landmarks


@pytest.mark.parametrize("num", [1, 4, 7, 30])
def test_segment_means_and_strided_tokens_skip_padding_on_any_side(num):
    (x,) = draw(11)
    keep = torch.rand(2, 11) > 0.4
    for pick in (segment_means, strided_landmarks):
        got = pick(x, num, keep)
        for i in range(2):
            assert_close(got[i : i + 1], pick(x[i : i + 1, :, keep[i]], num))
    got = segment_means(x, num, keep)
    for i in range(2):
        assert_close(got[i, 1], naive.segment_means(x[i, 1, keep[i]], num))


@pytest.mark.parametrize("pick", [segment_means, strided_landmarks])
def test_landmarks_of_an_empty_sequence_are_zero(pick):
    (x,) = draw(6)
    assert (pick(x, 3, torch.zeros(2, 6, dtype=torch.bool)) == 0).all()
    assert (pick(x[:, :, :0], 3) == 0).all()


def test_kmeans_beats_strided_landmarks_on_clusters():
    # spec 02 §8.3: 0.032 against 0.231 at d = 128
    q, k = data_set("clusters")
    z = torch.cat([strided_landmarks(q, 64), strided_landmarks(k, 64)], dim=2)
    better = kmeans_landmarks(torch.cat([q, k], dim=2), z)
    assert nystrom_error(q, k, better) < nystrom_error(q, k, z) / 2


def test_kmeans_is_a_fixed_point_on_separated_clusters_and_skips_padding():
    centres = torch.tensor([[-5.0, 0.0], [5.0, 0.0]], **F64)
    x = centres.repeat_interleave(3, 0)[None, None] + 0.1 * torch.randn(1, 1, 6, 2, **F64)
    means = torch.stack([x[0, 0, :3].mean(0), x[0, 0, 3:].mean(0)])[None, None]
    start = x[:, :, [0, 3]]
    assert_close(kmeans_landmarks(x, start), means)
    dirty = torch.cat([x, torch.full((1, 1, 2, 2), 7.0, **F64)], dim=2)
    keep = torch.arange(8)[None] < 6
    assert_close(kmeans_landmarks(dirty, start, keep), means)


def test_kmeans_gradient_flows_through_the_means():
    (x,) = draw(6)
    x.requires_grad_()
    y = kmeans_landmarks(x, x[:, :, :2].detach())
    (grad,) = torch.autograd.grad(y.sum(), x)
    # every token belongs to one cluster and shares its mean with its mates
    assert_close(grad.sum(2), torch.full((2, 3, 5), 2.0, **F64))


# causal


@pytest.mark.parametrize("window", [1, 4, 64])
@pytest.mark.parametrize("n", [1, 4, 13])
@pytest.mark.parametrize("normalize", [False, True])
def test_windowed_form_matches_naive_in_values_and_gradients(window, n, normalize):
    q, k, v = (t.requires_grad_() for t in draw(n, n, n))
    z = torch.randn(3, 6, 5, **F64, requires_grad=True)
    keep = masks(2, n)
    y = windowed_nystrom(q, k, with_ones(v, keep), z, window=window).values
    fast = row_average(y, 1e-3) if normalize else y[..., :-1]
    slow = naive.windowed_nystrom(q, k, v, z, window, 1e-3, keep, normalize)
    assert_close(fast, slow, atol=1e-10, rtol=1e-10)
    for a, b in zip(gradients(fast, (q, k, v, z)), gradients(slow, (q, k, v, z)), strict=True):
        assert_close(a, b, atol=1e-9, rtol=1e-8)


@pytest.mark.parametrize("pieces", [[1] * 13, [5, 1, 7], [13]], ids=str)
def test_windowed_form_continues_from_its_state(pieces):
    q, k, v = draw(13, 13, 13)
    z = torch.randn(3, 6, 5, **F64)
    whole = windowed_nystrom(q, k, v, z, window=4)
    state, outputs = None, []
    for a, b, c in zip(*(t.split(pieces, 2) for t in (q, k, v)), strict=True):
        y, state = windowed_nystrom(a, b, c, z, window=4, state=state)
        outputs.append(y)
    assert_close(torch.cat(outputs, 2), whole.values)
    for a, b in zip(state, whole.state, strict=True):
        assert_close(a, b)


def test_without_a_window_the_causal_form_is_the_masked_low_rank_product():
    # spec 02 §10 (a): equal to the dense masked product
    q, k, v = draw(9, 9, 9)
    z = torch.randn(3, 6, 5, **F64)
    low = naive.nystrom_matrix(q, k, z.expand(2, -1, -1, -1), 1e-3).tril()
    exact = naive.gaussian_gram(q, k).diagonal(dim1=-2, dim2=-1)
    low = low + torch.diag_embed(exact - low.diagonal(dim1=-2, dim2=-1))
    assert_close(windowed_nystrom(q, k, v, z, window=1).values, low @ v)


@pytest.mark.parametrize("taps", [1, 3, 33, 65])
@pytest.mark.parametrize("n", [1, 5, 32, 33, 100])
def test_the_convolution_by_blocks_is_a_grouped_convolution_in_values_and_gradients(n, taps):
    x = torch.randn(2, 3, n, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, taps, dtype=torch.float64, requires_grad=True)
    got = token_convolution(x, weight)
    kernel = weight[:, None, :, None]
    expected = torch.nn.functional.conv2d(x, kernel, padding=(taps // 2, 0), groups=3)
    torch.testing.assert_close(got, expected)
    with torch.no_grad():
        torch.testing.assert_close(token_convolution(x, weight), expected)
    weights = torch.randn_like(got)
    for a, b in zip(
        torch.autograd.grad((got * weights).sum(), [x, weight]),
        torch.autograd.grad((expected * weights).sum(), [x, weight]),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
