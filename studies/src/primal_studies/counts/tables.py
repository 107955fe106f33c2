"""Tables, pictures and the verdict of the study of counts, beside figures expected beforehand.

The expected figures were computed before this study, by other code, from 33,530 reviews of IMDb and
Rotten Tomatoes. Our counts are of the 25,000 training reviews of IMDb.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from primal_attention.support.command import needs
from primal_attention.support.output import markdown_table, page

__all__ = ["METHODS", "POSITIONS", "RANKS", "SHARES", "counts_tables", "verdict"]

Row = Mapping[str, Any]

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


def counts_tables(rows: Sequence[Row]) -> dict[str, str | bytes]:
    """Return the files of the study that its rows allow."""
    by_table: dict[str, list[Row]] = {}
    for row in rows:
        by_table.setdefault(row["table"], []).append(row)
    makers = {
        "prediction": _prediction,
        "operator": _operator,
        "rank": _rank,
        "heads": _heads,
        "similarity": _similarity,
    }
    files: dict[str, str | bytes] = {}
    for name, mine in by_table.items():
        files |= makers[name](mine)
    if _is_complete(rows):
        files["verdict.md"] = page(verdict(rows))
        files["picture.png"] = _picture(by_table)
    return files


def _is_complete(rows: Sequence[Row]) -> bool:
    """Return whether there is a row for every number of the verdict and the picture."""
    wanted = {*_PREDICTORS, *METHODS, "MiniLM", "MiniLM, untrained", "drawn", "text"}
    keys = ("predictor", "method", "model", "sequences")
    return wanted <= {row[key] for row in rows for key in keys if key in row}


def _number(value: Any, digits: int = 3) -> str:
    if value is None:
        return "—"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def _prediction(rows: Sequence[Row]) -> dict[str, str | bytes]:
    first = rows[0]
    body = []
    for row in rows:
        label, *expected = _PREDICTORS[row["predictor"]]
        ours = [_number(row["mrr"]), _number(row["top10"]), f"{row['median_rank']:.0f}"]
        body.append([label, *ours, *(_number(value) for value in expected)])
    caption = (
        f"Next word among {first['words']:,}: {first['tokens']:,} counted tokens of IMDb, "
        f"{first['coverage']:.0%} of them in the vocabulary, {first['cases']:,} cases of the test "
        "reviews with eight known words before."
    )
    header = ["predictor", "MRR", "top 10", "median rank"]
    header += ["expected MRR", "expected top 10", "expected median"]
    return {"prediction.md": page(caption, markdown_table(header, body))}


def _operator(rows: Sequence[Row]) -> dict[str, str | bytes]:
    row = rows[-1]
    names = {
        "asymmetry of counts": "‖F − Fᵀ‖ / ‖F + Fᵀ‖ of the counts",
        "asymmetry of PPMI": "the same of directional PPMI",
        **{f"share of {k}": f"squared norm of PPMI in {k} directions" for k in SHARES},
    }
    body = [[label, row[key], _OPERATOR[key]] for key, label in names.items()]
    return {"operator.md": page(markdown_table(["operator", "ours", "expected"], body))}


def _rank(rows: Sequence[Row]) -> dict[str, str | bytes]:
    found = {(row["sequences"], row["k"]): row["distance"] for row in rows}
    body = [
        [f"rank {k}" if k.isdigit() else k]
        + [_number(found.get((source, k))) for source in ("drawn", "text")]
        + [_number(expected)]
        for k, expected in _DISTANCES.items()
    ]
    caption = (
        "Mean total variation between approximate and exact count attention, 1,000 words, PMI of "
        "F + 0.5, 400 sequences of eight words."
    )
    header = ["weights", "words drawn by frequency", "stretches of text", "expected"]
    return {"rank.md": page(caption, markdown_table(header, body))}


def _heads(rows: Sequence[Row]) -> dict[str, str | bytes]:
    files: dict[str, str | bytes] = {}
    trained = [row for row in rows if row.get("positions") == "5-14" and row["model"] == "MiniLM"]
    if trained:
        files["heads.md"] = _minilm_table(trained, rows)
    if rotary := [row for row in rows if row["model"] == "SmolLM2"]:
        files["heads-smollm2.md"] = _smollm2_table(rotary)
        files["distance.png"] = _distance_picture(rotary)
    return files


def _minilm_table(trained: Sequence[Row], rows: Sequence[Row]) -> str:
    first = trained[0]
    body = []
    for row in trained:
        expected = _HEADS.get(row["head"], ())
        body.append(
            [
                row["head"],
                *(_number(row[name]) for name in _ALL),
                _number(row["asymmetry"], 2),
                _null(row),
                ", ".join(_number(value) for value in expected[:3]) or "—",
                _number(expected[3] if len(expected) > 3 else None, 2),
            ]
        )
    caption = (
        f"First layer of all-MiniLM-L6-v2, {first['probed']:,} words, pairs with a weighted count "
        f"of at least 8: {first['pairs']:,} symmetric, {first['directional pairs']:,} directional."
    )
    header = ["head", "ρ(B, sym)", "ρ(B, fwd)", "ρ(Bᵀ, fwd)"]
    header += ["content sym", "content fwd", "content back", "asymmetry", "permuted words"]
    header += ["expected ρ", "expected asymmetry"]
    parts = [caption, markdown_table(header, body)]
    if others := _settings(rows):
        parts += ["Other settings of the same layer:", others]
    return page(*parts)


def _null(row: Row) -> str:
    return f"{row['null_mean']:.3f} ± {row['null_spread']:.3f}"


def _settings(rows: Sequence[Row]) -> str:
    """Return how many heads follow the corpus by model and positions."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if "positions" in row and row["head"] != "embeddings":
            groups.setdefault((row["model"], row["positions"]), []).append(row)
    body = [
        [model, where, _count(mine, "evident"), _count(mine, "content")]
        + [_number(max(row[name] for row in mine)) for name in ("symmetric", "content_symmetric")]
        for (model, where), mine in groups.items()
    ]
    header = ["model", "mean over positions", "heads with ρ > 0.1", "with content ρ > 0.1"]
    header += ["largest ρ(B, sym)", "largest content sym"]
    return markdown_table(header, body) if len(body) > 1 else ""


def _count(rows: Sequence[Row], key: str) -> str:
    heads = [row for row in rows if row["head"] != "embeddings"]
    return f"{sum(row[key] for row in heads)} of {len(heads)}"


def _smollm2_table(rows: Sequence[Row]) -> str:
    body = []
    for offset in dict.fromkeys(row["offset"] for row in rows):
        mine = [row for row in rows if row["offset"] == offset and row["head"] != "embeddings"]
        cells = [_largest(mine, name) for name in _ALL]
        body.append([offset, _count(mine, "evident"), _count(mine, "content"), *cells])
    caption = (
        "First layer of SmolLM2-135M-Instruct at distance δ from key to query: how many heads "
        "follow the corpus, and the largest correlation with its head."
    )
    header = ["δ", "heads with ρ > 0.1", "with content ρ > 0.1", "ρ(B, sym)", "ρ(B, fwd)"]
    header += ["ρ(Bᵀ, fwd)", "content sym", "content fwd", "content back"]
    return page(caption, markdown_table(header, body))


def _largest(rows: Sequence[Row], name: str) -> str:
    best = max(rows, key=lambda row: row[name])
    return f"{best[name]:.3f} ({best['head']})"


def _similarity(rows: Sequence[Row]) -> dict[str, str | bytes]:
    names = ["WordSim-353", "SimLex-999"]
    body = [
        [row["method"]]
        + [f"{row[name]:.3f} ({row[f'{name} pairs']})" for name in names]
        + [_number(row["built-in pairs"]), _number(row["built-in analogies"]), row["seconds"]]
        for row in rows
    ]
    caption = (
        f"Rank correlation of cosines with human judgements (pairs with known words), "
        f"{rows[0]['words']:,} words of IMDb, width 100; processor seconds without counting."
    )
    header = ["vectors", *names, "built-in pairs", "built-in analogies", "seconds"]
    return {"similarity.md": page(caption, markdown_table(header, body))}


def verdict(rows: Sequence[Row]) -> str:
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
    def of(model: str) -> list[Row]:
        return [
            row
            for row in rows
            if row["table"] == "heads"
            and row["model"] == model
            and row.get("positions", "5-14") == "5-14"
        ]

    trained, untrained = of("MiniLM"), of("MiniLM, untrained")
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
    with needs("analysis", "A picture"):
        import matplotlib
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    from primal_attention.report.page import to_png
    from primal_attention.report.plots import COLORS

    figure, axes = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    rows = tables["prediction"]
    names = [_PREDICTORS[row["predictor"]][0].replace("`", "") for row in rows]
    colors = ["#5b6472", "#b91c1c", "#b91c1c", *[COLORS[1]] * (len(rows) - 3)]
    axes[0].barh(names, [row["mrr"] for row in rows], color=colors[: len(rows)])
    axes[0].invert_yaxis()
    axes[0].tick_params(axis="y", labelsize=8)
    axes[0].set(title="next word", xlabel="mean reciprocal rank")
    for color, source in zip(COLORS, ("drawn", "text"), strict=False):
        found = {row["k"]: row["distance"] for row in tables["rank"] if row["sequences"] == source}
        ranks = [k for k in RANKS if str(k) in found]
        axes[1].plot(ranks, [found[str(k)] for k in ranks], "o-", color=color, label=source)
        axes[1].axhline(found["key bias only"], color=color, ls=":", lw=1)
    axes[1].set(title="rank of the logits", xlabel="k", ylabel="total variation", xscale="log")
    axes[1].legend(frameon=False, title="dotted: key bias only")
    heads = [
        row
        for row in tables["heads"]
        if row["model"] == "MiniLM" and row["positions"] == "5-14" and row["head"] != "embeddings"
    ]
    for shift, (name, color) in enumerate(zip(_CORRELATIONS, COLORS, strict=False)):
        place = [row["head"] + 0.26 * (shift - 1) for row in heads]
        axes[2].bar(place, [row[name] for row in heads], 0.24, color=color, label=name)
        content = [row[f"content_{name}"] for row in heads]
        axes[2].plot(place, content, "_", color="black", ms=6, label="content" if not shift else "")
    axes[2].axhline(0, color="#5b6472", lw=0.8)
    axes[2].set(title="first layer of MiniLM", xlabel="head", ylabel="rank correlation")
    axes[2].set_xticks([row["head"] for row in heads])
    low, high = axes[2].get_ylim()
    axes[2].set_ylim(low, high + 0.2 * (high - low))
    axes[2].legend(frameon=False, fontsize=8, ncols=4, loc="upper center")
    return to_png(figure)


def _distance_picture(rows: Sequence[Row]) -> bytes:
    from primal_studies.kit.tables import plot_lines

    heads = [row for row in rows if row["head"] != "embeddings"]
    titles = {"symmetric": "ρ(B, PMI sym)", "content_symmetric": "content symmetric"}
    titles |= {"content_backward": "content backward"}
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, title in titles.items():
        for row in heads:
            line = panels.setdefault(title, {}).setdefault(f"head {row['head']}", [])
            line.append((row["offset"], row[name]))
    return plot_lines(
        panels, xlabel="places from key to query", ylabels=["rank correlation"], is_log=False
    )
