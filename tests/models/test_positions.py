"""Positions: the published formulas, number by number."""

import math

import pytest
import torch
from tests.house.rows import each

from primal_attention.models import CausalDecoder, DecoderConfig
from primal_attention.models.positions import rotary_positions, sinusoidal_positions

AT = [0, 1, 2, 17, 600]


@each("period", [10_000.0, 50.0])
@each("dim", [2, 6, 7])
def test_sinusoidal_positions_are_their_formula(dim, period):
    half = math.ceil(dim / 2)
    rates = [period ** (-j / half) for j in range(half)]
    rows = [[math.sin(t * r) for r in rates] + [math.cos(t * r) for r in rates] for t in AT]
    got = sinusoidal_positions(torch.tensor(AT), dim, period=period)
    torch.testing.assert_close(got, torch.tensor(rows)[:, :dim], rtol=0, atol=1e-4)


@each("period", [10_000.0, 50.0])
@each("head_dim", [2, 6, 7])
def test_rotary_positions_are_their_formula(head_dim, period):
    half = head_dim // 2
    angles = torch.tensor([[t * period ** (-j / half) for j in range(half)] * 2 for t in AT])
    got = rotary_positions(torch.tensor([AT]), head_dim, period=period)
    torch.testing.assert_close(got.cos[0], angles.cos(), rtol=0, atol=1e-4)
    torch.testing.assert_close(got.sin[0], angles.sin(), rtol=0, atol=1e-4)
    # feature j turns with feature j + half
    x = torch.randn(1, 1, len(AT), head_dim)
    turned, angles = got.turn(x)[0, 0], angles[:, :half]
    pair = torch.complex(x[0, 0, :, :half], x[0, 0, :, half : 2 * half])
    pair = pair * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(turned[:, :half], pair.real, rtol=0, atol=1e-3)
    torch.testing.assert_close(turned[:, half : 2 * half], pair.imag, rtol=0, atol=1e-3)
    assert torch.equal(turned[:, 2 * half :], x[0, 0, :, 2 * half :])


def test_the_default_period_is_ten_thousand():
    # the slowest of two waves has the rate period^(-1/2)
    at = torch.tensor([100])
    wave, turn = sinusoidal_positions(at, 4), rotary_positions(at[None], 4)
    assert wave[0, 1].item() == pytest.approx(math.sin(1.0), abs=1e-5)
    assert turn.cos[0, 0, 1].item() == pytest.approx(math.cos(1.0), abs=1e-5)


@each("positions", ["sinusoidal", "rotary"])
def test_a_decoder_uses_the_positions_of_its_formula(positions):
    config = DecoderConfig(
        vocab_size=5, dim=8, num_heads=2, attention="softmax", positions=positions, dropout=0.0
    )
    model, x = CausalDecoder(config).eval(), torch.randint(5, (1, 6))
    at = torch.arange(6)[None]
    stream, turn = 8**0.5 * model.embed.weight[x], None
    if positions == "sinusoidal":
        stream = stream + sinusoidal_positions(at, 8)
    else:
        turn = rotary_positions(at, 4)
    for block in model.blocks:
        stream = block(stream, is_causal=True, rotary=turn)
    torch.testing.assert_close(model(x).logits, model.norm(stream) @ model.embed.weight.T)
