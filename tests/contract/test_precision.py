"""Half precision stays close to float32 and never produces a NaN of its own."""

import torch
from tests.contract.cases import every_mode, masked_modes, rows
from tests.house.rows import each


@every_mode
def test_bfloat16_autocast_stays_close(mode_case):
    layer, arguments = mode_case.build().eval(), mode_case.inputs(n=40, m=30)
    exact = mode_case.run(layer, arguments)
    with torch.autocast("cpu", torch.bfloat16):
        y = mode_case.run(layer, arguments)
    torch.testing.assert_close(y.float(), exact, atol=_bound(mode_case, exact), rtol=0)


@masked_modes
def test_bfloat16_autocast_trains(mode_case):
    layer, arguments = mode_case.build().train(), mode_case.inputs()
    has_loss = layer.capabilities.aux_loss
    arguments["return_aux"] = has_loss
    grads = []
    for enabled in (False, True):
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = mode_case.run(layer, arguments)
        y, loss = (y[0], y[1].loss) if has_loss else (y, y.new_zeros(()))
        if has_loss:
            assert loss.dtype == torch.float32
        (y.float().square().mean() + loss).backward()
        grads.append(layer.q_proj.weight.grad.clone())
    assert grads[1].dtype == torch.float32
    torch.testing.assert_close(grads[1], grads[0], atol=2e-2, rtol=0.1)


@masked_modes
@each("dtype", [torch.bfloat16, torch.float16])
def test_a_module_wholly_in_half_precision_stays_close(mode_case, dtype):
    layer = mode_case.build().eval()
    exact = mode_case.run(layer, mode_case.inputs(n=40, m=30))
    y = mode_case.run(layer.to(dtype), _cast(mode_case.inputs(n=40, m=30), dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), exact, atol=_bound(mode_case, exact), rtol=0)


@every_mode
def test_large_tokens_stay_finite_in_float16(mode_case):
    layer, arguments = mode_case.build().eval().half(), mode_case.inputs(n=40, m=30)
    for name in ("x", "context"):
        if name in arguments:
            arguments[name] = (30 * arguments[name]).half()
    assert mode_case.run(layer, arguments).isfinite().all()


@each("any_case", rows())
@each("dtype", [torch.bfloat16, torch.float16])
def test_layers_can_be_created_in_half_precision(any_case, dtype):
    layer = any_case.build(dtype=dtype)
    assert {p.dtype for p in layer.parameters()} == {dtype}
    assert all(p.isfinite().all() for p in layer.parameters())


@every_mode
@each("dtype", [torch.float16, torch.float32])
def test_t13_zero_tokens_give_finite_results_and_gradients(mode_case, dtype):
    layer = mode_case.build(bias=False).to(dtype).train()
    arguments = _cast(mode_case.inputs(), dtype)
    arguments["x"][:, 2] = 0
    if "context" in arguments:
        arguments["context"][:, 0] = 0
    arguments["x"].requires_grad_()
    has_loss = layer.capabilities.aux_loss
    y = mode_case.run(layer, {**arguments, "return_aux": has_loss})
    y, loss = (y[0], y[1].loss) if has_loss else (y, y.new_zeros(()))
    (y.float().mean() + loss.float()).backward()
    assert y.isfinite().all()
    assert loss.isfinite()
    assert arguments["x"].grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


def test_decoding_in_half_precision_keeps_its_sums_in_float32(stateful_case):
    layer = stateful_case.build().to(torch.bfloat16).eval()
    x = torch.randn(1, 300, 16).bfloat16()
    state, outputs = layer.init_state(1), []
    for piece in x.split([200] + [1] * 100, dim=1):
        y, state = layer.step(piece, state)
        outputs.append(y)
    exact = layer.to(torch.float32)(x.float(), is_causal=True)
    got = torch.cat(outputs, dim=1).float()
    torch.testing.assert_close(got, exact, atol=_bound(stateful_case, exact), rtol=0)


def _bound(case, exact):
    """Two per cent of one; of the largest output where rows are sums and not averages."""
    is_sum = case.options.get("normalize") is False
    return 2e-2 * (max(1.0, exact.abs().max().item()) if is_sum else 1.0)


def _cast(arguments, dtype):
    return {
        k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in arguments.items()
    }
