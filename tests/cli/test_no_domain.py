"""Commands find domains through the seam and analyses through the registry; they name neither."""

import ast
import re
from pathlib import Path

import pytest

from primal_attention import cli
from primal_attention.analysis import list_analyses
from primal_attention.cli.main import main
from primal_attention.support.command import UserError
from primal_attention.tasks import task
from primal_attention.tasks.task import TASKS, TaskCommand, TaskEntry, offered, task_commands

FILES = sorted(Path(cli.__file__).parent.glob("*.py"))
DOMAINS = {entry.where.split(".")[2] for entry in TASKS.values()}
NAMES = DOMAINS | set(TASKS) | set(task_commands()) | set(list_analyses())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_command_names_a_domain_or_an_analysis(path):
    text = path.read_text("utf-8")
    assert not re.search(rf"tasks(\.| import )({'|'.join(DOMAINS)})\b", text)
    assert not re.search(r"analysis\.(causes|counts|depth|flow|transport)\b", text)
    words = {n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant)}
    assert not words & NAMES


def test_a_domain_brings_its_commands(monkeypatch, capsys, tmp_path):
    (tmp_path / "sing_command.py").write_text("def main(argv):\n    print(*argv)\n    return 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    command = TaskCommand("sing", "a song of the arguments", "sing_command")
    entry = TaskEntry("sing_command:Song", "sing", (command,), {"song": "sing_command:main"})
    monkeypatch.setitem(task.TASKS, "songs", entry)
    assert main(["--help"]) == 0
    assert "sing     a song of the arguments" in capsys.readouterr().out
    assert main(["sing", "la", "la"]) == 3
    assert capsys.readouterr().out == "la la\n"
    assert offered("song")(["lo"]) == 3
    with pytest.raises(ValueError, match="no task offers 'dance'; there are: reranker, song"):
        offered("dance")
    assert main(["sng"]) == 2
    assert "Did you mean 'sing'?" in capsys.readouterr().err


def test_a_reranker_comes_through_the_seam(tmp_path):
    assert type(offered("reranker")("reciprocal")).__name__ == "KReciprocal"
    with pytest.raises(UserError, match="Did you mean 'diffusion'"):
        offered("reranker")("difusion")
