"""``primal distrib``: counts of a corpus, their attention, word vectors, and heads."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from primal_attention.cli.distrib_probe import DistribProbeCommand, probe
from primal_attention.support.command import UserError, did_you_mean, user_errors
from primal_attention.support.files import open_text, read_json_lines
from primal_attention.support.output import markdown_table, write_atomically
from primal_attention.support.settings import parse

__all__ = ["main"]


@dataclass(frozen=True)
class DistribCountCommand:
    """Count which words stand near each other in text files, and save the counts."""

    files: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE [FILE ...]")
    ]
    """Text files with one document a line (.txt), or JSON lines (.jsonl); also .gz and .xz."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """File of the counts to write (.npz)."""
    top_k: int = 4000
    """Number of most frequent words to keep."""
    window: int = 5
    """Largest distance of two words."""
    weighting: Literal["inverse", "flat", "harmonic-glove"] = "inverse"
    """Weight of a distance: one over it, one, or as the GloVe tool, without unknown words."""
    min_count: int = 1
    """Smallest number of occurrences of a word."""
    field: str = "text"
    """Field of a JSON line that has the text."""

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("there is no file to count; name at least one.")


@dataclass(frozen=True)
class DistribAttendCommand:
    """Print the attention between the words of texts that counts give."""

    counts: Annotated[Path, tyro.conf.Positional]
    """File of primal distrib count."""
    texts: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TEXT [TEXT ...]")
    ]
    """The texts."""
    transform: Literal["counts", "log1p", "pmi", "ppmi"] | None = None
    """Association of two words; by default their counts, with --rank or --content their pmi."""
    rank: int | None = None
    """Singular directions of the association; by default all."""
    smoothing: float | None = None
    """Added to the count of every pair; by default 0, with --rank 0.5."""
    symmetric: bool = False
    """Count both directions together."""
    content: bool = False
    """Leave out the frequency of the keys, so that frequent words do not win."""
    distance: bool = False
    """Divide weights by the distance of two words."""
    causal: bool = False
    """Attend to earlier words only."""
    zero_diagonal: bool = False
    """A word does not attend to itself."""
    temperature: float = 1.0
    """Divides the logits."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Also write a heat map (.png) or the numbers (.json)."""


@dataclass(frozen=True)
class DistribVectorsCommand:
    """Compute word vectors from counts; print neighbours, or write the vectors."""

    counts: Annotated[Path, tyro.conf.Positional]
    """File of primal distrib count."""
    words: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[WORD ...]")
    ] = ()
    """Words whose neighbours to print."""
    method: Literal["pmi-svd", "ksvd", "glove"] = "pmi-svd"
    """PMI-SVD, kernel-SVD scores of words and contexts, or GloVe."""
    dim: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 100
    """Number of dimensions."""
    neighbors: int = 8
    """Number of neighbours to print."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Write the vectors in the text format of word2vec."""


def main(argv: list[str]) -> int:
    """Run ``count``, ``attend``, ``vectors`` or ``probe``."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_HELP)
        return 0
    action, rest = argv[0], argv[1:]
    if action not in _ACTIONS:
        raise UserError(
            f"there is no action {action!r}.{did_you_mean(action, _ACTIONS)} "
            f"Actions: {', '.join(_ACTIONS)}."
        )
    kind, run = _ACTIONS[action]
    run(parse(kind, rest, prog=f"primal distrib {action}"))
    return 0


def _count(options: DistribCountCommand) -> None:
    from primal_attention.analysis.counts import Cooccurrence

    if options.out.suffix != ".npz":
        raise UserError(f"--out must end in .npz, got {options.out}.")
    with user_errors(""):
        counts = Cooccurrence.from_corpus(
            (text for path in options.files for text in _documents(path, options.field)),
            top_k=options.top_k,
            window=options.window,
            weighting=options.weighting,
            min_count=options.min_count,
        )
    counts.save(options.out)
    known = counts.unigram.sum() / counts.num_tokens
    print(
        f"{counts.num_documents:,} documents, {counts.num_tokens:,} words, of which the "
        f"{len(counts):,} most frequent are {known:.1%}; {counts.forward.nnz:,} pairs.\n"
        f"Wrote {options.out}"
    )


def _documents(path: Path, field: str) -> Iterator[str]:
    """Yield the documents of a file, one a line."""
    kind = path.with_suffix("").suffix if path.suffix in (".gz", ".xz") else path.suffix
    if kind == ".jsonl":
        for number, row in read_json_lines(path):
            if not isinstance(row.get(field), str):
                raise UserError(
                    f"{path}, line {number} has no text in the field {field!r}; see --field."
                )
            yield row[field]
        return
    with open_text(path) as file:
        yield from file


def _load(path: Path) -> Any:
    from primal_attention.analysis.counts import Cooccurrence

    with user_errors(""):
        return Cooccurrence.load(path)


def _attend(options: DistribAttendCommand) -> None:
    from primal_attention.analysis.counts import plot_weights, split_words
    from primal_attention.report.page import to_png

    if options.out is not None and options.out.suffix not in (".png", ".json"):
        raise UserError(f"--out must end in .png or .json, got {options.out}.")
    texts = {text: split_words(text) for text in options.texts}
    for text, words in texts.items():
        if not words:
            raise UserError(f"the text {text!r} has no words; give at least one.")
    counts = _load(options.counts)
    with user_errors(""):
        attention = _attention(counts, options, [w for words in texts.values() for w in words])
    found = {text: attention.attend(words)[1].tolist() for text, words in texts.items()}
    for text, words in texts.items():
        cells = [
            [word, *(f"{w:.2f}" for w in row)] for word, row in zip(words, found[text], strict=True)
        ]
        print(markdown_table(["query", *words], cells) + "\n")
    every = dict.fromkeys(word for words in texts.values() for word in words)
    unknown = [word for word in every if counts.encode([word])[0] < 0]
    if unknown:
        print(f"Not in the vocabulary, so their rows are uniform: {', '.join(unknown)}.")
    if options.out is None:
        return
    if options.out.suffix == ".png":
        panels = {text: (words, found[text]) for text, words in texts.items()}
        write_atomically(options.out, to_png(plot_weights(panels)))
    else:
        content = [{"words": texts[text], "weights": found[text]} for text in texts]
        write_atomically(options.out, json.dumps(content, ensure_ascii=False) + "\n")
    print(f"Wrote {options.out}")


def _attention(counts: Any, options: DistribAttendCommand, words: list[str]) -> Any:
    import torch

    from primal_attention.analysis.counts import DistributionalAttention

    is_pmi = options.rank is not None or options.content
    transform = options.transform or ("pmi" if is_pmi else "counts")
    # PMI depends on the sums over all words; other weights on the words of the texts only
    if transform in ("counts", "log1p") and any(counts.encode(words) >= 0):
        counts = counts.restrict(words)
    default = 0.0 if options.rank is None else 0.5
    return DistributionalAttention(
        counts,
        rank=options.rank,
        transform=transform,
        key_bias=None if options.content else "auto",
        directional=not options.symmetric,
        positional="inverse-distance" if options.distance else None,
        causal=options.causal,
        diag="zero" if options.zero_diagonal else "keep",
        temperature=options.temperature,
        smoothing=default if options.smoothing is None else options.smoothing,
        # only weights are printed
        values=torch.zeros(len(counts), 0),
    )


def _vectors(options: DistribVectorsCommand) -> None:
    from primal_attention.analysis.counts import glove_fit, ksvd_embeddings, pmi_svd

    if not options.words and options.out is None:
        raise UserError("nothing to do: name words whose neighbours to print, or give --out.")
    counts = _load(options.counts)
    for word in options.words:
        if word not in counts.words:
            hint = did_you_mean(word, counts.words)
            raise UserError(f"the word {word!r} is not in the vocabulary.{hint}")
    with user_errors(""):
        if options.method == "pmi-svd":
            found = pmi_svd(counts, options.dim)
        elif options.method == "ksvd":
            found = ksvd_embeddings(counts, options.dim).joined()
        else:
            found = glove_fit(counts, options.dim).summed()
        rows = [
            [word, ", ".join(each.word for each in found.neighbors(word, options.neighbors))]
            for word in options.words
        ]
    if rows:
        print(markdown_table(["word", "neighbours"], rows))
    if options.out is not None:
        found.to_word2vec(options.out)
        print(f"Wrote {options.out}")


_ACTIONS: dict[str, tuple[type[Any], Any]] = {
    "count": (DistribCountCommand, _count),
    "attend": (DistribAttendCommand, _attend),
    "vectors": (DistribVectorsCommand, _vectors),
    "probe": (DistribProbeCommand, probe),
}
_HELP = """usage: primal distrib ACTION [OPTIONS]

Attention from counts: which words of a corpus stand near each other.

actions:
  count FILE -o counts.npz           count the word pairs of text files
  attend counts.npz "river bank"     attention between the words of a text
  vectors counts.npz bank loan       word vectors: neighbours, or a file of word2vec
  probe counts.npz --model DIR       how much the heads of a model follow the counts

primal distrib ACTION --help shows the options."""
