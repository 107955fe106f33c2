"""Recommenders of the next film: a masked model as BERT4Rec, a causal one as SASRec.

Both have blocks of this library (two layers, two heads, width 64, rotary positions) and one matrix
for items as input and output. Histories come from a file of MovieLens, which the user brings: its
licence forbids to pass it on. The last item of a user is the test, the one before it the
validation.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.data import Dataset

from primal_attention.models import DecoderConfig, ModelOutput
from primal_attention.models.sequence import SequenceModel
from primal_attention.support.command import UserError
from primal_attention.support.files import read_lines
from primal_attention.training import Score, TrainingConfig, fit

__all__ = [
    "MASK",
    "ItemModel",
    "ItemModelConfig",
    "LastItem",
    "Ratings",
    "item_scores",
    "popularity",
    "question",
    "ranking_scores",
    "ranks_of",
    "read_histories",
    "train_recommender",
]

MASK = 0
"""Id of the hidden item; real items count from one."""
MAX_LENGTH = 100
MASK_SHARE = 0.2
_MAX_BYTES = 200_000_000
_HEADER = ("user_id:token", "item_id:token", "rating:float", "timestamp:float")


class Ratings(NamedTuple):
    """What every user watched, oldest first."""

    users: tuple[str, ...]
    """Names of the users."""
    items: tuple[str, ...]
    """Names of the items; item ``i`` of a history is ``items[i - 1]``."""
    histories: tuple[tuple[int, ...], ...]
    """Items of every user, numbered from one."""


def read_histories(path: Path, *, fewest: int = 5) -> Ratings:
    """Return the histories in a file of ratings, ``user item rating time`` with tabs between.

    The file is ``u.data`` of MovieLens-100K, or the same with the header of RecBole
    (``ml-100k.inter``). User 0, which some copies have, is left out. Items of a user are in order
    of time, those of one moment in the order of the file; an item that comes again is left out.

    Args:
        path: The file.
        fewest: Users with fewer items are left out.

    Raises:
        UserError: If the file is missing, too large, or has another form.
    """
    events: dict[str, list[tuple[float, int, str]]] = {}
    for number, line in enumerate(read_lines(path, _MAX_BYTES), 1):
        parts = line.split("\t")
        if parts == [""] or (number == 1 and tuple(parts) == _HEADER):
            continue
        user, item, when = _event(parts, path, number)
        if user != "0":
            events.setdefault(user, []).append((when, number, item))
    kept = {user: _in_order(rows) for user, rows in events.items()}
    kept = {user: items for user, items in kept.items() if len(items) >= fewest}
    if not kept:
        raise UserError(f"{path} has no user with {fewest} items or more.")
    users = tuple(sorted(kept, key=_natural))
    names = tuple(sorted({item for items in kept.values() for item in items}, key=_natural))
    ids = {name: i for i, name in enumerate(names, 1)}
    return Ratings(users, names, tuple(tuple(ids[item] for item in kept[u]) for u in users))


def _event(parts: Sequence[str], path: Path, number: int) -> tuple[str, str, float]:
    try:
        user, item, _rating, when = parts
        time = float(when)
    except ValueError as error:
        raise UserError(
            f"{path}, line {number}: expected user, item, rating and time with tabs between, got "
            f"{chr(9).join(parts)[:60]!r}; give u.data of MovieLens or a .inter file of RecBole."
        ) from error
    if not user or not item or time != time:
        raise UserError(f"{path}, line {number}: user, item and time must not be empty.")
    return user, item, time


def _in_order(rows: Sequence[tuple[float, int, str]]) -> list[str]:
    return list(dict.fromkeys(item for _, _, item in sorted(rows)))


def _natural(name: str) -> tuple[int, str]:
    return (len(name), name) if name.isdigit() else (1_000, name)


@dataclass(frozen=True)
class ItemModelConfig(DecoderConfig):
    """Configuration of an :class:`ItemModel`."""

    is_causal: bool = True
    """Predict the next item at every position; else the hidden items, from both sides."""


class ItemModel(SequenceModel):
    """Score every item at every position; input and output embedding are one matrix.

    Args:
        config: Configuration of the model.
        device: Where to create the parameters.
        dtype: Type of the parameters.

    Example:
        >>> config = ItemModelConfig(vocab_size=9, dim=8, num_heads=2, attention="softmax")
        >>> ItemModel(config)(torch.tensor([[3, 1, 4]])).logits.shape
        torch.Size([1, 3, 9])
    """

    config_class: ClassVar[type[ItemModelConfig]] = ItemModelConfig
    config: ItemModelConfig
    embed: nn.Embedding

    def __init__(self, config: ItemModelConfig, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__(
            config,
            vocab_size=config.vocab_size,
            is_causal=config.is_causal,
            device=device,
            dtype=dtype,
        )
        nn.init.normal_(self.embed.weight, std=config.dim**-0.5)
        self.embed_scale = config.dim**0.5
        self.bias = nn.Parameter(torch.zeros(config.vocab_size, device=device, dtype=dtype))

    def forward(
        self, x: Int[Tensor, "b n"], *, key_mask: Bool[Tensor, "b n"] | None = None
    ) -> ModelOutput:
        """Return the logits ``[b n items]``; that of the hidden item means nothing.

        Args:
            x: Items, or :data:`MASK`.
            key_mask: ``True`` where an item is real.
        """
        hidden, aux_loss = self.encode(x, key_mask)
        return ModelOutput(nn.functional.linear(hidden, self.embed.weight, self.bias), aux_loss)


class LastItem(nn.Module):
    """The scores ``[b items]`` after the last position of a recommender, as explanations need them.

    Args:
        model: An :class:`ItemModel`.
    """

    def __init__(self, model: ItemModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, x: Int[Tensor, "b n"], *, key_mask: Bool[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b items"]:
        """Return the logits at the last position, which must be real."""
        hidden = self.model.encode(x, key_mask).hidden[:, -1]
        return nn.functional.linear(hidden, self.model.embed.weight, self.model.bias)


class _Windows(Dataset[dict[str, Tensor]]):
    """Windows of histories as training items; every pass has other windows and other masks."""

    def __init__(self, histories: Sequence[Sequence[int]], is_causal: bool, passes: int) -> None:
        self.histories, self.is_causal, self.passes = histories, is_causal, passes

    def __len__(self) -> int:
        return self.passes * len(self.histories)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = random.Random(index)  # so that a run that continues sees the same
        history = self.histories[index % len(self.histories)]
        length = MAX_LENGTH + self.is_causal
        # the end of a window is uniform among those that leave no room
        stop = generator.randint(min(length, len(history)), len(history))
        window = torch.tensor(history[max(0, stop - length) : stop])
        if self.is_causal:
            return {"x": window[:-1], "labels": window[1:]}
        hidden = torch.tensor([generator.random() < MASK_SHARE for _ in window])
        if generator.random() < 0.1 or not hidden.any():
            # as it is used: the last item only
            hidden = torch.arange(len(window)) == len(window) - 1
        return {
            "x": window.masked_fill(hidden, MASK),
            "labels": window.masked_fill(~hidden, -100),
        }


def train_recommender(
    kind: str,
    histories: Sequence[Sequence[int]],
    num_items: int,
    folder: Path | None = None,
    *,
    passes: int,
    lr: float = 1e-3,
    seed: int = 0,
) -> ItemModel:
    """Return a trained recommender; the best epoch on the item before the last is kept.

    Args:
        kind: ``"masked"`` (BERT4Rec) or ``"causal"`` (SASRec).
        histories: Complete histories; the last two items of each are not trained on.
        num_items: Number of items.
        folder: Folder for checkpoints; a stopped training continues there.
        passes: Passes over the users; the model is measured ten times.
        lr: Peak learning rate.
        seed: Seed of the weights, the batches and of dropout.
    """
    config = ItemModelConfig(
        vocab_size=num_items + 1,
        dim=64,
        num_heads=2,
        num_layers=2,
        attention="softmax",
        dropout=0.2,
        # distances matter, and a history may be longer than all that were trained on
        positions="rotary",
        is_causal=kind == "causal",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ItemModel(config)
    data = _Windows([history[:-2] for history in histories], config.is_causal, passes)
    epochs = min(10, passes)
    training = TrainingConfig(
        epochs=epochs,
        epoch_steps=-(-len(data) // (32 * epochs)),
        batch_size=32,
        lr=lr,
        monitor="gain",
        seed=seed,
    )

    def measure(model: nn.Module, _valid: Any) -> dict[str, Score]:
        scores = item_scores(model, [history[:-2] for history in histories])
        ranks = ranks_of(scores, [history[-2] for history in histories])
        return {name: Score(value) for name, value in ranking_scores(ranks).items()}

    fit(
        model,
        data,
        config=training,
        valid=data,
        measure=measure,
        out=folder,
        resume=folder is not None,
    )
    return model


def question(model: Any, history: Sequence[int]) -> list[int]:
    """Return the sequence whose last position asks for the next item."""
    if model.config.is_causal:
        return list(history[-MAX_LENGTH:])
    return [*history[-(MAX_LENGTH - 1) :], MASK]


@torch.no_grad()
def item_scores(
    model: Any, histories: Sequence[Sequence[int]], *, batch_size: int = 64
) -> Float[Tensor, "users items"]:
    """Return the logit of every item after each history; watched items have minus infinity.

    Column ``i`` belongs to item ``i``, so column 0 is minus infinity too.
    """
    found = []
    model.eval()
    for start in range(0, len(histories), batch_size):
        chunk = histories[start : start + batch_size]
        rows = [torch.tensor(question(model, history)) for history in chunk]
        x = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        last = torch.tensor([len(row) - 1 for row in rows])
        keep = torch.arange(x.shape[1]) <= last[:, None]
        hidden = model.encode(x, keep).hidden[torch.arange(len(rows)), last]
        logits = nn.functional.linear(hidden, model.embed.weight, model.bias)
        logits[:, MASK] = -torch.inf
        for row, history in zip(logits, chunk, strict=True):
            row[list(history)] = -torch.inf
        found.append(logits)
    return torch.cat(found)


def popularity(histories: Sequence[Sequence[int]], num_items: int) -> Float[Tensor, "users items"]:
    """Return how often each item was watched, as scores for every user; watched ones are out."""
    counts = Counter(item for history in histories for item in history)
    # a little for the number, so that there are no ties
    row = torch.tensor([counts[i] - i / (2 * num_items + 2) for i in range(num_items + 1)])
    scores = row.repeat(len(histories), 1)
    scores[:, MASK] = -torch.inf
    for line, history in zip(scores, histories, strict=True):
        line[list(history)] = -torch.inf
    return scores


def ranks_of(scores: Float[Tensor, "users items"], targets: Sequence[int]) -> list[int]:
    """Return the rank of each user's item, one for the best.

    Example:
        >>> ranks_of(torch.tensor([[-9.0, 0.1, 0.7, 0.3]]), [3])
        [2]
    """
    own = scores[torch.arange(len(targets)), torch.tensor(targets)]
    found: list[int] = (1 + (scores > own[:, None]).sum(1)).tolist()
    return found


def ranking_scores(ranks: Sequence[int], cut: int = 10) -> dict[str, float]:
    """Return the share of hits among the first ten, and the discounted gain (HR@10, NDCG@10).

    Example:
        >>> ranking_scores([1, 3, 11, 40])
        {'hits': 0.5, 'gain': 0.375}
    """
    places = torch.tensor(ranks, dtype=torch.float64)
    inside = places <= cut
    gain = torch.where(inside, 1 / torch.log2(places + 1), 0.0)
    return {"hits": float(inside.double().mean()), "gain": float(gain.mean())}
