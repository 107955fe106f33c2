"""Several processes do what one does: the same weights, the same evaluation, the same files."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training_cases import config, data, model

from primal_attention.training import evaluate, fit

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
        "resumed": {"epochs": epochs},
    }.items():
        net = model()
        folder = Path(out) / "run" if name == "resumed" else None
        history = fit(
            net,
            train := Counted(),
            config=config(**{"epochs": epochs, **changes}),
            valid=data(9),
            out=folder,
            resume=folder is not None,
        )
        # 22 items a pass, of which each of two processes sees half
        assert train.asked == 11 * epochs
        found = evaluate(net, data(9), batch_size=2)
        if torch.distributed.get_rank() == 1:
            result = {
                "weights": {k: v.tolist() for k, v in net.state_dict().items()},
                "rows": history.rows(),
                "logits": found.logits.tolist(),
                "loss": found.loss,
            }
            (Path(out) / f"{name}.json").write_text(json.dumps(result))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def forked(world_size: int, out: Path) -> None:
    """Run ``work`` in forked processes, which have nothing to import."""
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
                work(str(out))
                torch.distributed.destroy_process_group()
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [
        0
    ] * world_size


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    out = tmp_path_factory.mktemp("two")
    forked(2, out)
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
    torch.testing.assert_close(torch.tensor(found["logits"]), alone.logits, atol=1e-4, rtol=1e-4)
    assert found["loss"] == pytest.approx(alone.loss, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("plain", {}), ("parts", {}), ("no-term", {"eta": 0.0}), ("resumed", {})],
)
def test_two_processes_do_what_one_does_with_the_whole_batch(name, changes, two):
    compare(json.loads((two / f"{name}.json").read_text()), changes)


def test_two_processes_write_one_checkpoint_with_both_random_states(two):
    from primal_attention.training.checkpoint import Checkpoint, latest_checkpoint

    saved = Checkpoint.load(latest_checkpoint(two / "run" / "checkpoints"))
    assert len(saved.random) == 2
    assert not saved.random[0]["torch"].equal(saved.random[1]["torch"])
    assert (two / "run" / "model" / "config.json").exists()


def test_a_run_of_two_processes_is_not_resumed_by_one(two):
    from primal_attention.training import CheckpointError

    with pytest.raises(CheckpointError, match="ran on 2 processes and now on 1"):
        fit(model(), data(), config=config(epochs=3), out=two / "run", resume=True)


@pytest.mark.slow
def test_torchrun_needs_no_change_of_code(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        f"import test_processes; test_processes.work({str(tmp_path)!r})\n"
    )
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    subprocess.run([sys.executable, *launcher, str(script)], check=True, timeout=600)
    compare(json.loads((tmp_path / "plain.json").read_text()), {})
