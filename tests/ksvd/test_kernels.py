import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.house.rows import each

from primal_attention.ksvd import FEATURE_MAPS, KERNELS, named_kernel

sklearn_pairwise = pytest.importorskip("sklearn.metrics.pairwise")


def data(n: int, d: int, shift: float = 0.0) -> torch.Tensor:
    return torch.randn(n, d, dtype=torch.float64) + shift


@pytest.mark.parametrize("name", ["cosine", "laplacian", "linear", "polynomial", "rbf"])
@each("gamma", [None, 0.7])
def test_named_kernels_agree_with_scikit_learn(name: str, gamma: float | None) -> None:
    x, y = data(13, 4), data(9, 4, 0.5)
    options = {} if name in ("cosine", "linear") else {"gamma": gamma}
    expected = sklearn_pairwise.pairwise_kernels(x.numpy(), y.numpy(), metric=name, **options)
    got = named_kernel(name, gamma=gamma)(x, y)
    torch.testing.assert_close(got, torch.from_numpy(expected), rtol=1e-10, atol=1e-12)


def test_normalized_exponential_kernel_is_softmax_attention() -> None:
    q, k, v = (torch.randn(1, 1, 6, 8, dtype=torch.float64) for _ in range(3))
    values = named_kernel("exponential")(q[0, 0], k[0, 0])
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)[0, 0]
    torch.testing.assert_close(values / values.sum(1, keepdim=True) @ v[0, 0], expected)


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_values_depend_on_their_own_rows_only(name: str) -> None:
    x, y = data(7, 3), data(5, 3)
    kernel = named_kernel(name)
    whole = kernel(x, y)
    torch.testing.assert_close(kernel(x[2:4], y), whole[2:4], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(kernel(x, y[1:2]), whole[:, 1:2], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", sorted(FEATURE_MAPS))
def test_feature_maps_reproduce_their_kernel(name: str) -> None:
    x, y = data(7, 3), torch.cat([data(5, 3), torch.zeros(1, 3, dtype=torch.float64)])
    phi = FEATURE_MAPS[name]
    torch.testing.assert_close(phi(x) @ phi(y).T, named_kernel(name)(x, y))


@settings(deadline=None, max_examples=25)
@given(shift=st.floats(-1e3, 1e3), scale=st.floats(1e-3, 1e3))
def test_distance_kernels_are_translation_invariant_and_bounded(shift: float, scale: float) -> None:
    x, y = scale * data(6, 3), scale * data(4, 3)
    for name in ("rbf", "laplacian"):
        kernel = named_kernel(name, gamma=1 / scale)
        moved = kernel(x + shift, y + shift)
        torch.testing.assert_close(moved, kernel(x, y), rtol=1e-6, atol=1e-6)
        assert (moved <= 1).all()


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_kernels_do_not_change_their_inputs(name: str) -> None:
    x, y = data(6, 3), data(4, 3)
    before = x.clone(), y.clone()
    named_kernel(name)(x, y)
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])


def test_unknown_name_raises() -> None:
    with pytest.raises(ValueError, match="kernel is 'gauss'; it must be a callable or one of"):
        named_kernel("gauss")
