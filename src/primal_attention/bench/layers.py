"""``primal bench layers``: time and memory of attention layers, with a verdict on our promises."""

from dataclasses import asdict, dataclass
from pathlib import Path

from primal_attention.command import progress
from primal_attention.output import hardware, markdown_table, to_csv, write_atomically
from primal_attention.settings import at_least_one

__all__ = ["Plan", "main"]


@dataclass(frozen=True)
class Plan:
    """Time and memory of the attentions over length, beside the projections alone."""

    lengths: tuple[int, ...] = (128, 512, 1024, 2048, 4096, 16384, 65536)
    """Sequence lengths."""
    shapes: tuple[tuple[int, int], ...] = ((2, 32), (8, 64))
    """Heads and their width, in turns: 2 32 8 64."""
    names: tuple[str, ...] = (
        "floor",
        "primal",
        "primal-textbook",
        "primal-dual",
        "linear",
        "softmax",
    )
    """Contestants: names of the registry, floor or primal-textbook."""
    rank: int = 20
    """Directions of the primal layers."""
    batch: int = 4
    """Sequences per batch."""
    repeats: int = 31
    """Timed repeats; fewer, but three of a brief step, where they exceed a tenth of the budget."""
    budget: float = 120.0
    """Seconds a step may take; a contestant that could need more is left out."""
    compiled: bool = False
    """Measure torch.compile(dynamic=True) instead of eager."""
    seed: int = 0
    """Seed of parameters and inputs."""
    threads: int = 2
    """Threads of torch."""
    out: Path = Path("outputs/bench")
    """Folder of the results."""

    def __post_init__(self) -> None:
        from primal_attention.attention import attention_entry

        at_least_one(self, "lengths", "shapes", "rank", "batch", "repeats", "threads")
        for name in self.names:
            if name not in ("floor", "primal-textbook"):
                attention_entry(name)


def main(plan: Plan) -> None:
    """Run the sweep, print tables and claims, save CSV, Markdown and PNG."""
    import torch

    from primal_attention.bench.claims import check_claims, check_decoding
    from primal_attention.bench.layer_rows import decoding_rows, run_sweep, summarize
    from primal_attention.bench.plot import plot_sweep

    torch.set_num_threads(plan.threads)
    rows = list(run_sweep(plan, progress))
    facts = {**hardware(), "batch": plan.batch, "rank": plan.rank, "seed": plan.seed}
    parts = [", ".join(f"{key}: {value}" for key, value in facts.items()), *summarize(rows)]
    stem = "compiled" if plan.compiled else "layers"
    if not plan.compiled:
        progress("decoding")
        stateful = [n for n in plan.names if n not in ("floor", "primal-textbook")]
        steps = decoding_rows((64, max(plan.lengths)), plan.shapes[-1], plan.rank, stateful)
        parts.append("One decoding step after prefixes of two lengths:")
        parts.append(markdown_table(list(steps[0]), [list(row.values()) for row in steps]))
        verdict = {True: "yes", False: "**no**", None: "not measured"}
        claims = [*check_claims(rows), *check_decoding(steps)]
        table = [[c.promise, c.measured, verdict[c.holds]] for c in claims]
        parts.append("What was promised, as ratios of step times or bytes within this run:")
        parts.append(markdown_table(["promise", "measured", "holds"], table))
    report = "\n\n".join(parts) + "\n"
    print(report)
    write_atomically(plan.out / f"{stem}.md", report)
    write_atomically(plan.out / f"{stem}.csv", to_csv([asdict(r) for r in rows]))
    write_atomically(plan.out / f"{stem}.png", plot_sweep(rows))
    print(f"Saved {stem}.md, {stem}.csv and {stem}.png in {plan.out}.")
