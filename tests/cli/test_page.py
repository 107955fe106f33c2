"""The report opens in a real browser: every picture is decoded, nothing complains."""

import json
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from primal_attention.cli.main import main

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--enable-logging=stderr", "--v=0", "--virtual-time-budget=5000"),
)


# written into a copy of the page: tells what the browser made of the pictures and the width
PROBE = (
    "<script>addEventListener('load', () => {"
    "const pictures = [...document.images].map(i => i.complete && i.naturalWidth);"
    "document.body.dataset.pictures = pictures.join(' ');"
    "const parts = [document.documentElement, ...document.querySelectorAll('.scroll')];"
    "const wide = parts.some(part => part.scrollWidth > part.clientWidth);"
    "document.body.dataset.wide = wide; });</script>"
)
# the policy of a page, which would forbid the probe behind it
POLICY = '<meta http-equiv="Content-Security-Policy"'


def browse(page: Path, profile: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)


@pytest.fixture(scope="module")
def four_models(series_recipe, tmp_path_factory):
    """A run with four models, of one epoch and one layer each."""
    out = tmp_path_factory.mktemp("four") / "run"
    quick = ["--training.epochs", "1", "--model.num-layers", "1", "--out", str(out)]
    others = ["--compare", "primal-dual", "softmax", "kernelized-log"]
    assert main(["train", str(series_recipe), *quick, *others]) == 0
    return out


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
@pytest.mark.parametrize("run", ["series_run", "four_models"])
def test_a_browser_shows_the_whole_report(run, request, tmp_path):
    text = (request.getfixturevalue(run) / "report.html").read_text("utf-8")
    assert "<script" not in text
    page = tmp_path / "report.html"
    page.write_text(text.replace(POLICY, PROBE + POLICY, 1), "utf-8")
    shot = tmp_path / "shot.png"
    done = browse(page, tmp_path / "dom", "--dump-dom", "--window-size=1150,2400")
    widths = re.search(r'data-pictures="([^"]*)"', done.stdout)
    assert widths, "the page did not finish loading"
    assert len(widths[1].split()) == text.count("<img ") == 4
    assert all(int(width) > 500 for width in widths[1].split())
    assert 'data-wide="false"' in done.stdout
    assert "CONSOLE" not in done.stderr
    for heading in ("Result", "Curves", "Confusion", "Spectra", "KSVD diagnostics"):
        assert f">{heading}</h2>" in done.stdout
    browse(page, tmp_path / "png", f"--screenshot={shot}", "--window-size=1150,2400")
    assert struct.unpack(">II", shot.read_bytes()[16:24]) == (1150, 2400)
    assert shot.stat().st_size > 50_000


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_a_browser_shows_every_section_about_a_model(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from tests.cli.test_convert import WORDS, save_bert

    monkeypatch.chdir(tmp_path)
    save_bert(tmp_path / "bert")
    lines = [" ".join(WORDS[(i + j * j) % len(WORDS)] for j in range(12)) for i in range(8)]
    Path("words.txt").write_text("\n".join(lines) + "\n")
    quick = ["--advice.attentions", "linear", "--causes.inputs", "2"]
    assert main(["analyze", "bert", "--data", "words.txt", "--out", "new", *quick]) == 0
    record = json.loads(Path("new", "analyze.json").read_text("utf-8"))
    assert list(record["skipped"]) == ["flow"]
    text = Path("new", "report.html").read_text("utf-8")
    assert not re.search(r"(src|href)=\"(?!data:|#)", text)
    page = tmp_path / "page.html"
    page.write_text(text.replace(POLICY, PROBE + POLICY, 1), "utf-8")
    done = browse(page, tmp_path / "dom", "--dump-dom", "--window-size=1150,2400")
    widths = re.search(r'data-pictures="([^"]*)"', done.stdout)
    assert widths, "the page did not finish loading"
    assert len(widths[1].split()) == text.count("<img ")
    assert all(int(width) > 300 for width in widths[1].split())
    assert "CONSOLE" not in done.stderr
    for heading in ("In short", "Spectrum", "Advice", "Depth", "Causes", "Counts", "Left out"):
        assert f">{heading}</h2>" in done.stdout
    assert done.stdout.count("What this does not show.") == len(record["verdicts"])


def test_the_report_loads_nothing_from_elsewhere(series_run):
    text = (series_run / "report.html").read_text("utf-8")
    assert not re.search(r"(src|href)=\"(?!data:|#)", text)
    for words in ("test accuracy", "lr: 0.01", "torch:", "untrained"):
        assert words in text
