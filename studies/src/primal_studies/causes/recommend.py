"""``primal repro causal-recommend``: which films of a history lead to the recommended one?

Two recommenders are trained on MovieLens-100K: a masked one (as BERT4Rec) and a causal one (as
SASRec). Every method looks for items of a history without which another film comes first. Measured
are the size of the first such set and the rank of the new film in the original list.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primal_attention.support.command import UserError
from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one, one_of
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.causes.compare import (
    ATTENTION,
    GRAPH,
    Estimate,
    Explanations,
    estimate_picture,
    estimate_verdict,
    size_verdict,
)
from primal_studies.kit.tables import Column, Files, columns_table

__all__ = ["RecommendOptions", "RecommendStudy"]

CHUNK, MAX_SIZE, NODES = 20, 2, 24
LATEST = "latest first"
STYLES = {"masked": "BERT4Rec", "causal": "SASRec"}


@dataclass(frozen=True)
class RecommendOptions:
    """Sizes of explanations of recommended films, by method."""

    ratings: Path | None = None
    """File of MovieLens-100K: u.data, or ml-100k.inter of RecBole. Its licence forbids copies."""
    kinds: tuple[str, ...] = ("masked", "causal")
    """Recommenders: masked as BERT4Rec, causal as SASRec."""
    users: int = 120
    """Users whose recommendation is explained."""
    masked_passes: int = 60
    """Passes over the users that train the masked recommender."""
    causal_passes: int = 30
    """Passes over the users that train the causal recommender."""
    max_evals: int = 300
    """Calls of the model that a method may make for one user."""
    models: Path | None = None
    """Folder that keeps the trained models; by default runs/models in the result folder."""

    def __post_init__(self) -> None:
        at_least_one(self, "users", "masked_passes", "causal_passes", "max_evals")
        one_of(self, "kinds", STYLES)


class RecommendStudy(Study[RecommendOptions]):
    """For each recommender one cell of its quality, and one for every twenty users."""

    name = "causal-recommend"
    Options = RecommendOptions

    def cells(self, options: RecommendOptions) -> Sequence[Cell]:
        """Return the cells, recommender by recommender."""
        starts = range(0, options.users, CHUNK)
        parts = list(zip(starts, [*starts[1:], options.users], strict=True))
        cells: list[Cell] = [{"part": "popularity"}]
        for kind in options.kinds:
            trained = {"kind": kind, "passes": getattr(options, f"{kind}_passes")}
            cells.append({"part": "model", **trained})
            cells += [
                {"part": "explain", **trained, "budget": options.max_evals, "first": a, "stop": b}
                for a, b in parts
            ]
        return cells

    def run(self, cell: Cell, options: RecommendOptions, scratch: Path) -> Row | Sequence[Row]:
        """Train and measure a recommender, or explain some recommendations."""
        from primal_studies.causes.recommenders import (
            item_scores,
            popularity,
            ranking_scores,
            ranks_of,
            read_histories,
            train_recommender,
        )

        if options.ratings is None:
            raise UserError(
                "the file of ratings is missing: give --ratings with the path of u.data of "
                "MovieLens-100K, or of ml-100k.inter of RecBole."
            )
        users, items, histories = read_histories(options.ratings)
        known = [history[:-1] for history in histories]
        if cell["part"] == "popularity":
            scores = popularity(known, len(items))
            counts = {"users": len(users), "items": len(items)}
        else:
            folder = options.models or scratch.parent / "models"
            model = train_recommender(
                cell["kind"], histories, len(items), folder / cell["kind"], passes=cell["passes"]
            )
            if cell["part"] == "explain":
                chosen = _choose(len(users), cell["stop"])
                return [_explain(model, known[i], i, cell) for i in chosen[cell["first"] :]]
            scores, counts = item_scores(model, known), {}
        found = ranking_scores(ranks_of(scores, [history[-1] for history in histories]))
        return {**counts, **{name: round(value, 4) for name, value in found.items()}}

    def tables(self, rows: Sequence[Row], options: RecommendOptions) -> Mapping[str, str | bytes]:
        """Return the quality of the recommenders, and for each the table of explanations."""
        quality = [row for row in rows if row["part"] != "explain"]
        files: Files = {}
        if quality:
            files["quality.md"] = _quality(quality)
        panels: dict[str, dict[str, Estimate]] = {}
        xlabels: list[str] = []
        for kind, style in STYLES.items():
            explained = [row for row in rows if row["part"] == "explain" and row["kind"] == kind]
            easy = [r for r in explained if any(f[0] is not None for f in r["found"].values())]
            if not easy:
                continue
            methods = Explanations(explained, easy)
            files[f"{kind}.md"] = _page(style, methods)
            panels |= {
                f"as {style}: size": methods.estimates("sizes"),
                f"as {style}: specificity": methods.estimates("ranks"),
            }
            xlabels += ["items", "rank of the new item"]
        if panels:
            files["picture.png"] = estimate_picture(panels, xlabels=xlabels)
        return files


def _choose(count: int, wanted: int) -> list[int]:
    """Return users at random, always the same."""
    return random.Random(0).sample(range(count), count)[:wanted]


def _explain(model: Any, history: Sequence[int], user: int, cell: Cell) -> Row:
    """Return what every method finds for the recommendation of one user."""
    from primal_attention.analysis.causes.recommend import RecommenderSubject
    from primal_studies.causes.measure import SearchSettings, explain_by_all
    from primal_studies.causes.recommenders import MASK, MAX_LENGTH, LastItem

    is_masked = cell["kind"] == "masked"
    subject = RecommenderSubject(
        LastItem(model),
        history[-(MAX_LENGTH - 1) :],
        mask_id=MASK if is_masked else None,
        exclude=[MASK, *history],
    )
    settings = SearchSettings(cell["budget"], MAX_SIZE, is_exhaustive=False, nodes=NODES)
    return {
        "user": user,
        "tokens": len(subject.candidates),
        "score": round(subject.score, 4),
        "found": explain_by_all(
            subject, settings, seed=user, orders={LATEST: subject.candidates[::-1]}
        ),
    }


def _quality(rows: Sequence[Row]) -> str:
    caption = (
        "Rank of the last film of every user among all films that the user has not watched: share "
        "of users with a rank of at most ten (HR@10), and NDCG@10. Training leaves out the last "
        "two films; the one before the last chooses the epoch."
    )
    names = {"popularity": "popularity"} | {k: f"{k}, as {style}" for k, style in STYLES.items()}
    columns: dict[str, Column] = {
        "recommender": lambda row: names[row.get("kind", "popularity")],
        "passes": lambda row: row.get("passes", ""),
        "HR@10": "{hits:.3f}",
        "NDCG@10": "{gain:.3f}",
    }
    return page(caption, columns_table(rows, columns))


def _page(style: str, methods: Explanations) -> str:
    """Return verdict and table of one recommender."""
    budget = methods.rows[0]["budget"]
    caption = (
        f"Recommender as {style}, {len(methods.rows)} users, histories of up to 99 films. *Items*: "
        f"mean and median size of the first set without which another film comes first, over the "
        f"{len(methods.counted)} users for whom a method finds one; where a method finds none, all "
        f"items count. *Difference*: from *{ATTENTION}* for the same users. *Calls*: median, at "
        f"most {budget}. *Rank*: median rank of the new film in the original list; 2 is the "
        f"runner-up. Intervals: bootstrap over users."
    )
    ranks = estimate_verdict(
        "Its new film",
        "that of attention with its best head",
        methods.rank_ratio(GRAPH, ATTENTION),
        (
            "ranks higher in the original list than",
            "ranks about as high in the original list as",
            "ranks lower in the original list than",
        ),
        is_ratio=True,
    )
    latest = estimate_verdict(
        "It",
        "the plain order *latest first*",
        methods.difference(GRAPH, LATEST),
        ("needs fewer items than", "needs about as many items as", "needs more items than"),
    )
    words = f"{size_verdict(methods, 'items')} {latest} {ranks}"
    return page(words, caption, methods.table("items", with_ranks=True))
