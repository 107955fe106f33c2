"""What a causal graph is read from: a model and a batch, a captured layer, or matrices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from primal_attention.analysis.causes.covariance import mix_rows
from primal_attention.analysis.causes.nodes import groups_of_ids, is_special, word_groups
from primal_attention.analysis.causes.primal import (
    HatMatrix,
    Matrix,
    captured_scores,
    promote,
)
from primal_attention.hosts import Batch, CapturedLayer, batch_arguments, capture
from primal_attention.ksvd import unit_rows
from primal_attention.training.evaluation import eval_mode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["AttentionSource", "read_source"]


@dataclass(frozen=True)
class AttentionSource:
    """Attention of one sequence, its tokens, and where more can be read."""

    name: str
    """Name of the layer."""
    attention: Float[Tensor, "h n n"] | CapturedLayer
    sequence: int
    num_tokens: int
    num_heads: int
    is_causal: bool
    tokens: list[str]
    special: list[bool]
    words: list[tuple[int, ...]]
    """Positions of the tokens of each word."""
    word: Callable[[Sequence[str]], str]
    """Returns the text of the tokens of a word."""
    head_width: int | None = None
    """Width of a head; unknown for matrices."""
    width: int | None = None
    """Width of the model; unknown for matrices."""
    layers: list[CapturedLayer] = field(default_factory=list)
    """All layers up to this one, where a model was given."""
    block: Tensor | None = None
    """Output of the block that holds the layer, where a model was given."""

    @property
    def has_weights(self) -> bool:
        """Whether there is an attention matrix."""
        return not isinstance(self.attention, CapturedLayer) or self.attention.has_weights

    def layer(self, method: str) -> CapturedLayer:
        """Return the captured layer, or refuse matrices."""
        if isinstance(self.attention, CapturedLayer):
            return self.attention
        raise ValueError(
            f"method={method!r} needs more than attention matrices; give a model and a batch, or a "
            "layer that capture returns."
        )

    def states(self) -> Float[Tensor, "n c"]:
        """Return the output of the block, or of the layer alone, without padding."""
        layer = self.layer("hidden")
        found = layer.output if self.block is None else self.block
        return promote(found[self.sequence][layer.query_keep[self.sequence].to(found.device)])

    def importance(
        self, target: Float[Tensor, " n"] | None, dropped: Sequence[int]
    ) -> Float[Tensor, " n"]:
        """Return how much each token matters to a target, or to all tokens.

        This is the attention from the target, mean over heads, without the dropped columns. Primal
        layers have the size of partial correlations given all other tokens instead.

        Args:
            target: Weights of the tokens of the target.
            dropped: Positions of the dropped columns.
        """
        n = self.num_tokens
        if self.has_weights:
            weights = torch.full((n,), 1 / n, dtype=torch.float64) if target is None else target
            found = mix_rows(self.attention, weights[None], self.sequence).mean(0)[0]
            found[list(dropped)] = 0
            return found / found.sum().clamp_min(torch.finfo(found.dtype).tiny)
        total = torch.zeros(n, dtype=torch.float64)
        for e in captured_scores(self.layer("scores"), self.sequence).e:
            hat = HatMatrix(unit_rows(e))
            if target is None:
                total += hat.leverage
            else:
                members = target.nonzero()[:, 0]
                total += (target[members, None] * hat.rows(members).abs()).sum(0)
        return total / total.sum()


class _Tokens(TypedDict):
    """What an :class:`AttentionSource` says about its tokens."""

    tokens: list[str]
    special: list[bool]
    words: list[tuple[int, ...]]
    word: Callable[[Sequence[str]], str]


def read_source(
    model_or_attention: nn.Module | CapturedLayer | Matrix,
    batch: Batch | str | None,
    *,
    tokenizer: "PreTrainedTokenizerBase | None",
    tokens: Sequence[str] | None,
    sequence: int,
    layer: int | str,
    method: str | None,
) -> AttentionSource:
    """Return the attention to make a graph of, from whatever the caller has."""
    if isinstance(model_or_attention, nn.Module):
        return _from_model(
            model_or_attention, batch, tokenizer, tokens, sequence, layer, method or ""
        )
    if batch is not None:
        raise ValueError("batch is for models only; leave it out with attention that is known.")
    if isinstance(model_or_attention, CapturedLayer):
        return _from_layer(model_or_attention, sequence, tokens)
    if not isinstance(model_or_attention, Tensor | np.ndarray | list | tuple):
        raise TypeError(
            f"causal_graph takes a model, a layer that capture returns, or attention matrices, got "
            f"{type(model_or_attention).__name__}."
        )
    found = promote(model_or_attention)
    found = found[None] if found.ndim == 2 else found
    if found.ndim != 3 or found.shape[1] != found.shape[2]:
        raise ValueError(
            f"attention must be [n n] or [heads n n], got the shape {tuple(found.shape)}; give one "
            "sequence at a time, without padding."
        )
    n = found.shape[1]
    is_causal = n > 1 and not bool(found.triu(1).any())
    return AttentionSource(
        "attention", found, sequence, n, len(found), is_causal, **_named(tokens, n)
    )


def _from_layer(
    layer: CapturedLayer,
    sequence: int,
    tokens: Sequence[str] | None,
    named: _Tokens | None = None,
) -> AttentionSource:
    if not 0 <= sequence < len(layer):
        raise ValueError(f"sequence must be between 0 and {len(layer) - 1}, got {sequence}.")
    queries, keys = layer.query_keep[sequence], layer.keep[sequence]
    n = int(queries.sum())
    if layer.keep.shape != layer.query_keep.shape or not torch.equal(queries, keys):
        raise ValueError(
            f"{layer.name} attends to other tokens than its own ({n} queries, {int(keys.sum())} "
            "keys); a causal graph needs self-attention."
        )
    named = named or _named(tokens, n)
    width = layer.output.shape[-1]
    return AttentionSource(
        layer.name,
        layer,
        sequence,
        n,
        layer.num_heads,
        layer.is_causal,
        head_width=layer.head_dim or None,
        width=width,
        **named,
    )


def _named(
    tokens: Sequence[str] | None,
    n: int,
    *,
    special: Sequence[bool] | None = None,
    words: list[tuple[int, ...]] | None = None,
    word: Callable[[Sequence[str]], str] | None = None,
) -> _Tokens:
    """Return names, marks and words of tokens; by default the tokens are their numbers."""
    if tokens is not None and len(tokens) != n:
        raise ValueError(
            f"There are {len(tokens)} tokens for {n} rows of attention; give one token for each "
            "row, without padding."
        )
    names = [str(i) for i in range(n)] if tokens is None else [str(t) for t in tokens]
    marks = [is_special(t) for t in names] if special is None else list(special)
    return {
        "tokens": names,
        "special": marks,
        "words": word_groups(names, marks) if words is None else words,
        "word": word or _join,
    }


def _join(pieces: Sequence[str]) -> str:
    """Return the text of the tokens of a word, without the marks of the tokenizer.

    Example:
        >>> _join(["un", "##able"]), _join(["Ġun", "able"])
        ('unable', 'unable')
    """
    text = "".join(p.removeprefix("##") if i else p for i, p in enumerate(pieces))
    return text.replace("Ġ", " ").replace("▁", " ").strip() or "".join(pieces)


def _from_model(
    model: nn.Module,
    batch: Batch | str | None,
    tokenizer: "PreTrainedTokenizerBase | None",
    tokens: Sequence[str] | None,
    sequence: int,
    layer: int | str,
    method: str,
) -> AttentionSource:
    if batch is None:
        raise ValueError("A model needs a batch: its inputs, or a text together with tokenizer=.")
    if isinstance(batch, str):
        if tokenizer is None:
            raise ValueError("A text needs tokenizer=; or give the inputs of the model as batch.")
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        batch = tokenizer(batch, return_tensors="pt").to(device)
    layers = capture(model, batch, layers="all" if method == "rollout" else layer)
    if method == "rollout":
        names = [found.name for found in layers]
        chosen = capture(model, batch, layers=layer)[0].name
        layers = layers[: names.index(chosen) + 1]
    last = layers[-1]
    named = None
    if tokens is None and 0 <= sequence < len(last):
        named = _tokens_of(batch, tokenizer, sequence, last)
    source = _from_layer(last, sequence, tokens, named)
    block = _block_output(model, batch, last.name) if method == "hidden" else None
    return replace(source, layers=layers, block=block)


def token_numbers(batch: Batch, length: int) -> Int[Tensor, "b n"] | None:
    """Return the token ids of a batch; ``None`` if it has none of this length."""
    args, kwargs = batch_arguments(batch)
    ids = kwargs.get("input_ids", args[0] if args else None)
    is_ids = isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point()
    return ids if is_ids and isinstance(ids, Tensor) and ids.shape[1] == length else None


def _tokens_of(
    batch: Batch,
    tokenizer: "PreTrainedTokenizerBase | None",
    sequence: int,
    layer: CapturedLayer,
) -> _Tokens:
    """Return tokens and words of a sequence, as far as batch and tokenizer tell."""
    keep = layer.query_keep[sequence].cpu()
    ids = token_numbers(batch, len(keep))
    if tokenizer is None or ids is None:
        return _named(None, int(keep.sum()))
    kept = ids[sequence].cpu()[keep].tolist()
    tokens = [str(t) for t in tokenizer.convert_ids_to_tokens(kept)]
    special = [i in set(getattr(tokenizer, "all_special_ids", ())) for i in kept]
    words = None
    word_ids = getattr(batch, "word_ids", None)
    if getattr(batch, "is_fast", False) and callable(word_ids):
        numbers = word_ids(sequence)
        words = groups_of_ids([w for w, real in zip(numbers, keep.tolist(), strict=True) if real])

    def word(pieces: Sequence[str]) -> str:
        return str(tokenizer.convert_tokens_to_string(list(pieces))).strip() or _join(pieces)

    return _named(tokens, len(kept), special=special, words=words, word=word)


@torch.no_grad()
def _block_output(model: nn.Module, batch: Batch, name: str) -> Tensor | None:
    """Return the output of the block that holds a layer: the nearest numbered module above it."""
    parts = name.split(".")
    places = [i for i, part in enumerate(parts) if part.isdigit()]
    if not places:
        return None
    found: list[Tensor] = []

    def keep(_: nn.Module, inputs: object, output: Batch) -> None:
        while not isinstance(output, Tensor):
            output = next(iter(output.values() if isinstance(output, Mapping) else output))
        found.append(output.detach())

    handle = model.get_submodule(".".join(parts[: places[-1] + 1])).register_forward_hook(keep)
    args, kwargs = batch_arguments(batch)
    try:
        with eval_mode(model):
            model(*args, **kwargs)
    finally:
        handle.remove()
    return found[-1]
