"""Random points, masks and gradients for the tests of kernels between points."""

import torch

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
