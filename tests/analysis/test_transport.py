"""Metrics of maps and paths, the recorder, and the analysis of attention layers."""

import json
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from primal_attention.analysis import analysis_entry
from primal_attention.analysis.transport.maps import (
    TransportRecorder,
    layer_transport,
    map_metrics,
    monge_gap,
    path_metrics,
    root_metrics,
)
from primal_attention.attention import TiedSoftmaxAttention, create_attention
from primal_attention.functional.naive_transport import best_permutation
from primal_attention.functional.transport import cost_matrix, gaussian_map
from primal_attention.models import EncoderClassifier, EncoderConfig

F64 = torch.float64


def cloud(n=60, d=3):
    return torch.randn(n, d, dtype=F64)


def classes(n=60, k=3):
    return torch.arange(n) % k


def rotation(d=3):
    return torch.linalg.qr(torch.randn(d, d, dtype=F64)).Q


def wandering(epochs=5, n=60):
    """Return a path with detours."""
    return torch.randn(epochs, n, 3, dtype=F64).cumsum(0)


# one map


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("scope", ["pooled", "class"])
def test_numbers_are_those_of_the_definition(scope, p):
    x, y, labels = cloud(12), cloud(12), classes(12, 2)
    found = map_metrics(x, y, labels, scope=scope, p=p)
    if scope == "class":  # six points a class: all permutations
        best, matched = 0.0, 0
        for group in (labels == 0, labels == 1):
            cost = cost_matrix(x[group], y[group], p)
            order = best_permutation(cost)
            best += float(cost[torch.arange(6), order].sum())
            matched += int((order == torch.arange(6)).sum())
        assert found.optimal == pytest.approx(best / 12)
        assert found.matching == pytest.approx(matched / 12)
    cost = float(torch.linalg.vector_norm(x - y, dim=1).pow(p).mean())
    assert found.cost == pytest.approx(cost)
    assert found.gap == pytest.approx(cost - found.optimal)
    assert found.optimality == pytest.approx((found.optimal / cost) ** (1 / p))
    assert found.solver == "exact"
    if scope == "pooled":
        assert found.gap == pytest.approx(float(monge_gap(x, y, p=p)))


def test_the_optimum_within_classes_costs_more_than_the_pooled_one():
    x, y, labels = cloud(), cloud(), classes()
    pooled, within = (map_metrics(x, y, labels, scope=s) for s in ("pooled", "class"))
    assert pooled.optimal < within.optimal < pooled.cost == within.cost


# O4
def test_points_without_a_gap_are_matched_with_their_own_image():
    x = cloud(200)
    root = torch.randn(3, 3, dtype=F64)
    mean, covariance = torch.randn(3, dtype=F64), root @ root.T + torch.eye(3)
    carry = gaussian_map(mean, covariance, -mean, torch.eye(3, dtype=F64))
    for y in (x + 1, x @ covariance, x**3, carry(x)):
        found = map_metrics(x, y)
        assert found.gap <= 1e-9 * found.cost
        assert found.matching == 1
        assert found.optimality == 1
    turned = map_metrics(x, -x)
    assert turned.gap > 0
    assert turned.matching < 0.1


def test_a_map_to_one_point_is_optimal_and_its_spread_says_why():
    x = cloud()
    found = map_metrics(x, torch.ones_like(x))
    assert found.optimality == pytest.approx(1)
    assert (found.matching, found.spread) == (1, 0)
    assert map_metrics(x, 2 * x).spread == pytest.approx(2)
    still = map_metrics(x, x)
    assert (still.cost, still.optimality, still.matching) == (0, 1, 1)


def test_large_clouds_use_the_debiased_solver(monkeypatch):
    from primal_attention.analysis.transport import metrics

    monkeypatch.setattr(metrics, "EXACT_UP_TO", 50)
    x = cloud(80, 2)
    y = 1.5 * x + 1
    found, exact = map_metrics(x, y), map_metrics(x, y, solver="exact")
    assert (found.solver, exact.solver) == ("debiased", "exact")
    assert abs(found.optimal - exact.optimal) < 0.02 * exact.cost
    assert found.matching > 0.5
    assert map_metrics(x, y, classes(80), scope="class").solver == "exact"


# paths


# O6
def test_a_straight_optimal_path_has_optimality_and_efficiency_one():
    x, t = cloud(), torch.linspace(0, 1, 6, dtype=F64)[:, None, None]
    path = x + t * (2 * x + 1 - x)
    for row in path_metrics(path):
        assert abs(row.optimality - 1) <= 1e-12
        assert abs(row.efficiency - 1) <= 1e-12
        assert row.step_gap == 0
        assert row.matching == 1


# O7
def test_efficiency_ignores_stops_on_a_straight_path_and_falls_with_a_detour():
    x, y = cloud(), cloud()
    direct = path_metrics(torch.stack([x, y]))[-1]
    stops = path_metrics(torch.stack([x, 0.25 * y + 0.75 * x, 0.5 * (x + y), y]))[-1]
    assert stops.efficiency == pytest.approx(direct.efficiency, abs=1e-12)
    detour = path_metrics(torch.stack([x, 0.5 * (x + y) + 1, y]))[-1]
    assert detour.efficiency < direct.efficiency - 0.01
    back = path_metrics(torch.stack([x, y, 0.5 * (x + y)]))[-1]
    assert back.efficiency == pytest.approx(1 / 3)


# O8
@pytest.mark.parametrize("scope", ["pooled", "class"])
def test_numbers_ignore_order_place_and_direction_and_shares_ignore_scale(scope):
    path, labels = wandering(), classes()
    order = torch.randperm(60)
    changes = {
        "order": (path[:, order], labels[order]),
        "place": (path + torch.randn(3, dtype=F64), labels),
        "direction": (path @ rotation(), labels),
    }
    base = path_metrics(path, labels, scope=scope)
    for name, (moved, names) in changes.items():
        for a, b in zip(base, path_metrics(moved, names, scope=scope), strict=True):
            assert a == pytest.approx(b, rel=1e-9, abs=1e-9), name
    for a, b in zip(base, path_metrics(7 * path, labels, scope=scope), strict=True):
        for share in ("optimality", "efficiency", "matching", "step_optimality"):
            assert getattr(a, share) == pytest.approx(getattr(b, share), rel=1e-9)
        assert b.cost == pytest.approx(49 * a.cost)
        assert b.length == pytest.approx(7 * a.length)


def test_regret_falls_to_zero_and_steps_are_maps_between_epochs():
    path = wandering(4)
    rows = path_metrics(path, epochs=[0, 5, 10, 15])
    assert [row.epoch for row in rows] == [0, 5, 10, 15]
    assert rows[-1].regret == 0
    whole = map_metrics(path[0], path[-1])
    assert rows[0].regret == pytest.approx(whole.optimal**0.5)
    assert rows[-1][1:6] == whole[:5]
    step = map_metrics(path[1], path[2])
    assert (rows[2].step_gap, rows[2].step_optimality) == (step.gap, step.optimality)
    assert (rows[0].cost, rows[0].length, rows[0].efficiency) == (0, 0, 1)


@pytest.mark.parametrize(("n", "coded"), [(50, 0.200), (200, 0.101), (450, 0.067), (900, 0.047)])
def test_coded_efficiency_of_a_perfect_motion_falls_with_the_number_of_points(n, coded):
    # section 3.2: two classes, straight and optimal
    torch.manual_seed(0)
    start, labels = cloud(n, 2), classes(n, 2)
    end = start + torch.where(labels == 0, 3.0, -3.0)[:, None] * torch.tensor([1.0, 0.0])
    end = start + (end - start) * (1 + 0.02 * torch.randn(n, 1, dtype=F64))
    path = torch.stack([start, (start + end) / 2, end])
    found = root_metrics(path, labels)
    assert found.root_efficiency == pytest.approx(coded, abs=2e-3)
    straight = torch.linalg.vector_norm(end - start, dim=1).sum()
    assert found.total_length == pytest.approx(float(straight))
    assert path_metrics(path[[0, -1]], labels, scope="class")[-1].efficiency == pytest.approx(1)


def test_coded_numbers_are_roots_summed_over_classes():
    path, labels = wandering(3, 12), classes(12, 2)
    found = root_metrics(path, labels)
    distance = transport = 0.0
    for c in (0, 1):
        a, b = path[0, labels == c], path[-1, labels == c]
        distance += math.sqrt(float((a - b).square().sum()))
        cost = cost_matrix(a, b)
        transport += math.sqrt(float(cost[torch.arange(6), best_permutation(cost)].sum()))
    length = sum(float((path[e + 1, i] - path[e, i]).norm()) for e in range(2) for i in range(12))
    assert found.root_distance == pytest.approx(distance)
    assert found.root_transport == pytest.approx(transport)
    assert found.root_gap == pytest.approx(distance - transport)
    assert found.root_optimality == pytest.approx(transport / distance)
    assert found.root_efficiency == pytest.approx(distance / length)


@pytest.mark.raw
def test_wrong_arguments_are_refused():
    x = cloud()
    with pytest.raises(ValueError, match="scope='class' needs labels"):
        map_metrics(x, x, scope="class")
    with pytest.raises(ValueError, match="scope must be 'pooled' or 'class'"):
        map_metrics(x, x, scope="classes")
    with pytest.raises(ValueError, match="solver must be"):
        map_metrics(x, x, solver="plan")
    with pytest.raises(ValueError, match="one shape"):
        map_metrics(x, x[:, :2])
    with pytest.raises(ValueError, match="no points"):
        map_metrics(x[:0], x[:0])


# the recorder


def model_and_batch():
    config = EncoderConfig(num_classes=2, num_features=3, dim=8, num_heads=2, attention="softmax")
    keep = torch.arange(9) < torch.tensor([[9], [5], [9], [9]])
    return EncoderClassifier(config), {"x": torch.randn(4, 9, 3), "key_mask": keep}


def disturb(module, size=0.1):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size * torch.randn_like(parameter))


def parts_of_block(model, batch):
    """Return input, attention output and output of the first block at real tokens."""
    seen = {}
    block = model.blocks[0]
    hooks = [
        block.register_forward_hook(
            lambda m, args, kwargs, y: seen.update(
                x=args[0], y=y[0] if isinstance(y, tuple) else y
            ),
            with_kwargs=True,
        ),
        block.attention.register_forward_hook(
            lambda m, args, y: seen.update(a=y[0] if isinstance(y, tuple) else y)
        ),
    ]
    with torch.no_grad():
        model.eval()(**batch)
    for hook in hooks:
        hook.remove()
    model.train()
    keep = batch["key_mask"]
    return seen["x"][keep], seen["a"][keep], seen["y"][keep]


@pytest.mark.parametrize("what", ["attn", "block", "residual"])
def test_what_moves_is_attention_block_or_their_sum_at_real_tokens(what):
    model, batch = model_and_batch()
    start = parts_of_block(model, batch)[0]
    recorder = TransportRecorder(model.blocks[0], model, batch, what=what)
    disturb(model)
    recorder.record()
    x, a, y = parts_of_block(model, batch)
    assert recorder.positions.shape == (2, 32, 8)
    # the start is that before training
    assert_close(recorder.positions[0], start)
    assert not torch.allclose(x, start)
    assert_close(recorder.positions[1], {"attn": a, "block": y, "residual": x + a}[what])
    assert model.training
    assert not model.blocks[0]._forward_pre_hooks


def test_epochs_are_recorded_at_the_stride_and_at_the_end():
    model, batch = model_and_batch()
    with TransportRecorder(model.blocks[0], model, batch, every=3) as recorder:
        for _ in range(7):
            disturb(model)
            recorder.record()
    assert recorder.epochs == [0, 3, 6, 7]
    assert len(recorder.positions) == 4
    with TransportRecorder(model.blocks[0], model, batch) as again:
        again.record()
    assert again.epochs == [0, 1]
    failed = TransportRecorder(model.blocks[0], model, batch, every=2)
    failed.record()
    with pytest.raises(KeyError), failed:
        raise KeyError
    assert failed.epochs == [0]


def test_fit_calls_the_recorder_after_every_epoch():
    pytest.importorskip("accelerate")
    from primal_attention.training import TrainingConfig, fit

    model, batch = model_and_batch()
    data = [
        {"x": x, "key_mask": keep, "labels": torch.tensor(i % 2)}
        for i, (x, keep) in enumerate(zip(batch["x"], batch["key_mask"], strict=True))
    ]
    data = [{"x": item["x"], "labels": item["labels"]} for item in data]
    recorder = TransportRecorder(model.blocks[0], model, batch)
    fit(model, data, config=TrainingConfig(epochs=3, batch_size=2), on_epoch=recorder)
    assert recorder.epochs == [0, 1, 2, 3]
    assert recorder.metrics().rows[-1].cost > 0


def test_the_sample_keeps_the_shares_of_classes_and_the_points():
    layer = nn.Identity()
    x = torch.randn(100, 4)
    labels = (torch.arange(100) % 10 == 0).long()
    recorder = TransportRecorder(layer, layer, x, labels=labels, max_points=50)
    assert recorder.labels.bincount().tolist() == [45, 5]
    assert_close(recorder.positions[0], x[recorder.points[:, 0]])
    recorder.record()
    assert_close(recorder.positions[1], recorder.positions[0])
    again = TransportRecorder(layer, layer, x, labels=labels, max_points=50)
    other = TransportRecorder(layer, layer, x, labels=labels, max_points=50, seed=1)
    assert again.points.equal(recorder.points)
    assert not other.points.equal(recorder.points)
    assert len(recorder.points.unique(dim=0)) == 50


def test_labels_of_sequences_are_those_of_their_tokens():
    model, batch = model_and_batch()
    labels = torch.tensor([3, 1, 3, 0])
    recorder = TransportRecorder(model.blocks[0], model, batch, labels=labels)
    assert recorder.labels.equal(labels[recorder.points[:, 0]])
    assert recorder.labels.bincount().tolist() == [9, 5, 0, 18]
    tokens = torch.arange(36).view(4, 9)
    recorder = TransportRecorder(model.blocks[0], model, batch, labels=tokens)
    assert recorder.labels.equal(tokens[batch["key_mask"]])


def test_different_widths_are_compared_in_common_components_and_it_says_so():
    layer = nn.Linear(3, 5)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[:3] = 2 * torch.eye(3)
    x = torch.randn(200, 3)
    with pytest.warns(UserWarning, match="3 and 5 wide. Positions are 3 principal components"):
        recorder = TransportRecorder(layer, layer, x)
    recorder.record()
    assert recorder.positions.shape == (2, 200, 3)
    # the output is the scaled input, so in common components it is again
    start, end = recorder.positions
    assert_close(end, 2 * start, atol=1e-4, rtol=1e-4)
    result = recorder.metrics()
    assert result.rows[-1].optimality == pytest.approx(1)
    assert "3 and 5 wide" in result.report().html()


def test_a_norm_over_two_features_is_warned_about():
    # section 8, defect 8: the norm of two features is a sign
    layer = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    y = layer(1000 * torch.randn(50, 2)).detach()
    assert_close(y.abs(), torch.ones(50, 2), atol=1e-2, rtol=0)
    with pytest.warns(UserWarning, match="1 normalises over 2 features"):
        TransportRecorder(layer, layer, torch.randn(50, 2))


@pytest.mark.raw
def test_modules_that_cannot_be_recorded_are_refused():
    model, batch = model_and_batch()
    with pytest.raises(ValueError, match="what must be"):
        TransportRecorder(model, model, batch, what="attention")
    with pytest.raises(ValueError, match="has 2 attentions"):
        TransportRecorder(model, model, batch, what="attn")
    with pytest.raises(ValueError, match="part of the model"):
        TransportRecorder(nn.Identity(), model, batch)
    with pytest.raises(ValueError, match="labels must have the shape"):
        TransportRecorder(model.blocks[0], model, batch, labels=torch.zeros(3))
    flatten = nn.Flatten(0, 1)
    with pytest.raises(ValueError, match="keep the number of tokens"):
        TransportRecorder(flatten, flatten, torch.randn(2, 3, 4))
    with pytest.raises(ValueError, match="every must be at least 1"):
        TransportRecorder(model.blocks[0], model, batch, every=0)


def test_a_path_has_words_tables_pictures_and_a_page(tmp_path):
    pytest.importorskip("matplotlib")
    model, batch = model_and_batch()
    labels = torch.tensor([0, 1, 0, 1])
    with TransportRecorder(model.blocks[0], model, batch, labels=labels) as recorder:
        assert "No epoch" in recorder.metrics().verdict()
        for _ in range(2):
            disturb(model)
            recorder.record()
    result = recorder.metrics(scope="class", p=1)
    last = result.rows[-1]
    assert f"optimality {last.optimality:.2f}" in result.verdict()
    header, rows = result.table()
    assert header[:3] == ["epoch", "cost", "optimal"]
    assert [row[0] for row in rows] == [0, 1, 2]
    numbers = json.loads(result.to_json())
    assert numbers["epochs"][2]["gap"] == last.gap
    assert numbers["root"]["root_gap"] == result.root.root_gap
    result.to_html(tmp_path / "path.html")
    assert (tmp_path / "path.html").read_text().count("data:image/png") == 3
    for figure in (recorder.plot_paths(), recorder.plot_map(), recorder.plot_metrics()):
        assert figure.axes
        figure.clear()


# the analysis


def test_layers_are_maps_of_the_real_tokens_of_each_sequence():
    model, batch = model_and_batch()
    x, a, _ = parts_of_block(model, batch)
    owner = torch.arange(4)[:, None].expand(4, 9)[batch["key_mask"]]
    first, second = layer_transport(model, batch)
    assert (first.name, second.name) == ("blocks.0.attention", "blocks.1.attention")
    normed = model.blocks[0].attention_norm(x).detach()
    for got, end in ((first.plain, a), (first.residual, normed + a)):
        expected = map_metrics(normed, end, owner, scope="class")
        assert got[:7] == pytest.approx(expected[:7], rel=1e-5)
    (one, _) = layer_transport(model, batch, sequences=1, tokens=4)
    assert one.plain.num_points == 4


def test_tied_layers_are_optimal_and_free_ones_are_not():
    model, batch = model_and_batch()
    free = layer_transport(model, batch)
    for block in model.blocks:
        block.attention = TiedSoftmaxAttention(8, 2)
    for layer, other in zip(layer_transport(model, batch), free, strict=True):
        assert layer.plain.optimality == pytest.approx(1)
        assert layer.residual.matching == 1
        assert other.plain.optimality < 0.999


def test_cross_attention_counts_all_queries():
    layer = create_attention("softmax", 8, 2)
    keep = torch.tensor([[True, True, False], [True, False, False]])
    batch = {"x": torch.randn(2, 5, 8), "context": torch.randn(2, 3, 8), "key_mask": keep}
    (found,) = layer_transport(layer, batch)
    assert found.plain.num_points == 10


def test_the_analysis_reports_layers_and_says_when_one_collapses(tmp_path):
    pytest.importorskip("matplotlib")
    model, batch = model_and_batch()
    disturb(model.blocks, 0.5)
    entry = analysis_entry("transport")
    result = entry.run(model, [batch], entry.load_options()(p=1, sequences=3))
    assert "mean over layers" in result.verdict()
    assert "nearly one point" not in result.verdict()
    assert [row[0] for row in result.table()[1]] == ["blocks.0.attention", "blocks.1.attention"]
    assert result.plot().startswith(b"\x89PNG")
    numbers = json.loads(result.to_json())
    assert numbers["layers"][0]["plain"]["gap"] == result.layers[0].plain.gap
    result.to_html(tmp_path / "transport.html")
    assert "blocks.1.attention" in (tmp_path / "transport.html").read_text()
    with torch.no_grad():
        model.blocks[1].attention.out_proj.weight.zero_()
    assert "blocks.1.attention maps all tokens" in entry.run(model, [batch]).verdict()


@pytest.mark.raw
def test_models_and_options_without_meaning_are_refused():
    entry = analysis_entry("transport")
    with pytest.raises(ValueError, match="Identity has no attention layer"):
        entry.run(nn.Identity(), [torch.ones(1)])
    with pytest.raises(ValueError, match="batches is empty"):
        entry.run(nn.Identity(), [])
    with pytest.raises(ValueError, match="sequences must be at least 1 and tokens at least 2"):
        entry.load_options()(tokens=1)
    with pytest.raises(ValueError, match="p must be 1 or 2, got 3"):
        entry.load_options()(p=3)
