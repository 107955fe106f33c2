import pytest
import torch

import primal_attention as pa
from primal_attention.tasks.series import SeriesConfig, SeriesNetwork
from primal_attention.tasks.series.model import evenly_spaced_means, patch_for


def model(**options):
    return SeriesNetwork(SeriesConfig(num_classes=4, num_channels=3, **({"dim": 16} | options)))


@pytest.mark.parametrize("stem", ["both", "conv", "patch"])
@pytest.mark.parametrize("patch", [1, 3, 16])
@pytest.mark.parametrize("attention", ["primal", "primal-dual", "softmax"])
def test_padding_never_leaks(stem, patch, attention):
    classifier = model(stem=stem, patch=patch, attention=attention).eval()
    x = torch.randn(2, 70, 3)
    keep = torch.arange(93) < torch.tensor([[70], [41]])
    padded = torch.full((2, 93, 3), float("nan"))
    padded[:, :70] = x
    padded[1, 41:] = float("nan")
    got = classifier(padded, key_mask=keep).logits
    alone = torch.cat([classifier(x[:1]).logits, classifier(x[1:, :41]).logits])
    torch.testing.assert_close(got, alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("stem", ["both", "conv", "patch"])
def test_every_parameter_learns_and_the_term_is_published(stem):
    classifier = model(stem=stem, patch=2)
    output = classifier(torch.randn(5, 33, 3))
    loss = output.logits.logsumexp(-1).sum() + pa.ksvd_loss(classifier)
    loss.backward()
    assert output.aux_loss is not None
    assert all(p.grad is not None for p in classifier.parameters())


def test_softmax_and_eval_have_no_term():
    assert model(attention="softmax")(torch.randn(1, 9, 3)).aux_loss is None
    assert model().eval()(torch.randn(1, 9, 3)).aux_loss is None


def test_only_the_last_block_is_primal():
    classifier = model(primal_layers="last:1")
    kinds = [type(block.attention).__name__ for block in classifier.blocks]
    assert kinds == ["SoftmaxAttention", "PrimalAttention"]


@pytest.mark.parametrize("length", [1, 2, 63, 896, 897, 1751])
def test_a_patch_leaves_at_most_so_many_tokens(length):
    patch = patch_for(length, 48)
    assert -(-length // patch) <= 48
    assert patch <= 8 or patch % 4 == 0


def test_segments_average_what_is_near_them():
    # a constant stays constant, a ramp keeps its order, padding counts for nothing
    keep = torch.arange(40) < torch.tensor([[40], [3], [17]])
    ramp = torch.arange(40.0)[None, :, None].expand(3, -1, 2).clone()
    ramp[~keep] = float("nan")
    means = evenly_spaced_means(ramp, keep, 6)
    assert (means.diff(dim=1) >= 0).all()
    assert (means[:, -1, 0] <= keep.sum(1) - 1).all()
    ones = evenly_spaced_means(torch.ones(3, 40, 2), keep, 6)
    torch.testing.assert_close(ones, torch.ones(3, 6, 2))


def test_a_series_without_steps_gives_zeros():
    keep = torch.zeros(1, 5, dtype=torch.bool)
    assert not evenly_spaced_means(torch.randn(1, 5, 2), keep, 3).any()


@pytest.mark.raw
def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="stem must be one of"):
        model(stem="fourier")
    with pytest.raises(ValueError, match="stem='both' needs dim of at least 3"):
        model(stem="both", dim=2, num_heads=1)
    with pytest.raises(ValueError, match="patch must be at least 1"):
        model(patch=0)
    with pytest.raises(ValueError, match="primal_layers"):
        model(primal_layers="first:1")
    with pytest.raises(ValueError, match="move the channels to the last axis"):
        model()(torch.randn(2, 3, 30))
