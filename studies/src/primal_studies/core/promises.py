"""What the library promises about speed, checked against measured rows."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from primal_attention.tasks.study import Row

__all__ = ["Claim", "check_decoding", "check_promises"]


class Claim(NamedTuple):
    """One promise and what was measured."""

    promise: str
    measured: str
    holds: bool | None
    """``None`` if the run did not measure what it takes."""


_EVER = 2**62
_WIDE, _NARROW = (8, 64), (2, 32)
_PROMISES: tuple[tuple[str, str, str, tuple[int, int], int, int, str, float], ...] = (
    # words, numerator, denominator, shape, first and last length, field, bound: positive if the
    # ratio must be at most this, negative if it must be at least this
    *(
        (f"step ≤ {bound} × projection floor, {of}, n ≥ 2,048", "primal", "floor", shape, 2048,
         _EVER, "step_ms", bound)
        for shape, of, bound in ((_WIDE, "8 heads of 64", 1.2), (_NARROW, "2 heads of 32", 1.8))
    ),
    *(
        (f"kept for backward ≤ 0.6 × naive, {of}", "primal", "primal-naive", shape, 2048,
         _EVER, "kept_mb", 0.6)
        for shape, of in ((_WIDE, "8 heads of 64"), (_NARROW, "2 heads of 32"))
    ),
    ("faster than softmax from n = 128, 8 heads of 64", "softmax", "primal", _WIDE, 128, _EVER,
     "step_ms", -1.0),
    ("5 × faster than softmax at 4,096, 8 heads of 64", "softmax", "primal", _WIDE, 4096, 4096,
     "step_ms", -5.0),
    ("15 × faster than softmax at 16,384, 8 heads of 64", "softmax", "primal", _WIDE, 16384, 16384,
     "step_ms", -15.0),
    *(
        (f"faster than linear attention at n ≥ 1,024, {of}", "linear", "primal", shape, 1024, _EVER,
         "step_ms", -1.0)
        for shape, of in ((_WIDE, "8 heads of 64"), (_NARROW, "2 heads of 32"))
    ),
)  # fmt: skip


def check_promises(rows: Sequence[Row]) -> list[Claim]:
    """Return every promise about layers with its verdict."""
    table = {(r["name"], (r["heads"], r["head_dim"]), r["n"]): r for r in reversed(rows)}
    claims = []
    for words, top, bottom, shape, first, last, field, bound in _PROMISES:
        ratios = {}
        for n in sorted({n for _, of, n in table if of == shape and first <= n <= last}):
            a, b = (table.get((name, shape, n), {}).get(field) for name in (top, bottom))
            if a and b:
                ratios[n] = a / b
        claims.append(_claim(words, ratios, bound))
    for shape in (_WIDE, _NARROW):
        a, b = (table.get(("primal", shape, n), {}).get("step_ms") for n in (65536, 4096))
        growth = {65536: a / b} if a and b else {}
        claims.append(_claim(f"time(65,536) ≤ 17 × time(4,096), {shape[0]} heads", growth, 17.0))
    return claims


def _claim(promise: str, ratios: Mapping[int, float], bound: float) -> Claim:
    if not ratios:
        return Claim(promise, "not measured", None)
    holds = all(v <= bound if bound > 0 else v >= -bound for v in ratios.values())
    return Claim(promise, ", ".join(f"{v:.2f} (n={n:,})" for n, v in ratios.items()), holds)


def check_decoding(rows: Sequence[Row]) -> list[Claim]:
    """Return the promise about decoding: late steps cost what early steps cost."""
    claims = []
    for name in dict.fromkeys(row["name"] for row in rows if row["name"] != "softmax"):
        found = [row for row in rows if row["name"] == name]
        first, last = found[0], found[-1]
        growth = last["step_us"] / first["step_us"]
        same = first["state_numbers"] == last["state_numbers"]
        early, late = first["position"], last["position"]
        promise = f"{name}: a step at {late:,} costs what it costs at {early}"
        state = "same state" if same else "state grows"
        claims.append(Claim(promise, f"{growth:.2f} ×, {state}", growth < 1.25 and same))
    return claims
