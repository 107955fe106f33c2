"""Pairs of sequences through one encoder."""

import pytest
import torch

import primal_attention as pa
from primal_attention.models import DualTowerClassifier, EncoderConfig


def model(**changes) -> DualTowerClassifier:
    torch.manual_seed(0)
    base = {"num_classes": 2, "vocab_size": 9, "dim": 16, "num_heads": 2, "dropout": 0.0}
    return DualTowerClassifier(EncoderConfig(**{**base, **changes})).eval()


def test_head_sees_both_vectors_their_product_and_difference():
    net = model()
    x, other = torch.randint(9, (3, 7)), torch.randint(9, (3, 7))
    a, b = net.encode(x).hidden.mean(1), net.encode(other).hidden.mean(1)
    expected = net.head(torch.cat([a, b, a * b, a - b], -1))
    torch.testing.assert_close(net(x, other).logits, expected)


@pytest.mark.parametrize("name", ["softmax", "primal", "linear"])
def test_lengths_and_padding_of_either_side_do_not_matter(name):
    net = model(attention=name)
    x, other = torch.randint(9, (3, 7)), torch.randint(9, (3, 4))
    expected = net(x, other).logits
    pad = torch.full((3, 5), -1)
    keep = torch.arange(9)[None].expand(3, -1) < 4
    found = net(x, torch.cat([other, pad], 1), other_mask=keep).logits
    torch.testing.assert_close(found, expected)
    keep = (torch.arange(12)[None] < 7).expand(3, -1)
    torch.testing.assert_close(
        net(torch.cat([x, pad], 1), other, key_mask=keep).logits, expected, atol=1e-5, rtol=1e-4
    )


def test_features_work_like_token_ids():
    net = model(num_features=3, vocab_size=None, head_dim=8)
    x, other = torch.randn(2, 5, 3), torch.randn(2, 3, 3)
    nan = torch.full((2, 2, 3), float("nan"))
    keep = torch.arange(5)[None].expand(2, -1) < 3
    found = net(x, torch.cat([other, nan], 1), other_mask=keep).logits
    torch.testing.assert_close(found, net(x, other).logits)


def test_term_is_the_mean_over_both_towers():
    net = model().train()
    x, other = torch.randint(9, (3, 7)), torch.randint(9, (3, 7))
    both = net(x, other).aux_loss
    torch.testing.assert_close(both, pa.ksvd_loss(net))
    single = [net.encode(s).aux_loss for s in (x, other)]
    torch.testing.assert_close(both, torch.stack(single).mean())
