"""A run that is killed and resumed ends with the weights of a run without a break."""

import json
import os
import random
import shutil
import signal
import time

import numpy as np
import pytest
import torch
from training_cases import config, data, model

from primal_attention.models import EncoderClassifier
from primal_attention.training import CheckpointError, Columns, checkpoint, cross_entropy, fit
from primal_attention.training.checkpoint import Checkpoint, latest_checkpoint


class Noisy(torch.utils.data.Dataset):
    """Items that draw from all three generators, as augmentations do."""

    def __init__(self, delay: float = 0.0) -> None:
        self.data, self.delay = data(), delay

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index):
        time.sleep(self.delay)
        item = dict(self.data[index])
        shift = 0.1 * (np.random.randn() + random.gauss(0, 1) + random.random())
        item["x"] = item["x"] + shift + 0.1 * torch.randn(())
        return item


SETTINGS = {"epochs": 4, "save_steps": 2, "ema": 0.9, "seed": 5, "clip": 1.0}


def run(out, *, resume=False, delay=0.0, objective=cross_entropy, **changes):
    net = model(dropout=0.2)
    history = fit(
        net,
        Noisy(delay),
        config=config(**{**SETTINGS, **changes}),
        valid=data(9),
        out=out,
        resume=resume,
        objective=objective,
        evaluate=lambda net: {"drawn": float(torch.rand(()))},
    )
    return net, history


def assert_same_run(found, expected):
    (net, history), (other, reference) = found, expected
    for name, weight in net.state_dict().items():
        assert weight.equal(other.state_dict()[name]), name
    for a, b in zip(history.rows(), reference.rows(), strict=True):
        assert {k: v for k, v in a.items() if k != "seconds"} == {
            k: v for k, v in b.items() if k != "seconds"
        }
    assert (history.best_epoch, history.ended) == (reference.best_epoch, reference.ended)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run without a break, which tests must not change."""
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def uninterrupted(whole):
    return run(whole)


@pytest.fixture
def finished(whole, uninterrupted, tmp_path):
    """A copy of that folder."""
    return shutil.copytree(whole, tmp_path / "run")


def in_child(action) -> int:
    """Run in a forked process, which has nothing to import; return its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        finally:
            os._exit(0)
    return pid


def test_checkpoints_do_not_change_a_run(uninterrupted):
    assert_same_run(run(None), uninterrupted)


def test_killed_at_any_moment_a_run_resumes_to_the_same_weights(tmp_path, uninterrupted):
    moments = random.Random(0)
    for _ in range(5):
        pid = in_child(lambda: run(tmp_path, resume=True, delay=0.005))
        time.sleep(moments.uniform(0.02, 0.6))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert_same_run(run(tmp_path, resume=True), uninterrupted)


# while it writes a file, before it renames the folder, and after that
@pytest.mark.parametrize("moment", [11, 13, 14, 15, 16])
def test_killed_while_it_writes_a_checkpoint_it_has_the_one_before(
    moment, tmp_path, uninterrupted, monkeypatch
):
    fsync, calls = os.fsync, []

    def fsync_or_die(handle):
        calls.append(handle)
        # a checkpoint flushes four files, its folder before and after they are in place, and the
        # folder above
        if len(calls) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(handle)

    def killed():
        monkeypatch.setattr(os, "fsync", fsync_or_die)
        run(tmp_path)

    _, status = os.waitpid(in_child(killed), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    for path in checkpoint.checkpoints_in(tmp_path / "checkpoints"):
        Checkpoint.load(path)
    assert_same_run(run(tmp_path, resume=True), uninterrupted)
    assert_only_ours(tmp_path)


def test_killed_while_it_removes_a_checkpoint_it_leaves_no_half_of_one(
    tmp_path, uninterrupted, monkeypatch
):
    def remove_one_file_and_die(path, **options):
        next(path.iterdir()).unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    def killed():
        monkeypatch.setattr(shutil, "rmtree", remove_one_file_and_die)
        run(tmp_path)

    _, status = os.waitpid(in_child(killed), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    names = [p.name for p in checkpoint.checkpoints_in(tmp_path / "checkpoints")]
    assert names == ["epoch-0001-step-00000004", "epoch-0001-step-00000003"]
    assert_same_run(run(tmp_path, resume=True), uninterrupted)
    assert_only_ours(tmp_path)


def assert_only_ours(out) -> None:
    """A finished run has two checkpoints, and nothing that a killed process left."""
    names = sorted(p.name for p in (out / "checkpoints").iterdir())
    assert names == ["epoch-0003-step-00000010", "epoch-0004-step-00000012"]
    assert not list(out.rglob(".*"))


def test_no_checkpoint_is_written_over(tmp_path, monkeypatch):
    # a kill between removing one and writing the next would leave none
    names, save = [], Checkpoint.save

    def remember(self, folder):
        before = set(folder.glob("epoch-*")) if folder.exists() else set()
        path = save(self, folder)
        assert path not in before
        names.append(path.name)
        return path

    monkeypatch.setattr(Checkpoint, "save", remember)
    run(tmp_path, save_steps=1)
    assert len(set(names)) == len(names) == 12
    names.clear()
    fit(
        model(),
        data(),
        config=config(epochs=10**6, epoch_steps=10**6, save_steps=1, max_seconds=0.05),
        out=tmp_path / "short",
    )
    assert len(set(names)) == len(names)


def test_a_run_broken_in_the_middle_of_an_epoch_goes_on_there(tmp_path, uninterrupted):
    class StopError(Exception):
        pass

    steps = []

    def stop_in_step_six(output, labels):
        steps.extend([0] * torch.is_grad_enabled())
        if len(steps) == 6:
            raise StopError
        return cross_entropy(output, labels)

    with pytest.raises(StopError):
        run(tmp_path, objective=stop_in_step_six)
    # three steps are an epoch
    assert latest_checkpoint(tmp_path / "checkpoints").name == "epoch-0001-step-00000004"
    assert_same_run(run(tmp_path, resume=True), uninterrupted)


def test_a_finished_run_resumes_to_its_end_at_once(finished, uninterrupted):
    def never(output, labels):
        raise AssertionError("no step is left")

    assert_same_run(run(finished, resume=True, objective=never), uninterrupted)


def test_the_folder_holds_logs_checkpoint_and_the_final_model(whole, uninterrupted):
    net, history = uninterrupted
    assert json.loads((whole / "config.json").read_text())["ema"] == 0.9
    lines = [json.loads(x) for x in (whole / "history.jsonl").read_text().splitlines()]
    assert lines == history.rows()
    header, *rows = (whole / "history.csv").read_text().splitlines()
    assert header.startswith("epoch,step,loss,ksvd,lr,seconds,valid_loss,valid_accuracy,drawn")
    assert len(rows) == 4
    again = EncoderClassifier.from_pretrained(whole / "model")
    for name, weight in net.state_dict().items():
        assert weight.equal(again.state_dict()[name])


def test_foreign_models_leave_their_weights(tmp_path):
    from safetensors.torch import load_file

    class Foreign(torch.nn.Linear):
        pass

    train = Columns(input=torch.randn(6, 3), labels=torch.arange(6) % 2)
    net = Foreign(3, 2)
    fit(net, train, config=config(), out=tmp_path)
    assert load_file(tmp_path / "model" / "model.safetensors")["weight"].equal(net.weight)


def test_a_folder_with_a_run_is_not_overwritten(finished):
    with pytest.raises(ValueError, match=r"already holds a run .*resume=True"):
        run(finished)
    with pytest.raises(ValueError, match="resume=True needs out"):
        run(None, resume=True)


def test_a_checkpoint_of_another_run_is_refused(finished):
    def again(net, train, **parts):
        fit(net, train, config=config(**SETTINGS), out=finished, resume=True, **parts)

    net, train, valid = model(dropout=0.2), Noisy(), data(9)
    for change, message in [
        (lambda: run(finished, resume=True, lr=0.5), "lr was 0.01 and is 0.5"),
        (lambda: run(finished, resume=True, epochs=9), "epochs was 4 and is 9"),
        (lambda: again(net, data(7), valid=valid), "had 22 items and have 7"),
        (lambda: again(model(dim=4), train, valid=valid), "the model has other weights"),
        (lambda: again(model(dropout=0.5), train, valid=valid), "dropout was 0.2 and is 0.5"),
        (lambda: again(net, train), "the validation data had 9 items and have 0"),
    ]:
        with pytest.raises(CheckpointError, match=f"belongs to another run.*{message}"):
            change()


def test_other_items_of_the_same_number_are_another_run(tmp_path):
    def go(train, valid):
        return fit(model(), train, config=config(), valid=valid, out=tmp_path, resume=True)

    go(data(), data(9))
    go(data(), data(9))
    items = data(23).columns
    later, few = (
        Columns(**{name: column[1:end] for name, column in items.items()}) for end in (23, 10)
    )
    with pytest.raises(CheckpointError, match="the training data hold other items"):
        go(later, data(9))
    with pytest.raises(CheckpointError, match="the validation data hold other items"):
        go(data(), few)


def test_rounding_of_another_machine_is_no_other_data(tmp_path):
    fit(model(), data(), config=config(), out=tmp_path)
    items = data().columns
    near = Columns(x=[x * (1 + 1e-6) for x in items["x"]], labels=items["labels"])
    fit(model(), near, config=config(), out=tmp_path, resume=True)


def test_what_does_not_change_the_result_may_change_on_resume(finished):
    run(finished, resume=True, workers=1, save_steps=None)


def test_events_for_tensorboard_hold_steps_and_epochs(tmp_path):
    pytest.importorskip("tensorboard")
    run(tmp_path, tensorboard=True)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {"step/loss", "step/lr", "epoch/valid_loss", "epoch/drawn"} <= set(
        events.Tags()["scalars"]
    )
    assert [e.step for e in events.Scalars("step/loss")] == list(range(1, 13))
