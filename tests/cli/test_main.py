"""Commands are found, answer fast, and tell mistakes in one sentence."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from primal_attention.cli import main as cli
from primal_attention.cli.main import main
from primal_attention.support.command import MissingPackageError, UserError, needs, user_errors
from primal_attention.support.output import write_atomically

DOCS = Path(__file__).parents[2] / "docs"


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "primal_attention.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["train", "--help"], ["eval", "--help"], ["predict", "--help"],
     ["repro", "--help"], ["bench", "--help"], ["bench", "layers", "--help"],
     ["bench", "family", "--help"], ["list"], ["info"], ["--version"], ["trian"],
     ["train", "japanese-vowels", "--help"], ["repro", "uea", "--help"],
     ["repro", "longrange-accuracy", "--help"], ["list", "tasks"], ["init", "--help"],
     ["data", "--help"], ["data", "list"], ["data", "where", "imdb"],
     ["init", "new.yaml", "--help"]],
    ids=" ".join,
)  # fmt: skip
def test_help_and_lists_do_not_wait_for_torch(arguments):
    code = (
        "import sys; from primal_attention.cli.main import main\n"
        f"main({arguments!r}); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_settings_for_a_file_are_shown_without_waiting_for_torch(tmp_path):
    (tmp_path / "table.csv").write_text("a,b,kind\n1,2,x\n3,4,y\n")
    code = (
        "import sys; from primal_attention.cli.main import main\n"
        "main(['train', 'table.csv', '--target', 'kind', '--help'])\n"
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "False"
    assert "--data.target" in done.stdout


def test_a_message_about_a_long_value_keeps_its_beginning_and_end(capsys):
    for arguments, end in (
        (["x" * 9000], "search."),
        (["train", f"{'x' * 9000}.yaml"], "too long."),
    ):
        assert main(arguments) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("primal: ")
        assert printed.endswith(f"{end}\n")
        assert len(printed) < 1100


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    for name in ("train", "init", "eval", "predict", "bench", "repro", "data", "list", "info"):
        assert f"\n  {name} " in printed
    assert main([]) == 0
    assert capsys.readouterr().out == printed


def test_unknown_commands_and_options_suggest_the_nearest(fails):
    assert "'trian'. Did you mean 'train'?" in fails("trian")
    assert "Did you mean --names?" in fails("list", "--name")
    assert "Expected one of" in fails("list", "recipe")
    assert "'layer'. Did you mean 'layers'?" in fails("bench", "layer")


def test_list_prints_recipes_and_attentions(capsys):
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    assert "japanese-vowels" in printed
    assert "primal-dual" in printed
    assert main(["list", "attentions", "--names"]) == 0
    assert "softmax\n" in capsys.readouterr().out


def test_info_prints_versions_and_renews_tables(capsys, fails, tmp_path, monkeypatch):
    assert main(["info"]) == 0
    assert "torch" in capsys.readouterr().out
    page = tmp_path / "guides" / "page.md"
    page.parent.mkdir()
    page.write_text("<!-- attentions: start -->\n<!-- attentions: end -->\n")
    monkeypatch.setattr("primal_attention.cli.attentions._STORED", tmp_path / "stored.md")
    assert main(["info", "--update", str(page)]) == 0
    assert "`primal`" in page.read_text()
    assert (tmp_path / "stored.md").read_text() in page.read_text()
    capsys.readouterr()
    for text in ("nothing", "<!-- attentions: start -->\n"):
        page.write_text(text)
        assert "no place for a table" in fails("info", "--update", str(page))
        assert page.read_text() == text
    assert "No such file" in fails("info", "--update", str(tmp_path / "none.md"))
    page.write_bytes(b"caf\xe9")
    assert "not text in UTF-8" in fails("info", "--update", str(page))


def command(monkeypatch, error: BaseException) -> None:
    def fail(argv):
        raise error

    monkeypatch.setattr(cli, "import_module", lambda name: SimpleNamespace(main=fail))


def test_internal_errors_keep_their_traceback(monkeypatch):
    command(monkeypatch, ValueError("ours"))
    with pytest.raises(ValueError, match="ours"):
        main(["list"])


def test_files_that_cannot_be_written_are_told_by_their_own_name(monkeypatch, fails, tmp_path):
    (tmp_path / "table.md").mkdir()
    with pytest.raises(OSError, match="directory") as caught:
        write_atomically(tmp_path / "table.md", "content")
    assert not list(tmp_path.glob(".table*"))
    command(monkeypatch, caught.value)
    assert fails("list") == f"primal: {tmp_path}/table.md: Is a directory.\n"
    command(monkeypatch, OSError("of no file"))
    with pytest.raises(OSError, match="of no file"):
        main(["list"])


def test_interruption_has_its_own_code(monkeypatch, capsys):
    command(monkeypatch, KeyboardInterrupt())
    assert main(["list"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_missing_package_names_the_extra(monkeypatch, fails):
    command(monkeypatch, ModuleNotFoundError("No module named 'tyro'", name="tyro"))
    assert "Run pip install -e '.[cli]' in the checkout" in fails("list")
    with pytest.raises(MissingPackageError) as caught, needs("train", "Training"):
        import no_such_package.part  # noqa: F401
    command(monkeypatch, caught.value)
    assert fails("list") == (
        "primal: Training needs the package 'no_such_package', which is not installed. "
        "Run pip install -e '.[train]' in the checkout of primal-attention.\n"
    )
    command(monkeypatch, ModuleNotFoundError("x", name="primal_attention.nothing"))
    with pytest.raises(ModuleNotFoundError):
        main(["list"])


def test_mistakes_keep_to_one_line_and_name_the_place_once():
    with pytest.raises(UserError, match=r"^f\.yaml: two lines$"), user_errors("f.yaml"):
        raise ValueError("two\n  lines")
    with pytest.raises(UserError, match=r"^f\.yaml is odd$"), user_errors("f.yaml"):
        raise ValueError("f.yaml is odd")
    with pytest.raises(KeyError), user_errors("f.yaml"):
        raise KeyError("not told")


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m primal_attention.cli list | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("recipe")
    assert done.stderr == ""


def test_the_process_ends_with_the_code_of_the_command():
    assert run("--version").returncode == 0
    done = run("trian")
    assert done.returncode == 2
    assert done.stderr.startswith("primal: there is no command")


def test_bench_tells_an_impossible_folder_before_it_measures(capsys, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert main(["bench", "--lengths", "8", "--out", str(tmp_path / "file" / "below")]) == 2
    printed = capsys.readouterr().err
    assert "Not a directory" in printed
    assert "tokens" not in printed.splitlines()[-1]


def test_bench_runs_a_study_and_tells_wrong_names(capsys, tmp_path):
    arguments = ["bench", "--lengths", "8", "--shapes", "2", "8", "--ranks", "4", "--repeats", "1"]
    arguments += ["--names", "primal", "softmax", "--threads", "1", "--out", str(tmp_path)]
    assert main(arguments) == 0
    assert "softmax" in capsys.readouterr().out
    assert main(["bench", "layers", "--names", "softmx"]) == 2
    assert "Did you mean 'softmax'?" in capsys.readouterr().err
    assert main(["bench", "--repeats", "0"]) == 2
