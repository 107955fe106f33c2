"""Checkpoints: folders that are complete or absent.

    epoch-0012-step-00001234/      after 12 whole epochs and 1234 steps
        state.json            step, history, configuration, optimiser settings
        model.safetensors     weights of the model
        best.safetensors      weights of the best epoch so far, once there is one
        state.safetensors     optimiser, average of the weights, random generators

A checkpoint is written under another name, flushed and renamed. So a kill at any moment leaves the
last complete one. Nothing is pickled: a foreign checkpoint cannot run code.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from primal_attention.output import to_json

__all__ = ["Checkpoint", "CheckpointError", "latest_checkpoint"]

FORMAT = 2
_NAME = r"epoch-\d{4,}-step-\d{8,}"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used: damaged, foreign, or of another run."""


@dataclass
class Checkpoint:
    """Everything a run needs to continue exactly."""

    epoch: int
    """Whole epochs done."""
    step: int
    """Optimiser steps done; they decide the position of the sampler and of the schedule."""
    values: dict[str, Any]
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
        """Write the checkpoint into ``folder``, remove older ones, return its path."""
        # names never repeat within a run, so the rename below never hits an existing folder
        path = folder / f"epoch-{self.epoch:04d}-step-{self.step:08d}"
        temporary = folder / f".{path.name}.{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            self._write(temporary)
            for file in (*temporary.iterdir(), temporary):
                _flush(file)
            temporary.rename(path)
            _flush(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        for old in folder.iterdir():
            if old != path and re.fullmatch(rf"\.?{_NAME}(\.\d+)?", old.name):
                shutil.rmtree(old, ignore_errors=True)
        return path

    def _write(self, path: Path) -> None:
        tensors: dict[str, Tensor] = {}
        for index, state in self.optimizer["state"].items():
            tensors |= {f"optimizer.{index}.{k}": torch.as_tensor(v) for k, v in state.items()}
        for rank, states in enumerate(self.random):
            tensors |= {f"random.{rank}.{k}": v for k, v in states.items()}
        tensors |= {f"average.{k}": v for k, v in (self.average or {}).items()}
        save_tensors(tensors, path / "state.safetensors")
        save_tensors(self.model, path / "model.safetensors")
        if self.best is not None:
            save_tensors(self.best, path / "best.safetensors")
        content = {
            "format": FORMAT,
            "epoch": self.epoch,
            "step": self.step,
            "processes": len(self.random),
            "best": self.best is not None,
            "param_groups": self.optimizer["param_groups"],
            "values": self.values,
        }
        (path / "state.json").write_text(to_json(content))

    @classmethod
    def load(cls, path: Path) -> "Checkpoint":
        """Return the checkpoint in ``path``, or raise :class:`CheckpointError`."""
        with reading(path):
            content = json.loads((path / "state.json").read_text())
            if content["format"] != FORMAT:
                raise CheckpointError(
                    f"{path} has format {content['format']}, this version reads {FORMAT}; "
                    "use the version that wrote it, or start anew."
                )
            tensors = load_file(path / "state.safetensors")
            state: dict[int, dict[str, Any]] = {}
            for name, tensor in _below("optimizer", tensors):
                index, key = name.split(".", 1)
                state.setdefault(int(index), {})[key] = tensor
            for group in content["param_groups"]:
                group.update({k: tuple(v) for k, v in group.items() if k == "betas"})
            return cls(
                int(content["epoch"]),
                int(content["step"]),
                content["values"],
                load_file(path / "model.safetensors"),
                {"state": state, "param_groups": content["param_groups"]},
                [dict(_below(f"random.{i}", tensors)) for i in range(content["processes"])],
                dict(_below("average", tensors)) or None,
                load_file(path / "best.safetensors") if content["best"] else None,
            )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors about the content of a checkpoint into :class:`CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, LookupError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        words = " ".join(str(error).split())
        raise CheckpointError(
            f"{path} is not a complete checkpoint ({words}); remove it and resume from an older "
            "one, or start anew."
        ) from error


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in a folder, or ``None``."""
    found = [p for p in folder.glob("*") if re.fullmatch(_NAME, p.name)]
    return max(found, key=lambda p: [int(n) for n in re.findall(r"\d+", p.name)], default=None)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors; those that share memory are copied."""
    save_file({k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}, path)


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
    start = f"{prefix}."
    return ((k.removeprefix(start), v) for k, v in tensors.items() if k.startswith(start))


def _flush(path: Path) -> None:
    """Force a file or directory to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
