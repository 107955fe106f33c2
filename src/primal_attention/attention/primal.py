"""Primal-Attention (Chen et al., NeurIPS 2023, arXiv 2305.19798) as a drop-in layer.

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
import math
import warnings
from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear, softplus

from primal_attention.attention.base import Attention, Aux, Capabilities, State, is_plain
from primal_attention.attention.problem import (
    Diagnostics,
    Problem,
    Regularizer,
    Side,
    Tied,
    energy_term,
)
from primal_attention.attention.published import (
    PUBLISHED,
    SOUND,
    Conventions,
    published_state_dict,
    start_linear,
    translate_state_dict,
)
from primal_attention.attention.registry import register_attention
from primal_attention.attention.rotary import Rotary
from primal_attention.attention.terms import PublishesTerms
from primal_attention.functional import (
    Linear,
    Projection,
    attend,
    attend_dual,
    attend_sampled,
    causal_sums,
    decayed_sum,
    dual_weights,
    fold,
    join,
    normalize_rows,
    parameter_trace,
    prefix_sum,
    project,
    sample_rows,
    tie_rows,
)
from primal_attention.functional.precision import accumulator, full_precision, representable

__all__ = ["Diagnostics", "PrimalAttention"]

Weights = Literal["data", "static", "dual"]
Codes = Literal["basis", "table"]

_SAMPLES_PER_DIRECTION = 10
"""Sampled rows per direction, the paper's rule."""
_HORIZON = 2.0**16
"""Codes of the causal layer vary smoothly in ``log t`` and repeat beyond this many tokens."""


class PrimalAttention(Attention, PublishesTerms):
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
            num_samples=_SAMPLES_PER_DIRECTION * rank,
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
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}.")
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}.")
        for name, value, choices in (
            ("weights", weights, get_args(Weights)),
            ("codes", codes, get_args(Codes)),
            ("regularizer", regularizer, (*get_args(Regularizer), None)),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {value!r}.")
        if decay is not None and not (weights == "static" and 0 < decay < 1):
            raise ValueError(
                f"decay needs weights='static' and a value between 0 and 1, got "
                f"weights={weights!r} and decay={decay}; leave it out for a plain prefix mean."
            )
        self.rank, self.weights, self.codes, self.decay = rank, weights, codes, decay
        self.regularizer, self.num_samples = regularizer, num_samples
        self.conventions = conventions
        self.capabilities = Capabilities(
            padding=conventions.mask != "refuse",
            causal=conventions == SOUND or conventions.causal_only,
            stateful=conventions == SOUND or conventions.causal_only,
            cross=weights != "static" and conventions == SOUND,
            aux_loss=regularizer is not None,
        )
        dim, h, d = self.dim, self.num_heads, self.head_dim
        self.q_proj = nn.Linear(dim, dim, bias, **factory)
        self.k_proj = nn.Linear(dim, dim, bias, **factory)
        self.out_proj = nn.Linear(dim, dim, bias, **factory)
        self.concat = nn.Linear(2 * rank, d, bias, **factory)
        self.lam = nn.Parameter(torch.empty(h, rank, **factory), regularizer in ("ksvd", "kkt"))
        if weights == "dual":
            self.dual_e = nn.Linear(dim, h * rank, False, **factory)
            self.dual_r = nn.Linear(dim, h * rank, False, **factory)
        else:
            rows = d if weights == "static" else self._num_codes
            self.w_e = nn.Parameter(torch.empty(h, rows, rank, **factory))
            self.w_r = nn.Parameter(torch.empty(h, rows, rank, **factory))
        if weights == "data" and codes == "basis":
            basis = torch.empty(self._num_codes, num_samples, **factory)
            # saved, so that a layer built on the meta device is whole once it is loaded
            self.register_buffer("basis", basis)
        self.reset_parameters()

    @property
    def _num_codes(self) -> int:
        return min(2 * self.rank, self.num_samples) if self.codes == "basis" else self.num_samples

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
        if self.weights == "dual":
            return
        if self.weights == "data" and self.codes == "basis":
            steps = torch.arange(self.num_samples, device=self.basis.device)
            at = (steps.to(accumulator(self.basis)) + 0.5) / self.num_samples
            self.basis.copy_(self._cosines(at).T)
        for w in (self.w_e, self.w_r):
            # QR does not exist in half precision
            wide = torch.empty_like(w, dtype=accumulator(w))
            if self.conventions.flat_init:
                nn.init.orthogonal_(wide)
            else:
                for head in wide:
                    nn.init.orthogonal_(head)
                wide.div_(self.rank**0.5)
            w.copy_(wide)

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

    # the published layers

    @classmethod
    def reference(
        cls,
        variant: str,
        dim: int,
        num_heads: int = 8,
        *,
        rank: int,
        num_samples: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> Self:
        """Build the layer of one published experiment exactly, with its quirks.

        Sampling ignores masks (``"uea"``, ``"vit"``, ``"d4rl"`` and ``"wikitext"`` refuse one,
        ``"lra"`` zeroes outputs), sampled rows are not normalised, ``lam`` is unconstrained,
        weights start as the released code starts them, the loss is reduced as there.

        Args:
            variant: ``"uea"``, ``"lra"``, ``"d4rl"``, ``"vit"`` or ``"wikitext"``.
            dim: Model width.
            num_heads: Heads.
            rank: Directions per head.
            num_samples: Sampled rows; by default ten per direction, as for LRA. The released UEA
                layer has ``min(longest training series, 5 or 10 × rank)``, the ViT one 197.
            device: Where to create the parameters.
            dtype: Type of the parameters.

        Example:
            >>> PrimalAttention.reference("uea", 512, rank=30, num_samples=300).num_samples
            300
        """
        if variant not in PUBLISHED:
            raise ValueError(f"variant must be one of {tuple(PUBLISHED)}, got {variant!r}.")
        layer = cls.__new__(cls)
        Attention.__init__(layer, dim, num_heads)
        layer._build(
            rank,
            PUBLISHED[variant].weights,
            "table",
            None,
            "ksvd",
            True,
            {"device": device, "dtype": dtype},
            num_samples=_SAMPLES_PER_DIRECTION * rank if num_samples is None else num_samples,
            conventions=PUBLISHED[variant],
        )
        return layer

    def load_reference_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load the parameters of a released layer under their original names.

        Args:
            state_dict: The entries of one attention layer, its prefix removed.
        """
        self._check_published()
        self.load_state_dict(translate_state_dict(self.conventions, state_dict))

    def reference_state_dict(self) -> dict[str, Tensor]:
        """Return the parameters under the names of the released layer, for its own code to load.

        Example:
            >>> sorted(PrimalAttention.reference("lra", 8, 2, rank=3).reference_state_dict())[:3]
            ['W_k.bias', 'W_k.weight', 'W_q.bias']
        """
        self._check_published()
        return published_state_dict(self.conventions, self.state_dict())

    def _check_published(self) -> None:
        if self.conventions == SOUND:
            raise RuntimeError(
                "This layer follows our conventions, not a published variant's; build it with "
                "PrimalAttention.reference(variant, ...) and use that."
            )

    # forward

    def forward(
        self,
        x: Float[Tensor, "b n c"],
        context: Float[Tensor, "b m c"] | None = None,
        *,
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
        self._check(x, context, key_mask, is_causal, return_aux)
        self._check_rotary(rotary, context)
        self._check_mixing(is_causal)
        asked = self.regularizer if return_aux or self.training else None
        aware = key_mask if self.conventions.mask == "aware" else None
        x, context = _clean(x, context, aware)
        if is_causal:
            y, term, _ = self._causal(x, key_mask, None, asked, rotary)
        else:
            y, term = self._bidirectional(x, context, key_mask, asked, rotary)
        y = self.dropout(y)
        if aware is not None and context is None:
            y = torch.where(aware[:, :, None], y, 0.0)
        if return_aux:
            self.witness()
            return y, Aux(term)
        if term is not None:
            self.publish({"": term})
        return y

    def _check_mixing(self, is_causal: bool) -> None:
        if self.weights == "static" and not is_causal:
            if self.conventions.causal_only:
                raise ValueError("This published layer is causal; call it with is_causal=True.")
            if not torch.compiler.is_compiling():
                warnings.warn(
                    "static weights without is_causal=True mix no tokens: every output depends on "
                    "its own token only. Use weights='data' or 'dual'.",
                    stacklevel=3,
                )

    def _check_rotary(self, rotary: Rotary | None, context: Tensor | None) -> None:
        if rotary is None:
            return
        if self.weights != "dual":
            raise ValueError(
                f"rotary= needs weights='dual', got weights={self.weights!r}, which never compares "
                "two tokens; positions enter through its codes or its prefix mean."
            )
        if context is not None:
            raise ValueError(
                "rotary= with a context has no meaning: the two sequences share no positions. "
                "Leave one of them out."
            )

    def _bidirectional(
        self,
        x: Tensor,
        context: Tensor | None,
        key_mask: Tensor | None,
        asked: Regularizer | None,
        rotary: Rotary | None,
    ) -> tuple[Tensor, Any]:
        aware = key_mask if self.conventions.mask == "aware" else None
        own = aware if context is None else None
        if rotary is None and self._is_fused(context, key_mask, asked):
            return self._fused(x, context, aware, asked)
        heads = self._heads(x)
        if rotary is not None:
            heads = rotary.turn(heads)
        memory, theirs = x, heads
        if context is not None:
            memory = context
            theirs = self._heads(context) if self.weights == "dual" or asked else heads
        tied = self._tie(memory, theirs, aware)
        scores = self._project(heads, tied, own)
        y = self._emit(scores.scores, key_mask if context is None else None)
        if asked is None:
            return y, None
        (q, k), (mq, mk) = heads.chunk(2, dim=1), theirs.chunk(2, dim=1)
        if context is None:
            return y, self._term(asked, Side(q, own), Side(k, own), tied, scores)
        # the key side lives on the memory; dual weights pose the whole problem there
        left = Side(mq, aware) if self.weights == "dual" else Side(q, own)
        return y, self._term(asked, left, Side(mk, aware), tied, None)

    def _is_fused(
        self, context: Tensor | None, key_mask: Tensor | None, asked: Regularizer | None
    ) -> bool:
        """Whether one function does it: plain maps, and a regulariser content with the energy."""
        maps: list[nn.Module] = [self.q_proj, self.k_proj, self.concat, self.out_proj]
        enough = asked is None or (context is None and asked != "kkt")
        if self.weights == "dual":
            maps += [self.dual_e, self.dual_r]
            enough = enough and context is None
        return enough and all(map(is_plain, maps)) and not self._masks_output(key_mask)

    def _fused(
        self,
        x: Tensor,
        context: Tensor | None,
        keep: Tensor | None,
        asked: Regularizer | None,
    ) -> tuple[Tensor, Any]:
        if self.weights == "data" and context is None:
            return self._sampled(x, keep, asked)
        inward = join(_map(self.q_proj), _map(self.k_proj))
        outward = fold(_map(self.concat), _map(self.out_proj))
        own, eps = keep if context is None else None, self.conventions.eps
        if self.weights == "dual":
            duals = torch.cat([self.dual_e.weight, self.dual_r.weight])
            both = 2 * self.num_heads
            y, energy, w = attend_dual(x, inward, duals, outward, both, key_mask=own, eps=eps)
            return y, self._energy_term(asked, x, own, energy, *w.chunk(2, dim=1))
        tied = self._untied
        if self.weights == "data" and context is not None:
            tied = self._tie_rows(sample_rows(context, self.num_samples, keep))
        y, energy = attend(x, inward, tied.joint, outward, key_mask=own, eps=eps)
        return y, self._energy_term(asked, x, own, energy, self.w_e, self.w_r)

    def _sampled(
        self, x: Tensor, keep: Tensor | None, asked: Regularizer | None
    ) -> tuple[Tensor, Any]:
        usual = asked == "ksvd" and self.conventions.reduction == "sample"
        has_loss = usual and keep is None and x.shape[1] > 0
        y, found = attend_sampled(
            x,
            (_map(self.q_proj), _map(self.k_proj)),
            (self.w_e, self.w_r),
            (_map(self.concat), _map(self.out_proj)),
            self.num_samples,
            key_mask=keep,
            eps=self.conventions.eps,
            lam=self.ell if has_loss else None,
            has_energy=asked is not None,
            **self._tying,
        )
        return y, found if has_loss else self._energy_term(
            asked, x, keep, found, self.w_e, self.w_r
        )

    def _energy_term(
        self,
        asked: Regularizer | None,
        x: Tensor,
        keep: Tensor | None,
        energy: Tensor | None,
        w_e: Tensor,
        w_r: Tensor,
    ) -> Tensor | None:
        if asked is None or energy is None:
            return None
        side = Side(x[:, None], keep)  # of which the regulariser takes the length alone
        also = side, side, self.ell, parameter_trace(w_e, w_r)
        return energy_term(asked, self.conventions.reduction, energy, *also)

    def _heads(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b 2*h n d"]:
        """Return the heads of the queries and, after them, of the keys."""
        return self._both(x, self.q_proj, self.k_proj)

    def _duals(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b 2*h n s"]:
        """Return the dual variables of the query side and, after them, of the key side."""
        return self._both(x, self.dual_e, self.dual_r)

    def _both(self, x: Tensor, first: nn.Linear, second: nn.Linear) -> Tensor:
        """Return the heads of two maps; of plain ones as one map, which is faster."""
        plain = is_plain(first) and is_plain(second)
        if plain and not self._is_brief(x.shape[0] * x.shape[1]):
            both = linear(x, *join(_map(first), _map(second)))
        else:
            both = torch.cat([first(x), second(x)], dim=-1)
        return both.unflatten(-1, (2 * self.num_heads, -1)).transpose(1, 2)

    def _tie(
        self,
        memory: Float[Tensor, "b m c"],
        heads: Float[Tensor, "b 2*h m d"],
        keep: Bool[Tensor, "b m"] | None,
    ) -> Tied:
        """Return the projection weights that ``memory`` and its heads imply."""
        if self.weights == "static":
            return self._untied
        if self.weights == "dual":
            duals = self._duals(memory)
            sums = dual_weights(heads, duals, key_mask=keep, eps=self.conventions.eps)
            # the weights of queries come from keys, and the other way round
            w_r, w_e = sums.chunk(2, dim=1)
            dual_e, dual_r = duals.chunk(2, dim=1)
            return Tied(torch.cat([w_e, w_r], dim=1), duals=(dual_e, dual_r))
        return self._tie_rows(sample_rows(memory, self.num_samples, keep))

    def _tie_rows(self, rows: Float[Tensor, "b m c"]) -> Tied:
        """Return the projection weights that sampled rows imply."""
        return Tied(*tie_rows(rows, self.w_e, self.w_r, **self._tying))

    @property
    def _tying(self) -> dict[str, Any]:
        """How rows become weights."""
        basis = self.basis if self.codes == "basis" else None
        return {"basis": basis, "normalize": self.conventions.normalize_rows}

    @property
    def _untied(self) -> Tied:
        """The projection weights when they are parameters."""
        return Tied(torch.cat([self.w_e, self.w_r])[None])

    def _cosines(self, at: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n k"]:
        """Return the basis functions at relative positions, orthonormal over the sampled rows."""
        order = torch.arange(self._num_codes, dtype=at.dtype, device=at.device)
        scale = torch.where(order == 0, 0.5**0.5, torch.ones_like(order))
        scale = scale * (2 / self.num_samples) ** 0.5
        return (scale * torch.cos(math.pi * order * at[..., None])).to(self.w_e.dtype)

    def _causal(
        self,
        x: Tensor,
        key_mask: Tensor | None,
        state: State | None,
        asked: Regularizer | None,
        rotary: Rotary | None,
    ) -> tuple[Tensor, Any, State]:
        b, n, _ = x.shape
        heads = self._heads(x)
        start = self.init_state(b) if state is None else state
        position = start.seen[:, None] + _counts(x, key_mask)
        if self.weights == "static":
            before = torch.cat(start.tensors, dim=-1)
            means, after_both = self._running(self._merge(heads), position, key_mask, before)
            after = after_both.chunk(2, dim=-1)
            heads = means.unflatten(-1, (2 * self.num_heads, -1)).transpose(1, 2)
            q, k = heads.chunk(2, dim=1)
            tied = self._untied
            scores = self._project(heads, tied, key_mask)
        else:
            if rotary is not None:
                heads = rotary.turn(heads)
            q, k = heads.chunk(2, dim=1)
            duals = self._duals(x) if self.weights == "dual" else None
            with full_precision(x):
                scores, tied, after = self._causal_sums(x, q, k, duals, position, key_mask, start)
        count = start.seen + (n if key_mask is None else key_mask.sum(1))
        y = self._emit(scores.scores, key_mask)
        term = None
        if asked is not None:
            if asked == "kkt" and self.weights == "data":
                raise ValueError(
                    "regularizer='kkt' is undefined for causal data-dependent weights: they change "
                    "with every token, so there is no one kernel. Use 'ksvd', or weights='dual'."
                )
            term = self._term(asked, Side(q, key_mask), Side(k, key_mask), tied, scores)
        return y, term, State(after, count)

    def _running(
        self,
        x: Float[Tensor, "b n c"],
        position: Int[Tensor, "b n"],
        key_mask: Bool[Tensor, "b n"] | None,
        start: Float[Tensor, "b c"],
    ) -> tuple[Float[Tensor, "b n c"], Float[Tensor, "b c"]]:
        """Return the prefix means in the type of ``x``, and the state after the last token."""
        if self.decay is not None:
            means = sums = decayed_sum(x, self.decay, key_mask=key_mask, start=start)
        else:
            real = x if key_mask is None else torch.where(key_mask[:, :, None], x, 0.0)
            sums = prefix_sum(real, start)
            means = sums / position.clamp_min(1)[:, :, None]  # sums may exceed a narrow type
        return means.to(x.dtype), sums[:, -1] if x.shape[1] else start

    def _causal_sums(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        duals: Tensor | None,
        position: Int[Tensor, "b n"],
        key_mask: Tensor | None,
        start: State,
    ) -> tuple[Projection, Tied, tuple[Tensor, ...]]:
        """Return the scores when the projection weights are prefix sums of outer products."""
        wide = accumulator(q)
        unit_q, unit_k = (self._unit(t, key_mask) for t in (q, k))
        mean = position.clamp_min(1).to(wide).reciprocal()[:, None, :, None]
        if duals is not None:
            dual_e, dual_r = duals.to(wide).chunk(2, dim=1)
            e, after_e = causal_sums(unit_q, unit_k, dual_r, state=start.tensors[0])
            r, after_r = causal_sums(unit_k, unit_q, dual_e, state=start.tensors[1])
            last = torch.cat([start.seen[:, None], position], dim=1)[:, -1:]  # also without tokens
            last = last.clamp_min(1).to(wide)[:, None, :, None]
            after = torch.cat([after_e, after_r], dim=1)
            tied = Tied(after / last, duals=(dual_e, dual_r))
        else:
            f = self._split(normalize_rows(x) if self.conventions.normalize_rows else x).to(wide)
            w_e, w_r = (w.to(wide) for w in self._codes_at(position - 1))
            e, after_e = causal_sums(unit_q, f, w_e, state=start.tensors[0])
            r, after_r = causal_sums(unit_k, f, w_r, state=start.tensors[1])
            # a sum of so many random terms grows like √t; from the sampled size on, take the mean
            ratio = mean * self.num_samples
            mean = torch.where(ratio > 1, ratio.sqrt(), ratio)
            tied = self._untied
        scores = torch.cat([e, r], dim=1) * mean
        projection = Projection(scores.to(x.dtype), scores.square().sum(2))
        return projection, tied, (after_e, after_r)

    def _unit(self, x: Float[Tensor, "b h n d"], keep: Tensor | None) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=accumulator(x))
        unit = x / norm.clamp_min(representable(self.conventions.eps, x))
        return unit if keep is None else torch.where(keep[:, None, :, None], unit, 0.0)

    def _codes_at(self, position: Int[Tensor, "b n"]) -> tuple[Tensor, Tensor]:
        """Return the codes of absolute positions, ``[b h n s]`` each."""
        if self.codes == "table":
            row = position.clamp(0, self.num_samples - 1)
            return self.w_e[:, row].transpose(0, 1), self.w_r[:, row].transpose(0, 1)
        at = position.clamp_min(0).to(accumulator(self.w_e)).log1p() / math.log1p(_HORIZON)
        basis = self._cosines(at)[:, None]
        return basis @ self.w_e, basis @ self.w_r

    # output

    def _project(
        self, heads: Float[Tensor, "b 2*h n d"], tied: Tied, keep: Tensor | None
    ) -> Projection:
        return project(heads, tied.joint, key_mask=keep, eps=self.conventions.eps)

    def _emit(
        self, scores: Float[Tensor, "b 2*h n s"], keep: Tensor | None
    ) -> Float[Tensor, "b n c"]:
        """Return the layer output from the scores of both sides."""
        plain = is_plain(self.out_proj) and is_plain(self.concat)
        brief = self._is_brief(scores.shape[0] * scores.shape[2])
        if not plain or brief or self._masks_output(keep):
            heads = self.concat(torch.cat(scores.chunk(2, dim=1), dim=-1))
            return self.out_proj(self._merge(self._mask_output(heads, keep)))
        return linear(self._merge(scores), *fold(_map(self.concat), _map(self.out_proj)))

    def _is_brief(self, tokens: int) -> bool:
        """Whether so few tokens pass that joining the maps costs more than applying them."""
        return not torch.compiler.is_compiling() and tokens < 2 * self.rank

    def _masks_output(self, keep: Tensor | None) -> bool:
        return keep is not None and self.conventions.mask == "output"

    def _mask_output(self, heads: Tensor, keep: Tensor | None) -> Tensor:
        if keep is None or not self._masks_output(keep):
            return heads
        return torch.where(keep[:, None, :, None], heads, 0.0)

    # regulariser and diagnostics

    def _term(
        self, asked: Regularizer, left: Side, right: Side, tied: Tied, found: Projection | None
    ) -> Float[Tensor, ""]:
        """Return the regulariser of these tokens, with what was found on the way to the output."""
        problem, reduction = self._problem(left, right, tied), self.conventions.reduction
        if found is None:
            return problem.term(asked, reduction)
        return problem.term(asked, reduction, energy=found.energy, scores=found.scores)

    def _problem(self, left: Side, right: Side, tied: Tied) -> Problem:
        codes = None if self.weights == "dual" else (self.w_e, self.w_r)
        return Problem(left, right, tied, codes, self.ell, self.conventions.eps)

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
        keep = key_mask if self.conventions.mask == "aware" else None
        x, context = _clean(x, context, keep)
        memory = x if context is None else context
        q, k = self.q_proj(memory if self.weights == "dual" else x), self.k_proj(memory)
        if is_causal and self.weights == "static":
            zero = q.new_zeros(q.shape[0], self.dim)
            position = _counts(x, key_mask)
            q, k = (self._running(t, position, key_mask, zero)[0] for t in (q, k))
        q, k = self._split(q), self._split(k)
        left = Side(q, keep if context is None or self.weights == "dual" else None)
        right = Side(k, keep)
        # only dual weights read the heads
        heads = torch.cat([q, k], dim=1) if self.weights == "dual" else q
        tied = self._tie(memory, heads, keep)
        return self._problem(left, right, tied).diagnose()

    # decoding

    def init_state(self, batch_size: int) -> State:
        """Return the state before the first token: ``2 c`` or ``2 c s`` zeros per sequence."""
        if not self.capabilities.stateful:
            return super().init_state(batch_size)
        weight = self.q_proj.weight
        shape: tuple[int, ...] = (batch_size, self.dim)
        if self.weights != "static":
            shape = (batch_size, self.num_heads, self.head_dim, self.rank)
        zeros = weight.new_zeros(shape, dtype=accumulator(weight))
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
        self._check(x, key_mask=key_mask, is_causal=True, state=state)
        self._check_rotary(rotary, None)
        self._check_mixing(is_causal=True)
        if len(state.tensors) != 2:
            raise ValueError("This state is of a context, which recall reads; use init_state.")
        x, _ = _clean(x, None, key_mask)
        y, _, after = self._causal(x, key_mask, state, None, rotary)
        y = self.dropout(y)
        return (y if key_mask is None else torch.where(key_mask[:, :, None], y, 0.0)), after.own()

    def remember(
        self, context: Float[Tensor, "b m c"], *, key_mask: Bool[Tensor, "b m"] | None = None
    ) -> State:
        """Return what a context amounts to, ``2 c s`` numbers per sequence whatever its length.

        Args:
            context: Tokens that answer, as for ``forward``.
            key_mask: ``True`` where a token of the context is real.

        Example:
            >>> layer = PrimalAttention(16, 2, rank=4).eval()
            >>> context, x = torch.randn(1, 900, 16), torch.randn(1, 1, 16)
            >>> memory = layer.remember(context)
            >>> torch.allclose(layer.recall(x, memory), layer(x, context), atol=1e-5)
            True
        """
        self._check(context, context, key_mask)
        context, _ = _clean(context, None, key_mask)
        # only dual weights read the heads
        heads = self._heads(context) if self.weights == "dual" else context[:, None]
        counts = _counts(context, key_mask)[:, -1:].sum(1)  # also without tokens
        return State((self._tie(context, heads, key_mask).joint,), counts).own()

    def recall(self, x: Float[Tensor, "b n c"], memory: State) -> Float[Tensor, "b n c"]:
        """Attend from ``x`` to a context that :meth:`remember` has seen: ``O(n c s)``.

        The result is that of ``forward`` with the context itself, which would read it once more for
        every token decoded. Nothing is published for ``ksvd_loss``: train with ``forward``.

        Args:
            x: Tokens that ask.
            memory: From :meth:`remember`; ``memory.reorder`` serves beam search.
        """
        self._check(x, state=memory)
        if len(memory.tensors) != 1:
            raise ValueError("This state is of decoded tokens, not of a context; use step.")
        scores = self._project(self._heads(x), Tied(memory.tensors[0]), None)
        return self.dropout(self._emit(scores.scores, None))


def _clean(
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


def _map(module: nn.Linear) -> Linear:
    return Linear(module.weight, module.bias)


_LINES: tuple[tuple[str, Weights, str], ...] = (
    ("primal", "data", "projections onto sampled tokens with learned position codes"),
    ("primal-static", "static", "projections of prefix means; for causal use"),
    ("primal-dual", "dual", "projections tied to dual variables; carries content"),
)
for _name, _weights, _summary in _LINES:
    register_attention(
        _name,
        functools.partial(PrimalAttention, weights=_weights),
        capabilities=Capabilities(cross=_weights != "static", aux_loss=True),
        cost="n",
        summary=_summary,
    )
