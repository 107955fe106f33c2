"""Linear attention as an asymmetric kernel machine.

attn = PrimalAttention(dim=256, num_heads=8)     # drop-in, linear in length
loss = task_loss + eta * ksvd_loss(model)        # one line in any training loop
"""

from primal_attention.attention import (
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

__version__ = "0.1.0"

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
