"""The rows of the contract matrix: every attention of the registry, in every mode it can run.

A test takes ``any_case`` (one per registered name and option set), ``causal_case``, ``cross_case``,
``padding_case``, ``stateful_case``, ``aux_case`` (those with the capability), ``core_row``
(functions of q, k and v) or, for what takes seconds a row, ``plain_case`` (the default options in
one mode) and ``graph_case`` (modes with a mask, which contain those without). ``time_row`` has one
row for each mechanism. A mechanism registered later is covered without an edit here.

Modes of a case share a row, see ``cases.py``; the failure names the mode.
"""

import warnings
from typing import Any

import pytest
from tests.contract.cases import QUICK, Case, rows, time_rows

from primal_attention.attention import attention_entry, list_attentions


def _plain(name: str) -> Case:
    mode = "masked" if attention_entry(name).capabilities.padding else "full"
    return Case(name, mode=QUICK.get(name, mode), is_slow=name not in QUICK)


ROWS: dict[str, list[Any]] = {
    "any_case": rows(),
    "causal_case": rows(causal=True),
    "cross_case": rows(cross=True),
    "padding_case": rows(padding=True),
    "stateful_case": rows(stateful=True),
    "aux_case": rows(aux_loss=True),
    "core_row": [row for row in rows() if row.is_core],
    "plain_case": [_plain(name) for name in list_attentions()],
    "graph_case": [
        case
        for row in rows()
        for case in row.masked_modes()
        if not (row.is_slow and "cross" in case.mode)
    ],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for argument, cases in ROWS.items():
        if argument in metafunc.fixturenames:
            marks = [pytest.mark.slow if case.is_slow else () for case in cases]
            values = [pytest.param(c, marks=m) for c, m in zip(cases, marks, strict=True)]
            metafunc.parametrize(argument, values, ids=str)
    if "time_row" in metafunc.fixturenames:
        found = time_rows()
        values = [
            pytest.param(cases, marks=pytest.mark.slow if cases[0].is_slow else ())
            for cases in found.values()
        ]
        metafunc.parametrize("time_row", values, ids=found)


@pytest.fixture(autouse=True)
def _static_weights_may_run_without_order() -> None:
    # that layer warns by design; tests/attention/test_primal.py checks the warning itself
    warnings.filterwarnings("ignore", message="static weights without is_causal")
