"""Softmax attention with a key bias: the form of attention from corpus counts.

    y = softmax_j( q_i·k_j / √d + b_j ) v,        b_j = u·k_j

Row-normalised counts of word pairs are exactly such attention: the logits are PMI, and the key bias
is the log probability of the key (``analysis.counts``). So counts can start the layer:
:meth:`DistributionalTokenAttention.fit_tables_` sets its projections from queries, keys and biases
of word types. Their products are logits at temperature 1; the projection of queries takes up
``√d``. With ``q' = [q / √d, 1]`` and ``k' = [k, b]`` the layer is plain softmax attention.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.types import Device

from primal_attention.attention.base import JOINED_TIME, Capabilities, State
from primal_attention.attention.multihead import CachingCore, MultiHeadAttention
from primal_attention.attention.registry import register_attention
from primal_attention.attention.rotary import Turn
from primal_attention.kernels.base import Factory

__all__ = ["DistributionalCore", "DistributionalTokenAttention"]


class DistributionalCore(CachingCore):
    """``softmax(q kᵀ / √d + b) v`` in ``O(n m d)`` time.

    The key bias is ``b = u·k``, linear in the token. Rotations leave it alone: it is taken from
    the key before the turn.
    """

    undecayed = ("direction",)
    takes_turn = True
    capabilities = Capabilities(time=JOINED_TIME | {"rotary"})

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        zero = torch.zeros(num_heads, head_dim, device=device, dtype=dtype)
        self.direction = nn.Parameter(zero)

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        v: Float[Tensor, "b h m v"],
        *,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
        turn: Turn | None = None,
    ) -> Float[Tensor, "b h n v"]:
        """Return the softmax mean of the values; zero for a row without keys."""
        if turn is None:
            # (q / √d + u)·k keeps the width, which the fused kernel needs
            q = q * q.shape[-1] ** -0.5 + self.direction[:, None]
        else:
            q, k = self._with_bias(q, k, turn)
        if key_mask is None:
            return scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=1.0)
        keep = key_mask[:, None, None, :]
        if is_causal:
            keep = keep.expand(-1, -1, q.shape[2], -1).tril()
        return self._attend_masked(q, k, v, keep)

    def _with_bias(self, q: Tensor, k: Tensor, turn: Turn | None) -> tuple[Tensor, Tensor]:
        """Return ``[q / √d, 1]`` and ``[k, b]``, turned by positions if there are any."""
        q = q * q.shape[-1] ** -0.5
        bias = (k * self.direction[:, None]).sum(-1, keepdim=True)
        if turn is not None:
            q, k = turn.queries(q), turn.keys(k)
        return torch.cat([q, torch.ones_like(q[..., :1])], -1), torch.cat([k, bias], -1)

    def _attend_masked(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        y = scaled_dot_product_attention(q, k, v, attn_mask=keep, scale=1.0)
        return torch.where(keep.any(-1, keepdim=True), y, 0.0)

    def init_state(self, k: Float[Tensor, "b h zero d"], v: Float[Tensor, "b h zero v"]) -> State:
        """Return an empty cache of keys with their bias, values and their mask."""
        return super().init_state(torch.cat([k, k[..., :1]], -1), v)

    def step(
        self,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b h t d"],
        v: Float[Tensor, "b h t v"],
        state: State,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
        turn: Turn | None = None,
    ) -> tuple[Float[Tensor, "b h t v"], State]:
        """Append the tokens to the cache and attend to all of it; ``O(prefix)`` per token."""
        q, k = self._with_bias(q, k, turn)
        return super().step(q, k, v, state, key_mask=key_mask)


class DistributionalTokenAttention(MultiHeadAttention):
    """Multi-head softmax attention with a key bias that is linear in the token.

    The key bias starts at zero; then the layer computes what softmax attention computes.

    Args:
        dim: Model width.
        num_heads: Number of heads; must divide ``dim``.
        bias: Whether the four projections have a bias.
        dropout: Probability of dropping an element of the output in training.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Example:
        >>> DistributionalTokenAttention(16, 4)(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    core: DistributionalCore

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        bias: bool = True,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory: Factory = {"device": device, "dtype": dtype}
        heads = max(num_heads, 1)
        core = DistributionalCore(max(dim // heads, 1), heads, **factory)
        super().__init__(dim, num_heads, core, bias=bias, dropout=dropout, **factory)

    @torch.no_grad()
    def fit_tables_(
        self,
        embedding: Float[Tensor, "words c"],
        query: Float[Tensor, "words h s"],
        key: Float[Tensor, "words h s"],
        key_bias: Float[Tensor, " words"],
        *,
        frequency: Float[Tensor, " words"] | None = None,
    ) -> Float[Tensor, ""]:
        """Set queries, keys and key bias of words by least squares through an embedding table.

        The last coordinate of every head holds the key bias, so ``s`` is at most the head width
        minus one. Values and output keep their parameters.

        Args:
            embedding: Token vectors of the words, as the layer receives them.
            query: Wanted queries of the words.
            key: Wanted keys of the words; products with queries are logits at temperature 1.
            key_bias: Wanted key bias of the words.
            frequency: Weight of a word in the fit; by default all words count the same.

        Returns:
            Share of the variance of all wanted values that the projections reproduce.

        Example:
            >>> layer = DistributionalTokenAttention(4, 1)
            >>> table = torch.randn(3, 1, 2)
            >>> float(layer.fit_tables_(torch.eye(3, 4), table, table, torch.zeros(3)).round())
            1.0
        """
        words, h, s = query.shape
        d = self.head_dim
        if embedding.shape != (words, self.dim) or h != self.num_heads or s > d - 1:
            raise ValueError(
                f"embedding has shape {tuple(embedding.shape)} and queries {tuple(query.shape)}; "
                f"they must be [words {self.dim}] and [words {self.num_heads} s] with s at most "
                f"{d - 1}, one less than the head width."
            )
        wanted_q, wanted_k = (torch.zeros(words, h, d, dtype=torch.float64) for _ in range(2))
        wanted_q[..., :s], wanted_k[..., :s] = math.sqrt(d) * query.double(), key.double()
        wanted_k[..., -1] = key_bias.double()[:, None]
        rows = embedding.detach().double().cpu()
        weight = None if frequency is None else frequency.double().clamp_min(0).sqrt()[:, None]
        kept, total = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for projection, wanted in ((self.q_proj, wanted_q), (self.k_proj, wanted_k)):
            error, size = _fit_linear_(projection, rows, wanted.flatten(1), weight)
            kept, total = kept + size - error, total + size
        self.core.direction.zero_()
        self.core.direction[:, -1] = 1.0
        return kept / total


def _fit_linear_(
    linear: nn.Linear, rows: Tensor, wanted: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Set a linear layer to the least-squares fit; return its squared error and the variance."""
    weight = torch.ones_like(rows[:, :1]) if weight is None else weight
    if linear.bias is not None:
        rows = torch.cat([rows, torch.ones_like(rows[:, :1])], 1)
    # the smallest solution, also if there are fewer words than coordinates
    solution = torch.linalg.lstsq(weight * rows, weight * wanted, driver="gelsd").solution
    linear.weight.copy_(solution[: linear.in_features].T)
    mean = (weight**2 * wanted).sum(0) / (weight**2).sum()
    if linear.bias is not None:
        linear.bias.copy_(solution[-1])
    error = (weight * (rows @ solution - wanted)).square().sum()
    return error, (weight * (wanted - mean)).square().sum()


register_attention(
    "distributional",
    DistributionalTokenAttention,
    capabilities=DistributionalCore.capabilities,
    cost="n²",
    summary="softmax with a key bias; counts of a corpus can start it",
)
