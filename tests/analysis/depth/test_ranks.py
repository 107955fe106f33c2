"""Exact separation ranks: golden numbers, bounds, and arithmetic against Python's integers."""

from itertools import product
from math import comb, log

import numpy as np
import pytest

from primal_attention.analysis.depth import (
    LayerShape,
    PrimeField,
    depth_threshold,
    interactions,
    log3_sep_bounds,
    one_layer_width,
    poly_primal_attention,
    poly_self_attention,
    poly_static_attention,
    separation_rank,
)
from primal_attention.analysis.depth.field import PRIME

OTHER_PRIME = 33554383


def two_layer_rank(d):
    """Return the rank of two standard layers with one head; exact computations agree up to 6."""
    return 1 + 4 * d + 9 * comb(d, 2) + 9 * comb(d, 3) + 3 * comb(d, 4)


# T1
@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
def test_one_layer_has_rank_width_plus_one(width):
    assert separation_rank("standard", 1, width) == width + 1
    assert separation_rank("standard", 1, width, heads=width) == width + 1
    assert separation_rank("standard", 1, width, tokens=2) == width + 1


# T2
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5])
def test_two_layers_follow_the_formula(width):
    assert separation_rank("standard", 2, width) == two_layer_rank(width)


@pytest.mark.slow
def test_two_layers_of_width_six():
    assert separation_rank("standard", 2, 6) == 385 == two_layer_rank(6)
    assert separation_rank("standard", 2, 6, heads=2) == 379


# T3
def test_width_one_grows_like_three_to_the_depth():
    found = [separation_rank("standard", layers, 1) for layers in range(1, 6)]
    assert found == [2, 5, 14, 41, 122] == [(3**layers + 1) // 2 for layers in range(1, 6)]


# T4
@pytest.mark.slow
def test_three_layers_of_width_two():
    assert separation_rank("standard", 3, 2) == 232
    assert separation_rank("standard", 3, 2, heads=2) == 215


def test_more_heads_at_equal_width_lower_the_rank():
    assert separation_rank("standard", 2, 3, heads=3) == 43
    assert [separation_rank("standard", 2, 4, heads=h) for h in (1, 2, 4)] == [110, 107, 85]


def test_rank_saturates_at_four_tokens_and_does_not_depend_on_the_position():
    assert [separation_rank("standard", 2, 2, tokens=n) for n in (2, 4, 6)] == [15, 18, 18]
    assert separation_rank("standard", 2, 3, position=-1) == 49


# T5
def test_upper_bound_holds_for_every_exact_rank():
    cases = [(1, d, h) for d in (1, 2, 4, 8) for h in {1, d}]
    cases += [(2, d, 1) for d in (1, 2, 3, 4)] + [(2, 4, 2), (2, 4, 4)]
    cases += [(layers, 1, 1) for layers in (3, 4, 5)]
    for layers, width, heads in cases:
        rank = separation_rank("standard", layers, width, heads)
        assert rank <= (width + heads) ** ((3**layers - 1) // 2)
        bounds = log3_sep_bounds(layers, width, heads)
        assert bounds.lower <= log(rank, 3) + 1e-12 <= bounds.upper + 1e-12


# T6
@pytest.mark.parametrize(("layers", "width"), [(1, 2), (1, 3), (2, 1), (2, 2), (2, 3)])
def test_residual_connections_do_not_change_the_rank(layers, width):
    plain = separation_rank("standard", layers, width)
    assert separation_rank("residual", layers, width) == plain


# T7
@pytest.mark.parametrize("prime", [PRIME, OTHER_PRIME])
def test_rank_is_the_same_for_seeds_and_primes(prime):
    for seed in range(3):
        assert separation_rank("standard", 2, 3, seeds=[seed], prime=prime) == 49


# T8
def test_products_sums_and_static_primal_layers():
    def first(function):
        """Return a layer whose first output is a function of the tokens."""
        return lambda field, shape: lambda x: np.broadcast_to(function(x)[:, None, None], x.shape)

    times = first(lambda x: x[:, 0, 0] * x[:, 1, 0] % PRIME)
    plus = first(lambda x: x[:, 0, 0] * x[:, 0, 1] % PRIME + x[:, 1, 0])
    assert separation_rank(times, 1, 1, tokens=2) == 1
    assert separation_rank(plus, 1, 2, tokens=2) == 2
    assert separation_rank(first(lambda x: 0 * x[:, 0, 0]), 1, 1, tokens=2) == 0
    for layers in (1, 2, 4):
        assert separation_rank("primal-static", layers, 3) == 1


# T12
def test_bounds_are_ordered_on_a_grid_that_crosses_the_threshold():
    regimes = set()
    for layers, width in product(range(1, 61), [1, 2, 3, 9, 27, 64, 81, 243, 768, 4096, 8192]):
        for heads in {1, max(1, width // 64), width}:
            lower, upper, regime = log3_sep_bounds(layers, width, heads)
            assert 0 <= lower <= upper < float("inf")
            regimes.add(regime)
            assert (regime == "depth-efficient") == (3**layers < width)
    assert len(regimes) == 2


def test_bounds_have_the_published_values():
    # straight from the formulas, with other means: 3^0 (log3(511) - 1 … ) and 4 log3(513)
    efficient = log3_sep_bounds(2, 512, 1)
    assert efficient.lower == pytest.approx((log(511) - log(2)) / log(3))
    assert efficient.upper == pytest.approx(4 * log(513) / log(3))
    deep = log3_sep_bounds(20, 64, 2)
    assert deep.lower == pytest.approx(640 - 20 * 2 - 64 * (1 + log(31, 3) / 2))
    assert deep.upper == pytest.approx(
        2560 + 20 - 128 * log(64 / (8 * np.e) ** 0.5, 3) + log(64, 3)
    )
    assert log3_sep_bounds(1, 64).lower == pytest.approx(log(65, 3))
    # a bound that would be negative says nothing
    assert log3_sep_bounds(2, 2).lower == 0


def test_thresholds_of_common_widths():
    found = [round(depth_threshold(d), 1) for d in (128, 256, 1024, 4096, 12288)]
    assert found == [4.4, 5.0, 6.3, 7.6, 8.6]
    assert [interactions(n) for n in (1, 2, 3)] == [1, 4, 13]


# T14
@pytest.mark.parametrize("width", [2, 4, 6])
def test_one_primal_layer_is_as_expressive_as_a_standard_one(width):
    for rank in (1, 2, width):
        assert separation_rank("primal", 1, width, tokens=6, rank=rank) == width + 1


# T14
def test_primal_ranks_at_two_layers_and_more():
    assert separation_rank("primal", 2, 2, tokens=6, rank=2) == 20
    assert separation_rank("primal", 2, 2, tokens=4, rank=1) == 14
    assert separation_rank("primal", 2, 3, tokens=6, rank=2) == 37
    for rank in (1, 2, 4):
        assert separation_rank("primal", 2, 4, tokens=6, rank=rank) == 59
    assert separation_rank("primal", 2, 4, tokens=8, rank=4) == 79
    assert separation_rank("primal", 3, 1, tokens=6) == 30
    assert separation_rank("primal", 3, 1, tokens=4) == 20


# T14
@pytest.mark.slow
def test_larger_primal_ranks():
    assert separation_rank("primal", 2, 6, tokens=6, rank=3) == 118
    for rank in (1, 2):
        assert separation_rank("primal", 3, 2, tokens=6, rank=rank) == 224


def test_linear_attention_has_the_ranks_of_standard_attention():
    assert separation_rank("linear", 2, 3) == separation_rank("softmax-free", 2, 3) == 49
    # equal weights: equal outputs, in another order of products
    shape, x = LayerShape(4, heads=2), PrimeField(5).random(3, 4, 4)
    one = poly_self_attention(PrimeField(1), shape)(x)
    linear = poly_self_attention(PrimeField(1), shape, keys_first=True)
    np.testing.assert_array_equal(linear(x), one)


def test_width_that_one_layer_needs_in_place_of_two():
    found = [one_layer_width(two_layer_rank(d)) for d in (2, 4, 6, 8, 16)]
    assert found == [17, 109, 384, 998, 11644]
    assert one_layer_width(two_layer_rank(64)) == pytest.approx(2.3e6, rel=0.02)


class Exact(PrimeField):
    """A field that records what it draws, so that the same weights can be used elsewhere."""

    def random(self, *shape):
        self.drawn = [*getattr(self, "drawn", []), super().random(*shape)]
        return self.drawn[-1]


def dot(x, y):
    return sum(a * b for a, b in zip(x, y, strict=True))


def through(matrix, row):
    """Return row × matrix in Python's integers."""
    return [dot(row, column) for column in zip(*matrix, strict=True)]


def standard_by_hand(drawn, x):
    w_q, w_k, w_v, w_o = (w.tolist() for w in drawn)
    out = []
    for xi in x:
        total = [0] * len(xi)
        for q, k, v, o in zip(w_q, w_k, w_v, w_o, strict=True):
            inner = [0] * len(v[0])
            for xj in x:
                score = dot(through(q, xi), through(k, xj))
                inner = [a + score * b for a, b in zip(inner, through(v, xj), strict=True)]
            total = [a + b for a, b in zip(total, through(o, inner), strict=True)]
        out.append(total)
    return out


def primal_by_hand(drawn, x):
    maps, codes, w_f, w_o = (w.tolist() for w in drawn)
    out = []
    for xi in x:
        total = [0] * len(xi)
        for h, side in product(range(len(maps)), range(2)):
            features = [through(w_f[h], xj) for xj in x]
            tied = [through(features, code) for code in codes[h][side]]  # [s a]
            scores = [dot(row, through(maps[h][side], xi)) for row in tied]
            total = [a + b for a, b in zip(total, through(w_o[h][side], scores), strict=True)]
        out.append(total)
    return out


# T15
@pytest.mark.parametrize(
    ("make", "by_hand"),
    [(poly_self_attention, standard_by_hand), (poly_primal_attention, primal_by_hand)],
)
@pytest.mark.parametrize("heads", [1, 2])
def test_layers_equal_exact_integers_modulo_the_prime(make, by_hand, heads):
    field = Exact(seed=3)
    shape = LayerShape(4, heads=heads, tokens=3, rank=2)
    stack = []
    for _ in range(2):
        field.drawn = []
        stack.append((make(field, shape), field.drawn))
    x = PrimeField(9).random(2, 3, 4)
    got = x
    for layer, _ in stack:
        got = layer(got)
    for sequence, result in zip(x.tolist(), got.tolist(), strict=True):
        exact = sequence  # no remainder is taken before the end
        for _, drawn in stack:
            exact = by_hand(drawn, exact)
        assert [[v % PRIME for v in row] for row in exact] == result


# T15
def test_residual_and_static_layers_equal_exact_integers():
    shape, x = LayerShape(3, tokens=4), PrimeField(8).random(2, 4, 3)
    plain = poly_self_attention(PrimeField(2), shape)(x)
    with_input = poly_self_attention(PrimeField(2), shape, residual=True)(x)
    np.testing.assert_array_equal(with_input, (plain + x) % PRIME)
    static = poly_static_attention(PrimeField(2), shape)
    changed = x.copy()
    changed[:, 1:] += 1
    np.testing.assert_array_equal(static(x)[:, 0], static(changed)[:, 0])


def test_products_at_the_largest_size_do_not_overflow():
    field = PrimeField()
    large = np.full((1, 4096), PRIME - 1)
    assert field.matmul(large, large.T)[0, 0] == 4096 * (PRIME - 1) ** 2 % PRIME
    with pytest.raises(ValueError, match="at most 4096"):
        field.matmul(np.ones((1, 4097), dtype=np.int64), np.ones((4097, 1), dtype=np.int64))


def test_rank_modulo_a_prime():
    field = PrimeField(4)
    low = field.matmul(field.random(9, 5), field.random(5, 7))
    assert field.rank(low) == 5
    assert field.rank(low.T) == 5
    assert field.rank(np.zeros((3, 3), dtype=np.int64)) == 0
    assert field.rank(np.eye(6, dtype=np.int64)[::-1]) == 6
    # PRIME is zero in the field
    assert field.rank(np.array([[PRIME, 1], [0, 0]])) == 1
    assert field.inverse(7) * 7 % PRIME == 1


def test_own_layer_counts_like_a_built_in_one():
    def square(field, shape):
        w = field.random(shape.width, shape.width)
        # y_i = W (Σ_j x_j) ⊙ x_i: a product of both halves
        return lambda x: field.matmul(field.reduce(x.sum(1, keepdims=True) * x), w)

    assert separation_rank(square, 1, 3) == 4


def test_work_limit_says_what_is_known():
    with pytest.raises(ValueError, match="at least 40, and max_templates=40"):
        separation_rank("standard", 2, 3, max_templates=40)
    # enough for one seed is enough for two
    assert separation_rank("standard", 2, 3, max_templates=50) == 49


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("stndard", 1, 2), "Did you mean 'standard'"),
        (("standard", 0, 2), "layers must be at least 1"),
        (("standard", 1, 0), "width must be at least 1"),
        (("standard", 1, 4, 3), "heads must divide width"),
        (("standard", 1, 4, 1, 1), "tokens must be at least 2"),
        (("primal", 1, 4, 1, 4, 0), "rank must be at least 1"),
    ],
)
def test_impossible_networks_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        separation_rank(*arguments)


def test_a_number_that_is_no_prime_is_refused():
    with pytest.raises(ValueError, match="must be a prime"):
        PrimeField(prime=33554391)
