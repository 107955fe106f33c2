"""Primal-Attention (Chen et al., NeurIPS 2023, arXiv 2305.19798) as a layer.

    e_i = W_{e|X}ᵀ φ(q_i)      r_i = W_{r|X}ᵀ φ(k_i)      y_i = O [C (e_i ; r_i) + c]

``φ`` is the cosine feature map, ``C`` maps the ``2s`` scores of a head to its width, ``O`` merges
the heads. The projection weights come from one of three sources:

- ``data``: ``W_{e|X} = Fᵀ W_e``, evenly spaced tokens ``F`` times learned codes of their relative
  position (the paper's layer);
- ``static``: parameters that see no token; information moves only through the causal prefix mean;
- ``dual``: ``W_{e|X} = Φ_kᵀ H_r / n`` with dual variables ``H`` read from the tokens, which
  enforces half of the stationarity conditions and lets content through.

The regulariser asks for an asymmetric kernel SVD of ``K = Φ_q FᵀF Φ_kᵀ``. Whether the learned
directions *are* singular directions is answered by :meth:`PrimalAttention.diagnose`, not assumed.
"""

import functools
import warnings
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear, softplus

from primal_attention.attention.base import Attention, Aux, Capabilities, State, is_plain
from primal_attention.attention.published import (
    SAMPLES_PER_DIRECTION,
    SOUND,
    Conventions,
    PublishedVariants,
    start_linear,
)
from primal_attention.attention.registry import register_attention
from primal_attention.attention.regularizers import (
    Diagnostics,
    Features,
    KernelProblem,
    Regularizer,
    TokenCount,
    energy_term,
)
from primal_attention.attention.rotary import Rotary
from primal_attention.attention.sources import (
    SOURCES,
    Source,
    linear_map,
    prefix_means,
)
from primal_attention.attention.terms import PublishesTerms
from primal_attention.functional import attend, split_heads
from primal_attention.functional.precision import accumulator
from primal_attention.functional.primal import fold_output, join

__all__ = ["Diagnostics", "PrimalAttention"]

Weights = Literal["data", "static", "dual"]
Codes = Literal["basis", "table"]


class PrimalAttention(Attention, PublishesTerms, PublishedVariants):
    """Attention through projections in the primal: linear in length, no values, no ``n × n``.

    Time ``O(n d s)`` per head beside the projections, or ``O(n d²)`` with ``data`` weights where
    that is less; memory for backward at most ``2 n (d + s)`` numbers per head; decoding state
    ``2 c`` (static) or ``2 c s`` (data, dual) numbers whatever the length.

    Args:
        dim: Model width ``c``.
        num_heads: Heads; must divide ``dim``.
        rank: Directions ``s`` per head; by default 32, or the head width if that is smaller.
        weights: ``"data"`` (the paper's), ``"static"`` (causal use only: otherwise no token sees
            another) or ``"dual"`` (carries content; the choice for pretrained models).
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

    basis: Float[Tensor, "k m"]
    w_e: nn.Parameter
    w_r: nn.Parameter
    dual_e: nn.Linear
    dual_r: nn.Linear

    undecayed = ("lam",)  # it weighs the KSVD term and never meets the data

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
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(dim, num_heads, dropout=dropout)
        if rank is None:
            rank = min(32, self.head_dim)
        elif rank > self.head_dim:
            warnings.warn(
                f"rank={rank} exceeds the head width {self.head_dim}: at most {self.head_dim} "
                "directions can be singular directions, the others only cost time.",
                stacklevel=2,
            )
        self._build(
            rank,
            weights,
            codes,
            decay,
            regularizer,
            bias,
            {"device": device, "dtype": dtype},
            num_samples=SAMPLES_PER_DIRECTION * rank,
            conventions=SOUND,
        )

    def _build(
        self,
        rank: int,
        weights: Weights,
        codes: Codes,
        decay: float | None,
        regularizer: Regularizer | None,
        bias: bool,
        factory: dict[str, Any],
        *,
        num_samples: int,
        conventions: Conventions,
    ) -> None:
        for name, value, choices in (
            ("weights", weights, get_args(Weights)),
            ("codes", codes, get_args(Codes)),
            ("regularizer", regularizer, (*get_args(Regularizer), None)),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {value!r}.")
        for name, count in (("rank", rank), ("num_samples", num_samples)):
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}.")
        if decay is not None and not (weights == "static" and 0 < decay < 1):
            raise ValueError(
                f"decay needs weights='static' and a value between 0 and 1, got "
                f"weights={weights!r} and decay={decay}; leave it out for a plain prefix mean."
            )
        self.rank, self.weights, self.codes, self.decay = rank, weights, codes, decay
        self.regularizer, self.num_samples = regularizer, num_samples
        self.conventions = conventions
        is_sound = conventions == SOUND
        self.capabilities = _capabilities(
            weights,
            padding=conventions.mask != "refuse",
            causal=is_sound or conventions.causal_only,
            stateful=is_sound or conventions.causal_only,
            cross=self.source.cross and is_sound,
            aux_loss=regularizer is not None,
        )
        dim, h, d = self.dim, self.num_heads, self.head_dim
        self.q_proj = nn.Linear(dim, dim, bias, **factory)
        self.k_proj = nn.Linear(dim, dim, bias, **factory)
        self.out_proj = nn.Linear(dim, dim, bias, **factory)
        self.concat = nn.Linear(2 * rank, d, bias, **factory)
        self.lam = nn.Parameter(torch.empty(h, rank, **factory), regularizer in ("ksvd", "kkt"))
        self.source.create(self, factory)
        self.reset_parameters()

    @property
    def source(self) -> Source:
        """Where the projection weights come from."""
        return SOURCES[self.weights]

    @property
    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
        """The four linear maps that every primal layer has."""
        # the plain attributes take four times as long, which short sequences notice
        own: Any = self._modules
        return own["q_proj"], own["k_proj"], own["concat"], own["out_proj"]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new parameters."""
        for name, module in self.named_children():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
                start_linear(self.conventions, name, module)
        nn.init.uniform_(self.lam)
        if self.conventions.positive_lam:
            # softplus of this is uniform between 0.1 and 1
            self.lam.mul_(0.9).add_(0.1).expm1_().log_()
        self.source.reset(self)

    @property
    def ell(self) -> Float[Tensor, "h s"]:
        """The regulariser's ``ℓ`` in float32 or better; positive, except in published layers."""
        lam = self.lam.to(accumulator(self.lam))
        return softplus(lam) if self.conventions.positive_lam else lam

    def extra_repr(self) -> str:
        """Return what the layer's line shows when a model is printed."""
        parts = [f"{self.dim}", f"num_heads={self.num_heads}", f"rank={self.rank}"]
        parts.append(f"weights={self.weights!r}")
        if self.weights == "data":
            parts.append(f"codes={self.codes!r}")
        if self.decay is not None:
            parts.append(f"decay={self.decay}")
        return ", ".join([*parts, f"regularizer={self.regularizer!r}"])

    # forward

    def forward(
        self,
        x: Float[Tensor, "b n c"],
        context: Float[Tensor, "b m c"] | None = None,
        *more: Any,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
        return_aux: bool = False,
        rotary: Rotary | None = None,
    ) -> Any:
        """Attend from ``x`` to ``context`` or to itself; see :class:`Attention`.

        In training the regulariser is published for ``ksvd_loss``, or returned with
        ``return_aux=True``. With a context both scores of ``x`` use weights made of the context
        alone. ``rotary`` turns queries and keys by the positions of ``x``: for ``dual`` weights,
        the only ones that compare tokens with each other.
        """
        self._check(x, context, key_mask, is_causal, return_aux, rotary=rotary, more=more)
        self._check_mixing(is_causal)
        regularizer = self.regularizer if return_aux or self.training else None
        output_mask = key_mask if self.conventions.mask == "output" else None
        if output_mask is not None:
            key_mask = None
        x, context = _zero_padding(x, context, key_mask)
        if is_causal:
            y, term, _ = self._causal(x, key_mask, self.init_state(len(x)), regularizer, rotary)
        elif self._is_simple(context, regularizer, output_mask, rotary):
            memory, query_mask = (x, key_mask) if context is None else (context, None)
            weights = self.source.tie(self, memory, None, key_mask)
            tokens = weights.tokens if context is None else x
            wanted = regularizer is not None
            y, energy = self.source.attend(
                self, tokens, weights.joint, query_mask, has_energy=wanted
            )
            term = self._energy_term(regularizer, energy, weights.joint, x.shape[1], key_mask)
        else:
            y, term = self._open(x, context, key_mask, output_mask, regularizer, rotary)
        y = self.dropout(y)
        if key_mask is not None and context is None:
            y = torch.where(key_mask[:, :, None], y, 0.0)
        if return_aux:
            self.witness()
            return y, Aux(term)  # type: ignore[arg-type]  # checked: there is a regulariser
        if term is not None:
            self.publish({"": term})
        return y

    def _check_mixing(self, is_causal: bool) -> None:
        if is_causal or self.capabilities.mixes_without_order:
            return
        if self.conventions.causal_only:
            raise ValueError("This published layer is causal; call it with is_causal=True.")
        if not torch.compiler.is_compiling():
            warnings.warn(
                "static weights without is_causal=True mix no tokens: every output depends on "
                "its own token only. Use weights='data' or 'dual'.",
                stacklevel=3,
            )

    def _is_simple(
        self,
        context: Tensor | None,
        regularizer: Regularizer | None,
        output_mask: Tensor | None,
        rotary: Rotary | None,
    ) -> bool:
        """Return whether the two stages suffice: nothing needs the heads of the tokens."""
        if regularizer is not None and (regularizer == "kkt" or context is not None):
            return False
        return rotary is None and output_mask is None and all(map(is_plain, self.projections))

    def _open(
        self,
        x: Tensor,
        context: Tensor | None,
        key_mask: Tensor | None,
        output_mask: Tensor | None,
        regularizer: Regularizer | None,
        rotary: Rotary | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return output and regulariser by way of the heads, every projection called by itself."""
        heads = self.project_heads(x, rotary)
        memory, query_mask = x, key_mask
        memory_heads: Tensor | None = heads
        if context is not None:
            memory, query_mask = context, None
            memory_heads = None if regularizer is None else self.project_heads(context)
        weights = self.source.tie(self, memory, memory_heads, key_mask)
        scores, energy = self._scores(heads, weights.joint, query_mask)
        y = self._emit(scores, output_mask)
        if regularizer is None:
            return y, None
        if context is None and regularizer != "kkt":
            given = energy, weights.joint, x.shape[1], query_mask
            return y, self._energy_term(regularizer, *given)
        q, k = heads.chunk(2, dim=1)
        if context is not None and memory_heads is not None:
            mq, k = memory_heads.chunk(2, dim=1)
            if self.weights == "dual":  # poses the whole problem on the context
                q, query_mask = mq, key_mask
        sides = Features(q, query_mask), Features(k, key_mask)
        problem = self._problem(memory, *sides, weights.joint, weights.duals)
        return y, problem.term(regularizer, self.conventions.reduction)

    def project_heads(
        self, x: Float[Tensor, "b n c"], rotary: Rotary | None = None
    ) -> Float[Tensor, "b both n d"]:
        """Return the heads of the queries and, after them, of the keys."""
        heads = self._project_both(x, self.q_proj, self.k_proj)
        return heads if rotary is None else rotary.turn(heads)

    def project_duals(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b both n s"]:
        """Return the dual variables of the query side and, after them, of the key side."""
        return self._project_both(x, self.dual_e, self.dual_r)

    def _project_both(self, x: Tensor, first: nn.Linear, second: nn.Linear) -> Tensor:
        """Return the heads of two maps; of plain ones as one map, which is faster."""
        if is_plain(first) and is_plain(second) and not self._is_brief(x):
            both = linear(x, *join(linear_map(first), linear_map(second)))
        else:
            both = torch.cat([first(x), second(x)], dim=-1)
        return both.unflatten(-1, (2 * self.num_heads, -1)).transpose(1, 2)

    def _is_brief(self, x: Float[Tensor, "b n c"]) -> bool:
        """Return whether so few tokens pass that joining maps costs more than applying them."""
        return not torch.compiler.is_compiling() and x.shape[0] * x.shape[1] < 2 * self.rank

    def _scores(
        self, heads: Tensor, w: Float[Tensor, "#b both d s"], key_mask: Tensor | None
    ) -> tuple[Float[Tensor, "b n both_s"], Float[Tensor, "b both s"] | None]:
        """Return the scores of given heads, and their energy."""
        (parts,) = split_heads(self._merge(heads), 2 * self.num_heads, None)
        return attend(parts, w, None, key_mask=key_mask, eps=self.conventions.eps)

    def _emit(
        self, scores: Float[Tensor, "b n both_s"], output_mask: Tensor | None = None
    ) -> Float[Tensor, "b n c"]:
        """Return the layer's output from the scores of all query and all key heads."""
        plain = is_plain(self.out_proj) and is_plain(self.concat)
        if plain and output_mask is None and not self._is_brief(scores):
            return linear(scores, *fold_output(linear_map(self.concat), linear_map(self.out_proj)))
        by_head = scores.unflatten(-1, (2, self.num_heads, -1)).permute(0, 3, 1, 2, 4).flatten(3)
        heads = self.concat(by_head)  # [b h n d]
        if output_mask is not None:
            heads = torch.where(output_mask[:, None, :, None], heads, 0.0)
        return self.out_proj(self._merge(heads))

    def _causal(
        self,
        x: Tensor,
        key_mask: Tensor | None,
        start: State,
        regularizer: Regularizer | None,
        rotary: Rotary | None,
    ) -> tuple[Tensor, Tensor | None, State]:
        if regularizer == "kkt" and self.weights == "data":
            raise ValueError(
                "regularizer='kkt' is undefined for causal data-dependent weights: they change "
                "with every token, so there is no one kernel. Use 'ksvd', or weights='dual'."
            )
        position = start.seen[:, None] + _counts(x, key_mask)
        found = self.source.causal(self, x, position, key_mask, start, rotary)
        y = self._emit(self._merge(found.scores.to(x.dtype)))
        count = start.seen + (x.shape[1] if key_mask is None else key_mask.sum(1))
        state = State(found.state, count)
        if regularizer != "kkt":
            given = found.energy, found.weights, x.shape[1], key_mask
            return y, self._energy_term(regularizer, *given), state
        queries, keys = (Features(side, key_mask) for side in found.heads.chunk(2, dim=1))
        problem = self._problem(x, queries, keys, found.weights, found.duals)
        return y, problem.term("kkt", self.conventions.reduction, found.scores), state

    # regulariser and diagnostics

    def _energy_term(
        self,
        regularizer: Regularizer | None,
        energy: Float[Tensor, "b both s"] | None,
        w: Float[Tensor, "#b both d s"],
        tokens: int,
        key_mask: Bool[Tensor, "b n"] | None,
    ) -> Float[Tensor, ""] | None:
        """Return a regulariser of self-attention that needs the energy alone."""
        if regularizer is None or regularizer == "kkt" or energy is None:
            return None
        w_e, w_r = self.source.codes(self) or w.chunk(2, dim=1)
        count, reduction = TokenCount(tokens, key_mask), self.conventions.reduction
        return energy_term(regularizer, reduction, energy, (count, count), self.ell, (w_e, w_r))

    def _problem(
        self,
        memory: Tensor,
        queries: Features,
        keys: Features,
        w: Float[Tensor, "#b both d s"],
        duals: Tensor | None,
    ) -> KernelProblem:
        rows = self.source.features(self, memory, keys.key_mask)
        codes, eps = self.source.codes(self), self.conventions.eps
        return KernelProblem(queries, keys, w, rows, codes, duals, self.ell, eps)

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

        Works whatever the training loss was. Costs ``O(n d²)`` per head; no ``n × n`` matrix.

        Args:
            x: Tokens, as for ``forward``.
            context: Memory, as for ``forward``.
            key_mask: ``True`` where a token of the memory is real.
            is_causal: Look at the causal layer; not defined for ``data`` weights, which have no one
                kernel behind them.

        Example:
            >>> layer = PrimalAttention(16, 2, rank=4)
            >>> bool((layer.diagnose(torch.randn(1, 40, 16)).kkt > 0.3).all())  # not trained
            True
        """
        self._check(x, context, key_mask, is_causal)
        if is_causal and self.weights == "data":
            raise ValueError(
                "Causal data-dependent weights change with every token; there is no one kernel to "
                "diagnose. Call diagnose without is_causal."
            )
        key_mask = key_mask if self.conventions.mask == "aware" else None
        x, context = _zero_padding(x, context, key_mask)
        memory = x if context is None else context
        is_dual = self.weights == "dual"
        heads = self.project_heads(memory)
        if is_causal and self.weights == "static":
            zero = x.new_zeros(len(x), 2 * self.dim, dtype=accumulator(x))
            position = _counts(x, key_mask)
            means, _ = prefix_means(self._merge(heads), position, key_mask, zero, self.decay)
            heads = means.unflatten(-1, (2 * self.num_heads, -1)).transpose(1, 2)
        q, k = heads.chunk(2, dim=1)
        weights = self.source.tie(self, memory, heads, key_mask)
        queries = Features(q, key_mask)
        if context is not None and not is_dual:
            queries = Features(self._split(self.q_proj(x)), None)
        keys = Features(k, key_mask)
        return self._problem(memory, queries, keys, weights.joint, weights.duals).diagnose()

    # decoding

    def init_state(self, batch_size: int) -> State:
        """Return the state before the first token: ``2 c`` or ``2 c s`` zeros per sequence."""
        if not self.capabilities.stateful:
            return super().init_state(batch_size)
        weight, shape = self.q_proj.weight, self.source.state_shape(self)
        zeros = weight.new_zeros((batch_size, *shape), dtype=accumulator(weight))
        return State((zeros, zeros), weight.new_zeros(batch_size, dtype=torch.long))

    def step(
        self,
        x: Float[Tensor, "b t c"],
        state: State,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
        rotary: Rotary | None = None,
    ) -> tuple[Float[Tensor, "b t c"], State]:
        """Decode the next tokens at constant cost; see :meth:`Attention.step`."""
        self._check(x, key_mask=key_mask, is_causal=True, state=state, rotary=rotary)
        if len(state.tensors) != 2:
            raise ValueError("This state is of a context, which recall reads; use init_state.")
        x, _ = _zero_padding(x, None, key_mask)
        y, _, after = self._causal(x, key_mask, state, None, rotary)
        y = self.dropout(y)
        after = after.compact()
        return (y if key_mask is None else torch.where(key_mask[:, :, None], y, 0.0)), after

    def remember(
        self, context: Float[Tensor, "b m c"], *, key_mask: Bool[Tensor, "b m"] | None = None
    ) -> State:
        """Return the projection weights of a context: ``2 c s`` numbers whatever its length.

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
        context, _ = _zero_padding(context, None, key_mask)
        counts = _counts(context, key_mask)[:, -1:].sum(1)  # also without tokens
        joint = self.source.tie(self, context, None, key_mask).joint
        return State((joint,), counts).compact()

    def recall(self, x: Float[Tensor, "b n c"], memory: State) -> Float[Tensor, "b n c"]:
        """Attend from ``x`` to a context that :meth:`remember` has seen: ``O(n c s)``.

        The result is that of ``forward`` with the context itself, which would read it once more for
        every token decoded. Nothing is published for ``ksvd_loss``: train with ``forward``.

        Args:
            x: Tokens to attend from.
            memory: From :meth:`remember`; ``memory.reorder`` serves beam search.
        """
        self._check(x, state=memory)
        if len(memory.tensors) != 1:
            raise ValueError("This state is of decoded tokens, not of a context; use step.")
        scores, _ = self._scores(self.project_heads(x), memory.tensors[0], None)
        return self.dropout(self._emit(scores))


def _zero_padding(
    x: Tensor, context: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Zero padded tokens: a NaN in a padded slot must reach neither result nor gradient."""
    if key_mask is None:
        return x, context
    if context is None:
        return torch.where(key_mask[:, :, None], x, 0.0), None
    return x, torch.where(key_mask[:, :, None], context, 0.0)


def _counts(x: Tensor, key_mask: Tensor | None) -> Int[Tensor, "b n"]:
    """Return how many real tokens there are up to each."""
    if key_mask is None:
        return torch.arange(1, x.shape[1] + 1, device=x.device).expand(x.shape[0], -1)
    return key_mask.cumsum(1)


def _capabilities(weights: Weights, **also: bool) -> Capabilities:
    """Return the capabilities of a layer with these weights."""
    source = SOURCES[weights]
    own = {"rotary": source.rotary, "mixes_without_order": source.mixes_without_order}
    return Capabilities(**{"cross": source.cross, "aux_loss": True, **own, **also})


_VARIANTS: tuple[tuple[str, Weights, str], ...] = (
    ("primal", "data", "projections onto sampled tokens with learned position codes"),
    ("primal-static", "static", "projections of prefix means; for causal use"),
    ("primal-dual", "dual", "projections tied to dual variables; carries content"),
)
for _name, _weights, _summary in _VARIANTS:
    register_attention(
        _name,
        functools.partial(PrimalAttention, weights=_weights),
        capabilities=_capabilities(_weights),
        cost="n",
        summary=_summary,
    )
