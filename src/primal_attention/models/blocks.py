"""The Transformer block, around any attention of the registry.

    x ← x + attention(norm(x))      x ← x + mlp(norm(x))

Pre-norm: the attention sees rows of one scale, which keeps the KSVD term of a primal layer of order
one whatever the depth.
"""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor, nn

from primal_attention.attention import create_attention

__all__ = ["EncoderBlock"]


class EncoderBlock(nn.Module):
    """Attention and a two-layer perceptron, each on the normalised stream and added to it.

    Args:
        dim: Model width.
        num_heads: Heads; must divide ``dim``.
        attention: Name in the registry.
        attention_options: Options of that attention's constructor.
        hidden_dim: Width inside the perceptron; by default ``4 * dim``.
        dropout: Probability of dropping an element of each branch in training.
        device: Where to create the parameters.
        dtype: Type of the parameters.

    Example:
        >>> block = EncoderBlock(32, 4, attention="primal", attention_options={"rank": 4})
        >>> block(torch.randn(2, 7, 32)).shape
        torch.Size([2, 7, 32])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        attention: str = "primal",
        attention_options: Mapping[str, Any] | None = None,
        hidden_dim: int | None = None,
        dropout: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        hidden_dim = 4 * dim if hidden_dim is None else hidden_dim
        options = {"dropout": dropout, "device": device, "dtype": dtype}
        options.update(attention_options or {})
        self.attention_norm = nn.LayerNorm(dim, device=device, dtype=dtype)
        self.attention = create_attention(attention, dim, num_heads, **options)
        self.mlp_norm = nn.LayerNorm(dim, device=device, dtype=dtype)
        self.mlp = nn.Sequential(
            nn.Linear(dim, hidden_dim, device=device, dtype=dtype),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(hidden_dim, dim, device=device, dtype=dtype),
            nn.Dropout(dropout),
        )

    def forward(
        self,
        x: Float[Tensor, "b n c"],
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        is_causal: bool = False,
        return_aux: bool = False,
    ) -> Any:
        """Return the stream after the block.

        Args:
            x: The stream; finite, also at padded positions.
            key_mask: ``True`` where a token is real.
            is_causal: Let no output depend on a later token.
            return_aux: Return ``(y, aux)`` with the attention's :class:`Aux` instead of ``y``.
        """
        y = self.attention(
            self.attention_norm(x), key_mask=key_mask, is_causal=is_causal, return_aux=return_aux
        )
        y, aux = y if return_aux else (y, None)
        x = x + y
        x = x + self.mlp(self.mlp_norm(x))
        return (x, aux) if return_aux else x
