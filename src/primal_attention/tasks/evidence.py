"""The age of evidence: which code a study stands on, and whether it has changed since.

A study stands on the modules that its own module imports, directly or through others. Each module
has a hash of its statements. Comments, docstrings and imports are left out, and so are the names of
modules, because none of them changes a number: only a changed statement makes a result old.
"""

import ast
import functools
import hashlib
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

__all__ = ["changed_modules", "code_commit", "module_hashes"]

_NO_NUMBERS = (
    "primal_attention.support",
    "primal_attention.report",
    "primal_attention.cli",
    "primal_attention.tasks.evidence",
    "primal_attention.tasks.study",
    "primal_studies.kit.tables",
)
"""Modules that read options and draw pages; what is measured does not depend on them."""

_LENGTH = 12
"""Digits of a hash; the chance that two of a thousand modules agree is below 10⁻⁸."""


def code_commit(folder: Path | None = None) -> str | None:
    """Return the commit of the code, ``"…+"`` if files were changed since; none without git.

    Args:
        folder: A folder of the checkout; by default that of this module.
    """
    folder = folder or Path(__file__).parent
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", "*.py")
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit[:_LENGTH] + ("+" if changed else "")


def _git(folder: Path, *words: str) -> str:
    run = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def module_hashes(module: str) -> dict[str, str]:
    """Return the hash of every module that a module stands on, itself included, by name.

    Example:
        >>> "primal_attention.kernels.series" in module_hashes("primal_attention.kernels.exact")
        True
    """
    found: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found or name.startswith(_NO_NUMBERS):
            continue
        parsed = _read(name)
        if parsed is None:
            continue
        found[name], imports = parsed
        waiting += imports
    return dict(sorted(found.items()))


def changed_modules(recorded: Mapping[str, str], module: str) -> list[str]:
    """Return the modules that a study stands on and whose statements a record does not know.

    Modules are compared by their hashes alone, so a module that only moved has not changed.
    """
    known = set(recorded.values())
    return [name for name, value in module_hashes(module).items() if value not in known]


@functools.cache
def _read(name: str) -> tuple[str, list[str]] | None:
    """Return hash and imported modules of a module of ours; none if there is no such module."""
    path = _path(name)
    if path is None:
        return None
    tree = ast.parse(path.read_text("utf-8"))
    imports = list(dict.fromkeys(_imports(tree, name)))
    return hashlib.sha256(_statements(tree).encode()).hexdigest()[:_LENGTH], imports


def _path(name: str) -> Path | None:
    """Return the file of a module without importing it or its packages."""
    top, *parts = name.split(".")
    root = _root(top)
    if root is None:
        return None
    folder = root.joinpath(*parts)
    for path in (folder / "__init__.py", folder.with_suffix(".py")):
        if path.is_file():
            return path
    return None


@functools.cache
def _root(package: str) -> Path | None:
    spec = find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _imports(tree: ast.Module, name: str) -> Iterator[str]:
    """Yield the modules of ours that a module imports, inside functions and by name too."""
    ours = (name.partition(".")[0], "primal_attention")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith(ours))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(ours):
            module = str(node.module)
            yield from (_owner(module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "import_module":
            for named in (str(a.value) for a in node.args[:1] if isinstance(a, ast.Constant)):
                yield named
                # which of its names is used stands nowhere, so all of them count
                yield from _lazy_names(named).values()


def _owner(module: str, name: str) -> str:
    """Return the module that defines a name which a module or a lazy package gives."""
    inner = f"{module}.{name}"
    if _path(inner) is not None:
        return inner
    return _lazy_names(module).get(name, module)


@functools.cache
def _lazy_names(package: str) -> dict[str, str]:
    """Return where a lazy package finds its names, as its stub says."""
    path = _path(package)
    stub = path.with_suffix(".pyi") if path is not None and path.name == "__init__.py" else None
    if stub is None or not stub.is_file():
        return {}
    nodes = [n for n in ast.parse(stub.read_text("utf-8")).body if isinstance(n, ast.ImportFrom)]
    return {
        alias.name: f"{package}.{node.module}"
        for node in nodes
        if node.module
        for alias in node.names
    }


def _statements(tree: ast.Module) -> str:
    """Return the code of a module without docstrings and imports, formatted in one way."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = list(_kept(body)) or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree)


def _kept(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not is_text and not isinstance(statement, ast.Import | ast.ImportFrom):
            yield statement
