"""What is seen of a file before it is read."""

import json
import lzma

import numpy as np
import pytest

from primal_attention.support.command import UserError
from primal_attention.tasks.series import read_series
from primal_attention.tasks.sources import look_at
from primal_attention.tasks.task import open_folder


def test_columns_of_tables_are_numbers_texts_and_quantities(tmp_path):
    rows = [f"{i / 3},{i % 2},w{i % 2},{i},a text of words\u2028{i}" for i in range(30)]
    (tmp_path / "t.csv").write_text("\n".join(["x,flag,name,count,text", *rows]) + "\n")
    source = look_at(tmp_path / "t.csv")
    kinds = {name: column.kind for name, column in source.columns.items()}
    assert kinds == {
        "x": "number", "flag": "number", "name": "text", "count": "number", "text": "text"
    }  # fmt: skip
    assert [n for n, c in source.columns.items() if c.is_quantity] == ["x"]
    assert source.columns["text"].words > 3
    assert source.rows == 30


def test_parquet_and_lines_of_json_look_like_other_tables(tmp_path):
    pandas = pytest.importorskip("pandas")
    rows = [{"text": f"word\u2028 {i}", "label": i % 2} for i in range(5)]
    pandas.DataFrame(rows).to_parquet(tmp_path / "t.parquet")
    with lzma.open(tmp_path / "t.jsonl.xz", "wt") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    found = [look_at(tmp_path / name) for name in ("t.parquet", "t.jsonl.xz")]
    assert found[0].columns == found[1].columns
    assert [source.rows for source in found] == [5, 5]
    assert found[1].suffix == ".jsonl"


def test_arrays_show_their_shapes_without_being_read(tmp_path):
    np.savez(tmp_path / "a.npz", X=np.zeros((4, 3, 10)), odd=np.array([{}], dtype=object))
    assert look_at(tmp_path / "a.npz").arrays == {"X": (4, 3, 10), "odd": (1,)}


def test_folders_show_their_files_and_folders(tmp_path):
    for name in ("b/1.TXT", "a/2.txt", "a/3.png", ".git/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    source = look_at(tmp_path)
    assert source.is_folder
    assert source.folders == ("a", "b")
    assert (source.endings[".txt"], source.endings[".png"]) == (2, 1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.npz", b"not an archive", r"t\.npz is not an \.npz archive: save arrays"),
        ("t.jsonl", b"[1]\n", "line 1 must hold an object {…}, got a list"),
        ("t.jsonl", b"{", "Expecting property name"),
        ("t.csv", b"", "not a readable table: it is empty"),
        ("t.csv", b"a,b\n", "has no rows"),
        ("t.parquet", b"nothing", "no Parquet file, or a damaged one"),
    ],
)
def test_broken_files_are_told(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        look_at(tmp_path / name)


def test_files_beyond_the_limit_are_not_read(tmp_path):
    for name in ("a.npz", "a.ts", "a.csv", "a.jsonl", "a.txt"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(9_000_000_000)  # without blocks on the disk
        with pytest.raises(UserError, match=f"{name} has more than 8,000,000,000 bytes"):
            look_at(tmp_path / name)
    for name in ("a.ts", "a.csv"):
        with pytest.raises(UserError, match=f"{name} has more than 8,000,000,000 bytes"):
            read_series(tmp_path / name)


def test_a_wrong_name_offers_the_nearest(tmp_path):
    (tmp_path / "my_train.ts").write_text("")
    with pytest.raises(UserError, match=r"Did you mean 'my_train\.ts'"):
        look_at(tmp_path / "my_trian.ts")
    with pytest.raises(UserError, match="there is no folder"):
        look_at(tmp_path / "none" / "a.ts")


def test_links_that_lead_nowhere_and_files_for_folders_are_told(tmp_path):
    loop, nowhere = tmp_path / "loop.csv", tmp_path / "nowhere.csv"
    loop.symlink_to(loop)
    nowhere.symlink_to(tmp_path / "none")
    for link in (loop, nowhere):
        with pytest.raises(UserError, match=r"csv is a link that leads to no file\.$"):
            look_at(link)
    (tmp_path / "a.csv").write_text("")
    with pytest.raises(UserError, match=r"a\.csv is a file; give the folder of a trained model"):
        open_folder(tmp_path / "a.csv")
