"""Runs that are killed twenty times end as if nothing had happened; two never write together."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_processes import HERE, free_port
from training_cases import config, data, model

from primal_attention.support.command import UserError
from primal_attention.support.files import SealedFolder, locked, read_tensors
from primal_attention.training import fit
from primal_attention.training.checkpoint import Checkpoint, checkpoints_in, latest_checkpoint

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


class Slow(torch.utils.data.Dataset):
    """Items that take a moment, so that kills meet every part of a run."""

    def __init__(self, seconds: float) -> None:
        self.data, self.seconds = data(), seconds

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return self.data[index]


def train(out: Path, *, seconds: float = 0.0, resume: bool = True) -> None:
    settings = config(epochs=10, save_steps=1, ema=0.9, seed=3)
    fit(
        model(dropout=0.2),
        Slow(seconds),
        config=settings,
        valid=data(9),
        out=out,
        resume=resume,
    )


def started(out: Path, seconds: float = 0.002) -> int:
    """Train in a forked process, which has nothing to import; return its process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            train(out, seconds=seconds)
            code = 0
        finally:
            os._exit(code)
    return pid


def wait_until(condition, seconds: float = 120.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def holder(out: Path) -> int | None:
    """Return the process that has or had the lock of a folder."""
    try:
        return int(json.loads((out / ".lock").read_text())["pid"])
    except (FileNotFoundError, ValueError):
        return None


def assert_same(out: Path, whole: Path) -> None:
    names = sorted(p.relative_to(whole) for p in whole.rglob("*"))
    assert sorted(p.relative_to(out) for p in out.rglob("*")) == names, "nothing is left over"
    SealedFolder(out / "model").check()
    for name in names:
        if name.name in ("model.safetensors", "best.safetensors"):
            ours, theirs = read_tensors(out / name), read_tensors(whole / name)
            assert all(weight.equal(theirs[key]) for key, weight in ours.items()), name


@pytest.mark.slow
def test_killed_twenty_times_a_run_ends_with_the_same_weights(tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "killed"
    train(whole)
    moments, kills, kept = random.Random(0), 0, set()
    # on a busy machine a run may end before it is killed, and the kills meet few of its steps
    while kills < 20 or len(kept) <= 5:
        assert kills < 200, "the kills meet a run that makes progress"
        before, pid = latest_checkpoint(out / "checkpoints"), started(out)
        if moments.random() < 0.8:  # the other kills meet the start
            wait_until(
                lambda pid=pid, old=before: (
                    latest_checkpoint(out / "checkpoints") != old or has_ended(pid)
                )
            )
        time.sleep(moments.uniform(0, 0.1))
        os.kill(pid, moments.choice(SIGNALS))
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0:
            assert_same(out, whole)
            shutil.rmtree(out)
            continue
        kills += 1
        for path in checkpoints_in(out / "checkpoints"):
            Checkpoint.load(path)
            kept.add(path.name)
    train(out)
    assert_same(out, whole)


def test_a_second_run_in_one_folder_is_refused_and_harms_nothing(tmp_path):
    out, alone = tmp_path / "two", tmp_path / "one"
    pid = started(out, seconds=0.004)
    try:
        wait_until(lambda: len(checkpoints_in(out / "checkpoints")) == 2)
        for resume in (True, False):
            with pytest.raises(UserError, match=rf"two is in use by process {pid} on .*wait until"):
                train(out, resume=resume)
        assert not os.waitpid(pid, os.WNOHANG)[0], "the first goes on"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    # the lock of a killed process is no lock
    train(out)
    train(alone)
    assert_same(out, alone)


def test_workers_that_load_data_do_not_keep_the_lock(tmp_path):
    with locked(tmp_path):
        loader = torch.utils.data.DataLoader(Slow(0.0), num_workers=1, collate_fn=len)
        batches = iter(loader)
        next(batches)
    with locked(tmp_path):
        pass
    del batches


def orphan(out: str) -> None:
    """Train for long in one of the processes of ``torchrun``, after leaving the process id."""
    (Path(out) / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    train(Path(out) / "run", seconds=0.05)


@pytest.mark.slow
def test_processes_of_a_killed_launcher_keep_their_folder(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        f"import test_kills; test_kills.orphan({str(tmp_path)!r})\n"
    )
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    with subprocess.Popen([sys.executable, *launcher, str(script)]) as process:
        try:
            wait_until(lambda: checkpoints_in(tmp_path / "run" / "checkpoints"), 300)
        finally:
            process.kill()
    workers = [int((tmp_path / f"pid-{rank}").read_text()) for rank in (0, 1)]
    try:
        assert holder(tmp_path / "run") == workers[0]
        with pytest.raises(UserError, match=f"in use by process {workers[0]} on"):
            train(tmp_path / "run")
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(Path(f"/proc/{pid}/fd").is_dir() for pid in workers))
    with locked(tmp_path / "run"):
        pass
