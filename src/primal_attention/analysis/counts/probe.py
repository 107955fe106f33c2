"""Probe of trained heads: how much of ``W_Q W_Kᵀ`` is association of words in a corpus.

    B_ij = (h_i W_Q + b_Q)(h_j W_K + b_K)ᵀ / √d

``h`` are inputs of single words without context; ``probe_models`` says how they are made for
each kind of model. ``B`` is compared with the PMI of a corpus by :func:`compare`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.analysis.counts.association import Association, Targets
from primal_attention.analysis.counts.cooccurrence import Cooccurrence
from primal_attention.analysis.counts.probe_models import (
    POSITIONS,
    is_rotary,
    queries_keys,
    token_ids,
)
from primal_attention.analysis.registry import AnalysisResult, ShownTable
from primal_attention.report.page import Report, to_png
from primal_attention.report.plots import COLORS, panel_layout
from primal_attention.support.output import to_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedTokenizerBase

__all__ = ["CountsResult", "HeadAssociation", "probe_heads", "qk_circuit"]

_SHOWN = {"symmetric": "ρ(B, PMI sym)", "forward": "ρ(B, PMI fwd)", "backward": "ρ(Bᵀ, PMI fwd)"}
_EVIDENT = 0.1
"""A head follows a corpus if a correlation exceeds this and three spreads of the null."""


def qk_circuit(
    model: nn.Module,
    layer: int | str,
    head: int | None,
    words: Sequence[str] | Sequence[int],
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    offset: int | None = None,
    positions: Sequence[int] = POSITIONS,
) -> Float[Tensor, "*h n n"]:
    """Return the logits of a head for all pairs of words without context, in float64.

    Args:
        model: A model of transformers, ``torch.nn`` or this library that takes token ids. For a
            primal layer the logits are its kernel, the cosines of queries and keys.
        layer: Number of the attention layer in the order of the forward, or its name.
        head: Number of the head; ``None`` for all heads ``[h n n]``.
        words: Token ids; or words, each one token of the ``tokenizer``.
        tokenizer: The tokenizer of the model; needed for words.
        offset: Places from the key to the query; by default 1 for rotary positions, otherwise 0.
        positions: Positions of the keys whose vectors are averaged, for absolute positions.

    Example:
        >>> from primal_attention.models import CausalDecoder, DecoderConfig
        >>> model = CausalDecoder(DecoderConfig(vocab_size=20, dim=16, num_heads=2))
        >>> qk_circuit(model, 0, 1, range(20)).shape
        torch.Size([20, 20])
    """
    ids = np.asarray(list(words))
    if ids.dtype.kind not in "iu":
        if tokenizer is None:
            raise ValueError("words are text, but there is no tokenizer; give token ids or both.")
        ids = token_ids(tokenizer, list(map(str, words)))
        if (ids < 0).any():
            bad = list(words)[int(np.argmax(ids < 0))]
            raise ValueError(f"{bad!r} is not one token of the tokenizer; leave it out.")
    offset = int(is_rotary(model, ids)) if offset is None else offset
    found = queries_keys(model, ids, layer=layer, offset=offset, positions=positions)
    if head is None:
        return found.logits()
    if not 0 <= head < len(found.q):
        raise ValueError(f"there is no head {head}; the layer has {len(found.q)}, counted from 0.")
    return found._replace(q=found.q[head : head + 1], k=found.k[head : head + 1]).logits()[0]


@dataclass(frozen=True)
class HeadAssociation:
    """Association of one head with a corpus."""

    layer: str
    """Name of the layer."""
    head: int
    offset: int
    """Places from the key to the query."""
    association: Association

    @property
    def is_evident(self) -> bool:
        """Whether ``symmetric`` or ``forward`` exceeds 0.1 and three spreads of the null."""
        value, found = self.association.strongest[1], self.association
        return value > max(_EVIDENT, 3 * found.null_spread)

    @property
    def has_content(self) -> bool:
        """Whether this holds for one of the three correlations without key effects."""
        found = self.association
        return max(found[3:6]) > max(_EVIDENT, 3 * found.content_null_spread)


@dataclass(frozen=True)
class CountsResult(AnalysisResult):
    """What a corpus explains of the logits of heads."""

    heads: tuple[HeadAssociation, ...]
    words: tuple[str, ...]
    """The words that were compared."""
    pairs: tuple[int, int]
    """Pairs with enough counts: symmetric, directional."""
    min_count: float
    embeddings: Association | None = None
    """The same for inner products of the token embeddings."""
    corpus: str = "the given counts"
    """Where the counts come from."""
    beside: bytes | None = None
    """Picture of the attention of one head in a text beside that of the counts, if asked for."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """The distances that were probed."""
        return tuple(dict.fromkeys(head.offset for head in self.heads))

    def at(self, offset: int | None = None) -> tuple[HeadAssociation, ...]:
        """Return the heads at one distance, by default the first."""
        wanted = self.offsets[0] if offset is None else offset
        return tuple(head for head in self.heads if head.offset == wanted)

    def verdict(self) -> str:
        """Return the head that follows the corpus most, and how many do."""
        best = max(self.heads, key=lambda head: head.association.strongest[1])
        name, value = best.association.strongest
        first = self.at()
        evident = sum(head.is_evident for head in first)
        content = sum(head.has_content for head in first)
        where = f" at distance {best.offset}" if len(self.offsets) > 1 else ""
        return (
            f"{evident} of {len(first)} heads follow the word pairs of {self.corpus} (ρ above "
            f"{_EVIDENT}), {content} of {len(first)} without key effects. The strongest is "
            f"head {best.head} of {best.layer}{where}: ρ = {value:.2f} with {name} PMI; permuted "
            f"words give {best.association.null_mean:.2f} ± {best.association.null_spread:.2f}."
        )

    def table(self) -> ShownTable:
        """Return the correlations of every head at every distance."""
        header = ["head", *_SHOWN.values(), *(f"content {name}" for name in _SHOWN)]
        rows: list[list[object]] = [
            [self._label(head), *_cells(head.association)] for head in self.heads
        ]
        if self.embeddings is not None:
            rows.append(["token embeddings", *_cells(self.embeddings)])
        return [*header, "asymmetry", "permuted words"], rows

    def _label(self, head: HeadAssociation) -> str:
        several = len({h.layer for h in self.heads}) > 1
        layer = f"{head.layer}, " if several else ""
        return f"{layer}{head.head}" + (f", δ = {head.offset}" if len(self.offsets) > 1 else "")

    def plot(self) -> bytes:
        """Return the correlations as PNG, or the picture that was asked for.

        The correlations are bars for one distance and lines over several.
        """
        return self.beside or to_png(self.figure())

    def figure(self) -> "Figure":
        """Return the picture as a matplotlib figure."""
        return _bars(self) if len(self.offsets) == 1 else _curves(self)

    def to_json(self) -> str:
        """Return all correlations as JSON."""
        heads = [asdict(head) | {"association": head.association._asdict()} for head in self.heads]
        embeddings = None if self.embeddings is None else self.embeddings._asdict()
        return to_json(
            {
                "corpus": self.corpus,
                "words": len(self.words),
                "pairs": {"symmetric": self.pairs[0], "directional": self.pairs[1]},
                "min_count": self.min_count,
                "heads": heads,
                "embeddings": embeddings,
            }
        )

    def limits(self) -> str:
        """Return what the numbers do not show."""
        return (
            "A correlation does not show that the model uses a head this way: words are probed "
            "alone, without context, values are not looked at, and the corpus is not the one the "
            "model was trained on."
        )

    def report(self) -> Report:
        """Return a page with the finding, the picture and the table."""
        page = Report(
            "What the heads know of a corpus",
            f"Query-key logits of {len(self.words)} single words beside their PMI in "
            f"{self.corpus}: rank correlations over {self.pairs[0]:,} symmetric and "
            f"{self.pairs[1]:,} directional pairs with a weighted count of at least "
            f"{self.min_count:g}.",
        )
        page.verdict(self.verdict())
        page.figure(
            to_png(self.figure()), "Correlation of each head; grey: 3 spreads of permuted words."
        )
        if self.beside is not None:
            page.figure(self.beside, "Attention between words of the text: counts, and the head.")
        page.text(
            "Row means are subtracted, since softmax does not see them. Columns named content "
            "subtract key effects too: keys that all queries prefer, such as frequent words. "
            "ρ(Bᵀ, PMI fwd) still holds effects of queries, which softmax removes."
        )
        return page.section("Heads").table(*self.table())


def _cells(found: Association) -> list[str]:
    numbers = [f"{value:.3f}" for value in found[:6]] + [f"{found.asymmetry:.2f}"]
    return [*numbers, f"{found.null_mean:.3f} ± {found.null_spread:.3f}"]


def probe_heads(
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerBase | None",
    cooccurrence: Cooccurrence,
    *,
    words: int = 1500,
    layers: Sequence[int | str] = (0,),
    offsets: Sequence[int] | None = None,
    min_count: float = 8.0,
    positions: Sequence[int] = POSITIONS,
    permutations: int = 10,
    seed: int = 0,
    corpus: str = "the given counts",
) -> CountsResult:
    """Return how much the heads of a model follow the word pairs of a corpus.

    Args:
        model: A model of transformers, ``torch.nn`` or this library that takes token ids.
        tokenizer: Its tokenizer; ``None`` if word ``i`` of the counts is token ``i``.
        cooccurrence: The counts. Words that are not one token are left out.
        words: Largest number of words; the most frequent ones are taken.
        layers: Numbers of attention layers in the order of the forward, or names.
        offsets: Places from the key to the query; several give a curve. By default 1 for rotary
            positions, otherwise 0.
        min_count: Smallest weighted count of a pair that is compared.
        positions: Positions of the keys whose vectors are averaged, for absolute positions.
        permutations: Random permutations of the words for the null.
        seed: Seed of the permutations.
        corpus: Name of the corpus, for the report.

    Example:
        >>> from primal_attention.models import EncoderClassifier, EncoderConfig
        >>> config = EncoderConfig(num_classes=2, vocab_size=40, dim=16, num_heads=2)
        >>> counts = Cooccurrence(40).fit(np.random.default_rng(0).integers(40, size=5000))
        >>> result = probe_heads(EncoderClassifier(config), None, counts, min_count=2)
        >>> len(result.heads), result.heads[0].is_evident
        (2, False)
    """
    chosen, ids = _choose_words(tokenizer, cooccurrence, words)
    targets = Targets(cooccurrence, chosen, min_count)
    if offsets is None:
        offsets = (int(is_rotary(model, ids)),)
    if not len(layers) or not len(offsets):
        raise ValueError("layers and offsets must not be empty; give at least one of each.")
    heads = []
    for layer in layers:
        for offset in offsets:
            found = queries_keys(model, ids, layer=layer, offset=offset, positions=positions)
            for head, (q, k) in enumerate(zip(found.q, found.k, strict=True)):
                logits = (found.scale * q @ k.T).numpy()
                heads.append(
                    HeadAssociation(
                        found.name or f"layer {layer}",
                        head,
                        offset,
                        targets.compare(logits, permutations=permutations, seed=seed),
                    )
                )
    names = tuple(cooccurrence.words[i] for i in chosen)
    beside = _embeddings(model, ids)
    embedded = None if beside is None else targets.compare(beside, permutations=2, seed=seed)
    return CountsResult(tuple(heads), names, targets.pairs, min_count, embedded, corpus)


def _choose_words(
    tokenizer: "PreTrainedTokenizerBase | None", cooccurrence: Cooccurrence, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the most frequent words that are one token, and these tokens."""
    if count < 2:
        raise ValueError(f"words must be at least 2, got {count}.")
    ids = token_ids(tokenizer, cooccurrence.words)
    order = np.argsort(-cooccurrence.unigram, kind="stable")
    # two words may be one token, for tokenizers that change letters
    seen: dict[int, int] = {}
    for word in order.tolist():
        if ids[word] >= 0:
            seen.setdefault(int(ids[word]), word)
    chosen = np.array(list(seen.values())[:count], dtype=np.int64)
    if len(chosen) < 2:
        raise ValueError(
            "fewer than two words of the counts are one token of the tokenizer; count words of the "
            "model's language, or give its tokenizer to Cooccurrence.from_corpus."
        )
    return chosen, ids[chosen]


def _embeddings(model: nn.Module, ids: np.ndarray) -> np.ndarray | None:
    """Return inner products of the token embeddings; ``None`` without a table."""
    table = getattr(model, "embed", None)
    named = getattr(model, "get_input_embeddings", None)
    if callable(named):
        table = named()
    if not isinstance(table, nn.Embedding):
        return None
    rows = table.weight.detach()[ids].double().cpu().numpy()
    return np.asarray(rows @ rows.T)


def _bars(result: CountsResult) -> "Figure":
    from matplotlib import pyplot as plt

    heads = result.at()
    layers = list(dict.fromkeys(head.layer for head in heads))
    figure, axes = plt.subplots(
        len(layers), 1, figsize=(9, 2.9 * len(layers)), squeeze=False, layout=panel_layout()
    )
    for axis, layer in zip(axes[:, 0], layers, strict=True):
        mine = [head for head in heads if head.layer == layer]
        place = np.arange(len(mine))
        spread = np.array([3 * head.association.null_spread for head in mine])
        axis.bar(place, 2 * spread, 0.9, -spread, color="#e3e7ee", label="permuted words")
        for number, name in enumerate(_SHOWN):
            values = [getattr(head.association, name) for head in mine]
            axis.bar(place + 0.26 * (number - 1), values, 0.24, color=COLORS[number], label=name)
        axis.set_xticks(place, [str(head.head) for head in mine])
        axis.axhline(0, color="#5b6472", lw=0.8)
        axis.set(title=layer, xlabel="head", ylabel="rank correlation")
        axis.grid(axis="y", alpha=0.25)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


def _curves(result: CountsResult) -> "Figure":
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys((head.layer, head.head) for head in result.heads))
    figure, axes = plt.subplots(
        1, 3, figsize=(12, 3.6), sharey=True, squeeze=False, layout=panel_layout()
    )
    cycle = plt.get_cmap("tab20")
    for axis, name in zip(axes[0], _SHOWN, strict=True):
        for number, key in enumerate(names):
            line = [head for head in result.heads if (head.layer, head.head) == key]
            values = [getattr(head.association, name) for head in line]
            x = [head.offset for head in line]
            label = f"head {key[1]}"
            axis.plot(x, values, marker="o", ms=3, color=cycle(number % 20), label=label)
        axis.axhline(0, color="#5b6472", lw=0.8)
        axis.set(title=_SHOWN[name], xlabel="places from key to query")
        axis.set_xscale("symlog", linthresh=1)
        axis.set_xticks(result.offsets, [str(offset) for offset in result.offsets], fontsize=8)
        axis.minorticks_off()
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("rank correlation")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles[:20], labels[:20], loc="outside right upper", fontsize=8, frameon=False)
    return figure
