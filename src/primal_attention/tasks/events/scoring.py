"""Likelihoods, hits and calibration of a model of next events.

Everything about an event that had to be predicted is one row. Rows of all sequences follow each
other in the order of the log.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from primal_attention.tasks.events.model import NextEventModel, NextEventOutput
from primal_attention.training.scores import IGNORED, Score

__all__ = [
    "Reader",
    "answer_events",
    "decode_names",
    "encode_names",
    "event_loss",
    "next_event",
    "score_events",
]

TOP, MANY_TYPES = 10, 50
"""Ranks count from this many types on: among few types, the first ten say little."""
MOST_WAIT = 10.0
"""Waits beyond this many times the longest gap of the training count as that in a mean."""


class Read(NamedTuple):
    """The output of a model, and the model itself for questions about other gaps."""

    output: NextEventOutput
    model: NextEventModel

    @property
    def aux_loss(self) -> Tensor | None:
        """Regulariser of the layers."""
        return self.output.aux_loss


class Reader(nn.Module):
    """A model whose output also gives access to the model, so that answers can ask it more."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = cast(NextEventModel, model)

    def forward(self, **inputs: object) -> Read:
        """Return the output and the model."""
        return Read(self.model(**inputs), self.model)


def event_loss(output: Any, labels: Int[Tensor, "b n"]) -> Float[Tensor, ""]:
    """Return the negative log-likelihood per event, in nats and scaled time."""
    found: NextEventOutput = getattr(output, "output", output)
    losses = nn.functional.cross_entropy(
        found.logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(labels.shape)
    asked = labels != IGNORED
    total = torch.where(asked, losses - found.log_density, 0.0).sum()
    return total / asked.sum().clamp_min(1)


def answer_events(read: Read, labels: Int[Tensor, "b n"], scale: float) -> dict[str, Tensor]:
    """Return one row for every event that had to be predicted.

    Args:
        read: Output and model.
        labels: Types of the next events; −100 where none is asked for.
        scale: Unit of the model's times, in units of the log.
    """
    output, model = read
    asked = labels != IGNORED
    waiting = type(output.waiting)(*(t[asked] for t in output.waiting)).double()
    gap, hidden, label = output.gap[asked], output.hidden[asked], labels[asked]
    told = output.logits[asked].double().log_softmax(-1)
    blind = model.type_marginal(hidden, waiting.nodes())
    half = torch.full_like(gap, 0.5)
    place = torch.arange(len(labels), device=labels.device)[:, None].expand_as(labels)
    ranks = {}
    if told.shape[1] >= MANY_TYPES:
        for name, logs in (("rank", told), ("rank_blind", blind)):
            ranks[name] = 1 + (logs > logs.gather(1, label[:, None])).sum(1)
    return {
        **ranks,
        "type": label,
        "gap": gap * scale,
        "log_time": waiting.log_prob(gap) - math.log(scale),
        "log_type": told.gather(1, label[:, None])[:, 0],
        "log_type_blind": blind.gather(1, label[:, None])[:, 0],
        "guess": told.argmax(1),
        "sure": told.exp().amax(1),
        "guess_blind": blind.argmax(1),
        "sure_blind": blind.exp().amax(1),
        "pit": waiting.cdf(gap),
        "median": waiting.quantile(half) * scale,
        "events": asked.sum(1),
        "length": place[asked],
    }


def next_event(
    model: NextEventModel,
    output: NextEventOutput,
    last: Int[Tensor, " b"],
    *,
    longest: float,
    gone: Float[Tensor, " b"] | None = None,
    level: float = 0.8,
) -> dict[str, Tensor]:
    """Return what is predicted after the last event of every sequence, in scaled time.

    Args:
        model: The model.
        output: Its output for the sequences.
        last: Place of the last event of each.
        longest: Longest gap of the training in scaled time.
        gone: Time that has passed since then without an event.
        level: Probability that the wait lies in the interval.
    """
    rows = torch.arange(len(last), device=last.device)
    waiting = type(output.waiting)(*(t[rows, last] for t in output.waiting)).double()
    hidden = output.hidden[rows, last]
    zero = torch.zeros(len(last), dtype=torch.float64, device=last.device)
    gone = zero if gone is None else gone.double()
    nodes = waiting.nodes()
    if (gone > 0).any():
        # quadrature of the truncated distribution: its quantiles at evenly spaced shares
        shares = (torch.arange(32, dtype=torch.float64, device=last.device) + 0.5) / 32
        gaps = torch.stack([waiting.quantile(s.expand_as(gone), gone) for s in shares], -1)
        nodes = type(nodes)(gaps, torch.full_like(gaps, -math.log(32)))
    edges = {"lower": (1 - level) / 2, "median": 0.5, "upper": (1 + level) / 2}
    found = {k: waiting.quantile(torch.full_like(zero, p), gone) for k, p in edges.items()}
    return {
        "probabilities": model.type_marginal(hidden, nodes).exp(),
        "mean": waiting.mean(MOST_WAIT * longest, gone),
        **found,
    }


def score_events(answers: Mapping[str, Tensor], unit: str, scale: float) -> dict[str, Score]:
    """Return loss, log-likelihood, accuracy with either reference time, and calibration.

    Args:
        answers: Rows of :func:`answer_events`.
        unit: Unit of the log.
        scale: Unit of the model's times, in which the loss is measured as in training.
    """
    count = len(answers["type"])
    if not count:
        return {}
    joint = answers["log_time"] + answers["log_type"]
    pit = answers["pit"].sort().values
    even = (torch.arange(count, dtype=pit.dtype) + 0.5) / count
    late = (answers["median"] - answers["gap"]).abs()
    return {
        "loss": _mean(-joint - math.log(scale), larger_is_better=False),
        f"log-likelihood (nats per event, {unit})": _mean(joint),
        "accuracy, t_ref=last_event": _share(answers["guess_blind"] == answers["type"]),
        "accuracy, t_ref=target": _share(answers["guess"] == answers["type"]),
        f"log-likelihood of the time ({unit})": _mean(answers["log_time"]),
        "log-likelihood of the type, t_ref=target": _mean(answers["log_type"]),
        "log-likelihood of the type, t_ref=last_event": _mean(answers["log_type_blind"]),
        f"absolute error of the wait ({unit})": _mean(late, larger_is_better=False),
        "miscalibration of the wait": Score(
            float((pit - even).abs().max()), larger_is_better=False
        ),
        **_rank_scores(answers),
    }


def _rank_scores(answers: Mapping[str, Tensor]) -> dict[str, Score]:
    """Return how high the true types rank among all types, if there are many."""
    scores = {}
    for t_ref, name in (("last_event", "rank_blind"), ("target", "rank")):
        if name in answers:
            rank = answers[name].double()
            gain = torch.where(rank <= TOP, 1 / (1 + rank).log2(), 0.0)
            scores[f"hit rate at {TOP}, t_ref={t_ref}"] = _share(rank <= TOP)
            scores[f"NDCG at {TOP}, t_ref={t_ref}"] = _mean(gain)
    return scores


def encode_names(names: Sequence[str]) -> Int[Tensor, "b width"]:
    """Return names as numbers of their characters, so that they can travel with answers.

    Example:
        >>> decode_names(encode_names(["u1", "Zoë"]))
        ['u1', 'Zoë']
    """
    width = max(map(len, names), default=0) or 1
    return torch.tensor([[*map(ord, name), *[-1] * (width - len(name))] for name in names])


def decode_names(codes: Int[Tensor, "b width"]) -> list[str]:
    """Return the names that :func:`encode_names` encoded."""
    return ["".join(chr(c) for c in row if c >= 0) for row in codes.tolist()]


def _mean(values: Tensor, *, larger_is_better: bool = True) -> Score:
    error = float(values.double().std(correction=0)) / len(values) ** 0.5
    return Score(float(values.double().mean()), error, larger_is_better=larger_is_better)


def _share(hits: Tensor) -> Score:
    share = float(hits.double().mean())
    return Score(share, (share * (1 - share) / len(hits)) ** 0.5, is_share=True)
