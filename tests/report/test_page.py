import re

import pytest

from primal_attention.report.page import Report, to_png


def test_every_part_reaches_the_page_in_order_and_escaped():
    report = Report("A < B").section("First").text("x & y").table(["name", "n"], [["<b>", 3]])
    page = report.section("Settings").config({"lr": 0.1, "name": "ä"}).html()
    assert "<title>A &lt; B</title>" in page
    assert "<td>&lt;b&gt;</td><td>3</td>" in page
    assert re.search(r"First.*x &amp; y.*Settings.*lr: 0\.1\nname: ä", page, re.DOTALL)


def test_pictures_are_embedded_and_nothing_is_loaded_from_elsewhere(tmp_path):
    plt = pytest.importorskip("matplotlib.pyplot")
    figure = plt.figure()
    figure.add_subplot().plot([1, 2])
    png = to_png(figure)
    path = tmp_path / "deep" / "report.html"
    Report("Picture").figure(png, 'a "line"').write(path)
    page = path.read_text()
    assert 'src="data:image/png;base64,' in page
    assert 'alt="a &quot;line&quot;"' in page
    assert "://" not in page
    assert "<script" not in page
    assert png.startswith(b"\x89PNG")
    assert not plt.fignum_exists(figure.number)


def test_sections_are_linked_and_tiles_show_the_numbers_first():
    report = Report("Run", "What it is.").tiles({"accuracy": "98 %"}).section("A").section("B & C")
    page = report.html()
    assert '<p class="lead">What it is.</p>' in page
    assert "<b>98 %</b><span>accuracy</span>" in page
    assert '<a href="#s2">B &amp; C</a>' in page
    assert '<h2 id="s2">B &amp; C</h2>' in page
    assert "<nav>" not in Report("Run").section("Alone").html()


def test_long_tables_are_folded_and_sentences_start_at_the_left():
    short = Report("A").table(["n"], [[i] for i in range(40)]).html()
    long = Report("A").table(["n", "why"], [[i, "because " * 6] for i in range(41)]).html()
    assert "<details>" not in short
    assert "<details><summary>41 rows</summary>" in long
    assert long.count('class="words"') == 42


def test_a_page_includes_another_as_one_section():
    inner = Report("Inner", "A lead.").section("Part").text("words").caution("nothing else")
    page = Report("Outer").section("First").include("Second", inner).html()
    assert '<h2 id="s2">Second</h2>' in page
    assert "<h3>Part</h3>" in page
    assert "What this does not show.</b> nothing else" in page
