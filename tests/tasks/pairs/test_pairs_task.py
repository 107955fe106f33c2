"""The task of image-text pairs: tables, parts, a run from the command line, its report."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import primal_attention as pa
from primal_attention.cli.main import main
from primal_attention.support.command import UserError
from primal_attention.tasks.pairs import CollapseError, ImageTextMatcher
from primal_attention.tasks.pairs.baseline import chance_scores, linear_scores
from primal_attention.tasks.pairs.pairs import PairData, read_pair_table
from primal_attention.tasks.pairs.parts import load_tables
from primal_attention.tasks.pairs.settings import PairOptions, PairSettings
from primal_attention.tasks.pairs.task import PairTask
from primal_attention.tasks.pairs.tokenizer import TextTokenizer
from primal_attention.tasks.sources import look_at

COLORS = {"red": (220, 30, 30), "green": (30, 180, 40), "blue": (40, 60, 230), "white": (255,) * 3}


def write_pairs(folder: Path, count: int = 32) -> Path:
    """A table of pairs beside a folder of images."""
    rng = np.random.default_rng(0)
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    rows = ["image,caption"]
    for i in range(count):
        color = list(COLORS)[i % 4]
        pixels = rng.integers(0, 30, (20, 14, 3)).astype(np.uint8)
        pixels[4 + i % 8 : 12 + i % 8, 3:11] = COLORS[color]
        Image.fromarray(pixels).save(folder / "pictures" / f"{i}.png")
        rows.append(f"{i}.png,a {color} square")
    (folder / "pairs.csv").write_text("\n".join(rows) + "\n")
    return folder / "pairs.csv"


ALL = ("itc", "itm", "mlm", "mfr")
SMALL = [
    *("--size", "16", "--model.dim", "16", "--model.num-heads", "2", "--model.num-layers", "1"),
    *("--model.parser-layers", "1", "--training.epochs", "2", "--training.min-steps", "8"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    table = write_pairs(folder)
    arguments = ["train", "--task", "pairs", str(table), "--images", str(folder / "pictures")]
    assert main([*arguments, *SMALL, "--out", str(folder / "run")]) == 0
    torch.set_num_threads(1)
    return folder / "run"


def test_a_table_is_recognised_trained_and_shown(run):
    page = (run / "report.html").read_text("utf-8")
    assert "Hits and misses" in page
    assert page.count("<figure class=") >= 5
    assert "linear map of pixels to words" in page
    assert "20% of the images of pairs.csv were held out" in page
    assert "R@1" in page
    assert "hard mismatches" in page


def test_the_run_predicts_and_is_an_estimator(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # images are found in the folder of the training
    (tmp_path / "new.csv").write_text("image,caption\n3.png,a white square\n1.png,a red square\n")
    assert main(["predict", str(run), "new.csv", "--out", "match.csv"]) == 0
    lines = (tmp_path / "match.csv").read_text().split()
    assert lines[0] == "index,match"
    assert len(lines) == 3
    matcher = ImageTextMatcher.load(run / "softmax")
    images = [run.parent / "pictures" / f"{i}.png" for i in (3, 1)]
    found = matcher.predict_proba(images, ["a white square", "a red square"])
    np.testing.assert_allclose(found, [float(x.partition(",")[2]) for x in lines[1:]], atol=1e-5)
    assert pa.load(run).task == matcher.task_
    assert matcher.task_.slope >= 0
    assert main(["eval", str(run)]) == 0
    assert "R@1" in capsys.readouterr().out


def test_other_columns_are_named_and_missing_ones_told(tmp_path):
    table = write_pairs(tmp_path, 6)
    text = table.read_text().replace("image,caption", "file,words")
    (tmp_path / "other.csv").write_text(text)
    source = look_at(tmp_path / "other.csv")
    assert PairTask.recognize(source, {}) is None
    with pytest.raises(UserError, match="--image and --caption, of file, words"):
        PairTask.recognize(source, {"task": "pairs"})
    found = PairTask.recognize(source, {"image": "file", "caption": "words"})
    assert found is not None
    assert found.settings["data"] == {"image": "file", "caption": "words"}
    with pytest.raises(ValueError, match="has no column 'image'"):
        read_pair_table(tmp_path / "other.csv")


def test_rows_that_cannot_be_learned_are_told_by_number(tmp_path):
    table = write_pairs(tmp_path, 8)
    text = table.read_text()
    pictures = tmp_path / "pictures"
    # words that pandas takes for missing values are captions
    (tmp_path / "none.csv").write_text(text.replace("a red square", "None"))
    assert "None" in read_pair_table(tmp_path / "none.csv").texts
    (tmp_path / "empty.csv").write_text(text.replace("a white square", " "))
    with pytest.raises(UserError, match="2 of 8 rows have no 'caption', the first is row 4"):
        read_pair_table(tmp_path / "empty.csv", images=[pictures])
    with pytest.raises(UserError, match="there is no folder"):
        read_pair_table(table, images=[tmp_path / "no"])
    (pictures / "3.png").write_bytes(b"broken")
    (pictures / "5.png").unlink()
    settings = PairSettings(train=table, images=pictures, size=16)
    with pytest.raises(UserError, match=r"3\.png is no image|no file .*5\.png"):
        PairTask.load(settings)
    kept = read_pair_table(table, images=[pictures], skip_broken=True)
    assert kept.rows == [1, 2, 3, 5, 7, 8]
    assert len(kept.problems) == 2
    (tmp_path / "one.csv").write_text("image,caption\n0.png,a red square\n")
    with pytest.raises(UserError, match="at least two pairs whose texts differ"):
        PairTask.load(PairSettings(train=tmp_path / "one.csv", images=pictures))


def test_an_image_is_in_one_part_only(tmp_path):
    table = write_pairs(tmp_path, 12)
    lines = table.read_text().splitlines()
    table.write_text("\n".join([lines[0], *[line for line in lines[1:] for _ in range(3)]]) + "\n")
    parts, note = load_tables(PairSettings(train=table, images=tmp_path / "pictures"))
    names = {part: {p.name for p in found.images} for part, found in parts.items()}
    assert sum(map(len, names.values())) == len(set().union(*names.values())) == 12
    assert sum(len(found.texts) for found in parts.values()) == 36
    assert "An image is in one part only" in note


def test_sizes_belong_to_the_data():
    task = PairTask(TextTokenizer.learn(["a b"]), size=16, length=8)
    config = task.build(PairOptions(dim=16)).config
    assert (config.image_size, config.max_words, config.vocab_size) == (16, 8, 7)
    assert config.objectives == ("itc", "itm")
    assert config.negatives == "in-batch-hard"
    with pytest.raises(ValueError, match=r"model.image_size is 64; set data.size"):
        task.build(PairOptions(image_size=64))
    with pytest.raises(ValueError, match="objectives must have 'itc' and 'itm'"):
        PairOptions(objectives=("itm", "mlm"))
    with pytest.raises(ValueError, match="length must be at least 3"):
        PairSettings(length=2)


def test_collapsed_features_end_the_training():
    task = PairTask(TextTokenizer.learn(["a b"]), size=16, length=8)
    model = task.build(PairOptions(dim=16, parser="linear", mfr_masks="random", objectives=ALL))
    ids = torch.tensor([[1, 5, 2], [1, 6, 2]])
    with pytest.raises(CollapseError, match="sees the same everywhere"):
        task.objective(model(torch.zeros(2, 3, 16, 16), ids), None)


def test_baselines_follow_from_their_definitions():
    rng = np.random.default_rng(0)
    images = rng.random((40, 8, 8, 3)) * 0.2
    texts = [f"{'red' if i % 2 else 'blue'} {'left' if i % 4 < 2 else 'right'}" for i in range(40)]
    for i, text in enumerate(texts):
        side = slice(0, 4) if "left" in text else slice(4, 8)
        images[i, :, side, 0 if "red" in text else 2] += 0.7
    words = TextTokenizer.learn(texts)
    parts = [
        PairData(images[a:b], texts[a:b], words, (16, 16), 8)
        for a, b in ((0, 24), (24, 32), (32, 40))
    ]
    chance = chance_scores(parts[2])
    assert chance["R@1"].value == pytest.approx(2 / 8)  # two of eight images for each text
    assert chance["R@5"].value == pytest.approx(1 - (3 * 2) / (8 * 7))
    assert chance["R@1 of texts"].value == pytest.approx(1 / 4)
    assert linear_scores(*parts)["R@1"].value == 1.0
