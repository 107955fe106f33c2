import pytest
import torch

from primal_attention.analysis.attention_maps import (
    attention_maps,
    map_spectra,
    mass_at_rank,
    rank_for_mass,
)
from primal_attention.attention import Rotary, create_attention


def test_maps_are_the_softmax_matrices_of_the_real_tokens():
    layer = create_attention("softmax", 8, 2)
    x, keep = torch.randn(2, 6, 8), torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]]).bool()
    maps = attention_maps(layer, {"x": x, "key_mask": keep})["core"]
    assert [m.shape for m in maps] == [(2, 6, 6), (2, 4, 4)]
    q, k = (p(x[1, 2:]).unflatten(-1, (2, 4)).transpose(0, 1) for p in (layer.q_proj, layer.k_proj))
    torch.testing.assert_close(maps[1], (q @ k.mT / 2).softmax(-1))
    assert len(attention_maps(layer, {"x": x}, sequences=1)["core"]) == 1
    assert layer.training
    assert not layer._forward_pre_hooks


def test_causal_maps_are_triangular():
    class Causal(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = create_attention("linear", 8, 2)

        def forward(self, x):
            return self.layer(x, is_causal=True)

    (one,) = attention_maps(Causal(), torch.randn(1, 5, 8))["layer.core"]
    torch.testing.assert_close(one, one.tril())
    torch.testing.assert_close(one.sum(-1), torch.ones(2, 5))


def test_rotary_positions_are_part_of_the_matrix():
    layer, x = create_attention("softmax", 8, 2), torch.randn(1, 6, 8)
    angle = torch.arange(6.0)[None, :, None] * torch.tensor([1.0, 0.1])
    rotary = Rotary(angle.cos().repeat(1, 1, 2), angle.sin().repeat(1, 1, 2))
    (matrix,) = attention_maps(layer, {"x": x, "rotary": rotary})["core"]
    v = layer.v_proj(x[0]).unflatten(-1, (2, 4)).transpose(0, 1)
    y = layer.out_proj((matrix @ v).transpose(0, 1).flatten(1))
    torch.testing.assert_close(y[None], layer(x, rotary=rotary))


def test_a_mask_on_the_context_cuts_columns_and_keeps_all_rows():
    layer, keep = create_attention("softmax", 8, 2), torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0]])
    batch = {"x": torch.randn(2, 4, 8), "context": torch.randn(2, 4, 8), "key_mask": keep.bool()}
    maps = attention_maps(layer, batch)["core"]
    assert [m.shape for m in maps] == [(2, 4, 3), (2, 4, 0)]
    assert map_spectra({"core": maps})["core"].plain[1].abs().max() == 0


def test_a_constant_matrix_has_rank_one_and_is_zero_when_centred():
    spectrum = map_spectra({"a": [torch.full((2, 4, 4), 0.25), torch.full((2, 3, 3), 1 / 3)]})["a"]
    assert spectrum.plain.shape == (2, 2, 4)
    torch.testing.assert_close(spectrum.ranks(), torch.ones(2))
    assert spectrum.centred.abs().max() < 1e-6
    eye = map_spectra({"a": [torch.eye(4)[None]]})["a"]
    torch.testing.assert_close(eye.ranks(), torch.tensor([4.0]))
    torch.testing.assert_close(eye.ranks(centred=True), torch.tensor([3.0]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("mass", "rank"), [(0.5, 1), (0.6, 2), (0.9, 3), (1.0, 3)])
def test_mass_and_rank_are_inverse(mass, rank):
    sigma = torch.tensor([5.0, 3.0, 2.0])
    assert rank_for_mass(sigma, mass) == rank
    assert mass_at_rank(sigma, rank) >= mass
    assert rank == 1 or mass_at_rank(sigma, rank - 1) < mass
