from .discovery import Algorithm, Discovery, IndependenceTable, discover, learn_pag
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
from .oracle import GraphOracleTest
from .pag import PAG
from .resampling import BootstrapTest
from .tree import InfluenceTree, TreeEntry

__all__ = [
    "ARROW",
    "CIRCLE",
    "NONE",
    "PAG",
    "TAIL",
    "Algorithm",
    "BootstrapTest",
    "CallableTest",
    "Discovery",
    "GraphOracleTest",
    "IndependenceTable",
    "IndependenceTest",
    "InfluenceTree",
    "Outcomes",
    "PartialCorrelationTest",
    "TreeEntry",
    "alpha_of",
    "discover",
    "full_order_correlations",
    "inverse_correlations",
    "learn_pag",
    "recursive_correlation",
    "tau",
]
