"""``primal rerank``: files in, files out, a page, and clear refusals."""

import json

import numpy as np
import pytest

from primal_attention.cli.main import main
from primal_attention.datasets.lists import make_curves, search_all
from primal_attention.tasks.lists import DiffusionReranker


@pytest.fixture
def search(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, groups = make_curves(6, 10, seed=5)
    found = search_all(x, groups, 40)
    np.save("x.npy", x)
    np.save("groups.npy", groups)
    np.save("ids.npy", found.ids)
    np.savez(
        "all.npz",
        queries=x[:9],
        gallery=x,
        ids=found.ids[:9],
        query_groups=groups[:9],
        gallery_groups=groups,
    )
    return found


def test_lists_of_a_gallery_in_itself(search, capsys):
    told = []
    for ids in ([], ["--ids", "ids.npy"]):
        command = ["rerank", "--gallery", "x.npy", "--groups", "groups.npy", "--results", "40"]
        assert main([*command, *ids, "--method", "diffusion", "--out", "out.npz"]) == 0
        told.append(capsys.readouterr().out)
        with np.load("out.npz") as file:
            want = DiffusionReranker().rerank(search.xq, search.xb, search.ids)
            np.testing.assert_array_equal(file["ids"], want.ids)
            np.testing.assert_allclose(file["scores"], want.scores, atol=1e-6)
    assert told[0] == told[1]
    assert "60 lists of 40 results" in told[0]
    assert "mAP" in told[0]


def test_a_page_with_thumbnails(search, capsys):
    image = pytest.importorskip("PIL.Image")
    for i in range(60):
        image.new("L", (8, 8), 4 * i).save(f"{i}.png")
    command = ["rerank", "all.npz", "--report", "page.html", "--images", "{id}.png"]
    assert main([*command, "--query-images", "{id}.png"]) == 0
    assert "lists became better" in capsys.readouterr().out
    with open("page.html", encoding="utf-8") as file:
        page = file.read()
    assert page.count("<img") == 2 + 9  # lists, spectra, and a sheet a list
    for words in ("Every list", "How many kinds of results", "changed most", "mAP before"):
        assert words in page


def test_scores_of_the_revisited_protocol(search, capsys):
    truth = [
        {"easy": row[:2].tolist(), "hard": row[2:].tolist(), "junk": []}
        for row in search.relevant[:9]
    ]
    with open("gnd.json", "w") as file:
        json.dump({"gnd": truth}, file)
    assert main(["rerank", "all.npz", "--gnd", "gnd.json", "--method", "expansion"]) == 0
    told = capsys.readouterr().out
    assert all(f"{setting}: mAP" in told for setting in ("easy", "medium", "hard"))


@pytest.mark.raw
def test_mistakes_are_told(search, capsys):
    np.save("scores.npy", np.ones((60, 4)))
    np.save("long.npy", 3 * search.xb)
    np.savez("odd.npz", galery=search.xb)
    for arguments, words in (
        ([], "which vectors?"),
        (["--gallery", "none.npy"], "none.npy"),
        (["odd.npz"], "Did you mean 'gallery'"),
        (["--gallery", "x.npy", "--method", "difusion"], "Did you mean 'diffusion'"),
        (["--gallery", "x.npy", "--ids", "scores.npy"], "ids must hold integers"),
        (["--gallery", "long.npy"], "normalize"),
        (["--gallery", "x.npy", "--out", "out.csv"], "must end in .npz"),
        (["--gallery", "x.npy", "--images", "a.png"], "{id}"),
        (["--gallery", "x.npy", "--queries", "x.npy", "--groups", "groups.npy"], "query_groups"),
    ):
        assert main(["rerank", *arguments]) == 2
        assert words in capsys.readouterr().err
