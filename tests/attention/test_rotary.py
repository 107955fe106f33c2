"""Rotary positions in the layers that compare tokens."""

import pytest
import torch

from primal_attention.attention import (
    Rotary,
    create_attention,
    list_attentions,
)

TAKES = list_attentions(rotary=True)
STATEFUL = [name for name in TAKES if name in list_attentions(stateful=True)]


def angles(n: int, start: int = 0, p: int = 8) -> Rotary:
    at = torch.arange(start, start + n)[None, :, None] / 10 ** torch.linspace(0, 2, p // 2)
    return Rotary(at.cos().repeat(1, 1, 2), at.sin().repeat(1, 1, 2))


def test_turned_inner_products_depend_on_the_distance_only():
    q, k = torch.randn(2, 1, 3, 1, 8, dtype=torch.float64)
    near, far = angles(3, start=2), angles(3, start=40)
    q, k = q.expand(-1, -1, 3, -1), k.expand(-1, -1, 3, -1)
    scores = [r.turn(q) @ r.turn(k).mT for r in (near, far)]
    torch.testing.assert_close(*scores, atol=1e-5, rtol=1e-5)
    assert torch.equal(angles(1).turn(q[:, :, :1]), q[:, :, :1])


def test_features_beyond_the_angles_pass():
    x = torch.randn(2, 3, 5, 8)
    y = angles(5, p=4).turn(x)
    assert torch.equal(y[..., 4:], x[..., 4:])
    assert not torch.equal(y[:, :, 1:, :4], x[:, :, 1:, :4])


@pytest.mark.parametrize("name", TAKES)
def test_positions_matter_and_padding_in_front_does_not(name):
    layer = create_attention(name, 16, 2).eval()
    x, causal = torch.randn(1, 12, 16), name in STATEFUL
    rotary = angles(12)
    y = layer(x, is_causal=causal, rotary=rotary)
    assert not torch.allclose(y, layer(x, is_causal=causal), atol=1e-5)
    late = torch.cat([torch.full((1, 3, 16), torch.nan), x], dim=1)
    keep = torch.arange(15)[None] >= 3
    slots = (keep.cumsum(1) - 1).clamp_min(0)
    got = layer(late, key_mask=keep, is_causal=causal, rotary=rotary.take(slots))
    torch.testing.assert_close(got[:, 3:], y, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", STATEFUL)
def test_steps_with_positions_equal_the_whole(name):
    layer = create_attention(name, 16, 2).eval()
    x, rotary = torch.randn(2, 9, 16), angles(9)
    state, parts = layer.init_state(2), []
    for start, stop in ((0, 5), (5, 6), (6, 9)):
        part = Rotary(*(t[:, start:stop] for t in rotary))
        y, state = layer.step(x[:, start:stop], state, rotary=part)
        parts.append(y)
    whole = layer(x, is_causal=True, rotary=rotary)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-4)


def test_what_positions_cannot_mean_is_refused():
    x = torch.randn(1, 4, 16)
    for name in ("softmax", "primal-dual"):
        with pytest.raises(ValueError, match="share no positions"):
            create_attention(name, 16, 2)(x, x, rotary=angles(4))
    assert set(list_attentions(rotary=False)) == {"primal", "primal-relative", "primal-static"}
    for name in ("primal", "primal-static"):
        with pytest.raises(ValueError, match=r"cannot turn queries.*primal-dual"):
            create_attention(name, 16, 2)(x, is_causal=True, rotary=angles(4))
