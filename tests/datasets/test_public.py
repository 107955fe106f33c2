"""Public sets: the table, and downloads from a server on this machine."""

import gzip
import io
import json
import lzma
import os
import tarfile
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from primal_attention.cli.main import main
from primal_attention.datasets import public as datasets
from primal_attention.datasets.public import PublicSet, checksum, fetch, public_sets
from primal_attention.support.command import UserError
from primal_attention.tasks.longrange.readers import read_imdb, reviews_from_archive
from primal_attention.tasks.series import load_series
from primal_attention.tasks.series.files import npz_from_archive

TOY = "@classLabel true a b\n@data\n1,2,3:4,5,6:a\n7,8:9,1:b\n"


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder; ``/broken/…`` ends before its announced length."""

    def do_GET(self):
        if not self.path.startswith("/broken/"):
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", "100")
        self.end_headers()
        self.wfile.write(b"half")
        return None

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path):
    """A folder that is served, and its address."""
    folder = tmp_path / "served"
    folder.mkdir()
    served = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=partial(served.serve_forever, 0.01))
    thread.start()
    yield folder, f"http://127.0.0.1:{served.server_port}"
    served.shutdown()
    thread.join()
    served.server_close()


@pytest.fixture
def table(monkeypatch):
    """Replace the table of sets."""
    sets: dict[str, PublicSet] = {}
    monkeypatch.setattr(datasets, "public_sets", lambda: sets)
    monkeypatch.setattr("primal_attention.cli.data.public_sets", lambda: sets)
    return sets


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def digest(tmp_path: Path, name: str, content: bytes) -> str:
    path = tmp_path / name
    path.write_bytes(content)
    return checksum(path)


def test_the_table_says_everything_of_every_set():
    for name, found in public_sets().items():
        assert found.page.startswith("http"), name
        assert found.terms
        assert found.files
        assert all(len(value) == 64 for value in found.files.values()), name
        assert set(found.urls) in (set(), set(found.files)), name
        assert (found.archive is None) == (found.convert is None), name
        assert found.is_downloadable or found.note or found.folder.startswith("retrieval"), name


@pytest.mark.skipif("PRIMAL_DATA" not in os.environ, reason="needs PRIMAL_DATA")
@pytest.mark.parametrize("name", public_sets())
def test_files_that_are_here_have_their_checksums(name):
    found = public_sets()[name]
    root = Path(os.environ["PRIMAL_DATA"])
    if found.missing(root):
        pytest.skip(f"{name} is not here")
    for file, expected in found.files.items():
        assert checksum(root / found.folder / file) == expected


def test_a_checksum_is_of_the_content(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(3), y=np.zeros(2))
    np.savez_compressed(tmp_path / "b.npz", y=np.zeros(2), x=np.arange(3))
    np.savez(tmp_path / "c.npz", x=np.arange(3), y=np.ones(2))
    a, b, c = (checksum(tmp_path / f"{name}.npz") for name in "abc")
    assert a == b != c
    assert digest(tmp_path, "t.gz", gzip.compress(b"x")) == digest(
        tmp_path, "t.xz", lzma.compress(b"x")
    )


def test_a_set_is_downloaded_checked_and_found(tmp_path, server, table, monkeypatch, capsys):
    folder, url = server
    (folder / "raw.txt").write_text("1 2 3\n")
    text = digest(tmp_path, "t.txt.gz", gzip.compress(b"1 2 3\n"))
    table["Lines"] = PublicSet(
        "text/lines", "three", url, "CC0", {"t.txt.gz": text}, {"t.txt.gz": f"{url}/raw.txt"}
    )
    root = tmp_path / "data"
    monkeypatch.setenv("PRIMAL_DATA", str(root))
    assert main(["data", "fetch", "Lines"]) == 0
    assert gzip.decompress((root / "text/lines/t.txt.gz").read_bytes()) == b"1 2 3\n"
    assert files(root) == ["text", "text/lines", "text/lines/t.txt.gz"]
    capsys.readouterr()
    assert main(["data", "where", "Lines"]) == 0
    printed = capsys.readouterr().out
    for words in (url, "CC0", f"{root}/text/lines/t.txt.gz  (correct)", text):
        assert words in printed
    assert main(["data", "list"]) == 0
    assert "here" in capsys.readouterr().out
    (root / "text/lines/t.txt.gz").write_bytes(gzip.compress(b"other"))
    assert main(["data", "where", "Lines"]) == 0
    assert "DIFFERS" in capsys.readouterr().out


def test_an_archive_of_series_becomes_a_set(tmp_path, server, table):
    folder, url = server
    with zipfile.ZipFile(folder / "Toy.zip", "w") as archive:
        archive.writestr("Toy/Toy_TRAIN.ts", TOY)
        archive.writestr("Toy/Toy_TEST.ts", TOY.replace("7,8:9,1:b", "7,8,9,9:9,1,1,1:b"))
        archive.writestr("../evil.ts", "never written")
    convert = "primal_attention.tasks.series.files:npz_from_archive"
    right = digest(tmp_path, "t.npz", npz_from_archive(folder / "Toy.zip", "Toy.npz"))
    table["Toy"] = PublicSet(
        "uea/Toy", "toy", url, "CC0", {"Toy.npz": right}, {}, f"{url}/Toy.zip", convert
    )
    fetch("Toy", tmp_path / "data", report=lambda _: None)
    series = load_series("Toy", "test", root=tmp_path / "data" / "uea")
    assert series.length.tolist() == [3, 4]
    assert series.classes == ("a", "b")


def test_reviews_come_from_the_archive_of_the_publisher(tmp_path):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        for name in ("train/pos/1_9", "train/pos/0_7", "train/neg/2_3", "train/unsup/0_0",
                     "test/neg/0_1"):  # fmt: skip
            member = tarfile.TarInfo(f"aclImdb/{name}.txt")
            data = f"é\u2028 {name}".encode()
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    content = reviews_from_archive(tmp_path / "a.tar.gz", "train.jsonl.xz")
    rows = [json.loads(line) for line in lzma.decompress(content).decode().split("\n")[:-1]]
    assert [(r["label"], r["id"], r["rating"]) for r in rows] == [(0, 2, 3), (1, 0, 7), (1, 1, 9)]
    (tmp_path / "train.jsonl.xz").write_bytes(content)
    assert read_imdb(tmp_path / "train.jsonl.xz").labels.tolist() == [0, 1, 1]


@pytest.mark.slow
@pytest.mark.skipif("PRIMAL_DATA" not in os.environ, reason="needs PRIMAL_DATA")
def test_the_reviews_of_the_table_are_those_of_the_archive(tmp_path):
    root = Path(os.environ["PRIMAL_DATA"])
    text = lzma.decompress((root / "text/imdb/test.jsonl.xz").read_bytes()).decode()
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz", compresslevel=1) as archive:
        for line in text.split("\n")[:-1]:
            row = json.loads(line)
            place = f"test/{('neg', 'pos')[row['label']]}/{row['id']}_{row['rating']}.txt"
            member, data = tarfile.TarInfo(f"aclImdb/{place}"), row["text"].encode()
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    (tmp_path / "t.xz").write_bytes(reviews_from_archive(tmp_path / "a.tar.gz", "test.jsonl.xz"))
    assert checksum(tmp_path / "t.xz") == public_sets()["imdb"].files["test.jsonl.xz"]


@pytest.mark.parametrize("name", ["JapaneseVowels", "BasicMotions"])
def test_series_of_the_table_are_those_of_the_archive(tmp_path, name):
    aeon = pytest.importorskip("aeon")
    source = Path(aeon.__file__).parent / "datasets" / "data" / name
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for part in ("TRAIN", "TEST"):
            archive.write(source / f"{name}_{part}.ts", f"{name}_{part}.ts")
    content = npz_from_archive(tmp_path / "a.zip", f"{name}.npz")
    assert digest(tmp_path, "t.npz", content) == public_sets()[name].files[f"{name}.npz"]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("raw.txt", "is not what it should be: its sha256 differs. Nothing was kept"),
        ("broken/raw.txt", "the connection broke after 4 of 100 bytes"),
        ("none.txt", "could not be downloaded: the server answers 404"),
    ],
)
def test_a_failed_download_leaves_nothing_and_says_what_to_do(
    tmp_path, server, table, address, message
):
    folder, url = server
    (folder / "raw.txt").write_text("wrong")
    urls = {"a.txt": f"{url}/raw.txt", "b.txt": f"{url}/{address}"}
    right = digest(tmp_path, "x.txt", b"wrong")
    table["Set"] = PublicSet("s", "x", url, "CC0", {"a.txt": right, "b.txt": "0" * 64}, urls)
    root = tmp_path / "data"
    (root / "s").mkdir(parents=True)
    (root / "s" / "a.txt").write_text("older")
    with pytest.raises(UserError, match=message) as caught:
        fetch("Set", root, report=lambda _: None)
    assert f"Put a.txt, b.txt into {root / 's'}" in str(caught.value)
    assert files(root) == ["s", "s/a.txt"]
    assert (root / "s" / "a.txt").read_text() == "older"


def test_without_a_network_the_files_and_their_places_are_named(tmp_path, table):
    table["Set"] = PublicSet(
        "s", "x", "http://page", "CC0", {"a": "0" * 64}, {"a": "http://127.0.0.1:9/a"}
    )
    table["Hand"] = PublicSet("h", "x", "http://page", "CC0", {"b": "0" * 64}, note="Converted.")
    table["File"] = PublicSet(
        "f", "x", "http://page", "CC0", {"c": "0" * 64}, {"c": "file:///etc/x"}
    )
    for name, message in (
        ("Set", r"refused.*\. Put a into .*/s\. Source: http://page"),
        ("Hand", r"cannot be downloaded from its publisher in this form\. Put b into .*Converted"),
        ("File", "an address starts with http"),
        ("Sett", "there is no public set 'Sett'. Did you mean 'Set'"),
    ):
        with pytest.raises(UserError, match=message):
            fetch(name, tmp_path, report=lambda _: None)
    assert files(tmp_path) == []


def test_a_mirror_serves_sets_that_no_publisher_has(tmp_path, server, table, capsys):
    folder, url = server
    (folder / "h").mkdir()
    (folder / "h" / "b.txt").write_text("words")
    right = digest(tmp_path, "b.txt", b"words")
    table["Hand"] = PublicSet("h", "x", "http://page", "CC0", {"b.txt": right})
    assert main(["data", "fetch", "Hand", "--root", str(tmp_path / "d"), "--mirror", url]) == 0
    assert (tmp_path / "d" / "h" / "b.txt").read_text() == "words"


def test_commands_without_a_name_or_folder_are_told(monkeypatch, capsys):
    monkeypatch.delenv("PRIMAL_DATA", raising=False)
    for words, message in (
        (["data", "fetch"], "which set?"),
        (["data", "fetch", "imdb"], "set the environment variable PRIMAL_DATA"),
        (["data", "where", "imbd"], "Did you mean 'imdb'?"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err
    assert main(["data", "list"]) == 0
    assert "PRIMAL_DATA: not set" in capsys.readouterr().out
    assert main(["data", "where", "imdb"]) == 0
    assert "$PRIMAL_DATA/text/imdb/train.jsonl.xz  (absent)" in capsys.readouterr().out
