"""Shapes, dtypes, dense parity and gradients of every attention, and lengths of every kind."""

import pytest
import torch
from tests.contract.cases import every_core_mode, every_mode, masked_modes, rows
from tests.contract.references import REFERENCES
from tests.house.rows import each
from torch import nn

from primal_attention.attention import MultiHeadAttention

SUMS = {"flow", "nystromformer"}
"""Mechanisms that scale their averages, or add to them."""
LOW_RANK = {"skyformer": 1e-2, "skyformer-learned": 1e-2}
"""How far rows of approximate weights are from a sum of one."""


@every_mode
def test_output_has_shape_dtype_and_device_of_the_tokens(mode_case):
    layer, arguments = mode_case.build(), mode_case.inputs()
    y = mode_case.run(layer, arguments)
    assert y.shape == arguments["x"].shape
    assert y.dtype == torch.float32
    assert y.isfinite().all()


@each("any_case", rows())
def test_projections_are_plain_linear_layers(any_case):
    layer = any_case.build()
    names = ["q_proj", "k_proj", "out_proj"]
    if isinstance(layer, MultiHeadAttention):
        names.append("v_proj")
    for name in names:
        assert type(getattr(layer, name)) is nn.Linear
        assert getattr(layer, name).weight.shape == (16, 16)


@each("any_case", rows())
@each("num_heads", [1, 3, 8])
def test_any_head_count_that_divides_the_width_works(any_case, num_heads):
    layer = any_case.build(24, num_heads)
    assert layer(torch.randn(2, 5, 24)).shape == (2, 5, 24)


@each("any_case", rows())
def test_bias_and_dropout_arguments_are_honoured(any_case):
    layer = any_case.build(bias=False, dropout=0.5)
    assert not any(name.endswith("bias") for name, _ in layer.named_parameters())
    x = torch.randn(2, 40, 16)
    dropped = (layer.train()(x) == 0).float().mean()
    assert 0.3 < dropped < 0.7
    assert (layer.eval()(x) != 0).all()


@each("any_case", rows())
def test_dtype_argument_is_honoured(any_case):
    layer = any_case.build(dtype=torch.float64)
    assert {p.dtype for p in layer.parameters()} == {torch.float64}
    assert layer(torch.randn(2, 5, 16, dtype=torch.float64)).dtype == torch.float64


@each("any_case", rows())
def test_meta_device_is_honoured_and_gives_shapes(any_case):
    layer = any_case.build(device="meta")
    assert {t.device.type for t in (*layer.parameters(), *layer.buffers())} == {"meta"}
    assert layer(torch.randn(2, 5, 16, device="meta")).shape == (2, 5, 16)


@every_core_mode
def test_core_is_its_formula_in_values_and_gradients(core_case):
    layer = core_case.build(dtype=torch.float64).eval()
    core, parameters = layer.core, list(layer.core.parameters())
    with torch.no_grad():
        for parameter in parameters:
            # off the neutral values that many start from
            parameter.add_(0.3 * torch.randn_like(parameter))
    arguments = core_case.inputs(dtype=torch.float64)
    x, memory = arguments["x"], arguments.get("context", arguments["x"])
    q = layer._split(layer.q_proj(x)).detach().requires_grad_()
    k, v = (layer._split(p(memory)).detach().requires_grad_() for p in (layer.k_proj, layer.v_proj))
    is_causal, keep = arguments.get("is_causal", False), arguments.get("key_mask")
    got = core(q, k, v, key_mask=keep, is_causal=is_causal)
    rows = []
    for i in range(2):
        keys = slice(None) if keep is None else keep[i]
        asks = slice(None) if "context" in arguments else keys
        one = q[i : i + 1, :, asks], k[i : i + 1, :, keys], v[i : i + 1, :, keys]
        rows.append((got[i : i + 1, :, asks], REFERENCES[core_case.name](core, *one, is_causal)))
    probes = [torch.randn_like(y) for y, _ in rows]
    grads = []
    for which in (0, 1):
        loss = sum((row[which] * p).sum() for row, p in zip(rows, probes, strict=True))
        grads.append(torch.autograd.grad(loss, [q, k, v, *parameters], allow_unused=True))
    for y, expected in rows:
        torch.testing.assert_close(y, expected)
    for a, b in zip(*grads, strict=True):
        zero = torch.zeros(())
        torch.testing.assert_close(
            *(zero if g is None else g for g in (a, b)), atol=1e-7, rtol=1e-6
        )


@every_core_mode
def test_dense_weights_times_values_are_the_output(core_case):
    layer = core_case.build(dtype=torch.float64).eval()
    arguments = core_case.inputs(dtype=torch.float64)
    x, memory = arguments["x"], arguments.get("context", arguments["x"])
    flags = {k: arguments[k] for k in ("key_mask", "is_causal") if k in arguments}
    q, k, v = (
        layer._split(p(t))
        for p, t in ((layer.q_proj, x), (layer.k_proj, memory), (layer.v_proj, memory))
    )
    weights = layer.core.weights(q, k, **flags)
    assert weights.shape == (*q.shape[:3], k.shape[2])
    y = layer.out_proj(layer._merge(weights @ v))
    if "key_mask" in flags and "context" not in arguments:
        y = torch.where(flags["key_mask"][:, :, None], y, 0.0)
    torch.testing.assert_close(core_case.run(layer, arguments), y)


@pytest.mark.filterwarnings("ignore:static weights without is_causal")
def test_permuted_tokens_give_permuted_outputs_unless_order_plays_a_part(any_case):
    layer = any_case.build(dtype=torch.float64).eval()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith("table"):  # weights of positions start alike
                parameter.normal_()
    x, order = torch.randn(2, 30, 16, dtype=torch.float64), torch.randperm(30)
    found, expected = layer(x[:, order]), layer(x)[:, order]
    has_order = layer.capabilities.relative_position or any_case.name == "primal"
    if any_case.name != "skyformer-learned":  # which knows an order only when it is causal
        has_order = has_order or getattr(getattr(layer, "core", None), "ordered", False)
    if any_case.name == "adaptive":  # which is softmax while it reads all tokens
        has_order = layer.core.plan.reach < 30
    if any_case.name == "window-linear":  # so is this one
        has_order = layer.core.window < 30
    if has_order:
        assert not torch.allclose(found, expected)
    else:
        torch.testing.assert_close(found, expected)


@every_core_mode
def test_equal_values_are_what_an_average_of_them_is(core_case):
    layer = core_case.build(dtype=torch.float64).eval()
    sums = core_case.name in SUMS or layer.core.__dict__.get("normalize") is False
    arguments = core_case.inputs(dtype=torch.float64)
    x, memory = arguments["x"], arguments.get("context", arguments["x"])
    flags = {k: arguments[k] for k in ("key_mask", "is_causal") if k in arguments}
    q, k = layer._split(layer.q_proj(x)), layer._split(layer.k_proj(memory))
    # absolute values: rectified features of two tokens always meet
    y = layer.core(q.abs(), k.abs(), torch.ones_like(k), **flags)
    if "key_mask" in flags and "context" not in arguments:
        y = y.transpose(1, 2)[flags["key_mask"]]
    if sums:
        assert not torch.allclose(y, torch.ones_like(y))
        return
    tolerance = LOW_RANK.get(core_case.name, 1e-8)
    torch.testing.assert_close(y, torch.ones_like(y), atol=tolerance, rtol=0)


@every_mode
def test_gradients_are_finite_for_large_tokens_over_several_chunks(mode_case):
    layer, arguments = mode_case.build().train(), mode_case.inputs(n=40, m=30)
    tokens = [name for name in ("x", "context") if name in arguments]
    for name in tokens:
        arguments[name] = (10 * arguments[name]).requires_grad_()
    y = mode_case.run(layer, arguments)
    y.square().mean().backward()
    assert y.isfinite().all()
    assert all(arguments[name].grad.isfinite().all() for name in tokens)
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


@masked_modes
def test_t18_gradients_match_finite_differences(mode_case):
    layer = mode_case.build(dtype=torch.float64)
    arguments = mode_case.inputs(n=5, m=4, dtype=torch.float64)
    wants_aux = layer.capabilities.aux_loss
    tokens = [name for name in ("x", "context") if name in arguments]
    parameters = dict(layer.named_parameters())

    def outputs(*tensors):
        given = dict(zip(tokens, tensors, strict=False))
        learned = dict(zip(parameters, tensors[len(tokens) :], strict=True))
        torch.manual_seed(2)
        result = torch.func.functional_call(
            layer, learned, (), {**arguments, **given, "return_aux": wants_aux}
        )
        return (result[0], result[1].loss) if wants_aux else result

    free = [arguments[name] for name in tokens] + [p.detach() for p in parameters.values()]
    leaves = [t.clone().requires_grad_() for t in free]
    assert torch.autograd.gradcheck(outputs, leaves, fast_mode=True)


def test_every_parameter_receives_a_gradient(any_case):
    layer = any_case.build().train()
    arguments = {"x": torch.randn(2, 6, 16)}
    if layer.capabilities.aux_loss:
        y, aux = layer(**arguments, return_aux=True)
        (y.square().sum() + aux.loss).backward()
    else:
        layer(**arguments).square().sum().backward()
    missing = [name for name, p in layer.named_parameters() if p.requires_grad and p.grad is None]
    assert missing == []


@every_mode
@each("n", [0, 1, 130])
def test_any_length_works(mode_case, n):
    arguments = mode_case.inputs(n=n, m=max(1, n // 2))
    layer = mode_case.build()
    arguments["x"].requires_grad_()
    y = mode_case.run(layer, arguments)
    assert y.shape == (2, n, 16)
    y.sum().backward()
    assert y.isfinite().all()
    assert arguments["x"].grad.isfinite().all()


@masked_modes
@each("n", [0, 6])
@each("training", [True, False])
def test_an_empty_batch_gives_an_empty_result(mode_case, n, training):
    y = mode_case.run(mode_case.build().train(training), mode_case.inputs(b=0, n=n))
    assert y.shape == (0, n, 16)
    y.sum().backward()


@each("m", [0, 1, 20])
def test_cross_attention_takes_a_memory_of_another_length(cross_case, m):
    layer = cross_case.build()
    y = layer(torch.randn(2, 6, 16), torch.randn(2, m, 16))
    assert y.shape == (2, 6, 16)
    assert y.isfinite().all()


def test_cross_attention_to_itself_is_self_attention(cross_case):
    layer, x = cross_case.build(dtype=torch.float64).eval(), torch.randn(2, 6, 16).double()
    torch.testing.assert_close(layer(x, x), layer(x))


@every_mode
def test_batch_mates_do_not_influence_each_other(mode_case):
    layer, arguments = mode_case.build().eval(), mode_case.inputs(b=3)
    together = mode_case.run(layer, arguments)
    for i in range(3):
        alone = {
            k: v[i : i + 1] if isinstance(v, torch.Tensor) else v for k, v in arguments.items()
        }
        torch.testing.assert_close(
            mode_case.run(layer, alone), together[i : i + 1], atol=1e-6, rtol=1e-5
        )


@masked_modes
def test_evaluation_is_deterministic(mode_case):
    layer, arguments = mode_case.build().eval(), mode_case.inputs()
    first = layer(**arguments)
    torch.manual_seed(77)
    assert torch.equal(layer(**arguments), first)


@masked_modes
def test_training_is_deterministic_where_the_capability_says_so(mode_case):
    layer, arguments = mode_case.build().train(), mode_case.inputs()
    first = layer(**arguments)
    torch.manual_seed(77)
    same = torch.equal(layer(**arguments), first)
    assert same or not mode_case.capabilities.deterministic
