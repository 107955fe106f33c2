"""``primal bench peers``: our layers beside the public packages of the methods.

Nyströmformer beside ``nystrom-attention``, FAVOR+ beside ``performer-pytorch`` (also in causal
order, where that package has no compiled kernel on a CPU) and Linformer beside ``linformer``, at
equal width, heads and landmarks, features or projections. Ours and theirs take turns. A ratio below
one says that ours needs less. The packages are the extra ``peers``.
"""

import contextlib
import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from primal_attention.support.command import needs
from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import columns_table

if TYPE_CHECKING:
    from torch import nn

__all__ = ["PEERS", "PeerCostOptions", "PeerStudy"]

PEERS = {
    "nystromformer": "nystrom-attention",
    "favor": "performer-pytorch",
    "linformer": "linformer",
    "favor, causal": "performer-pytorch",
}
CAUSAL_UP_TO = 4096
"""Tokens up to which the causal package takes part; it forms every outer product."""
_PARTS = ("forward_ms", "step_ms", "peak_mb", "kept_mb")


@dataclass(frozen=True)
class PeerCostOptions:
    """Our layers beside the public packages of the same methods, in turns."""

    lengths: tuple[int, ...] = (512, 1024, 4096, 16384)
    """Sequence lengths."""
    dim: int = 256
    """Model width."""
    num_heads: int = 4
    """Heads."""
    size: int = 128
    """Features and projections; landmarks are half of it."""
    repeats: int = 30
    """Turns."""
    seconds: float = 10.0
    """A layer that has used this time takes no further turn."""
    threads: int = 2
    """Threads of torch; with one thread, processor time is measured."""

    def __post_init__(self) -> None:
        at_least_one(self, "lengths", "dim", "num_heads", "size", "repeats", "threads")


class PeerStudy(Study[PeerCostOptions]):
    """One cell a length and pair."""

    name = "peers"
    Options = PeerCostOptions

    def cells(self, options: PeerCostOptions) -> Sequence[Cell]:
        """Return the cells, short lengths first."""
        common = {key: getattr(options, key) for key in ("dim", "num_heads", "size", "threads")}
        return [
            {"name": name, "n": n, **common}
            for n in sorted(options.lengths)
            for name in PEERS
            if name != "favor, causal" or n <= CAUSAL_UP_TO
        ]

    def run(self, cell: Cell, options: PeerCostOptions, scratch: Path) -> Row:
        """Measure our layer and theirs at one length."""
        import torch

        from primal_studies.kit.timing import layer_costs, machine

        torch.manual_seed(0)
        x = torch.randn(1, cell["n"], cell["dim"], requires_grad=True)
        layers = dict(zip(("ours", "theirs"), _pair(cell), strict=True))
        costs = layer_costs(layers, x, options.repeats, seconds=options.seconds)
        ours, theirs = costs["ours"], costs["theirs"]
        ratios = {f"{part[:-3]}_ratio": round(ours[part] / theirs[part], 2) for part in _PARTS}
        return {"package": PEERS[cell["name"]], **ours, **ratios, "machine": machine()}

    def tables(self, rows: Sequence[Row], options: PeerCostOptions) -> Mapping[str, str | bytes]:
        """Return the ratios, and which of ours is slower."""
        columns = {"ours": "`{name}`", "package": "`{package}`", "tokens": "{n:,}"}
        columns["step, ms"] = "{step_ms:,.1f}"
        for title, part in zip(("forward", "step", "peak memory", "kept"), _PARTS, strict=True):
            columns[title] = f"{{{part[:-3]}_ratio:.2f}}"
        slower = [
            f"{r['name']} at {r['n']:,}"
            for r in rows
            if max(r["forward_ratio"], r["step_ratio"]) > 1
        ]
        first = rows[0]
        caption = (
            f"{first['machine']}; width {first['dim']}, {first['num_heads']} heads, "
            f"{first['size']} features and projections, {first['size'] // 2} landmarks, one "
            "sequence. Our time and memory as multiples of theirs:"
        )
        verdict = f"Slower: {'; '.join(slower)}." if slower else "None of ours is slower."
        return {"table.md": page(caption, columns_table(rows, columns), verdict)}


def _pair(cell: Cell) -> "tuple[nn.Module, nn.Module]":
    """Return our layer and theirs."""
    with needs("studies[peers]", "The comparison"), warnings.catch_warnings():
        # the packages import what torch and Python have deprecated
        warnings.simplefilter("ignore")
        from linformer import LinformerSelfAttention
        from nystrom_attention import NystromAttention
        from performer_pytorch import SelfAttention
    from primal_attention.attention import create_attention
    from primal_studies.peers.layers import CausalLayer

    name, dim, heads, size = (cell[key] for key in ("name", "dim", "num_heads", "size"))
    if name == "nystromformer":
        marks = max(size // 2, 1)
        theirs = NystromAttention(dim, dim_head=dim // heads, heads=heads, num_landmarks=marks)
        return create_attention(name, dim, heads, num_landmarks=marks), theirs
    if name == "linformer":
        # theirs is built for one length
        theirs = LinformerSelfAttention(dim, cell["n"], k=size, heads=heads)
        return create_attention(name, dim, heads, num_projections=size), theirs
    is_causal = name != "favor"
    ours = create_attention("favor", dim, heads, num_features=size)
    # it says on standard output that it has no compiled kernel
    with contextlib.redirect_stdout(io.StringIO()):
        options = {"dim_head": dim // heads, "nb_features": size, "causal": is_causal}
        theirs = SelfAttention(dim, heads=heads, **options)
    return CausalLayer(ours) if is_causal else ours, theirs
