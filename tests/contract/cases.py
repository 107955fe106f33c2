"""What the contract is checked with: layers, their modes and their inputs.

``every_mode`` runs a test once for each mode of a case, ``masked_modes`` for those with a mask,
which contain those without, and ``every_time`` for each value of ``time=`` of a mechanism.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tests.house.rows import each
from torch import Tensor

from primal_attention.attention import (
    Attention,
    MultiHeadAttention,
    attention_entry,
    create_attention,
    list_attentions,
)

# option sets beside a mechanism's defaults that take other paths through its code
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "primal": ({"rank": 3}, {"rank": 3, "codes": "table"}, {"rank": 3, "regularizer": "balance"}),
    "primal-static": ({"rank": 3, "decay": 0.9}, {"rank": 3, "regularizer": "kkt"}),
    "primal-dual": ({"rank": 3}, {"rank": 3, "regularizer": "kkt"}),
    "primal-sparse": ({"num_keys": 5},),
    # it reads six tokens exactly, and what the matrix checks with more is approximate
    "adaptive": ({"block": 2, "window": 0, "top": 1, "sinks": 2, "rank": 1, "exact": 0},),
    "cosformer": ({"power": 1},),
    "kernelized": ({"position": "grid", "width": 3, "window": 2},),
    # by default it is softmax at the lengths of the matrix
    "window-linear": ({"window": 2, "sinks": 1, "num_features": 3},),
}
# the same, in the slow run only
SLOW_VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "adaptive": (
        {"block": 4, "window": 1, "top": 0, "sinks": 0, "rank": 2, "exact": 0},
        {"block": 3, "window": 1, "top": "auto", "error": 0.1, "sinks": 1, "exact": 0},
    ),
    "cosformer": ({"horizon": 3},),
    "favor": ({"antithetic": True, "num_features": 6},),
    "gaussian": ({"normalize": False}, {"qk_norm": True}),
    "kernelized": ({"window": 2, "temperature": True},),
    "kernelized-log": ({"num_features": 4, "temperature": True},),
    "linformer": ({"num_projections": 4},),
    "nystromformer": ({"num_landmarks": 4, "kernel_size": 3},),
    "primal-relative": ({"rank": 3, "window": 2},),
    "schoenbat": (
        {"kernel": "inverse"},
        {"kernel": "logi", "post": "power"},
        {"kernel": "sqrt", "temperature": 0.5},
        {"kernel": "trigh"},
        {"kernel": (1.0, 1.0, 0.5)},
    ),
    "skyformer": (
        {"num_landmarks": 4, "landmarks": "kmeans"},
        {"num_landmarks": 4, "landmarks": "segments", "qk_norm": True},
        {"num_landmarks": 4, "inverse": "schulz", "normalize": False},
        {"num_landmarks": 4, "inverse": "published", "normalize": False, "ridge": 0.1},
    ),
    "skyformer-learned": ({"num_landmarks": 4, "window": 3, "normalize": False},),
    "transport": ({"num_anchors": 3, "num_steps": 1},),
    "window-linear": (
        {"window": 1, "sinks": 1, "num_features": 3},
        {"window": 3, "sinks": 0, "far": "favor", "num_features": 4},
        {"window": 2, "sinks": 3, "far": "none"},
    ),
}
QUICK = {"linear": "causal-masked", "primal": "masked", "softmax": "masked"}
"""Mechanisms whose ``plain_case``, in this mode, and ``"add"`` of time belong to every run."""
MODES = {
    "full": {},
    "masked": {"padding": True},
    "causal": {"causal": True},
    "causal-masked": {"causal": True, "padding": True},
    "cross": {"cross": True},
    "cross-masked": {"cross": True, "padding": True},
}


@dataclass(frozen=True)
class Case:
    """How to build a layer and how to call it."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    mode: str = "full"
    is_slow: bool = False

    def __str__(self) -> str:
        mode = () if self.mode == "full" else (self.mode,)
        return "-".join([self.name, *(f"{k}={v}" for k, v in self.options.items()), *mode])

    @property
    def capabilities(self) -> Any:
        return attention_entry(self.name).capabilities

    @property
    def is_core(self) -> bool:
        """Whether the mechanism is a function of queries, keys and values."""
        return isinstance(self.build(device="meta"), MultiHeadAttention)

    def modes(self) -> list["Case"]:
        """Return this case in every mode that the mechanism can run."""
        able = self.capabilities
        return [
            replace(self, mode=mode)
            for mode, needs in MODES.items()
            if all(getattr(able, name) for name in needs)
        ]

    def masked_modes(self) -> list["Case"]:
        """Return this case in every mode with a mask; in all modes if it takes none."""
        modes = self.modes()
        return [case for case in modes if "masked" in case.mode] or modes

    @property
    def lengths(self) -> dict[str, int]:
        """The range of lengths that this row takes, as ``torch.export.Dim`` wants it."""
        # the published weight of cosformer turns negative beyond its horizon
        return {"max": 1024} if self.options.get("power") == 1 else {}

    def stands_alone(self, keep: Tensor) -> bool:
        """Whether a sequence with this mask equals the sequence of its real tokens."""
        # on a grid a masked token keeps its place; only at the end does nothing follow it
        on_grid = self.options.get("position") == "grid"
        return not on_grid or bool(keep[: int(keep.sum())].all())

    def build(
        self, dim: int = 16, num_heads: int = 2, *, seed: int = 0, **options: Any
    ) -> Attention:
        """Return the layer, the same one every time for a seed."""
        torch.manual_seed(seed)
        return create_attention(self.name, dim, num_heads, **self.options, **options)

    def inputs(
        self, b: int = 2, n: int = 7, m: int = 5, dim: int = 16, **factory: Any
    ) -> dict[str, Any]:
        """Return the arguments of ``forward`` for this row's mode; the last sequence is short."""
        torch.manual_seed(1)
        arguments: dict[str, Any] = {"x": torch.randn(b, n, dim, **factory)}
        keys = n
        if "cross" in self.mode:
            arguments["context"], keys = torch.randn(b, m, dim, **factory), m
        if "masked" in self.mode:
            keep = torch.ones(b, keys, dtype=torch.bool)
            keep[-1:, keys // 2 + 1 :] = False
            arguments["key_mask"] = keep
        if "causal" in self.mode:
            arguments["is_causal"] = True
        return arguments

    def run(self, layer: Attention, arguments: dict[str, Any]) -> Tensor:
        """Return the output; random draws of a training forward are the same every time."""
        torch.manual_seed(2)
        return layer(**arguments)


def rows(**needs: bool) -> list[Case]:
    """Return every option set of the mechanisms with some capabilities."""
    return [
        Case(name, options, is_slow=options in SLOW_VARIANTS.get(name, ()))
        for name in list_attentions(**needs)
        for options in ({}, *VARIANTS.get(name, ()), *SLOW_VARIANTS.get(name, ()))
    ]


def time_rows() -> dict[str, list[Case]]:
    """Return the values of ``time=`` of each mechanism; those of the slow run apart."""
    found: dict[str, list[Case]] = {}
    for name in list_attentions():
        for time in sorted(attention_entry(name).capabilities.time):
            # what changes the tokens alone does the same before every mechanism
            is_slow = name not in QUICK and time in ("add", "concat-mlp")
            row = found.setdefault(f"{name}-tokens" if is_slow else name, [])
            row.append(Case(name, {"time": time}, is_slow=is_slow))
    return found


def _itself(cases: Iterable[Case]) -> Iterable[Case]:
    return cases


every_mode = each("mode_case", Case.modes, of="any_case")
masked_modes = each("mode_case", Case.masked_modes, of="any_case")
every_core_mode = each("core_case", Case.modes, of="core_row")
every_time = each("time_case", _itself, of="time_row")
