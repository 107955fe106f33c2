"""``primal bench family``: time, memory and error of every registered attention.

All attentions take turns at each length. The error compares the output with that of the exact
kernel that an attention approximates. ``choice.md`` is the table of the guide *Choosing*.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primal_attention.support.settings import at_least_one
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.core.family_table import MIDDLE, choice_table, family_page, family_picture

__all__ = ["BUDGETS", "FamilyOptions", "FamilyStudy"]

BUDGETS: dict[str, tuple[str, tuple[int, ...]]] = {
    "favor": ("num_features", (32, 128, 512)),
    "kernelized": ("num_features", (16, 32, 128)),
    "kernelized-log": ("num_features", (8, 32)),
    "linformer": ("num_projections", (32, 128, 512)),
    "nystromformer": ("num_landmarks", (16, 64, 256)),
    "schoenbat": ("num_features", (128, 256, 512)),
    "skyformer": ("num_landmarks", (32, 128, 512)),
    "skyformer-learned": ("num_landmarks", (32, 128, 512)),
}
"""The option that trades time for accuracy, and its values in the picture."""
EXPLICIT_UP_TO = 4096
"""Tokens up to which a layer that forms its matrix takes part."""


@dataclass(frozen=True)
class FamilyOptions:
    """Time, memory and error of every registered attention."""

    lengths: tuple[int, ...] = (128, 512, 1024, 2048, 4096, 8192, 16384, 65536)
    """Sequence lengths."""
    names: tuple[str, ...] = ()
    """Attentions; all registered ones and the floor by default."""
    dim: int = 256
    """Model width."""
    num_heads: int = 4
    """Heads."""
    quadratic_up_to: int = 16384
    """Tokens up to which attentions of quadratic cost take part."""
    repeats: int = 5
    """Turns."""
    seconds: float = 2.0
    """An attention that has used this time takes no further turn."""
    seed: int = 0
    """Seed of parameters and tokens."""
    threads: int = 2
    """Threads of torch; with one thread, processor time is measured."""

    def __post_init__(self) -> None:
        at_least_one(self, "lengths", "dim", "num_heads", "repeats", "threads")


class FamilyStudy(Study[FamilyOptions]):
    """One cell a length."""

    name = "family"
    Options = FamilyOptions

    def cells(self, options: FamilyOptions) -> Sequence[Cell]:
        """Return the cells, short lengths first; a rival is a name and at most one option."""
        from primal_attention.attention import attention_entry, list_attentions

        names = options.names or ("floor", *list_attentions())
        costs = {name: attention_entry(name).cost for name in names if name != "floor"}
        limits = {a: options.quadratic_up_to for a, cost in costs.items() if "²" in cost}
        limits["softmax-explicit"] = EXPLICIT_UP_TO
        cells = []
        for n in sorted(options.lengths):
            rivals = [[name, ""] for name in names if n <= limits.get(name, n)]
            for name in names if n == MIDDLE else ():
                option, sizes = BUDGETS.get(name, ("", ()))
                rivals += [[name, f"{option}={size}"] for size in sizes]
            shape = {"dim": options.dim, "num_heads": options.num_heads, "n": n}
            cells.append(
                {"rivals": rivals, **shape, "seed": options.seed, "threads": options.threads}
            )
        return cells

    def run(self, cell: Cell, options: FamilyOptions, scratch: Path) -> Sequence[Row]:
        """Measure all rivals at one length."""
        import torch

        from primal_attention.support.allocator import return_memory
        from primal_studies.core.exact import output_error, tokens
        from primal_studies.kit.timing import layer_costs, machine
        from primal_studies.peers.layers import build_rival

        return_memory()  # shorter lengths leave fragmented memory
        layers = {}
        for name, option in cell["rivals"]:
            torch.manual_seed(cell["seed"])
            key, _, value = option.partition("=")
            options_of: dict[str, Any] = {key: int(value)} if key else {}
            layers[name, option] = build_rival(name, cell["dim"], cell["num_heads"], **options_of)
        x = tokens(cell["n"], cell["dim"], cell["seed"]).requires_grad_()
        costs = layer_costs(layers, x, options.repeats, seconds=options.seconds)
        rows = []
        for (name, option), layer in layers.items():
            error, average = output_error(layer, x.detach())
            rows.append(
                {
                    "name": name,
                    "option": option,
                    **costs[name, option],
                    "error": float(f"{error:.3g}"),
                    "average": float(f"{average:.3g}"),
                    "machine": machine(),
                }
            )
        return rows

    def tables(self, rows: Sequence[Row], options: FamilyOptions) -> Mapping[str, str | bytes]:
        """Return the tables of times, growth and errors, and a picture."""
        return {
            "table.md": family_page(rows),
            "choice.md": choice_table(rows),
            "picture.png": family_picture(rows),
        }
