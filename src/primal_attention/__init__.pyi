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
from .tasks.trained import load

__version__: str

__all__ = [
    "Attention",
    "LinearAttention",
    "PrimalAttention",
    "SoftmaxAttention",
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
