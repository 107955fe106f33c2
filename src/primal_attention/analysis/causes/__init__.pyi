from .analyze import CausesResult, TokenGraphs, analyze_causes, graphs_around
from .baselines import MethodResult, compare_methods
from .confidence import (
    Confidence,
    Consensus,
    Stability,
    bootstrap_stability,
    consensus,
    decision_margins,
    entropy_difference,
)
from .covariance import (
    Correlation,
    attention_factor,
    correlate,
    rollout_factor,
    sem_effects,
    values_factor,
)
from .discovery import Algorithm, Discovery, IndependenceTable, discover, learn_pag
from .drawing import draw_graphs, draw_tree
from .explainer import explain, explain_recommendation, explain_subject
from .explanation import EvaluatedSet, Explanation, FoundSet, HeadSearch
from .graph import causal_graph
from .graph_result import CausalGraphs, HeadGraph
from .independence import (
    CallableTest,
    IndependenceTest,
    Outcomes,
    PartialCorrelationTest,
    inverse_correlations,
    tau,
)
from .marks import ARROW, CIRCLE, NONE, TAIL
from .nodes import GraphNodes, word_groups
from .pag import PAG
from .primal import (
    HatMatrix,
    MoralGraph,
    captured_scores,
    kernel_factor,
    moral_graph,
)
from .recommend import RecommenderSubject
from .removal import Removal
from .resampling import BootstrapTest
from .settings import CausalGraphOptions, ExplainOptions
from .subjects import Outcome, Subject
from .text import ClassSubject, MaskedTokenSubject, NextTokenSubject, text_subject
from .tree import InfluenceTree, TreeEntry
from .vision import PatchSubject

__all__ = [
    "ARROW",
    "CIRCLE",
    "NONE",
    "PAG",
    "TAIL",
    "Algorithm",
    "BootstrapTest",
    "CallableTest",
    "CausalGraphOptions",
    "CausalGraphs",
    "CausesResult",
    "ClassSubject",
    "Confidence",
    "Consensus",
    "Correlation",
    "Discovery",
    "EvaluatedSet",
    "ExplainOptions",
    "Explanation",
    "FoundSet",
    "GraphNodes",
    "HatMatrix",
    "HeadGraph",
    "HeadSearch",
    "IndependenceTable",
    "IndependenceTest",
    "InfluenceTree",
    "MaskedTokenSubject",
    "MethodResult",
    "MoralGraph",
    "NextTokenSubject",
    "Outcome",
    "Outcomes",
    "PartialCorrelationTest",
    "PatchSubject",
    "RecommenderSubject",
    "Removal",
    "Stability",
    "Subject",
    "TokenGraphs",
    "TreeEntry",
    "analyze_causes",
    "attention_factor",
    "bootstrap_stability",
    "captured_scores",
    "causal_graph",
    "compare_methods",
    "consensus",
    "correlate",
    "decision_margins",
    "discover",
    "draw_graphs",
    "draw_tree",
    "entropy_difference",
    "explain",
    "explain_recommendation",
    "explain_subject",
    "graphs_around",
    "inverse_correlations",
    "kernel_factor",
    "learn_pag",
    "moral_graph",
    "rollout_factor",
    "sem_effects",
    "tau",
    "text_subject",
    "values_factor",
    "word_groups",
]
