"""Futures of sequences, sampled event by event.

The past is read once. Every sampled event then costs a constant: the state of the attention moves
on, and the past is not read again.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from primal_attention.tasks.events.model import NextEventModel

__all__ = ["Paths", "sample_paths"]


class Paths(NamedTuple):
    """Sampled events, in no particular order."""

    row: Int[Tensor, " e"]
    """Number of the path."""
    step: Int[Tensor, " e"]
    """Place on the path, from 1."""
    wait: Float[Tensor, " e"]
    """Time since the reference time, in scaled units."""
    type: Int[Tensor, " e"]
    """Type."""


@torch.no_grad()
def sample_paths(
    model: NextEventModel,
    batch: Mapping[str, Tensor],
    *,
    n: int,
    horizon: float,
    gone: Float[Tensor, " b"],
    generator: torch.Generator,
    max_events: int,
) -> Paths:
    """Return ``n`` futures of every sequence of a batch; path ``i · n + j`` belongs to sequence i.

    Args:
        model: The model, in evaluation mode.
        batch: Inputs of the model.
        n: Paths of every sequence.
        horizon: How far to go from the reference time, in scaled units.
        gone: Time from the last event to the reference time, in which nothing happened.
        generator: Draws gaps and types.
        max_events: Most events of a path.

    Raises:
        ValueError: If a path has more events.
    """
    last = model.read_past(**batch)
    row = torch.arange(len(gone)).repeat_interleave(n)
    state = last.reorder(row)
    row = torch.arange(len(row))
    # waits count from the reference time, so the last event lies before zero
    waited = -gone[row // n]
    start = torch.clamp_min(-waited, 0.0)
    found: list[Paths] = []
    # the step beyond the last allowed one tells whether a path would go on
    for step in range(1, max_events + 2):
        waiting = model.waiting(state.hidden)
        _check(*waiting)
        gap = waiting.sample(generator, start if step == 1 else None)
        waited = waited + gap
        ahead = waited <= horizon
        if not ahead.any():
            break
        if step > max_events:
            raise ValueError(
                f"A path has more than {max_events} events before the horizon; choose a shorter "
                "horizon or a larger max_events. Excitation of the model may be explosive."
            )
        row, waited, gap = row[ahead], waited[ahead], gap[ahead]
        state = state.reorder(ahead.nonzero()[:, 0])
        # shorter gaps counted as this one in training
        gap = gap.clamp_min(model.config.smallest_gap)
        shares = model.type_logits(state.hidden, gap).double().softmax(-1)
        _check(shares)
        kind = torch.multinomial(shares, 1, generator=generator)[:, 0]
        found.append(Paths(row, torch.full_like(row, step), waited, kind))
        state = model.read_next(kind, gap, state)
    if not found:
        none = torch.zeros(0, dtype=torch.int64)
        return Paths(none, none, torch.zeros(0, dtype=torch.float64), none)
    return Paths(*(torch.cat(column) for column in zip(*found, strict=True)))


def _check(*answers: Tensor) -> None:
    """Raise if a model answers NaN."""
    if any(bool(answer.isnan().any()) for answer in answers):
        raise ValueError(
            "The model has no finite answer to a sequence; its weights are damaged, or the "
            "sequence is far from those of its training."
        )
