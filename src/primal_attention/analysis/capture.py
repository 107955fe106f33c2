"""Attention of any model on one batch: weights, values and scores, by row blocks in float64.

Fused attention returns no weights. ``capture`` therefore watches the forward: it keeps the queries,
keys, values and masks that reach ``scaled_dot_product_attention``, or the softmax of a model that
computes its weights itself. This works for transformers with every implementation,
``torch.nn.MultiheadAttention``, timm, and models of one's own. Layers of this library are read from
their inputs. An ``n × n`` matrix is computed only when :meth:`CapturedLayer.weights` is called.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from primal_attention.analysis.attention_maps import Batch, LayerInputs, batch_arguments
from primal_attention.attention import Attention, MultiHeadAttention, PrimalAttention
from primal_attention.attention.kernel_problem import pose_on_tokens
from primal_attention.training.evaluation import eval_mode

__all__ = ["CapturedLayer", "CapturedScores", "capture", "capture_call"]

Layers = str | int | Sequence[str | int]
"""Which layers: ``"all"``, ``"last"``, a name, an index, or several names or indices."""


class CapturedScores(NamedTuple):
    """Scores of a primal layer on one sequence; its kernel is a multiple of ``e diag(lam) rᵀ``."""

    e: Float[Tensor, "h n s"]
    """Scores of the queries."""
    r: Float[Tensor, "h m s"]
    """Scores of the keys."""
    lam: Float[Tensor, "h s"]
    """The weights ``λ = ℓ²`` of the directions."""


class CapturedLayer(ABC):
    """Attention of one layer in one forward; every result is in float64 and without padding."""

    name: str
    """Name of the module that attends, such as ``encoder.layer.5.attention.self``."""
    num_heads: int
    head_dim: int
    is_causal: bool
    """Whether no query attends to a later key."""
    keep: Bool[Tensor, "b m"]
    """``True`` where a key is a real token."""
    query_keep: Bool[Tensor, "b n"]
    """``True`` where a query is a real token."""
    output: Tensor
    """Output of the module, before the residual connection."""
    has_weights: bool = True
    """Whether the layer is a matrix of weights; primal layers have scores instead."""
    layer: Attention | None = None
    """The module, for layers of this library."""
    inputs: LayerInputs | None = None
    """Inputs of the module, for layers of this library."""

    def __len__(self) -> int:
        return len(self.keep)

    @abstractmethod
    def _rows(self, sequence: int, rows: slice) -> Float[Tensor, "h rows m"]:
        """Return rows of the weights of real queries over real keys."""

    @abstractmethod
    def values(self, sequence: int = 0) -> Float[Tensor, "h m v"]:
        """Return the values of the real keys, one set for each query head."""

    def forbids(self, queries: Bool[Tensor, "b n"], keys: Bool[Tensor, "b m"]) -> bool:
        """Return whether none of these queries may attend to any of these keys."""
        return not bool((keys & self.keep).any())

    def weights(
        self, sequence: int = 0, *, rows: slice | None = None, heads: Any = None
    ) -> Float[Tensor, "h n m"]:
        """Return the attention weights of a sequence: ``O(h n m)`` memory.

        Args:
            sequence: Which sequence of the batch.
            rows: Which queries, counted without padding; by default all.
            heads: Which heads, as an index of a tensor's first axis; by default all.
        """
        self._check_weights()
        n = int(self.query_keep[sequence].sum())
        start, stop, step = (rows or slice(None)).indices(n)
        if step != 1:
            raise ValueError(f"rows must have step 1, got step {step}; index the result instead.")
        parts = [
            self._rows(sequence, slice(i, min(i + _BLOCK, stop)))
            for i in range(start, stop, _BLOCK)
        ]
        m = int(self.keep[sequence].sum())
        empty = torch.zeros(self.num_heads, 0, m, dtype=torch.float64)
        found = torch.cat(parts, 1) if parts else empty
        return found if heads is None else found[heads]

    def row_blocks(
        self, sequence: int = 0, *, size: int = 512
    ) -> Iterator[tuple[slice, Float[Tensor, "h rows m"]]]:
        """Yield blocks of rows of the weights: ``O(h size m)`` memory at a time."""
        self._check_weights()
        n = int(self.query_keep[sequence].sum())
        for i in range(0, n, size):
            rows = slice(i, min(i + size, n))
            yield rows, self._rows(sequence, rows)

    def scores(self, sequence: int = 0) -> CapturedScores:
        """Return the scores of a primal layer: ``O(n s)`` memory, no ``n × n`` matrix."""
        raise ValueError(
            f"{self.name} is not a primal layer and has no scores; use weights() instead."
        )

    def _check_weights(self) -> None:
        if not self.has_weights:
            raise ValueError(
                f"{self.name} is a {type(self.layer).__name__} and has no matrix of weights; use "
                "scores() of primal layers, or another layer."
            )


_BLOCK = 512


class _DotProduct(CapturedLayer):
    """Softmax attention known by its queries, keys, values and mask."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
    ) -> None:
        self._q = q.detach()
        groups = q.shape[1] // k.shape[1]
        self._k, self._v = (t.detach().repeat_interleave(groups, 1) for t in (k, v))
        self._mask, self._causal = mask, causal
        self._scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        self.num_heads, self.head_dim = q.shape[1], v.shape[-1]
        self.is_causal = causal or _forbids_later(mask, q.shape[2], k.shape[2])
        self.keep = _attended(mask, len(q), k.shape[2])
        self.query_keep = torch.ones(len(q), q.shape[2], dtype=torch.bool)

    def _rows(self, sequence: int, rows: slice) -> Float[Tensor, "h rows m"]:
        queries, keep = self.query_keep[sequence].nonzero()[rows, 0], self.keep[sequence]
        q, k = self._q[sequence, :, queries].double(), self._k[sequence][:, keep].double()
        logits = self._scale * q @ k.transpose(-1, -2)
        if self._causal:
            keys = keep.nonzero()[:, 0]
            logits = logits.masked_fill(keys > queries[:, None], -torch.inf)
        if self._mask is not None:
            mask = self._mask.expand(len(self._q), *self._mask.shape[1:])[sequence]
            mask = mask.expand(-1, self._q.shape[2], -1)[:, queries][..., keep]
            if mask.dtype == torch.bool:
                logits = logits.masked_fill(~mask, -torch.inf)
            else:
                logits = logits + mask.double()
        # a row without any key is zero instead of NaN
        return torch.softmax(logits, -1).nan_to_num(0.0)

    def values(self, sequence: int = 0) -> Float[Tensor, "h m v"]:
        """Return the values of the real keys, one set for each query head."""
        return self._v[sequence][:, self.keep[sequence]].double()

    def forbids(self, queries: Bool[Tensor, "b n"], keys: Bool[Tensor, "b m"]) -> bool:
        """Return whether none of these queries may attend to any of these keys."""
        pairs = queries[:, None, :, None] & keys[:, None, None, :]
        if self._causal:
            pairs = pairs.tril()
        if self._mask is not None:
            pairs = pairs & _allowed(self._mask)
        return not bool(pairs.any())


class _Explicit(CapturedLayer):
    """Attention whose weights the model computed itself."""

    def __init__(self, weights: Tensor, v: Tensor) -> None:
        self._weights, self._v = weights.detach(), v.detach()
        self.num_heads, n, m = weights.shape[1:]
        self.head_dim = v.shape[-1]
        self.is_causal = n == m > 1 and not bool(weights.triu(1).any())
        self.keep = weights.any(2).any(1)
        self.query_keep = torch.ones(len(weights), n, dtype=torch.bool)

    def _rows(self, sequence: int, rows: slice) -> Float[Tensor, "h rows m"]:
        found = self._weights[sequence][:, self.query_keep[sequence]][:, rows]
        return found[..., self.keep[sequence]].double()

    def values(self, sequence: int = 0) -> Float[Tensor, "h m v"]:
        """Return the values of the real keys, one set for each query head."""
        return self._v[sequence][:, self.keep[sequence]].double()

    def forbids(self, queries: Bool[Tensor, "b n"], keys: Bool[Tensor, "b m"]) -> bool:
        """Return whether none of these queries attends to any of these keys."""
        pairs = queries[:, None, :, None] & keys[:, None, None, :]
        return not bool(self._weights[pairs.expand_as(self._weights)].any())


class _Own(CapturedLayer):
    """A layer of this library, known by its inputs."""

    def __init__(self, layer: Attention, inputs: LayerInputs) -> None:
        self.layer, self.inputs = layer, inputs
        self.num_heads, self.head_dim = layer.num_heads, layer.head_dim
        self.is_causal = inputs.is_causal
        self.has_weights = isinstance(layer, MultiHeadAttention)
        memory = inputs.x if inputs.context is None else inputs.context
        every = torch.ones(memory.shape[:2], dtype=torch.bool)
        self.keep = every if inputs.key_mask is None else inputs.key_mask
        alone = torch.ones(inputs.x.shape[:2], dtype=torch.bool)
        self.query_keep = self.keep if inputs.context is None else alone
        self._matrix: dict[int, Tensor] = {}

    def _sequence(self, sequence: int) -> LayerInputs:
        """Return the inputs of one sequence in float64, without padding."""
        if self.inputs is None:
            raise RuntimeError("The layer has no inputs.")
        x, context, _, is_causal, rotary = self.inputs
        keep, queries = self.keep[sequence], self.query_keep[sequence]
        own = x[sequence : sequence + 1, queries].double()
        other = None if context is None else context[sequence : sequence + 1, keep].double()
        if rotary is not None:
            slots = queries.nonzero()[:, 0].expand(len(x), -1)
            rotary = rotary.take(slots)
            if len(rotary.cos) > 1:
                rotary = type(rotary)(*(t[sequence : sequence + 1] for t in rotary))
        return LayerInputs(own, other, None, is_causal, rotary)

    def _double(self) -> Any:
        layer: Any = copy.deepcopy(self.layer)
        return layer.double().eval()

    @torch.no_grad()
    def _rows(self, sequence: int, rows: slice) -> Float[Tensor, "h rows m"]:
        # a mechanism may couple its queries, so the matrix is computed as a whole
        if sequence not in self._matrix:
            found = self._sequence(sequence).matrices(self._double())[0]
            self._matrix = {sequence: found.double()}
        return self._matrix[sequence][:, rows]

    @torch.no_grad()
    def values(self, sequence: int = 0) -> Float[Tensor, "h m v"]:
        """Return the values of the real keys, one set for each query head."""
        self._check_weights()
        inputs, layer = self._sequence(sequence), self._double()
        memory = inputs.x if inputs.context is None else inputs.context
        return layer.v_proj(memory)[0].unflatten(-1, (layer.num_heads, -1)).transpose(0, 1)

    @torch.no_grad()
    def scores(self, sequence: int = 0) -> CapturedScores:
        """Return the scores of a primal layer: ``O(n s)`` memory, no ``n × n`` matrix."""
        if not isinstance(self.layer, PrimalAttention):
            return super().scores(sequence)
        if self.is_causal and self.layer.weights == "data":
            raise ValueError(
                f"{self.name} has causal weights='data': its kernel changes with every token, so "
                "it has no scores of one kernel. Use another layer, or call it without a mask."
            )
        x, context = self._sequence(sequence)[:2]
        layer: PrimalAttention = self._double()
        problem = pose_on_tokens(layer, x, context, None, is_causal=self.is_causal)
        w_e, w_r = problem.weights.double().chunk(2, dim=1)
        q, k = problem.queries.inputs, problem.keys.inputs
        if context is not None and layer.weights == "dual":
            # dual weights pose the problem on the context; the scores are those of the queries
            q = layer.project_heads(x).chunk(2, dim=1)[0]
        e, r = (
            nn.functional.normalize(t.double(), dim=-1, eps=problem.eps) @ w
            for t, w in ((q, w_e), (k, w_r))
        )
        return CapturedScores(e[0], r[0], problem.ell.double().square())


def _attended(mask: Tensor | None, b: int, m: int) -> Bool[Tensor, "b m"]:
    """Return the keys that at least one query may attend to."""
    if mask is None:
        return torch.ones(b, m, dtype=torch.bool)
    return _allowed(mask).expand(b, *mask.shape[1:]).any(2).any(1).expand(b, m)


def _allowed(mask: Tensor) -> Bool[Tensor, "b h n m"]:
    """Return the pairs that a mask allows."""
    return mask if mask.dtype == torch.bool else mask > _FORBIDDEN


_FORBIDDEN = -1e4
"""Additive masks at or below this forbid a pair: libraries use -10000, the lowest float or -inf."""


def _forbids_later(mask: Tensor | None, n: int, m: int) -> bool:
    if mask is None or n != m or n == 1 or mask.shape[-2:] != (n, m):
        return False
    return not bool(_allowed(mask).triu(1).any())


class _Watch(TorchFunctionMode):
    """Records the attention of the modules that are running."""

    def __init__(self, wanted: set[str] | None) -> None:
        super().__init__()
        self.wanted = wanted
        self.running: list[str] = []
        self.closed = 0
        """Number of running layers of this library; what they do inside is not recorded."""
        self.found: dict[str, CapturedLayer] = {}
        self._latest: Tensor | None = None
        """Result of the last softmax; it is attention if it is then multiplied by values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.multi_head_attention_forward and self._is_wanted():
            with self._inside_function():
                func(*args, **{**kwargs, "need_weights": False})
            return func(*args, **kwargs)
        if func is nn.functional.scaled_dot_product_attention and self._is_wanted():
            self._keep_dot_product(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in _SOFTMAX and self._is_wanted() and result.ndim == 4:
            self._latest = result
        elif func in _PRODUCT and self._latest is not None:
            left, right = args[:2]
            # dropout outside training returns another tensor with the same memory
            if isinstance(left, Tensor) and left.data_ptr() == self._latest.data_ptr():
                self.found[self.running[-1]] = _Explicit(left, right)
                self._latest = None
        return result

    @contextmanager
    def _inside_function(self) -> Iterator[None]:
        """Record the dot products of a function of torch, inside which a mode is off."""
        attend = nn.functional.scaled_dot_product_attention

        def recorded(*args: Any, **kwargs: Any) -> Tensor:
            self._keep_dot_product(*args, **kwargs)
            return attend(*args, **kwargs)

        nn.functional.scaled_dot_product_attention = recorded
        try:
            yield
        finally:
            nn.functional.scaled_dot_product_attention = attend

    def _is_wanted(self) -> bool:
        if not self.running or self.closed:
            return False
        return self.wanted is None or self.running[-1] in self.wanted

    def _keep_dot_product(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        if query.ndim != 4:
            return
        if attn_mask is not None and attn_mask.ndim < 4:
            attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
        self.found[self.running[-1]] = _DotProduct(query, key, value, attn_mask, is_causal, scale)


_SOFTMAX = (torch.softmax, nn.functional.softmax, Tensor.softmax)
_PRODUCT = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm)


@contextmanager
def _hooks(model: nn.Module, watch: _Watch) -> Iterator[None]:
    """Tell the watch which module is running, and give it the inputs of our layers."""

    def enter(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            watch.running.append(name)
            if isinstance(module, Attention):
                if watch._is_wanted():
                    watch.found[name] = _Own(module, LayerInputs.of_call(args, kwargs))
                watch.closed += 1

        return hook

    def leave(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            watch.running.pop()
            watch.closed -= isinstance(module, Attention)
            first = _first_tensor(output)
            if name in watch.found and first is not None:
                watch.found[name].output = first.detach()

        return hook

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
        handles.append(module.register_forward_hook(leave(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first_tensor(output: Any) -> Tensor | None:
    """Return an output, or the first part of several; ``None`` if that is no tensor."""
    while isinstance(output, Mapping | tuple | list) and output:
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    return output if isinstance(output, Tensor) else None


def capture_call(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    wanted: set[str] | None = None,
) -> dict[str, CapturedLayer]:
    """Return the attention of every layer in one call of a model, by name; may be empty."""
    watch = _Watch(wanted)
    with torch.no_grad(), eval_mode(model), _hooks(model, watch), watch:
        model(*args, **kwargs)
    mask = kwargs.get("attention_mask")
    for name, layer in watch.found.items():
        layer.name = name
        if layer.layer is None:
            _cut_padding(layer, mask)
    return watch.found


def _cut_padding(layer: CapturedLayer, mask: Any) -> None:
    """Mark padded queries and keys with the model's own ``attention_mask``, where it fits.

    It fits the keys if no real query attends to what it calls padding. In cross-attention between
    texts and images of equal length it may be the mask of the other side.
    """
    real = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None
    is_self = layer.query_keep.shape == layer.keep.shape
    if real is not None and real.shape == layer.keep.shape:
        queries = real if is_self else layer.query_keep
        if layer.forbids(queries, ~real):
            layer.keep = real
    if is_self:
        layer.query_keep = layer.keep
    elif real is not None and real.shape == layer.query_keep.shape:
        layer.query_keep = real


def capture(model: nn.Module, batch: Batch, *, layers: Layers = "all") -> list[CapturedLayer]:
    """Return the attention of the layers of a model on a batch, in the order of the forward.

    The forward runs in evaluation mode and without gradients; the model is not changed. Queries,
    keys and values of the wanted layers are kept: ``O(b n c)`` memory for each. A model that
    computes its own softmax makes the ``n × n`` weights itself; they are kept as they are. If a
    module attends twice in one forward, the last call counts.

    Args:
        model: A model of transformers, timm, torch, this library, or any other PyTorch model.
        batch: Its inputs: keyword arguments, positional arguments, or one tensor.
        layers: ``"all"``, ``"last"``, an index in the order of the forward, a name, or several.

    Raises:
        ValueError: If the model has no attention, or no such layer.

    Example:
        >>> from primal_attention.attention import create_attention
        >>> layer = create_attention("softmax", 8, 2)
        >>> found = capture(layer, torch.randn(1, 5, 8))[0]
        >>> found.weights().shape, found.weights().sum(-1).round(decimals=6).unique()
        (torch.Size([2, 5, 5]), tensor([1.], dtype=torch.float64))
    """
    wanted = None
    if isinstance(layers, str) and layers not in ("all", "last"):
        wanted = {layers}
    found = capture_call(model, *batch_arguments(batch), wanted)
    if not found:
        what = "no attention layer" if wanted is None else f"no attention layer named {layers!r}"
        raise ValueError(
            f"{type(model).__name__} has {what} that ran on this batch; give a model with "
            "attention, and a name that capture(model, batch) lists."
        )
    if layers == "all":
        return list(found.values())
    names = list(found)
    chosen = [-1] if layers == "last" else [layers] if isinstance(layers, str | int) else layers
    return [found[_name(names, which)] for which in chosen]


def _name(names: list[str], which: str | int) -> str:
    if isinstance(which, str) and which in names:
        return which
    if isinstance(which, int) and -len(names) <= which < len(names):
        return names[which]
    raise ValueError(
        f"There is no attention layer {which!r}; the model has {len(names)}: {', '.join(names)}."
    )
