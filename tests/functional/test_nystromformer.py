"""The convolution of Nyströmformer is a grouped convolution."""

import torch
from tests.house.rows import each

from primal_attention.functional.nystromformer import token_convolution


@each("taps", [1, 3, 33, 65])
@each("n", [1, 5, 32, 33, 100])
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
