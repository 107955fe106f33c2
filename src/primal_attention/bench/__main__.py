"""``python -m primal_attention.bench``: time and memory of attention layers, with a verdict.

``python -m primal_attention.bench family`` measures every registered attention with its error, and
``python -m primal_attention.bench peers`` compares with the public packages.
"""

import argparse
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from primal_attention.bench.allocator import keep_memory
from primal_attention.bench.options import checked, names, numbers, positive, shapes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m primal_attention.bench", description=__doc__)
    parser.add_argument("--n", type=numbers, help="lengths, e.g. 128,4096,65536")
    parser.add_argument("--shapes", type=shapes, help="heads x head width, e.g. 2x32,8x64")
    parser.add_argument("--names", type=names, help="contestants")
    parser.add_argument("--rank", type=positive, help="directions of primal layers")
    parser.add_argument("--batch", type=positive, help="sequences per batch")
    parser.add_argument("--repeats", type=positive, help="timed repeats")
    parser.add_argument("--budget", type=float, help="seconds a single measurement may take")
    parser.add_argument("--compiled", action="store_true", help="measure torch.compile instead")
    parser.add_argument("--threads", type=positive, default=2, help="torch threads")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"), help="where to save")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the sweep, print tables and claims, save CSV, JSON and PNG."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] in (["family"], ["peers"]):
        keep_memory()
        return int(import_module(f"primal_attention.bench.{argv[0]}").main(argv[1:]))
    parser = _parser()
    options = vars(parser.parse_args(argv))
    threads, out = options.pop("threads"), options.pop("out")
    keep_memory()

    import torch

    from primal_attention.bench.claims import check_claims, check_decoding
    from primal_attention.bench.layers import Sweep, decoding_rows, run_sweep, summarize
    from primal_attention.bench.plot import plot_sweep
    from primal_attention.output import hardware, markdown_table, to_csv, write_atomically

    torch.set_num_threads(threads)
    options["lengths"] = options.pop("n")
    sweep = checked(parser, lambda: Sweep(**{k: v for k, v in options.items() if v is not None}))
    checked(parser, lambda: out.mkdir(parents=True, exist_ok=True))

    def progress(line: str) -> None:
        print(f"  … {line}", file=sys.stderr, flush=True)

    rows = list(run_sweep(sweep, progress))
    facts = {**hardware(), "batch": sweep.batch, "rank": sweep.rank, "seed": sweep.seed}
    parts = [", ".join(f"{key}: {value}" for key, value in facts.items()), *summarize(rows)]
    stem = "compiled" if sweep.compiled else "layers"
    if not sweep.compiled:
        progress("decoding")
        stateful = [n for n in sweep.names if n not in ("floor", "primal-textbook")]
        steps = decoding_rows((64, max(sweep.lengths)), sweep.shapes[-1], sweep.rank, stateful)
        parts.append("One decoding step after prefixes of two lengths:")
        parts.append(markdown_table(list(steps[0]), [list(row.values()) for row in steps]))
        verdict = {True: "yes", False: "**no**", None: "not measured"}
        claims = [*check_claims(rows), *check_decoding(steps)]
        table = [[c.promise, c.measured, verdict[c.holds]] for c in claims]
        parts.append("What was promised, as ratios of step times or bytes within this run:")
        parts.append(markdown_table(["promise", "measured", "holds"], table))
    report = "\n\n".join(parts) + "\n"
    print(report)
    write_atomically(out / f"{stem}.md", report)
    write_atomically(out / f"{stem}.csv", to_csv([asdict(r) for r in rows]))
    write_atomically(out / f"{stem}.png", plot_sweep(rows))
    print(f"Saved {stem}.md, {stem}.csv and {stem}.png in {out}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
