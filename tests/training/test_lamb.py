from copy import deepcopy

import pytest
import torch
from torch import nn

from primal_attention.training import TrainingConfig
from primal_attention.training.lamb import Lamb, Lookahead
from primal_attention.training.optimization import create_optimizer, learning_rate


def layer(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(4, 3).double()


def step(module, optimizer, seed):
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    module(x).square().sum().backward()
    optimizer.step()


def test_without_its_ratio_it_is_adam_without_bias_correction():
    # N11
    module, (w, b) = layer(), [p.detach().clone() for p in layer().parameters()]
    optimizer = Lamb(module.parameters(), lr=0.01, is_adaptive=False)
    moments = {id(p): (0.0, 0.0) for p in module.parameters()}
    for i in range(5):
        step(module, optimizer, i)
        for p, own in zip(module.parameters(), (w, b), strict=True):
            m, v = moments[id(p)]
            m, v = 0.9 * m + 0.1 * p.grad, 0.999 * v + 0.001 * p.grad**2
            moments[id(p)] = m, v
            own -= 0.01 * m / (v.sqrt() + 1e-6)
    torch.testing.assert_close(module.weight.detach(), w, atol=1e-12, rtol=0)
    torch.testing.assert_close(module.bias.detach(), b, atol=1e-12, rtol=0)


def test_the_ratio_makes_a_step_a_share_of_the_weights():
    module = layer()
    before = module.weight.detach().clone()
    step(module, Lamb(module.parameters(), lr=0.01), 0)
    moved = (module.weight.detach() - before).norm()
    assert moved == pytest.approx(0.01 * float(before.norm().clamp_max(10)), rel=1e-9)


def test_the_norm_of_large_weights_is_limited_to_ten():
    module = layer()
    with torch.no_grad():
        module.weight.mul_(1000)
    before = module.weight.detach().clone()
    step(module, Lamb(module.parameters(), lr=0.01), 0)
    assert (module.weight.detach() - before).norm() == pytest.approx(0.1, rel=1e-9)


def test_zero_weights_move_by_the_plain_step():
    module = layer()
    nn.init.zeros_(module.bias)
    step(module, Lamb(module.parameters(), lr=0.01), 0)
    assert module.bias.abs().max() > 0


def test_after_k_steps_the_weights_are_half_way_to_the_fast_ones():
    # N10
    fast, slow = layer(), layer()
    start = slow.weight.detach().clone()
    inner = torch.optim.SGD(fast.parameters(), lr=0.01)
    optimizer = Lookahead(torch.optim.SGD(slow.parameters(), lr=0.01))
    for i in range(5):
        step(fast, inner, i)
        step(slow, optimizer, i)
        assert torch.equal(fast.weight, slow.weight)
    step(fast, inner, 5)
    step(slow, optimizer, 5)
    torch.testing.assert_close(
        slow.weight.detach(), (start + fast.weight.detach()) / 2, atol=1e-12, rtol=0
    )


def test_a_restored_optimizer_goes_on_as_before():
    module, copy = layer(), layer()
    first = Lookahead(Lamb(module.parameters(), lr=0.01))
    for i in range(4):
        step(module, first, i)
    copy.load_state_dict(module.state_dict())
    second = Lookahead(Lamb(copy.parameters(), lr=0.01))
    second.load_state_dict(deepcopy(first.state_dict()))
    for i in range(4, 9):
        step(module, first, i)
        step(copy, second, i)
    assert torch.equal(module.weight, copy.weight)


def test_the_configuration_names_it():
    config = TrainingConfig(optimizer="lamb-lookahead", schedule="flat-cosine", warmup=0.0, lr=1.0)
    assert isinstance(create_optimizer(layer(), config), Lookahead)


def test_flat_cosine_is_flat_and_then_falls_to_zero():
    # N9
    config = TrainingConfig(schedule="flat-cosine", warmup=0.0, lr=1.0)
    rates = [learning_rate(config, t / 100) for t in range(101)]
    assert rates[:71] == pytest.approx([1.0] * 71, abs=1e-7)
    assert rates[85] == pytest.approx(0.5, abs=1e-7)
    assert rates[100] == pytest.approx(0, abs=1e-7)
    assert rates == sorted(rates, reverse=True)
