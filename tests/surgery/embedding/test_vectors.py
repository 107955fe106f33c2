"""A file of vectors: rows of the texts, the same after a kill, and sentences for what is wrong."""

import csv
import json
import os
import signal
import subprocess
import sys
import tracemalloc

import numpy as np
import pandas as pd
import pyarrow as arrow
import pyarrow.parquet as pq
import pytest
from tests.surgery.embedding.models import make_texts

import primal_attention as pa
from primal_attention.support.command import UserError
from primal_attention.surgery.embedding import embed_file

TEXTS = make_texts(60, 40)
ROWS = [
    {"id": i, "text": text, "share": i / 8, "tag": None if i % 3 else f"0{i}", "any": i or "zero"}
    for i, text in enumerate(TEXTS)
]


def write(path):
    """Write the rows in the format of the file's ending."""
    if path.suffix == ".txt":
        path.write_text("".join(f"{text}\n" for text in TEXTS))
    elif path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    elif path.suffix == ".parquet":
        rows = [{k: v for k, v in row.items() if k != "any"} for row in ROWS]
        pq.write_table(arrow.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(
                file, list(ROWS[0]), delimiter="\t" if "tsv" in path.name else ","
            )
            writer.writeheader()
            writer.writerows(ROWS)
    return path


def embedder_of(bert):
    # 16 batches of 20 tokens: several windows
    return pa.Embedder(bert, batch_tokens=20)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.tsv", "a.parquet"])
def test_every_format_gives_the_vectors_of_its_texts(bert, tmp_path, name):
    out = tmp_path / "vectors.parquet"
    lines = []
    done = embed_file(embedder_of(bert), write(tmp_path / name), out, report=lines.append)
    frame = pd.read_parquet(out)
    np.testing.assert_allclose(
        np.stack(frame["vector"]), pa.Embedder(bert).encode(TEXTS), atol=1e-5
    )
    assert frame["vector"][0].dtype == np.float32
    assert frame["row"].tolist() == list(range(60))
    assert frame["tokens"].tolist() == [len(text.split()) + 2 for text in TEXTS]
    assert done[:2] == (60, frame["tokens"].sum())
    assert pq.ParquetFile(out).num_row_groups > 1
    assert lines[0].startswith("60 texts of 3 to 42 tokens, ")
    assert "a batch takes at most 1 MB beside the model" in lines[0]
    assert all("tokens per second" in line for line in lines[1:])
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, "vectors.parquet"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_kept_columns_keep_their_types(bert, tmp_path, name):
    out = tmp_path / "vectors.parquet"
    embed_file(embedder_of(bert), write(tmp_path / name), out, keep=("id", "share", "tag"))
    table = pq.read_table(out)
    assert table.schema.names == ["row", "id", "share", "tag", "tokens", "vector"]
    assert [str(table.schema.field(n).type) for n in table.schema.names[1:4]] == [
        "int64",
        "double",
        "string",
    ]
    for column in ("id", "share", "tag"):
        assert table.column(column).to_pylist() == [row[column] for row in ROWS]


def test_columns_of_csv_are_words_and_mixed_values_become_words(bert, tmp_path):
    out = tmp_path / "vectors.parquet"
    embed_file(embedder_of(bert), write(tmp_path / "a.csv"), out, keep=("id", "tag"))
    assert pq.read_table(out).column("tag").to_pylist()[:4] == ["00", "", "", "03"]
    embed_file(embedder_of(bert), write(tmp_path / "a.jsonl"), out, keep=("any",))
    assert pq.read_table(out).column("any").to_pylist()[:3] == ["zero", "1", "2"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.csv"])
def test_memory_does_not_grow_with_the_file(bert, tmp_path, name):
    peaks = []
    for count in (800, 3200):
        # one word of 4,000 letters is one unknown token
        rows = [{"id": i, "text": f"a {'x' * 4000} b"} for i in range(count)]
        table, path = arrow.Table.from_pylist(rows), tmp_path / name
        if name == "a.jsonl":
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        elif name == "a.csv":
            path.write_text("id,text\n" + "".join(f"{r['id']},{r['text']}\n" for r in rows))
        else:
            pq.write_table(table, path, row_group_size=400)
        del rows, table
        embedder = pa.Embedder(bert, batch_tokens=100)
        tracemalloc.start()
        embed_file(embedder, path, tmp_path / "b.parquet", keep=("id",), report=lambda line: None)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # the longer file has 9.6 MB more of texts
    assert peaks[1] < peaks[0] + 1e6


KILLED = """
import os, signal, sys
import torch
torch.set_num_threads(1)
import primal_attention as pa
from primal_attention.surgery.embedding import embed_file
model, file, out, left = *sys.argv[1:4], int(sys.argv[4])
def report(line):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
embed_file(pa.Embedder(model, batch_tokens=20), file, out, keep=("id",), report=report)
"""


@pytest.mark.parametrize("after", [2, 4, "all"])
def test_a_killed_run_goes_on_to_the_same_bytes(bert, tmp_path, after):
    file, out, whole = (tmp_path / name for name in ("a.jsonl", "b.parquet", "whole.parquet"))
    write(file)
    lines = []
    embed_file(embedder_of(bert), file, whole, keep=("id",), report=lines.append)
    number = len(lines) if after == "all" else after
    command = [sys.executable, "-c", KILLED, *map(str, (bert, file, out, number))]
    assert subprocess.run(command, check=False, cwd=tmp_path).returncode == -signal.SIGKILL
    parts = tmp_path / "b.parquet.parts"
    saved = sorted(path.name for path in parts.glob("*.parquet"))
    # the first line comes before the first part
    assert len(saved) == number - 1
    assert not out.exists()
    times = [os.stat(parts / name).st_mtime_ns for name in saved]
    again = []
    embedder = embedder_of(bert)
    run, calls = embedder.encode_tokens, []
    embedder.encode_tokens = lambda window: calls.append(len(window)) or run(window)
    embed_file(embedder, file, out, keep=("id",), report=again.append)
    assert len(times) + len(calls) == len(lines) - 1
    assert f"{len(saved)} of {len(lines) - 1} parts are there" in again
    assert out.read_bytes() == whole.read_bytes()
    assert not parts.exists()


@pytest.mark.parametrize("change", ["file", "model", "budget", "keep", "attention"])
def test_parts_of_another_run_are_not_mixed_in(bert, tmp_path, change):
    file, out = write(tmp_path / "a.jsonl"), tmp_path / "b.parquet"
    command = [sys.executable, "-c", KILLED, *map(str, (bert, file, out, 3))]
    assert subprocess.run(command, check=False, cwd=tmp_path).returncode == -signal.SIGKILL
    embedder, keep = embedder_of(bert), ("id",)
    if change == "file":
        file.write_text(file.read_text() + '{"id": 1, "text": "a"}\n')
    elif change == "model":
        next(embedder.model.parameters()).data[7] += 1
    elif change == "budget":
        embedder = pa.Embedder(bert, batch_tokens=21)
    elif change == "attention":
        embedder = pa.Embedder(bert, batch_tokens=20, attention="adaptive")
    else:
        keep = ()
    with pytest.raises(UserError, match=r"b\.parquet\.parts holds parts .* remove the folder"):
        embed_file(embedder, file, out, keep=keep)
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "a.txt",
            "a\n" + "a " * 60 + "\n",
            r"a\.txt: text 2 has 62 tokens, .* \(--chunk average\)",
        ),
        ("a.txt", "", r"a\.txt has no texts, and at least one is needed"),
        (
            "a.jsonl",
            '{"text": "a"}\n{"text": null}\n',
            r"a\.jsonl, row 2 has nothing in the column",
        ),
        ("a.jsonl", '{"words": "a"}\n', r"line 1 has no column 'text'; its columns are words\."),
        ("a.csv", "text,id\na\n", r"a\.csv, row 1 has 1 fields, and the header has 2"),
        ("a.csv", "body,id\na,b\n", r"no column 'text'; its columns are body, id\. .* --column"),
        ("a.doc", "a", r"has the ending '\.doc'; texts are read from \.txt"),
        ("a.parquet", "a", "is no Parquet file, or a damaged one"),
    ],
    ids=["long", "empty", "null", "jsonl", "ragged", "column", "kind", "damaged"],
)
def test_a_wrong_file_is_one_sentence(bert, tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=words):
        embed_file(embedder_of(bert), tmp_path / name, tmp_path / "out.parquet")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_columns_of_the_result_cannot_be_kept(bert, tmp_path):
    file = write(tmp_path / "a.jsonl")
    for keep in (("vector",), ("id", "id")):
        with pytest.raises(UserError, match=rf"--keep has '{keep[0]}', which is given twice or"):
            embed_file(embedder_of(bert), file, tmp_path / "out.parquet", keep=keep)


def test_work_that_needs_more_memory_than_is_free_does_not_start(bert, tmp_path, monkeypatch):
    psutil = pytest.importorskip("psutil")
    free = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(UserError, match=r"takes up to .* are free\. Give a smaller --batch-tokens"):
        embed_file(embedder_of(bert), write(tmp_path / "a.txt"), tmp_path / "out.parquet")
