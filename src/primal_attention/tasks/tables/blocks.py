"""Attention between the rows of a table, and between the cells of a row.

    Res(H) = H W_res + attention(LN(H))        block(H) = Res(H) + rFF(LN(Res(H)))

Both directions use this block. ``W_res`` is the identity, or learned as in the paper. A block reads
its context through a memory: the normalised rows themselves, or, for ``primal-dual``, the weights
that :meth:`PrimalAttention.remember` makes of them, whose size does not depend on their number.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.attention import PrimalAttention, State, create_attention, merge_memories
from primal_attention.tasks.tables.settings import NPTOptions

__all__ = ["Memory", "RowBlock", "TableBlock"]

Memory = Tensor | State
"""What a block keeps of its context."""


class TableBlock(nn.Module):
    """Attention and a perceptron, each with a norm.

    Args:
        dim: Width of a token.
        options: Heads, dropout, and whether to build the published block.
        attention: Name in the registry.
        attention_options: Options of that attention.
    """

    def __init__(
        self, dim: int, options: NPTOptions, attention: str, attention_options: Any = None
    ) -> None:
        super().__init__()
        eps = 1e-12 if options.published else 1e-5
        self.attention_norm, self.mlp_norm = (nn.LayerNorm(dim, eps=eps) for _ in range(2))
        own = {"dropout": options.dropout, **(attention_options or {})}
        layer: Any = create_attention(attention, dim, options.num_heads, **own)
        self.residual = nn.Linear(dim, dim) if options.published else None
        wide = (4 if options.published else 2) * dim
        self.mlp = nn.Sequential(
            nn.Linear(dim, wide),
            nn.GELU(),
            nn.Dropout(options.dropout),
            nn.Linear(wide, dim),
            nn.Dropout(options.dropout),
        )
        if options.published:
            # scores are divided by the root of the whole width, not of a head's
            with torch.no_grad():
                layer.q_proj.weight.div_(options.num_heads**0.5)
        self.attention = layer

    @property
    def has_term(self) -> bool:
        """Whether the attention has a regulariser."""
        return self.attention.capabilities.aux_loss

    def remember(
        self, parts: Sequence[Float[Tensor, "b n c"]], *, keeps_rows: bool = False
    ) -> Memory:
        """Return what the block keeps of a context that comes in parts; perhaps all its rows."""
        if isinstance(self.attention, PrimalAttention) and not keeps_rows:
            return merge_memories([self.attention.remember(self.attention_norm(x)) for x in parts])
        return torch.cat([self.attention_norm(x) for x in parts], dim=1)

    def forward(
        self, x: Float[Tensor, "b n c"], memory: Memory | None = None, *, gate: Any = None
    ) -> Float[Tensor, "b n c"]:
        """Return the stream after the block.

        Args:
            x: The stream.
            memory: What to attend to; by default ``x`` itself.
            gate: Factors of the rows of a memory, for gradients with respect to rows.
        """
        z = self.attention_norm(x)
        if isinstance(memory, State):
            y = self.attention.recall(z, memory)
        elif memory is None:
            y = self.attention(z)
        else:
            y = self.attention(z, memory if gate is None else memory * gate)
        return self.finish(x, y)

    def with_term(self, x: Float[Tensor, "b n c"]) -> tuple[Tensor, Tensor]:
        """Return the stream after self-attention, and the regulariser."""
        y, aux = self.attention(self.attention_norm(x), return_aux=True)
        return self.finish(x, y), aux.loss

    def finish(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the output of the attention, then that of the perceptron."""
        x = (x if self.residual is None else self.residual(x)) + y
        return x + self.mlp(self.mlp_norm(x))


class RowBlock(nn.Module):
    """Attention between rows: the cells of a row are one token.

    With ``row_dim`` the cells are mapped to that width and back, so that the weights grow with the
    number of columns and not with its square. Without it the block has the published width.

    Args:
        num_cells: Columns of the table.
        options: Widths of the model.
        attention: Name in the registry.
        attention_options: Options of that attention.
    """

    def __init__(
        self, num_cells: int, options: NPTOptions, attention: str, attention_options: Any = None
    ) -> None:
        super().__init__()
        width = num_cells * options.dim
        self.down = self.up = None
        if options.row_dim is not None:
            self.down, self.up = (
                nn.Linear(width, options.row_dim),
                nn.Linear(options.row_dim, width),
            )
        inner = options.row_dim or width
        self.block = TableBlock(inner, options, attention, attention_options)

    def tokens(self, x: Float[Tensor, "n d e"]) -> Float[Tensor, "1 n w"]:
        """Return the rows as tokens of one sequence."""
        flat = x.flatten(1)[None]
        return flat if self.down is None else self.down(flat)

    def cells(
        self, x: Float[Tensor, "n d e"], tokens: Float[Tensor, "1 n w"]
    ) -> Float[Tensor, "n d e"]:
        """Return the cells after the block, from those before it and the tokens after it."""
        if self.up is None:
            return tokens[0].view_as(x)
        return x + self.up(tokens)[0].view_as(x)
