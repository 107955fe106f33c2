"""The Transformer block, around any attention of the registry.

    pre-norm:   x ← x + attention(norm(x))      x ← x + mlp(norm(x))
    post-norm:  x ← norm(x + attention(x))      x ← norm(x + mlp(x))

Pre-norm is the default: the attention sees rows of one scale, which keeps the KSVD term of a primal
layer of order one whatever the depth.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.types import Device

from primal_attention.attention import Rotary, State, TimeOptions, create_attention
from primal_attention.attention.time import Fusion
from primal_attention.models.config import Norm

__all__ = ["EncoderBlock"]


class EncoderBlock(nn.Module):
    """Attention and a two-layer perceptron, each with a norm and added to the stream.

    Args:
        dim: Model width.
        num_heads: Heads; must divide ``dim``.
        attention: Name in the registry.
        attention_options: Options of that attention's constructor.
        time: How the times of tokens enter the attention; see ``create_attention``.
        hidden_dim: Width inside the perceptron; by default ``4 * dim``.
        norm: ``"pre"``: the norm comes before a branch; ``"post"``: after the sum.
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
        time: Fusion | TimeOptions | None = None,
        hidden_dim: int | None = None,
        norm: Norm = "pre",
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if norm not in ("pre", "post"):
            raise ValueError(f"norm must be 'pre' or 'post', got {norm!r}.")
        hidden_dim = 4 * dim if hidden_dim is None else hidden_dim
        options: dict[str, Any] = {"dropout": dropout, "device": device, "dtype": dtype}
        options.update(attention_options or {})
        self.norm = norm
        self.attention_norm = nn.LayerNorm(dim, device=device, dtype=dtype)
        self.attention = create_attention(attention, dim, num_heads, time=time, **options)
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
        rotary: Rotary | None = None,
        times: Float[Tensor, "b n"] | None = None,
        document_ids: Int[Tensor, "b n"] | None = None,
        return_aux: bool = False,
    ) -> Any:
        """Return the stream after the block.

        Args:
            x: The stream; finite, also at padded positions.
            key_mask: ``True`` where a token is real.
            is_causal: Let no output depend on a later token.
            rotary: Turns of queries and keys, for an attention that takes them.
            times: Times of the tokens, for an attention that takes them; others ignore them.
            document_ids: Document of each token, if rows hold several.
            return_aux: Return ``(y, aux)`` with the attention's :class:`Aux` instead of ``y``.
        """
        also = self._also(rotary, times)
        also |= {"is_causal": is_causal, "return_aux": return_aux, "document_ids": document_ids}
        y = self.attention(self._before(x), key_mask=key_mask, **also)
        y, aux = y if return_aux else (y, None)
        x = self._after(x, y)
        return (x, aux) if return_aux else x

    def init_state(self, batch_size: int) -> State:
        """Return the state of the attention before the first token."""
        return self.attention.init_state(batch_size)

    def step(
        self,
        x: Float[Tensor, "b t c"],
        state: State,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
        rotary: Rotary | None = None,
        times: Float[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t c"], State]:
        """Return the stream of the next tokens, and the state after them."""
        also = self._also(rotary, times)
        y, state = self.attention.step(self._before(x), state, key_mask=key_mask, **also)
        return self._after(x, y), state

    def _also(self, rotary: Rotary | None, times: Tensor | None) -> dict[str, Any]:
        """Return the arguments that only some attentions take."""
        also: dict[str, Any] = {} if rotary is None else {"rotary": rotary}
        return also | {"times": times} if self.attention.takes_times else also

    def _before(self, x: Tensor) -> Tensor:
        """Return the input of the attention."""
        return self.attention_norm(x) if self.norm == "pre" else x

    def _after(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the output of the attention, then that of the perceptron."""
        if self.norm == "pre":
            x = x + y
            return x + self.mlp(self.mlp_norm(x))
        x = self.attention_norm(x + y)
        return self.mlp_norm(x + self.mlp(x))
