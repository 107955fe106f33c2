"""Primal-Attention (Chen et al., NeurIPS 2023, arXiv 2305.19798) as a layer.

    e_i = W_{e|X}ᵀ φ(q_i)      r_i = W_{r|X}ᵀ φ(k_i)      y_i = O [C (e_i ; r_i) + c]

``φ`` is the cosine feature map, ``C`` maps the ``2s`` scores of a head to its width, ``O`` merges
the heads. The projection weights come from one of three sources:

- ``data``: ``W_{e|X} = Fᵀ W_e``, evenly spaced tokens ``F`` times learned codes of their relative
  position (the paper's layer);
- ``static``: parameters that see no token; information moves only through the causal prefix mean;
- ``dual``: ``W_{e|X} = Φ_kᵀ H_r / n`` with dual variables ``H`` read from the tokens, which
  enforces half of the stationarity conditions and lets content through.

The regulariser comes from an asymmetric kernel SVD of ``K = Φ_q FᵀF Φ_kᵀ``. Learned directions need
not be singular directions: :meth:`PrimalAttention.diagnose` measures how far they are from them.
"""

import functools
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.types import Device

from primal_attention.attention.base import Aux, State, plain_maps
from primal_attention.attention.kernel_problem import (
    Diagnostics,
    KernelProblem,
    pose_on_tokens,
    pose_problem,
)
from primal_attention.attention.primal_parameters import (
    CAPABILITIES,
    Codes,
    PrimalParameters,
    Weights,
    count_tokens,
    zero_padding,
)
from primal_attention.attention.registry import register_attention
from primal_attention.attention.regularizers import Regularizer, TokenCount, energy_term
from primal_attention.attention.rotary import Turn
from primal_attention.attention.sources import Prefix, WeightSource, prefix_means
from primal_attention.attention.terms import PublishesTerms
from primal_attention.functional import LayerMaps, LinearMap, attend
from primal_attention.functional.precision import accumulator

__all__ = ["Diagnostics", "PrimalAttention", "merge_memories"]


class PrimalAttention(PrimalParameters, PublishesTerms):
    """Attention through projections in the primal: linear in length, no values, no ``n × n``.

    Time ``O(n d s)`` per head beside the projections, or ``O(n d²)`` with ``data`` weights where
    that is less; memory for backward at most ``2 n (d + s)`` numbers per head; decoding state
    ``2 c`` (static) or ``2 c s`` (data, dual) numbers at every length.

    In training the regulariser is published for ``ksvd_loss``, or returned with
    ``return_aux=True``. With a context both scores of ``x`` use weights made of the context alone.
    ``rotary`` is for ``dual`` weights, the only ones that compare tokens with each other.

    Args:
        dim: Model width ``c``.
        num_heads: Heads; must divide ``dim``.
        rank: Directions ``s`` per head; by default 32, or the head width if that is smaller.
        weights: ``"data"`` (the paper's), ``"static"`` (for causal use: otherwise an output
            depends on its own token only) or ``"dual"`` (carries content; the choice for
            pretrained models).
        codes: How ``data`` weights store the code of a relative position: ``"basis"``, smooth
            functions that suit every length, or ``"table"``, one free row per sampled position.
        decay: With ``static`` weights, replace the prefix mean by ``γ m + (1 - γ) q``; a plain mean
            hardly moves after a few hundred tokens.
        regularizer: ``"ksvd"`` (published ``J²``), ``"kkt"`` (residual of the optimality conditions
            plus orthogonality), ``"balance"`` or ``None``; the last two freeze ``lam``, which they
            do not use.
        bias: Whether projections and output map have a bias.
        dropout: Probability of dropping an element of the output in training.
        device: Where to create the parameters.
        dtype: Type of the parameters.

    Example:
        >>> attn = PrimalAttention(64, 4, rank=8)
        >>> x, keep = torch.randn(2, 50, 64), torch.arange(50) < torch.tensor([[50], [31]])
        >>> attn(x, key_mask=keep).shape
        torch.Size([2, 50, 64])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        rank: int | None = None,
        weights: Weights = "data",
        codes: Codes = "basis",
        decay: float | None = None,
        regularizer: Regularizer | None = "ksvd",
        bias: bool = True,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            dim,
            num_heads,
            rank=rank,
            weights=weights,
            codes=codes,
            decay=decay,
            regularizer=regularizer,
            bias=bias,
            dropout=dropout,
            device=device,
            dtype=dtype,
        )
        if self.rank > self.head_dim:
            warnings.warn(
                f"rank={rank} exceeds the head width {self.head_dim}: at most {self.head_dim} "
                "directions can be singular directions, the others only cost time.",
                stacklevel=2,
            )

    def _forward(
        self,
        x: Tensor,
        context: Tensor | None,
        key_mask: Tensor | None,
        rotary: Turn | None,
        *,
        is_causal: bool,
        return_aux: bool,
    ) -> tuple[Tensor, Aux | None]:
        if not (is_causal or self.capabilities.mixes_without_order):
            self._warn_unmixed()
        regularizer = self.regularizer if return_aux or self.training else None
        if is_causal and regularizer == "kkt" and self.weights == "data":
            raise ValueError(
                "regularizer='kkt' is undefined for causal weights='data': their kernel changes "
                "with every token. Use regularizer='ksvd', or weights='dual'."
            )
        output_mask = None
        if self.conventions.mask == "output":
            output_mask, key_mask = key_mask, None
        if key_mask is not None:
            x, context = zero_padding(x, context, key_mask)
        memory = x if context is None else context
        # one function differentiates the whole layer, unless somebody looks at a part of it
        is_whole = rotary is None and regularizer != "kkt"
        is_whole = is_whole and (context is None or regularizer is None)
        layers = self.q_proj, self.k_proj, self.concat, self.out_proj
        maps = plain_maps(layers) if is_whole else None
        if is_causal:
            found = self._causal(x, key_mask, self.init_state(x.shape[0]), rotary, maps)
        elif maps is None:
            found = self._attend_by_heads(x, context, key_mask, rotary, regularizer)
        else:
            source = self.source(memory)
            w, tokens = source.tie(memory, key_mask)
            y, energy = attend(
                tokens if context is None else x,
                w,
                LayerMaps(*maps),
                key_mask=key_mask if context is None else None,
                eps=self.conventions.eps,
                has_energy=regularizer is not None,
            )
            found = _Attended(y, energy, w, source)
        term, reduction = None, self.conventions.reduction
        if regularizer == "kkt" or (regularizer is not None and context is not None):
            term = self._pose(found, memory, key_mask).term(regularizer, reduction, found.wide)
        elif regularizer is not None and found.energy is not None:
            # the trace has free weights as its factors, or the weights that duals make
            w_e, w_r = found.source.codes or found.weights.chunk(2, dim=1)
            count = TokenCount(x.shape[1], key_mask)
            given = found.energy, (count, count), self.ell, (w_e, w_r)
            term = energy_term(regularizer, reduction, *given)
        y = self.dropout(found.y)
        if key_mask is not None and context is None:
            y = torch.where(key_mask[:, :, None], y, 0.0)
        if output_mask is not None:
            # published: heads of padding pass zeros to the output map
            empty = self.out_proj(torch.zeros_like(y[:1, :1]))
            y = torch.where(output_mask[:, :, None], y, empty)
        if term is None:
            return y, None
        self.publish(None if return_aux else {"": term})
        return y, Aux(term)

    def _warn_unmixed(self) -> None:
        if self.conventions.causal_only:
            raise ValueError("This published layer is causal; call it with is_causal=True.")
        if not torch.compiler.is_compiling():
            warnings.warn(
                "static weights without is_causal=True mix no tokens: every output depends on "
                "its own token only. Use weights='data' or 'dual'.",
                stacklevel=4,
            )

    def _attend_by_heads(
        self,
        x: Tensor,
        context: Tensor | None,
        key_mask: Tensor | None,
        rotary: Turn | None,
        regularizer: Regularizer | None,
    ) -> "_Attended":
        """Attend with every projection called by itself."""
        heads = self.project_heads(x, rotary)
        memory, memory_heads = (x, heads) if context is None else (context, None)
        if context is not None and regularizer is not None:
            # only a regulariser looks at the heads of the context
            memory_heads = self.project_heads(context)
        source = self.source(memory, memory_heads)
        w = source.tie(memory, key_mask).joint
        scores, energy = self.project_scores(heads, w, key_mask if context is None else None)
        return _Attended(self.project_out(scores), energy, w, source, heads, memory_heads)

    def _causal(
        self,
        x: Tensor,
        key_mask: Tensor | None,
        start: State,
        rotary: Turn | None,
        maps: list[LinearMap] | None,
    ) -> "_Attended":
        """Attend in causal order; with ``maps`` nothing came before and nobody needs the state."""
        position = start.seen[:, None] + count_tokens(x, key_mask)
        if maps is not None and self.weights == "static":
            # queries and keys are linear in the tokens: so are their means in the means of tokens
            means, _ = prefix_means(x, position, key_mask, start.tensors[0], self.decay)
            source = self.source(x)
            w, eps = source.tie(x, key_mask).joint, self.conventions.eps
            y, energy = attend(means, w, LayerMaps(*maps), key_mask=key_mask, eps=eps)
            return _Attended(y, energy, w, source)
        heads = self.project_heads(x, rotary)
        source = self.source(x, heads)
        found = source.causal(x, heads, Prefix(position, key_mask, start))
        y, both = self.project_out(found.scores), (found.heads, found.heads)
        return _Attended(y, found.energy, found.weights, source, *both, found.wide, found.state)

    # regulariser and diagnostics

    def _pose(self, found: "_Attended", memory: Tensor, key_mask: Tensor | None) -> KernelProblem:
        """Return the kernel SVD that the layer poses on its tokens."""
        heads, memory_heads = found.heads, found.memory_heads
        if heads is None or memory_heads is None:
            raise RuntimeError("The regulariser needs the heads of all tokens.")
        return pose_problem(
            self, found.source, heads, memory, memory_heads, found.weights, key_mask
        )

    @torch.no_grad()
    def diagnose(
        self,
        x: Float[Tensor, "b n c"],
        context: Float[Tensor, "b m c"] | None = None,
        *,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
    ) -> Diagnostics:
        """Measure how far the layer is from an asymmetric kernel SVD on these tokens.

        Works with every regulariser. Costs ``O(n d²)`` per head; no ``n × n`` matrix.

        Args:
            x: Tokens, as for ``forward``.
            context: Memory, as for ``forward``.
            key_mask: ``True`` where a token of the memory is real.
            is_causal: Whether to diagnose the causal layer; an error with ``data`` weights, whose
                kernel changes with every token.

        Example:
            >>> layer = PrimalAttention(16, 2, rank=4)
            >>> bool((layer.diagnose(torch.randn(1, 40, 16)).kkt > 0.3).all())  # not trained
            True
        """
        self._check(x, context, key_mask, is_causal)
        if is_causal and self.weights == "data":
            raise ValueError(
                "The kernel of causal weights='data' changes with every token, so it has no "
                "diagnosis. Call diagnose without is_causal."
            )
        key_mask = key_mask if self.conventions.mask == "aware" else None
        x, context = zero_padding(x, context, key_mask)
        return pose_on_tokens(self, x, context, key_mask, is_causal=is_causal).diagnose()

    # decoding

    def init_state(self, batch_size: int) -> State:
        """Return the state before the first token: ``2 c`` or ``2 c s`` zeros per sequence."""
        if not self.capabilities.stateful:
            return super().init_state(batch_size)
        weight = self.q_proj.weight
        shape: tuple[int, ...] = self.num_heads, self.feature_dim, self.rank
        if self.weights == "static":
            # the sum of the queries, or of the keys: no weights are made of tokens
            shape = (self.dim,)
        zeros = weight.new_zeros((batch_size, *shape), dtype=accumulator(weight))
        return State((zeros, zeros), weight.new_zeros(batch_size, dtype=torch.long))

    def step(
        self,
        x: Float[Tensor, "b t c"],
        state: State,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
        rotary: Turn | None = None,
    ) -> tuple[Float[Tensor, "b t c"], State]:
        """Decode the next tokens at constant cost; see :meth:`Attention.step`."""
        self._check(x, key_mask=key_mask, is_causal=True, state=state, rotary=rotary)
        if len(state.tensors) != 2:
            raise ValueError("This state comes from remember; pass one from init_state or step.")
        x, _ = zero_padding(x, None, key_mask)
        found = self._causal(x, key_mask, state, rotary, None)
        y = self.dropout(found.y)
        y = y if key_mask is None else torch.where(key_mask[:, :, None], y, 0.0)
        seen = state.seen + (x.shape[1] if key_mask is None else key_mask.sum(1))
        # a state outlives the prompt it was made of
        return y, State(found.state, seen).compact()

    def remember(
        self, context: Float[Tensor, "b m c"], *, key_mask: Bool[Tensor, "b m"] | None = None
    ) -> State:
        """Return the projection weights of a context: ``2 c s`` numbers at every length.

        Args:
            context: Tokens to attend to, as for ``forward``.
            key_mask: ``True`` where a token of the context is real.

        Example:
            >>> layer = PrimalAttention(16, 2, rank=4).eval()
            >>> context, x = torch.randn(1, 900, 16), torch.randn(1, 1, 16)
            >>> memory = layer.remember(context)
            >>> torch.allclose(layer.recall(x, memory), layer(x, context), atol=1e-5)
            True
        """
        self._check(context, context, key_mask)
        context, _ = zero_padding(context, None, key_mask)
        counts = count_tokens(context, key_mask)[:, -1:].sum(1)  # also without tokens
        joint = self.source(context).tie(context, key_mask).joint
        return State((joint,), counts).compact()

    def recall(self, x: Float[Tensor, "b n c"], memory: State) -> Float[Tensor, "b n c"]:
        """Attend from ``x`` to a context of which :meth:`remember` keeps the weights: ``O(n c s)``.

        The result equals that of ``forward`` with the context, without reading the context again.
        Nothing is published for ``ksvd_loss``: train with ``forward``.

        Args:
            x: Tokens to attend from.
            memory: From :meth:`remember`; ``memory.reorder`` serves beam search.
        """
        self._check(x, state=memory)
        if len(memory.tensors) != 1:
            raise ValueError("This state comes from init_state or step; pass one from remember.")
        scores, _ = self.project_scores(self.project_heads(x), memory.tensors[0], None)
        return self.dropout(self.project_out(scores))


class _Attended(NamedTuple):
    """What the three ways through a layer have in common."""

    y: Float[Tensor, "b n c"]
    """The output, before dropout."""
    energy: Float[Tensor, "b both s"] | None
    """Sum of the squared scores over tokens."""
    weights: Float[Tensor, "#b both d s"]
    """The projection weights of all query heads and, after them, of all key heads."""
    source: WeightSource
    """What the weights were made of."""
    heads: Float[Tensor, "b both n d"] | None = None
    """What was projected, where it was formed."""
    memory_heads: Float[Tensor, "b both m d"] | None = None
    """Heads of the tokens that were attended to; the same object for self-attention."""
    wide: Float[Tensor, "b both n s"] | None = None
    """Scores of weights that differ from token to token."""
    state: tuple[Tensor, ...] = ()
    """The sums after the last token, where they were formed."""


def merge_memories(memories: Sequence[State]) -> State:
    """Return the memory of a context from the memories of its parts, for ``dual`` weights.

    Dual weights are means over tokens, so the mean of the parts, weighted by their sizes, is exact.

    Args:
        memories: From :meth:`PrimalAttention.remember`, one for each part.

    Example:
        >>> layer = PrimalAttention(16, 2, weights="dual").eval()
        >>> x, parts = torch.randn(1, 3, 16), torch.randn(1, 900, 16).split(400, dim=1)
        >>> memory = merge_memories([layer.remember(part) for part in parts])
        >>> torch.allclose(layer.recall(x, memory), layer(x, torch.cat(parts, 1)), atol=1e-5)
        True
    """
    if len(memories) == 1:
        return memories[0]
    counts = torch.stack([memory.seen for memory in memories])  # [parts b]
    seen = counts.sum(0)
    joint = torch.stack([memory.tensors[0] for memory in memories])  # [parts b both d s]
    # at least one: if all parts are empty, the shares are zero and not NaN
    shares = counts.to(joint.dtype) / seen.clamp_min(1)
    return State((torch.einsum("pbhds,pb->bhds", joint, shares),), seen)


_VARIANTS: tuple[tuple[str, Weights, str], ...] = (
    ("primal", "data", "projections onto sampled tokens with learned position codes"),
    ("primal-static", "static", "projections of prefix means; for causal use"),
    ("primal-dual", "dual", "projections tied to dual variables; carries content"),
)
for _name, _weights, _summary in _VARIANTS:
    register_attention(
        _name,
        functools.partial(PrimalAttention, weights=_weights),
        capabilities=CAPABILITIES[_weights],
        cost="n",
        summary=_summary,
    )
