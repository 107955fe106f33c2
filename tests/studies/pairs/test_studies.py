"""The studies of pairs run once, their scores are those of known models, and verdicts follow."""

from itertools import product

import pytest
import torch

from primal_attention.datasets.scenes import (
    SCENE_WORDS,
    encode_captions,
    holds,
    sample_scenes,
)
from primal_attention.tasks.study import find_study, known_studies, run_study
from primal_studies.pairs import mechanism_models as mechanism
from primal_studies.pairs.mechanism import mechanism_verdict
from primal_studies.pairs.mechanism_models import (
    MASKS,
    PARSERS,
    measure_scenes,
    scene_model,
    train_on_scenes,
)


class Knows:
    """A model that reads the scene behind an image; ``accepts`` decides about pairs."""

    def __init__(self, scenes, accepts):
        self.scenes, self.accepts = scenes, accepts

    def match(self, visual, ids):
        return torch.tensor(
            [
                1.0 if self.accepts(self.scenes[int(v)], say(row)) else -1.0
                for v, row in zip(visual.flatten(), ids, strict=True)
            ]
        )


def say(row):
    return " ".join(SCENE_WORDS[i - 5] for i in row.tolist() if i > 4)


def asked(accepts, count=150):
    scenes = sample_scenes(count, seed=4)
    model, visual = Knows(scenes.scenes, accepts), torch.arange(count).view(-1, 1, 1)
    ids = encode_captions(scenes.captions)
    return mechanism._matching(model, scenes, visual, ids), mechanism._retrieval(
        model, scenes, visual
    )


def test_matching_and_retrieval_of_known_models():
    matching, retrieval = asked(holds)
    assert {*matching.values()} == {1.0}
    assert retrieval["image to text"] == retrieval["text to image"] == 1.0
    assert 0.02 < retrieval["retrieval chance"] < 0.1
    matching, _ = asked(lambda *_: True)
    assert matching.pop("accepted") == 1.0
    assert {*matching.values()} == {0.5}

    # a model that knows words but not where: reversed sides pass
    def words_only(scene, caption):
        names = [{*item[:2]} for item in scene.items]
        return {*caption.split()[1:3]} in names

    matching, _ = asked(words_only)
    assert matching["itm hard relation"] == 0.5
    assert matching["itm hard nouns"] == matching["itm hard attributes"] == 1.0
    assert matching["itm hard"] == pytest.approx(5 / 6)


class Writes(torch.nn.Module):
    """A model that knows all words of the captions if it sees the right image."""

    def __init__(self, pixels, ids):
        super().__init__()
        self.pixels, self.ids = pixels, ids

    def forward(self, images, masked, keep, **options):
        assert ((masked == 3).sum(1) == 1).all()
        right = (images == self.pixels).flatten(1).all(1)
        ids = torch.where(right[:, None], self.ids, 5)
        logits = torch.nn.functional.one_hot(ids, 5 + len(SCENE_WORDS)).float()

        class Output:
            word_logits = logits

        return Output


def test_words_count_except_articles():
    scenes = sample_scenes(60, seed=4)
    pixels, ids = scenes.pixel_values, encode_captions(scenes.captions)
    found = mechanism._words(Writes(pixels, ids), scenes, pixels, ids)
    assert found == {"words": 1.0, "words blind": 0.0, "words shuffled": 0.0, "side word": 1.0}
    wrong = ids.clone()
    wrong[:30, 4] = 5  # half of the side words
    found = mechanism._words(Writes(pixels, wrong), scenes, pixels, ids)
    assert found["side word"] == 0.5
    assert found["words"] == pytest.approx(5 / 6)


def test_parsers_are_of_equal_size():
    sizes = [sum(p.numel() for p in scene_model(name).parser.parameters()) for name in PARSERS]
    assert max(sizes) < 1.01 * min(sizes)
    hidden = {}
    for mfr in ("random", "groups"):
        config = scene_model(mfr=mfr).config
        hidden[mfr] = (config.mfr_masks, config.mfr_group, config.num_patches)
    assert hidden == {"random": ("random", 3, 9), "groups": ("groups", 3, 9)}
    assert set(scene_model(mfr="none").config.objectives) == {"mlm", "itm"}


def test_training_follows_the_seed_and_leaves_the_global_one_alone():
    before = torch.random.get_rng_state()
    runs = [train_on_scenes("cnn", "groups", steps=3, seed=s, dim=16) for s in (0, 0, 1)]
    assert torch.equal(before, torch.random.get_rng_state())
    assert runs[0].losses == runs[1].losses != runs[2].losses
    assert not runs[0].model.training
    assert set(runs[0].losses) == {"mlm", "itm", "mfr"}


def test_flow_has_both_directions_of_every_layer():
    found = measure_scenes(scene_model().eval(), count=60)
    for key in ("text from image", "image from text", "imf", "imf lift"):
        assert len(found[key]) == 3
    # 6 text and 9 visual tokens
    chance = 2 * 6 * 9 / 15**2
    assert found["imf"][0] / found["imf lift"][0] == pytest.approx(chance, rel=1e-3)


def rows(flow, hard=lambda *_: 0.5, seeds=5):
    return [
        {"parser": p, "mfr": m, "seed": s, "imf lift": [flow(p, m, s)], "itm hard": hard(p, m, s),
         "losses": {"mfr": [9.0, 0.3 + 0.1 * (m == "groups")]}}
        for s, p, m in product(range(seeds), PARSERS, MASKS)
    ]  # fmt: skip


def test_a_verdict_needs_five_seeds_that_agree():
    def better(p, m, s):
        return (p == "self-attention") + 0.1 * (m == "none") + 0.01 * s

    said = mechanism_verdict(rows(better, better))
    assert "raises the flow is supported (lift of IMF +1.00, positive in 5 of 5 seeds)" in said
    assert "features raise it is contradicted (lift of IMF -0.10, positive in 0 of 5" in said
    assert "tokens at random is supported (loss +0.10, positive in 5 of 5 seeds)" in said
    assert "better model is supported (rank correlation" in said
    assert "+1.00, positive in 5" in said
    few = mechanism_verdict(rows(better, better, seeds=4))
    assert few.startswith("With 48 cells")
    assert few.count("undecided") == 4
    mixed = mechanism_verdict(rows(lambda p, m, s: (p == "self-attention") * (1 if s else -1)))
    assert "raises the flow is undecided (lift of IMF +0.60, positive in 4 of 5 seeds)" in mixed
    assert "better model is not measured" in mixed
    # the parsers of the thesis are patches and convolutions, not the primal one
    primal = mechanism_verdict(rows(lambda p, m, s: float(p == "dual-tied")))
    assert "raises the flow is undecided (lift of IMF +0.00" in primal


def check(study, options, files, out):
    options = study.Options(**options)
    found = run_study(study, options, out=out, report=lambda _: None)
    names = {p.name for p in out.iterdir() if p.is_file()}
    assert names == {"rows.jsonl", "about.json", *files}
    said = []
    assert run_study(study, options, out=out, report=said.append) == found
    assert not said
    return found


def test_the_study_of_mechanism_runs_once(tmp_path):
    study = find_study("pairs-mechanism", "repro")
    cells = study.cells(study.Options())
    assert len(cells) == 60
    first = {(c["parser"], c["mfr"], c["seed"]) for c in cells[:4]}
    assert first == {(p, m, 0) for p in ("self-attention", "linear") for m in ("none", "groups")}
    options = {"parsers": ("linear", "dual-tied"), "masks": ("groups",), "seeds": (0,),
               "steps": 2, "scenes": 60}  # fmt: skip
    files = {"table.md", "flow.md", "verdict.md", "picture.png"}
    assert len(check(study, options, files, tmp_path)) == 2
    assert "2 of 2 cells" in (tmp_path / "table.md").read_text("utf-8")
    with pytest.raises(ValueError, match="parsers"):
        study.Options(parsers=("resnet",))


def test_the_study_of_emoji_runs_once(tmp_path, write_emoji):
    names = [f"{a} {b}" for a in ("red", "blue", "green") for b in ("cat", "dog", "cow", "hen")]
    write_emoji(tmp_path / "data", names, ["animal, pet"] * 12)
    study = find_study("pairs-emoji")
    options = {"models": ("bag-of-words", "matcher", "visual-parser"), "seeds": (0,), "steps": 2,
               "held_out": 3, "data": tmp_path / "data"}  # fmt: skip
    found = check(study, options, {"table.md", "verdict.md", "picture.png"}, tmp_path / "out")
    assert [row["stage"] for row in found] == ["", "", "first stage", "both stages"]
    assert found[0]["seen candidates"] == 9
    verdict = (tmp_path / "out/verdict.md").read_text("utf-8")
    assert "VisualParser, both stages" in verdict
    assert "Not measured" not in verdict
    more = study.Options(**options | {"models": ("bag-of-words", "dual-encoder")})
    said = study.tables(found, more)["verdict.md"]
    assert "Not measured yet: dual encoder (open_clip)." in said.replace("\n", " ")
    assert known_studies()["pairs-emoji"].group == "repro"
