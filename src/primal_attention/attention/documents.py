"""Documents packed into one row, and how an attention keeps them apart.

``document_ids`` names the document of every token. The tokens of a row with the same id are one
document, in their order; tokens with a negative id are padding. An attention unpacks its rows to
padded batches ``[documents, longest]``, runs on them with ``key_mask``, and packs the outputs. So
every mechanism that takes padding equals itself on the documents one by one, regulariser included.

Padding costs time. If it is more than a little, documents of similar length run together: in a
batch the longest is then less than twice as long as the shortest.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Self

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

__all__ = [
    "DocumentBatch",
    "Documents",
    "Ran",
    "RunsBatch",
    "attend_documents",
    "check_document_ids",
    "document_ids_of",
]

_FEW_SLOTS = 1024
"""Padding that costs less than another call of a layer."""


class DocumentBatch(NamedTuple):
    """Documents that run together, each in a row of its own, padded at the end."""

    slots: Int[Tensor, " t"]
    """Slot of every token in the flattened packed rows."""
    places: Int[Tensor, " t"]
    """Slot of every token in the flattened batch."""
    rows: int
    """Number of documents."""
    longest: int
    """Number of tokens of the longest one."""
    numbers: Int[Tensor, " docs"]
    """Numbers of the documents among all."""

    def unpack(self, x: Shaped[Tensor, "b n *rest"]) -> Shaped[Tensor, "docs longest *rest"]:
        """Return the tokens of the documents; zero, or ``False``, at padding."""
        rest = x.shape[2:]
        # only real tokens are read, so that a NaN in a padded slot reaches nothing
        tokens = x.flatten(0, 1).index_select(0, self.slots)
        empty = x.new_zeros(self.rows * self.longest, *rest)
        return empty.index_copy(0, self.places, tokens).view(self.rows, self.longest, *rest)

    def read(self, y: Shaped[Tensor, "docs longest *rest"]) -> Shaped[Tensor, "t *rest"]:
        """Return the rows of ``y`` that belong to the tokens."""
        return y.flatten(0, 1).index_select(0, self.places)

    def mask(self, key_mask: Bool[Tensor, "b n"] | None) -> Bool[Tensor, "docs longest"] | None:
        """Return which tokens of the documents are real; ``None`` if all are."""
        if key_mask is not None:
            return self.unpack(key_mask)
        if len(self.places) == self.rows * self.longest:
            return None
        keep = torch.zeros(self.rows * self.longest, dtype=torch.bool, device=self.places.device)
        return keep.index_fill(0, self.places, True).view(self.rows, self.longest)


class Documents(NamedTuple):
    """Where the documents of packed rows lie, in the order of rows and, in a row, of ids.

    Example:
        >>> ids = torch.tensor([[0, 0, 0, 1, -1], [2, 2, 3, 3, 3]])
        >>> documents = Documents.find(ids)
        >>> documents.lengths
        tensor([3, 1, 2, 3])
        >>> documents.positions()[0]
        tensor([0, 1, 2, 0, 0])
    """

    shape: tuple[int, int]
    """Rows and slots of a row."""
    slots: Int[Tensor, " t"]
    """Slot of every token in the flattened rows, document by document."""
    number: Int[Tensor, " t"]
    """Document of every token."""
    position: Int[Tensor, " t"]
    """Position of every token in its document."""
    lengths: Int[Tensor, " docs"]
    """Number of tokens of every document."""

    @classmethod
    def find(cls, document_ids: Int[Tensor, "b n"]) -> Self:
        """Return the documents of packed rows."""
        if torch.compiler.is_exporting():
            raise RuntimeError(
                "A layer with document_ids cannot be exported: the number of documents depends on "
                "their values. Export the layer without, and pass one document a row."
            )
        b, n = document_ids.shape
        ids, order = document_ids.sort(dim=1, stable=True)
        begins = torch.ones_like(ids, dtype=torch.bool)
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
        real = ids.flatten() >= 0
        row = torch.arange(b, device=ids.device)[:, None]
        slots = (order + n * row).flatten()[real]
        number = begins.flatten()[real].cumsum(0) - 1
        lengths = number.bincount()
        first = lengths.cumsum(0) - lengths
        position = torch.arange(len(slots), device=ids.device) - first[number]
        return cls((b, n), slots, number, position, lengths)

    def positions(self) -> Int[Tensor, "b n"]:
        """Return the position of every token in its document; zero at padding."""
        return self.pack(self.position)

    def pack(self, tokens: Shaped[Tensor, "t *rest"]) -> Shaped[Tensor, "b n *rest"]:
        """Return values of the tokens, document by document, as rows; zero at padding."""
        b, n = self.shape
        rows = tokens.new_zeros(b * n, *tokens.shape[1:])
        return rows.index_copy(0, self.slots, tokens).view(b, n, *tokens.shape[1:])

    def batch(self) -> DocumentBatch:
        """Return all documents as one batch; one empty document if there is none."""
        rows, longest = max(len(self.lengths), 1), 1
        if len(self.lengths):
            longest = int(self.lengths.max())
        places = self.number * longest + self.position
        numbers = torch.arange(len(self.lengths), device=places.device)
        return DocumentBatch(self.slots, places, rows, longest, numbers)

    def batches(self) -> list[DocumentBatch]:
        """Return the documents as batches with little padding."""
        whole = self.batch()
        if whole.rows * whole.longest - len(self.slots) <= _FEW_SLOTS:
            return [whole]
        size = torch.frexp(self.lengths.double()).exponent
        return [self._batch_of(size == s) for s in size.unique().tolist()]

    def _batch_of(self, chosen: Bool[Tensor, " docs"]) -> DocumentBatch:
        """Return some of the documents as one batch."""
        keep = chosen[self.number]
        number = (chosen.cumsum(0) - 1)[self.number[keep]]
        kept = self.slots[keep], number, self.position[keep], self.lengths[chosen]
        return Documents(self.shape, *kept).batch()._replace(numbers=chosen.nonzero().flatten())

    def reduce(
        self,
        x: Float[Tensor, "b n c"],
        key_mask: Bool[Tensor, "b n"] | None,
        pool: Callable[[Tensor, Tensor | None], Tensor],
    ) -> Float[Tensor, "docs c"]:
        """Return one vector for each document.

        Args:
            x: Packed rows.
            key_mask: ``True`` where a token is real.
            pool: Returns the vector of each row of a batch and its ``key_mask``.
        """
        batches = self.batches()
        found = torch.cat([pool(b.unpack(x), b.mask(key_mask))[: len(b.numbers)] for b in batches])
        return found[torch.cat([b.numbers for b in batches]).argsort()]


Ran = tuple[Tensor, Tensor | None]
"""Outputs ``[docs, longest, c]``, and the regulariser as a mean over documents."""


class RunsBatch(Protocol):
    """Runs an attention on a batch of documents."""

    def __call__(
        self, batch: DocumentBatch, key_mask: Bool[Tensor, "docs longest"] | None, has_term: bool, /
    ) -> Ran:
        """Return the outputs, with the regulariser if ``has_term``."""


def attend_documents(
    run: RunsBatch,
    document_ids: Int[Tensor, "b n"],
    key_mask: Bool[Tensor, "b n"] | None = None,
    has_term: bool = False,
) -> tuple[Float[Tensor, "b n c"], Float[Tensor, ""] | None]:
    """Return the outputs of packed rows, and the regulariser as a mean over documents.

    Args:
        run: Runs the attention on a batch of documents.
        document_ids: Document of every token.
        key_mask: ``True`` where a token is real.
        has_term: Whether the regulariser is needed.
    """
    documents = Documents.find(document_ids)
    slots, outputs, terms, weights = [], [], [], []
    for batch in documents.batches():
        keep = batch.mask(key_mask)
        y, term = run(batch, keep, has_term)
        slots.append(batch.slots)
        outputs.append(batch.read(y))
        if term is not None:
            terms.append(term)
            weights.append(_nonempty(batch, keep, term))
    y = documents._replace(slots=torch.cat(slots)).pack(torch.cat(outputs))
    if not terms:
        return y, None
    weight = torch.stack(weights)
    return y, (torch.stack(terms) * weight).sum() / weight.sum().clamp_min(1)


def _nonempty(batch: DocumentBatch, keep: Tensor | None, like: Tensor) -> Float[Tensor, ""]:
    """Return the number of documents with a real token: others have no regulariser."""
    return like.new_tensor(batch.rows) if keep is None else keep.any(1).sum().to(like.dtype)


def document_ids_of(
    *,
    lengths: Sequence[int] | Int[Tensor, " docs"] | None = None,
    cu_seqlens: Sequence[int] | Int[Tensor, " bounds"] | None = None,
    tokens: int | None = None,
) -> Int[Tensor, "one n"]:
    """Return the ``document_ids`` of one row.

    Args:
        lengths: Number of tokens of every document.
        cu_seqlens: The same as sums that begin with zero, as other libraries have it.
        tokens: Length of the row, if padding follows the documents.

    Example:
        >>> document_ids_of(lengths=[2, 1, 3], tokens=7)
        tensor([[ 0,  0,  1,  2,  2,  2, -1]])
        >>> document_ids_of(cu_seqlens=[0, 2, 3, 6])
        tensor([[0, 0, 1, 2, 2, 2]])
    """
    if (lengths is None) == (cu_seqlens is None):
        raise ValueError("document_ids_of takes either lengths or cu_seqlens; give one of them.")
    if cu_seqlens is not None:
        bounds = torch.as_tensor(cu_seqlens)
        if bounds.dim() != 1 or not len(bounds) or bounds[0] != 0:
            raise ValueError(
                f"cu_seqlens must be one row of numbers that begins with 0, got {_show(bounds)}; "
                "write lengths= if these are the lengths of the documents."
            )
        counts = bounds.diff()
    else:
        counts = torch.as_tensor(lengths)
    if counts.dim() != 1 or counts.is_floating_point() or (counts < 0).any():
        raise ValueError(
            f"The lengths of documents must be one row of whole numbers of at least 0, got "
            f"{_show(counts)}; count the tokens of every document."
        )
    number = torch.arange(len(counts), device=counts.device)
    ids = number.repeat_interleave(counts.long())
    missing = 0 if tokens is None else tokens - len(ids)
    if missing < 0:
        raise ValueError(
            f"The documents have {len(ids)} tokens and the row only {tokens}; raise tokens, or "
            "pack fewer documents into the row."
        )
    return torch.nn.functional.pad(ids, (0, missing), value=-1)[None]


def check_document_ids(document_ids: Tensor, shape: Sequence[int]) -> None:
    """Raise unless there is one whole number for every token."""
    if document_ids.dtype == torch.bool or document_ids.is_floating_point():
        raise TypeError(
            f"document_ids must be whole numbers, got {document_ids.dtype}; number the documents "
            "of a row, as document_ids_of does."
        )
    if document_ids.shape != tuple(shape):
        raise ValueError(
            f"document_ids must have shape [batch, tokens] = {tuple(shape)}, got "
            f"{tuple(document_ids.shape)}; give the document of every token."
        )


def _show(numbers: Tensor) -> str:
    shown = numbers.flatten()[:6].tolist()
    return f"{shown} of shape {tuple(numbers.shape)}"
