"""The small Transformer of the published cloud study, which acts on two features directly."""

from typing import Literal, get_args

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from primal_attention.attention import TiedSoftmaxAttention

__all__ = ["CloudBlock", "CloudTransformer", "Variant"]

Variant = Literal["published", "no norm", "frozen head", "tied values"]
"""The published model; without its norms over two features; then also with a head that is trained
on dummies first and frozen, or with tied values."""
_HEADS, _WIDTH, _INNER, _HEAD = 10, 16, 32, 8
_DROPOUT, _HEAD_DROPOUT = 0.1, 0.4


class WideAttention(nn.Module):
    """Softmax attention with heads that are wider than their input."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, _HEADS * _WIDTH) for _ in range(3))
        self.out = nn.Linear(_HEADS * _WIDTH, dim)

    def forward(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        """Attend from every token to all tokens of its instance."""
        q, k, v = (
            project(x).unflatten(-1, (_HEADS, _WIDTH)).transpose(1, 2)  # [b h n d]
            for project in (self.q, self.k, self.v)
        )
        return self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class CloudBlock(nn.Module):
    """Attention and a perceptron, each with a residual, on raw features.

    The published block normalises each branch over the features. With two features the normalised
    vector is always close to ``±(1, −1)``, so a branch can only add one of two vectors.
    """

    def __init__(self, dim: int, variant: Variant) -> None:
        super().__init__()
        tied = variant == "tied values"
        self.attention: nn.Module = TiedSoftmaxAttention(dim, 1) if tied else WideAttention(dim)
        self.inner = nn.Sequential(
            nn.Linear(dim, _INNER), nn.ReLU(), nn.Dropout(_DROPOUT), nn.Linear(_INNER, dim)
        )
        norm = nn.LayerNorm if variant == "published" else nn.Identity
        self.first, self.second = (nn.Sequential(nn.Dropout(_DROPOUT), norm(dim)) for _ in "ab")

    def forward(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        """Return the new positions of all tokens."""
        x = x + self.first(self.attention(x))
        return x + self.second(self.inner(x))


class CloudTransformer(nn.Module):
    """One block on raw features, and a small head that classifies every token.

    Args:
        num_classes: Number of classes.
        dim: Number of features.
        variant: What differs from the published model.

    Example:
        >>> import torch
        >>> CloudTransformer(3)(torch.zeros(4, 20, 2)).shape
        torch.Size([4, 20, 3])
    """

    def __init__(self, num_classes: int, *, dim: int = 2, variant: Variant = "published") -> None:
        super().__init__()
        if variant not in get_args(Variant):
            raise ValueError(f"variant must be one of {get_args(Variant)}, got {variant!r}.")
        self.block = CloudBlock(dim, variant)
        self.head = nn.Sequential(
            nn.Linear(dim, _HEAD),
            nn.ReLU(),
            nn.Dropout(_HEAD_DROPOUT),
            nn.Linear(_HEAD, num_classes),
        )

    def forward(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n k"]:
        """Return the logits of every token."""
        return self.head(self.block(x))
