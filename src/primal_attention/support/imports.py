"""Act when another package is imported, without importing it."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

__all__ = ["when_imported"]


def when_imported(name: str, action: Callable[[], object]) -> None:
    """Call ``action`` once, right after the module ``name`` was imported; now if it already was.

    A package that cannot be registered with, because it has no entry points, is extended this way
    without the time and the dependencies of its import.

    Args:
        name: Full name of the module.
        action: Its errors are those of the import.

    Example:
        >>> when_imported("json", lambda: print("imported"))
        imported
    """
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _ImportWatch(name, action))


class _ImportWatch(MetaPathFinder):
    """Finds one module as Python itself does, and appends an action to its import."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self.name = name
        self.action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            # only now: an import that failed may be tried again
            sys.meta_path.remove(self)
            self.action()

        # an attribute of this one loader, which keeps all that tools read from loaders
        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec
