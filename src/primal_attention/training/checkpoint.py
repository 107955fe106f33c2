"""Checkpoints: folders that are complete or absent.

    epoch-0012-step-00001234/      after 12 whole epochs and 1234 steps
        state.json            step, history, configuration, optimiser settings
        model.safetensors     weights of the model
        best.safetensors      weights of the best epoch so far, once there is one
        state.safetensors     optimiser, average of the weights, random generators
        SHA256SUMS            checksums of these files

A checkpoint is written under another name, flushed, read again and renamed. The one before stays,
older ones are removed. So a kill at any moment leaves the last complete one, and damage of a file
is noticed and costs the steps between two checkpoints. Nothing is pickled: a foreign checkpoint
cannot run code.
"""

import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from primal_attention.support.command import UserError
from primal_attention.support.files import (
    SUMS,
    SealedFolder,
    parse_json,
    parse_tensors,
    read_json,
    to_bytes,
    write_sealed,
)
from primal_attention.support.output import (
    flush_folder,
    remove_folder,
    remove_temporary,
    temporary_path,
    to_json,
)
from primal_attention.support.settings import build

__all__ = ["Checkpoint", "CheckpointError", "DamagedCheckpointError", "latest_checkpoint"]

FORMAT = 3
_NAME = re.compile(r"epoch-\d{4,}-step-\d{8,}")
_STATE = "state.json"
_KEPT = 2
"""Checkpoints that stay: the last one, and the one before in case the last is damaged."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be used or written: damaged, foreign, or of another run."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that is not what was saved."""


@dataclass
class Checkpoint:
    """Everything a run needs to continue exactly."""

    epoch: int
    """Whole epochs done."""
    step: int
    """Optimiser steps done; they decide the position of the sampler and of the schedule."""
    values: dict[str, object]
    """Plain values: history, configuration, running sums."""
    model: dict[str, Tensor]
    """Weights of the model."""
    optimizer: dict[str, Any]
    """State of the optimiser."""
    random: list[dict[str, Tensor]]
    """State of the random generators of every process."""
    average: dict[str, Tensor] | None = None
    """Moving average of the weights."""
    best: dict[str, Tensor] | None = None
    """Weights of the best epoch."""

    def save(self, folder: Path) -> Path:
        """Write the checkpoint into ``folder``, remove those before the last, return its path.

        Raises:
            CheckpointError: If it cannot be written, because the disk is full for example. The
                checkpoints that are there stay.
        """
        # names never repeat within a run, so the rename below never hits an existing folder
        path = folder / _name(self.epoch, self.step)
        temporary = temporary_path(path)
        try:
            write_sealed(temporary, self._files())
            # read what was written: a disk that loses bytes is noticed before an older one goes
            SealedFolder(temporary).check()
            temporary.rename(path)
            flush_folder(folder)
        except (OSError, UserError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            last = latest_checkpoint(folder)
            raise CheckpointError(
                f"{path} could not be written: {getattr(error, 'strerror', None) or error}. "
                f"{f'{last.name} is complete' if last else 'There is no earlier checkpoint'}; free "
                "some space or choose another folder, then resume the run."
            ) from error
        except BaseException:  # an interrupt leaves nothing behind either
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        # not before the new one is complete
        for old in checkpoints_in(folder)[_KEPT:]:
            remove_folder(old)
        return path

    def _files(self) -> dict[str, str | bytes]:
        tensors: dict[str, Tensor] = {}
        # counters of steps are numbers in some optimisers and tensors in others
        for index, state in self.optimizer["state"].items():
            tensors |= {f"optimizer.{index}.{k}": torch.as_tensor(v) for k, v in state.items()}
        for rank, states in enumerate(self.random):
            tensors |= {f"random.{rank}.{k}": v for k, v in states.items()}
        tensors |= {f"average.{k}": v for k, v in (self.average or {}).items()}
        content = {
            "format": FORMAT,
            "epoch": self.epoch,
            "step": self.step,
            "processes": len(self.random),
            "best": self.best is not None,
            "param_groups": self.optimizer["param_groups"],
            "values": self.values,
        }
        files: dict[str, str | bytes] = {
            _STATE: to_json(content),
            "state.safetensors": to_bytes(tensors),
            "model.safetensors": to_bytes(self.model),
        }
        if self.best is not None:
            files["best.safetensors"] = to_bytes(self.best)
        return files

    @classmethod
    def load(cls, path: Path) -> "Checkpoint":
        """Return the checkpoint in ``path``.

        Raises:
            DamagedCheckpointError: If a file is missing or is not what was saved.
            CheckpointError: If another version of the library wrote it.
        """
        with reading(path):
            content = _read_state(path)
            state = build(_State, content, _STATE)
            # names decide which checkpoint is the newest
            if path.name != _name(state.epoch, state.step):
                raise UserError(f"{_STATE} is of {_name(state.epoch, state.step)}.")
            folder = SealedFolder(path)

            def read(name: str) -> dict[str, Tensor]:
                return parse_tensors(folder.read(name), path / name)

            tensors = read("state.safetensors")
            for group in state.param_groups:
                if isinstance(group.get("betas"), list):  # JSON has no tuples
                    group["betas"] = tuple(group["betas"])
            return cls(
                state.epoch,
                state.step,
                state.values,
                read("model.safetensors"),
                {"state": _optimizer_state(tensors), "param_groups": list(state.param_groups)},
                _random_states(tensors, state.processes),
                dict(_below("average", tensors)) or None,
                read("best.safetensors") if state.best else None,
            )


@dataclass(frozen=True)
class _State:
    """What ``state.json`` holds."""

    format: int
    epoch: int
    step: int
    processes: int
    best: bool
    param_groups: tuple[dict[str, Any], ...]
    values: dict[str, object]


def _name(epoch: int, step: int) -> str:
    return f"epoch-{epoch:04d}-step-{step:08d}"


def _read_state(path: Path) -> dict[str, Any]:
    """Return the content of ``state.json``; raise if another version wrote it."""
    # earlier formats have no checksums: tell them from damage before the checksums are asked for
    is_sealed = (path / SUMS).is_file()
    if is_sealed:
        content = parse_json(SealedFolder(path).read(_STATE), path / _STATE)
    else:
        content = read_json(path / _STATE)
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {content.get('format')}, this version reads {FORMAT}; use the "
            "version that wrote it, or start anew."
        )
    if not is_sealed:
        raise UserError(f"it has no {SUMS}.")
    return content


def _optimizer_state(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in _below("optimizer", tensors):
        match = re.fullmatch(r"(\d{1,9})\.(\w+)", name)
        if match is None:
            raise UserError(f"state.safetensors has a tensor of no parameter: {name[:80]!r}.")
        state.setdefault(int(match[1]), {})[match[2]] = tensor
    return state


def _random_states(tensors: Mapping[str, Tensor], processes: int) -> list[dict[str, Tensor]]:
    ranks = {name.partition(".")[0] for name, _ in _below("random", tensors)}
    if len(ranks) != processes or ranks != {str(i) for i in range(processes)}:
        raise UserError(
            f"state.safetensors has random states of the processes {sorted(ranks)}, not of "
            f"{processes} processes."
        )
    return [dict(_below(f"random.{i}", tensors)) for i in range(processes)]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors about the content of a checkpoint into :class:`DamagedCheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, LookupError, TypeError, ValueError, RuntimeError) as error:
        words = " ".join(str(error).split()).replace(f"{path}/", "")
        first = words.partition(". ")[0].rstrip(".")  # what follows is advice about other folders
        raise DamagedCheckpointError(f"{path} is not a complete checkpoint: {first}.") from error


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first. They may be damaged."""
    found = [path for path in folder.glob("epoch-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=_position, reverse=True)


def _position(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.name)]


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint in a folder, or ``None``."""
    return next(iter(checkpoints_in(folder)), None)


def good_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint that is complete, or ``None`` if there is none of any kind.

    A warning tells if newer ones are damaged.

    Raises:
        CheckpointError: If all are damaged, or another version wrote the newest that is not.
    """
    found = checkpoints_in(folder)
    damage = ""
    for path in found:
        try:
            Checkpoint.load(path)
        except DamagedCheckpointError as error:
            damage = damage or str(error)
            continue
        if damage:
            steps = _position(found[0])[1] - _position(path)[1]
            warnings.warn(
                f"{damage} The run continues from {path.name}, {steps} steps before.", stacklevel=2
            )
        return path
    if damage:
        raise CheckpointError(f"{damage} No checkpoint in {folder} is complete; start anew.")
    return None


def remove_damaged(folder: Path, good: Path | None) -> None:
    """Remove checkpoints that are not complete, and what killed processes left.

    Args:
        folder: The folder.
        good: The checkpoint from which the run continues; newer ones are damaged.
    """
    remove_temporary(folder)
    for path in checkpoints_in(folder):
        if good is None or path == good:
            continue
        # if a newer one stayed, the next start would warn of it again, and its name is needed
        if _position(path) > _position(good) or not _is_complete(path):
            remove_folder(path)


def _is_complete(path: Path) -> bool:
    try:
        Checkpoint.load(path)
    except DamagedCheckpointError:
        return False
    except CheckpointError:
        pass  # of another version
    return True


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
    start = f"{prefix}."
    return ((k.removeprefix(start), v) for k, v in tensors.items() if k.startswith(start))
