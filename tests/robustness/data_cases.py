"""Files of a user: settings, texts, series, tables, logs, vectors, pairs, counts and graphs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from primal_attention.cli.plans import make_plan
from primal_attention.models.config import EncoderOptions
from primal_attention.support.command import UserError
from primal_attention.tasks.experiment import check_experiment
from primal_attention.tasks.longrange.task import TokenTask
from primal_attention.tasks.task import find_task
from primal_attention.tasks.trained import save_trained

from .cases import (
    CASES,
    WORDS,
    Builder,
    case,
    check_rows,
    event_log,
    pair_task,
    series_model,
    table,
    table_model,
    text_model,
    value_model,
    vectors,
)
from .harness import Case, command, printed


def predict(model: Path, file: str) -> Callable[[Path], Any]:
    """``primal predict``, and the rows it writes."""

    def read(folder: Path) -> Any:
        out = folder.parent / "rows.jsonl"
        command("predict", model, folder / file, "--out", out)
        return [json.loads(line) for line in out.read_text("utf-8").splitlines()]

    return read


def score(model: Path, file: str) -> Callable[[Path], Any]:
    """``primal eval``, and the scores it writes."""

    def read(folder: Path) -> Any:
        out = folder.parent / "scores.json"
        command("eval", model, "--data", folder / file, "--out", out)
        return json.loads(out.read_text("utf-8"))

    return read


def plan(file: str, *options: str) -> Callable[[Path], Any]:
    """What ``primal train FILE`` does before it trains."""

    def read(folder: Path) -> Any:
        def start() -> int:
            words = [str(folder / file), *options]
            found = make_plan(words, prog="primal train").options.recipe
            task, data = find_task(found.task).load(found.data)
            check_experiment(task, data, found)
            return 0

        printed(start)

    return read


def clean(folder: Path) -> Path:
    path = folder / "clean"
    path.mkdir()
    return path


# settings


@case("recipe")
def _recipe(folder: Path) -> Case:
    path = clean(folder)
    rows = [{"text": text, "label": i % 2} for i, text in enumerate(WORDS)]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (path / "recipe.yaml").write_text(
        "# A small recipe.\ntask: longrange\n"
        f"data:\n  train: {folder / 'train.jsonl'}\n  kind: text\n  length: 32\n  valid: 0.3\n"
        "model:\n  dim: 16\n  num_heads: 2\n  num_layers: 1\n  attention: primal-dual\n"
        "  attention_options: {rank: 4}\n  dropout: 0.1\n"
        "training:\n  epochs: 2\n  batch_size: 8\n  lr: 1e-2\n  seed: 3\n  clip: 1.0\n"
        "compare: [softmax]\nthreads: 1\n"
    )
    # a damaged recipe may name another file, and a model is named by its attention
    names = ("recipe", str(folder)[:5], "the model ")
    return Case("recipe", path, (plan("recipe.yaml"),), names=names)


# texts and tokens


@case("lines of text")
def _lines(folder: Path) -> Case:
    path = clean(folder)
    (path / "new.txt").write_text("\n".join(WORDS) + "\n", "utf-8")
    model = text_model(folder)

    def check(rows: Any, here: Path) -> str | None:
        text = (here / "new.txt").read_bytes().decode("utf-8-sig")
        lines = text.removesuffix("\n").count("\n") + 1
        if len(rows) != lines:
            return f"{lines} lines, {len(rows)} predictions"
        return check_rows(rows, here)

    return Case("lines of text", path, (predict(model, "new.txt"),), check=check)


@case("JSON lines")
def _json_lines(folder: Path) -> Case:
    path = clean(folder)
    rows = [{"text": t, "label": ["bad", "good"][i % 2]} for i, t in enumerate(WORDS)]
    (path / "new.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    model = text_model(folder)
    reads = (predict(model, "new.jsonl"), score(model, "new.jsonl"), plan("new.jsonl"))
    return Case("JSON lines", path, reads, check=check_rows)


def _text_table(ending: str) -> Builder:
    def build(folder: Path) -> Case:
        import pandas as pd

        path, model = clean(folder), text_model(folder)
        labels = [["bad", "good"][i % 2] for i in range(len(WORDS))]
        frame = pd.DataFrame({"text": WORDS, "label": labels})
        file = f"new{ending}"
        if ending == ".parquet":
            frame.to_parquet(path / file)
        else:
            frame.to_csv(path / file, sep="\t" if ending == ".tsv" else ",", index=False)
        reads = (predict(model, file), score(model, file), plan(file))
        return Case(f"texts in {ending}", path, reads, check=check_rows)

    return build


for _ending in (".tsv", ".parquet"):
    CASES[f"texts in {_ending}"] = _text_table(_ending)


@case("tokens in .npz")
def _tokens(folder: Path) -> Case:
    path = clean(folder)
    task = TokenTask("listops", tuple("0123456789"), 64)
    options = EncoderOptions(dim=16, num_heads=2, num_layers=1, attention="primal-dual")
    save_trained(folder / "model", task, task.build(options))
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 9, 10)
    np.savez_compressed(
        path / "new.npz",
        tokens=rng.integers(1, 15, lengths.sum()).astype(np.uint8),
        offsets=np.cumsum([0, *lengths]),
        labels=rng.integers(0, 10, 10),
    )
    # saved sequences do not say their kind, so a recipe names them
    (path / "tokens.yaml").write_text(
        "task: longrange\ndata: {kind: listops, train: new.npz}\n"
        "model: {dim: 16, num_heads: 2, num_layers: 1}\ntraining: {epochs: 1}\n"
    )
    model = folder / "model"
    reads = (predict(model, "new.npz"), score(model, "new.npz"), plan("tokens.yaml"))
    return Case("tokens in .npz", path, reads, ("new.npz",), check=check_rows)


@case("pictures")
def _pictures(folder: Path) -> Case:
    from PIL import Image

    path = clean(folder)
    rng = np.random.default_rng(0)
    for i in range(4):
        (path / "ab"[i % 2]).mkdir(exist_ok=True)
        pixels = rng.integers(0, 255, (9, 9, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(path / "ab"[i % 2] / f"{i}.png")
    task = TokenTask("image", ("a", "b"))
    options = EncoderOptions(dim=16, num_heads=2, num_layers=1, attention="primal-dual")
    save_trained(folder / "model", task, task.build(options))
    reads = (predict(folder / "model", "."), score(folder / "model", "."))
    return Case("pictures", path, reads, check=check_rows)


# series


@case("series in .ts")
def _ts(folder: Path) -> Case:
    path, rng = clean(folder), np.random.default_rng(0)
    lines = ["@problemName Slopes", "@dimensions 2", "@equalLength false"]
    lines += ["@classLabel true down up", "@data"]
    for i in range(12):
        rows = rng.normal(size=(2, 5 + i % 3))
        fields = [",".join(f"{v:.4f}" for v in row) for row in rows]
        lines.append(":".join([*fields, ["down", "up"][i % 2]]))
    (path / "new.ts").write_text("\n".join(lines) + "\n")
    model = series_model(folder)
    reads = (predict(model, "new.ts"), score(model, "new.ts"), plan("new.ts"))
    return Case("series in .ts", path, reads, check=check_rows)


@case("series in .npz")
def _npz(folder: Path) -> Case:
    path, rng = clean(folder), np.random.default_rng(0)
    np.savez_compressed(
        path / "new.npz",
        X_train=rng.normal(size=(12, 6, 2)).astype(np.float32),
        y_train=np.arange(12) % 2,
        len_train=4 + np.arange(12) % 3,
        X_test=rng.normal(size=(8, 6, 2)).astype(np.float32),
        y_test=np.arange(8) % 2,
        len_test=4 + np.arange(8) % 3,
        classes=np.array(["down", "up"]),
    )
    model = series_model(folder)
    reads = (predict(model, "new.npz"), score(model, "new.npz"), plan("new.npz"))
    return Case("series in .npz", path, reads, check=check_rows)


@case("series in .csv")
def _series_table(folder: Path) -> Case:
    path, rng = clean(folder), np.random.default_rng(0)
    rows = ["case,a,b,label"]
    for i in range(10):
        for x, y in rng.normal(size=(4 + i % 3, 2)):
            rows.append(f"s{i},{x:.3f},{y:.3f},{['down', 'up'][i % 2]}")
    (path / "new.csv").write_text("\n".join(rows) + "\n")
    model = series_model(folder)
    train = plan("new.csv", "--task", "series")
    reads = (predict(model, "new.csv"), score(model, "new.csv"), train)
    return Case("series in .csv", path, reads, check=check_rows)


def _series_values(ending: str) -> Builder:
    def build(folder: Path) -> Case:
        path, rng, file = clean(folder), np.random.default_rng(0), f"new{ending}"
        x, y = rng.normal(size=(12, 2, 5)).round(3), rng.normal(size=12).round(3)
        if ending == ".npz":
            np.savez_compressed(path / file, X=x, y=y)
        elif ending == ".csv":
            rows = [f"s{i},{a},{b},{y[i]}" for i, case in enumerate(x) for a, b in case.T]
            (path / file).write_text("\n".join(["case,a,b,label", *rows]) + "\n")
        else:
            fields = [":".join(",".join(map(str, channel)) for channel in case) for case in x]
            rows = [f"{case}:{number}" for case, number in zip(fields, y, strict=True)]
            head = ["@problemName Levels", "@dimensions 2", "@targetLabel true", "@data"]
            (path / file).write_text("\n".join([*head, *rows]) + "\n")
        model = value_model(folder)
        train = plan(file, "--task", "series-values")
        reads = (predict(model, file), score(model, file), train)
        return Case(f"numbers of series in {ending}", path, reads, check=check_rows)

    return build


for _ending in (".ts", ".npz", ".csv"):
    CASES[f"numbers of series in {_ending}"] = _series_values(_ending)


# tables


def _table(ending: str) -> Builder:
    def build(folder: Path) -> Case:
        path, model, file = clean(folder), table_model(folder), f"new{ending}"
        if ending == ".csv":
            table().to_csv(path / file, index=False)
        else:
            table().to_parquet(path / file)
        train = plan(file, "--task", "tables", "--target", "price")
        reads = (predict(model, file), score(model, file), train)
        return Case(f"table in {ending}", path, reads, check=check_rows)

    return build


for _ending in (".csv", ".parquet"):
    CASES[f"table in {_ending}"] = _table(_ending)


# events


@case("log of events")
def _events(folder: Path) -> Case:
    from primal_attention.tasks.events import EventOptions, EventSettings, NextEventTask

    path = clean(folder)
    event_log().to_csv(path / "new.csv", index=False)
    task, _ = NextEventTask.load(EventSettings(train=path / "new.csv", sequence="user"))
    options = EventOptions(dim=16, num_heads=2, num_layers=1, components=4)
    save_trained(folder / "model", task, task.build(options))
    model = folder / "model"
    train = plan("new.csv", "--task", "events", "--data.sequence", "user")
    reads = (predict(model, "new.csv"), score(model, "new.csv"), train)
    return Case("log of events", path, reads, check=check_rows)


@case("events in .npz")
def _stackoverflow(folder: Path) -> Case:
    from primal_attention.tasks.events import load_stackoverflow
    from primal_attention.tasks.events.task import STACKOVERFLOW

    path, rng = clean(folder), np.random.default_rng(0)
    file = path / STACKOVERFLOW
    file.parent.mkdir(parents=True)
    np.savez_compressed(
        file,
        time_ms=np.sort(rng.integers(0, 10**9, 40)).astype(float),
        event=rng.integers(0, 3, 40),
        offsets=np.arange(0, 41, 8),
        badge_names=np.array(["a", "b", "c"]),
        in_test=np.eye(5, dtype=bool),
    )

    def read(here: Path) -> Any:
        return len(load_stackoverflow(root=here)[0])

    return Case("events in .npz", path, (read,))


@case("irregular series")
def _irregular(folder: Path) -> Case:
    from primal_attention.tasks.events import (
        InterpolationOptions,
        IrregularSettings,
        IrregularTask,
    )

    path, rng = clean(folder), np.random.default_rng(0)
    rows = ["sequence,time,a,b"]
    for i in range(8):
        for t in np.cumsum(rng.exponential(size=9)):
            b = f"{rng.normal():.3f}" if rng.random() < 0.7 else ""
            rows.append(f"s{i},{t:.3f},{np.sin(t):.3f},{b}")
        rows.append(f"s{i},{t + 1:.3f},,")
    (path / "new.csv").write_text("\n".join(rows) + "\n")
    settings = IrregularSettings(train=path / "new.csv", values=("a", "b"))
    task, _ = IrregularTask.load(settings)
    save_trained(folder / "model", task, task.build(InterpolationOptions(dim=16, num_heads=2)))
    model = folder / "model"
    reads = (predict(model, "new.csv"), score(model, "new.csv"))
    return Case("irregular series", path, reads)


# vectors


@case("vectors in .npy")
def _npy(folder: Path) -> Case:
    path = clean(folder)
    np.save(path / "gallery.npy", vectors())
    np.save(path / "queries.npy", vectors()[:5])
    np.save(path / "ids.npy", np.argsort(-vectors()[:5] @ vectors().T)[:, :8])
    np.savez(path / "groups.npz", query_groups=np.arange(5) % 3, gallery_groups=np.arange(24) % 3)
    (path / "gnd.json").write_text(
        json.dumps({"gnd": [{"easy": [i], "hard": [i + 1], "junk": [i + 2]} for i in range(5)]})
    )

    def read(here: Path) -> Any:
        names = [f"--{n}={here / n}.npy" for n in ("gallery", "queries", "ids")]
        also = ["--groups", here / "groups.npz", "--gnd", here / "gnd.json"]
        command("rerank", *names, *also, "--method", "expansion", "--out", here.parent / "o.npz")
        with np.load(here.parent / "o.npz") as found:
            return {key: found[key] for key in found.files}

    def check(result: Any, here: Path) -> str | None:
        return None if np.isfinite(result["scores"]).any() else "no finite score"

    names = ("gallery", "queries", "ids", "groups", "gnd")
    return Case("vectors in .npy", path, (read,), check=check, names=names)


@case("vectors in .npz")
def _rerank(folder: Path) -> Case:
    path = clean(folder)
    np.savez_compressed(path / "all.npz", gallery=vectors(), gallery_groups=np.arange(24) % 3)
    np.savez_compressed(path / "x.npz", x=vectors(), groups=np.arange(24) % 12)

    def read(here: Path) -> Any:
        command("rerank", here / "all.npz", "--method", "diffusion", "--out", here.parent / "o.npz")
        with np.load(here.parent / "o.npz") as found:
            return {key: found[key] for key in found.files}

    train = plan("x.npz", "--task", "lists", "--data.candidates", "8")

    def both(here: Path) -> Any:
        train(here)
        return read(here)

    return Case("vectors in .npz", path, (both,), names=("gallery", "queries", "groups"))


# images and texts


def _write_pictures(path: Path, count: int) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    for i in range(count):
        pixels = rng.integers(0, 255, (9, 9, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(path / f"p{i}.png")


@case("image-text pairs")
def _pairs(folder: Path) -> Case:
    path = clean(folder)
    _write_pictures(path, 8)
    rows = [f"p{i}.png,a {['red', 'blue'][i % 2]} square" for i in range(8)]
    (path / "pairs.csv").write_text("\n".join(["image,caption", *rows]) + "\n")
    save_trained(folder / "model", *pair_task())
    model = folder / "model"
    train = plan("pairs.csv", "--task", "pairs", "--data.size", "16")
    reads = (predict(model, "pairs.csv"), score(model, "pairs.csv"), train)
    files = ("pairs.csv", "p0.png", "p1.png")
    # a row that names an image which is not there
    return Case("image-text pairs", path, reads, files, names=("There is no file",))


@case("search in images")
def _search(folder: Path) -> Case:
    path = clean(folder)
    _write_pictures(path, 3)
    save_trained(folder / "model", *pair_task())

    def read(here: Path) -> Any:
        command("search", folder / "model", "a red square", "--images", here, "--out", "None")

    return Case("search in images", path, (read,))


# counts and graphs


@case("counts of words")
def _counts(folder: Path) -> Case:
    from primal_attention.analysis.counts import Cooccurrence

    path = clean(folder)
    Cooccurrence.from_corpus(WORDS, window=2).save(path / "counts.npz")

    def attend(here: Path) -> Any:
        out = here.parent / "attention.json"
        command("analyze", "counts", "attend", here / "counts.npz", "good film", "--out", out)
        return json.loads(out.read_text("utf-8"))

    def vectors(here: Path) -> Any:
        command("analyze", "counts", "vectors", here / "counts.npz", "good", "-k", "2")

    return Case("counts of words", path, (attend, vectors))


@case("corpus to count")
def _corpus(folder: Path) -> Case:
    path = clean(folder)
    (path / "a.txt").write_text("\n".join(WORDS) + "\n")
    rows = [json.dumps({"text": text}) for text in WORDS]
    (path / "b.jsonl").write_text("\n".join(rows) + "\n")

    def read(here: Path) -> Any:
        files = here / "a.txt", here / "b.jsonl"
        command("analyze", "counts", "count", *files, "--out", here.parent / "counts.npz")

    return Case("corpus to count", path, (read,))


@case("causal graph")
def _graph(folder: Path) -> Case:
    from primal_attention.analysis.causes import PAG

    path = clean(folder)
    graph = PAG([[0, 2, 0], [3, 0, 1], [0, 2, 0]], ("a", "b", "c"))
    (path / "graph.json").write_text(graph.to_json())

    def read(here: Path) -> Any:
        found = PAG.from_json((here / "graph.json").read_bytes().decode("utf-8", "replace"))
        return found.to_dot(), found.to_json()

    errors = (UserError, ValueError)
    return Case("causal graph", path, (read,), errors=errors, names=("graph", "JSON"))
