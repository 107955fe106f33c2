"""Print which functions of the library a forward pass of a primal layer visits.

The way of a tensor should be short: from the module to :mod:`primal_attention.functional.primal`
and on to the engine, never back. Run it as ``python tools/call_path.py [--list]``.
"""

import argparse
import itertools
import sys
from pathlib import Path
from types import FrameType

import torch

import primal_attention
from primal_attention import PrimalAttention

ROOT = Path(primal_attention.__file__).parent


def visited(layer: torch.nn.Module, x: torch.Tensor, *, is_causal: bool) -> list[tuple[str, str]]:
    """Return file and function of every call inside the library, in order."""
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            calls.append((str(path.relative_to(ROOT)), code.co_qualname))

    # once before, so that nothing is imported or built while the profile runs
    layer(x, is_causal=is_causal)
    sys.setprofile(note)
    try:
        layer(x, is_causal=is_causal)
    finally:
        sys.setprofile(None)
    return calls


def main() -> None:
    """Print a table, and with ``--list`` every function with its number of calls."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="also list the functions")
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    print(f"{'weights':8} {'causal':6} {'functions':>9} {'files':>5} {'changes':>7} {'calls':>5}")
    for weights in ("data", "dual", "static"):
        for is_causal in (False, True):
            if weights == "static" and not is_causal:
                continue  # mixes no tokens: nobody trains it
            layer = PrimalAttention(256, 8, weights=weights)
            x = torch.randn(2, options.tokens, 256, requires_grad=True)
            calls = visited(layer, x, is_causal=is_causal)
            files = [file for file, _ in calls]
            changes = sum(one != other for one, other in itertools.pairwise(files))
            row = f"{len(set(calls)):9} {len(set(files)):5} {changes:7} {len(calls):5}"
            print(f"{weights:8} {'yes' if is_causal else 'no':6} {row}")
            if options.list:
                for call in dict.fromkeys(calls):
                    print(f"    {calls.count(call):3} {call[0]}: {call[1]}")


if __name__ == "__main__":
    main()
