"""``primal bench family``: every registered attention, its time and its error.

Time and memory of one layer at growing lengths, all mechanisms in one process and interleaved, and
the error of the mechanism's output against the kernel it stands for.

Rows are saved as they arrive; a second call with the same ``--out`` measures what is missing.
``primal info --update docs/choosing.md`` writes the table of that page from what was saved.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path

from primal_attention.output import write_atomically
from primal_attention.settings import at_least_one

__all__ = ["Plan", "main"]


@dataclass(frozen=True)
class Plan:
    """Time, memory and error of every registered attention; continues where it was stopped."""

    lengths: tuple[int, ...] = (128, 512, 1024, 2048, 4096, 8192, 16384, 65536)
    """Sequence lengths."""
    names: tuple[str, ...] = ()
    """Mechanisms; all registered ones by default."""
    dim: int = 256
    """Model width."""
    num_heads: int = 4
    """Heads."""
    repeats: int = 5
    """Timed repeats; fewer where one takes seconds."""
    limit: float = 40.0
    """Seconds that one step may be expected to take; what needs longer is left out."""
    minutes: float = math.inf
    """Stop before this is up."""
    seed: int = 0
    """Seed of parameters and tokens."""
    threads: int = 2
    """Threads of torch."""
    cpu_time: bool = False
    """Processor time of one thread, for busy machines; take --threads 1 with it."""
    out: Path = Path("outputs/bench")
    """Folder of the results."""

    def __post_init__(self) -> None:
        from primal_attention.attention import attention_entry

        at_least_one(self, "lengths", "dim", "num_heads", "repeats", "threads")
        for name in self.names:
            if name != "floor":
                attention_entry(name)


def main(plan: Plan) -> None:
    """Measure what is missing, then write the table and the plot."""
    import torch

    from primal_attention.bench.family_rows import run
    from primal_attention.bench.family_table import read_caption, report
    from primal_attention.bench.plot import plot_family

    torch.set_num_threads(plan.threads)
    path = plan.out / "family.csv"
    rows = run(plan, path, clock=time.thread_time if plan.cpu_time else time.perf_counter)
    text = report(rows, read_caption(path))
    print(text)
    write_atomically(plan.out / "family.md", text)
    write_atomically(plan.out / "family.png", plot_family(rows))
    print(f"Saved family.csv, family.md and family.png in {plan.out}.")
