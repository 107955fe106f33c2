"""The adaptive sum of one head of queries over one head of keys, forward and backward."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from primal_attention.functional.adaptive_chosen import join_chosen, pull_chosen
from primal_attention.functional.adaptive_far import join_moments, pull_moments
from primal_attention.functional.adaptive_keys import HeadKeys, KeyGradients, Rows, widen
from primal_attention.functional.adaptive_near import join_sinks, near_groups, pull_sinks

__all__ = ["HeadSum", "attend_head", "pull_head"]


class HeadSum(NamedTuple):
    """What the forward of a head leaves for its backward."""

    y: Float[Tensor, "n v"]
    log_total: Float[Tensor, " n"]
    choices: Int[Tensor, "n t"]
    """Blocks that every query after the first ones chose; -1 where there is none."""


def attend_head(
    q: Float[Tensor, "n d"],
    keys: HeadKeys,
    y: Float[Tensor, "n v"],
    neglected: Float[Tensor, "n two"] | None = None,
) -> HeadSum:
    """Write the adaptive sum of one head of queries into ``y``.

    Args:
        q: Queries.
        keys: Keys.
        y: For the outputs.
        neglected: For the share of the mass that comes from moments, and its spread.
    """
    q = widen(q, keys.k.shape[-1])
    out = y if y.shape[-1] == q.shape[-1] else torch.empty_like(q)
    log_total = q.new_empty(len(q))
    for near in near_groups(len(q), keys):
        near.attend(q, keys, out, log_total)
    choices = torch.empty(0, 0, dtype=torch.int32)
    if keys.first is not None and keys.first < len(q):
        q, rest, logs = (t[keys.first :] for t in (q, out, log_total))
        join_sinks(q, keys, rest, logs)
        noted = None if neglected is None else neglected[keys.first :]
        choices = join_moments(q, keys, rest, logs, noted)
        join_chosen(q, keys, rest, logs, choices)
        if noted is not None:
            noted.sub_(logs[:, None]).exp_()
    if out is not y:
        y.copy_(out[:, : y.shape[-1]])
    return HeadSum(y, log_total, choices)


def pull_head(
    q: Float[Tensor, "n d"],
    keys: HeadKeys,
    found: HeadSum,
    grad: Float[Tensor, "n v"],
    pull: KeyGradients,
) -> Float[Tensor, "n d"]:
    """Return the gradient of the queries, and add those of the keys to ``pull``."""
    given, width = q.shape[-1], keys.k.shape[-1]
    q, y, grad = (widen(t, width).contiguous() for t in (q, found.y, grad))
    grad_q, log_total = torch.zeros_like(q), found.log_total
    for near in near_groups(len(q), keys):
        near.pull(q, keys, grad, y, log_total, grad_q, pull)
    if keys.first is not None and keys.first < len(q):
        rows = Rows(*(t[keys.first :] for t in (q, grad, y, log_total, grad_q)))
        pull_sinks(rows, keys, pull)
        pull_moments(rows, keys, found.choices, pull)
        pull_chosen(rows, keys, found.choices, pull)
    return grad_q[:, :given]
