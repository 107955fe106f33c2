"""Vectors, ids and ground truth that cannot be what was meant are refused in a sentence."""

import json
import zipfile

import numpy as np
import pytest
import torch

from primal_attention.cli.main import main
from primal_attention.datasets.lists import load_pictures, make_curves, search_all
from primal_attention.support.command import UserError
from primal_attention.tasks.lists import DiffusionReranker, evaluate_revisited
from primal_attention.tasks.lists.gallery import as_vectors, check_ids
from primal_attention.tasks.lists.parts import read_vectors


@pytest.fixture
def search(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = search_all(*make_curves(4, 6, seed=5), 10)
    np.savez("all.npz", queries=found.xq[:3], gallery=found.xb, ids=found.ids[:3])
    np.save("x.npy", found.xb)
    return found


@pytest.fixture
def fails(capsys):
    def run(*arguments):
        capsys.readouterr()
        assert main(["rerank", *arguments, "--method", "diffusion"]) == 2, arguments
        printed = capsys.readouterr().err
        assert printed.startswith("primal: ")
        assert printed.count("\n") == 1
        for foreign in ("pickle.load", "allow_pickle", "Traceback", "newaxis", "object is not"):
            assert foreign not in printed
        return printed

    return run


@pytest.mark.raw
def test_an_archive_that_is_damaged_is_one_sentence(search, fails):
    with open("all.npz", "rb") as file:
        good = file.read()
    flipped = bytearray(good)
    flipped[300] ^= 255
    for content, words in (
        (good[:300], "damaged"),
        (bytes(flipped), "damaged"),
        (b"", "it is empty"),
        (b"junk", "save arrays with numpy.savez"),
        (b"\x80\x04N.", "pickles are never read"),
        (good.replace(b"PK\x01\x02", b"PK\x01\x03"), "damaged"),
    ):
        with open("bad.npz", "wb") as file:
            file.write(content)
        assert words in fails("bad.npz")
    np.save("one.npy", search.xb)
    with open("one.npy", "rb") as file, open("bad.npz", "wb") as out:
        out.write(file.read())
    assert "single array" in fails("bad.npz")
    with zipfile.ZipFile("bad.npz", "w") as archive:
        archive.writestr("gallery", "x")
    assert "no array" in fails("bad.npz")
    header = str({"descr": "<f4", "fortran_order": False, "shape": (10**12, 8)}).ljust(117) + "\n"
    tera = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
    for content, words in ((tera, "promises"), (b"", "no header"), (b"junk", "no header")):
        with open("bad.npy", "wb") as file:
            file.write(content)
        assert words in fails("--gallery", "bad.npy")


@pytest.mark.raw
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, q, ids: {"gallery": x * (1 + 1j)}, "gallery must hold real numbers"),
        (lambda x, q, ids: {"queries": q * (1 + 1j)}, "queries must hold real numbers"),
        (lambda x, q, ids: {"gallery": x.astype(str)}, "gallery must hold real numbers"),
        (lambda x, q, ids: {"queries": q[:, :4]}, "width"),
        (lambda x, q, ids: {"queries": q[0]}, "queries must have the shape"),
        (lambda x, q, ids: {"queries": q[:0], "ids": ids[:0]}, "no queries"),
        (lambda x, q, ids: {"gallery": x[:0]}, "no items"),
        (lambda x, q, ids: {"ids": ids[:, :0]}, "no results"),
        (lambda x, q, ids: {"ids": ids[:, [0, 0, 1]]}, "twice"),
        (lambda x, q, ids: {"ids": ids + 100}, "24 items"),
        (lambda x, q, ids: {"ids": np.where(ids == ids[0, 0], 2**64 - 1, ids).astype("u8")}, "184"),
        (lambda x, q, ids: {"ids": ids - 50}, "at least 0"),
        (lambda x, q, ids: {"gallery_groups": np.full(24, np.nan)}, "gallery_groups must hold"),
        (lambda x, q, ids: {"gallery_groups": np.arange(24) + 0j}, "gallery_groups must hold"),
    ],
)
def test_arrays_that_make_no_sense_are_refused(search, fails, change, words):
    arrays = {"queries": search.xq[:3], "gallery": search.xb, "ids": search.ids[:3]}
    arrays |= change(search.xb, search.xq[:3], search.ids[:3])
    if "gallery_groups" in arrays:
        arrays["query_groups"] = arrays["gallery_groups"][:3]
    np.savez("bad.npz", **arrays)
    assert words in fails("bad.npz")


@pytest.mark.raw
@pytest.mark.parametrize(
    ("truth", "words"),
    [
        ("[" * 100_000, "nested"),
        ("{", "JSON"),
        ("null", "ground truth"),
        ("{}", "'gnd'"),
        ([1, 2, 3], "query 0"),
        ([{"easy": [1]}] * 3, "'hard'"),
        ([{"easy": [0.9], "hard": [], "junk": []}] * 3, "whole numbers"),
        ([{"easy": [True], "hard": [], "junk": []}] * 3, "whole numbers"),
        ([{"easy": ["a"], "hard": [], "junk": []}] * 3, "whole numbers"),
        ([{"easy": 3, "hard": [], "junk": []}] * 3, "whole numbers"),
        ([{"easy": [[1, 2], [3]], "hard": [], "junk": []}] * 3, "whole numbers"),
        ([{"easy": [10**30], "hard": [], "junk": []}] * 3, "31 digits"),
        ([{"easy": [-3], "hard": [], "junk": []}] * 3, "-3"),
        ([{"easy": [999], "hard": [], "junk": []}] * 3, "999"),
        ([{"easy": [1, 1], "hard": [], "junk": []}] * 3, "twice"),
        ([{"easy": [1], "hard": [1], "junk": []}] * 3, "twice"),
        ([{"easy": [1], "hard": [], "junk": []}] * 2, "2 queries"),
    ],
)
def test_ground_truth_that_cannot_be_is_refused(search, fails, truth, words):
    with open("gnd.json", "w", encoding="utf-8") as file:
        file.write(truth if isinstance(truth, str) else json.dumps(truth))
    assert words in fails("all.npz", "--gnd", "gnd.json")


def test_ground_truth_of_arrays_is_read_as_before():
    truth = [{"easy": np.array([3]), "hard": np.array([], float), "junk": [0]}]
    assert evaluate_revisited([[0, 3, 2, 1]], truth)["easy"].map == 100.0


@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e30, 1e200])
def test_vectors_of_any_magnitude_are_scaled_to_norm_one(search, scale):
    x = search.xb.astype(np.float64) * scale
    np.testing.assert_allclose(as_vectors(x, "x", normalize=True), search.xb, atol=1e-6)
    if 1e-37 < scale < 1e37:
        tensor = torch.from_numpy(x.astype(np.float32))
        np.testing.assert_allclose(as_vectors(tensor, "x", normalize=True), search.xb, atol=1e-6)


@pytest.mark.raw
def test_complex_tensors_and_uneven_lists_are_refused(search):
    with pytest.raises(ValueError, match=r"real numbers, got torch\.complex64"):
        as_vectors(torch.ones(2, 3, dtype=torch.complex64), "xq", normalize=True)
    with pytest.raises(ValueError, match="different lengths"):
        as_vectors([[1.0, 2.0], [3.0]], "xq", normalize=True)
    with pytest.raises(ValueError, match="18446744073709551615"):
        check_ids([np.array([2**64 - 1], dtype="u8")])
    with pytest.raises(ValueError, match="real numbers"):
        DiffusionReranker().rerank(search.xq, lambda ids: search.xb[ids] * 1j, search.ids)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, g: {"x": x * (1 + 1j)}, "'x' must hold finite numbers"),
        (lambda x, g: {"x": np.full(x.shape, "a")}, "'x' must hold finite numbers"),
        (lambda x, g: {"x": x[0]}, "2 axes"),
        (lambda x, g: {"x": np.where(x == x[0, 0], np.inf, x)}, "not finite"),
        (lambda x, g: {"x": x[:, :0]}, "width"),
        (lambda x, g: {"x": np.where(np.arange(len(x)) == 3, 0, x.T).T}, "row 3"),
        (lambda x, g: {"groups": np.full(len(g), np.nan)}, "'groups' must hold whole numbers"),
        (lambda x, g: {"groups": g + 0.9}, "'groups' must hold whole numbers"),
        (lambda x, g: {"groups": g[:-1]}, "one value for each"),
    ],
)
def test_vectors_to_train_on_are_checked(tmp_path, change, words):
    x, groups = make_curves(4, 6)
    np.savez(tmp_path / "v.npz", **{"x": x, "groups": groups, **change(x, groups)})
    with pytest.raises(UserError, match=r"v\.npz") as caught:
        read_vectors(tmp_path / "v.npz")
    assert words in str(caught.value)


def test_large_vectors_to_train_on_keep_their_direction(tmp_path):
    x, groups = make_curves(4, 6)
    np.savez(tmp_path / "v.npz", x=x.astype(np.float64) * 1e200, groups=groups.astype(str))
    np.testing.assert_allclose(read_vectors(tmp_path / "v.npz").x, x, atol=1e-6)


def test_a_damaged_set_of_pictures_is_one_sentence(tmp_path):
    pytest.importorskip("scipy")
    from primal_attention.datasets.public import find_set

    for name, contents in (
        ("coil20", (b"junk", b"", b"MATLAB 5.0 MAT-file".ljust(300, b"\xff"))),
        ("emoji", (b"junk", b"")),
    ):
        found = find_set(name)
        path = tmp_path / found.folder / next(iter(found.files))
        path.parent.mkdir(parents=True, exist_ok=True)
        for content in contents:
            path.write_bytes(content)
            with pytest.raises(UserError, match=path.name):
                load_pictures(name, tmp_path)
