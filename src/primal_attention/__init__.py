"""Linear attention as an asymmetric kernel machine.

    attn = PrimalAttention(dim=256, num_heads=8)     # drop-in, linear in length
    loss = task_loss + eta * ksvd_loss(model)        # one line in any training loop

Names are imported when they are first used, so that a command can answer ``--help`` without
waiting for torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from primal_attention import attention

    return getattr(attention, name)


def __dir__() -> list[str]:
    return __all__
