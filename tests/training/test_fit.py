"""The training loop: what comes out, and what does not change the result."""

import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from training_cases import config, data, model

import primal_attention as pa
from primal_attention.training import (
    Columns,
    NonFiniteLossError,
    Score,
    evaluate,
    fit,
    squared_error,
)


def trained(changes=None, *, net=None, train=None, **options):
    net = net or model()
    history = fit(net, train or data(), config=config(**(changes or {})), **options)
    return net, history


def same(a: nn.Module, b: nn.Module, **tolerance) -> None:
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, msg=lambda m, name=name: f"{name}: {m}", **tolerance)


def test_a_model_learns_and_ends_at_its_best_epoch():
    net, history = trained({"epochs": 5}, valid=data())
    assert history.ended == "epochs"
    assert [r.epoch for r in history.records] == [1, 2, 3, 4, 5]
    assert history.records[-1].step == 15
    assert history.records[-1].loss < history.records[0].loss
    assert history.records[-1].ksvd is not None
    assert not net.training
    assert evaluate(net, data())["loss"] == pytest.approx(history.best.valid["loss"], rel=1e-5)


def test_the_best_validation_epoch_is_kept_not_the_last():
    kept = {}

    def remember(net, record):
        kept[record.epoch] = {k: v.clone() for k, v in net.state_dict().items()}

    # validation labels are the wrong way round: training makes them ever worse
    wrong = data()
    wrong = Columns(x=wrong.columns["x"], labels=1 - wrong.columns["labels"])
    net, history = trained({"epochs": 3}, valid=wrong, on_epoch=remember)
    assert history.best_epoch == 1
    assert history.records[-1].valid["loss"] > history.best.valid["loss"]
    for name, weight in net.state_dict().items():
        assert weight.equal(kept[1][name])


def test_accuracy_can_choose_the_epoch_and_ties_go_to_the_loss():
    _, history = trained({"epochs": 4, "monitor": "accuracy"}, valid=data())
    best = max(history.records, key=lambda r: (r.valid["accuracy"], -r.valid["loss"]))
    assert history.best_epoch == best.epoch


def test_without_validation_the_last_epoch_is_kept():
    _, history = trained()
    assert history.best_epoch == 2
    assert not history.best.valid


def test_patience_stops_a_run_that_gets_no_better():
    wrong = data()
    wrong = Columns(x=wrong.columns["x"], labels=1 - wrong.columns["labels"])
    _, history = trained({"epochs": 9, "patience": 2}, valid=wrong)
    assert history.ended == "patience"
    assert len(history.records) == 3


def test_a_time_budget_ends_the_run_with_the_schedule_done():
    _, history = trained({"epochs": 100_000, "max_seconds": 0.3, "epoch_steps": 5})
    assert history.ended == "seconds"
    assert history.records[-1].seconds >= 0.3
    assert history.records[-1].lr < 0.5 * 1e-2


def test_epochs_may_have_any_number_of_steps():
    _, history = trained({"epochs": 4, "epoch_steps": 2})
    assert [r.step for r in history.records] == [2, 4, 6, 8]
    # eight steps of eight are more than two passes: the same steps in epochs of a pass each
    net, _ = trained({"epochs": 2, "epoch_steps": 3})
    other, _ = trained({"epochs": 2})
    same(net, other, atol=0, rtol=0)


def test_the_same_seed_gives_the_same_weights_and_another_one_others():
    first, second, third = (trained({"seed": s}, net=model(dropout=0.2))[0] for s in (3, 3, 4))
    same(first, second, atol=0, rtol=0)
    assert not first.head.weight.equal(third.head.weight)


@pytest.mark.parametrize("accumulate", [3, 8])
def test_accumulated_parts_equal_the_whole_batch(accumulate):
    # 22 items in batches of 8: the last batch has 6, fewer than 8 parts
    whole, a = trained({"clip": 0.1})
    parts, b = trained({"clip": 0.1, "accumulate": accumulate})
    same(whole, parts, atol=1e-5, rtol=1e-4)
    assert a.records[-1].loss == pytest.approx(b.records[-1].loss, rel=1e-4)
    assert a.records[-1].ksvd == pytest.approx(b.records[-1].ksvd, rel=1e-4)


def test_the_gradient_is_clipped_to_the_norm():
    def step(clip):
        net = model()
        seen = []
        hook = register_optimizer_step_pre_hook(
            lambda optimizer, *_: seen.append(
                torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None]).norm()
            )
        )
        try:
            fit(net, data(8), config=config(epochs=1, clip=clip))
        finally:
            hook.remove()
        return seen[0].item()

    free = step(None)
    assert free > 0.1
    assert step(0.1) == pytest.approx(0.1, rel=1e-3)
    assert step(10 * free) == pytest.approx(free)


def test_eta_weighs_the_term_of_primal_layers():
    strong, weak = (trained({"eta": eta, "epochs": 6})[1] for eta in (10.0, 0.0))
    assert strong.records[-1].ksvd < weak.records[-1].ksvd
    net, _ = trained({"eta": 0.0})
    assert net.blocks[0].attention.lam.equal(model().blocks[0].attention.lam)


def test_models_without_a_term_train_too():
    _, history = trained(net=model(attention="softmax"))
    assert history.records[-1].ksvd is None


def test_foreign_models_train_and_their_primal_layers_are_found():
    class Foreign(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = pa.PrimalAttention(4, 2, rank=2)
            self.head = nn.Linear(4, 2)

        def forward(self, tokens):
            return self.head(self.inner(tokens).mean(1))

    train = Columns(tokens=torch.randn(8, 5, 4), labels=torch.arange(8) % 2)
    _, history = trained(net=Foreign(), train=train, valid=train)
    assert history.records[-1].ksvd > 0
    assert 0 <= history.best.valid["accuracy"] <= 1


def test_a_regression_objective_has_no_accuracy():
    train = Columns(x=torch.randn(16, 5, 3), labels=torch.randn(16))

    net, history = trained(
        {"epochs": 3}, net=model(num_classes=1), train=train, valid=train, objective=squared_error
    )
    assert history.records[-1].loss < history.records[0].loss
    assert set(history.best.valid) == {"loss"}
    assert not evaluate(net, train, objective=squared_error).answers


def test_any_named_score_chooses_the_epoch():
    found = iter([0.2, 0.7, 0.7, 0.1])

    def measure(net, valid):
        assert len(valid) == 5
        return {"mAP": Score(next(found)), "loss": Score(0.5, larger_is_better=False)}

    settings = {"epochs": 4, "monitor": "mAP"}
    _, history = trained(settings, valid=data(5), measure=measure)
    assert history.best_epoch == 2
    assert [r.valid["mAP"] for r in history.records] == [0.2, 0.7, 0.7, 0.1]


def test_a_score_may_be_better_when_it_is_smaller():
    found = iter([3.0, float("nan"), 1.0])

    def measure(net, valid):
        return {"RMSE": Score(next(found), larger_is_better=False)}

    _, history = trained({"epochs": 3, "monitor": "RMSE"}, valid=data(5), measure=measure)
    assert history.best_epoch == 3


def test_a_score_that_nobody_measures_cannot_choose_the_epoch():
    with pytest.raises(ValueError, match="got 'f1'; measured are: loss, accuracy"):
        trained({"monitor": "f1"}, valid=data())


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [("adamw", "cosine"), ("radam", "linear"), ("adam", "one-cycle"), ("adamw", "constant")],
)
def test_optimizers_and_schedules_learn(optimizer, schedule):
    _, history = trained({"epochs": 8, "optimizer": optimizer, "schedule": schedule})
    assert history.records[-1].loss < history.records[0].loss


def test_the_average_of_the_weights_is_evaluated_and_kept():
    net, history = trained({"epochs": 3, "ema": 0.9}, valid=data())
    plain, _ = trained({"epochs": 3}, valid=data())
    assert not net.head.weight.equal(plain.head.weight)
    assert evaluate(net, data())["loss"] == pytest.approx(history.best.valid["loss"], rel=1e-5)


def test_bfloat16_stays_close_to_float32():
    _, half = trained({"precision": "bf16"}, valid=data())
    _, full = trained(valid=data())
    assert half.best.valid["loss"] == pytest.approx(full.best.valid["loss"], abs=0.05)


def test_deterministic_mode_is_on_inside_and_off_outside():
    seen = []

    def look(net):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return {}

    trained({"deterministic": True}, evaluate=look)
    trained(evaluate=look)
    assert seen == [True, True, False, False]
    assert not torch.are_deterministic_algorithms_enabled()


def test_random_streams_of_the_caller_are_left_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    net = model()
    torch.set_rng_state(before[0])
    trained(net=net, valid=data())
    assert torch.get_rng_state().equal(before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]


def test_further_numbers_go_into_the_record():
    test = data(9)
    _, history = trained(
        valid=data(), evaluate=lambda net: {"test_accuracy": evaluate(net, test)["accuracy"]}
    )
    assert 0 <= history.records[0].metrics["test_accuracy"] <= 1
    assert history.rows()[0]["test_accuracy"] == history.records[0].metrics["test_accuracy"]


def test_worker_processes_change_nothing():
    plain, _ = trained()
    loaded, _ = trained({"workers": 1})
    same(plain, loaded, atol=0, rtol=0)


def test_a_broken_item_stops_the_run_and_is_named(tmp_path):
    train = data()
    train.columns["x"][7][0, 0] = float("nan")
    net = model()
    with pytest.raises(NonFiniteLossError, match=r"not finite.*items .*7.*Last good") as caught:
        fit(net, train, config=config(epochs=3, save_steps=1), out=tmp_path)
    assert 7 in caught.value.indices
    assert len(caught.value.indices) <= 8
    good = caught.value.checkpoint
    assert good is None or (good / "state.json").exists()
    # the step was not taken
    assert all(p.isfinite().all() for p in net.parameters())


def test_a_late_explosion_names_the_last_good_checkpoint(tmp_path):
    net, steps = model(), []

    def explode(output, labels):
        steps.append(0)
        loss = output.logits.square().mean()
        return loss * float("inf") if len(steps) == 5 else loss

    with pytest.raises(NonFiniteLossError, match="epoch-0001-step-00000003") as caught:
        fit(net, data(), config=config(epochs=3), out=tmp_path, objective=explode)
    assert caught.value.checkpoint == tmp_path / "checkpoints" / "epoch-0001-step-00000003"


def test_unusable_data_are_refused():
    x = torch.randn(4, 2, 3)
    for train, message in [
        (Columns(x=x[:0], labels=torch.empty(0)), "nothing to train on"),
        (Columns(x=x), "needs the key 'labels'"),
        (Columns(x=x, labels=torch.zeros(4, 2).long()), "labels must have"),
    ]:
        with pytest.raises(ValueError, match=message):
            fit(model(), train, config=config())


def test_streams_and_frozen_models_are_refused():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield {}

    with pytest.raises(TypeError, match="map-style"):
        fit(model(), Stream())
    with pytest.raises(ValueError, match="nothing to train"):
        fit(model().requires_grad_(False), data())


def test_a_missing_accelerate_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ImportError, match=r"pip install -e .\.\[train\]"):
        fit(model(), data(), config=config())


def test_the_package_imports_without_the_extra():
    code = (
        "import sys; sys.modules['accelerate'] = sys.modules['rich'] = None;"
        "sys.modules['tensorboard'] = None; import primal_attention.training"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
# the compiler warns about calls inside itself
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_compiled_model_trains_like_the_eager_one():
    torch._dynamo.reset()
    train = Columns(x=torch.randn(16, 5, 3), labels=torch.arange(16) % 2)
    eager, _ = trained(train=train)
    compiled, history = trained({"compile": True}, train=train)
    assert history.records[-1].ksvd > 0
    same(eager, compiled, atol=1e-4, rtol=1e-3)
