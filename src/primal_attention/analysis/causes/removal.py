"""Ways to remove tokens from an input, because an explanation depends on how this is done.

================  ================================================================================
``"mask"``        the mask token replaces them
``"pad"``         the padding token replaces them and is still attended to
``"drop"``        they are deleted, and later tokens move up
``"attend"``      they stay, but no token attends to them
``"zero"``        their embeddings are zero; positions stay
``"resample"``    random tokens replace them, several times; the majority of the decisions counts
================  ================================================================================
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from primal_attention.support.command import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Removal", "Removed", "Remover", "choose_removal", "remove"]

Removal = Literal["mask", "pad", "drop", "attend", "zero", "resample"]
"""How tokens are removed."""


class Removed(NamedTuple):
    """Inputs without some tokens; all rows have one length."""

    owners: list[int]
    """Which set of tokens each row lacks, as an index of the sets."""
    ids: Int[Tensor, "b n"]
    """Ids of the tokens."""
    positions: Int[Tensor, "b n"]
    """Where each token was in the original input."""
    keep: Bool[Tensor, "b n"]
    """``False`` where no token may attend to the token."""
    zeroed: Bool[Tensor, "b n"]
    """``True`` where the embedding is zero."""


class Remover(NamedTuple):
    """A removal with what it needs.

    Example:
        >>> mask = Remover("mask", fill=9)
        >>> remove(torch.tensor([5, 6, 7]), [(1,), (0, 2)], mask)[0].ids
        tensor([[5, 9, 7], [9, 6, 9]])
    """

    kind: Removal
    fill: int | None = None
    """Id of the mask or padding token, for ``"mask"`` and ``"pad"``."""
    replacements: Int[Tensor, "k n"] | None = None
    """Random ids for every position, one row a sample, for ``"resample"``. All sets use the same
    ids, so two sets differ by their tokens only."""


def choose_removal(
    tokenizer: "PreTrainedTokenizerBase | None",
    ids: Int[Tensor, " n"],
    *,
    removal: str = "auto",
    samples: int = 5,
    proposal: Sequence[int] | None = None,
    seed: int = 0,
) -> Remover:
    """Return the removal for a tokenizer.

    Args:
        tokenizer: Tokenizer of transformers, or ``None``.
        ids: Ids of the tokens of the input.
        removal: A removal, or ``"auto"``: ``"mask"`` if the tokenizer has a mask token, else
            ``"attend"``.
        samples: Inputs to draw for each set, for ``"resample"``.
        proposal: Ids to draw from, for ``"resample"``; by default all ordinary tokens of the
            vocabulary.
        seed: Seed of the draws.
    """
    mask, pad = (getattr(tokenizer, f"{name}_token_id", None) for name in ("mask", "pad"))
    if removal == "auto":
        removal = "attend" if mask is None else "mask"
    if removal not in get_args(Removal):
        raise ValueError(
            f"removal must be 'auto' or one of {', '.join(map(repr, get_args(Removal)))}, got "
            f"{removal!r}.{did_you_mean(removal, get_args(Removal))}"
        )
    fill = {"mask": mask, "pad": pad}.get(removal)
    if removal in ("mask", "pad") and fill is None:
        raise ValueError(
            f"removal={removal!r} needs a {removal} token, and the tokenizer has none; use "
            "removal='attend' or 'drop'."
        )
    if removal != "resample":
        return Remover(removal, fill)  # type: ignore[arg-type]
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}.")
    if proposal is None:
        if tokenizer is None:
            raise ValueError("removal='resample' needs a tokenizer, or proposal, ids to draw from.")
        special = set(tokenizer.all_special_ids)
        proposal = [i for i in range(len(tokenizer)) if i not in special]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(proposal), (samples, len(ids)), generator=generator)
    return Remover("resample", replacements=torch.as_tensor(list(proposal))[drawn])


def remove(
    ids: Int[Tensor, " n"], sets: Sequence[tuple[int, ...]], remover: Remover
) -> list[Removed]:
    """Return the inputs without each set of tokens, as few batches of rows of equal length.

    Args:
        ids: Ids of the tokens.
        sets: Positions to remove.
        remover: How.

    Returns:
        The batches. ``"resample"`` gives several rows for a set, the others give one. A set that
        leaves no token has no row.
    """
    n = len(ids)
    for positions in sets:
        wrong = [i for i in positions if not 0 <= i < n]
        if wrong:
            raise ValueError(f"Positions must be from 0 to {n - 1}, got {wrong[0]}.")
    gone = torch.zeros(len(sets), n, dtype=torch.bool)
    for row, positions in zip(gone, sets, strict=True):
        row[list(positions)] = True
    if remover.kind == "drop":
        return _drop(ids, gone)
    owners = list(range(len(sets)))
    rows = ids.expand(len(sets), n).clone()
    if remover.kind == "resample":
        if remover.replacements is None:
            raise ValueError("removal='resample' needs replacements; see choose_removal.")
        samples = len(remover.replacements)
        owners = [i for i in owners for _ in range(samples)]
        rows = torch.where(
            gone.repeat_interleave(samples, 0), remover.replacements.repeat(len(sets), 1), ids
        )
    elif remover.kind in ("mask", "pad"):
        if remover.fill is None:
            raise ValueError(f"removal={remover.kind!r} needs the id of the token to fill in.")
        rows = rows.masked_fill(gone, remover.fill)
    every = torch.zeros_like(rows, dtype=torch.bool)
    keep = ~gone if remover.kind == "attend" else ~every
    zeroed = gone if remover.kind == "zero" else every
    where = torch.arange(n).expand(len(rows), n)
    found = Removed(owners, rows, where, keep, zeroed)
    # a model cannot attend to nothing
    left = keep.any(1)
    if not left.all():
        owners = [owner for owner, is_left in zip(owners, left.tolist(), strict=True) if is_left]
        found = Removed(owners, *(t[left] for t in found[1:]))
    return [found] if found.owners else []


def _drop(ids: Int[Tensor, " n"], gone: Bool[Tensor, "b n"]) -> list[Removed]:
    """Delete tokens; rows of one length form a batch, so nothing is padded."""
    lengths = (~gone).sum(1)
    found = []
    for length in lengths.unique().tolist():
        if not length:
            continue
        owners = (lengths == length).nonzero()[:, 0]
        positions = (~gone[owners]).nonzero()[:, 1].reshape(len(owners), length)
        every = torch.ones_like(positions, dtype=torch.bool)
        found.append(Removed(owners.tolist(), ids[positions], positions, every, ~every))
    return found
