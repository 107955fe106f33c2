"""``primal info``: versions and what is installed, without waiting for torch."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from primal_attention.support.command import user_errors
from primal_attention.support.settings import parse

__all__ = ["main"]


@dataclass(frozen=True)
class Info:
    """Show versions, the machine, and which optional parts are installed."""

    update: Path | None = None
    """Rewrite the tables of attentions in this page: what the registry has, and what was measured,
    from ../results/family beside the page."""


def main(argv: list[str]) -> int:
    """Print what there is, or renew a table."""
    options = parse(Info, argv, prog="primal info")
    if options.update is not None:
        from primal_attention.cli.attentions import update_page

        with user_errors(str(options.update)):
            update_page(options.update)
        print(f"Renewed the tables of attentions in {options.update}.")
        return 0
    rows = {
        "primal-attention": version("primal-attention"),
        "torch": _version("torch"),
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count()),
        "data": os.environ.get("PRIMAL_DATA", "PRIMAL_DATA is not set"),
    }
    for name, value in rows.items():
        print(f"{name:<18}{value}")
    print("\nextras")
    for extra, packages in _extras().items():
        found = {name: _version(name) for name in packages}
        missing = [name for name, number in found.items() if number == "missing"]
        state = f"missing {', '.join(missing)}" if missing else "installed"
        print(f"  {extra:<16}{state}")
    print("\nprimal list shows recipes and attentions.")
    return 0


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _extras() -> dict[str, list[str]]:
    """Return the packages of every extra of the installed distribution."""
    import re

    found: dict[str, list[str]] = {}
    for line in requires("primal-attention") or []:
        package, _, marker = line.partition(";")
        extra = re.search(r"extra == ['\"]([^'\"]+)", marker)
        if extra and extra[1] not in ("dev", "docs", "peers"):
            name = re.match(r"[A-Za-z0-9._-]+", package.strip())
            found.setdefault(extra[1], []).append(name[0] if name else package)
    return found
