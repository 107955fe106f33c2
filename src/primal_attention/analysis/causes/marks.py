"""Marks at the ends of edges, and what they allow: causes and paths of potential influence."""

import numpy as np
from jaxtyping import Bool, Int8

__all__ = ["ARROW", "CIRCLE", "NONE", "TAIL", "influence_steps", "possible_ancestors"]

NONE, CIRCLE, ARROW, TAIL = 0, 1, 2, 3


def possible_ancestors(marks: Int8[np.ndarray, "n n"]) -> Bool[np.ndarray, "n n"]:
    """Return ``[i, j]`` = a path from ``i`` to ``j`` without arrowheads back or tails forward."""
    step = (marks > 0) & (marks != TAIL) & (marks.T != ARROW)
    reach = step | np.eye(len(marks), dtype=bool)
    while True:
        # products of float32 use the fast matrix product; bool would not
        wider = (reach.astype(np.float32) @ reach.astype(np.float32)) > 0
        if (wider == reach).all():
            return reach
        reach = wider


def influence_steps(marks: Int8[np.ndarray, "n n"]) -> Bool[np.ndarray, "n n n"]:
    """Return ``[u, v, w]`` = a path of potential influence may go from u over v to w."""
    edge = marks > 0
    into = marks == ARROW  # [u, v]: arrowhead at v
    collider = into[:, :, None] & into.T[None, :, :]  # [u, v, w]: u *-> v <-* w
    steps: Bool[np.ndarray, "n n n"] = (
        edge[:, :, None] & edge[None, :, :] & (edge[:, None, :] | collider)
    )
    nodes = np.arange(len(marks))
    steps[nodes, :, nodes] = False
    return steps
