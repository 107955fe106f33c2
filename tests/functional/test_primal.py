"""The functional core against the textbook in ``naive.py`` and a worked example."""

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.house.rows import cover, each
from torch.testing import assert_close

from primal_attention.attention.regularizers import TokenCount, energy_term
from primal_attention.functional import (
    LayerMaps,
    LinearMap,
    attend,
    choose_engine,
    decayed_sum,
    even_indices,
    feature_gram,
    ksvd_objective,
    naive,
    parameter_trace,
    prefix_sum,
    primal,
    reduce_objective,
    sample_rows,
    standardize_rows,
    tie_dual,
    tie_sampled,
    tiles,
)
from primal_attention.functional.folding import fold_concat

few = settings(max_examples=25, deadline=None, derandomize=True)


def _randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def _heads(b, h, n, d):
    """Return queries as a layer has them: a strided view of ``[b n h d]``."""
    return _randn(b, n, h, d).transpose(1, 2)


def _side_by_side(q):
    """Return heads ``[b h n d]`` as ``[b n hd]``."""
    return q.transpose(1, 2).flatten(2)


class Projection(NamedTuple):
    scores: torch.Tensor
    energy: torch.Tensor


def project(q, w, **options):
    """Return scores and energy of heads ``[b h n d]``."""
    scores, energy = attend(_side_by_side(q), w, None, **options)
    return Projection(scores.unflatten(-1, (q.shape[1], -1)).transpose(1, 2), energy)


def dual_weights(k, duals, **options):
    """Return ``Φᵀ H / m`` of one side."""
    both = [_side_by_side(torch.cat([t, t], dim=1)) for t in (k, duals)]
    w, _ = tie_dual(*both, 2 * k.shape[1], **options)
    return w[:, : k.shape[1]]


def _cut_small(monkeypatch, chunk, per_tile=4):
    for name, value in (("_NUMBERS", 0), ("_CHUNK", chunk), ("_CHUNKS", per_tile), ("_FINE", 3)):
        monkeypatch.setattr(tiles, name, value)


def _keep(b, n):
    keep = torch.rand(b, n) < 0.7
    keep[0] = True
    return keep


def _same_with_gradients(fast, truth, leaves, tol=1e-10):
    """Assert that two functions of the same leaves agree in values and in all gradients."""
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    got, expected = fast(*leaves), truth(*leaves)
    assert_close(got, expected, atol=tol, rtol=tol)
    torch.manual_seed(3)
    probe = torch.randn_like(expected)
    for a, b in zip(*(_derivatives(y, probe, leaves) for y in (got, expected)), strict=True):
        assert_close(a, b, atol=tol, rtol=tol)


def _derivatives(y, probe, leaves):
    """Return the gradients of a linear loss, and those of the sum of their squares."""
    first = torch.autograd.grad((y * probe).sum(), leaves, create_graph=True)
    # where a function is linear in its leaves, its gradients depend on nothing
    penalty = sum(g.square().sum() for g in first) + sum(0 * t.sum() for t in leaves)
    return *first, *torch.autograd.grad(penalty, leaves)


# the worked example: b = h = 1, four tokens of width two, one direction, three sampled rows

X = torch.tensor([[1.0, 0], [2, 1], [0, -1], [1, 3]], dtype=torch.float64)[None]
Q = torch.tensor([[3.0, 4], [1, 0], [0, 2], [-1, 1]], dtype=torch.float64)[None, None]
K = torch.tensor([[0.0, 1], [1, 1], [2, 0], [3, -4]], dtype=torch.float64)[None, None]
W_E = torch.tensor([1.0, -1, 0.5], dtype=torch.float64)[None, :, None]
W_R = torch.tensor([0.5, 1, 0], dtype=torch.float64)[None, :, None]
LAM = torch.tensor([[0.5]], dtype=torch.float64)


def _column(*values):
    return torch.tensor(values, dtype=torch.float64)[None, None, :, None]


def test_t01_golden_example_of_the_data_dependent_layer():
    assert even_indices(4, 3).tolist() == [0, 1, 3]
    f = sample_rows(X, 3)[:, None]
    w_e, w_r = naive.data_weights(f, W_E), naive.data_weights(f, W_R)
    assert w_e.flatten().tolist() == [-0.5, 0.5]
    assert w_r.flatten().tolist() == [2.5, 1.0]
    (e, energy_e), (r, energy_r) = project(Q, w_e), project(K, w_r)
    assert_close(e, _column(0.1, -0.5, 0.5, 0.70710678), atol=1e-8, rtol=0)
    assert_close(r, _column(1.0, 2.47487373, 2.5, 0.7), atol=1e-8, rtol=0)
    assert LAM.square().mul(energy_e / 4).sum().item() / 2 == pytest.approx(0.0315625, abs=1e-7)
    assert LAM.square().mul(energy_r / 4).sum().item() / 2 == pytest.approx(0.43328125, abs=1e-7)
    trace = parameter_trace(W_E, W_R)
    assert trace.item() == pytest.approx(-0.5)
    assert parameter_trace(w_e, w_r).item() == pytest.approx(-0.75)
    objective = ksvd_objective(energy_e / 4, energy_r / 4, LAM, trace)
    assert objective.item() == pytest.approx(0.96484375, abs=1e-7)
    assert reduce_objective(objective).item() == pytest.approx(0.93092346, abs=1e-7)


def test_t01_golden_example_of_the_causal_layer():
    w_e = torch.tensor([1.0, 2], dtype=torch.float64)[None, None, :, None]
    w_r = torch.tensor([-1.0, 1], dtype=torch.float64)[None, None, :, None]
    q, k = prefix_sum(Q[:, 0])[:, None], prefix_sum(K[:, 0])[:, None]
    heads, weights = torch.cat([q, k], dim=1), torch.cat([w_e, w_r], dim=1)
    e = _column(2.2, 2.12132034, 2.21880078, 2.23220936)
    r = _column(1.0, 0.44721360, -0.27735010, -1.26491106)
    assert_close(project(heads, weights).scores, torch.cat([e, r], dim=1), atol=1e-8, rtol=0)


# projections

SHAPES = [(2, 3, 7, 4, 2), (1, 1, 5, 3, 3), (3, 2, 6, 5, 8), (4, 1, 1, 7, 2), (2, 5, 9, 1, 1)]


@each("chunk", [2, 1024])
@each("b, h, n, d, s", SHAPES)
@each("shared", [False, True])
@each("masked", [False, True])
def test_projection_is_the_textbook_one(monkeypatch, b, h, n, d, s, shared, masked, chunk):
    _cut_small(monkeypatch, chunk)
    keep = _keep(b, n) if masked else None
    groups = 1 if shared else b

    def select(t):
        return t if keep is None else torch.where(keep[:, None, :, None], t, 0.0)

    def truth(q, w):
        return select(naive.primal_scores(q, w))

    leaves = [_heads(b, h, n, d), _randn(groups, h, d, s)]
    _same_with_gradients(lambda q, w: project(q, w, key_mask=keep).scores, truth, leaves)
    _same_with_gradients(
        lambda q, w: project(q, w, key_mask=keep).energy,
        lambda q, w: truth(q, w).square().sum(2),
        leaves,
    )


def _maps(weights, biases):
    """Return the four maps of a layer, with or without biases."""
    pairs = zip(weights, biases or [None] * 4, strict=True)
    return LayerMaps(*(LinearMap(*pair) for pair in pairs))


def _by_book(x, w, maps, keep):
    """Return output and energy with the textbook's scores."""
    h, d = w.shape[1] // 2, w.shape[2]
    q, k = (torch.nn.functional.linear(x, *m).unflatten(-1, (h, d)) for m in maps[:2])
    scores = naive.primal_scores(torch.cat([q, k], dim=2).transpose(1, 2), w)
    if keep is not None:
        scores = torch.where(keep[:, None, :, None], scores, 0.0)
    heads = torch.nn.functional.linear(torch.cat(scores.chunk(2, dim=1), dim=-1), *maps.concat)
    y = torch.nn.functional.linear(heads.transpose(1, 2).flatten(2), *maps.out)
    return y, scores.square().sum(2)


@pytest.mark.parametrize("has_energy", [False, True], ids=["output", "energy"])
@pytest.mark.parametrize(("s", "engine"), [(1, "scores"), (7, "folded")])
@each(
    "chunk, per_tile, shared, masked, biased, n",
    cover(3, [1, 2, 3, 4, 1024], [1, 4], *[[False, True]] * 3, [6, 7]),
)
def test_t16_every_engine_attends_as_the_formulas_read(
    monkeypatch, chunk, per_tile, shared, masked, biased, n, s, engine, has_energy
):
    _cut_small(monkeypatch, chunk, per_tile)
    b, h, d, c, e = 3, 2, 3, 5, 3
    keep = _keep(b, n) if masked else None
    x = _randn(n, b, c).transpose(0, 1)  # not contiguous
    leaves = [x, _randn(1 if shared else b, 2 * h, d, s)]
    leaves += [_randn(h * d, c), _randn(h * d, c), _randn(e, 2 * s), _randn(6, h * e)]
    leaves += [_randn(h * d), _randn(h * d), _randn(e), _randn(6)] if biased else []

    def flat(y, energy):
        return torch.cat([y.flatten(), energy.flatten()]) if has_energy else y

    def fast(x, w, *given):
        maps = _maps(given[:4], given[4:])
        assert choose_engine(x, d, s, maps, has_energy=has_energy) == engine
        return flat(*attend(x, w, maps, key_mask=keep, has_energy=has_energy))

    def truth(x, w, *given):
        return flat(*_by_book(x, w, _maps(given[:4], given[4:]), keep))

    def plain(x, w, *given):
        with monkeypatch.context() as patch:
            patch.setattr(primal, "is_traced", lambda: True)
            return flat(*attend(x, w, _maps(given[:4], given[4:]), key_mask=keep))

    _same_with_gradients(fast, truth, leaves)
    with torch.no_grad():
        assert_close(fast(*leaves), truth(*leaves))
        assert_close(plain(*leaves), truth(*leaves))


@each("inner_bias", [False, True])
@each("outer_bias", [False, True])
def test_folding_two_maps_is_applying_one_after_the_other(inner_bias, outer_bias):
    h, d, s, c = 3, 4, 2, 5
    leaves = [_randn(d, 2 * s), _randn(c, h * d)]
    leaves += [_randn(d)] * inner_bias + [_randn(c)] * outer_bias
    scores = _randn(2 * h, 7, s)

    def biases(rest):
        rest = list(rest)
        return rest.pop(0) if inner_bias else None, rest.pop(0) if outer_bias else None

    def truth(inner, outer, *rest):
        first, second = biases(rest)
        pairs = torch.cat(scores.chunk(2), dim=-1)  # [h n 2*s]
        heads = torch.nn.functional.linear(pairs, inner, first).transpose(0, 1).flatten(1)
        return torch.nn.functional.linear(heads, outer, second)

    def folded(inner, outer, *rest):
        first, second = biases(rest)
        both = fold_concat(LinearMap(inner, first), LinearMap(outer, second))
        return torch.nn.functional.linear(scores.transpose(0, 1).flatten(1), *both)

    _same_with_gradients(folded, truth, leaves)


@each("b, n", [(1, 5), (3, 4), (2, 7), (3, 23), (1, 1)])
@each("chunk", [1, 3, 8])
@each("fine", [2, 512])
def test_tiles_cover_every_token_once(monkeypatch, b, n, chunk, fine):
    monkeypatch.setattr(tiles, "_NUMBERS", 0)
    monkeypatch.setattr(tiles, "_CHUNK", chunk)
    monkeypatch.setattr(tiles, "_FINE", fine)
    seen = torch.zeros(b, n)
    for tile in tiles.cut(b, n, 4):
        tile.of(seen).add_(1)
        assert tile.of(seen).shape[1] <= 2 * chunk
    assert (seen == 1).all()


def test_a_token_more_than_a_tile_does_not_make_a_second_one(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert [tile.shape for tile in tiles.cut(4, 2049, 128)] == [(4, 2049)]
    # nor is one tile much smaller than the others
    assert [tile.shape[0] for tile in tiles.cut(9, 2049, 128)] == [5, 4]


@each("masked", [False, True])
@each("smooth", [False, True])
@each("standardize", [False, True])
@each("num", [5, 6, 17])
def test_sampled_weights_are_rows_times_codes(masked, smooth, standardize, num):
    b, n, h, d, s = 3, 6, 2, 2, 3
    keep = _keep(b, n) if masked else None
    if masked:
        keep[1] = False  # an empty sequence
    basis = _randn(2, num) if smooth else None
    k = 2 if smooth else num
    leaves = [_randn(b, n, h * d), _randn(h, k, s), _randn(h, k, s)]

    def clean(x):
        return x if keep is None else torch.where(keep[:, :, None], x, 0.0)

    def fast(x, w_e, w_r):
        options = {"key_mask": keep, "basis": basis, "standardize": standardize}
        w, tokens = tie_sampled(clean(x), w_e, w_r, num, **options)
        # tokens go through, and take a gradient of their own along
        return torch.cat([w.flatten(), tokens.square().flatten()])

    def truth(x, w_e, w_r):
        x = clean(x)
        rows = sample_rows(x, num, keep)
        rows = naive.standardized(rows) if standardize else rows
        rows = rows if basis is None else basis @ rows
        f = rows.unflatten(-1, (h, d)).transpose(1, 2)
        w = torch.cat([naive.data_weights(f, w_e), naive.data_weights(f, w_r)], dim=1)
        return torch.cat([w.flatten(), x.square().flatten()])

    _same_with_gradients(fast, truth, leaves)


@each("masked", [False, True])
@each("of_sequences", [False, True])
def test_the_loss_in_one_step_is_the_reduced_objective(masked, of_sequences):
    b, n, h, s = 3, 6, 2, 4
    keep = _keep(b, n) if masked else torch.ones(b, n, dtype=torch.bool)
    keep[1] = keep[1] & (not masked)  # an empty sequence
    count = keep.sum(1)
    shape = (b, h, 5, s) if of_sequences else (h, 5, s)
    leaves = [_randn(b, 2 * h, s), _randn(h, s), _randn(*shape), _randn(*shape)]

    def truth(energy, lam, w_e, w_r):
        moments = (energy / count.clamp_min(1)[:, None, None]).chunk(2, dim=1)
        objective = ksvd_objective(*moments, lam, parameter_trace(w_e, w_r))
        return reduce_objective(objective, keep=count > 0)

    def fast(energy, lam, w_e, w_r):
        counts = (TokenCount(n, keep if masked else None),) * 2
        return energy_term("ksvd", "sample", energy, counts, lam, (w_e, w_r))

    _same_with_gradients(fast, truth, leaves)


@each("masked", [False, True])
@each("biased", [False, True])
@each("chunk", [2, 3, 1024])
@each("s", [2, 5])
@each("n", [6, 7])
def test_both_stages_of_dual_weights_are_the_textbook(monkeypatch, masked, biased, chunk, s, n):
    _cut_small(monkeypatch, chunk)
    b, h, d = 3, 2, 3
    keep = _keep(b, n) if masked else None
    if masked:
        keep[1] = False  # an empty sequence
    leaves = [_randn(b, n, 5), _randn(2 * h * d, 5), _randn(2 * h * s, 5)]
    leaves += [_randn(d, 2 * s), _randn(6, h * d)]
    leaves += [_randn(2 * h * d), _randn(d), _randn(6)] if biased else []

    def flat(*found):
        return torch.cat([t.flatten() for t in found])

    def fast(x, a, v, c, o, *biases):
        first, second, third = biases or (None, None, None)
        w, heads = tie_dual(x, (LinearMap(a, first), LinearMap(v)), 2 * h, key_mask=keep)
        unused = LinearMap(a)
        maps = LayerMaps(unused, unused, LinearMap(c, second), LinearMap(o, third))
        return flat(*attend(heads, w, maps, key_mask=keep), w)

    def truth(x, a, v, c, o, *biases):
        first, second, third = biases or (None, None, None)
        q, z = (
            torch.nn.functional.linear(x, *m).unflatten(-1, (2 * h, -1)).transpose(1, 2)
            for m in ((a, first), (v, None))
        )
        phi, count = naive.cosine(q), n
        if keep is not None:
            phi = torch.where(keep[:, None, :, None], phi, 0.0)
            count = keep.sum(1).clamp_min(1)[:, None, None, None]
        w = torch.cat((phi.mT @ z / count).chunk(2, dim=1)[::-1], dim=1)
        scores = phi @ w
        y = naive.primal_output(*scores.chunk(2, dim=1), c, second, o, third)
        return flat(y, scores.square().sum(2), w)

    _same_with_gradients(fast, truth, leaves)


@each("biased", [0, 1])
@each("s", [1, 5])
def test_a_bias_of_one_side_alone_is_not_lost(biased, s):
    x, w, bias = _randn(2, 6, 4), _randn(2, 4, 2, s), _randn(4)
    weights = _randn(4, 4), _randn(4, 4), _randn(2, 2 * s), _randn(3, 4)

    def layer(x, w, bias, absent):
        biases = [absent, absent, None, None]
        biases[biased] = bias
        y, energy = attend(x, w, _maps(weights, biases))
        return torch.cat([y.flatten(), energy.flatten()])

    _same_with_gradients(
        lambda *leaves: layer(*leaves, None),
        lambda *leaves: layer(*leaves, torch.zeros(4, dtype=torch.float64)),
        [x, w, bias],
    )


def test_backward_cuts_the_tokens_as_forward_did(monkeypatch):
    one = LinearMap(torch.eye(4, dtype=torch.float64))
    maps = LayerMaps(one, one, LinearMap(_randn(2, 4)), one)
    x, w, joint = _randn(2, 9, 4).requires_grad_(), _randn(2, 4, 2, 2), _randn(8, 4)

    def gradient(chunk_of_backward):
        _cut_small(monkeypatch, 2)
        both, heads = tie_dual(x, (LinearMap(joint), LinearMap(joint)), 4)
        y = attend(x, w, maps)[0].square().sum() + attend(heads, both, maps)[0].square().sum()
        monkeypatch.setattr(tiles, "_CHUNK", chunk_of_backward)  # as other threads would
        return torch.autograd.grad(y, x)[0]

    assert_close(gradient(3), gradient(2))


@each("s", [1, 5])
def test_gradients_that_nobody_wants_are_left_out(s):
    maps = _maps([_randn(4, 4), _randn(4, 4), _randn(2, 2 * s), _randn(3, 4)], None)
    x, codes = _randn(2, 6, 4), [_randn(2, 5, s).requires_grad_() for _ in range(2)]

    def output(x):
        w, x = tie_sampled(x, *codes, 5)
        return attend(x, w, maps)[0]

    def found(x):
        return torch.autograd.grad(output(x).square().sum(), codes)

    for got, truth in zip(found(x), found(x.clone().requires_grad_()), strict=True):
        assert_close(got, truth)
    with torch.no_grad():
        assert not output(x).requires_grad


def test_projection_without_gradients_of_the_weights_or_inputs():
    q, w = _heads(2, 2, 5, 3), _randn(1, 2, 3, 2)
    only_q, only_w = q.clone().requires_grad_(), w.clone().requires_grad_()
    project(only_q, w).scores.sum().backward()
    project(q, only_w).scores.sum().backward()
    assert_close(only_q.grad, _grad(lambda t: naive.primal_scores(t, w), q))
    assert_close(only_w.grad, _grad(lambda t: naive.primal_scores(q, t), w))


def _grad(function, leaf):
    leaf = leaf.clone().requires_grad_()
    return torch.autograd.grad(function(leaf).sum(), leaf)[0]


def test_projection_passes_finite_differences():
    keep = torch.tensor([[True] * 4, [True, False, True, False]])
    q = _heads(2, 2, 4, 3).requires_grad_()
    for groups in (1, 2):
        w = _randn(groups, 2, 3, 2).requires_grad_()
        assert torch.autograd.gradcheck(lambda q, w: tuple(project(q, w, key_mask=keep)), [q, w])


@few
@given(
    scale=st.floats(1e-3, 1e3),
    n=st.integers(0, 9),
    d=st.integers(1, 9),
    s=st.integers(1, 9),
)
def test_t12_scores_do_not_see_the_length_of_a_query(scale, n, d, s):
    q, w = _heads(2, 2, n, d), _randn(1, 2, d, s)
    scores = project(q, w).scores
    assert_close(project(scale * q, w).scores, scores, atol=1e-10, rtol=1e-10)
    assert_close(project(-q, w).scores, -scores, atol=1e-10, rtol=1e-10)
    rotation = torch.linalg.qr(_randn(d, d)).Q
    assert_close(project(q @ rotation, rotation.T @ w).scores, scores, atol=1e-10, rtol=1e-8)


@few
@given(n=st.integers(1, 20), d=st.integers(1, 8), s=st.integers(1, 12))
def test_t13_scores_are_bounded_by_the_norm_of_the_weights(n, d, s):
    q, w = _heads(2, 3, n, d), _randn(2, 3, d, s)
    longest = project(q, w).scores.norm(dim=-1).amax(-1)
    assert (longest <= torch.linalg.matrix_norm(w, ord=2) * (1 + 1e-12)).all()
    units = project(q, torch.eye(d, dtype=q.dtype).expand(1, 3, d, d)).scores.norm(dim=-1)
    assert_close(units, torch.ones_like(units))


@each("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@each("eps", [1e-6, 1e-12])
def test_t13_a_zero_vector_has_zero_score_and_finite_gradient(dtype, eps):
    q = torch.zeros(1, 1, 2, 4, dtype=dtype, requires_grad=True)
    w = torch.randn(1, 1, 4, 3).to(dtype).requires_grad_()
    scores, energy = project(q, w, eps=eps)
    (scores.float().sum() + energy.sum()).backward()
    assert (scores == 0).all()
    assert q.grad.isfinite().all()
    assert (w.grad == 0).all()
    weights = dual_weights(q, torch.ones(1, 1, 2, 3, dtype=dtype), eps=eps)
    assert (weights == 0).all()


@each("tiny", [1e-7, 1e-5])
def test_norms_around_the_floor_have_the_gradient_of_the_clamped_formula(tiny):
    q, w = _heads(1, 2, 5, 3) * tiny, _randn(1, 2, 3, 2)
    _same_with_gradients(lambda q, w: project(q, w).scores, naive.primal_scores, [q, w], tol=1e-8)


def test_t14_scores_are_attention_to_sampled_tokens_with_position_codes():
    x, w = _randn(2, 11, 6), _randn(2, 4, 5)
    q = _heads(2, 2, 11, 3)
    f = sample_rows(x, 4).unflatten(-1, (2, 3)).transpose(1, 2)
    scores = project(q, naive.data_weights(f, w)).scores
    expected = torch.zeros_like(scores)
    for m in range(4):
        likeness = (naive.cosine(q) * f[:, :, m : m + 1]).sum(-1)
        expected = expected + likeness[..., None] * w[None, :, m : m + 1]
    assert_close(scores, expected, atol=1e-10, rtol=1e-10)


def test_t14_codes_of_a_repeated_row_add_up():
    x, w = _randn(1, 3, 4), _randn(1, 8, 2)
    f = sample_rows(x, 8)[:, None]
    folded = torch.zeros(1, 3, 2, dtype=torch.float64)
    for m, position in enumerate(naive.even_indices(3, 8)):
        folded[:, position] += w[:, m]
    assert_close(naive.data_weights(f, w), naive.data_weights(x[:, None], folded))


# sampling


def _exact(length, num):
    return [math.floor(m * (length - 1) / (num - 1)) if num > 1 else 0 for m in range(num)]


@each("num", [1, 2, 3, 7, 20, 100, 300])
def test_t15_indices_are_exact(num):
    for length in (*range(1, 60), 136, 315, 1024, 1751, 4096, 100_003):
        got = even_indices(length, num).tolist()
        assert got == naive.even_indices(length, num) == _exact(length, num)
        assert got[0] == 0
        assert num == 1 or got[-1] == length - 1
        assert got == sorted(got)
        many = even_indices(torch.tensor([length, 1, 0]), num)
        assert many.tolist() == [got, [0] * num, [0] * num]


@pytest.mark.raw
def test_t15_indices_are_the_same_compiled_and_exported():
    class Sample(torch.nn.Module):
        def forward(self, x, keep):
            return sample_rows(x, 100), sample_rows(x, 100, keep)

    torch._dynamo.reset()
    x, keep = torch.arange(136.0)[None, :, None], torch.ones(1, 136, dtype=torch.bool)
    dim = torch.export.Dim("n")
    compiled = torch.compile(Sample(), fullgraph=True, dynamic=True, backend="aot_eager")
    exported = torch.export.export(
        Sample(), (x[:, :50], keep[:, :50]), dynamic_shapes=({1: dim}, {1: dim})
    ).module()
    expected = torch.tensor(naive.even_indices(136, 100), dtype=torch.float32)
    for program in (Sample(), compiled, exported):
        for rows in program(x, keep):
            assert torch.equal(rows.flatten(), expected)


@few
@given(n=st.integers(0, 12), num=st.integers(1, 15), seed=st.integers(0, 99))
def test_sampling_skips_padding_wherever_it_is(n, num, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, n, 2, generator=generator)
    keep = torch.rand(3, n, generator=generator) < 0.6
    rows = sample_rows(x.masked_fill(~keep[:, :, None], math.nan), num, keep)
    for i in range(3):
        valid = naive.valid_positions(keep[i])
        if len(valid):
            expected = x[i, valid[naive.even_indices(len(valid), num)]]
        else:
            expected = torch.zeros(num, 2)
        assert torch.equal(rows[i], expected)


def test_normalized_rows_have_mean_zero_and_variance_one():
    rows = standardize_rows(_randn(2, 5, 64) * 100 + 7)
    assert_close(rows.mean(-1), torch.zeros(2, 5, dtype=rows.dtype), atol=1e-9, rtol=0)
    assert_close(rows.var(-1, correction=0), torch.ones(2, 5, dtype=rows.dtype))
    assert (standardize_rows(torch.full((1, 2, 8), 3.0)) == 0).all()
    assert_close(standardize_rows(rows * 1e-3), rows, atol=1e-4, rtol=1e-4)


# dual weights, Gram matrices, running sums


@each("masked", [False, True])
@each("chunk", [3, 1024])
def test_dual_weights_are_the_textbook_ones(monkeypatch, masked, chunk):
    _cut_small(monkeypatch, chunk)
    keep = _keep(3, 8) if masked else None

    def truth(k, duals):
        if keep is None:
            return naive.dual_weights(naive.cosine(k), duals)
        each = [
            naive.dual_weights(
                naive.cosine(k[i : i + 1][:, :, keep[i]]), duals[i : i + 1][:, :, keep[i]]
            )
            for i in range(3)
        ]
        return torch.cat(each)

    _same_with_gradients(
        lambda k, duals: dual_weights(k, duals, key_mask=keep),
        truth,
        [_heads(3, 2, 8, 4), _randn(3, 2, 8, 5)],
    )


@each("masked", [False, True])
def test_feature_gram_is_the_product_of_the_features(masked):
    keep = _keep(2, 9) if masked else None

    def truth(q):
        phi = naive.cosine(q)
        phi = phi if keep is None else torch.where(keep[:, None, :, None], phi, 0.0)
        return phi.transpose(-1, -2) @ phi

    _same_with_gradients(lambda q: feature_gram(q, key_mask=keep), truth, [_heads(2, 3, 9, 4)])


def test_sums_and_grams_stay_in_float32_under_autocast():
    q, x = torch.randn(1, 2, 300, 4).bfloat16(), torch.randn(1, 300, 4).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        gram, total, running = feature_gram(q), decayed_sum(x, 0.99), prefix_sum(x)
    assert gram.dtype == total.dtype == running.dtype == torch.float32
    assert_close(gram, feature_gram(q.float()))
    assert_close(total, decayed_sum(x.float(), 0.99))
    assert_close(running, prefix_sum(x.float()))


@each("n", [1, 5, 63, 64, 65, 130])
def test_prefix_sums_point_where_prefix_means_point(n):
    x = _randn(2, n, 4)
    total, mean = prefix_sum(x), naive.prefix_mean(x[:, None])[:, 0]
    steps = torch.arange(1, n + 1, dtype=x.dtype)[:, None]
    assert_close(total / steps, mean, atol=1e-10, rtol=1e-10)
    assert_close(naive.cosine(total), naive.cosine(mean), atol=1e-10, rtol=1e-10)


@each("n", [1, 7, 64, 65, 200])
@each("decay", [0.1, 0.9, 0.999])
def test_decayed_sums_are_the_recurrence(n, decay):
    _same_with_gradients(
        lambda x: decayed_sum(x, decay) * (1 - decay),
        lambda x: naive.prefix_mean(x[:, None], decay)[:, 0],
        [_randn(2, n, 3)],
    )


@few
@given(
    n=st.integers(1, 40), cut=st.integers(0, 40), chunk=st.integers(1, 9), seed=st.integers(0, 99)
)
def test_decayed_sums_continue_and_skip_padding(n, cut, chunk, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, n, 3, generator=generator, dtype=torch.float64)
    keep = torch.rand(2, n, generator=generator) < 0.7
    cut = min(cut, n)
    whole = decayed_sum(x, 0.8, key_mask=keep, chunk=chunk)
    for i in range(2):
        valid = naive.valid_positions(keep[i])
        if len(valid):
            expected = naive.prefix_mean(x[i, valid][None, None], 0.8)[0, 0] / 0.2
            assert_close(whole[i, valid], expected, atol=1e-10, rtol=1e-10)
    first = decayed_sum(x[:, :cut], 0.8, key_mask=keep[:, :cut], chunk=chunk)
    start = first[:, -1] if cut else torch.zeros(2, 3, dtype=torch.float64)
    second = decayed_sum(x[:, cut:], 0.8, key_mask=keep[:, cut:], start=start, chunk=chunk)
    assert_close(torch.cat([first, second], dim=1), whole, atol=1e-10, rtol=1e-10)


@each("decay", [0.1, 0.9])
def test_decayed_sums_remember_across_any_gap(decay):
    x, keep = _randn(1, 1000, 2), torch.zeros(1, 1000, dtype=torch.bool)
    keep[:, [3, 4, 900, 901]] = True
    packed = decayed_sum(x[keep][None], decay)
    assert_close(decayed_sum(x, decay, key_mask=keep)[keep][None], packed)
    assert_close(decayed_sum(x, decay, key_mask=keep)[:, 899], packed[:, 1])


def test_running_sums_keep_their_accuracy_over_long_sequences():
    x = torch.randn(1, 20_000, 8) + 0.1
    exact = prefix_sum(x.double())
    assert_close(
        prefix_sum(x.bfloat16().float()).double(),
        prefix_sum(x.bfloat16().double()),
        atol=0,
        rtol=1e-4,
    )
    assert_close(
        naive.cosine(prefix_sum(x)).double()[:, -1], naive.cosine(exact)[:, -1], atol=1e-5, rtol=0
    )


# the objective


@each("b, h, n, d, s", SHAPES)
def test_t05_the_moment_form_is_the_diagonal_matrix_form(b, h, n, d, s):
    def truth(e, r, lam, w_e, w_r):
        return naive.ksvd_objective(e, r, lam, w_e, w_r)

    def fast(e, r, lam, w_e, w_r):
        moments = e.square().mean(2), r.square().mean(2)
        return ksvd_objective(*moments, lam, parameter_trace(w_e, w_r))

    leaves = [
        _randn(b, h, n, s),
        _randn(b, h, n, s),
        _randn(h, s),
        _randn(h, d, s),
        _randn(h, d, s),
    ]
    _same_with_gradients(fast, truth, leaves)


def test_t05_the_covariance_form_agrees_too():
    q, k, w_e, w_r = _heads(2, 2, 9, 3), _heads(2, 2, 9, 3), _randn(2, 2, 3, 5), _randn(2, 2, 3, 5)
    lam = _randn(2, 5)

    def moments(q, w):
        gram = feature_gram(q) / 9
        return (w.transpose(-1, -2) @ gram @ w).diagonal(dim1=-2, dim2=-1)

    _same_with_gradients(
        lambda q, k, w_e, w_r: ksvd_objective(
            moments(q, w_e), moments(k, w_r), lam, parameter_trace(w_e, w_r)
        ),
        lambda q, k, w_e, w_r: naive.ksvd_objective(
            naive.primal_scores(q, w_e), naive.primal_scores(k, w_r), lam, w_e, w_r
        ),
        [q, k, w_e, w_r],
    )


# sequence parallelism, emulated: every rank sees its own tokens only


def _ranks(n, cuts):
    edges = [0, *cuts, n]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


@each("cuts", [[5], [2, 11], [0, 4], [12, 12]])
def test_t19_data_dependent_weights_are_sums_over_ranks(cuts):
    n, num, h, d, s = 13, 6, 2, 3, 4
    x, q, k = _randn(2, n, h * d), _heads(2, h, n, d), _heads(2, h, n, d)
    w_e, w_r, lam = _randn(h, num, s), _randn(h, num, s), _randn(h, s)

    def rows(x):
        return x.unflatten(-1, (h, d)).transpose(1, 2)

    f = rows(sample_rows(x, num))
    heads = torch.cat([q, k], dim=1)
    whole = project(heads, torch.cat([naive.data_weights(f, w) for w in (w_e, w_r)], dim=1))
    trace = parameter_trace(w_e, w_r)
    e, r = (whole.energy / n).chunk(2, dim=1)
    loss = reduce_objective(ksvd_objective(e, r, lam, trace))

    index = even_indices(n, num)
    by_e = by_r = torch.zeros(2, h, d, s, dtype=torch.float64)
    for rank in _ranks(n, cuts):
        mine = (index >= rank.start) & (index < rank.stop)
        local = rows(x[:, index[mine]])
        by_e = by_e + naive.data_weights(local, w_e[:, mine])
        by_r = by_r + naive.data_weights(local, w_r[:, mine])
    by = torch.cat([by_e, by_r], dim=1)
    parts = [project(heads[:, :, t], by) for t in _ranks(n, cuts)]
    assert_close(torch.cat([p.scores for p in parts], dim=2), whole.scores, atol=1e-10, rtol=1e-10)
    e, r = (sum(p.energy for p in parts) / n).chunk(2, dim=1)
    assert_close(reduce_objective(ksvd_objective(e, r, lam, trace)), loss)


@each("cuts", [[5], [2, 11], [0, 4], [12, 12]])
@each("decay", [None, 0.8])
def test_t19_causal_sums_are_scans_over_ranks(cuts, decay):
    x = _randn(2, 13, 6)
    running = prefix_sum if decay is None else decayed_sum
    options = {} if decay is None else {"decay": decay}
    whole = running(x, **options)
    carry, parts = torch.zeros(2, 6, dtype=torch.float64), []
    for rank in _ranks(13, cuts):
        local = x[:, rank]
        part = running(local, start=carry, **options)
        carry = part[:, -1] if local.shape[1] else carry
        parts.append(part)
    assert_close(torch.cat(parts, dim=1), whole, atol=1e-10, rtol=1e-10)


@each("cuts", [[5], [2, 11]])
def test_t19_dual_weights_are_sums_over_ranks(cuts):
    q, k, duals = _heads(2, 2, 13, 3), _heads(2, 2, 13, 3), _randn(2, 2, 13, 4)
    whole = project(q, dual_weights(k, duals)).scores
    total = sum(
        dual_weights(k[:, :, t], duals[:, :, t]) * (t.stop - t.start) for t in _ranks(13, cuts)
    )
    assert_close(project(q, total / 13).scores, whole, atol=1e-10, rtol=1e-10)


def test_sampling_is_the_same_where_binary_search_does_not_exist(monkeypatch):
    x, keep = torch.randn(4, 11, 3), torch.rand(4, 11) < 0.5
    keep[3] = False
    searched = sample_rows(x, 7, keep)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert torch.equal(sample_rows(x, 7, keep), searched)
