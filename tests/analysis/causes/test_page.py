"""The page of an explanation in a real browser: the slider and the tabs change what is visible."""

import re
import shutil
import subprocess

import pytest
from tests.analysis.causes import models

from primal_attention.analysis.causes.explainer import explain
from primal_attention.analysis.causes.pag import PAG
from primal_attention.analysis.causes.page import CAVEATS, HeadView, explorer, radial_svg
from primal_attention.report.page import Report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--enable-logging=stderr", "--v=0", "--virtual-time-budget=5000", "--dump-dom"),
)
# reads what a reader sees, before and after moving the slider and clicking the last tab
PROBE = """<script>addEventListener('load', () => {
const boxes = [...document.querySelectorAll('.causes')];
const box = boxes[boxes.length - 1], slider = box.querySelector('input');
const state = () => [
  [...box.querySelectorAll('.causes-token')].map(t => t.dataset.near).join(''),
  [...box.querySelectorAll('.causes-panel')].map(p => p.offsetHeight > 0 ? 1 : 0).join(''),
  box.querySelectorAll('.causes-panel:not([hidden]) .is-far').length,
  box.querySelector('output').textContent,
  getComputedStyle(box.querySelector('.causes-token')).outlineStyle].join('|');
const seen = [state()];
slider.value = 1; slider.dispatchEvent(new Event('input', {bubbles: true})); seen.push(state());
slider.value = 0; slider.dispatchEvent(new Event('input', {bubbles: true})); seen.push(state());
slider.value = 3; slider.dispatchEvent(new Event('input', {bubbles: true}));
const tabs = box.querySelectorAll('.causes-tabs button');
tabs[tabs.length - 1].click(); seen.push(state());
seen.push(boxes.map(b => b.querySelector('output').textContent).join(''));
seen.push(document.documentElement.scrollWidth > document.documentElement.clientWidth);
document.body.dataset.seen = seen.join(';');
});</script>"""
# the policy of a page, which would forbid the probe behind it
POLICY = '<meta http-equiv="Content-Security-Policy"'


@pytest.fixture(scope="module")
def result(critic, words):
    return explain(critic, words, models.reviews(8, seed=1)[0][3], m=384, compare=True)


def browse(report, folder):
    page = folder / "page.html"
    page.write_text(report.html().replace(POLICY, PROBE + POLICY, 1), "utf-8")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "CONSOLE" not in done.stderr
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found, "the page did not finish loading"
    return found[1].split(";")


def digits(result, head, radius):
    """Return what the tokens of a page must show for a head and a radius."""
    near = ["0"] * len(result.tokens)
    for node, distance in result.views()[head].distances.items():
        if 0 < distance <= radius:
            near[result.graphs.nodes.members[node][0]] = str(distance)
    return "".join(near)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_slider_and_tabs_work_in_a_browser(result, tmp_path):
    first, near, nothing, last, outputs, is_wide = browse(result.report(), tmp_path)
    panels = len(result.views())
    assert first.split("|")[:2] == [digits(result, 0, 3), "1" + "0" * (panels - 1)]
    assert first.split("|")[3:] == ["3", "solid"]
    # a smaller radius fades tokens and parts of the graph
    assert near.split("|")[0] == digits(result, 0, 1) != digits(result, 0, 3)
    assert int(near.split("|")[2]) > int(first.split("|")[2])
    assert set(nothing.split("|")[0]) == {"0"}
    # the last tab is the consensus
    assert last.split("|")[:2] == [digits(result, -1, 3), "0" * (panels - 1) + "1"]
    assert outputs == "3"
    assert is_wide == "false"


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_two_explorers_in_one_report_do_not_disturb_each_other(result, tmp_path):
    page = Report("All").include("Causes", result.report())
    page.section("Another")
    result.add_explorer(page)
    assert page.html().count("<script") == 1
    assert not re.search(r'\bid="(?!s\d)', page.html())
    *_, last, outputs, _ = browse(page, tmp_path)
    assert last.split("|")[1][-1] == "1"
    # only the second slider was moved, and back
    assert outputs == "33"


def test_the_page_holds_all_that_a_reader_needs(result):
    text = result.report().html()
    assert not re.search(r"(src|href)=\"(?!data:|#)", text)
    for words in (*CAVEATS, result.verdict(), "attention, best head", "removal: mask"):
        assert words.replace("'", "&#x27;") in text
    assert text.count('class="causes-panel"') == len(result.heads) + 1
    # without scripts the first tab is visible with all its distances
    shown = re.findall(r'<span class="causes-token[^>]*data-near="(\d)"', text)
    assert "".join(shown) == digits(result, 0, 3)
    # the tokens of the first set are underlined
    assert text.count(" is-set") == len(result.sets[0].positions)


def test_marks_at_both_ends_are_drawn():
    # a o→ b, b ↔ c, c - d: one circle, three arrowheads, no other mark
    marks = [[0, 2, 0, 0], [1, 0, 2, 0], [0, 2, 0, 3], [0, 0, 3, 0]]
    pag = PAG(marks, names=("<a>", "b", "c", "d"))
    view = HeadView("head", pag, [(0,), (1,), (2,), (3,)], 1, {1: 0, 0: 1, 2: 1, 3: 2})
    svg = radial_svg(view)
    assert svg.count("<polygon") == 3
    assert svg.count('r="4"') == 1
    assert svg.count("<line") == 3
    assert "&lt;a&gt;" in svg
    assert "<a>" not in svg
    html = explorer(["x<y", "b", "c", "d"], [view], target=1)
    assert "x&lt;y" in html


def test_a_node_of_all_tokens_colours_none():
    view = HeadView("head", PAG([[0, 1], [1, 0]]), [(0,), (0, 1)], 1, {1: 0, 0: 1})
    html = explorer(["a", "b"], [view], target=None)
    assert re.findall(r'data-near="([^"]*)">', html)[:3] == ["1", "0", "1 -1"]
    assert "is-target" not in html
