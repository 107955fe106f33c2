"""Each format is parsed in one place: nothing else opens a file of a user by itself."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("src/primal_attention", "studies/src/primal_studies")

PARSERS = {
    *("read_csv", "read_parquet", "ParquetFile", "DictReader", "reader"),
    *("loadtxt", "genfromtxt", "fromfile", "ZipFile"),
    *("np.load", "numpy.load", "torch.load", "json.load", "json.loads", "yaml.load"),
    *("yaml.safe_load", "safe_open", "load_file", "pickle.load", "pickle.loads"),
    *("gzip.open", "gzip.decompress", "lzma.open", "lzma.decompress", "tarfile.open"),
    *("Image.open", "pq.read_table", "pd.read_json", "pd.read_excel"),
}
"""Calls that parse a file: the last name, or the last two."""

OWN_FORMATS = {
    "datasets/tables.py": {"loadtxt", "read_csv"},
    "tasks/series/files.py": {"ZipFile"},
    "tasks/longrange/readers.py": {"tarfile.open"},
    "lists/pretrained.py": {"gzip.decompress"},
    "tasks/study.py": {"json.loads"},
}
"""Readers of one public set, of the archive of a publisher, or of keys that were just made."""


def parsers_in(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        # what the library has just written as JSON is no file
        if any(isinstance(arg, ast.Call) and "json" in ast.unparse(arg.func) for arg in node.args):
            continue
        parts = ast.unparse(node.func).split(".")
        found |= {".".join(parts[-2:]), parts[-1]} & PARSERS
    return found


def modules() -> list[tuple[str, Path]]:
    return [
        (path.relative_to(ROOT / folder).as_posix(), path)
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "support/files" not in path.as_posix()
    ]


def test_only_support_files_parses_files():
    found = {name: parsers for name, path in modules() if (parsers := parsers_in(path))}
    assert found == OWN_FORMATS


@pytest.mark.parametrize("name", ["arrays", "tables", "images", "values", "text"])
def test_the_readers_are_where_the_parsers_are(name):
    assert parsers_in(ROOT / "src/primal_attention/support/files" / f"{name}.py") or name == "text"
