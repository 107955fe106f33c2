"""No module of the library reads or writes a format that can run code, or hides missing weights."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src"
PICKLERS = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}


def unsafe(source: str) -> Iterator[str]:
    """Return what a module does that it must not."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.partition(".")[0] in PICKLERS)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PICKLERS:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            words = {k.arg: k.value for k in node.keywords}
            if name in ("torch.load", "torch.save", "eval", "exec", "yaml.unsafe_load"):
                yield name
            if name.endswith("load_file"):
                yield f"{name}, which maps the file instead of checking its bytes"
            if name.endswith("load_state_dict") and not _is(words.get("strict", True), True):
                yield f"{name}(strict=…)"
            if name in ("np.load", "numpy.load") and not _is(words.get("allow_pickle"), False):
                yield f"{name} without allow_pickle=False"
            if not _is(words.get("trust_remote_code", False), False):
                yield f"{name}(trust_remote_code=…)"


def _is(found: ast.expr | bool | None, value: bool) -> bool:
    return (found.value if isinstance(found, ast.Constant) else found) is value


def test_unsafe_calls_are_recognised() -> None:
    lines = ["import pickle", "from joblib import load", "torch.load(f)", "np.load(f)", "eval('1')"]
    lines += ["m.load_state_dict(w, strict=False)", "from_pretrained(f, trust_remote_code=True)"]
    for line in (*lines, "safetensors.torch.load_file(f)"):
        assert list(unsafe(line)), line
    assert not list(unsafe("m.load_state_dict(w); np.load(f, allow_pickle=False); json.load(f)"))


def test_nothing_is_unpickled_run_or_loaded_in_part() -> None:
    found = {
        f"{path.relative_to(SOURCE)}: {what}"
        for path in SOURCE.rglob("*.py")
        for what in unsafe(path.read_text("utf-8"))
    }
    assert not found
