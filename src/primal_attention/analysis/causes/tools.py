"""``primal analyze causes``: causal graphs of attention matrices that no model stands behind."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from primal_attention.analysis.options import GraphOptions
from primal_attention.analysis.registry import check_file
from primal_attention.support.output import markdown_table

__all__ = ["CausesGraphTool"]


@dataclass(frozen=True)
class CausesGraphTool(GraphOptions):
    """Print the causal graph of each attention matrix in a file.

    Matrices alone do not say how wide a head is, so --m or --tau is needed.
    """

    file: Annotated[Path, tyro.conf.Positional]
    """Attention of one sequence (.npy) [tokens, tokens] or [heads, tokens, tokens]."""
    tokens: tuple[str, ...] = ()
    """Names of the tokens; by default their numbers."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Write the graphs to this file as well: a page (.html), numbers (.json) or picture (.png)."""

    def run(self) -> None:
        """Print finding, heads and edges; write the file."""
        from primal_attention.analysis.causes import causal_graph
        from primal_attention.support.files import read_array

        if self.out is not None:
            check_file(self.out)
        found = causal_graph(
            read_array(self.file),
            tokens=self.tokens or None,
            target=self.target,
            **self.graph_options(),
        )
        print(f"{found.verdict()}\n\n{markdown_table(*found.table())}\n")
        for text, share in found.edges(0.0):
            print(f"{text}  {100 * share:.0f} % of heads")
        print(f"\n{found.limits()}")
        if self.out is not None:
            found.write(self.out)
            print(f"Wrote {self.out}")
