"""Landmarks skip padding, and clusters find their centres."""

import torch
from tests.functional.points import F64, data_set, draw
from tests.house.rows import each
from torch.testing import assert_close

from primal_attention.functional import naive_nystrom as naive
from primal_attention.functional.landmarks import kmeans_landmarks, segment_means, strided_landmarks
from primal_attention.functional.nystrom import (
    nystrom_error,
)


@each("num", [1, 4, 7, 30])
def test_segment_means_and_strided_tokens_skip_padding_on_any_side(num):
    (x,) = draw(11)
    keep = torch.rand(2, 11) > 0.4
    for pick in (segment_means, strided_landmarks):
        got = pick(x, num, keep)
        for i in range(2):
            assert_close(got[i : i + 1], pick(x[i : i + 1, :, keep[i]], num))
    got = segment_means(x, num, keep)
    for i in range(2):
        assert_close(got[i, 1], naive.segment_means(x[i, 1, keep[i]], num))


@each("pick", [segment_means, strided_landmarks])
def test_landmarks_of_an_empty_sequence_are_zero(pick):
    (x,) = draw(6)
    assert (pick(x, 3, torch.zeros(2, 6, dtype=torch.bool)) == 0).all()
    assert (pick(x[:, :, :0], 3) == 0).all()


def test_kmeans_beats_strided_landmarks_on_clusters():
    # spec 02 §8.3: 0.032 against 0.231 at d = 128
    q, k = data_set("clusters")
    z = torch.cat([strided_landmarks(q, 64), strided_landmarks(k, 64)], dim=2)
    better = kmeans_landmarks(torch.cat([q, k], dim=2), z)
    assert nystrom_error(q, k, better) < nystrom_error(q, k, z) / 2


def test_kmeans_is_a_fixed_point_on_separated_clusters_and_skips_padding():
    centres = torch.tensor([[-5.0, 0.0], [5.0, 0.0]], **F64)
    x = centres.repeat_interleave(3, 0)[None, None] + 0.1 * torch.randn(1, 1, 6, 2, **F64)
    means = torch.stack([x[0, 0, :3].mean(0), x[0, 0, 3:].mean(0)])[None, None]
    start = x[:, :, [0, 3]]
    assert_close(kmeans_landmarks(x, start), means)
    dirty = torch.cat([x, torch.full((1, 1, 2, 2), 7.0, **F64)], dim=2)
    keep = torch.arange(8)[None] < 6
    assert_close(kmeans_landmarks(dirty, start, keep), means)


def test_kmeans_gradient_flows_through_the_means():
    (x,) = draw(6)
    x.requires_grad_()
    y = kmeans_landmarks(x, x[:, :, :2].detach())
    (grad,) = torch.autograd.grad(y.sum(), x)
    # every token belongs to one cluster and shares its mean with the others in it
    assert_close(grad.sum(2), torch.full((2, 3, 5), 2.0, **F64))
