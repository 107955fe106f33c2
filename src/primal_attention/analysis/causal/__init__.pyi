from .discovery import Algorithm, Discovery, TestTable, discover, learn_pag
from .independence import (
    CallableTest,
    IndependenceTest,
    Outcomes,
    PartialCorrelationTest,
    alpha_of,
    full_order_correlations,
    inverse_correlations,
    recursive_correlation,
    tau,
)
from .marks import ARROW, CIRCLE, NONE, TAIL
from .pag import PAG
from .tree import InfluenceTree, TreeEntry

__all__ = [
    "ARROW",
    "CIRCLE",
    "NONE",
    "PAG",
    "TAIL",
    "Algorithm",
    "CallableTest",
    "Discovery",
    "IndependenceTest",
    "InfluenceTree",
    "Outcomes",
    "PartialCorrelationTest",
    "TestTable",
    "TreeEntry",
    "alpha_of",
    "discover",
    "full_order_correlations",
    "inverse_correlations",
    "learn_pag",
    "recursive_correlation",
    "tau",
]
