"""One owner for each public name: no two modules define names that mean different things."""

import ast
from collections import defaultdict
from pathlib import Path

import primal_attention

ROOT = Path(primal_attention.__file__).parent


def public_names(path: Path) -> set[str]:
    """Return the names of ``__all__`` that a module defines itself instead of importing them."""
    defined: set[str] = set()
    public: list[str] = []
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {target.id for target in targets if isinstance(target, ast.Name)}
            defined |= names
            if "__all__" in names and node.value is not None:
                public = ast.literal_eval(node.value)
    return defined & set(public)


def test_no_public_name_is_defined_twice():
    owners = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        where = path.relative_to(ROOT)
        # readable formulas are named like the fast functions that they check, commands all "main"
        if path.stem.startswith("naive") or where.parts[0] == "cli":
            continue
        for name in public_names(path) - {"main"}:
            owners[name].append(str(where))
    assert len(owners) > 1000
    assert {name: found for name, found in owners.items() if len(found) > 1} == {}
