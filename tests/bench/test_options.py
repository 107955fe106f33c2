"""A wrong option of a benchmark is told in one sentence, before anything is measured."""

import pytest

from primal_attention.bench import options
from primal_attention.cli.main import main

MISTAKES = {
    "layers --shapes 2y32": "'2y32' is not heads x head width, such as 2x32",
    "layers --n 128,0": "'0' is not a whole number of at least 1",
    "layers --threads none": "'none' is not a whole number of at least 1",
    "family --n long": "'long' is not a whole number of at least 1",
    "family --names nosuch": "no attention named 'nosuch'",
    "peers --n abc": "'abc' is not a whole number of at least 1",
    "longrange --tasks poetry": "choose from listops",
    "longrange --names nosuch": "choose from softmax-released",
    "instability --tasks poetry": "choose from",
    "ksvd --n many": "'many' is not a whole number of at least 1",
    "approximation --draws 0": "'0' is not a whole number of at least 1",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_mistakes_are_told_in_one_sentence(command, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *command.split()]) == 2
    said = capsys.readouterr().err
    assert MISTAKES[command] in " ".join(said.split())
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_lists_are_read_between_commas():
    assert options.numbers("1_024,4096") == (1024, 4096)
    assert options.shapes("2x32,8x64") == ((2, 32), (8, 64))
    assert options.names("a,b") == ("a", "b")
