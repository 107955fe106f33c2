"""``primal distrib probe``: how much the heads of a saved model follow the counts of a corpus."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from primal_attention.cli.inputs import one_sentence
from primal_attention.support.command import UserError, progress
from primal_attention.support.output import markdown_table, write_atomically

__all__ = ["DistribProbeCommand", "probe"]


@dataclass(frozen=True)
class DistribProbeCommand:
    """Compare the query-key logits of every head with the word pairs of counts."""

    counts: Annotated[Path, tyro.conf.Positional]
    """File of primal distrib count."""
    model: Path
    """Folder of the model: of Hugging Face, of primal convert, or of primal train."""
    layer: tuple[int, ...] = (0,)
    """Attention layers, counted from 0."""
    words: int = 1500
    """Number of words, the most frequent ones that are one token."""
    min_count: float = 8.0
    """Smallest weighted count of a pair of words."""
    offset: tuple[int, ...] = ()
    """Places from the key to the query; several give curves. By default 1 for rotary positions,
    otherwise 0."""
    text: str | None = None
    """Instead draw the attention of one head in this text beside that of the counts; needs --head
    and --out."""
    head: int | None = None
    """Head to draw."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Also write a page (.html), the picture (.png) or the numbers (.json)."""

    def __post_init__(self) -> None:
        if not self.layer or min(self.layer) < 0:
            raise ValueError(f"layer must be one or more numbers from 0, got {self.layer}.")
        if (self.text is None) != (self.head is None):
            raise ValueError("--text and --head belong together: give both or neither.")
        if self.out is not None and self.out.suffix not in (".html", ".png", ".json"):
            raise ValueError(f"--out must end in .html, .png or .json, got {self.out}.")
        if self.text is not None and (self.out is None or self.out.suffix != ".png"):
            raise ValueError("--text draws a picture; give --out with a file that ends in .png.")


def probe(options: DistribProbeCommand) -> None:
    """Print the finding and the table; write the file."""
    import torch

    from primal_attention.analysis.counts import (
        Cooccurrence,
        plot_head_beside_counts,
        probe_heads,
    )
    from primal_attention.hosts.optional import quiet_transformers
    from primal_attention.report.page import to_png
    from primal_attention.surgery.loading import load_any

    torch.set_num_threads(1)
    with one_sentence():
        counts = Cooccurrence.load(options.counts)
        quiet_transformers()
        progress(f"loading {options.model}")
        loaded = load_any(options.model)
        if options.text is not None and options.head is not None and options.out is not None:
            if loaded.tokenizer is None:
                raise UserError(f"{options.model} has no tokenizer, so it cannot read --text.")
            figure = plot_head_beside_counts(
                loaded.model,
                loaded.tokenizer,
                counts,
                options.text,
                layer=options.layer[0],
                head=options.head,
            )
            write_atomically(options.out, to_png(figure))
            print(f"Wrote {options.out}")
            return
        result = probe_heads(
            loaded.model,
            loaded.tokenizer,
            counts,
            words=options.words,
            layers=options.layer,
            offsets=options.offset or None,
            min_count=options.min_count,
            corpus=options.counts.name,
        )
    print(f"{result.verdict()}\n\n{markdown_table(*result.table())}\n\n{result.limits()}")
    if options.out is None:
        return
    if options.out.suffix == ".html":
        result.to_html(options.out)
    else:
        is_picture = options.out.suffix == ".png"
        write_atomically(options.out, result.plot() if is_picture else result.to_json())
    print(f"Wrote {options.out}")
