"""What a primal layer stores: its parameters, how they start, and their published forms.

:class:`PrimalParameters` builds and checks a layer, projects tokens to heads and heads to outputs,
and converts to and from the released code. :class:`~primal_attention.attention.PrimalAttention`
adds what the layer computes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal, Self, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear, softplus
from torch.types import Device

from primal_attention.attention.base import (
    JOINED_TIME,
    SQUARES_FIT,
    Attention,
    Capabilities,
    plain_maps,
)
from primal_attention.attention.published import (
    OURS,
    PUBLISHED,
    Conventions,
    init_linear,
    published_state_dict,
    translate_state_dict,
)
from primal_attention.attention.regularizers import Regularizer
from primal_attention.attention.rotary import Turn
from primal_attention.attention.sources import (
    DualSource,
    SampledSource,
    StaticSource,
    WeightSource,
    cosines,
)
from primal_attention.functional import attend
from primal_attention.functional.folding import fold_concat, join_maps
from primal_attention.functional.precision import accumulator
from primal_attention.kernels.base import Factory

__all__ = [
    "CAPABILITIES",
    "Codes",
    "PrimalParameters",
    "Weights",
    "count_tokens",
    "zero_padding",
]

Weights = Literal["data", "static", "dual"]
Codes = Literal["basis", "table"]

_SAMPLES_PER_DIRECTION = 10
"""Sampled rows per direction, the paper's rule."""


CAPABILITIES: dict[Weights, Capabilities] = {
    "data": Capabilities(aux_loss=True, rotary=False, max_magnitude=SQUARES_FIT),
    "static": Capabilities(
        cross=False,
        aux_loss=True,
        rotary=False,
        mixes_without_order=False,
        max_magnitude=SQUARES_FIT,
    ),
    # the published term of dual weights is of degree four in the tokens
    "dual": Capabilities(
        aux_loss=True,
        time=JOINED_TIME | {"product", "rotary"},
        max_magnitude=1e6,
        max_magnitude_float16=30.0,
    ),
}
"""What a layer can do, by its projection weights."""


class PrimalParameters(Attention):
    """The parameters of a primal layer, and the maps made of them.

    Args:
        dim: Model width ``c``.
        num_heads: Heads; must divide ``dim``.
        rank: Directions ``s`` per head; by default 32, or the head width if that is smaller.
        weights: Where the projection weights come from.
        codes: How ``data`` weights store the code of a relative position.
        decay: Decay of the prefix mean of ``static`` weights.
        regularizer: The regulariser, or none.
        bias: Whether projections and output map have a bias.
        dropout: Probability of dropping an element of the output in training.
        num_samples: Sampled rows of ``data`` weights; by default ten per direction.
        conventions: Ours, or those of a published variant.
        device: Where to create the parameters.
        dtype: Type of the parameters.
    """

    feature_dim: int
    """Width of the features of a head; a product with features of time makes them wider."""
    basis: Float[Tensor, "k m"]
    w_e: nn.Parameter
    w_r: nn.Parameter
    dual_e: nn.Linear
    dual_r: nn.Linear

    undecayed = ("lam",)  # a weight of the KSVD term: decay would change the loss

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        rank: int | None,
        weights: Weights,
        codes: Codes,
        decay: float | None = None,
        regularizer: Regularizer | None = "ksvd",
        bias: bool = True,
        dropout: float = 0.0,
        num_samples: int | None = None,
        conventions: Conventions = OURS,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, num_heads, dropout=dropout)
        rank = min(32, self.head_dim) if rank is None else rank
        num_samples = _SAMPLES_PER_DIRECTION * rank if num_samples is None else num_samples
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
        is_ours = conventions == OURS
        self.capabilities = dataclasses.replace(
            CAPABILITIES[weights],
            padding=conventions.mask != "refuse",
            # padding takes part in what published layers compute
            documents=is_ours,
            causal=is_ours or conventions.causal_only,
            stateful=is_ours or conventions.causal_only,
            cross=CAPABILITIES[weights].cross and is_ours,
            aux_loss=regularizer is not None,
        )
        self.feature_dim = self.head_dim
        factory: Factory = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(dim, dim, bias, **factory)
        self.k_proj = nn.Linear(dim, dim, bias, **factory)
        self.out_proj = nn.Linear(dim, dim, bias, **factory)
        self.concat = nn.Linear(2 * rank, self.head_dim, bias, **factory)
        # no term uses it otherwise, and DDP takes a parameter without gradient for an error
        has_lam = regularizer in ("ksvd", "kkt")
        self.lam = nn.Parameter(torch.empty(num_heads, rank, **factory), has_lam)
        self._create_weights(factory)
        self.reset_parameters()

    def _create_weights(self, factory: Factory) -> None:
        """Add the parameters that projection weights are made of."""
        if self.weights == "dual":
            width = self.num_heads * self.rank
            self.dual_e = nn.Linear(self.dim, width, False, **factory)
            self.dual_r = nn.Linear(self.dim, width, False, **factory)
            return
        rows = self.head_dim
        if self.weights == "data":
            smooth = min(2 * self.rank, self.num_samples)
            rows = smooth if self.codes == "basis" else self.num_samples
        shape = self.num_heads, rows, self.rank
        self.w_e = nn.Parameter(torch.empty(shape, **factory))
        self.w_r = nn.Parameter(torch.empty(shape, **factory))
        if self.weights == "data" and self.codes == "basis":
            # saved, so that a layer built on the meta device is whole once it is loaded
            self.register_buffer("basis", torch.empty(rows, self.num_samples, **factory))

    def source(
        self, tokens: Float[Tensor, "b n c"], heads: Float[Tensor, "b both n d"] | None = None
    ) -> WeightSource:
        """Return the tensors that projection weights are made of.

        Args:
            tokens: The tokens that make the weights; zero where padded.
            heads: Their heads, where they were computed already.
        """
        eps = self.conventions.eps
        if self.weights == "data":
            basis = self.basis if self.codes == "basis" else None
            codes, standardize = (self.w_e, self.w_r), self.conventions.standardize
            return SampledSource(codes, basis, self.num_samples, standardize, eps)
        if self.weights == "static":
            return StaticSource((self.w_e, self.w_r), self.decay, eps)
        if heads is None:
            maps = plain_maps((self.q_proj, self.k_proj, self.dual_e, self.dual_r))
            if maps is not None:
                both = join_maps(maps[0], maps[1]), join_maps(maps[2], maps[3])
                return DualSource(both, None, None, self.num_heads, eps)
            heads = self.project_heads(tokens)
        return DualSource(None, heads, self.project_duals(tokens), self.num_heads, eps)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise all parameters anew."""
        for name, module in self.named_children():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
                init_linear(self.conventions, name, module)
        nn.init.uniform_(self.lam)
        if self.conventions.positive_lam:
            # softplus of this is uniform between 0.1 and 1
            self.lam.mul_(0.9).add_(0.1).expm1_().log_()
        if self.weights != "dual":
            self._reset_codes()

    def _reset_codes(self) -> None:
        """Draw ``W_e`` and ``W_r``, and fill the basis."""
        if self.weights == "data" and self.codes == "basis":
            wide, device = accumulator(self.basis), self.basis.device
            at = torch.arange(self.num_samples, device=device).to(wide) + 0.5
            rows = cosines(at / self.num_samples, len(self.basis), self.num_samples)
            self.basis.copy_(rows.to(self.w_e.dtype).T)
        for w in (self.w_e, self.w_r):
            # QR does not exist in half precision
            drawn = torch.empty_like(w, dtype=accumulator(w))
            if self.conventions.flat_init:
                nn.init.orthogonal_(drawn)
            else:
                for head in drawn:
                    nn.init.orthogonal_(head)
                drawn.div_(self.rank**0.5)
            w.copy_(drawn)

    @property
    def ell(self) -> Float[Tensor, "h s"]:
        """The regulariser's ``ℓ`` in float32 or better; positive, except in published layers."""
        lam = self.lam.to(accumulator(self.lam))
        return softplus(lam) if self.conventions.positive_lam else lam

    def extra_repr(self) -> str:
        """Return the settings that ``print(layer)`` shows."""
        parts = [f"{self.dim}", f"num_heads={self.num_heads}", f"rank={self.rank}"]
        parts.append(f"weights={self.weights!r}")
        if self.weights == "data":
            parts.append(f"codes={self.codes!r}")
        if self.decay is not None:
            parts.append(f"decay={self.decay}")
        return ", ".join([*parts, f"regularizer={self.regularizer!r}"])

    # maps

    def project_heads(
        self, x: Float[Tensor, "b n c"], rotary: Turn | None = None
    ) -> Float[Tensor, "b both n d"]:
        """Return the heads of the queries and, after them, of the keys."""
        heads = self._project_both(x, self.q_proj, self.k_proj)
        return heads if rotary is None else rotary.both(heads)

    def project_duals(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b both n s"]:
        """Return the dual variables of the query side and, after them, of the key side."""
        return self._project_both(x, self.dual_e, self.dual_r)

    def _project_both(self, x: Tensor, first: nn.Linear, second: nn.Linear) -> Tensor:
        """Return the heads of two maps; plain maps are applied as one, which is faster."""
        maps = None if self._is_brief(x) else plain_maps((first, second))
        if maps is not None:
            both = linear(x, *join_maps(maps[0], maps[1]))
        else:
            both = torch.cat([first(x), second(x)], dim=-1)
        return both.unflatten(-1, (2 * self.num_heads, -1)).transpose(1, 2)

    def _is_brief(self, x: Float[Tensor, "b n c"]) -> bool:
        """Return whether the input is so short that joining maps costs more than it saves."""
        return not torch.compiler.is_compiling() and x.shape[0] * x.shape[1] < 2 * self.rank

    def project_scores(
        self, heads: Tensor, w: Float[Tensor, "#b both d s"], key_mask: Tensor | None
    ) -> tuple[Float[Tensor, "b n both_s"], Float[Tensor, "b both s"] | None]:
        """Return the scores of heads, and their energy."""
        # without maps the engine takes heads side by side and returns the scores
        both, eps = self._merge(heads), self.conventions.eps
        return attend(both, w, None, key_mask=key_mask, eps=eps)

    def project_out(self, scores: Float[Tensor, "b n both_s"]) -> Float[Tensor, "b n c"]:
        """Return the layer's output from the scores of all query and all key heads."""
        maps = None if self._is_brief(scores) else plain_maps((self.concat, self.out_proj))
        if maps is not None:
            return linear(scores, *fold_concat(*maps))
        by_head = scores.unflatten(-1, (2, self.num_heads, -1)).permute(0, 3, 1, 2, 4).flatten(3)
        return self.out_proj(self._merge(self.concat(by_head)))

    # published variants

    @classmethod
    def reference(
        cls,
        variant: str,
        dim: int,
        num_heads: int = 8,
        *,
        rank: int,
        num_samples: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Return the layer of one published experiment, exactly as it was released.

        It differs from our layer: ``"uea"``, ``"vit"``, ``"d4rl"`` and ``"wikitext"`` refuse a
        mask, and ``"lra"`` only zeroes outputs; sampled rows are not standardised; ``lam`` may be
        negative; parameters are initialised and the loss is reduced as in the released code.

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
            >>> from primal_attention import PrimalAttention
            >>> PrimalAttention.reference("uea", 512, rank=30, num_samples=300).num_samples
            300
        """
        if variant not in PUBLISHED:
            raise ValueError(f"variant must be one of {tuple(PUBLISHED)}, got {variant!r}.")
        layer = cls.__new__(cls)
        PrimalParameters.__init__(
            layer,
            dim,
            num_heads,
            rank=rank,
            weights=PUBLISHED[variant].weights,
            codes="table",
            num_samples=num_samples,
            conventions=PUBLISHED[variant],
            device=device,
            dtype=dtype,
        )
        return layer

    def load_reference_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load parameters that have the names of the released layer.

        Args:
            state_dict: The entries of one attention layer, its prefix removed.
        """
        self._check_published()
        self.load_state_dict(translate_state_dict(self.conventions, state_dict))

    def reference_state_dict(self) -> dict[str, Tensor]:
        """Return the parameters under the names of the released layer.

        Example:
            >>> from primal_attention import PrimalAttention
            >>> sorted(PrimalAttention.reference("lra", 8, 2, rank=3).reference_state_dict())[:3]
            ['W_k.bias', 'W_k.weight', 'W_q.bias']
        """
        self._check_published()
        return published_state_dict(self.conventions, self.state_dict())

    def _check_published(self) -> None:
        if self.conventions == OURS:
            raise RuntimeError(
                "This layer is not a published variant, so it has no published names; build one "
                "with PrimalAttention.reference(variant, ...)."
            )


def zero_padding(
    x: Tensor, context: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Zero padded tokens: a NaN in a padded slot must reach neither result nor gradient."""
    if key_mask is None:
        return x, context
    # where, not multiply: NaN times zero is NaN
    if context is None:
        return torch.where(key_mask[:, :, None], x, 0.0), None
    return x, torch.where(key_mask[:, :, None], context, 0.0)


def count_tokens(x: Tensor, key_mask: Tensor | None) -> Int[Tensor, "b n"]:
    """Return how many real tokens there are up to each."""
    if key_mask is None:
        return torch.arange(1, x.shape[1] + 1, device=x.device).expand(x.shape[0], -1)
    return key_mask.cumsum(1)
