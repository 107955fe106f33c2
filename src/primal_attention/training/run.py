"""The state of a run, and the steps, epochs and checkpoints that change it.

The items of a step depend on the seed and the number of the step, its learning rate on the progress
of the training. So a run gives the same weights on one process or several, in one part or many, and
after a restart.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from primal_attention.attention import ksvd_loss
from primal_attention.models import PretrainedModel
from primal_attention.support.files import save_sealed, to_bytes
from primal_attention.support.output import remove_temporary
from primal_attention.support.randomness import (
    random_state,
    restore_random_state,
    seed_everything,
)
from primal_attention.training import evaluation
from primal_attention.training.average import WeightAverage, weights_of
from primal_attention.training.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    reading,
    remove_damaged,
)
from primal_attention.training.choosing import ending_of, is_better, monitored
from primal_attention.training.clock import Clock
from primal_attention.training.config import TrainingConfig
from primal_attention.training.data import (
    Fingerprint,
    Order,
    PartSampler,
    split_labels,
)
from primal_attention.training.evaluation import Collate, Objective
from primal_attention.training.history import EpochRecord, History
from primal_attention.training.logs import Logs
from primal_attention.training.optimization import create_optimizer, set_progress
from primal_attention.training.processes import in_main_process, join_processes
from primal_attention.training.resuming import (
    RunState,
    Sums,
    check_same_run,
    find_checkpoint,
    load_optimizer,
    settings_of,
)
from primal_attention.training.scores import Scores

__all__ = ["NonFiniteLossError", "Run"]


Measure = Callable[[nn.Module, Dataset[Any]], Scores]
"""From a model and a data set to named scores."""


class NonFiniteLossError(RuntimeError):
    """The loss or its gradient became infinite or NaN; the weights are those before that step."""

    def __init__(self, what: str, indices: list[int], checkpoint: Path | None) -> None:
        super().__init__(
            f"{what} Its batch holds the items {indices} of the training data. Last good "
            f"checkpoint: {checkpoint or 'none'}. Look for broken items, lower lr or eta."
        )
        self.what = what
        """What is not finite."""
        self.indices = indices
        """Items of the data set that were in the batch."""
        self.checkpoint = checkpoint
        """The last good checkpoint, if there is one."""


class Run:
    """State of a run, and the methods that change it."""

    def __init__(
        self,
        model: nn.Module,
        train: Dataset[object],
        config: TrainingConfig,
        valid: Dataset[object] | None,
        objective: Objective,
        measure: Measure | None,
        collate: Collate,
        out: str | Path | None,
        verbose: bool | None,
    ) -> None:
        self.accelerator = join_processes()
        self.config, self.model, self.data, self.valid = config, model, train, valid
        self.objective, self.collate = objective, collate
        self.measure = measure or self._evaluate
        self.out = None if out is None else Path(out)
        size = evaluation.num_items(train)
        if size == 0:
            raise ValueError("There is nothing to train on: the data set is empty.")
        group_by = getattr(train, "group_by", None)
        self.order = Order(
            size,
            config.batch_size,
            config.seed,
            config.accumulate,
            self.accelerator.process_index,
            self.accelerator.num_processes,
            None if group_by is None else torch.as_tensor(group_by),
        )
        self.epoch_steps = config.steps_of_epoch(size)
        self.has_term = any(
            getattr(getattr(m, "capabilities", None), "aux_loss", False) for m in model.modules()
        )
        self.scheduled: list[Any] = [m for m in model.modules() if hasattr(m, "set_progress")]
        keep_items = getattr(model, "keep_items", None)
        if keep_items is not None:
            keep_items(train)
        # before the optimiser and the average, which keep tensors where the parameters are
        model.to(self.accelerator.device)
        self.optimizer = create_optimizer(model, config)
        self.average = None if config.ema is None else WeightAverage(model, config.ema)
        self.forward: Callable[..., object] = self.accelerator.prepare_model(model)
        if config.compile:
            self.forward = torch.compile(self.forward)
        self.clock = Clock(self.accelerator.device, config.max_seconds)
        self.step, self.sums = 0, Sums()
        self.history = History()
        self.fingerprints: dict[str, Fingerprint] = {}
        self.best: dict[str, Tensor] | None = None
        self.logs = Logs(
            self.out if self.accelerator.is_main_process else None,
            config,
            config.epochs * self.epoch_steps,
            verbose=verbose if self.accelerator.is_main_process else False,
        )

    @property
    def checkpoints(self) -> Path | None:
        """The folder of the checkpoints."""
        return None if self.out is None else self.out / "checkpoints"

    def start(self, resume: bool) -> None:
        """Restore the run in the output folder; without ``resume`` there must be none."""
        if resume and self.checkpoints is None:
            raise ValueError("resume=True needs out, the folder of the run to continue.")
        found = None if self.checkpoints is None else self._find(self.checkpoints, resume)
        self.logs.start(self.step)
        # last of all: modules that are imported on first use may draw from these generators
        if found is None:
            seed_everything(self.config.seed + self.order.rank)
        else:
            path, saved = found
            with reading(path):
                restore_random_state(saved.random[self.order.rank])

    def _find(self, folder: Path, resume: bool) -> tuple[Path, Checkpoint] | None:
        """Restore all but the random state from the checkpoint in a folder, and return it."""
        # one process decides: others might see a checkpoint that it is just about to remove
        path = in_main_process(lambda: find_checkpoint(folder, resume=resume))
        parts = {"training": self.data, "validation": self.valid}
        self.fingerprints = {
            name: Fingerprint.of(data, self.collate) for name, data in parts.items()
        }
        saved = None if path is None else Checkpoint.load(path)
        if path is not None and saved is not None:
            with reading(path):
                self._restore(saved, path)
        # not before the checks above: the folder may hold another run, which must stay as it is
        in_main_process(lambda: self._clean(folder, path))
        return None if path is None or saved is None else (path, saved)

    def _clean(self, folder: Path, path: Path | None) -> None:
        """Remove damaged checkpoints, and what killed processes left."""
        remove_temporary(folder.parent / "model")
        remove_damaged(folder, path)

    def train(
        self,
        evaluate: Callable[[nn.Module], Mapping[str, float]] | None,
        on_epoch: Callable[[nn.Module, EpochRecord], None] | None,
    ) -> History:
        """Run the epochs that are left and return the history."""
        while self.history.ended == "running":
            self._epoch()
            record = self._finish_epoch(evaluate)
            self.logs.epoch(self.history)
            # before saving, so that what it draws at random is drawn in a resumed run too
            if on_epoch is not None and self.accelerator.is_main_process:
                on_epoch(self.model, record)
            self._save()
        if self.best is not None:
            self.model.load_state_dict(self.best)
        self.model.eval()
        if self.out is not None and self.accelerator.is_main_process:
            _export(self.model, self.out / "model")
        return self.history

    def _epoch(self) -> None:
        stop = (len(self.history.records) + 1) * self.epoch_steps
        loader = DataLoader(
            self.data,
            batch_sampler=PartSampler(self.order, self.step, stop),
            collate_fn=self.collate,
            num_workers=self.config.workers,
            pin_memory=self.accelerator.device.type == "cuda",
            # the loader seeds its workers from this: by the step, so that a restart changes nothing
            generator=torch.Generator().manual_seed(self.config.seed + self.step),
        )
        batches = iter(loader)
        self.model.train()
        while self.step < stop and not self.clock.is_over():
            self._step(batches)
            # not after the last step: the epoch is measured first, then saved
            if self.step < stop and self.step % (self.config.save_steps or stop) == 0:
                self._save()

    def _step(self, batches: Iterator[Mapping[str, object]]) -> None:
        """Take one optimiser step over this process's parts of a batch."""
        with self.clock.running():
            lr = self._schedule()
            loss, ksvd = self._backward(batches)
            # without clip too: an infinite gradient of a finite loss must be noticed
            most = self.config.clip or math.inf
            norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), most))
            # before the step, so that the weights stay those of the last good one
            if not math.isfinite(loss + ksvd + norm):
                self.optimizer.zero_grad()
                raise NonFiniteLossError(
                    f"Step {self.step + 1} is not finite: loss {loss}, KSVD term {ksvd}, norm of "
                    f"the gradient {norm}.",
                    self.order.batch(self.step),
                    None if self.checkpoints is None else latest_checkpoint(self.checkpoints),
                )
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.average is not None:
                self.average.update(self.model)
            size, sums = len(self.order.batch(self.step)), self.sums
            self.sums = Sums(
                sums.count + size, sums.loss + size * loss, sums.ksvd + size * ksvd, lr
            )
            self.step += 1
        self.logs.step(self.step, {"loss": loss, "ksvd": ksvd, "lr": lr, "gradient": norm})

    def _schedule(self) -> float:
        """Set the learning rate of the next step, and what modules schedule; return the rate."""
        # the middle of the step, so that neither the first nor the last has a rate of zero
        steps = (self.step + 0.5) / (self.config.epochs * self.epoch_steps)
        progress = self.clock.progress(steps)
        for module in self.scheduled:
            module.set_progress(progress)
        return set_progress(self.optimizer, self.config, progress)

    def _backward(self, batches: Iterator[Mapping[str, object]]) -> tuple[float, float]:
        """Add the gradients of the parts of a batch; return loss and term of the whole batch."""
        parts = self.order.parts(self.step)
        total = torch.zeros(2, device=self.accelerator.device)
        for i, part in enumerate(parts):
            # gradients are exchanged once a step, with the last part
            is_last = i == len(parts) - 1
            with nullcontext() if is_last else self.accelerator.no_sync(self.forward):
                task, term = self._loss(next(batches))
                # data parallel averages gradients over processes: weights are shares of one of them
                weight = part.weight * self.order.world_size
                self.accelerator.backward(weight * (task + self.config.eta * term))
            total += part.weight * torch.stack([task.detach(), term.detach()]).float()
        # every process gets the same sums, so that all of them stop at the same step
        loss, ksvd = self.accelerator.reduce(total, "sum").tolist()
        return loss, ksvd

    def _loss(self, batch: Mapping[str, object]) -> tuple[Tensor, Tensor]:
        """Return the task loss and the KSVD term of one part."""
        device = self.accelerator.device
        inputs, labels = split_labels(evaluation.to_device(batch, device))
        with evaluation.autocast(device, self.config.precision):
            task = self.objective(self.forward(**inputs), labels)
        return task, ksvd_loss(self.model) if self.has_term else task.new_zeros(())

    def _finish_epoch(
        self, evaluate: Callable[[nn.Module], Mapping[str, float]] | None
    ) -> EpochRecord:
        """Measure the epoch, keep its weights if it is the best, decide whether to stop."""
        sums, self.sums = self.sums, Sums()
        count = max(sums.count, 1)
        record = EpochRecord(
            epoch=len(self.history.records) + 1,
            step=self.step,
            loss=sums.loss / count,
            ksvd=sums.ksvd / count if self.has_term else None,
            lr=sums.lr,
            seconds=self.clock.seconds,
        )
        with nullcontext() if self.average is None else self.average.applied(self.model):
            scores = {} if self.valid is None else self.measure(self.model, self.valid)
            if scores:
                monitored(self.config, scores)  # tell a wrong name after the first epoch
            record = replace(record, valid={name: s.value for name, s in scores.items()})
            if evaluate is not None:
                with evaluation.eval_mode(self.model), torch.no_grad():
                    record = replace(record, metrics=dict(evaluate(self.model)))
            best_epoch = self.history.best_epoch
            if (
                best_epoch is None
                or self.valid is None
                or is_better(self.config, scores, self.history.best.valid)
            ):
                best_epoch, self.best = record.epoch, weights_of(self.model)
        history = History((*self.history.records, record), best_epoch, "running")
        end = ending_of(self.config, history, is_out_of_time=self.clock.is_over())
        self.history = replace(history, ended=end)
        return record

    def _evaluate(self, model: nn.Module, data: Dataset[object]) -> Scores:
        """Return the scores of a model; those of the objective, and the accuracy of classes."""
        return evaluation.evaluate(
            model,
            data,
            batch_size=self.config.batch_size,
            objective=self.objective,
            collate=self.collate,
            precision=self.config.precision,
        ).scores

    def _save(self) -> None:
        """Write a checkpoint; every process adds its random state."""
        folder = self.checkpoints
        if folder is None:
            return
        states = [random_state()]
        if self.order.world_size > 1:
            states = states * self.order.world_size
            torch.distributed.all_gather_object(states, random_state())
        in_main_process(lambda: self._checkpoint(states).save(folder))

    def _checkpoint(self, random: list[dict[str, Tensor]]) -> Checkpoint:
        average = self.average
        values = {
            "config": asdict(self.config),
            "model": settings_of(self.model),
            "data": self.fingerprints,
            "history": self.history.to_dict(),
            "seconds": self.clock.seconds,
            "sums": asdict(self.sums),
            "updates": 0 if average is None else average.updates,
        }
        return Checkpoint(
            len(self.history.records),
            self.step,
            values,
            self.model.state_dict(),
            self.optimizer.state_dict(),
            random,
            None if average is None else average.weights,
            self.best,
        )

    def _restore(self, saved: Checkpoint, path: Path) -> None:
        """Return to the moment of a checkpoint."""
        state = RunState.of(saved)
        check_same_run(
            saved,
            state,
            path,
            config=self.config,
            model=self.model,
            data=self.fingerprints,
            processes=self.order.world_size,
        )
        self.model.load_state_dict(saved.model)
        load_optimizer(self.optimizer, saved.optimizer)
        if self.average is not None and saved.average is not None:
            device = self.accelerator.device
            self.average.weights = {k: v.to(device) for k, v in saved.average.items()}
            self.average.updates = state.updates
        self.step, self.best, self.clock.seconds = saved.step, saved.best, state.seconds
        self.sums, self.history = state.sums, state.history


def _export(model: nn.Module, folder: Path) -> None:
    """Write the final model: as its class does, or the weights alone."""
    if isinstance(model, PretrainedModel):
        model.save_pretrained(folder)
    else:
        save_sealed(folder, {"model.safetensors": to_bytes(model.state_dict())})
