"""Data sets, batches and their order."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset

from primal_attention.training.scores import IGNORED

__all__ = ["Columns", "Fingerprint", "PackedCollator", "map_tensors", "pad_collate"]

Item = Mapping[str, Tensor]


class Columns(Dataset[dict[str, Tensor]]):
    """A data set of named columns, one entry a sequence: tensors, or lists of unequal tensors.

    Args:
        columns: Keyword inputs of the model, and ``labels``.

    Example:
        >>> data = Columns(x=[torch.zeros(5, 2), torch.zeros(3, 2)], labels=torch.tensor([0, 1]))
        >>> data[1]["x"].shape
        torch.Size([3, 2])
    """

    def __init__(self, **columns: Tensor | Sequence[Tensor]) -> None:
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"All columns must have the same number of entries, got {lengths}.")
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def pad_collate(items: Sequence[Item]) -> dict[str, Tensor]:
    """Return one tensor per key; unequal lengths are padded at the end and get a mask.

    The lengths of ``x`` go to ``key_mask``, those of another ``name`` to ``name_mask``, unless the
    items bring that mask. Labels are padded with ``-100``, which no loss counts.

    Example:
        >>> batch = pad_collate([{"x": torch.ones(2, 1)}, {"x": torch.ones(3, 1)}])
        >>> batch["key_mask"]
        tensor([[ True,  True, False],
                [ True,  True,  True]])
    """
    batch: dict[str, Tensor] = {}
    for name in items[0]:
        columns = [item[name] for item in items]
        if len({c.shape for c in columns}) == 1:
            batch[name] = torch.stack(columns)
            continue
        batch[name] = _pad(columns, IGNORED if name == "labels" else 0)
        mask = "key_mask" if name == "x" else f"{name}_mask"
        if name != "labels" and not name.endswith("mask") and mask not in items[0]:
            lengths = torch.tensor([len(c) for c in columns])
            batch[mask] = torch.arange(int(lengths.max())) < lengths[:, None]
    return batch


class PackedCollator:
    """Packs the items of a batch into rows of at most ``max_tokens`` tokens, with ``document_ids``.

    Items become documents: models that take ``document_ids`` keep them apart. Long items come
    first, each in the first row with enough room. Tensors with one entry for a token are packed;
    of the others, such as the label of an item, there is one entry a document, in the order of
    ``document_ids``, which count through the batch. With labels of tokens, ``cross_entropy`` is the
    mean over packed rows; a mean over tokens is that of the padded batch.

    Args:
        max_tokens: Largest number of tokens in a row.
        columns: Names of the tensors with one entry for a token.

    Example:
        >>> items = [{"x": torch.ones(n, 1), "labels": torch.tensor(n)} for n in (2, 3, 1)]
        >>> batch = PackedCollator(4)(items)
        >>> batch["document_ids"]
        tensor([[ 0,  0,  0,  1],
                [ 2,  2, -1, -1]])
        >>> batch["labels"]
        tensor([3, 1, 2])
    """

    def __init__(self, max_tokens: int, columns: Sequence[str] = ("x",)) -> None:
        if max_tokens < 1 or not columns:
            raise ValueError(
                f"max_tokens must be at least 1 and columns must name a tensor, got {max_tokens} "
                f"and {list(columns)}; columns=('x',) packs the tokens alone."
            )
        self.max_tokens, self.columns = max_tokens, tuple(columns)

    def __call__(self, items: Sequence[Item]) -> dict[str, Tensor]:
        """Return the packed batch."""
        lengths = [self._length(item) for item in items]
        rows = _first_fit(lengths, self.max_tokens)
        order = [i for row in rows for i in row]
        batch: dict[str, Tensor] = {}
        for name in items[0]:
            if name in self.columns:
                joined = [torch.cat([items[i][name] for i in row]) for row in rows]
                batch[name] = _pad(joined, IGNORED if name == "labels" else 0)
            else:
                batch[name] = torch.stack([items[i][name] for i in order])
        # ids count through the batch, so that they are the rows of what a model says of documents
        number = {item: number for number, item in enumerate(order)}
        ids = [torch.tensor([number[i] for i in row for _ in range(lengths[i])]) for row in rows]
        batch["document_ids"] = _pad(ids, -1)
        return batch

    def _length(self, item: Item) -> int:
        """Return the number of tokens of an item."""
        found = {name: len(item[name]) for name in self.columns}
        if len(set(found.values())) != 1:
            raise ValueError(
                f"The columns of an item must have one entry for each token, got {found} entries; "
                "leave out of columns what has one entry for each item."
            )
        length = found[self.columns[0]]
        if not 0 < length <= self.max_tokens:
            raise ValueError(
                f"An item has {length} tokens, and a row takes 1 to {self.max_tokens}; raise "
                "max_tokens, cut the item, or leave it out."
            )
        return length


def _first_fit(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Return the items of every row: the longest first, each in the first row that has room."""
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((r for r, left in enumerate(room) if left >= lengths[i]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(most)
        rows[row].append(i)
        room[row] -= lengths[i]
    return rows


def _pad(rows: Sequence[Tensor], value: float) -> Tensor:
    """Return rows of unequal length as one tensor."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)


class Part(NamedTuple):
    """The items that one process runs at once."""

    indices: list[int]
    weight: float
    """Share of the batch; zero for a process without items, which must still take part."""


class Order(NamedTuple):
    """The items of every step: each pass over the data has a new random order.

    The items of a step depend on the seed and the number of the step alone. So a run can continue
    at any step, and a batch is the same on one process or many, in one part or several.
    """

    num_items: int
    batch_size: int
    seed: int
    accumulate: int = 1
    rank: int = 0
    world_size: int = 1
    sizes: Int[Tensor, " items"] | None = None
    """Size of every item; if given, items of similar size share a batch."""

    @property
    def pass_steps(self) -> int:
        """Steps in one pass over the data; the last of them may be smaller."""
        return -(-self.num_items // self.batch_size)

    def batch(self, step: int) -> list[int]:
        """Return the items of a step."""
        number, position = divmod(step, self.pass_steps)
        if self.sizes is None:
            order = _permutation(self.num_items, self.seed, number)
            return order[position * self.batch_size :][: self.batch_size].tolist()
        return _grouped(self.sizes, self.batch_size, self.seed, number)[position]

    def parts(self, step: int) -> list[Part]:
        """Return the parts of a step for this process: ``accumulate`` of nearly equal size."""
        batch = self.batch(step)
        count = self.world_size * self.accumulate
        first = self.rank * self.accumulate
        cuts = [i * len(batch) // count for i in range(first, first + self.accumulate + 1)]
        return [
            # every process must take part in every exchange of gradients: weight zero, not nothing
            Part(batch[a:b] or batch[:1], (b - a) / len(batch))
            for a, b in pairwise(cuts)
        ]


@lru_cache(maxsize=4)
def _permutation(num_items: int, seed: int, number: int) -> Int[Tensor, " items"]:
    """Return the order of the items in one pass over them."""
    # a large prime keeps passes of neighbouring seeds apart
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    return torch.randperm(num_items, generator=generator)


_POOL = 32
"""Batches among which items are sorted by size; enough to pad little, few enough to mix items."""


@lru_cache(maxsize=4)
def _grouped(
    sizes: Int[Tensor, " items"], batch_size: int, seed: int, number: int
) -> list[list[int]]:
    """Return the batches of one pass over the items, those of similar size together.

    The random order is cut into pools. The items of a pool are sorted by size and cut into batches,
    and the batches of all pools come in a random order.
    """
    order = _permutation(len(sizes), seed, number)
    batches: list[list[int]] = []
    for pool in order.split(_POOL * batch_size):
        ranked = pool[sizes[pool].argsort(stable=True)]
        batches += [batch.tolist() for batch in ranked.split(batch_size)]
    mixed = _permutation(len(batches), seed, number)
    return [batches[i] for i in mixed.tolist()]


class PartSampler(torch.utils.data.Sampler[list[int]]):
    """The items of every part of the steps ``start`` to ``stop``, for a ``DataLoader``."""

    def __init__(self, order: Order, start: int, stop: int) -> None:
        self.order, self.start, self.stop = order, start, stop

    def __len__(self) -> int:
        return (self.stop - self.start) * self.order.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.start, self.stop):
            yield from (part.indices for part in self.order.parts(step))


class Fingerprint(NamedTuple):
    """Fingerprint of a data set: its size, and shapes and means of a few items."""

    items: int
    numbers: tuple[float, ...] = ()
    """Shapes and mean absolute values; empty if items change each time they are read."""

    @classmethod
    def of(
        cls, data: Dataset[object] | None, collate: Callable[[Sequence[Any]], Mapping[str, object]]
    ) -> "Fingerprint":
        """Return the fingerprint of a data set; without one, that of an empty set."""
        if data is None:
            return cls(0)
        count = len(data)  # type: ignore[arg-type]
        chosen = range(0, count, max(1, -(-count // 16)))
        # twice: items that are drawn at random differ, and cannot be compared after a restart
        first, again = (
            tuple(number for i in chosen for number in _numbers(collate([data[i]])))
            for _ in range(2)
        )
        return cls(count, first if first == again else ())

    def changes(self, was: "Fingerprint") -> str:
        """Return in words what differs from an earlier fingerprint; empty if nothing does."""
        if self.items != was.items:
            return f"had {was.items} items and have {self.items}"
        pair = self.numbers, was.numbers
        if not all(pair):
            return ""
        # another machine may standardise with another rounding
        same = len(pair[0]) == len(pair[1]) and all(
            math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6) for a, b in zip(*pair, strict=True)
        )
        return "" if same else "hold other items"


def _numbers(batch: object) -> Iterator[float]:
    """Return shape and mean absolute value of every tensor in a batch, at any depth."""
    if isinstance(batch, Tensor):
        yield from batch.shape
        yield float(batch.to(torch.complex128).abs().nan_to_num().mean().nan_to_num())
    elif isinstance(batch, Mapping):
        for _, value in sorted(batch.items()):
            yield from _numbers(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _numbers(value)


def map_tensors(change: Callable[[Tensor], Tensor], batch: object) -> Any:
    """Return a batch with every tensor changed, at any depth of mappings, lists and tuples.

    Example:
        >>> map_tensors(torch.neg, {"x": (torch.tensor(1), "kept")})
        {'x': (tensor(-1), 'kept')}
    """
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(change, value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        values = [map_tensors(change, value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def split_labels(batch: Mapping[str, object]) -> tuple[dict[str, object], object]:
    """Return the keyword inputs of the model, and the labels."""
    if "labels" not in batch:
        raise ValueError(
            f"A batch needs the key 'labels' besides the model's inputs, got {sorted(batch)}; "
            "return it from the data set or from collate."
        )
    return {k: v for k, v in batch.items() if k != "labels"}, batch["labels"]
