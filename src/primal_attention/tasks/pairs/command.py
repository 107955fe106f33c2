"""``primal search``: images for a text, printed and as a page with thumbnails."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from primal_attention.support.command import UserError, user_errors
from primal_attention.support.settings import parse

if TYPE_CHECKING:
    from primal_attention.tasks.pairs import ImageTextMatcher
    from primal_attention.tasks.pairs.estimator import Hit
    from primal_attention.tasks.pairs.searching import Rerank

__all__ = ["main"]


@dataclass(frozen=True)
class SearchCommand:
    """Find images for texts with a model that primal train --task pairs made.

    Images that cannot be read are left out and counted.
    """

    model: Annotated[Path, tyro.conf.Positional]
    """Folder of a trained model of pairs, such as outputs/pairs, or of an ImageTextMatcher."""
    texts: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TEXT [TEXT ...]")
    ]
    """What to look for; several texts are several searches."""
    images: Path
    """Folder of the images, with the folders inside."""
    results: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 5
    """Results of each search."""
    candidates: int = 100
    """Results of the first stage that are read together with the text."""
    rerank: str = "none"
    """Move images up that look like the best ones: none, diffusion, context, expansion, or another
    method of primal rerank."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = Path("search.html")
    """Page to write (.html); None writes none."""
    threads: int = 1
    """Threads of torch."""

    def __post_init__(self) -> None:
        for name in ("results", "candidates", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}.")
        if self.out is not None and self.out.suffix != ".html":
            raise ValueError(f"--out must end in .html, got {self.out}.")


def main(argv: list[str]) -> int:
    """Search, print the results, write the page."""
    options = parse(SearchCommand, argv, prog="primal search")
    if not options.texts:
        raise UserError('which text? Give one after the model, as in primal search MODEL "a cat".')
    import torch

    torch.set_num_threads(options.threads)
    with user_errors(""):
        _run(options)
    return 0


def _run(options: SearchCommand) -> None:
    from primal_attention.tasks.pairs import ImageTextMatcher
    from primal_attention.tasks.pairs.images import list_images
    from primal_attention.tasks.task import offered

    # another domain orders lists; the seam knows which
    reranker = None if options.rerank == "none" else offered("reranker")(options.rerank)
    matcher = ImageTextMatcher.load(options.model)
    files = list_images(options.images)
    matcher.index(files, skip_broken=True)
    for problem in matcher.problems_[:3]:
        print(f"left out: {problem.partition(': ')[2]}")
    if len(matcher.problems_) > 3:
        print(f"left out: {len(matcher.problems_) - 3} more")
    found = [(text, *_search(matcher, text, options, reranker)) for text in options.texts]
    for text, hits, note in found:
        print(f'"{text}" in {len(files) - len(matcher.problems_)} images')
        if note:
            print(f"  {note}")
        for place, hit in enumerate(hits, 1):
            name = hit.image.relative_to(options.images)
            print(f"  {place}. {name}  match {100 * hit.probability:.0f} %")
    if options.out is not None:
        _write_page(options, found, len(files) - len(matcher.problems_))
        print(f"Wrote {options.out}")


def _search(
    matcher: "ImageTextMatcher", text: str, options: SearchCommand, reranker: "Rerank | None"
) -> "tuple[list[Hit], str]":
    """Return the results of a text, and which of its words are unknown."""
    with warnings.catch_warnings(record=True) as notices:
        warnings.simplefilter("always")
        hits = matcher.search(
            text,
            options.results,
            candidates=options.candidates,
            reranker=reranker,
        )
    return hits, " ".join(str(notice.message) for notice in notices)


def _write_page(
    options: SearchCommand, found: "Sequence[tuple[str, list[Hit], str]]", count: int
) -> None:
    from primal_attention.report import Report
    from primal_attention.report.cards import Card, add_cards
    from primal_attention.tasks.pairs.showing import thumbnail

    report = Report(
        f"Search in {options.images.name or options.images}",
        f"{count} images, searched by the model {options.model}.",
    )
    for text, hits, note in found:
        report.section(f"“{text}”")
        if note:
            report.text(note)
        cards = [
            Card(thumbnail(hit.image), f"{hit.image.name}, match {100 * hit.probability:.0f} %")
            for hit in hits
        ]
        add_cards(report, cards)
    report.caution(
        "The percentage says how likely the text is to match beside a random other text. A text "
        "that is wrong in one detail may get a high one."
    )
    if options.out is not None:
        report.write(options.out)
