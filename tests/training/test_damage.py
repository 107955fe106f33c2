"""Damaged checkpoints are never loaded; a full disk and leftovers of a kill lose nothing."""

import itertools
import json
import os
import random
import resource
import shutil
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from training_cases import config, data, model

from primal_attention.support.command import exit_code
from primal_attention.support.files import SUMS, write_sealed
from primal_attention.training import CheckpointError, fit
from primal_attention.training.checkpoint import (
    Checkpoint,
    DamagedCheckpointError,
    checkpoints_in,
    latest_checkpoint,
)

FILES = ["state.json", "state.safetensors", "model.safetensors", "best.safetensors", SUMS]


def run(out, *, resume=False, on_epoch=None, **changes):
    net = model(dropout=0.2)
    settings = config(epochs=3, ema=0.9, **changes)
    fit(net, data(), config=settings, valid=data(9), out=out, resume=resume, on_epoch=on_epoch)
    return net.state_dict()


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """What an undisturbed run ends with."""
    return run(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory):
    """A run that stopped after its second epoch."""
    out = tmp_path_factory.mktemp("broken-off")

    def stop(net, record):
        if record.epoch == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(out, on_epoch=stop)
    return out


@pytest.fixture
def out(broken_off, tmp_path):
    return shutil.copytree(broken_off, tmp_path / "run")


def assert_same(found, expected):
    assert all(weight.equal(expected[name]) for name, weight in found.items())


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def damage(file: Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    short = content[: len(content) // 2]
    changed = {"empty": b"", "short": short, "foreign": b"\x80\x04.", "flipped": content}
    file.unlink() if how == "missing" else file.write_bytes(changed[how])


def test_every_kind_of_damage_of_every_file_is_noticed(out):
    path = latest_checkpoint(out / "checkpoints")
    words = f"{path.name} is not a complete checkpoint: "
    for name, how in itertools.product(FILES, ("missing", "empty", "short", "foreign", "flipped")):
        good = (path / name).read_bytes()
        damage(path / name, how)
        with pytest.raises(DamagedCheckpointError, match=words):
            Checkpoint.load(path)
        (path / name).write_bytes(good)


def test_a_checkpoint_under_the_name_of_another_is_refused(out):
    path = latest_checkpoint(out / "checkpoints")
    other = path.rename(path.with_name("epoch-0003-step-00000009"))
    with pytest.raises(DamagedCheckpointError, match=f"state.json is of {path.name}"):
        Checkpoint.load(other)


def test_every_flipped_byte_is_noticed(out):
    path = latest_checkpoint(out / "checkpoints")
    moments = random.Random(0)
    for name in FILES:
        good = (path / name).read_bytes()
        for _ in range(20):
            flipped = bytearray(good)
            flipped[moments.randrange(len(good))] ^= 1 << moments.randrange(8)
            (path / name).write_bytes(flipped)
            with pytest.raises(DamagedCheckpointError):
                Checkpoint.load(path)
        (path / name).write_bytes(good)
    Checkpoint.load(path)


@pytest.mark.parametrize("how", ["flipped weights", "only an empty folder"])
def test_a_run_continues_from_the_checkpoint_before_a_damaged_one(how, out, weights):
    new, old = checkpoints_in(out / "checkpoints")
    if how == "flipped weights":
        damage(new / "model.safetensors", "flipped")
    else:
        for file in new.iterdir():
            file.unlink()
    with pytest.warns(
        UserWarning, match=f"{new.name} is not .* continues from {old.name}, 3 steps"
    ):
        assert_same(run(out, resume=True), weights)
    names = [path.name for path in checkpoints_in(out / "checkpoints")]
    assert names == ["epoch-0003-step-00000009", "epoch-0002-step-00000006"]
    for path in checkpoints_in(out / "checkpoints"):
        Checkpoint.load(path)


def test_an_older_damaged_checkpoint_is_removed(out, weights):
    _, old = checkpoints_in(out / "checkpoints")
    (old / "state.json").unlink()
    assert_same(run(out, resume=True), weights)
    assert not old.exists()


def test_without_a_complete_checkpoint_a_run_is_refused_and_left_alone(out):
    for path in checkpoints_in(out / "checkpoints"):
        damage(path / "best.safetensors", "flipped")
    before = contents(out)
    with pytest.raises(CheckpointError, match=r"epoch-0002-.* No checkpoint in .* is complete"):
        run(out, resume=True)
    assert contents(out) == before


def test_a_damaged_checkpoint_of_another_run_is_left_alone(out):
    damage(latest_checkpoint(out / "checkpoints") / "state.json", "flipped")
    before = contents(out)
    with (
        pytest.warns(UserWarning, match="continues from"),
        pytest.raises(CheckpointError, match="belongs to another run: lr was"),
    ):
        run(out, resume=True, lr=0.5)
    assert contents(out) == before


def test_other_formats_are_told_and_kept(out):
    path = latest_checkpoint(out / "checkpoints")
    content = json.loads((path / "state.json").read_text())
    write_sealed(path, {"state.json": json.dumps({**content, "format": 4})})
    before = contents(out)
    with pytest.raises(CheckpointError, match="has format 4, this version reads 3"):
        run(out, resume=True)
    (path / "state.json").write_text(json.dumps({**content, "format": 2}))
    (path / SUMS).unlink()
    with pytest.raises(CheckpointError, match="has format 2, this version reads 3"):
        run(out, resume=True)
    assert set(contents(out)) == set(before) - {path / SUMS}


def test_tensors_of_something_else_are_refused(out):
    new, old = checkpoints_in(out / "checkpoints")
    shutil.rmtree(old)
    good = contents(new)
    for name, message in {
        "state": "random states of the processes",
        "model": "the model has other weights",
        "best": "the model has other weights",
    }.items():
        save_file({"other": torch.ones(2)}, new / f"{name}.safetensors")
        write_sealed(new, {f"{name}.safetensors": (new / f"{name}.safetensors").read_bytes()})
        with pytest.raises(CheckpointError, match=message):
            run(out, resume=True)
        write_sealed(new, {path.name: content for path, content in good.items()})


def leaves(value, place=()):
    """Return the places of all values inside lists and mappings, the outer ones too."""
    yield place
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, (*place, key))


def test_wrong_types_anywhere_in_the_state_are_a_sentence(out):
    new, old = checkpoints_in(out / "checkpoints")
    shutil.rmtree(old)
    good = (new / "state.json").read_text()
    places, choose, refused = list(leaves(json.loads(good)))[1:], random.Random(0), 0
    for place in choose.sample(places, 40):
        content = inner = json.loads(good)
        for key in place[:-1]:
            inner = inner[key]
        if isinstance(inner, dict) and choose.random() < 0.3:
            del inner[place[-1]]
        else:
            inner[place[-1]] = choose.choice([None, "x", [], {}, [[1]], -1, 10**18, True])
        write_sealed(new, {"state.json": json.dumps(content)})
        copy = shutil.copytree(out, out.with_name("copy"))
        try:
            run(copy, resume=True)
        except CheckpointError:
            refused += 1
        shutil.rmtree(copy)
    assert refused > 20


def test_a_full_disk_is_a_sentence_and_loses_nothing(tmp_path, weights, capfd):
    """The limit of the size of files stands for a full disk: both refuse a write half-way."""
    out = tmp_path / "run"

    def no_more(net, record):
        if record.epoch == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, resource.RLIM_INFINITY))

    pid = os.fork()
    if pid == 0:
        os._exit(exit_code(lambda: bool(run(out, on_epoch=no_more))))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    told = capfd.readouterr().err.strip().splitlines()
    assert told == [
        f"primal: {out}/checkpoints/epoch-0003-step-00000009 could not be written: File too large. "
        "epoch-0002-step-00000006 is complete; free some space or choose another folder, then "
        "resume the run."
    ]
    assert not list((out / "checkpoints").glob(".*"))
    assert_same(run(out, resume=True), weights)


def test_leftovers_are_removed_at_the_next_start_and_nothing_else(out, weights):
    stale = [
        out / ".history.csv.01234567.tmp",
        out / "model" / ".model.safetensors.89abcdef.tmp",
        out / "checkpoints" / ".epoch-0003-step-00000009.00000000.tmp" / "state.json",
    ]
    own = [out / ".notes.tmp", out / ".history.csv.mine", out / "a.01234567.tmp"]
    for path in (*stale, *own):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("left")
    assert_same(run(out, resume=True), weights)
    assert not any(path.exists() for path in stale)
    assert all(path.exists() for path in own)


def test_files_have_the_ordinary_permissions_of_the_user(tmp_path):
    umask = 0o027  # neither the usual one nor that of private files
    before = os.umask(umask)
    try:
        run(tmp_path / "run")
    finally:
        os.umask(before)
    for path in (tmp_path / "run").rglob("*"):
        ordinary = (0o777 if path.is_dir() else 0o666) & ~umask
        assert stat.S_IMODE(path.stat().st_mode) == ordinary, path
