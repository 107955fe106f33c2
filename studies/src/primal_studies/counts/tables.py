"""Tables, pictures and the verdict of the study of counts, beside figures expected beforehand.

The expected figures were computed before this study, by other code, from 33,530 reviews of IMDb and
Rotten Tomatoes. Our counts are of the 25,000 training reviews of IMDb.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from primal_attention.support.output import markdown_table, page
from primal_attention.tasks.study import Row
from primal_studies.kit.tables import (
    GREY,
    Column,
    Files,
    Picture,
    columns_table,
    group_lines,
    grouped,
    number,
    plot_lines,
)

__all__ = ["METHODS", "POSITIONS", "RANKS", "SHARES", "counts_tables", "counts_verdict"]

RANKS = (1, 4, 16, 32, 64, 128, 256, 512, 1000)
"""Numbers of singular directions of the table of low rank."""
SHARES = (50, 100, 300)
"""Numbers of singular directions of the table of the operator."""
POSITIONS: dict[str, Sequence[int]] = {"5-14": range(5, 15), "all": range(512)}
"""Positions whose mean a word has, by name."""
METHODS = (
    "PPMI-SVD, ours",
    "PPMI-SVD, ours, word + context",
    "kernel-SVD scores, ours, [word; context]",
    "GloVe, ours, word + context",
    "scikit-learn TruncatedSVD of the PPMI",
    "gensim skip-gram",
)
"""Word vectors that are compared, all of width 100."""

_PREDICTORS = {
    "unigram": ("unigram", 0.115, 0.249, 63),
    "projection": ("projection `E = M (Q S)`, raw counts", 0.115, 0.244, 56),
    "normalized": ("`Norm(M) (Q S)`, rows normalised", 0.121, 0.252, 53),
    "symmetric": ("uniform weights, symmetric rows", 0.129, 0.271, 44),
    "directional": ("uniform weights, directional rows", 0.142, 0.294, 38),
    "association": ("softmax(PPMI of F), directional rows", 0.148, 0.292, 38),
    "inverse-distance": ("1/distance weights, directional rows", 0.180, 0.341, 27),
    "last-word": ("last word only, P(next given last)", 0.228, 0.393, 21),
}
"""Label and expected MRR, top-10 and median rank of every predictor."""
_DISTANCES = {
    "uniform": 0.534,
    "key bias only": 0.193,
    "symmetric counts": 0.123,
    "1": 0.189,
    "4": 0.182,
    "16": 0.165,
    "32": 0.158,
    "64": 0.151,
    "128": 0.132,
    "256": 0.106,
    "512": 0.060,
    "1000": 0.0,
}
_OPERATOR = {
    "asymmetry of counts": 0.458,
    "asymmetry of PPMI": 0.877,
    "share of 50": 0.18,
    "share of 100": 0.23,
    "share of 300": 0.38,
}
_HEADS = {
    2: (0.265, 0.154, 0.189, 0.16),
    6: (0.214, 0.219, -0.008, 1.15),
    3: (0.176, 0.172, -0.079, 0.52),
    9: (0.174, 0.180, -0.045, 1.03),
    1: (0.114, 0.144, 0.004, 0.86),
    5: (-0.014, -0.134, 0.106, 0.57),
    "embeddings": (0.164,),
}
_CORRELATIONS = ("symmetric", "forward", "backward")
_ALL = (*_CORRELATIONS, *(f"content_{name}" for name in _CORRELATIONS))
_TITLES = ("ρ(B, sym)", "ρ(B, fwd)", "ρ(Bᵀ, fwd)", "content sym", "content fwd", "content back")
_CORRELATION_COLUMNS: dict[str, Column] = {
    title: f"{{{name}:.3f}}" for title, name in zip(_TITLES, _ALL, strict=True)
}


def counts_tables(rows: Sequence[Row]) -> Files:
    """Return the files of the study that its rows allow."""
    makers = {
        "prediction": _prediction,
        "operator": _operator,
        "rank": _rank,
        "heads": _heads,
        "similarity": _similarity,
    }
    by_table = grouped(rows, "table")
    files: Files = {}
    for name, mine in by_table.items():
        files |= makers[name](mine)
    if _is_complete(rows):
        files["verdict.md"] = page(counts_verdict(rows))
        files["picture.png"] = _picture(by_table)
    return files


def _is_complete(rows: Sequence[Row]) -> bool:
    """Return whether there is a row for every number of the verdict and the picture."""
    wanted = {*_PREDICTORS, *METHODS, "MiniLM", "MiniLM, untrained", "drawn", "text"}
    keys = ("predictor", "method", "model", "sequences")
    return wanted <= {row[key] for row in rows for key in keys if key in row}


def _prediction(rows: Sequence[Row]) -> Files:
    caption = (
        "Next word among {words:,}: {tokens:,} counted tokens of IMDb, {coverage:.0%} of them in "
        "the vocabulary, {cases:,} cases of the test reviews with eight known words before."
    )
    columns: dict[str, Column] = {
        "predictor": lambda r: _PREDICTORS[r["predictor"]][0],
        "MRR": "{mrr:.3f}",
        "top 10": "{top10:.3f}",
        "median rank": "{median_rank:.0f}",
    }
    for i, name in enumerate(("MRR", "top 10", "median"), 1):
        columns[f"expected {name}"] = _expected(i)
    return {"prediction.md": page(caption.format(**rows[0]), columns_table(rows, columns))}


def _expected(place: int) -> Column:
    return lambda row: number(_PREDICTORS[row["predictor"]][place])


def _operator(rows: Sequence[Row]) -> Files:
    names = {
        "asymmetry of counts": "‖F − Fᵀ‖ / ‖F + Fᵀ‖ of the counts",
        "asymmetry of PPMI": "the same of directional PPMI",
        **{f"share of {k}": f"squared norm of PPMI in {k} directions" for k in SHARES},
    }
    body = [[label, rows[-1][key], _OPERATOR[key]] for key, label in names.items()]
    return {"operator.md": page(markdown_table(["operator", "ours", "expected"], body))}


def _rank(rows: Sequence[Row]) -> Files:
    found = {(row["sequences"], row["k"]): row["distance"] for row in rows}
    columns: dict[str, Column] = {
        "weights": lambda k: f"rank {k}" if k.isdigit() else k,
        "words drawn by frequency": lambda k: number(found.get(("drawn", k))),
        "stretches of text": lambda k: number(found.get(("text", k))),
        "expected": lambda k: number(_DISTANCES[k]),
    }
    caption = (
        "Mean total variation between approximate and exact count attention, 1,000 words, PMI of "
        "F + 0.5, 400 sequences of eight words."
    )
    return {"rank.md": page(caption, columns_table(_DISTANCES, columns))}


def _heads(rows: Sequence[Row]) -> Files:
    files: Files = {}
    trained = [row for row in rows if row.get("positions") == "5-14" and row["model"] == "MiniLM"]
    if trained:
        files["heads.md"] = _minilm_table(trained, rows)
    if rotary := [row for row in rows if row["model"] == "SmolLM2"]:
        files["heads-smollm2.md"] = _smollm2_table(rotary)
        files["distance.png"] = _distance_picture(rotary)
    return files


def _minilm_table(trained: Sequence[Row], rows: Sequence[Row]) -> str:
    caption = (
        "First layer of all-MiniLM-L6-v2, {probed:,} words, pairs with a weighted count of at "
        "least 8: {pairs:,} symmetric, {directional pairs:,} directional."
    )
    columns: dict[str, Column] = {"head": "{head}", **_CORRELATION_COLUMNS}
    columns["asymmetry"] = lambda r: number(r["asymmetry"], 2)
    columns["permuted words"] = "{null_mean:.3f} ± {null_spread:.3f}"
    columns["expected ρ"] = lambda r: ", ".join(map(number, _HEADS.get(r["head"], ())[:3])) or "—"
    columns["expected asymmetry"] = lambda r: number(
        (*_HEADS.get(r["head"], ()), *[None] * 4)[3], 2
    )
    parts = [caption.format(**trained[0]), columns_table(trained, columns)]
    if others := _settings(rows):
        parts += ["Other settings of the same layer:", others]
    return page(*parts)


def _settings(rows: Sequence[Row]) -> str:
    """Return how many heads follow the corpus by model and positions."""
    heads = [row for row in rows if "positions" in row and row["head"] != "embeddings"]
    columns: dict[str, Column] = {
        "model": "{model}",
        "mean over positions": "{positions}",
        "heads with ρ > 0.1": lambda mine: _count(mine, "evident"),
        "with content ρ > 0.1": lambda mine: _count(mine, "content"),
        "largest ρ(B, sym)": lambda mine: number(max(r["symmetric"] for r in mine)),
        "largest content sym": lambda mine: number(max(r["content_symmetric"] for r in mine)),
    }
    groups = grouped(heads, "model", "positions")
    return columns_table(groups.values(), columns) if len(groups) > 1 else ""


def _count(rows: Sequence[Row], key: str) -> str:
    heads = [row for row in rows if row["head"] != "embeddings"]
    return f"{sum(row[key] for row in heads)} of {len(heads)}"


def _smollm2_table(rows: Sequence[Row]) -> str:
    caption = (
        "First layer of SmolLM2-135M-Instruct at distance δ from key to query: how many heads "
        "follow the corpus, and the largest correlation with its head."
    )
    columns: dict[str, Column] = {
        "δ": "{offset}",
        "heads with ρ > 0.1": lambda mine: _count(mine, "evident"),
        "with content ρ > 0.1": lambda mine: _count(mine, "content"),
    }
    for title, name in zip(_CORRELATION_COLUMNS, _ALL, strict=True):
        columns[title] = _largest(name)
    heads = [row for row in rows if row["head"] != "embeddings"]
    return page(caption, columns_table(grouped(heads, "offset").values(), columns))


def _largest(name: str) -> Column:
    """Return a column of groups: the largest of a correlation, and its head."""

    def cell(rows: Sequence[Row]) -> str:
        best = max(rows, key=lambda row: row[name])
        return f"{best[name]:.3f} ({best['head']})"

    return cell


def _similarity(rows: Sequence[Row]) -> Files:
    caption = (
        "Rank correlation of cosines with human judgements (pairs with known words), {words:,} "
        "words of IMDb, width 100; processor seconds without counting."
    )
    columns: dict[str, Column] = {
        "vectors": "{method}",
        "WordSim-353": "{WordSim-353:.3f} ({WordSim-353 pairs})",
        "SimLex-999": "{SimLex-999:.3f} ({SimLex-999 pairs})",
        "built-in pairs": lambda r: number(r["built-in pairs"]),
        "built-in analogies": lambda r: number(r["built-in analogies"]),
        "seconds": "{seconds}",
    }
    return {"similarity.md": page(caption.format(**rows[0]), columns_table(rows, columns))}


def counts_verdict(rows: Sequence[Row]) -> str:
    """Return the findings in sentences whose numbers come from the rows."""
    mrr = {row["predictor"]: row["mrr"] for row in rows if row["table"] == "prediction"}
    gain = mrr["projection"] - mrr["unigram"]
    word = "no better than" if gain < 0.005 else "better than"

    def more(name: str, base: str) -> str:
        return f"{mrr[name] / mrr[base] - 1:+.0%}"

    order = ["inverse-distance", "directional", "symmetric", "projection"]
    holds = all(mrr[a] > mrr[b] for a, b in pairwise(order))
    sentences = [
        f"The projection of raw counts is {word} the unigram: MRR {mrr['projection']:.3f} against "
        f"{mrr['unigram']:.3f}. Direction adds {more('directional', 'symmetric')}, content weights "
        f"{more('association', 'directional')}, position "
        f"{more('inverse-distance', 'directional')}; the order position > directional > symmetric "
        f"> raw projection {'holds' if holds else 'does not hold'}, and the last word alone "
        f"({mrr['last-word']:.3f}) "
        f"{'is better than all of them' if mrr['last-word'] == max(mrr.values()) else 'is not'}."
    ]
    sentences += [_heads_verdict(rows), _similarity_verdict(rows)]
    return " ".join(sentences)


def _heads_verdict(rows: Sequence[Row]) -> str:
    at_five = [r for r in rows if r["table"] == "heads" and r.get("positions", "5-14") == "5-14"]
    by_model = grouped(at_five, "model")
    trained, untrained = by_model["MiniLM"], by_model["MiniLM, untrained"]
    heads = [row for row in trained if row["head"] != "embeddings"]
    best = max(heads, key=lambda row: row["symmetric"])
    return (
        f"{_count(trained, 'evident')} heads in the first layer of MiniLM follow the corpus with a "
        f"rank correlation above 0.1, {_count(trained, 'content')} without key effects, and "
        f"{_count(untrained, 'evident')} heads of the untrained model. Head {best['head']} has the "
        f"largest: {best['symmetric']:.3f}, and {best['content_symmetric']:.3f} without "
        "key effects."
    )


def _similarity_verdict(rows: Sequence[Row]) -> str:
    found = {row["method"]: row for row in rows if row["table"] == "similarity"}
    ours, peer, sgns = (found[METHODS[i]] for i in (0, 4, 5))
    return (
        f"On WordSim-353 and SimLex-999, PPMI-SVD has {ours['WordSim-353']:.3f} and "
        f"{ours['SimLex-999']:.3f}, the truncated SVD of scikit-learn on the same matrix "
        f"{peer['WordSim-353']:.3f} and {peer['SimLex-999']:.3f}, skip-gram of gensim "
        f"{sgns['WordSim-353']:.3f} and {sgns['SimLex-999']:.3f}; processor seconds are "
        f"{ours['seconds']}, {peer['seconds']} and {sgns['seconds']}."
    )


def _picture(tables: Mapping[str, Sequence[Row]]) -> bytes:
    picture = Picture(3, size=(15, 4), is_spaced=False)
    colors, (words, ranks, heads) = picture.colors, picture.axes
    rows = tables["prediction"]
    names = [_PREDICTORS[row["predictor"]][0].replace("`", "") for row in rows]
    shades = [GREY, "#b91c1c", "#b91c1c", *[colors[1]] * (len(rows) - 3)]
    words.barh(names, [row["mrr"] for row in rows], color=shades[: len(rows)])
    words.invert_yaxis()
    words.tick_params(axis="y", labelsize=8)
    words.set(title="next word", xlabel="mean reciprocal rank")
    by_source = grouped(tables["rank"], "sequences")
    for color, (source, mine) in zip(colors, by_source.items(), strict=False):
        found = {row["k"]: row["distance"] for row in mine}
        known = [k for k in RANKS if str(k) in found]
        ranks.plot(known, [found[str(k)] for k in known], "o-", color=color, label=source)
        ranks.axhline(found["key bias only"], color=color, ls=":", lw=1)
    ranks.set(title="rank of the logits", xlabel="k", ylabel="total variation", xscale="log")
    ranks.legend(frameon=False, title="dotted: key bias only")
    mine = [
        row
        for row in tables["heads"]
        if row["model"] == "MiniLM" and row["positions"] == "5-14" and row["head"] != "embeddings"
    ]
    for shift, (name, color) in enumerate(zip(_CORRELATIONS, colors, strict=False)):
        place = [row["head"] + 0.26 * (shift - 1) for row in mine]
        heads.bar(place, [row[name] for row in mine], 0.24, color=color, label=name)
        content = [row[f"content_{name}"] for row in mine]
        heads.plot(place, content, "_", color="black", ms=6, label="content" if not shift else "")
    heads.axhline(0, color=GREY, lw=0.8)
    heads.set(title="first layer of MiniLM", xlabel="head", ylabel="rank correlation")
    heads.set_xticks([row["head"] for row in mine])
    low, high = heads.get_ylim()
    heads.set_ylim(low, high + 0.2 * (high - low))
    heads.legend(frameon=False, fontsize=8, ncols=4, loc="upper center")
    return picture.png(grid=0, is_open=False)


def _distance_picture(rows: Sequence[Row]) -> bytes:
    titles = {"symmetric": "ρ(B, PMI sym)", "content_symmetric": "content symmetric"}
    titles |= {"content_backward": "content backward"}
    panels = group_lines(
        (title, f"head {row['head']}", row["offset"], row[name])
        for name, title in titles.items()
        for row in rows
        if row["head"] != "embeddings"
    )
    return plot_lines(
        panels, xlabel="places from key to query", ylabels=["rank correlation"], is_log=False
    )
