"""Distance-weighted sums: spec 03 §9 and the references in naive_toeplitz."""

import pytest
import torch
from tests.house.rows import each
from torch.testing import assert_close

from primal_attention.functional import causal_sums, toeplitz
from primal_attention.functional import naive_toeplitz as naive
from primal_attention.functional.toeplitz import (
    WindowState,
    grid_lags,
    grid_positions,
    toeplitz_matrix,
    toeplitz_sums,
    windowed_step,
    windowed_sums,
)

F64 = {"dtype": torch.float64}


def draw(n, m=None, *, p=4, v=5, h=3, b=2, **factory):
    m, factory = n if m is None else m, factory or F64
    return [torch.randn(b, h, s, w, **factory) for s, w in ((n, p), (m, p), (m, v))]


def table(n, m=None, h=3, **factory):
    return torch.randn(h, n + (n if m is None else m) - 1, **(factory or F64)).exp()


def dense(q, k, v, c, is_causal=False):
    weights = q @ k.mT * toeplitz_matrix(c, q.shape[2], k.shape[2])
    return (weights.tril() if is_causal else weights) @ v


def gradients(y, inputs):
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=y.dtype)
    return torch.autograd.grad((y * weight).sum(), inputs)


def close(got, expected, tolerance):
    assert (got - expected).abs().max() <= tolerance * expected.abs().max().clamp_min(1e-30)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(toeplitz, "_BLOCK", 3)


@each("n, m", [(1, 1), (2, 5), (7, 7), (6, 1)])
def test_dense_matches_one_pair_at_a_time(n, m):
    (q, k, v), c = draw(n, m), table(n, m)
    expected = naive.weighted_sums(q, k, v, lambda t: c[:, t + n - 1])
    assert_close(toeplitz_sums(q, k, v, c, backend="dense"), expected)
    if n == m:
        expected = naive.weighted_sums(q, k, v, lambda t: c[:, t + n - 1], True)
        assert_close(toeplitz_sums(q, k, v, c, is_causal=True, backend="dense"), expected)


@each("n", [1, 2, 3, 7, 64, 257, 1000])
@each("is_causal", [False, True])
def test_fft_equals_dense(n, is_causal):
    for factory, tolerance in ((F64, 1e-12), ({"dtype": torch.float32}, 5e-6)):
        (q, k, v), c = draw(n, p=2, v=2, **factory), table(n, **factory)
        got = toeplitz_sums(q, k, v, c, is_causal=is_causal, backend="fft")
        close(got, dense(q, k, v, c, is_causal), tolerance)


@each("n, m", [(1, 9), (9, 1), (20, 33), (300, 41)])
def test_rectangular_fft_equals_dense(n, m):
    (q, k, v), c = draw(n, m), table(n, m)
    close(toeplitz_sums(q, k, v, c, backend="fft"), dense(q, k, v, c), 1e-12)


@each("n", [1, 255, 257, 700, 1100])
def test_divide_and_conquer_equals_dense(n):
    (q, k, v), c = draw(n, p=2, v=2, dtype=torch.float32), table(n, dtype=torch.float32)
    got = toeplitz_sums(q, k, v, c, is_causal=True, backend="split")
    close(got.double(), dense(*(t.double() for t in (q, k, v, c)), True), 1e-6)


@each(
    "backend, is_causal",
    [("dense", False), ("dense", True), ("fft", False), ("fft", True), ("split", True)],
)
@pytest.mark.usefixtures("small_blocks")
def test_all_backends_have_the_gradients_of_the_dense_form(backend, is_causal):
    (q, k, v), c = draw(11), table(11)
    inputs = tuple(t.requires_grad_() for t in (q, k, v, c))

    def run(*inputs):
        return toeplitz_sums(*inputs, is_causal=is_causal, backend=backend)

    expected = gradients(dense(*inputs, is_causal), inputs)
    for got, exact in zip(gradients(run(*inputs), inputs), expected, strict=True):
        assert_close(got, exact)
    assert torch.autograd.gradcheck(run, (*(t[:1, :1] for t in inputs[:3]), inputs[3][:1]))


def test_rectangular_fft_passes_gradcheck():
    (q, k, v), c = draw(4, 6, p=2, v=2, h=1, b=1), table(4, 6, h=1)
    inputs = tuple(t.requires_grad_() for t in (q, k, v, c))
    assert torch.autograd.gradcheck(lambda *t: toeplitz_sums(*t, backend="fft"), inputs)


@each("backend, is_causal", [("fft", False), ("fft", True), ("split", True)])
def test_long_sums_can_be_differentiated_twice(backend, is_causal, small_blocks):
    # the probe is constant: a backward pass that autograd does not see would give zero, not raise
    inputs = [t.requires_grad_() for t in (*draw(7, p=2, v=2, h=2, b=1), table(7, h=2))]

    def slope(*given):
        sums = toeplitz_sums(*given, is_causal=is_causal, backend=backend)
        return torch.autograd.grad(sums.sum(), given, create_graph=True)

    assert torch.autograd.gradcheck(slope, inputs, fast_mode=True)


def test_feature_loop_equals_the_materialized_transform():
    (q, k, v), c = draw(100, dtype=torch.float32), table(100, dtype=torch.float32)
    outer = torch.einsum("bhmp,bhmv->bhmpv", k, v)
    spread = torch.einsum("hnm,bhmpv->bhnpv", toeplitz_matrix(c, 100, 100), outer)
    expected = torch.einsum("bhnp,bhnpv->bhnv", q, spread)
    close(toeplitz_sums(q, k, v, c, backend="fft"), expected, 1e-6)


@each("backend", ["dense", "fft", "auto"])
def test_a_constant_table_gives_the_sums_without_positions(backend):
    q, k, v = draw(70, dtype=torch.float32)
    c = torch.ones(3, 139)
    close(toeplitz_sums(q, k, v, c, backend=backend), q @ (k.mT @ v), 1e-6)
    got = toeplitz_sums(q, k, v, c, is_causal=True, backend=backend)
    close(got, causal_sums(q, k, v).values, 1e-6)


def test_zero_weights_beyond_a_lag_give_a_band():
    (q, k, v), c = draw(50), table(50)
    lags = torch.arange(99) - 49
    c = torch.where(lags.abs() > 6, 0.0, c)
    full = q @ k.mT * toeplitz_matrix(c, 50, 50)
    near = (torch.arange(50)[:, None] - torch.arange(50)).abs() <= 6
    expected = torch.where(near, full, 0.0) @ v
    close(toeplitz_sums(q, k, v, c, backend="fft"), expected, 1e-5)


@each("backend", ["dense", "split"])
def test_past_outputs_are_bitwise_equal_if_the_future_changes(backend):
    (q, k, v), c = draw(700, p=2, v=2, dtype=torch.float32), table(700, dtype=torch.float32)
    before = toeplitz_sums(q, k, v, c, is_causal=True, backend=backend)
    for t in (q, k, v):
        t[:, :, 350:] *= 100
    after = toeplitz_sums(q, k, v, c, is_causal=True, backend=backend)
    assert torch.equal(before[:, :, :350], after[:, :, :350])


def _rising(levels, n=512, p=32, d=16):
    """Positive features and weights that grow with distance from exp(−R) to exp(R); §8.3."""
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(1, 1, n, d, generator=generator, **F64) for _ in range(3)]
    w = torch.randn(p, d, generator=generator, **F64)
    q, k = (torch.exp(t / t.norm(dim=-1, keepdim=True) @ w.T - 0.5) / p**0.5 for t in x[:2])
    v = torch.cat([x[2], torch.ones_like(x[2][..., :1])], dim=-1)
    past = torch.linspace(-levels, levels, n, **F64).flip(0)
    c = torch.cat([past, past.new_zeros(n - 1)]).exp()[None]
    return q, k, v, c


def _average(sums):
    return sums[..., :-1] / sums[..., -1:]


def test_only_divide_and_conquer_is_accurate_for_hard_tables():
    q, k, v, c = _rising(6)
    exact = _average(dense(q, k, v, c, True))
    single = [t.float() for t in (q, k, v, c)]
    errors = {
        backend: (
            _average(toeplitz_sums(*single, is_causal=True, backend=backend)).double() - exact
        )
        .abs()
        .max()
        .item()
        for backend in ("fft", "split")
    }
    assert errors["split"] < 1e-3
    assert errors["fft"] > 30 * errors["split"]


def test_denominators_are_positive_for_positive_features():
    q, k, v, c = _rising(6)
    single = [t.float() for t in (q, k, v, c)]
    assert (toeplitz_sums(*single, is_causal=True, backend="dense")[..., -1] > 0).all()


def test_automatic_choice_agrees_with_dense_at_every_size():
    for n in (0, 1, 40, 1025):
        (q, k, v), c = draw(n, p=2, v=2), table(max(n, 1))
        for is_causal in (False, True):
            got = toeplitz_sums(q, k, v, c, is_causal=is_causal)
            assert got.shape == q.shape
            if n:
                close(got, dense(q, k, v, c, is_causal), 1e-12)


@pytest.mark.raw
def test_invalid_arguments_raise():
    (q, k, v), c = draw(3, 4), table(3, 4)
    with pytest.raises(ValueError, match="needs equal numbers"):
        toeplitz_sums(q, k, v, c, is_causal=True)
    with pytest.raises(ValueError, match="needs equal numbers"):
        windowed_sums(q, k, v, c[:, :5], is_causal=True)
    with pytest.raises(ValueError, match="needs is_causal=True"):
        toeplitz_sums(q, k, v, c, backend="split")
    with pytest.raises(ValueError, match="backend must be"):
        toeplitz_sums(q, k, v, c, backend="lu")


# a window and constant tails


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(toeplitz, "_CHUNK", 4)


def clipped(c):
    w = c.shape[1] // 2
    return lambda t: c[:, min(max(t, -w), w) + w]


@each("window", [1, 2, 6])
@each("n, m", [(1, 1), (9, 9), (3, 14), (14, 3)])
@pytest.mark.usefixtures("small_chunks")
def test_windowed_sums_match_naive_in_values_and_gradients(window, n, m):
    q, k, v = draw(n, m, p=2, v=3, h=2)
    c = torch.randn(2, 2 * window + 1, **F64).exp()
    inputs = tuple(t.requires_grad_() for t in (q, k, v, c))
    for is_causal in (False, True) if n == m else (False,):
        fast = windowed_sums(*inputs, is_causal=is_causal)
        slow = naive.weighted_sums(q, k, v, clipped(c), is_causal)
        assert_close(fast, slow)
        for a, b in zip(gradients(fast, inputs), gradients(slow, inputs), strict=True):
            assert_close(a, b)


def test_windowed_sums_equal_the_transform_of_the_full_table():
    q, k, v = draw(300, p=3, v=2)
    c = torch.randn(3, 41, **F64).exp()
    full = c[:, (torch.arange(599) - 299).clamp(-20, 20) + 20]
    for is_causal in (False, True):
        got = windowed_sums(q, k, v, c, is_causal=is_causal)
        close(got, toeplitz_sums(q, k, v, full, is_causal=is_causal, backend="fft"), 1e-11)


@each("pieces", [[1] * 13, [5, 1, 7], [13], [0, 13]])
@each("window", [1, 3, 20])
@pytest.mark.usefixtures("small_chunks")
def test_streaming_with_a_window_equals_the_parallel_form(pieces, window):
    q, k, v = draw(13)
    c = torch.randn(3, 2 * window + 1, **F64).exp()
    state = WindowState(
        q.new_zeros(2, 3, 4, 5), q.new_zeros(2, 3, window, 4), q.new_zeros(2, 3, window, 5)
    )
    outputs = []
    for x, y, z in zip(*(t.split(pieces, 2) for t in (q, k, v)), strict=True):
        out, state = windowed_step(x, y, z, c, state)
        outputs.append(out)
    expected = windowed_sums(q, k, v, c, is_causal=True)
    assert_close(torch.cat(outputs, 2), expected, atol=1e-10, rtol=1e-10)


# grids


def test_each_pair_of_grid_lags_has_its_own_lag_on_the_line():
    index = torch.arange(12)
    lag = grid_positions(index, 4) - grid_positions(index, 4)[:, None]
    rows, columns = grid_lags(lag, 4)
    assert_close(rows, index // 4 - index[:, None] // 4)
    assert_close(columns, index % 4 - index[:, None] % 4)


@each("width", [1, 3, 5])
def test_a_grid_on_the_line_gives_the_two_dimensional_sums(width):
    n = 4 * width - (width > 1)  # the last row may be short
    q, k, v = draw(n, p=2, v=3, h=2)
    weights = torch.randn(2, 7, 2 * width - 1, **F64).exp()
    places = grid_positions(torch.arange(n), width)
    size = int(places[-1]) + 1
    line = [t.new_zeros(2, 2, size, t.shape[-1]).index_copy(2, places, t) for t in (q, k, v)]
    rows, columns = grid_lags(torch.arange(2 * size - 1) - size + 1, width)
    c = weights[:, rows + 3, columns + width - 1]
    expected = naive.grid_sums(q, k, v, lambda u, w: weights[:, u + 3, w + width - 1], width)
    for backend in ("dense", "fft"):
        close(toeplitz_sums(*line, c, backend=backend)[:, :, places], expected, 1e-12)
