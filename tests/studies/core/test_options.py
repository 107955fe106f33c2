"""A wrong option of a benchmark is told in one sentence, before anything is measured."""

import pytest

from primal_attention.cli.main import main

MISTAKES = {
    "layers --shapes 2": "--shapes",
    "layers --lengths 128 0": "lengths must be at least 1, got (128, 0)",
    "layers --shapes 2 0": "shapes must be at least 1, got ((2, 0),)",
    "layers --threads none": "--threads",
    "layers --name primal": "Did you mean --names?",
    "family --lengths long": "--lengths",
    "family --names nosuch": "no attention named 'nosuch'",
    "peers --repeats 0": "repeats must be at least 1, got 0",
    "longrange-cost --tasks poetry": "Choose from listops",
    "longrange-cost --names nosuch": "Choose from softmax-released",
    "instability --tasks poetry": "Choose from",
    "ksvd --lengths 0": "lengths must be at least 1",
    "approximation --draws 0": "draws must be at least 1, got 0",
    "nystrom --draws 2": "--draws",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_mistakes_are_told_in_one_sentence(command, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *command.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("primal: ")
    assert said.count("\n") == 1
    assert MISTAKES[command] in said
    assert not list(tmp_path.iterdir())
