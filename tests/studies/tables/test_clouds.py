"""The study of moving clouds: its data, its model, its numbers."""

import pytest
import torch

from primal_attention.tasks.study import find_study, run_study
from primal_studies.tables.cloud_model import CloudBlock, CloudTransformer
from primal_studies.tables.clouds import (
    CloudOptions,
    _measure,
    make_instances,
    straight_path,
)


def test_instances_are_standardised_with_the_training_part_and_keep_one_class_each():
    x, y, x_test, y_test = make_instances(3, 4.0)
    assert x.shape == x_test.shape == (45, 20, 2)
    torch.testing.assert_close(x.flatten(0, 1).mean(0), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.flatten(0, 1).std(0), torch.ones(2), atol=1e-5, rtol=0)
    means = torch.stack([x[y == c].mean((0, 1)) for c in range(3)])
    for instance, label in zip(x_test, y_test, strict=True):
        # 20 tokens of far clouds leave no doubt
        assert (instance.mean(0) - means).norm(dim=1).argmin() == label


# spec 08, section 3.2: the coded efficiency of straight paths
@pytest.mark.parametrize(("count", "coded"), [(50, 0.2), (200, 0.101), (450, 0.067), (900, 0.047)])
def test_straight_optimal_paths_have_efficiency_one_and_a_small_coded_one(count, coded):
    found = _measure(*straight_path(count))
    assert found["efficiency"] == pytest.approx(1, abs=1e-12)
    assert found["optimality"] == pytest.approx(1, abs=1e-9)
    assert found["matching"] == found["class_matching"] == 1
    assert found["root_efficiency"] == pytest.approx(coded, abs=0.0015)
    assert found["root_efficiency"] == pytest.approx(found["root_ceiling"], rel=1e-9)


def test_published_norms_leave_two_vectors_only():
    # defect 8: over two features a norm returns ±(1, −1) whatever the input
    block = CloudBlock(2, "published").eval()
    x = 5 * torch.randn(1, 200, 2)
    moved = block.first(block.attention(x))[0]
    # only where both features are nearly equal the small constant of the norm shows
    assert ((moved.abs() - 1).abs() < 0.05).float().mean() > 0.95
    free = CloudBlock(2, "no norm").eval()
    assert ((free.first(free.attention(x))[0].abs() - 1).abs() < 0.05).float().mean() < 0.5


@pytest.mark.parametrize("variant", ["published", "no norm", "frozen head", "tied values"])
def test_tokens_of_an_instance_do_not_see_other_instances(variant):
    model = CloudTransformer(2, variant=variant).eval()
    x = torch.randn(3, 20, 2)
    torch.testing.assert_close(model(x)[:1], model(x[:1]))
    order = torch.randperm(20)
    torch.testing.assert_close(model(x[:, order]), model(x)[:, order])


def test_unknown_variants_and_options_are_explained():
    with pytest.raises(ValueError, match="variant must be one of"):
        CloudTransformer(2, variant="other")
    with pytest.raises(ValueError, match="clouds must be 2, 3 or both"):
        CloudOptions(clouds=(4,))


def test_the_study_writes_both_kinds_of_metrics_and_a_picture(tmp_path):
    options = CloudOptions(clouds=(2,), separations=(4,), seeds=(0,), epochs=3)
    rows = run_study(find_study("ot-clouds", "repro"), options, out=tmp_path, report=str)
    trained = [row for row in rows if row["kind"] == "trained"]
    assert [row["variant"] for row in trained] == [
        "published",
        "no norm",
        "frozen head",
        "tied values",
    ]
    for row in trained:
        assert 0 < row["efficiency"] <= 1
        assert row["root_efficiency"] <= row["root_ceiling"] + 1e-9
        assert row["gap"] >= -1e-9 * row["cost"]
        assert 1 <= row["best_epoch"] <= 3
        assert row["curve"][0][0] == 1
    text = (tmp_path / "metrics.md").read_text()
    assert "optimality, coded" in text
    assert "2 clouds, tied values" in text
    assert "0.047" in (tmp_path / "ceiling.md").read_text()
    assert (tmp_path / "picture.png").stat().st_size > 1000
