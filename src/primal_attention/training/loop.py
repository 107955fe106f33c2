"""The training loop.

    loss = objective(output, labels) + eta * ksvd_loss(model)

The items of a step depend on the seed and the number of the step, its learning rate on the progress
of the training. So a run gives the same weights on one process or several, in one part or many, and
after a restart.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from primal_attention.attention import ksvd_loss
from primal_attention.models import PretrainedModel
from primal_attention.support.command import UserError
from primal_attention.support.files import to_bytes, write_sealed
from primal_attention.support.output import remove_temporary
from primal_attention.training import evaluation
from primal_attention.training.average import WeightAverage, weights_of
from primal_attention.training.checkpoint import (
    Checkpoint,
    good_checkpoint,
    latest_checkpoint,
    reading,
    remove_damaged,
)
from primal_attention.training.config import TrainingConfig
from primal_attention.training.data import (
    Fingerprint,
    Order,
    PartSampler,
    pad_collate,
    split_labels,
)
from primal_attention.training.evaluation import Collate, Objective
from primal_attention.training.history import Ending, EpochRecord, History
from primal_attention.training.logs import Logs
from primal_attention.training.optimization import create_optimizer, set_progress
from primal_attention.training.processes import in_main_process, join_processes, one_writer
from primal_attention.training.randomness import (
    deterministic_algorithms,
    isolated,
    random_state,
    restore_random_state,
    seed_everything,
)
from primal_attention.training.resuming import (
    RunState,
    Sums,
    check_same_run,
    load_optimizer,
    settings_of,
)
from primal_attention.training.scores import Score, Scores, cross_entropy

__all__ = ["NonFiniteLossError", "fit"]


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


def fit(
    model: nn.Module,
    train: Dataset[Any],
    *,
    config: TrainingConfig | None = None,
    valid: Dataset[Any] | None = None,
    objective: Objective = cross_entropy,
    measure: Measure | None = None,
    collate: Collate = pad_collate,
    out: str | Path | None = None,
    resume: bool = False,
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None,
    on_epoch: Callable[[nn.Module, EpochRecord], None] | None = None,
    verbose: bool | None = None,
) -> History:
    """Train a model in place and return its history.

    The model ends in eval mode with the weights of the best epoch: the best on ``valid``, or the
    last one without it. The random state of the caller does not change.

    Args:
        model: Called with the keyword inputs of a batch; its output has ``logits``, or suits the
            objective. If it has a method ``keep_items``, that gets the training data first: some
            models read them when they predict. If a module has ``set_progress``, that gets the
            share of the training that is done before every step, for schedules of its own.
        train: Map-style data set whose items are dictionaries of tensors: keyword inputs of the
            model, and ``labels``. If it has an attribute ``group_by``, a number for each item such
            as its length, items with similar numbers share a batch, and less is padded.
        config: How to train.
        valid: Data that choose the epoch.
        objective: From output and labels to the mean loss of a batch; the KSVD term is added.
        measure: From a model and a data set to the scores that ``config.monitor`` may name; by
            default those of :func:`evaluate`: the objective, and the accuracy of classes.
        collate: From a list of items to a batch.
        out: Folder for checkpoints, logs and the final model; locked while the run writes there.
        resume: Continue the run in ``out``, if there is one. It ends with the same weights as a
            run without a break. If the last checkpoint is damaged, a warning says so and the run
            continues from the one before.
        evaluate: Called after every epoch in every process; its numbers go into the record and
            never choose the epoch.
        on_epoch: Called after every epoch in the main process.
        verbose: Whether to show progress: a bar, or lines where there is no terminal. By default a
            bar on a terminal, and nothing elsewhere.

    Raises:
        NonFiniteLossError: If the loss or the gradient is no longer finite.
        UserError: If another process writes into ``out``.
        CheckpointError: If the checkpoints in ``out`` are damaged or of another run, or one cannot
            be written.

    Example:
        >>> from primal_attention.models import EncoderClassifier, EncoderConfig
        >>> from primal_attention.training import Columns, TrainingConfig, fit
        >>> model = EncoderClassifier(EncoderConfig(num_classes=2, num_features=3, dim=16))
        >>> data = Columns(x=torch.randn(8, 5, 3), labels=torch.arange(8) % 2)
        >>> fit(model, data, config=TrainingConfig(epochs=2), valid=data).ended
        'epochs'
    """
    config = config or TrainingConfig()
    with isolated(), deterministic_algorithms(config.deterministic):
        run = _Run(model, train, config, valid, objective, measure, collate, out, verbose)
        with one_writer(run.out):
            run.start(resume)
            try:
                return run.train(evaluate, on_epoch)
            finally:
                run.logs.close()


class _Run:
    """State of a run, and the methods that change it."""

    def __init__(
        self,
        model: nn.Module,
        train: Dataset[Any],
        config: TrainingConfig,
        valid: Dataset[Any] | None,
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
        keep_items: Any = getattr(model, "keep_items", None)
        if keep_items is not None:
            keep_items(train)
        model.to(self.accelerator.device)
        self.optimizer = create_optimizer(model, config)
        self.average = None if config.ema is None else WeightAverage(model, config.ema)
        self.forward: Any = self.accelerator.prepare_model(model)
        if config.compile:
            self.forward = torch.compile(self.forward)
        self.step, self.seconds, self.sums = 0, 0.0, Sums()
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
        found = in_main_process(lambda: self._find_checkpoint(resume))
        if self.checkpoints is not None:
            parts = {"training": self.data, "validation": self.valid}
            self.fingerprints = {
                name: Fingerprint.of(data, self.collate) for name, data in parts.items()
            }
        saved = None if found is None else Checkpoint.load(found)
        if saved is not None and found is not None:
            with reading(found):
                self._restore(saved, found)
        if self.out is not None:
            in_main_process(
                lambda: self._clean(found)
            )  # not before the run is known to be the same
        self.logs.start(self.step)
        # last of all: modules that are imported on first use may draw from these generators
        if saved is None:
            seed_everything(self.config.seed + self.order.rank)
        elif found is not None:
            with reading(found):
                restore_random_state(saved.random[self.order.rank])

    def _find_checkpoint(self, resume: bool) -> Path | None:
        if self.checkpoints is None:
            return None
        if resume:
            return good_checkpoint(self.checkpoints)
        found = latest_checkpoint(self.checkpoints)
        if found is not None:
            raise UserError(
                f"{self.out} already holds a run ({found.name}); continue it with resume=True, or "
                "choose another folder."
            )
        return None

    def _clean(self, found: Path | None) -> None:
        """Remove damaged checkpoints, and what killed processes left."""
        if self.out is not None and self.checkpoints is not None:
            remove_temporary(self.out / "model")
            remove_damaged(self.checkpoints, found)

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
            generator=torch.Generator().manual_seed(self.config.seed + self.step),
        )
        batches = iter(loader)
        self.model.train()
        while self.step < stop and not self._is_out_of_time():
            self._step(batches)
            # after the last step the epoch is measured, then saved
            if self.step < stop and self.step % (self.config.save_steps or stop) == 0:
                self._save()

    def _step(self, batches: Iterator[Mapping[str, Any]]) -> None:
        """Take one optimiser step over this process's parts of a batch."""
        started = _clock(self.accelerator.device)
        progress = self._progress()
        lr = set_progress(self.optimizer, self.config, progress)
        for module in self.scheduled:
            module.set_progress(progress)
        parts = self.order.parts(self.step)
        size = len(self.order.batch(self.step))
        total = torch.zeros(2, device=self.accelerator.device)
        for i, part in enumerate(parts):
            is_last = i == len(parts) - 1
            with nullcontext() if is_last else self.accelerator.no_sync(self.forward):
                task, term = self._loss(next(batches))
                # data parallel averages gradients over processes: weights are shares of one of them
                weight = part.weight * self.order.world_size
                self.accelerator.backward(weight * (task + self.config.eta * term))
            total += part.weight * torch.stack([task.detach(), term.detach()]).float()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip or math.inf)
        loss, ksvd = self.accelerator.reduce(total, "sum").tolist()
        if not math.isfinite(loss + ksvd) or not torch.isfinite(norm):
            self._raise_non_finite(loss, ksvd, float(norm))
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.model)
        sums = self.sums
        self.sums = Sums(sums.count + size, sums.loss + size * loss, sums.ksvd + size * ksvd, lr)
        self.step += 1
        self.seconds += _clock(self.accelerator.device) - started
        self.logs.step(self.step, {"loss": loss, "ksvd": ksvd, "lr": lr, "gradient": float(norm)})

    def _loss(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the task loss and the KSVD term of one part."""
        device = self.accelerator.device
        inputs, labels = split_labels(evaluation.to_device(batch, device))
        with evaluation.autocast(device, self.config.precision):
            task = self.objective(self.forward(**inputs), labels)
        return task, ksvd_loss(self.model) if self.has_term else task.new_zeros(())

    def _raise_non_finite(self, loss: float, ksvd: float, norm: float) -> NoReturn:
        self.optimizer.zero_grad()
        indices = self.order.batch(self.step)
        good = None if self.checkpoints is None else latest_checkpoint(self.checkpoints)
        raise NonFiniteLossError(
            f"Step {self.step + 1} is not finite: loss {loss}, KSVD term {ksvd}, norm of the "
            f"gradient {norm}.",
            indices,
            good,
        )

    def _progress(self) -> float:
        """Return how much of the training is done, by steps or by time."""
        # the middle of the step, so that neither the first nor the last has a rate of zero
        done = (self.step + 0.5) / (self.config.epochs * self.epoch_steps)
        return done if self.config.max_seconds is None else max(done, self._time_share())

    def _is_out_of_time(self) -> bool:
        return self.config.max_seconds is not None and self._time_share() >= 1

    def _time_share(self) -> float:
        """Return the share of the time that is used up, the same in every process."""
        share = torch.tensor(self.seconds / (self.config.max_seconds or math.inf))
        if self.order.world_size > 1:
            share = share.to(self.accelerator.device)
            torch.distributed.broadcast(share, 0)
        return float(share)

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
            seconds=self.seconds,
        )
        with nullcontext() if self.average is None else self.average.applied(self.model):
            scores = {} if self.valid is None else self.measure(self.model, self.valid)
            if scores:
                self._monitored(scores)
            record = replace(record, valid={name: s.value for name, s in scores.items()})
            if evaluate is not None:
                with evaluation.eval_mode(self.model), torch.no_grad():
                    record = replace(record, metrics=dict(evaluate(self.model)))
            best_epoch = self.history.best_epoch
            if best_epoch is None or self._is_better(scores, self.history.best.valid):
                best_epoch, self.best = record.epoch, weights_of(self.model)
        self.history = History((*self.history.records, record), best_epoch, "running")
        self.history = replace(self.history, ended=self._ending())
        return record

    def _evaluate(self, model: nn.Module, data: Dataset[Any]) -> Scores:
        """Return the scores of a model; those of the objective, and the accuracy of classes."""
        return evaluation.evaluate(
            model,
            data,
            batch_size=self.config.batch_size,
            objective=self.objective,
            collate=self.collate,
            precision=self.config.precision,
        ).scores

    def _is_better(self, new: Scores, best: Mapping[str, float]) -> bool:
        """Return whether scores beat those of the best epoch; without any the last is best."""
        if self.valid is None:
            return True
        monitored = self._monitored(new)
        if new[monitored].value == best[monitored] and "loss" in new:
            monitored = "loss"
        return new[monitored].is_better_than(best[monitored])

    def _monitored(self, scores: Mapping[str, Score]) -> str:
        if self.config.monitor not in scores:
            raise ValueError(
                f"monitor must name a score of the validation data, got {self.config.monitor!r}; "
                f"measured are: {', '.join(scores)}."
            )
        return self.config.monitor

    def _ending(self) -> Ending:
        done, best = len(self.history.records), self.history.best_epoch or 0
        if self._is_out_of_time():
            return "seconds"
        if done >= self.config.epochs:
            return "epochs"
        if self.config.patience is not None and done - best >= self.config.patience:
            return "patience"
        return "running"

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
            "seconds": self.seconds,
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
        self.step, self.seconds, self.best = saved.step, state.seconds, saved.best
        self.sums, self.history = state.sums, state.history


def _export(model: nn.Module, folder: Path) -> None:
    """Write the final model: as its class does, or the weights alone."""
    if isinstance(model, PretrainedModel):
        model.save_pretrained(folder)
    else:
        write_sealed(folder, {"model.safetensors": to_bytes(model.state_dict())})


def _clock(device: torch.device) -> float:
    """Return processor seconds on a CPU, wall-clock seconds elsewhere."""
    return time.process_time() if device.type == "cpu" else time.perf_counter()
