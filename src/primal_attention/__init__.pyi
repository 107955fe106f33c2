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

__version__: str

__all__ = [
    "Attention",
    "LinearAttention",
    "PrimalAttention",
    "SoftmaxAttention",
    "__version__",
    "create_attention",
    "ksvd_loss",
    "ksvd_terms",
    "list_attentions",
    "register_attention",
]
