"""``primal analyze depth``: plans, ranks and regimes from the command line."""

import json
import subprocess
import sys

import pytest

from primal_attention.cli.main import main


def test_plan_prints_a_table_and_reasons(capsys, tmp_path):
    assert main(["analyze", "depth", "plan", "30M", "--vocab", "32000"]) == 0
    out = capsys.readouterr().out
    assert "17     | 384   | 6" in out
    assert "recommended" in out
    assert "- Kaplan et al. 2020, as reported" in out
    page, content = tmp_path / "plan.html", tmp_path / "plan.json"
    assert main(["analyze", "depth", "plan", "1.5B", "--gated", "--out", str(page)]) == 0
    assert "data:image/png" in page.read_text()
    assert (
        main(["analyze", "depth", "plan", "1.5B", "--attention", "primal", "--out", str(content)])
        == 0
    )
    assert json.loads(content.read_text())["params"] == 1.5e9


def test_rank_compares_primal_with_standard(capsys):
    arguments = ["analyze", "depth", "rank", "--attention", "primal", "-L", "2", "-d", "4"]
    assert main([*arguments, "-n", "6", "-s", "2"]) == 0
    out = capsys.readouterr().out
    assert "primal, 2 layers of width 4, 1 heads, 6 tokens: separation rank 59" in out
    assert "standard, the same shape: separation rank 110" in out
    assert main(["analyze", "depth", "rank", "-L", "2", "-d", "3"]) == 0
    assert "separation rank 49" in capsys.readouterr().out


def test_regime_of_the_shallow_backbone(capsys):
    assert main(["analyze", "depth", "regime", "--layers", "2", "--width", "512"]) == 0
    out = capsys.readouterr().out
    assert "depth-efficient" in out
    assert "8.5 ±" in out
    assert "0.23, shallow" in out
    assert main(["analyze", "depth", "regime", "-L", "2", "-d", "128"]) == 0
    assert "an extrapolation" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plann", "30M"], "Did you mean 'plan'"),
        (["plan", "many"], "params must be a positive number"),
        (["plan", "30M", "--attention", "primal-static"], "mixes no tokens"),
        (["plan", "30M", "--out", "plan.pdf"], "must end in .html, .json, .png"),
        (["rank", "-L", "2", "-d", "4", "--max-templates", "64"], "at least 64"),
        (["rank", "--attention", "cubic"], "no polynomial form"),
        (["regime", "--layers", "2"], "--width"),
        (["regime", "-L", "0", "-d", "4"], "layers must be at least 1"),
    ],
)
def test_mistakes_are_told_in_one_sentence(arguments, message, capsys):
    assert main(["analyze", "depth", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["plan", "--help"], ["plan", "30M"], ["rank", "-d", "2"],
     ["regime", "-L", "2", "-d", "64"]],
    ids=" ".join,
)  # fmt: skip
def test_no_action_waits_for_torch(arguments):
    code = (
        "import sys; from primal_attention.cli.main import main\n"
        f"main({['analyze', 'depth', *arguments]!r}); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"
