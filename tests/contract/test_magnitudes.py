"""Finite tokens give finite outputs, gradients and terms, up to the promised magnitude."""

from pathlib import Path

import torch
from tests.contract.cases import every_mode, masked_modes
from tests.house.rows import each

from primal_attention.attention import attention_entry, list_attentions

FACTORS = [1e-38, 1e-30, 1e-20, 1e-12, 1e-6, 30.0, 300.0, 1e4, 1e6]


def _equal(x, factor):
    return (factor * x[:1]).expand_as(x)


def _alternating(x, factor):
    return torch.where(torch.arange(len(x))[:, None] % 2 == 0, factor * x, x)


def _single(x, factor):
    return torch.where(torch.arange(len(x))[:, None] == 2, factor * x, x)


KINDS = {"all": torch.mul, "single": _single, "alternating": _alternating, "equal": _equal}
"""How tokens of an ordinary sequence become small or large."""


def _sequences(case, dtype, seed):
    """Return the arguments of one batch with a sequence for every kind and factor, and its names.

    Sequences of a batch do not influence each other, which other tests of the contract check.
    """
    able = case.capabilities
    limit = able.max_magnitude_float16 if dtype == torch.float16 else able.max_magnitude
    factors = [f for f in FACTORS if f < limit / 4] + [limit / 4]  # tokens are up to 4 before
    names = [f"{kind} × {factor:g}" for kind in KINDS for factor in factors] + ["zero"]
    arguments = case.inputs(b=len(names))
    generator = torch.Generator().manual_seed(seed)
    for name in ("x", "context"):
        if name in arguments:
            size = arguments[name].shape
            x = torch.randn(size, generator=generator, dtype=torch.float64).clamp(-4, 4)
            rows = [change(x[0], f) for change in KINDS.values() for f in factors]
            rows.append(torch.zeros_like(x[0]))
            arguments[name] = torch.stack(rows).to(dtype).requires_grad_()
    if "key_mask" in arguments:
        arguments["key_mask"][:] = arguments["key_mask"][-1]
    return arguments, names


@every_mode
@each("dtype, seed", [(torch.float32, 1), (torch.float16, 1)])
def test_finite_tokens_give_finite_outputs_and_gradients(mode_case, dtype, seed):
    _stays_finite(mode_case, dtype, seed)


@masked_modes
def test_finite_tokens_give_finite_outputs_and_gradients_in_bfloat16(mode_case):
    _stays_finite(mode_case, torch.bfloat16, seed=2)


def _stays_finite(mode_case, dtype, seed):
    # heads of 4: all features of a token are negative in one of sixteen
    layer = mode_case.build(num_heads=4, seed=seed).to(dtype).train()
    arguments, names = _sequences(mode_case, dtype, seed)
    has_loss = layer.capabilities.aux_loss
    y = mode_case.run(layer, {**arguments, "return_aux": has_loss})
    y, loss = (y[0], y[1].loss) if has_loss else (y, y.new_zeros(()))
    assert _not_finite(y, names) == []
    assert loss.isfinite()
    (y.float().mean(dim=(1, 2)).sum() + loss.float()).backward()
    for name in ("x", "context"):
        if name in arguments and arguments[name].grad is not None:
            assert _not_finite(arguments[name].grad, names) == []
    for name, parameter in layer.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finite_tokens_decode_to_finite_outputs(stateful_case, dtype):
    layer = stateful_case.build(num_heads=4).to(dtype).eval()
    arguments, names = _sequences(stateful_case, dtype, 1)
    x, state = arguments["x"].detach(), layer.init_state(len(names))
    for piece in (*x[:, :4].split(1, dim=1), x[:, 4:]):
        y, state = layer.step(piece, state)
        assert _not_finite(y, names) == []


def test_the_guide_lists_the_promised_magnitudes():
    promised = {}
    for name in list_attentions():
        able = attention_entry(name).capabilities
        key = f"{able.max_magnitude:g}", f"{able.max_magnitude_float16:g}"
        promised.setdefault(key, []).append(f"`{name}`")
    guide = Path(__file__).parents[2] / "docs" / "guides" / "attention.md"
    lines = guide.read_text("utf-8").splitlines()
    for (limit, half), names in promised.items():
        assert f"| {limit} | {half} | {', '.join(names)} |" in lines


def _not_finite(rows, names):
    return [name for name, row in zip(names, rows, strict=True) if not row.isfinite().all()]
