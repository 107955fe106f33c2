"""Queries and keys of single words in any model: the input of the probe of heads.

A word enters the model alone, as a sequence of one token without special tokens. Its position is
the mean of several rows of the position table, so that no single position decides. The first layer
then sees token embedding, mean position and type, after the input norm. Deeper layers see what the
layers before them make of that single token.

Rotary positions depend on the distance of query and key alone. Queries are then computed ``offset``
places after the keys, by the model's own code.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from primal_attention.attention import Attention, PrimalAttention
from primal_attention.models import sinusoidal_positions
from primal_attention.models.sequence import SequenceModel
from primal_attention.training.evaluation import eval_mode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "POSITIONS",
    "QueriesKeys",
    "is_rotary",
    "queries_keys",
    "stream_of_tokens",
    "token_ids",
]

POSITIONS = range(5, 15)
"""Positions whose mean a word has: early ones, which every text has, without the special first."""

_TABLES = frozenset(
    ("position_embeddings", "position_embedding", "wpe", "embed_positions", "pos_embed")
)
"""Last part of the name of a table of absolute positions."""


class QueriesKeys(NamedTuple):
    """Queries and keys of words in one layer, in float64."""

    name: str
    """Name of the module that attends."""
    q: Float[Tensor, "h n d"]
    k: Float[Tensor, "h n d"]
    """Keys, one set for each query head."""
    scale: float
    """Factor of the inner products."""

    def logits(self) -> Float[Tensor, "h n n"]:
        """Return what each head adds to the logit of every pair of words."""
        return self.scale * self.q @ self.k.transpose(-1, -2)


def token_ids(tokenizer: "PreTrainedTokenizerBase | None", words: Sequence[str]) -> np.ndarray:
    """Return the token of every word, ``-1`` for words that are not one token.

    A word is read as inside a text, after a space. If the words are tokens already, with the marks
    of the tokenizer such as ``"Ġbank"`` or ``"##ing"``, they are looked up as they are.

    Args:
        tokenizer: A tokenizer of Hugging Face, or ``None`` if word ``i`` is token ``i``.
        words: The words.
    """
    if tokenizer is None:
        return np.arange(len(words))
    if any(word.startswith(("Ġ", "▁", "##")) for word in words):
        vocabulary = tokenizer.get_vocab()
        return np.array([vocabulary.get(word, -1) for word in words])
    texts = [f" {word}" for word in words]
    found = tokenizer(texts, add_special_tokens=False)["input_ids"]
    unknown = getattr(tokenizer, "unk_token_id", None)
    single = [ids[0] if len(ids) == 1 and ids[0] != unknown else -1 for ids in found]
    return np.array(single, dtype=np.int64)


def queries_keys(
    model: nn.Module,
    ids: Sequence[int] | np.ndarray | Tensor,
    *,
    layer: int | str = 0,
    offset: int = 0,
    positions: Sequence[int] = POSITIONS,
) -> QueriesKeys:
    """Return the queries and keys of single tokens in one layer; the model is not changed.

    Args:
        model: A model of transformers, a model of this library, or one that takes token ids
            ``[b n]`` and attends by ``scaled_dot_product_attention``, ``torch.nn`` or our layers.
        ids: The tokens.
        layer: Number of the attention layer in the order of the forward, or its name.
        offset: Places from the key to the query; negative if the key comes later.
        positions: Positions of the keys whose vectors are averaged; not used by rotary models.

    Example:
        >>> from primal_attention.models import EncoderClassifier, EncoderConfig
        >>> config = EncoderConfig(num_classes=2, vocab_size=9, dim=16, num_heads=2)
        >>> queries_keys(EncoderClassifier(config), range(9)).logits().shape
        torch.Size([2, 9, 9])
    """
    device = next((p.device for p in model.parameters()), None)
    tokens = torch.as_tensor(np.asarray(ids), dtype=torch.long, device=device)
    if tokens.ndim != 1 or not len(tokens):
        raise ValueError(
            f"ids must be a sequence of tokens, got shape {tuple(tokens.shape)}; give at least one."
        )
    keys = _record(model, tokens, layer, positions, 0)
    if offset == 0:
        return keys
    queries = _record(model, tokens, layer, positions, offset)
    return keys._replace(q=queries.q)


def is_rotary(model: nn.Module, ids: Sequence[int] | np.ndarray) -> bool:
    """Return whether queries of the first layer change with the position alone, by rotation."""
    if isinstance(model, SequenceModel):
        return model.config.positions == "rotary"
    tokens = torch.as_tensor(np.asarray(ids)[:1], dtype=torch.long)
    with _fixed_tables(model, range(1)):
        here, there = (_run(model, tokens, 0, shift).q for shift in (0, 1))
    return not torch.equal(here, there)


def _record(
    model: nn.Module, tokens: Tensor, layer: int | str, positions: Sequence[int], offset: int
) -> QueriesKeys:
    shifted = [position + offset for position in positions]
    if not shifted or min(shifted) < 0:
        raise ValueError(
            f"positions {list(positions)} with offset {offset} must be at least one position, none "
            "negative; give later positions."
        )
    if isinstance(model, SequenceModel):
        return _run_ours(model, tokens, layer, shifted, offset)
    with _fixed_tables(model, shifted):
        return _run(model, tokens, layer, offset)


def stream_of_tokens(
    model: Any, tokens: Int[Tensor, " n"], positions: Sequence[int] = POSITIONS
) -> Float[Tensor, "n one c"]:
    """Return what enters the first block of a model of this library, at a mean position.

    Args:
        model: A :class:`~primal_attention.models.sequence.SequenceModel` with a vocabulary.
        tokens: Token ids.
        positions: Positions whose vectors are averaged.
    """
    x = model.embed_scale * model.embed(tokens[:, None])
    at = torch.tensor(positions, device=tokens.device)
    if model.config.positions == "sinusoidal":
        x = x + sinusoidal_positions(at, model.config.dim).mean(0).to(x.dtype)
    elif model.config.positions == "learned":
        _check_rows(len(model.position_table), positions)
        x = x + model.position_table[at].mean(0)
    return x


def _run_ours(
    model: Any, tokens: Tensor, layer: int | str, positions: Sequence[int], offset: int
) -> QueriesKeys:
    """Run a model of this library on tokens with a mean position."""
    x = stream_of_tokens(model, tokens, positions)
    turn = model._rotary(torch.full((1, 1), offset, device=tokens.device))
    watch = _Watch(layer)
    with torch.no_grad(), eval_mode(model), _hooks(model, watch), watch, _until_found():
        model.blocks(x, is_causal=model.is_causal, rotary=turn)
    return watch.result(model)


def _run(model: Any, tokens: Tensor, layer: int | str, position: int) -> QueriesKeys:
    """Run another model on single tokens; rotary models turn them by ``position``."""
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        model = model.get_encoder()
    takes = inspect.signature(model.forward).parameters
    kwargs: dict[str, Tensor | bool] = {}
    if "position_ids" in takes:
        kwargs["position_ids"] = torch.full_like(tokens[:, None], position)
    if "use_cache" in takes:
        kwargs["use_cache"] = False
    watch = _Watch(layer)
    with (
        torch.no_grad(),
        eval_mode(model),
        _fused(model),
        _hooks(model, watch),
        watch,
        _until_found(),
    ):
        model(tokens[:, None], **kwargs)
    return watch.result(model)


@contextmanager
def _fused(model: nn.Module) -> Iterator[None]:
    """Let a model of transformers attend by ``scaled_dot_product_attention`` in the context."""
    before = getattr(getattr(model, "config", None), "_attn_implementation", "sdpa")
    change = getattr(model, "set_attn_implementation", None)
    if before == "sdpa" or not callable(change):
        yield
        return
    change("sdpa")
    try:
        yield
    finally:
        change(before)


@contextmanager
def _fixed_tables(model: nn.Module, positions: Sequence[int]) -> Iterator[None]:
    """Let every table of absolute positions return the mean of these positions."""

    def mean_of(table: nn.Embedding) -> Callable[..., Tensor]:
        # tables of BART and OPT begin with unused rows, those of RoBERTa after the padding row
        first = getattr(table, "offset", 0 if table.padding_idx is None else table.padding_idx + 1)
        rows = [position + first for position in positions]
        _check_rows(table.num_embeddings, rows)
        mean = table.weight[rows].mean(0)
        return lambda *call: mean.expand_as(call[2])

    found = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _TABLES
    ]
    handles = [table.register_forward_hook(mean_of(table)) for table in found]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check_rows(size: int, rows: Sequence[int]) -> None:
    if max(rows) >= size:
        raise ValueError(
            f"position {max(rows)} is not in the model's table of {size} positions; choose smaller "
            "positions or a smaller offset."
        )


class _StopForwardError(Exception):
    """Ends a forward as soon as the wanted layer is known."""


@contextmanager
def _until_found() -> Iterator[None]:
    try:
        yield
    except _StopForwardError:
        return


class _Watch(TorchFunctionMode):
    """Records queries and keys of one layer."""

    def __init__(self, wanted: int | str) -> None:
        super().__init__()
        self.wanted = wanted
        self.running: list[str] = []
        self.closed = 0
        """Number of running modules that were read from outside."""
        self.seen: list[str] = []
        self.found: QueriesKeys | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention and not self.closed:
            query = args[0] if args else kwargs["query"]
            key = args[1] if len(args) > 1 else kwargs["key"]
            if query.ndim == 4:
                self.offer(query, key, kwargs.get("scale"))
        return func(*args, **kwargs)

    def offer(self, q: Tensor, k: Tensor, scale: float | None = None) -> None:
        """Take queries and keys ``[b h 1 d]`` if they belong to the wanted layer."""
        name = self.running[-1] if self.running else ""
        self.seen.append(name)
        if self.wanted not in (name, len(self.seen) - 1):
            return
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        if q.shape[2] != 1 or k.shape[2] != 1:
            raise ValueError(
                f"{name} attends from {q.shape[2]} to {k.shape[2]} positions for one token; only "
                "layers of self-attention can be probed."
            )
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        q, k = (t[:, :, 0].transpose(0, 1).double().cpu() for t in (q, k))  # [h n d]
        self.found = QueriesKeys(name, q, k, scale)
        raise _StopForwardError

    def result(self, model: nn.Module) -> QueriesKeys:
        """Return what was found, or raise with what there is."""
        if self.found is None:
            listed = ", ".join(self.seen) or "none that takes token ids"
            raise ValueError(
                f"{type(model).__name__} has no attention layer {self.wanted!r} that can be "
                f"probed; it has {len(self.seen)}: {listed}. Give a number from 0, or a name."
            )
        return self.found


@contextmanager
def _hooks(model: nn.Module, watch: _Watch) -> Iterator[None]:
    """Tell the watch which module is running, and read our layers and those of ``torch.nn``."""

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            watch.running.append(name)
            if isinstance(module, Attention | nn.MultiheadAttention):
                if not watch.closed:
                    watch.offer(*_project(module, args, kwargs))
                watch.closed += 1

        return hook

    def leave(module: nn.Module, args: object, output: object) -> None:
        watch.running.pop()
        watch.closed -= isinstance(module, Attention | nn.MultiheadAttention)

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _project(
    layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, float | None]:
    """Return queries and keys ``[b h 1 d]`` of a layer of known parameters, and their scale."""
    x = args[0] if args else kwargs["query" if isinstance(layer, nn.MultiheadAttention) else "x"]
    if isinstance(layer, nn.MultiheadAttention):
        return _project_torch(layer, x)
    if not (hasattr(layer, "q_proj") and hasattr(layer, "k_proj")):
        raise ValueError(
            f"{type(layer).__name__} has no projections of queries and keys, so it cannot be "
            "probed; choose another layer."
        )
    kv_heads = getattr(layer, "kv_heads", layer.num_heads)
    q, k = (
        p(x).unflatten(-1, (heads, -1)).transpose(1, 2)
        for p, heads in ((layer.q_proj, layer.num_heads), (layer.k_proj, kv_heads))
    )
    k = k.repeat_interleave(layer.num_heads // kv_heads, 1)
    if (rotary := kwargs.get("rotary")) is not None:
        q, k = rotary.queries(q), rotary.keys(k)
    if isinstance(layer, PrimalAttention):
        # the kernel of a primal layer is the cosine of query and key
        q, k = (nn.functional.normalize(t.double(), dim=-1) for t in (q, k))
        return q, k, 1.0
    return q, k, None


def _project_torch(layer: nn.MultiheadAttention, x: Tensor) -> tuple[Tensor, Tensor, None]:
    if x.ndim != 3 or layer.in_proj_weight is None:
        raise ValueError("only batched torch.nn.MultiheadAttention with one width can be probed.")
    if not layer.batch_first:
        x = x.transpose(0, 1)
    both = nn.functional.linear(x, layer.in_proj_weight, layer.in_proj_bias)
    q, k, _ = both.unflatten(-1, (3 * layer.num_heads, -1)).transpose(1, 2).chunk(3, dim=1)
    return q, k, None
