"""What the library promises about speed, checked against a measured sweep."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from primal_attention.bench.layer_rows import Measurement

__all__ = ["Claim", "check_claims", "check_decoding"]


class Claim(NamedTuple):
    """One promise and what was measured."""

    promise: str
    measured: str
    holds: bool | None
    """``None`` if the sweep did not measure what it takes."""


def check_claims(rows: Sequence[Measurement]) -> list[Claim]:
    """Return every promise about layers with its verdict, from the eager rows of a sweep."""
    table = {(r.name, r.heads, r.n): r for r in rows if r.mode == "eager"}

    def ratio(a: str, b: str, heads: int, n: int, field: str = "step_ms") -> float | None:
        one, other = table.get((a, heads, n)), table.get((b, heads, n))
        if one is None or other is None or not getattr(other, field):
            return None
        return float(getattr(one, field) / getattr(other, field))

    def over(a: str, b: str, heads: int, least: int, field: str = "step_ms") -> dict[int, float]:
        lengths = sorted({n for _, h, n in table if h == heads and n >= least})
        found = {n: ratio(a, b, heads, n, field) for n in lengths}
        return {n: value for n, value in found.items() if value is not None}

    claims = [
        _at_most(
            "step ≤ 1.2 × projection floor, 8 heads of 64, n ≥ 2,048",
            over("primal", "floor", 8, 2048),
            1.2,
        ),
        _at_most(
            "step ≤ 1.8 × projection floor, 2 heads of 32, n ≥ 2,048",
            over("primal", "floor", 2, 2048),
            1.8,
        ),
        _at_most(
            "kept for backward ≤ 0.6 × textbook, 8 heads of 64",
            over("primal", "primal-textbook", 8, 2048, "kept_mb"),
            0.6,
        ),
        _at_most(
            "kept for backward ≤ 0.6 × textbook, 2 heads of 32",
            over("primal", "primal-textbook", 2, 2048, "kept_mb"),
            0.6,
        ),
        _at_least(
            "faster than softmax from n = 128, 8 heads of 64",
            over("softmax", "primal", 8, 128),
            1.0,
        ),
        _at_least(
            "5 × faster than softmax at 4,096, 8 heads of 64",
            _only(over("softmax", "primal", 8, 4096), 4096),
            5.0,
        ),
        _at_least(
            "15 × faster than softmax at 16,384, 8 heads of 64",
            _only(over("softmax", "primal", 8, 16384), 16384),
            15.0,
        ),
        _at_least(
            "faster than linear attention at n ≥ 1,024, 8 heads of 64",
            over("linear", "primal", 8, 1024),
            1.0,
        ),
        _at_least(
            "faster than linear attention at n ≥ 1,024, 2 heads of 32",
            over("linear", "primal", 2, 1024),
            1.0,
        ),
    ]
    for heads in (8, 2):
        short, long = table.get(("primal", heads, 4096)), table.get(("primal", heads, 65536))
        growth = {65536: long.step_ms / short.step_ms} if short and long else {}
        claims.append(_at_most(f"time(65,536) ≤ 17 × time(4,096), {heads} heads", growth, 17.0))
    return claims


def check_decoding(rows: Iterable[dict[str, Any]]) -> list[Claim]:
    """Return the promise about decoding: late steps cost what early steps cost."""
    claims = []
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_name.setdefault(row["name"], []).append(row)
    for name, found in by_name.items():
        if name == "softmax":
            continue
        first, last = found[0], found[-1]
        growth = last["step_us"] / first["step_us"]
        same = first["state_numbers"] == last["state_numbers"]
        promise = (
            f"{name}: a step at {last['position']:,} costs what it costs at {first['position']}"
        )
        state = "same state" if same else "state grows"
        claims.append(Claim(promise, f"{growth:.2f} ×, {state}", growth < 1.25 and same))
    return claims


def _only(values: dict[int, float], n: int) -> dict[int, float]:
    return {n: values[n]} if n in values else {}


def _at_most(promise: str, values: dict[int, float], bound: float) -> Claim:
    return _claim(promise, values, all(v <= bound for v in values.values()))


def _at_least(promise: str, values: dict[int, float], bound: float) -> Claim:
    return _claim(promise, values, all(v >= bound for v in values.values()))


def _claim(promise: str, values: dict[int, float], holds: bool) -> Claim:
    if not values:
        return Claim(promise, "not measured", None)
    return Claim(promise, ", ".join(f"{v:.2f} (n={n:,})" for n, v in values.items()), holds)
