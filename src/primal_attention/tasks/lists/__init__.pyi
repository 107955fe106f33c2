from .affinity_reranker import AffinityReranker
from .base import BaseReranker, Lists, Reranked
from .chain import Chain
from .context import Reranker
from .context_model import ContextEncoder, ContextOutput
from .diffusion import DiffusionReranker, ListGraph, diffuse, list_graph
from .expansion import AlphaQE, DatabaseAugmentation, NeighbourRefine
from .gallery import Gallery
from .lists import TrainingLists
from .metrics import (
    RevisitedScores,
    average_precision,
    evaluate_revisited,
    mean_average_precision,
    precision_at,
    recall_at,
)
from .reciprocal import KReciprocal
from .report import Change, compare_lists, list_spectrum, report_page
from .settings import ContextConfig, ListFitOptions, VectorSettings
from .task import RerankTask

__all__ = [
    "AffinityReranker",
    "AlphaQE",
    "BaseReranker",
    "Chain",
    "Change",
    "ContextConfig",
    "ContextEncoder",
    "ContextOutput",
    "DatabaseAugmentation",
    "DiffusionReranker",
    "Gallery",
    "KReciprocal",
    "ListFitOptions",
    "ListGraph",
    "Lists",
    "NeighbourRefine",
    "RerankTask",
    "Reranked",
    "Reranker",
    "RevisitedScores",
    "TrainingLists",
    "VectorSettings",
    "average_precision",
    "compare_lists",
    "diffuse",
    "evaluate_revisited",
    "list_graph",
    "list_spectrum",
    "mean_average_precision",
    "precision_at",
    "recall_at",
    "report_page",
]
