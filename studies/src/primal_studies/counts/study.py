"""``primal repro counts``: attention from the counts of a corpus, beside what trained heads know.

Film reviews of IMDb are counted. Tables: prediction of the next word, attention at low rank, the
operator itself, heads of trained models, and word similarity beside gensim and scikit-learn.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.support.settings import at_least_one
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.counts.tables import METHODS, POSITIONS, RANKS, SHARES, counts_tables

if TYPE_CHECKING:
    from primal_attention.analysis.counts import Cooccurrence, WordVectors

__all__ = ["CountsStudy", "CountsStudyOptions"]


@dataclass(frozen=True)
class CountsStudyOptions:
    """Attention from counts: prediction, rank, trained heads and word similarity."""

    words: int = 4000
    """Words of the vocabulary for prediction and heads."""
    cases: int = 3000
    """Held-out next words."""
    probed: int = 1500
    """Words of the probe of heads."""
    similar_words: int = 10_000
    """Words of the vocabulary for word similarity."""
    offsets: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Places from the key to the query, for the rotary model."""
    data: Path | None = None
    """Folder with text/imdb; by default that of PRIMAL_DATA."""

    def __post_init__(self) -> None:
        at_least_one(self, "words", "cases", "probed", "similar_words", "offsets")


class CountsStudy(Study[CountsStudyOptions]):
    """One cell a table, model, distance or method."""

    name = "counts"
    Options = CountsStudyOptions

    def cells(self, options: CountsStudyOptions) -> Sequence[Cell]:
        """Return the cells, table by table."""
        heads = {"table": "heads", "words": options.words, "probed": options.probed}
        return [
            {"table": "prediction", "words": options.words, "cases": options.cases},
            {"table": "operator", "words": options.words},
            *({"table": "rank", "sequences": source} for source in ("drawn", "text")),
            *({**heads, "model": "MiniLM", "positions": where} for where in POSITIONS),
            {**heads, "model": "MiniLM, untrained", "positions": "5-14"},
            *({**heads, "model": "SmolLM2", "offset": offset} for offset in options.offsets),
            *(
                {"table": "similarity", "words": options.similar_words, "method": method}
                for method in METHODS
            ),
        ]

    def run(self, cell: Cell, options: CountsStudyOptions, scratch: Path) -> Row | Sequence[Row]:
        """Return the rows of one part of a table."""
        parts: dict[str, Callable[[Cell, Path | None], Row | Sequence[Row]]] = {
            "prediction": _prediction,
            "operator": _operator,
            "rank": _rank,
            "heads": _heads,
            "similarity": _similarity,
        }
        return parts[cell["table"]](cell, options.data)

    def tables(self, rows: Sequence[Row], options: CountsStudyOptions) -> Mapping[str, str | bytes]:
        """Return the tables, the pictures and a verdict."""
        return counts_tables(rows)

    def describe(self, row: Row) -> str:
        """Return a row in one line."""
        shown = [f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()]
        return ", ".join(shown[:7])


def _prediction(cell: Cell, data: Path | None) -> list[Row]:
    from primal_studies.counts.corpus import imdb_cases, imdb_counts
    from primal_studies.counts.prediction import evaluate_prediction

    counts = imdb_counts(cell["words"], data=data)
    cases = imdb_cases(counts, cell["cases"], data=data)
    shared = {
        "tokens": counts.num_tokens,
        "coverage": round(float(counts.unigram.sum() / counts.num_tokens), 4),
    }
    return [
        {"predictor": name, **_rounded(score._asdict()), **shared}
        for name, score in evaluate_prediction(counts, cases).items()
    ]


def _rounded(numbers: Mapping[str, float], digits: int = 4) -> dict[str, float]:
    return {name: round(float(value), digits) for name, value in numbers.items()}


def _operator(cell: Cell, data: Path | None) -> Row:
    import numpy as np
    from scipy.sparse.linalg import svds

    from primal_studies.counts.corpus import imdb_counts

    counts = imdb_counts(cell["words"], data=data)
    forward = counts.forward
    ppmi: Any = counts.transform("ppmi", directional=True)  # sparse without smoothing
    sigma = np.sort(svds(ppmi, 300, return_singular_vectors=False, random_state=0))[::-1]
    total = float((ppmi.data**2).sum())

    def skew(matrix: Any) -> float:
        odd, even = matrix - matrix.T, matrix + matrix.T
        return float(np.sqrt((odd.data**2).sum() / (even.data**2).sum()))

    return {
        "asymmetry of counts": round(skew(forward), 3),
        "asymmetry of PPMI": round(skew(ppmi), 3),
        **{f"share of {k}": round(float((sigma[:k] ** 2).sum() / total), 3) for k in SHARES},
    }


def _rank(cell: Cell, data: Path | None) -> list[Row]:
    import numpy as np

    from primal_studies.counts.corpus import imdb_cases, imdb_counts, low_rank_distances

    words, count, length = 1000, 400, 8
    counts = imdb_counts(words, data=data)
    if cell["sequences"] == "text":
        contexts = imdb_cases(counts, count, length, data=data).contexts
    else:
        share = counts.unigram / counts.unigram.sum()
        contexts = np.random.default_rng(0).choice(words, (count, length), p=share)
    found = low_rank_distances(counts, contexts, RANKS, words=words)
    return [{"k": name, "distance": round(value, 4)} for name, value in found.items()]


def _heads(cell: Cell, data: Path | None) -> list[Row]:
    from primal_attention.analysis.counts import probe_heads
    from primal_studies.counts.corpus import imdb_counts
    from primal_studies.kit.pretrained import minilm, smollm2

    model, tokenizer = smollm2() if cell["model"] == "SmolLM2" else minilm()
    if cell["model"].endswith("untrained"):
        import torch

        torch.manual_seed(0)
        model = type(model)(model.config).eval()
    settings: dict[str, Any] = {"offsets": (cell["offset"],)} if "offset" in cell else {}
    if "positions" in cell:
        settings["positions"] = POSITIONS[cell["positions"]]
    counts = imdb_counts(cell["words"], data=data)
    settings |= {"words": cell["probed"], "permutations": 20}
    result = probe_heads(model, tokenizer, counts, **settings)
    rows: list[dict[str, Any]] = [
        {"head": head.head, "evident": head.is_evident, "content": head.has_content}
        | _rounded(head.association._asdict())
        for head in result.heads
    ]
    shared = {"pairs": result.pairs[0], "directional pairs": result.pairs[1]}
    if result.embeddings is not None:
        rows.append({"head": "embeddings"} | _rounded(result.embeddings._asdict()))
    return [row | shared for row in rows]


def _similarity(cell: Cell, data: Path | None) -> Row:
    import time

    from primal_attention.analysis.counts import evaluate_similarity, read_pairs
    from primal_attention.support.command import needs
    from primal_studies.counts.analogies import evaluate_analogies
    from primal_studies.counts.corpus import imdb_counts

    with needs("studies[counts]", "Word similarity"):
        import gensim
    # published sets of word pairs are part of the package
    folder = Path(gensim.__file__).parent / "test" / "test_data"
    counts = imdb_counts(cell["words"], data=data)
    started = time.process_time()
    vectors = _vectors(cell["method"], counts, data)
    row: dict[str, Any] = {"seconds": round(time.process_time() - started, 1)}
    for name, file in (("WordSim-353", "wordsim353.tsv"), ("SimLex-999", "simlex999.txt")):
        score = evaluate_similarity(vectors, read_pairs(folder / file))
        row |= {name: round(score.spearman, 3), f"{name} pairs": f"{score.used}/{score.total}"}
    built_in, analogies = evaluate_similarity(vectors), evaluate_analogies(vectors)
    return row | {
        "built-in pairs": round(built_in.spearman, 3),
        "built-in analogies": round(analogies.accuracy, 3),
    }


def _vectors(method: str, counts: "Cooccurrence", data: Path | None) -> "WordVectors":
    """Return word vectors of width 100 by one of the methods; the count is not part of it."""
    import numpy as np

    from primal_attention.analysis import counts as distributional
    from primal_studies.counts.corpus import imdb_words

    if method.startswith("PPMI-SVD, ours"):
        found = distributional.pmi_svd(counts, 100)
        return found.summed() if "context" in method else found
    if method.startswith("kernel-SVD scores, ours"):
        return distributional.ksvd_embeddings(counts, 100, context_smoothing=0.75).joined()
    if method.startswith("GloVe, ours"):
        return distributional.glove_fit(counts, 100, epochs=10).summed()
    if method.startswith("scikit-learn"):
        from sklearn.decomposition import TruncatedSVD

        ppmi = counts.transform("ppmi", directional=False, context_smoothing=0.75)
        svd = TruncatedSVD(100, random_state=0)
        scores = svd.fit_transform(ppmi)
        return distributional.WordVectors(counts.words, scores / np.sqrt(svd.singular_values_))
    from gensim.models import Word2Vec

    model = Word2Vec(
        imdb_words("train", data=data),
        sg=1,
        vector_size=100,
        window=5,
        negative=5,
        min_count=int(counts.unigram.min()),
        workers=1,
        epochs=5,
        seed=0,
    )
    row = {word: i for i, word in enumerate(model.wv.index_to_key)}
    known = [word for word in counts.words if word in row]
    table = model.wv.vectors[[row[word] for word in known]].astype(np.float64)
    return distributional.WordVectors(tuple(known), table)
