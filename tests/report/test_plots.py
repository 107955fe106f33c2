import pytest
import torch

from primal_attention.report.page import to_png
from primal_attention.report.plots import (
    add_legend,
    plain,
    plot_confusion,
    plot_curves,
    plot_dots,
    plot_values,
)

plt = pytest.importorskip("matplotlib.pyplot")


def test_curves_of_one_model_share_a_colour_and_the_chosen_epoch_is_marked():
    curves = {
        "loss": {"primal, training": [2.0, 1.0], "primal, validation": [2.1, 1.2]},
        "accuracy": {"primal, validation": [0.4, 0.8], "softmax, validation": [0.5, 0.7]},
    }
    figure = plot_curves(curves, dashed=["primal, training"], chosen={"primal": 2})
    loss, accuracy = figure.axes
    assert [a.get_title() for a in figure.axes] == ["loss", "accuracy"]
    training, validation, mark = loss.lines
    assert training.get_linestyle() == "--"
    assert training.get_color() == validation.get_color() == mark.get_color()
    assert list(training.get_xdata()) == [1, 2]
    assert accuracy.lines[0].get_color() != accuracy.lines[1].get_color()
    # the models are named once, above the panels
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["primal", "softmax"]
    figure.draw_without_rendering()
    below = figure.legends[0].get_window_extent().y0
    assert all(a.get_legend() is None and a.get_tightbbox().y1 <= below for a in figure.axes)
    plt.close(figure)


def test_five_panels_leave_one_empty_and_log_axes_are_optional():
    figure = plot_curves({name: {"m": [1.0, 0.1]} for name in "abcde"}, log="b")
    assert [a.axison for a in figure.axes] == [True] * 5 + [False]
    assert [a.get_yscale() for a in figure.axes[:2]] == ["linear", "log"]
    plt.close(figure)


def test_four_panels_fill_two_rows_and_one_epoch_is_a_point():
    figure = plot_curves({name: {"m": [1.0]} for name in "abcd"})
    assert [a.axison for a in figure.axes] == [True] * 4
    assert figure.axes[0].lines[0].get_marker() == "o"
    plt.close(figure)


@pytest.mark.parametrize("classes", [2, 9, 40])
def test_confusion_has_one_panel_per_model_and_counts_for_few_classes(classes):
    matrix = torch.eye(classes, dtype=torch.long) * 3
    figure = plot_confusion({"a": matrix, "b": matrix}, [f"class {i}" for i in range(classes)])
    assert [a.get_title() for a in figure.axes] == ["a", "b"]
    assert len(figure.axes[0].texts) == (classes if classes <= 12 else 0)
    plt.close(figure)


@pytest.mark.parametrize("models", [1, 3, 4])
def test_confusion_has_two_panels_per_row(models):
    matrices = {f"model {i}": torch.eye(9, dtype=torch.long) for i in range(models)}
    figure = plot_confusion(matrices, [f"class {i}" for i in range(9)])
    assert figure.get_figwidth() <= 12
    shown = [a for a in figure.axes if a.axison]
    assert [a.get_title() for a in shown] == list(matrices)
    columns = {a.get_subplotspec().colspan.start for a in shown}
    assert len(columns) == min(models, 2)
    plt.close(figure)


def test_dots_have_one_row_each_and_the_names_in_the_legend():
    figure = plot_dots({"a": {"x": 1.0, "y": 10.0}, "b": {"y": 100.0}}, xlabel="score", log=True)
    (axis,) = figure.axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["a", "b"]
    assert [dots.get_offsets().tolist() for dots in axis.collections] == [
        [[1.0, 0.0]],
        [[10.0, 0.0], [100.0, 1.0]],
    ]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["x", "y"]
    plt.close(figure)


STRANGE = [r"$\frac$", "two\nlines", "x" * 5000, "_hidden", "\u4e2d\x00", "$a$ and $b$", ""]


def test_names_of_users_are_shown_as_they_are_in_every_figure():
    matrix = torch.eye(len(STRANGE), dtype=torch.long)
    numbers = dict.fromkeys(STRANGE, 1.0)
    figures = [
        plot_confusion(dict.fromkeys(STRANGE[:2], matrix), STRANGE),
        plot_dots(dict.fromkeys(STRANGE, numbers), xlabel="x"),
        plot_values({name: ([1.0, 2.0], [2.0, 1.0]) for name in STRANGE[:2]}),
        plot_curves({name: {name: [1.0, 2.0]} for name in STRANGE[:3]}),
    ]
    ticks = [label.get_text() for label in figures[0].axes[0].get_yticklabels()]
    assert ticks[0] == r"\$\frac\$"  # a dollar behind a backslash is a dollar
    assert ticks[1] == "two lines"
    assert len(ticks[2]) == 40
    for figure in figures:
        assert figure.get_figwidth() < 30
        assert to_png(figure).startswith(b"\x89PNG")


def test_a_legend_names_models_that_begin_with_an_underscore():
    figure = plt.figure()
    add_legend(figure, dict.fromkeys(["_hidden", "$x$"], "red"))
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["_hidden", r"\$x\$"]
    plt.close(figure)


def test_plain_words_stay_as_they_are():
    for word in ("class 1", "ü", "a_b^c", "100 %"):
        assert plain(word) == word
