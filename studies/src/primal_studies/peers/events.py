"""Point-process models of easy-tpp, trained and scored on the same logs as ours.

RMTPP (Du et al. 2016) is a recurrent network, THP (Zuo et al. 2020) and AttNHP (Yang et al. 2022)
are Transformers. All three give an intensity ``λ_k(t)`` for every type. The package is the extra
``events-peers``.

The log-likelihood of an event is ``log λ_k(t) - ∫ Σ_j λ_j`` since the event before. In training,
easy-tpp replaces the integral by the mean over 20 equally spaced points, both ends included. Scores
here use Gauss-Legendre nodes instead, so that they are not mixed with the error of that mean. Times
are divided by the median gap of the training log, and the log-density is given per unit of the
log's own time again.
"""

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from primal_attention.datasets.events.log import EventSequences
from primal_attention.support.command import needs

__all__ = ["PEERS", "FittedPeer", "PeerScores", "build_peer", "fit_peer", "peer_stepper"]

PEERS = ("RMTPP", "THP", "AttNHP")
_NODES = 12
"""Nodes of the integral between two events."""
_GRID = 24
"""Waiting times in the integral over an unknown one."""
_SCORE_EVENTS = 4_096
"""Events of a batch when scores are computed."""


class PaddedBatch(NamedTuple):
    """Sequences of a batch, padded at the end; times count from the first event."""

    times: Float[Tensor, "b n"]
    types: Int[Tensor, "b n"]
    keep: Bool[Tensor, "b n"]

    @property
    def gaps(self) -> Float[Tensor, "b n-1"]:
        """Gaps between events; zero where the later one is padding."""
        return torch.where(self.keep[:, 1:], self.times.diff(dim=1), 0.0).float()

    def inputs(self, model: Any) -> dict[str, Tensor]:
        """Return the batch under the names of easy-tpp, whose masks are True where masked."""
        pad, n = model.pad_token_id, self.times.shape[1]
        # a recurrent network needs no mask of all pairs, which would cost more than its step
        size = 1 if type(model).__name__ == "RMTPP" else n
        later = torch.ones(size, n, dtype=torch.bool).triu(1)
        return {
            "time_seqs": torch.where(self.keep, self.times, 0.0).float(),
            "time_delta_seqs": torch.cat([torch.zeros(len(self.gaps), 1), self.gaps], dim=1),
            "type_seqs": torch.where(self.keep, self.types, pad),
            "seq_non_pad_mask": self.keep,
            "attention_mask": later | ~self.keep[:, None, :],
        }


class PeerScores(NamedTuple):
    """What a peer reaches on a log; the first event of every sequence is given."""

    sums: Float[np.ndarray, "b 4"]
    """For every sequence of the log: scored events, their log-density in nats per unit of the log's
    time, and how many types are right with the time of the event known and with the past alone."""

    @property
    def events(self) -> int:
        """Events that were scored."""
        return int(self.sums[:, 0].sum())

    @property
    def log_likelihood(self) -> float:
        """Nats per event, density per unit of the log's time."""
        return float(self.sums[:, 1].sum() / self.events)

    @property
    def accuracy_target(self) -> float:
        """Share of types that are right if the time of the event is known."""
        return float(self.sums[:, 2].sum() / self.events)

    @property
    def accuracy_last_event(self) -> float:
        """Share of types that are right if only the past is known."""
        return float(self.sums[:, 3].sum() / self.events)


def build_peer(name: str, num_types: int) -> nn.Module:
    """Return a model of easy-tpp with the settings that are its defaults.

    Raises:
        ValueError: If the name is not one of :data:`PEERS`.
        MissingPackageError: If easy-tpp is not installed.
    """
    if name not in PEERS:
        raise ValueError(f"Unknown peer {name!r}; choose from {', '.join(PEERS)}.")
    with needs("studies[events]", f"The model {name}"):
        from easy_tpp import model as models
        from easy_tpp.config_factory import ModelConfig
    config = ModelConfig(
        model_id=name,
        num_event_types=num_types,
        num_event_types_pad=num_types + 1,
        event_pad_index=num_types,
    )
    found: nn.Module = getattr(models, name)(config)
    return found


class FittedPeer:
    """A trained peer, the unit of its times, and the cost of its training."""

    def __init__(self, name: str, model: nn.Module, unit: float) -> None:
        self.name, self.model, self.unit = name, model, unit
        self.epochs = 0
        """Epochs of training."""
        self.best_epoch = 0
        """Epoch with the best log-likelihood of the validation log."""
        self.seconds = 0.0
        """Processor seconds of training."""
        self.events = 0
        """Events that training has seen, padding not counted."""

    def intensities(
        self, batch: PaddedBatch, gaps: Float[Tensor, "b n g"]
    ) -> Float[Tensor, "b n g k"]:
        """Return the intensities of all types at given gaps after every event."""
        model: Any = self.model
        inputs = batch.inputs(model)
        # AttNHP takes times, the others gaps
        offset = inputs["time_seqs"][..., None] if self.name == "AttNHP" else 0.0
        return model.compute_intensities_at_sample_times(
            inputs["time_seqs"],
            inputs["time_delta_seqs"],
            inputs["type_seqs"],
            gaps + offset,
            attention_mask=inputs["attention_mask"],
        )

    @torch.no_grad()
    def score(self, log: EventSequences) -> PeerScores:
        """Return log-likelihood and accuracy of the types in a log."""
        self.model.eval()
        points, weights = (torch.tensor(x) for x in np.polynomial.legendre.leggauss(_NODES))
        points, weights = ((points + 1) / 2).float(), (weights / 2).float()
        grid = torch.tensor(_waiting_times(log) / self.unit, dtype=torch.float32)
        sums = np.zeros((len(log), 4))
        for rows, batch in _batches(log, self.unit, _SCORE_EVENTS):
            gaps = batch.gaps[..., None]
            history = batch._replace(
                times=batch.times[:, :-1], types=batch.types[:, :-1], keep=batch.keep[:, :-1]
            )
            nodes = torch.cat([gaps, gaps * points, grid.expand(*gaps.shape[:2], -1)], dim=-1)
            rates = self.intensities(history, nodes)
            at_event, between, ahead = rates.split([1, _NODES, _GRID], dim=2)
            target = batch.types[:, 1:, None]
            at_event = at_event[:, :, 0]
            integral = gaps[..., 0] * (between.sum(-1) * weights).sum(-1)
            chosen = at_event.gather(-1, target)[..., 0]
            density = chosen.clamp(min=1e-30).log() - integral - math.log(self.unit)
            likely = _type_probabilities(ahead, grid)
            hits = (at_event.argmax(-1, keepdim=True), likely.argmax(-1, keepdim=True))
            parts = [torch.ones_like(density), density, *((h == target)[..., 0] for h in hits)]
            keep = batch.keep[:, 1:, None]
            sums[rows] = torch.where(keep, torch.stack(parts, -1), 0.0).double().sum(1).numpy()
        return PeerScores(sums)


def _type_probabilities(
    rates: Float[Tensor, "b n g k"], grid: Float[Tensor, " g"]
) -> Float[Tensor, "b n k"]:
    """Return ``∫ λ_k(t) exp(-Λ(t)) dt`` over the grid, by trapezoids."""
    total = rates.sum(-1)
    passed = torch.cumulative_trapezoid(total, grid, dim=-1)
    passed = torch.cat([torch.zeros_like(passed[..., :1]), passed], dim=-1)
    return torch.trapezoid(rates * (-passed).exp()[..., None], grid, dim=-2)


def _waiting_times(log: EventSequences) -> np.ndarray:
    """Return a grid of waiting times: quantiles of the gaps of a log, and a tail."""
    gaps = log.gaps[~np.isnan(log.gaps)]
    inner = np.quantile(gaps, np.linspace(0, 1, _GRID - 5))
    tail = inner[-1] * np.linspace(1, 3, 5)[1:]
    return np.concatenate([[0.0], inner, tail])


def _batches(
    log: EventSequences,
    unit: float,
    num_events: int,
    random: np.random.Generator | None = None,
    num_sequences: int = 256,
) -> Iterator[tuple[list[int], PaddedBatch]]:
    """Yield the numbers of some sequences of similar length, and their batch.

    Args:
        log: Sequences; those with one event have nothing to predict and are left out.
        unit: What times are divided by.
        num_events: Most events of a batch, padding included; one sequence at least.
        random: Source of the order; by default short ones come first.
        num_sequences: Most sequences of a batch.
    """
    lengths = np.diff(log.offsets)
    order = np.flatnonzero(lengths > 1)
    if random is not None:
        order = random.permutation(order)
    order = order[np.argsort(lengths[order], kind="stable")]
    groups: list[list[int]] = [[]]
    for index in order.tolist():
        full = (len(groups[-1]) + 1) * lengths[index] > num_events
        if groups[-1] and (full or len(groups[-1]) >= num_sequences):
            groups.append([])
        groups[-1].append(index)
    for place in random.permutation(len(groups)) if random is not None else range(len(groups)):
        yield groups[place], _pad(log, groups[place], unit)


def _pad(log: EventSequences, rows: list[int], unit: float) -> PaddedBatch:
    width = max(int(log.offsets[i + 1] - log.offsets[i]) for i in rows)
    times = torch.zeros(len(rows), width, dtype=torch.float64)
    types = torch.zeros(len(rows), width, dtype=torch.int64)
    keep = torch.zeros(len(rows), width, dtype=torch.bool)
    for place, row in enumerate(rows):
        part = slice(log.offsets[row], log.offsets[row + 1])
        size = part.stop - part.start
        times[place, :size] = torch.from_numpy((log.times[part] - log.times[part.start]) / unit)
        types[place, :size] = torch.from_numpy(log.types[part])
        keep[place, :size] = True
    return PaddedBatch(times, types, keep)


def fit_peer(
    name: str,
    train: EventSequences,
    valid: EventSequences,
    *,
    seconds: float,
    epochs: int = 1_000_000,
    batch_size: int = 16,
    lr: float = 3e-3,
    seed: int = 0,
) -> FittedPeer:
    """Train a peer with Adam and keep the weights of its best epoch on the validation log.

    Args:
        name: One of :data:`PEERS`.
        train: Training log.
        valid: Chooses the epoch.
        seconds: Processor seconds of training; the step that passes them is the last.
        epochs: Most epochs.
        batch_size: Sequences of a step, fewer if they are long.
        lr: Learning rate, constant as in easy-tpp.
        seed: Seed of parameters and of the order of the batches.
    """
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    unit = float(np.nanmedian(train.gaps))
    peer = FittedPeer(name, build_peer(name, len(train.names)), unit)
    optimizer = torch.optim.Adam(peer.model.parameters(), lr=lr)
    best, weights = -math.inf, peer.model.state_dict()
    while peer.epochs < epochs and peer.seconds < seconds:
        peer.model.train()
        for _, batch in _batches(train, unit, 128 * batch_size, random, batch_size):
            began = time.process_time()
            _step(peer.model, optimizer, batch)
            peer.seconds += time.process_time() - began
            peer.events += int(batch.keep[:, 1:].sum())
            if peer.seconds >= seconds:
                break
        peer.epochs += 1
        reached = _own_log_likelihood(peer.model, valid, unit)
        if reached > best:
            best, peer.best_epoch = reached, peer.epochs
            weights = copy.deepcopy(peer.model.state_dict())
    peer.model.load_state_dict(weights)
    return peer


def _step(model: Any, optimizer: torch.optim.Optimizer, batch: PaddedBatch) -> None:
    with warnings.catch_warnings():
        # easy-tpp builds some masks with deprecated calls
        warnings.simplefilter("ignore")
        loss, _ = model.loglike_loss(**batch.inputs(model))
    optimizer.zero_grad()
    (loss / int(batch.keep[:, 1:].sum())).backward()
    optimizer.step()


@torch.no_grad()
def _own_log_likelihood(model: Any, log: EventSequences, unit: float) -> float:
    """Return nats per event by the package's own loss; padding adds nothing to it."""
    model.eval()
    total, count = 0.0, 0
    for _, batch in _batches(log, unit, _SCORE_EVENTS):
        loss, _ = model.loglike_loss(**batch.inputs(model))
        total, count = total - float(loss), count + int(batch.keep[:, 1:].sum())
    return total / count


def peer_stepper(name: str, log: EventSequences) -> Callable[[], None]:
    """Return a function that makes one training step on a whole log."""
    model = build_peer(name, len(log.names))
    optimizer = torch.optim.Adam(model.parameters())
    batch = _pad(log, list(range(len(log))), float(np.nanmedian(log.gaps)))
    return lambda: _step(model, optimizer, batch)
