"""Several processes do what one does: the same weights, the same evaluation, the same files."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_cases import config, data, model

from primal_attention.support.command import UserError
from primal_attention.support.files import locked
from primal_attention.training import cross_entropy, evaluate, fit
from primal_attention.training.checkpoint import Checkpoint, latest_checkpoint

HERE = Path(__file__).parent


class Counted(torch.utils.data.Dataset):
    """Counts the items it is asked for."""

    def __init__(self) -> None:
        self.data, self.asked = data(), 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index):
        self.asked += 1
        return self.data[index]


def work(out: str, epochs: int = 3) -> None:
    """Train with gloo in this process, one of several; write what came out."""
    for name, changes in {
        "plain": {},
        "parts": {"accumulate": 2},
        "no-term": {"eta": 0.0},
    }.items():
        net = model()
        settings = config(epochs=epochs, **changes)
        history = fit(net, train := Counted(), config=settings, valid=data(9))
        # 22 items a pass, of which each of two processes sees half
        assert train.asked == 11 * epochs
        found = evaluate(net, data(9), batch_size=2)
        if torch.distributed.get_rank() == 1:
            result = {
                "weights": {k: v.tolist() for k, v in net.state_dict().items()},
                "rows": history.rows(),
                "logits": found.answers["logits"].tolist(),
                "loss": found["loss"],
            }
            (Path(out) / f"{name}.json").write_text(json.dumps(result))
    for name in ("whole", "broken"):
        checkpointed(Path(out) / name)


def checkpointed(out: Path, objective=cross_entropy) -> None:
    """Start or continue a run whose processes draw each for itself."""
    settings = config(epochs=3, save_steps=2)
    net = model(dropout=0.2)
    fit(net, data(), config=settings, valid=data(9), out=out, resume=True, objective=objective)


def killed(out: str) -> None:
    """Start a run whose processes are killed in the fifth step, the second of an epoch."""
    steps = []

    def die(output, labels):
        steps.extend([0] * torch.is_grad_enabled())
        if len(steps) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return cross_entropy(output, labels)

    checkpointed(Path(out) / "broken", die)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def forked(world_size: int, action, out: Path) -> list[int]:
    """Run forked processes, which have nothing to import; return their exit codes."""
    port, children = free_port(), []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                from accelerate.state import AcceleratorState, GradientState, PartialState

                for state in (AcceleratorState, GradientState, PartialState):
                    state._reset_state()
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
                os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost"}
                os.environ |= {"MASTER_PORT": str(port)}
                action(str(out))
                torch.distributed.destroy_process_group()
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    out = tmp_path_factory.mktemp("two")
    # who is not killed yet loses the other
    assert all(forked(2, killed, out))
    assert latest_checkpoint(out / "broken" / "checkpoints").name == "epoch-0001-step-00000004"
    assert forked(2, work, out) == [0, 0]
    return out


def compare(found: dict, changes: dict) -> None:
    net = model()
    history = fit(net, data(), config=config(epochs=3, **changes), valid=data(9))
    for name, weight in net.state_dict().items():
        torch.testing.assert_close(
            torch.tensor(found["weights"][name]), weight, atol=1e-5, rtol=1e-4
        )
    for a, b in zip(found["rows"], history.rows(), strict=True):
        for key in ("loss", "ksvd", "valid_loss", "valid_accuracy", "lr", "step"):
            assert a[key] == pytest.approx(b[key], rel=1e-4), key
    alone = evaluate(net, data(9))
    torch.testing.assert_close(
        torch.tensor(found["logits"]), alone.answers["logits"], atol=1e-4, rtol=1e-4
    )
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-4)


def test_two_processes_do_what_one_does_with_the_whole_batch(two):
    for name, changes in (("plain", {}), ("parts", {}), ("no-term", {"eta": 0.0})):
        compare(json.loads((two / f"{name}.json").read_text()), changes)


def test_two_processes_write_one_checkpoint_with_both_random_states(two):
    saved = Checkpoint.load(latest_checkpoint(two / "whole" / "checkpoints"))
    assert len(saved.random) == 2
    assert not saved.random[0]["torch"].equal(saved.random[1]["torch"])
    assert (two / "whole" / "model" / "config.json").exists()


def test_two_killed_processes_resume_to_the_same_weights(two):
    whole, broken = (load_file(two / n / "model/model.safetensors") for n in ("whole", "broken"))
    for name, weight in whole.items():
        assert weight.equal(broken[name]), name
    states = (
        Checkpoint.load(latest_checkpoint(two / n / "checkpoints")).random
        for n in ("whole", "broken")
    )
    for a, b in zip(*states, strict=True):
        assert all(a[name].equal(b[name]) for name in a)


def test_a_run_of_two_processes_is_not_resumed_by_one(two):
    from primal_attention.training import CheckpointError

    with pytest.raises(CheckpointError, match="ran on 2 processes and now on 1"):
        fit(model(), data(), config=config(epochs=3), out=two / "whole", resume=True)


def refused(out: str) -> None:
    with pytest.raises(UserError, match="in use by process"):
        checkpointed(Path(out))


def test_all_processes_learn_that_another_run_uses_the_folder(tmp_path):
    with locked(tmp_path):
        assert forked(2, refused, tmp_path) == [0, 0]


def damaged(out: str) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        checkpointed(Path(out))
    # the main process tells it once
    words = [str(w.message) for w in told if "is not a complete checkpoint" in str(w.message)]
    assert len(words) == (torch.distributed.get_rank() == 0)


def test_all_processes_go_back_to_the_same_checkpoint(two, tmp_path):
    out = shutil.copytree(two / "whole", tmp_path / "run")
    (latest_checkpoint(out / "checkpoints") / "state.json").write_text("{}")
    assert forked(2, damaged, out) == [0, 0]
    one, again = (load_file(f / "model" / "model.safetensors") for f in (two / "whole", out))
    assert all(weight.equal(again[name]) for name, weight in one.items())


LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port={port}"],
    # the name is of devices, but without any it starts processes of the CPU just as well
    "accelerate": [
        *("-m", "accelerate.commands.launch", "--multi_gpu"),
        *("--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"),
        "--main_process_port={port}",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHERS)
def test_launchers_need_no_change_of_code(name, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        f"import test_processes; test_processes.work({str(tmp_path)!r})\n"
    )
    launcher = [part.format(port=free_port()) for part in LAUNCHERS[name]]
    subprocess.run([sys.executable, *launcher, str(script)], check=True, timeout=600)
    assert len(Checkpoint.load(latest_checkpoint(tmp_path / "whole" / "checkpoints")).random) == 2
    compare(json.loads((tmp_path / "plain.json").read_text()), {})
