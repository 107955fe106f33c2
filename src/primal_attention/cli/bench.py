"""``primal bench``: the benchmarks, by name."""

from importlib import import_module

from primal_attention.bench.allocator import keep_memory
from primal_attention.cli.recipes import to_yaml
from primal_attention.command import UserError, did_you_mean, parse
from primal_attention.output import write_atomically

__all__ = ["main"]

_SUITES = {
    "layers": "time and memory of the attentions over length; the default",
    "family": "every registered attention: time, memory and error",
    "peers": "ours beside the public packages of the same methods",
    "longrange": "training steps of whole models on the shapes of the LRA",
    "instability": "how far outputs move when parameters move",
    "approximation": "error of random features in attention",
    "ksvd": "solvers of the asymmetric kernel SVD",
    "nystrom": "error of landmark attentions",
    "toeplitz": "error of sums weighted by distance",
}
"""Modules of the package ``bench``, each with a ``Plan``, which its ``main`` carries out."""


def main(argv: list[str]) -> int:
    """Run a suite, ``layers`` unless one is named, with the rest of the arguments."""
    if argv[:1] in (["--help"], ["-h"]):
        print("usage: primal bench [SUITE] [OPTIONS]\n\nsuites:")
        for name, what in _SUITES.items():
            print(f"  {name:<14} {what}")
        print("\nprimal bench SUITE --help tells the options of a suite.")
        return 0
    named = bool(argv) and not argv[0].startswith("-")
    suite = argv[0] if named else "layers"
    if suite not in _SUITES:
        raise UserError(
            f"there is no benchmark {suite!r}.{did_you_mean(suite, _SUITES)} "
            f"Benchmarks: {', '.join(_SUITES)}."
        )
    keep_memory()
    module = import_module(f"primal_attention.bench.{suite}")
    plan = parse(module.Plan, argv[named:], prog=f"primal bench {suite}")
    print(to_yaml(plan), flush=True)
    write_atomically(plan.out / f"{suite}.config.yaml", to_yaml(plan))
    module.main(plan)
    return 0
