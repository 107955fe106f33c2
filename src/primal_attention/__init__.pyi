from . import (
    analysis,
    attention,
    datasets,
    functional,
    hosts,
    kernels,
    ksvd,
    models,
    report,
    surgery,
    tasks,
    training,
)
from .attention import (
    Attention,
    LinearAttention,
    PrimalAttention,
    SoftmaxAttention,
    create_attention,
    ksvd_loss,
    ksvd_terms,
    list_attentions,
    register_attention,
)
from .ksvd import KernelSVD
from .surgery.embedding.embedder import Embedder
from .tasks.events.classifier import EventClassifier
from .tasks.events.estimator import EventPredictor
from .tasks.lists.context import Reranker
from .tasks.pairs.estimator import ImageTextMatcher
from .tasks.series.estimator import SeriesClassifier, SeriesRegressor
from .tasks.tables.classifier import TableClassifier
from .tasks.tables.imputer import TableImputer
from .tasks.tables.regressor import TableRegressor
from .tasks.trained import load

__version__: str

__all__ = [
    "Attention",
    "Embedder",
    "EventClassifier",
    "EventPredictor",
    "ImageTextMatcher",
    "KernelSVD",
    "LinearAttention",
    "PrimalAttention",
    "Reranker",
    "SeriesClassifier",
    "SeriesRegressor",
    "SoftmaxAttention",
    "TableClassifier",
    "TableImputer",
    "TableRegressor",
    "__version__",
    "analysis",
    "attention",
    "create_attention",
    "datasets",
    "functional",
    "hosts",
    "kernels",
    "ksvd",
    "ksvd_loss",
    "ksvd_terms",
    "list_attentions",
    "load",
    "models",
    "register_attention",
    "report",
    "surgery",
    "tasks",
    "training",
]
