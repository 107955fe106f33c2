"""Blocks with self-attention and cross-attention, read as one attention over all tokens.

In models such as LXMERT, ViLBERT and METER the tokens of each modality have a sequence of their
own. A block mixes them by self-attention and by cross-attention to the other sequence. Cross
weights alone cross completely, by construction. Each token therefore weighs its two attentions by
the norms of their outputs::

    A[i, own] = ‖o_self‖ / (‖o_self‖ + ‖o_cross‖) A_self[i]        A[i, other] likewise

The rows of the joint matrix sum to one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from primal_attention.analysis.flow.layers import value_norms
from primal_attention.hosts import CapturedLayer

__all__ = ["CoAttention", "Member"]


@dataclass(frozen=True)
class Member:
    """One attention of a block: which sequence receives, and which one sends."""

    layer: CapturedLayer
    receiver: int
    """Number of the sequence of the queries."""
    sender: int
    """Number of the sequence of the keys."""
    out: Float[Tensor, "c hv"] | None = None
    """Output map, if the output of the layer is that of the heads."""

    def output_norms(self, sequence: int) -> Float[Tensor, " n"]:
        """Return the norm of the output of every real token."""
        output = self.layer.output[sequence][self.layer.query_keep[sequence]].double()
        return (output if self.out is None else output @ self.out.double().T).norm(dim=-1)


class CoAttention(CapturedLayer):
    """A block of attentions between sequences, as one layer over the joined sequences.

    Args:
        name: Name of the block.
        members: Its attentions; all have the same number of heads.
        lengths: Number of tokens of each sequence, padding included, in the order of joining.
        has_norms: Whether rows are ``‖A_ij v_j W_o‖`` instead of weights.
    """

    def __init__(
        self, name: str, members: Sequence[Member], lengths: Sequence[int], *, has_norms: bool
    ) -> None:
        self.name, self.members, self.has_norms = name, tuple(members), has_norms
        self.num_heads, self.head_dim = members[0].layer.num_heads, members[0].layer.head_dim
        self.is_causal = False
        # a token is real if every attention of the block says so
        real = [torch.ones(len(members[0].layer), n, dtype=torch.bool) for n in lengths]
        for member in members:
            real[member.sender] &= member.layer.keep
            real[member.receiver] &= member.layer.query_keep
        receives = [any(member.receiver == i for member in members) for i in range(len(real))]
        queries = [
            keep if yes else torch.zeros_like(keep)
            for keep, yes in zip(real, receives, strict=True)
        ]
        for member in members:
            member.layer.keep = real[member.sender]
            member.layer.query_keep = real[member.receiver]
        self._keeps, self._queries = real, queries
        self.keep, self.query_keep = torch.cat(real, 1), torch.cat(queries, 1)

    def _rows(self, sequence: int, rows: slice) -> Float[Tensor, "h rows m"]:
        m = int(self.keep[sequence].sum())
        found = torch.zeros(self.num_heads, rows.stop - rows.start, m, dtype=torch.float64)
        # rows and columns count real tokens only, so a block begins where the one before it ends
        starts = _starts([keep[sequence] for keep in self._keeps])
        first = _starts([keep[sequence] for keep in self._queries])
        for member in self.members:
            begin, end = first[member.receiver], first[member.receiver + 1]
            low, high = max(rows.start, begin), min(rows.stop, end)
            if low >= high:
                continue
            own = slice(low - begin, high - begin)
            weights = member.layer.weights(sequence, rows=own)
            if self.has_norms:
                norms = value_norms(member.layer.values(sequence), member.out)
                weights = weights * norms[:, None]
            else:
                weights = weights * self._share(member, sequence)[own, None]
            columns = slice(starts[member.sender], starts[member.sender + 1])
            found[:, low - rows.start : high - rows.start, columns] += weights
        return found

    def _share(self, member: Member, sequence: int) -> Float[Tensor, " n"]:
        """Return the share of one attention in what each of its tokens receives."""
        norms = member.output_norms(sequence)
        rivals = [m for m in self.members if m.receiver == member.receiver]
        total = torch.stack([m.output_norms(sequence) for m in rivals]).sum(0)
        return norms / torch.where(total > 0, total, 1.0)

    def values(self, sequence: int = 0) -> Float[Tensor, "h m v"]:
        """Refuse: a token has one value in each attention of the block."""
        raise ValueError(f"{self.name} has several values for each token; use has_norms=True.")


def _starts(keeps: Sequence[Tensor]) -> list[int]:
    """Return where each sequence begins among the real tokens, and the total."""
    starts = [0]
    for keep in keeps:
        starts.append(starts[-1] + int(keep.sum()))
    return starts
