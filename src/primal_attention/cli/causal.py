"""``primal causal``: causal graphs of attention, and tokens that change a decision."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from primal_attention.support.command import UserError, did_you_mean, progress
from primal_attention.support.settings import parse

if TYPE_CHECKING:
    from primal_attention.analysis.registry import AnalysisResult
    from primal_attention.surgery.loading import LoadedModel

__all__ = ["main"]


@dataclass(frozen=True)
class CausalInput:
    """A saved model, a text, and how graphs are learned."""

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of the model and its tokenizer."""
    text: str
    """The text."""
    out: Path | None = None
    """File to write: a page (.html) or all numbers (.json)."""
    layer: str = "-1"
    """Attention layer: a number in the order of the forward, or a name."""
    head: str = "all"
    """Heads: all, or numbers such as 3 or 0,5."""
    alpha: float = 0.01
    """Level of the tests of independence; with --m it sets their threshold."""
    m: str | None = None
    """Effective number of samples; by default the width of a head. hidden is that of the model."""
    tau: float | None = None
    """Threshold of partial correlations, instead of --alpha and --m."""
    algorithm: Literal["auto", "icd", "ordered-icd", "fci", "pc"] = "auto"
    """How graphs are learned; auto is ordered-icd for causal attention, else icd."""
    nodes: int | None = None
    """Largest number of words in a graph; by default 32, and all with much attention."""
    threads: int = 1
    """Threads of torch."""

    def __post_init__(self) -> None:
        if self.out is not None and self.out.suffix not in (".html", ".json"):
            raise ValueError(f"--out must end in .html or .json, got {self.out}.")
        if self.m is not None and self.m != "hidden" and not self.m.isdigit():
            raise ValueError(f"--m must be a number or hidden, got {self.m!r}.")
        if self.head != "all" and not all(part.isdigit() for part in self.head.split(",")):
            raise ValueError(f"--head must be all, or numbers such as 3 or 0,5, got {self.head!r}.")
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, got {self.threads}.")

    def graph_options(self) -> dict[str, Any]:
        """Return the options of graphs, as the library takes them."""
        return {
            "heads": None if self.head == "all" else [int(i) for i in self.head.split(",")],
            "alpha": self.alpha,
            "m": int(self.m) if self.m is not None and self.m != "hidden" else self.m,
            "tau": self.tau,
            "algorithm": self.algorithm,
            "nodes": "auto" if self.nodes is None else self.nodes,
        }

    @property
    def layer_key(self) -> int | str:
        """The layer, as the library takes it."""
        return int(self.layer) if self.layer.lstrip("-").isdigit() else self.layer


@dataclass(frozen=True)
class CausalGraphCommand(CausalInput):
    """Draw the causal graph of each head around one token. No decision is explained."""

    target: str | None = None
    """Token in the middle: a position, a word, or mean; by default the last token of causal
    attention, else the first."""


@dataclass(frozen=True)
class CausalExplainCommand(CausalInput):
    """Find the smallest sets of words without which the model decides otherwise."""

    removal: Literal["auto", "mask", "pad", "drop", "attend", "zero", "resample"] = "auto"
    """How words are removed; auto is mask if the tokenizer has a mask token, else attend."""
    search: Literal["subset", "radius"] = "subset"
    """All connected sets by size, or everything within a radius: few runs, large sets."""
    radius: int = 3
    """Largest distance from the decision in a graph."""
    max_size: int = 3
    """Largest set."""
    max_evals: int = 2000
    """Largest number of runs of the model."""
    compare: bool = False
    """Also run the baselines: attention with the best head, gradients, exhaustive and others."""


def main(argv: list[str]) -> int:
    """Run ``graph`` or ``explain``."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_HELP)
        return 0
    action, rest = argv[0], argv[1:]
    if action not in _ACTIONS:
        raise UserError(
            f"there is no action {action!r}.{did_you_mean(action, _ACTIONS)} "
            f"Actions: {', '.join(_ACTIONS)}."
        )
    options: Any = parse(_ACTIONS[action], rest, prog=f"primal causal {action}")

    from primal_attention.cli.inputs import one_sentence
    from primal_attention.support.output import markdown_table, write_atomically

    loaded = _load(options)
    progress(f"reading layer {options.layer}")
    with one_sentence():
        run: Any = _explain if action == "explain" else _graph
        result = run(options, loaded)
        if options.out is not None and options.out.suffix == ".html":
            result.to_html(options.out)
    header, rows = result.table()
    print(result.verdict())
    if rows:
        print(f"\n{markdown_table(header, rows)}")
    if getattr(result, "comparison", ()):
        print(f"\n{markdown_table(*result.comparison_table())}")
    print(f"\n{result.limits()}")
    if options.out is not None:
        if options.out.suffix == ".json":
            write_atomically(options.out, result.to_json())
        print(f"Wrote {options.out}")
    return 0


def _load(options: CausalInput) -> "LoadedModel":
    import torch

    from primal_attention.cli.inputs import one_sentence
    from primal_attention.hosts.optional import quiet_transformers
    from primal_attention.surgery.loading import load_any

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    with one_sentence():
        quiet_transformers()
        progress(f"loading {options.model}")
        loaded = load_any(options.model)
    if loaded.tokenizer is None:
        raise UserError(f"{options.model} has no tokenizer, so a text cannot be read.")
    return loaded


def _explain(options: CausalExplainCommand, loaded: "LoadedModel") -> Any:
    from primal_attention.analysis.causes import explain

    return explain(
        loaded.model,
        loaded.tokenizer,
        options.text,
        layer=options.layer_key,
        removal=options.removal,
        search=options.search,
        radius=options.radius,
        max_size=options.max_size,
        max_evals=options.max_evals,
        compare=options.compare,
        **options.graph_options(),
    )


def _graph(options: CausalGraphCommand, loaded: "LoadedModel") -> "AnalysisResult":
    import inspect

    from primal_attention.analysis.causes.analysis import graphs_around
    from primal_attention.analysis.causes.text import encode

    takes = inspect.signature(loaded.model.forward).parameters
    encoded = encode(loaded.tokenizer, options.text, loaded.model)
    target = options.target
    return graphs_around(
        loaded.model,
        {name: value for name, value in encoded.items() if name in takes},
        tokenizer=loaded.tokenizer,
        target=int(target) if target is not None and target.lstrip("-").isdigit() else target,
        layer=options.layer_key,
        **options.graph_options(),
    )


_ACTIONS = {"graph": CausalGraphCommand, "explain": CausalExplainCommand}

_HELP = """usage: primal causal ACTION MODEL --text "…" [OPTIONS]

actions:
  graph    causal graph of each head around one token, read from attention
  explain  smallest sets of words without which the model decides otherwise

examples:
  primal causal explain my-classifier --text "A dull plot, but great fun." --out why.html
  primal causal explain my-classifier --text "A dull plot." --compare --removal drop
  primal causal graph my-encoder --text "The blue whale is large." --target whale --out graph.html

primal causal ACTION --help shows its options.
primal analyze MODEL causes explains several inputs of one file."""
