"""``primal bench layers``: time and memory of attention layers, and a verdict on our promises.

All layers of one shape and length take turns in one process. The *floor* is the query, key and
output projections alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.core.overview import overview_picture
from primal_studies.core.promises import check_decoding, check_promises
from primal_studies.kit.tables import (
    Column,
    Files,
    columns_table,
    group_lines,
    grouped,
    pivot,
    plot_lines,
)

if TYPE_CHECKING:
    from primal_attention.attention import Attention, State

__all__ = ["LayerOptions", "LayerStudy"]


@dataclass(frozen=True)
class LayerOptions:
    """Time and memory of the attentions over length, beside the projections alone."""

    lengths: tuple[int, ...] = (128, 512, 1024, 2048, 4096, 16384, 65536)
    """Sequence lengths."""
    shapes: tuple[tuple[int, int], ...] = ((2, 32), (8, 32), (8, 64))
    """Heads and their width, in turns: 2 32 8 64."""
    names: tuple[str, ...] = (
        "floor",
        "primal-default",
        "primal",
        "primal-naive",
        "primal-dual",
        "linear",
        "softmax",
    )
    """Layers: names of the registry, floor, primal-default or primal-naive."""
    ranks: tuple[int, ...] = (20,)
    """Directions of the primal layers, except of primal-default, which has its default rank."""
    batch: int = 4
    """Sequences per batch."""
    quadratic_up_to: int = 16384
    """Tokens up to which attentions of quadratic cost take part."""
    repeats: int = 31
    """Turns."""
    seconds: float = 12.0
    """A layer that has used this time takes no further turn."""
    compiled: bool = False
    """Measure torch.compile(dynamic=True) instead of eager; memory is not counted then."""
    causal: bool = False
    """Measure causal attention."""
    seed: int = 0
    """Seed of parameters and inputs."""
    threads: int = 2
    """Threads of torch; with one thread, processor time is measured."""

    def __post_init__(self) -> None:
        at_least_one(self, "lengths", "shapes", "ranks", "batch", "repeats", "threads")


class LayerStudy(Study[LayerOptions]):
    """One cell a shape, rank and length, and one for decoding."""

    name = "layers"
    Options = LayerOptions

    def cells(self, options: LayerOptions) -> Sequence[Cell]:
        """Return the cells, short lengths first."""
        from primal_attention.attention import attention_entry
        from primal_studies.peers.layers import EXTRA

        registered = [name for name in options.names if name not in EXTRA]
        quadratic = {name for name in registered if "²" in attention_entry(name).cost}
        common = {"compiled": options.compiled, "seed": options.seed, "threads": options.threads}
        common |= {"causal": True} if options.causal else {}
        cells: list[Cell] = []
        for heads, head_dim in options.shapes:
            shape = {"heads": heads, "head_dim": head_dim}
            for rank in options.ranks:
                for n in sorted(options.lengths):
                    is_long = n > options.quadratic_up_to
                    names = [a for a in options.names if not (is_long and a in quadratic)]
                    if options.causal:
                        names = [a for a in names if a != "primal-naive"]  # it has no order
                    size = {"rank": rank, "batch": options.batch, "n": n}
                    cells.append({"names": names, **shape, **size, **common})
        positions = [64, max(options.lengths)]
        decodes = not options.compiled and not options.causal
        if decodes and registered and len(options.ranks) == 1:
            prefix = {"rank": options.ranks[0], "positions": positions}
            cells.append({"names": registered, **shape, **prefix, **common})
        return cells

    def run(self, cell: Cell, options: LayerOptions, scratch: Path) -> Sequence[Row]:
        """Measure all layers at one length, or one decoding step of each."""
        from primal_attention.support.allocator import return_memory
        from primal_studies.kit.timing import machine

        return_memory()
        found = _decoding(cell) if "positions" in cell else _costs(cell, options)
        return [{**row, "machine": machine()} for row in found]

    def tables(self, rows: Sequence[Row], options: LayerOptions) -> Mapping[str, str | bytes]:
        """Return times as multiples of the floor, memory, decoding, and our promises."""
        lengths = [row for row in rows if "positions" not in row]
        steps = [row for row in rows if "positions" in row]
        first = rows[0]
        facts = {"batch": first.get("batch"), "rank": first["rank"], "seed": first["seed"]}
        if len({row["rank"] for row in rows}) > 1:
            del facts["rank"]
        settings = ", ".join(f"{key} {value}" for key, value in facts.items())
        mode = ", torch.compile(dynamic=True)" if first["compiled"] else ""
        mode += ", causal" if first.get("causal") else ""
        parts = [f"{first['machine']}; {settings}{mode}.", *_cost_tables(lengths)]
        claims = []
        if not first["compiled"] and not first.get("causal") and "rank" in facts:
            claims = check_promises(lengths)
        if steps:
            shown = ("name", "position", "step_us", "state_numbers")
            parts.append("One decoding step after prefixes of two lengths:")
            parts.append(columns_table(steps, {name: f"{{{name}}}" for name in shown}))
            claims += check_decoding(steps)
        if claims:
            verdict = {True: "yes", False: "**no**", None: "not measured"}
            columns: dict[str, Column] = {
                "promise": lambda claim: claim.promise,
                "measured": lambda claim: claim.measured,
                "holds": lambda claim: verdict[claim.holds],
            }
            parts.append("What was promised, as ratios of step times or bytes within this run:")
            parts.append(columns_table(claims, columns))
        files: Files = {"table.md": page(*parts)}
        if "rank" in facts and lengths:
            files["picture.png"] = _picture(lengths)
            if {"primal", "softmax"} <= {row["name"] for row in lengths} and not mode:
                files["overview.png"] = overview_picture(lengths)
        return files


def _costs(cell: Cell, options: LayerOptions) -> list[dict[str, Any]]:
    import torch

    from primal_studies.kit.timing import layer_costs
    from primal_studies.peers.layers import build_rival

    torch.manual_seed(cell["seed"])
    heads, dim = cell["heads"], cell["heads"] * cell["head_dim"]
    layers = {}
    for name in cell["names"]:
        extra = {"rank": cell["rank"]} if name.startswith("primal") else {}
        layers[name] = build_rival(name, dim, heads, is_causal=cell.get("causal", False), **extra)
    if cell["compiled"]:
        # layers share their forward; past the default of 8 variants the rest would run eagerly
        torch._dynamo.config.recompile_limit = 16 * len(layers)
        for layer in layers.values():
            layer.compile(dynamic=True)
    x = torch.randn(cell["batch"], cell["n"], dim, requires_grad=True)
    found = layer_costs(
        layers,
        x,
        options.repeats,
        seconds=options.seconds,
        counts_memory=not cell["compiled"],
    )
    return [{"name": name, **costs} for name, costs in found.items()]


def _decoding(cell: Cell) -> list[dict[str, Any]]:
    """Return time and state size of one decoding step after prefixes of the given lengths."""
    import torch

    from primal_attention.attention import create_attention
    from primal_studies.kit.timing import take_turns

    heads, dim = cell["heads"], cell["heads"] * cell["head_dim"]
    rows = []
    for name in cell["names"]:
        torch.manual_seed(cell["seed"])
        extra = {"rank": cell["rank"]} if name.startswith("primal") else {}
        layer = create_attention(name, dim, heads, **extra).eval()
        token = torch.randn(1, 1, dim)
        with torch.no_grad():
            states = {position: _decoded(layer, position) for position in cell["positions"]}
            runs = {p: partial(layer.step, token, state) for p, state in states.items()}
            times = take_turns(runs, 200)
        for position, state in states.items():
            taken = round(median(times[position]) * 1e6, 1)
            row = {"name": name, "position": position, "step_us": taken}
            rows.append({**row, "state_numbers": state.numel})
    return rows


def _decoded(layer: "Attention", position: int) -> "State":
    """Return the state after that many tokens."""
    import torch

    state = layer.init_state(1)
    for start in range(0, position, 4096):
        prompt = torch.randn(1, min(4096, position - start), layer.dim)
        _, state = layer.step(prompt, state)
    return state


_FIELDS = {
    "step_ms": "forward and backward with the KSVD term, ms and multiples of the floor",
    "forward_ms": "forward alone, ms and multiples of the floor",
    "kept_mb": "MiB kept for backward",
    "peak_mb": "MiB at the peak of a step",
}


def _cost_tables(rows: Sequence[Row]) -> list[str]:
    """Return headed tables of each shape: times as multiples of the floor, and memory."""
    parts = []
    many = len({row["rank"] for row in rows}) > 1
    # smallest shape first, whichever of several runs was the last
    by_shape = sorted(grouped(rows, "heads", "head_dim").items())
    for (heads, head_dim), mine in by_shape:
        lines = {"rank": "rank"} if many else {}
        for field, title in _FIELDS.items():
            known = [row for row in mine if row.get(field)]
            if known:
                table = pivot(
                    [{**row, "tokens": f"{row['n']:,}"} for row in known],
                    lines | {"tokens": "tokens"},
                    "name",
                    _multiple(mine, field),
                    title="{}",
                    values=dict.fromkeys(row["name"] for row in known),
                )
                parts += [f"{heads} heads of {head_dim}: {title}", table]
    return parts


def _multiple(rows: Sequence[Row], field: str) -> Callable[[Row], str]:
    """Return a cell of a table: a number, and if it is a time, as a multiple of the floor."""
    # rows of the wanted cells come first and count
    floors = {
        (row["rank"], row["n"]): row[field] for row in reversed(rows)
        if row["name"] == "floor" and row.get(field) and field.endswith("ms")
    }  # fmt: skip

    def cell(row: Row) -> str:
        floor = floors.get((row["rank"], row["n"]))
        return f"{row[field]:,.1f}" + (f" ({row[field] / floor:.2f})" if floor else "")

    return cell


def _picture(rows: Sequence[Row]) -> bytes:
    shapes = sorted({(r["heads"], r["head_dim"]) for r in rows})
    shown = {"step_ms": "forward + backward, ms", "kept_mb": "kept for backward, MiB"}
    shown = {field: title for field, title in shown.items() if any(r.get(field) for r in rows)}
    panels = group_lines(
        (
            f"{shape[0]} heads of {shape[1]}" + (", memory" if field == "kept_mb" else ""),
            row["name"],
            row["n"],
            row.get(field) or 0.0,
        )
        for field in shown
        for shape in shapes
        for row in rows
        if (row["heads"], row["head_dim"]) == shape
    )
    return plot_lines(
        panels,
        xlabel="tokens",
        ylabels=list(shown.values()),
        columns=len(shapes),
        dashed=["floor"],
    )
