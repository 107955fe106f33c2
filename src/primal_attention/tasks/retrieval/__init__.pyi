from .base import Lists, Reranked, Reranker
from .chain import Chain
from .context import ContextReranker, TrainingLists
from .context_model import ContextConfig, ContextEncoder, ContextOutput
from .diffusion import DiffusionReranker, ListGraph, diffuse, list_graph
from .expansion import AlphaQE, DatabaseAugmentation, NeighbourRefine
from .gallery import Gallery
from .metrics import (
    RevisitedScores,
    average_precision,
    evaluate_revisited,
    mean_average_precision,
    precision_at,
    recall_at,
)
from .reciprocal import KReciprocal

__all__ = [
    "AlphaQE",
    "Chain",
    "ContextConfig",
    "ContextEncoder",
    "ContextOutput",
    "ContextReranker",
    "DatabaseAugmentation",
    "DiffusionReranker",
    "Gallery",
    "KReciprocal",
    "ListGraph",
    "Lists",
    "NeighbourRefine",
    "Reranked",
    "Reranker",
    "RevisitedScores",
    "TrainingLists",
    "average_precision",
    "diffuse",
    "evaluate_revisited",
    "list_graph",
    "mean_average_precision",
    "precision_at",
    "recall_at",
]
