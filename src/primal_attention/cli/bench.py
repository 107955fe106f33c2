"""``primal bench``: the benchmarks, by name."""

from importlib import import_module

from primal_attention.cli.mistakes import UserError, did_you_mean

__all__ = ["main"]

_SUITES = {
    "layers": ("__main__", "time and memory of the attentions over length; the default"),
    "family": ("family", "every registered attention: time, memory and error"),
    "peers": ("peers", "ours beside the public packages of the same methods"),
    "longrange": ("longrange", "training steps of whole models on the shapes of the LRA"),
    "instability": ("instability", "how far outputs move when parameters move"),
    "approximation": ("approximation", "error of random features in attention"),
    "ksvd": ("ksvd", "solvers of the asymmetric kernel SVD"),
    "nystrom": ("nystrom_error", "error of landmark attentions"),
    "toeplitz": ("toeplitz_error", "error of sums weighted by distance"),
}


def main(argv: list[str]) -> int:
    """Run a suite, ``layers`` unless one is named, with the rest of the arguments."""
    if argv[:1] in (["--help"], ["-h"]):
        print("usage: primal bench [SUITE] [OPTIONS]\n\nsuites:")
        for name, (_, what) in _SUITES.items():
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
    module = import_module(f"primal_attention.bench.{_SUITES[suite][0]}")
    return int(module.main(argv[named:]))
