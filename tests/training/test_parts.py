"""The pieces of training on their own: batches, groups, schedules, averages, evaluation."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from training_cases import data, model

from primal_attention.attention import create_attention
from primal_attention.kernels import TIME_FEATURES, BochnerTime, create_time
from primal_attention.models import CausalDecoder, DecoderConfig
from primal_attention.support.randomness import (
    isolated,
    random_state,
    restore_random_state,
    seed_everything,
)
from primal_attention.training import (
    Columns,
    EpochRecord,
    History,
    TrainingConfig,
    cross_entropy,
    evaluate,
    pad_collate,
    parameter_groups,
)
from primal_attention.training.average import WeightAverage
from primal_attention.training.data import Order
from primal_attention.training.optimization import (
    create_optimizer,
    learning_rate,
    set_progress,
)


@settings(max_examples=60, deadline=None)
@given(
    items=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    accumulate=st.integers(1, 4),
    world_size=st.integers(1, 4),
)
def test_processes_and_parts_share_every_batch_without_loss(
    items, batch_size, accumulate, world_size
):
    whole = Order(items, batch_size, 7)
    shares = [Order(items, batch_size, 7, accumulate, r, world_size) for r in range(world_size)]
    seen = []
    for step in range(whole.pass_steps):
        parts = [part for share in shares for part in share.parts(step)]
        assert all(len(share.parts(step)) == accumulate for share in shares)
        assert sum(part.weight for part in parts) == pytest.approx(1)
        assert all(part.indices for part in parts)
        real = [i for part in parts if part.weight for i in part.indices]
        assert real == whole.batch(step)
        seen += real
    assert sorted(seen) == list(range(items))


def test_every_pass_has_another_order():
    order = Order(50, 50, 0)
    assert order.batch(0) != order.batch(1)
    assert sorted(order.batch(0)) == sorted(order.batch(1))
    assert order.batch(0) == Order(50, 50, 0).batch(0)
    assert order.batch(0) != Order(50, 50, 1).batch(0)


@pytest.mark.parametrize("items", [1, 63, 1_000])
def test_items_of_similar_size_share_a_batch(items):
    sizes = torch.randint(1, 500, (items,))
    grouped, plain = Order(items, 8, 0, sizes=sizes), Order(items, 8, 0)
    assert grouped.pass_steps == plain.pass_steps
    batches = [grouped.batch(step) for step in range(grouped.pass_steps)]
    assert sorted(i for batch in batches for i in batch) == list(range(items))

    def padded(order):
        rows = [sizes[order.batch(step)] for step in range(order.pass_steps)]
        return sum(int(row.max()) * len(row) for row in rows) / int(sizes.sum())

    if items == 1_000:
        assert padded(grouped) < 1.05 < 1.5 < padded(plain)
        assert batches[0] != grouped.batch(grouped.pass_steps)  # the next pass has another order
        # long batches do not all come last
        tops = [int(sizes[batch].max()) for batch in batches]
        assert tops != sorted(tops)


def test_unequal_lengths_are_padded_and_told():
    items = [
        {"x": torch.ones(n, 2), "other": torch.ones(m).long(), "labels": torch.ones(n).long()}
        for n, m in ((2, 3), (4, 1))
    ]
    batch = pad_collate(items)
    assert batch["x"].shape == (2, 4, 2)
    assert batch["key_mask"].sum(1).tolist() == [2, 4]
    assert batch["other_mask"].sum(1).tolist() == [3, 1]
    assert batch["labels"][0].tolist() == [1, 1, -100, -100]
    assert "labels_mask" not in batch


def test_equal_lengths_need_no_mask_and_given_masks_are_kept():
    same = [{"x": torch.ones(3, 2), "labels": torch.tensor(1)}] * 2
    assert sorted(pad_collate(same)) == ["labels", "x"]
    own = [
        {"x": torch.ones(n, 2), "key_mask": torch.arange(n) > 0, "labels": torch.tensor(1)}
        for n in (2, 3)
    ]
    assert pad_collate(own)["key_mask"].tolist() == [[False, True, False], [False, True, True]]


def test_columns_of_unequal_size_are_refused():
    with pytest.raises(ValueError, match="same number of entries"):
        Columns(x=torch.zeros(3, 2), labels=torch.zeros(2))


def test_lam_norms_and_biases_never_decay():
    net = model(num_layers=2)
    decayed, spared = (set(map(id, g["params"])) for g in parameter_groups(net, 0.1))
    for name, parameter in net.named_parameters():
        is_spared = name.endswith(("bias", ".lam")) or "norm" in name
        assert (id(parameter) in spared) == is_spared, name
        assert (id(parameter) in decayed) != is_spared, name
    assert len(decayed) + len(spared) == len(list(net.parameters()))


@pytest.mark.parametrize(
    ("name", "options", "spared"),
    [
        ("kernelized", {}, {"core.position.table"}),
        ("kernelized", {"position": "grid", "width": 3}, {"core.position.table"}),
        ("primal-relative", {}, {"position_e.table", "position_r.table"}),
        ("schoenbat", {"post": "power"}, {"core.theta", "core.gamma", "core.beta"}),
        ("skyformer-learned", {}, {"core.z"}),
    ],
)
def test_weights_of_positions_scales_and_landmarks_never_decay(name, options, spared):
    layer = create_attention(name, 16, 2, bias=False, **options)
    names = {id(p): n for n, p in layer.named_parameters()}
    _, left_alone = parameter_groups(layer, 0.1)
    assert {names[id(p)] for p in left_alone["params"]} == spared


def test_frequencies_learn_at_a_tenth_of_the_rate_and_do_not_decay():
    net = nn.Sequential(BochnerTime(8), nn.Linear(8, 2))
    config = TrainingConfig(lr=0.5, schedule="constant", warmup=0.0)
    created = create_optimizer(net, config)
    assert [g["lr"] for g in created.param_groups] == [0.5, 0.5, 0.05]
    assert created.param_groups[2]["params"] == [net[0].quantile.omega]
    assert created.param_groups[2]["weight_decay"] == 0
    set_progress(created, dataclasses.replace(config, schedule="linear"), 0.5)
    assert [g["lr"] for g in created.param_groups] == pytest.approx([0.25, 0.25, 0.025])


def test_no_frequency_period_phase_or_coefficient_of_time_decays():
    decayed = {
        name: len(parameter_groups(create_time(name, 14), 0.1)[0]["params"])
        for name in TIME_FEATURES
    }
    # only the matrices of the MLP of log-gaps do
    assert decayed == {name: 2 if name == "log-gap" else 0 for name in TIME_FEATURES}


def test_frozen_and_shared_parameters_are_counted_rightly():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    net[1].bias.requires_grad_(False)
    groups = parameter_groups(net, 0.1)
    assert [len(g["params"]) for g in groups] == [1, 1]


@pytest.mark.parametrize("name", ["adamw", "radam"])
def test_decay_shrinks_matrices_and_nothing_else(name):
    net = model()
    before = {k: v.clone() for k, v in net.named_parameters()}
    optimizer = create_optimizer(
        net, TrainingConfig(optimizer=name, lr=0.1, weight_decay=0.5, warmup=0)
    )
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for key, now in net.named_parameters():
        is_spared = key.endswith(("bias", ".lam")) or "norm" in key
        torch.testing.assert_close(now, before[key] if is_spared else before[key] * 0.95)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "one-cycle", "constant"])
def test_the_rate_rises_to_its_peak_and_then_never_rises(schedule):
    for warmup in (0.0, 0.3, 1.0):
        config = TrainingConfig(lr=2.0, schedule=schedule, warmup=warmup)
        rates = [learning_rate(config, t / 100) for t in range(101)]
        peak = round(100 * warmup)
        assert rates[peak] == pytest.approx(2.0)
        assert all(a < b for a, b in itertools.pairwise(rates[: peak + 1]))
        assert all(a >= b for a, b in itertools.pairwise(rates[peak:]))
        if warmup < 1:
            assert rates[-1] == pytest.approx(2.0 if schedule == "constant" else 0.0, abs=1e-4)


def test_the_linear_schedule_is_two_straight_lines():
    config = TrainingConfig(lr=2.0, schedule="linear", warmup=0.2)
    rates = [learning_rate(config, t) for t in (0.0, 0.1, 0.2, 0.4, 0.6, 1.0)]
    assert rates == pytest.approx([0.0, 1.0, 2.0, 1.5, 1.0, 0.0])


def test_one_cycle_is_that_of_torch_with_linear_annealing():
    config = TrainingConfig(lr=0.5, schedule="one-cycle", warmup=0.25)
    net, total = nn.Linear(2, 2), 41
    ours = create_optimizer(net, config)
    theirs = torch.optim.AdamW(net.parameters(), lr=0.5)
    # its warm-up ends one step early, after pct_start * total - 1 of total - 1 steps
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        theirs, 0.5, total_steps=total, pct_start=11 / total, anneal_strategy="linear"
    )
    for step in range(total):
        set_progress(ours, config, step / (total - 1))
        for key in ("lr", "betas"):
            assert ours.param_groups[0][key] == pytest.approx(theirs.param_groups[0][key])
        theirs.step()
        if step < total - 1:
            schedule.step()


def test_the_average_follows_the_recursion():
    net = nn.Linear(2, 2)
    average = WeightAverage(net, 0.9)
    expected = net.weight.detach().clone()
    for t in range(1, 200):
        with torch.no_grad():
            net.weight.add_(0.1)
        average.update(net)
        decay = min(0.9, (1 + t) / (10 + t))
        expected = decay * expected + (1 - decay) * net.weight.detach()
    torch.testing.assert_close(average.weights["weight"], expected)
    own = net.weight.detach().clone()
    with average.applied(net):
        torch.testing.assert_close(net.weight.detach(), expected)
    assert net.weight.equal(own)


def test_the_average_forgets_quickly_at_first():
    net = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(net.weight)
    average = WeightAverage(net, 0.3)
    nn.init.ones_(net.weight)
    gaps = []
    for _ in range(4):
        average.update(net)
        gaps.append(1 - average.weights["weight"].item())
    # the decays 2/11 and 3/12 of the warm-up, then 0.3, which 4/13 exceeds
    assert gaps == pytest.approx([2 / 11, 6 / 132, 0.3 * 6 / 132, 0.09 * 6 / 132], rel=1e-9)


def test_counters_are_copied_not_averaged():
    net = nn.BatchNorm1d(2)
    average = WeightAverage(net, 0.5)
    net(torch.randn(4, 2))
    average.update(net)
    assert average.weights["num_batches_tracked"].item() == 1


def draw():
    return torch.rand(2).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1), random.random()


def test_random_streams_can_be_saved_at_any_point():
    seed_everything(3)
    # one normal number leaves a second one waiting in both generators
    random.gauss(0, 1), np.random.randn()
    state = random_state()
    expected = draw()
    restore_random_state(state)
    assert draw() == expected
    restore_random_state(state)
    with isolated():
        draw()
    assert draw() == expected


def test_evaluation_does_not_depend_on_the_batch_size_and_keeps_modes():
    net = model().train()
    net.head.eval()
    found = [evaluate(net, data(), batch_size=b) for b in (1, 5, 64)]
    for other in found[1:]:
        assert other["loss"] == pytest.approx(found[0]["loss"], rel=1e-5)
        assert other["accuracy"] == found[0]["accuracy"]
        torch.testing.assert_close(other.answers["logits"], found[0].answers["logits"])
    assert found[0].answers["labels"].equal(data().columns["labels"])
    assert net.training
    assert not net.head.training
    with torch.no_grad():
        whole = net.eval()(**{k: v for k, v in pad_collate(list(data())).items() if k != "labels"})
    torch.testing.assert_close(found[0].answers["logits"], whole.logits)


def test_evaluation_draws_nothing():
    before = torch.get_rng_state()
    torch.manual_seed(0)
    evaluate(net := model(), data())
    torch.manual_seed(0)
    model()
    assert torch.get_rng_state().shape == before.shape
    after = torch.get_rng_state()
    evaluate(net, data())
    assert torch.get_rng_state().equal(after)


def test_language_models_are_evaluated_by_token():
    torch.manual_seed(0)
    net = CausalDecoder(DecoderConfig(vocab_size=7, dim=8, num_heads=2))
    rows = [torch.randint(7, (n,)) for n in (5, 3, 8)]
    text = Columns(x=[r[:-1] for r in rows], labels=[r[1:] for r in rows])
    found = evaluate(net, text, batch_size=2)
    assert found.answers["labelled"].tolist() == [4, 2, 7]
    losses, hits = [], 0
    for row in rows:
        logits = net.eval()(row[None, :-1]).logits[0]
        losses.append(nn.functional.cross_entropy(logits, row[1:]).item())
        hits += int((logits.argmax(-1) == row[1:]).sum())
    assert found["loss"] == pytest.approx(sum(losses) / 3, rel=1e-5)
    assert found["accuracy"] == pytest.approx(hits / 13)


def test_unlabelled_tokens_and_sequences_count_for_nothing():
    logits, labels = torch.randn(3, 4, 5), torch.randint(5, (3, 4))
    labels[0, 2:], labels[2] = -100, -100
    each = [nn.functional.cross_entropy(logits[i], labels[i], ignore_index=-100) for i in (0, 1)]
    torch.testing.assert_close(cross_entropy(logits, labels), sum(each) / 3)


def test_empty_data_cannot_be_evaluated():
    with pytest.raises(ValueError, match="nothing to evaluate"):
        evaluate(model(), Columns(x=torch.empty(0, 2, 3), labels=torch.empty(0)))


def test_history_survives_plain_values():
    record = EpochRecord(1, 3, 0.5, None, 1e-3, 2.0, {"loss": 0.4}, {"test": 0.8})
    history = History((record,), 1, "epochs")
    assert History.from_dict(history.to_dict()) == history
    assert history.rows()[0]["test"] == 0.8
    assert history.rows()[0]["valid_loss"] == 0.4
    with pytest.raises(RuntimeError, match="No epoch"):
        _ = History().best


def test_bad_settings_are_refused():
    for changes, message in [
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"accumulate": 0}, "accumulate must be at least 1"),
        (
            {"optimizer": "sgd"},
            "optimizer must be one of adamw, radam, adam, lamb-lookahead, got 'sgd'",
        ),
        ({"schedule": "step"}, "schedule must be one of cosine, linear, one-cycle"),
        ({"precision": "fp16"}, "precision must be one of fp32, bf16"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": float("nan")}, "lr must be positive"),
        ({"clip": -1.0}, "clip must be positive"),
        ({"eta": -0.1}, "eta must be finite and not negative"),
        ({"warmup": 1.5}, "warmup must be a fraction"),
        ({"ema": 1.0}, "ema must lie between"),
        ({"patience": 0}, "patience must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            TrainingConfig(**changes)


def test_every_setting_says_what_it_does():
    import ast
    import inspect

    from primal_attention.training import config as module

    tree = ast.parse(inspect.getsource(module))
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef)).body
    for node, after in itertools.pairwise(body):
        if isinstance(node, ast.AnnAssign):
            assert isinstance(after, ast.Expr), ast.unparse(node)
            assert "\n" not in after.value.value
