"""The contract every attention of the registry keeps.

Shape legend: ``b`` batch, ``h`` heads, ``n`` queries, ``m`` keys, ``c`` model width, ``d`` head
width, ``s`` rank. Tensors are ``[b n c]`` outside a layer and ``[b h n d]`` inside. Masks are
boolean and ``True`` means keep.
"""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, cast, overload

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from primal_attention.attention.capabilities import (
    JOINED_TIME,
    SQUARES_FIT,
    Capabilities,
    capable_attentions,
)
from primal_attention.attention.documents import (
    DocumentBatch,
    Ran,
    RunsBatch,
    attend_documents,
    check_document_ids,
)
from primal_attention.attention.rotary import Rotary, Turn
from primal_attention.attention.terms import PublishesTerms
from primal_attention.functional.tiles import LinearMap

__all__ = [
    "JOINED_TIME",
    "SQUARES_FIT",
    "Attention",
    "Aux",
    "Capabilities",
    "State",
    "is_plain",
    "plain_maps",
]


class Aux(NamedTuple):
    """What a layer returns besides its output."""

    loss: Float[Tensor, ""]
    """The layer's regulariser, unweighted, in float32 or better."""


class State(NamedTuple):
    """All that a layer keeps of the tokens it has decoded. Never changed in place."""

    tensors: tuple[Tensor, ...]
    """What the mechanism sums or stores; the first axis is the batch."""
    seen: Int[Tensor, " b"]
    """How many real tokens each sequence has seen."""

    def reorder(self, index: Int[Tensor, " k"]) -> "State":
        """Return the state of the sequences in ``index``, as beam search needs it."""
        return self._map(lambda t: t.index_select(0, index))

    def to(self, device: torch.device | str) -> "State":
        """Return the state on another device."""
        return self._map(lambda t: t.to(device))

    def detach(self) -> "State":
        """Return the state cut from the autograd graph."""
        return self._map(Tensor.detach)

    def compact(self) -> "State":
        """Return the state without views: a view would keep the memory of a whole prompt alive."""
        return self._map(_without_view)

    @property
    def numel(self) -> int:
        """How many numbers the state holds."""
        return sum(t.numel() for t in (*self.tensors, self.seen))

    def _map(self, change: Callable[[Tensor], Tensor]) -> "State":
        return State(tuple(change(t) for t in self.tensors), change(self.seen))


def _without_view(x: Tensor) -> Tensor:
    # a few tensors side by side may share their memory: a clone would cost more than it frees
    is_part = not torch.compiler.is_compiling() and x.untyped_storage().nbytes() > 4 * x.nbytes
    return x.clone() if is_part else x


class Attention(nn.Module):
    """Base class: sizes, checks and the methods every mechanism has.

    Args:
        dim: Model width ``c``.
        num_heads: Heads; must divide ``dim``.
        dropout: Probability of dropping an element of the output in training.
    """

    capabilities: Capabilities = Capabilities()
    undecayed: tuple[str, ...] = ()
    """Names of own parameters that weight decay must leave alone; any module may have this."""
    takes_times: bool = False
    """Whether ``forward`` and ``step`` take ``times``."""

    def __init__(self, dim: int, num_heads: int = 8, *, dropout: float = 0.0) -> None:
        super().__init__()
        if dim < 1 or num_heads < 1 or dim % num_heads:
            raise ValueError(
                f"dim must be a positive multiple of num_heads, got dim={dim} and "
                f"num_heads={num_heads}; choose a head count that divides the width."
            )
        self.dim = dim
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.dropout = nn.Dropout(dropout)

    @overload
    def forward(
        self,
        x: Float[Tensor, "b n c"],
        context: Float[Tensor, "b m c"] | None = None,
        *more: object,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
        return_aux: Literal[False] = False,
        rotary: Turn | None = None,
        document_ids: Int[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n c"]: ...

    @overload
    def forward(
        self,
        x: Float[Tensor, "b n c"],
        context: Float[Tensor, "b m c"] | None = None,
        *more: object,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
        return_aux: Literal[True],
        rotary: Turn | None = None,
        document_ids: Int[Tensor, "b n"] | None = None,
    ) -> tuple[Float[Tensor, "b n c"], Aux]: ...

    def forward(
        self,
        x: Float[Tensor, "b n c"],
        context: Float[Tensor, "b m c"] | None = None,
        *more: object,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
        return_aux: bool = False,
        rotary: Turn | None = None,
        document_ids: Int[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n c"] | tuple[Float[Tensor, "b n c"], Aux]:
        """Attend from ``x`` to ``context``, or to ``x`` itself.

        Args:
            x: Tokens to attend from.
            context: Tokens to attend to; ``None`` for self-attention.
            more: Refused, with the call to write instead.
            key_mask: ``True`` where a token to attend to is real. In self-attention the output at
                padded positions is zero.
            is_causal: Let no output depend on a later token.
            return_aux: Return ``(y, aux)`` instead of ``y``.
            rotary: Turns of queries and keys by the positions of ``x``; not with a context.
            document_ids: Document of each token, if rows hold several: tokens of a row with one
                id are one document, those with a negative id padding. No document influences
                another. Not with a context.
        """
        self._check(
            x,
            context,
            key_mask,
            is_causal,
            return_aux,
            rotary=rotary,
            document_ids=document_ids,
            more=more,
        )
        options = {"is_causal": is_causal, "return_aux": return_aux}
        if document_ids is None:
            y, aux = self._forward(x, context, key_mask, rotary, **options)
            return (y, aux) if return_aux and aux is not None else y

        def run(batch: DocumentBatch, keep: Tensor | None, has_term: bool) -> Ran:
            turn = None if rotary is None else _unpack_turn(batch, rotary, len(x))
            also = {"is_causal": is_causal, "return_aux": has_term}
            y, aux = self._forward(batch.unpack(x), None, keep, turn, **also)
            return y, None if aux is None else aux.loss

        return self._by_document(run, document_ids, key_mask, return_aux)

    def _by_document(
        self, run: RunsBatch, document_ids: Tensor, key_mask: Tensor | None, return_aux: bool
    ) -> Tensor | tuple[Tensor, Aux]:
        """Return what ``forward`` does, from runs on batches of documents."""
        has_term = return_aux or (self.training and self.capabilities.aux_loss)
        y, term = attend_documents(run, document_ids, key_mask, has_term)
        if return_aux and term is not None:
            return y, Aux(term)
        layer = self._publisher
        if term is not None and isinstance(layer, PublishesTerms):
            # the runs have published nothing: the term is the mean over all documents
            layer.publish({"": term})
        return y

    @property
    def _publisher(self) -> nn.Module:
        """The module that publishes the regulariser for ``ksvd_loss``."""
        return self

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
        """Return output and regulariser of arguments that are checked."""
        raise NotImplementedError  # abstract

    def init_state(self, batch_size: int) -> State:
        """Return the state before the first token."""
        raise ValueError(self._cannot("decode step by step", "stateful"))

    def step(
        self,
        x: Float[Tensor, "b t c"],
        state: State,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t c"], State]:
        """Decode the next ``t`` tokens: one while generating, the whole prompt to prefill.

        The outputs are those of a causal ``forward`` over everything seen so far.

        Args:
            x: The new tokens.
            state: From ``init_state`` or the last ``step``; it is not changed.
            key_mask: ``True`` where a new token is real, for prompts padded on the left.
        """
        raise ValueError(self._cannot("decode step by step", "stateful"))

    def _split(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b h n d"]:
        """Return the heads of ``x`` as a view."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _merge(self, x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b n c"]:
        return x.transpose(1, 2).flatten(2)

    def _cannot(self, what: str, capability: str) -> str:
        names = ", ".join(capable_attentions("*", **{capability: True}))
        return f"{type(self).__name__} cannot {what}; use one of: {names}."

    def _check(
        self,
        x: Tensor,
        context: Tensor | None = None,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
        return_aux: bool = False,
        state: State | None = None,
        rotary: Turn | None = None,
        document_ids: Tensor | None = None,
        more: tuple[object, ...] = (),
    ) -> None:
        """Raise for anything that this layer cannot do, before any work is done."""
        if more:
            raise TypeError(
                f"{type(self).__name__} takes x and context by position, got "
                f"{2 + len(more)} arguments. Queries, keys and values are projected inside: write "
                "attn(x) for self-attention, attn(x, context) for cross-attention, and name the "
                "others, as in key_mask=keep."
            )
        for name, tensor in (("x", x), ("context", context)):
            if tensor is not None and (tensor.dim() != 3 or tensor.shape[-1] != self.dim):
                raise ValueError(
                    f"{name} must have shape [batch, tokens, {self.dim}], got "
                    f"{tuple(tensor.shape)}; add the missing axis or project to the layer's width."
                )
        if state is not None and state.seen.shape != x.shape[:1]:
            raise ValueError(
                f"x and state must have the same batch size, got {x.shape[0]} and "
                f"{state.seen.shape[0]}; use init_state({x.shape[0]}), or state.reorder to choose "
                "sequences."
            )
        if context is not None:
            if not self.capabilities.cross:
                raise ValueError(self._cannot("attend to a context", "cross"))
            if context.shape[0] != x.shape[0]:
                raise ValueError(
                    f"x and context must have the same batch size, got {x.shape[0]} and "
                    f"{context.shape[0]}; repeat the shorter one."
                )
            if is_causal:
                raise ValueError(
                    "is_causal=True with a context has no meaning: the two sequences share no "
                    "order. Use is_causal=False, or self-attention."
                )
        if rotary is not None:
            if not self.capabilities.rotary:
                raise ValueError(self._cannot("turn queries and keys by rotary=", "rotary"))
            if context is not None:
                raise ValueError(
                    "rotary= with a context has no meaning: the two sequences share no positions. "
                    "Leave one of them out."
                )
        if is_causal and not self.capabilities.causal:
            raise ValueError(self._cannot("run causally", "causal"))
        if return_aux and not self.capabilities.aux_loss:
            raise ValueError(self._cannot("return an auxiliary loss", "aux_loss"))
        if key_mask is not None:
            self._check_mask(key_mask, x if context is None else context)
        if document_ids is not None:
            self._check_documents(document_ids, x, context, rotary)

    def _check_mask(self, key_mask: Tensor, keys: Tensor) -> None:
        if not self.capabilities.padding:
            raise ValueError(self._cannot("honour a padding mask", "padding"))
        if key_mask.dtype != torch.bool:
            raise TypeError(
                f"key_mask must be boolean with True for real tokens, got {key_mask.dtype}; "
                "write mask.bool(), or ~mask if your True marks padding."
            )
        if key_mask.shape != keys.shape[:2]:
            raise ValueError(
                f"key_mask must have shape [batch, keys] = {tuple(keys.shape[:2])}, got "
                f"{tuple(key_mask.shape)}; a mask over pairs of tokens is not supported: pass the "
                "padding mask, and is_causal=True for order."
            )

    def _check_documents(
        self, document_ids: Tensor, x: Tensor, context: Tensor | None, rotary: Turn | None
    ) -> None:
        if not self.capabilities.documents:
            raise ValueError(self._cannot("keep documents of one row apart", "documents"))
        if context is not None:
            raise ValueError(
                "document_ids with a context has no meaning: it does not say which part of the "
                "context belongs to a document. Pass one document a row, each with its context."
            )
        if rotary is not None and not isinstance(rotary, Rotary):
            raise TypeError(
                f"With document_ids, rotary must be a Rotary, got {type(rotary).__name__}; for "
                "other turns pass one document a row."
            )
        check_document_ids(document_ids, x.shape[:2])


def _unpack_turn(batch: DocumentBatch, rotary: Turn, rows: int) -> Rotary:
    """Return the turns of the tokens of a batch of documents."""
    cos, sin = cast(Rotary, rotary)
    return Rotary(*(batch.unpack(t.expand(rows, -1, -1)) for t in (cos, sin)))


def is_plain(module: nn.Module) -> bool:
    """Whether a projection is just its weight: not adapted, quantised, sharded or hooked."""
    return plain_maps((module,)) is not None


def plain_maps(modules: Iterable[nn.Module]) -> list[LinearMap] | None:
    """Return weight and bias of projections; ``None`` if one of them is more than that.

    Whoever multiplies by a weight himself passes by whatever a module does in its ``forward``. So
    no module may be adapted, quantised, sharded or hooked.
    """
    if nn.modules.module._has_any_global_hook():
        return None
    maps = []
    for module in modules:
        # accelerate replaces the forward of one instance
        if type(module) is not nn.Linear or "forward" in module.__dict__:
            return None
        if (
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
        ):
            return None
        maps.append(LinearMap(module.weight, module.bias))
    return maps
