"""The rows of the contract matrix: every attention of the registry, in every mode it can run.

A test takes ``any_case`` (one per registered name and option set), ``causal_case``, ``cross_case``,
``padding_case``, ``stateful_case``, ``aux_case`` (those with the capability), ``mode_case`` (one
per mode the mechanism can run), ``core_case`` (the same, for functions of q, k and v) or, for what
takes seconds a row, ``plain_case`` (the default options in the commonest mode) and ``graph_case``
(modes with a mask, which contain those without). ``time_case`` has one row for each value of
``time=`` that a mechanism allows. A mechanism registered later is covered without an edit here.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
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
    "cosformer": ({"power": 1},),
    "kernelized": ({"position": "grid", "width": 3, "window": 2},),
}
# the same, in the slow run only
SLOW_VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
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
}
QUICK = {"linear", "primal", "softmax"}
"""Mechanisms whose ``plain_case`` and ``time_case`` with ``"add"`` belong to every run."""
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
    """One row: how to build the layer and, for ``mode_case``, how to call it."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    mode: str = "full"
    is_slow: bool = False

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{k}={v}" for k, v in self.options.items())])

    @property
    def capabilities(self) -> Any:
        return attention_entry(self.name).capabilities

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


def _rows(needs: dict[str, bool]) -> list[Case]:
    return [
        Case(name, options, is_slow=options in SLOW_VARIANTS.get(name, ()))
        for name in list_attentions(**needs)
        for options in ({}, *VARIANTS.get(name, ()), *SLOW_VARIANTS.get(name, ()))
    ]


MODE_ROWS = [
    Case(row.name, row.options, mode, row.is_slow)
    for mode, needs in MODES.items()
    for row in _rows(needs)
]
PLAIN_ROWS = [
    Case(name, mode="masked" if attention_entry(name).capabilities.padding else "full")
    for name in list_attentions()
]
ROWS = {
    "any_case": _rows({}),
    "causal_case": _rows({"causal": True}),
    "cross_case": _rows({"cross": True}),
    "padding_case": _rows({"padding": True}),
    "stateful_case": _rows({"stateful": True}),
    "aux_case": _rows({"aux_loss": True}),
    "plain_case": PLAIN_ROWS,
    "mode_case": MODE_ROWS,
    "graph_case": [
        row
        for row in MODE_ROWS
        if ("masked" in row.mode or not row.capabilities.padding)
        and not (row.is_slow and "cross" in row.mode)
    ],
    "time_case": [
        # what changes the tokens alone does the same before every mechanism
        Case(name, {"time": time}, is_slow=name not in QUICK and time in ("add", "concat-mlp"))
        for name in list_attentions()
        for time in sorted(attention_entry(name).capabilities.time)
    ],
    "core_case": [
        row for row in MODE_ROWS if isinstance(row.build(device="meta"), MultiHeadAttention)
    ],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for argument, rows in ROWS.items():
        if argument in metafunc.fixturenames:
            several = argument in ("mode_case", "core_case", "graph_case")
            ids = [f"{row}-{row.mode}" if several else str(row) for row in rows]
            slow = [
                row.is_slow or (argument == "plain_case" and row.name not in QUICK) for row in rows
            ]
            marks = [pytest.mark.slow if late else () for late in slow]
            values = [pytest.param(r, marks=m) for r, m in zip(rows, marks, strict=True)]
            metafunc.parametrize(argument, values, ids=ids)


@pytest.fixture(autouse=True)
def _static_weights_may_run_without_order() -> None:
    # that layer warns by design; tests/attention/test_primal.py checks the warning itself
    warnings.filterwarnings("ignore", message="static weights without is_causal")
