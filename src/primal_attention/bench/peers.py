"""``primal bench peers``: our layers beside the public packages of the methods.

Nyströmformer beside ``nystrom-attention``, FAVOR+ beside ``performer-pytorch`` (also in causal
order, where that package has no compiled kernel on a CPU) and Linformer beside ``linformer``, at
equal width, heads and landmarks, features or projections. Ours and theirs take turns; below one,
the ratio says that ours is the faster, or the leaner.

The packages are the extra ``peers``.
"""

import contextlib
import io
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from primal_attention.settings import at_least_one

__all__ = ["Comparison", "Plan", "compare", "main", "pairs"]

PEERS = {
    "nystromformer": "nystrom-attention",
    "favor": "performer-pytorch",
    "favor, causal": "performer-pytorch",
    "linformer": "linformer",
}
CAUSAL_LIMIT = 4096
"""Tokens up to which the causal package is run; it forms every outer product."""


@dataclass(frozen=True)
class Comparison:
    """One of our layers and its public twin at one length."""

    name: str
    package: str
    n: int
    forward_ms: float
    step_ms: float
    peak_mb: float
    kept_mb: float
    forward_ratio: float
    """Our time over theirs."""
    step_ratio: float
    peak_ratio: float
    kept_ratio: float


def pairs(n: int, dim: int = 256, num_heads: int = 4, *, size: int = 128) -> dict[str, Any]:
    """Return our layer and theirs by name, each a function of ``x``.

    Args:
        n: Tokens; ``linformer`` is built for one length.
        dim: Model width.
        num_heads: Heads.
        size: Features and projections; landmarks are half of it.
    """
    try:
        with warnings.catch_warnings():
            # the packages import what torch and Python have deprecated
            warnings.simplefilter("ignore")
            from linformer import LinformerSelfAttention
            from nystrom_attention import NystromAttention
            from performer_pytorch import SelfAttention
    except ImportError as error:
        raise ImportError(
            "The comparison needs the public packages; install them with: "
            "pip install 'primal-attention[peers]'"
        ) from error

    import torch
    from torch import nn

    from primal_attention.attention import create_attention

    class Causal(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x, is_causal=True)

    def performer(causal: bool) -> Any:
        # it says on standard output that it has no compiled kernel
        with contextlib.redirect_stdout(io.StringIO()):
            width = dim // num_heads
            return SelfAttention(
                dim, heads=num_heads, dim_head=width, nb_features=size, causal=causal
            )

    landmarks = max(size // 2, 1)
    found: dict[str, Any] = {
        "nystromformer": (
            create_attention("nystromformer", dim, num_heads, num_landmarks=landmarks),
            NystromAttention(
                dim, dim_head=dim // num_heads, heads=num_heads, num_landmarks=landmarks
            ),
        ),
        "favor": (
            create_attention("favor", dim, num_heads, num_features=size),
            performer(False),
        ),
        "linformer": (
            create_attention("linformer", dim, num_heads, num_projections=size),
            LinformerSelfAttention(dim, n, k=size, heads=num_heads),
        ),
    }
    if n <= CAUSAL_LIMIT:
        ours = Causal(create_attention("favor", dim, num_heads, num_features=size))
        found["favor, causal"] = ours, performer(True)
    return found


def compare(
    n: int,
    *,
    dim: int = 256,
    num_heads: int = 4,
    size: int = 128,
    repeats: int = 30,
    seconds: float = 20.0,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Comparison]:
    """Return one comparison for each pair at one length.

    Args:
        n: Tokens, in a batch of one.
        dim: Model width.
        num_heads: Heads.
        size: Features and projections; landmarks are half of it.
        repeats: Turns that the two take.
        seconds: A pair that has used up this time takes no further turn.
        clock: What time is read from.
    """
    import torch
    from torch import Tensor, nn

    from primal_attention.analysis.memory import PeakMemory, kept_for_backward

    torch.manual_seed(0)
    x = torch.randn(1, n, dim, requires_grad=True)

    def infer(layer: nn.Module) -> None:
        with torch.no_grad():
            layer(x)

    def step(layer: nn.Module) -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        y: Tensor = layer(x)
        y.backward(torch.ones_like(y))

    def timed(run: Callable[[nn.Module], None], layer: nn.Module) -> float:
        start = clock()
        run(layer)
        return (clock() - start) * 1e3

    def memory(layer: nn.Module) -> tuple[float, float]:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        with PeakMemory() as counted:
            step(layer)
        kept = kept_for_backward(lambda: layer(x), [x, *layer.parameters()])
        return counted.peak / 2**20, kept / 2**20

    rows = []
    for name, both in pairs(n, dim, num_heads, size=size).items():
        for layer in both:
            infer(layer)
            step(layer)
        begin = time.perf_counter()
        times: list[tuple[list[float], list[float]]] = [([], []), ([], [])]
        for _ in range(repeats):
            for layer, (forward, whole) in zip(both, times, strict=True):
                forward.append(timed(infer, layer))
                whole.append(timed(step, layer))
            if time.perf_counter() - begin > seconds:
                break
        (ours, theirs), ours_kept, theirs_kept = (
            [(median(f), median(w)) for f, w in times],
            memory(both[0]),
            memory(both[1]),
        )
        rows.append(
            Comparison(
                name=name,
                package=PEERS[name],
                n=n,
                forward_ms=round(ours[0], 2),
                step_ms=round(ours[1], 2),
                peak_mb=round(ours_kept[0], 1),
                kept_mb=round(ours_kept[1], 1),
                forward_ratio=round(ours[0] / theirs[0], 2),
                step_ratio=round(ours[1] / theirs[1], 2),
                peak_ratio=round(ours_kept[0] / theirs_kept[0], 2),
                kept_ratio=round(ours_kept[1] / theirs_kept[1], 2),
            )
        )
    return rows


def report(rows: Sequence[Comparison], caption: str) -> str:
    """Return the table as Markdown, and whether any of ours is slower."""
    from primal_attention.output import markdown_table

    header = ["ours", "package", "tokens", "step, ms", "forward", "step", "peak memory", "kept"]
    table = [
        [
            f"`{r.name}`",
            f"`{r.package}`",
            f"{r.n:,}",
            f"{r.step_ms:,.1f}",
            *(f"{v:.2f}" for v in (r.forward_ratio, r.step_ratio, r.peak_ratio, r.kept_ratio)),
        ]
        for r in rows
    ]
    slower = [f"{r.name} at {r.n:,}" for r in rows if max(r.forward_ratio, r.step_ratio) > 1]
    verdict = "None of ours is slower." if not slower else f"Slower: {'; '.join(slower)}."
    lead = "Our time and memory as multiples of theirs:"
    return "\n\n".join([caption, lead, markdown_table(header, table), verdict]) + "\n"


@dataclass(frozen=True)
class Plan:
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
    threads: int = 2
    """Threads of torch."""
    cpu_time: bool = False
    """Processor time of one thread, for busy machines; take --threads 1 with it."""
    out: Path = Path("outputs/bench")
    """Folder of the results."""

    def __post_init__(self) -> None:
        at_least_one(self, "lengths", "dim", "num_heads", "size", "repeats", "threads")


def main(plan: Plan) -> None:
    """Print the comparison and save it as CSV and Markdown."""
    import torch

    from primal_attention.output import hardware, to_csv, write_atomically

    torch.set_num_threads(plan.threads)
    facts = {
        **hardware(),
        "width": plan.dim,
        "heads": plan.num_heads,
        "features and projections": plan.size,
        "landmarks": plan.size // 2,
        "batch": 1,
    }
    caption = ", ".join(f"{key}: {value}" for key, value in facts.items())
    rows: list[Comparison] = []
    for n in sorted(plan.lengths):
        rows += compare(
            n,
            dim=plan.dim,
            num_heads=plan.num_heads,
            size=plan.size,
            repeats=plan.repeats,
            clock=time.thread_time if plan.cpu_time else time.perf_counter,
        )
        write_atomically(plan.out / "peers.csv", to_csv([asdict(r) for r in rows], caption))
        text = report(rows, caption)
        write_atomically(plan.out / "peers.md", text)
    print(text)
    print(f"Saved peers.csv and peers.md in {plan.out}.")
