"""``primal analyze counts``: word pairs of a corpus, their attention, and word vectors."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from primal_attention.support.command import UserError, did_you_mean
from primal_attention.support.files import open_text, read_json_lines
from primal_attention.support.output import markdown_table, write_atomically

if TYPE_CHECKING:
    from primal_attention.analysis.counts import Cooccurrence, DistributionalAttention

__all__ = ["CountsAttendTool", "CountsCountTool", "CountsVectorsTool"]


@dataclass(frozen=True)
class CountsCountTool:
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

    def run(self) -> None:
        """Count and save."""
        from primal_attention.analysis.counts import Cooccurrence

        if self.out.suffix != ".npz":
            raise UserError(f"--out must end in .npz, got {self.out}.")
        counts = Cooccurrence.from_corpus(
            (text for path in self.files for text in _documents(path, self.field)),
            top_k=self.top_k,
            window=self.window,
            weighting=self.weighting,
            min_count=self.min_count,
        )
        counts.save(self.out)
        known = counts.unigram.sum() / counts.num_tokens
        print(
            f"{counts.num_documents:,} documents, {counts.num_tokens:,} words, of which the "
            f"{len(counts):,} most frequent are {known:.1%}; {counts.forward.nnz:,} pairs.\n"
            f"Wrote {self.out}"
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


@dataclass(frozen=True)
class CountsAttendTool:
    """Print the attention between the words of texts that counts give."""

    counts: Annotated[Path, tyro.conf.Positional]
    """File of primal analyze counts count."""
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

    def run(self) -> None:
        """Print a table for each text, write the file."""
        from primal_attention.analysis.counts import Cooccurrence, plot_weights, split_words
        from primal_attention.report.page import to_png

        if self.out is not None and self.out.suffix not in (".png", ".json"):
            raise UserError(f"--out must end in .png or .json, got {self.out}.")
        texts = {text: split_words(text) for text in self.texts}
        for text, words in texts.items():
            if not words:
                raise UserError(f"the text {text!r} has no words; give at least one.")
        counts = Cooccurrence.load(self.counts)
        attention = self._attention(counts, [w for words in texts.values() for w in words])
        found = {text: attention.attend(words)[1].tolist() for text, words in texts.items()}
        for text, words in texts.items():
            cells = [
                [word, *(f"{w:.2f}" for w in row)]
                for word, row in zip(words, found[text], strict=True)
            ]
            print(markdown_table(["query", *words], cells) + "\n")
        every = dict.fromkeys(word for words in texts.values() for word in words)
        unknown = [word for word in every if counts.encode([word])[0] < 0]
        if unknown:
            print(f"Not in the vocabulary, so their rows are uniform: {', '.join(unknown)}.")
        if self.out is None:
            return
        if self.out.suffix == ".png":
            panels = {text: (words, found[text]) for text, words in texts.items()}
            write_atomically(self.out, to_png(plot_weights(panels)))
        else:
            content = [{"words": texts[text], "weights": found[text]} for text in texts]
            write_atomically(self.out, json.dumps(content, ensure_ascii=False) + "\n")
        print(f"Wrote {self.out}")

    def _attention(self, counts: "Cooccurrence", words: list[str]) -> "DistributionalAttention":
        import torch

        from primal_attention.analysis.counts import DistributionalAttention

        is_pmi = self.rank is not None or self.content
        transform = self.transform or ("pmi" if is_pmi else "counts")
        # PMI depends on the sums over all words; other weights on the words of the texts only
        if transform in ("counts", "log1p") and any(counts.encode(words) >= 0):
            counts = counts.restrict(words)
        default = 0.0 if self.rank is None else 0.5
        return DistributionalAttention(
            counts,
            rank=self.rank,
            transform=transform,
            key_bias=None if self.content else "auto",
            directional=not self.symmetric,
            positional="inverse-distance" if self.distance else None,
            causal=self.causal,
            diag="zero" if self.zero_diagonal else "keep",
            temperature=self.temperature,
            smoothing=default if self.smoothing is None else self.smoothing,
            # only weights are printed
            values=torch.zeros(len(counts), 0),
        )


@dataclass(frozen=True)
class CountsVectorsTool:
    """Compute word vectors from counts; print neighbours, or write the vectors."""

    counts: Annotated[Path, tyro.conf.Positional]
    """File of primal analyze counts count."""
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

    def run(self) -> None:
        """Print the neighbours, write the vectors."""
        from primal_attention.analysis.counts import (
            Cooccurrence,
            glove_fit,
            ksvd_embeddings,
            pmi_svd,
        )

        if not self.words and self.out is None:
            raise UserError("nothing to do: name words whose neighbours to print, or give --out.")
        counts = Cooccurrence.load(self.counts)
        for word in self.words:
            if word not in counts.words:
                hint = did_you_mean(word, counts.words)
                raise UserError(f"the word {word!r} is not in the vocabulary.{hint}")
        if self.method == "pmi-svd":
            found = pmi_svd(counts, self.dim)
        elif self.method == "ksvd":
            found = ksvd_embeddings(counts, self.dim).joined()
        else:
            found = glove_fit(counts, self.dim).summed()
        rows = [
            [word, ", ".join(each.word for each in found.neighbors(word, self.neighbors))]
            for word in self.words
        ]
        if rows:
            print(markdown_table(["word", "neighbours"], rows))
        if self.out is not None:
            found.to_word2vec(self.out)
            print(f"Wrote {self.out}")
