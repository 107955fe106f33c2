"""Second derivatives are right or refused, also where the incoming gradient is constant."""

import pytest
import torch
from tests.contract.cases import masked_modes
from torch.nn.attention import SDPBackend, sdpa_kernel

TORCH = {"softmax", "gaussian", "linformer", "nystromformer", "distributional"}
"""Mechanisms that call ``scaled_dot_product_attention``: all but its plain backend refuse."""


def _gradient(case, layer, arguments, probe, **flags):
    torch.manual_seed(2)
    y, term = layer(**arguments), 0.0
    if layer.capabilities.aux_loss:
        y, aux = layer(**arguments, return_aux=True)
        term = aux.loss
    # a skip connection and a linear end: no gradient that comes in depends on anything
    loss = ((arguments["x"] + y) * probe).sum() + term
    return torch.autograd.grad(loss, arguments["x"], **flags)[0]


@masked_modes
def test_a_gradient_penalty_trains_what_finite_differences_say(mode_case):
    layer = mode_case.build(dtype=torch.float64).train()
    arguments = mode_case.inputs(n=6, m=5, dtype=torch.float64)
    leaves = [arguments[name] for name in ("x", "context") if name in arguments]
    leaves += [p for p in layer.parameters() if p.requires_grad]
    for leaf in leaves:
        leaf.requires_grad_()
    given = mode_case, layer, arguments, torch.randn_like(arguments["x"])
    with sdpa_kernel(SDPBackend.MATH):
        penalty = _gradient(*given, create_graph=True).square().sum()
        grads = torch.autograd.grad(penalty, leaves, allow_unused=True)
        directions = [torch.randn_like(leaf) for leaf in leaves]
        step, ends = 1e-6, []
        for shift in (step, -2 * step):
            with torch.no_grad():
                for leaf, direction in zip(leaves, directions, strict=True):
                    leaf.add_(shift * direction)
            ends.append(_gradient(*given).square().sum())
    along = sum((g * d).sum() for g, d in zip(grads, directions, strict=True) if g is not None)
    torch.testing.assert_close(along, (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-6)


@masked_modes
def test_one_parameter_alone_has_the_gradient_that_it_has_among_all(mode_case):
    layer, arguments = mode_case.build(dtype=torch.float64), mode_case.inputs(dtype=torch.float64)
    probe = torch.randn_like(arguments["x"])
    own = {name: p for name, p in layer.named_parameters() if p.requires_grad}

    def gradient(*of):
        torch.manual_seed(2)
        y, term = layer(**arguments), 0.0
        if layer.capabilities.aux_loss:
            y, aux = layer(**arguments, return_aux=True)
            term = aux.loss
        loss = (y * probe).sum() + term
        return torch.autograd.grad(loss, of, create_graph=True, allow_unused=True)

    with sdpa_kernel(SDPBackend.MATH):
        expected = dict(zip(own, gradient(*own.values()), strict=True))
        for name, p in own.items():
            for other in own.values():
                other.requires_grad_(other is p)
            found = gradient(p)[0] if expected[name] is not None else None
            torch.testing.assert_close(found, expected[name], msg=lambda m, n=name: f"{n}: {m}")


@masked_modes
def test_what_torch_cannot_differentiate_twice_is_refused(mode_case):
    layer, arguments = mode_case.build(), mode_case.inputs()
    x = arguments["x"].requires_grad_()
    found = _gradient(mode_case, layer, arguments, torch.randn_like(x), create_graph=True)
    is_torch = mode_case.name in TORCH
    if mode_case.name == "adaptive":  # which is softmax while it reads all tokens
        is_torch = arguments.get("context", x).shape[1] <= layer.core.plan.reach
    if is_torch:
        with pytest.raises(RuntimeError, match="is not implemented"):
            found.square().sum().backward()
    else:
        found.square().sum().backward()
        assert x.grad.isfinite().all()


# torch has no batching rule for its fast product: it takes one sequence after another
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@masked_modes
def test_transforms_of_functions_give_the_gradient_of_every_sequence(mode_case):
    layer, arguments = mode_case.build(dtype=torch.float64).eval(), mode_case.inputs(n=6).copy()
    flags = {"is_causal": arguments.pop("is_causal", False)}
    given = {name: t.double() if t.is_floating_point() else t for name, t in arguments.items()}
    learned = {name: p for name, p in layer.named_parameters() if p.requires_grad}

    def loss(learned, one):
        inputs = {name: t[None] for name, t in one.items()}
        return torch.func.functional_call(layer, learned, (), inputs | flags).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0), randomness="same")(
        learned, given
    )
    for i in range(2):
        own = loss(learned, {name: t[i] for name, t in given.items()})
        grads = torch.autograd.grad(own, learned.values(), allow_unused=True)
        for name, grad in zip(learned, grads, strict=True):
            expected = torch.zeros_like(learned[name]) if grad is None else grad
            torch.testing.assert_close(found[name][i], expected, msg=lambda m, n=name: f"{n}: {m}")
