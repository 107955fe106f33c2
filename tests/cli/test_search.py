"""``primal search``: results as lines and as a page."""

import numpy as np
import pytest
import torch
from PIL import Image

from primal_attention.cli.main import main
from primal_attention.tasks.pairs import TextTokenizer
from primal_attention.tasks.pairs.settings import PairOptions
from primal_attention.tasks.pairs.task import PairTask
from primal_attention.tasks.trained import save_trained


@pytest.fixture
def model(tmp_path):
    """An untrained model, and a folder of images of which one is broken."""
    torch.manual_seed(0)
    task = PairTask(TextTokenizer.learn(["a red square", "a blue <circle>"]), size=16, length=8)
    save_trained(tmp_path / "model", task, task.build(PairOptions(dim=16, num_heads=2)))
    rng = np.random.default_rng(0)
    (tmp_path / "images" / "more").mkdir(parents=True)
    for i in range(6):
        pixels = rng.integers(0, 255, (9, 9, 3)).astype(np.uint8)
        folder = "images/more" if i % 2 else "images"
        Image.fromarray(pixels).save(tmp_path / folder / f"p{i}.png")
    (tmp_path / "images" / "broken.png").write_text("no image")
    return tmp_path / "model"


def test_results_are_printed_and_shown(model, capsys):
    arguments = ["search", str(model), "a red square", "a blue <zebra>", "--images", "images"]
    assert main([*arguments, "-k", "3"]) == 0
    printed = capsys.readouterr().out
    assert "left out: images/broken.png is no image of a known format" in printed
    assert '"a red square" in 6 images' in printed
    assert "'zebra'" in printed
    assert printed.count(" match ") == 6
    assert "more/p" in printed
    page = (model.parent / "search.html").read_text("utf-8")
    assert page.count('src="data:image/png;base64,') == 6
    assert "a blue &lt;zebra&gt;" in page
    assert "<zebra>" not in page


def test_a_reranker_can_be_named(model, capsys):
    base = ["search", str(model), "a red square", "--images", "images", "--out", "None"]
    assert main([*base, "--rerank", "diffusion"]) == 0
    assert capsys.readouterr().out.count(" match ") == 5
    assert not (model.parent / "search.html").exists()


def test_mistakes_are_told_in_a_sentence(model, fails, series_run):
    assert "Did you mean 'images'?" in fails("search", model, "a", "--images", "image")
    assert "text is empty" in fails("search", model, " ", "--images", "images")
    assert "there is no folder" in fails("search", "no", "a", "--images", "images")
    assert "must end in .html" in fails("search", model, "a", "--images", "images", "-o", "a.pdf")
    assert "at least 1, got 0" in fails("search", model, "a", "--images", "images", "-k", "0")
    told = fails("search", series_run / "primal", "a", "--images", "images")
    assert "holds a SeriesBlend, not what ImageTextMatcher saves" in told
