"""Attention by name in transformers: ``model.set_attn_implementation("primal:skyformer")``.

A model of transformers can select a function of queries, keys and values by name, and with it the
mask that the function takes. No conversion is needed. This does not work for mechanisms with
weights (primal layers, learned landmarks, learned positions): the model would not save or load
their weights. Use :func:`primal_attention.surgery.convert` for them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from primal_attention.attention import Core, MultiHeadAttention, create_attention, list_attentions
from primal_attention.attention.multihead import real_first
from primal_attention.hosts.optional import require_transformers
from primal_attention.support.randomness import isolated
from primal_attention.surgery.config import conversion_defaults

__all__ = ["register_implementation", "register_implementations", "run_core"]

PREFIX = "primal:"
_SEED = 0
"""Seed of random features, so that a name always means the same function."""


def register_implementations() -> list[str]:
    """Register every mechanism that is a function of (q, k, v), and return the names.

    Example:
        >>> "primal:skyformer" in register_implementations()
        True
    """
    return [register_implementation(name) for name in _names_without_weights()]


def _names_without_weights(**capabilities: bool) -> list[str]:
    """Return the mechanisms with these capabilities that can be registered."""

    def has_no_weights(name: str) -> bool:
        core = _core(name, 1, 4, **conversion_defaults(name))
        return core is not None and next(core.parameters(), None) is None

    return [name for name in list_attentions("*", **capabilities) if has_no_weights(name)]


def register_implementation(name: str, *, alias: str | None = None, **options: object) -> str:
    """Register a mechanism with transformers, and return its name there.

    Linear mechanisms compute no attention weights, so dropout applies to the outputs of the heads.
    Random features (``favor``) have a fixed seed.

    Args:
        name: A mechanism of the registry without weights.
        alias: The name to register; by default the name of the mechanism. It gets the prefix
            ``"primal:"``.
        options: Options of the mechanism's constructor, such as ``num_landmarks=64``.

    Example:
        >>> register_implementation("skyformer", alias="skyformer-64", num_landmarks=64)
        'primal:skyformer-64'
    """
    transformers = require_transformers()
    options = {**conversion_defaults(name), **options}
    core = _core(name, 1, 4, **options)
    if core is None:
        raise ValueError(
            f"{name!r} is not a function of queries, keys and values; replace the attention "
            "modules with primal_attention.surgery.convert."
        )
    own = [n for n, _ in core.named_parameters()]
    if own:
        raise ValueError(
            f"{name!r} has weights ({', '.join(own)}), which the model would not save; replace the "
            "attention modules with primal_attention.surgery.convert."
        )
    alias = PREFIX + (alias or name).removeprefix(PREFIX)
    transformers.AttentionInterface.register(alias, _implementation(name, alias, options))
    transformers.AttentionMaskInterface.register(alias, functools.partial(_keep_mask, alias))
    return alias


def run_core(
    core: Core,
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h m d"],
    v: Float[Tensor, "b h m v"],
    *,
    key_mask: Bool[Tensor, "b m"] | None = None,
    is_causal: bool = False,
) -> Float[Tensor, "b h n v"]:
    """Return the output of a core for queries, keys and values with padding anywhere.

    It does what a multi-head layer does between its projections. Padding is set to zero. Cores that
    count positions get the real tokens first. A causal core may get the queries of the last ``n``
    of ``m`` tokens only, as in decoding with a cache of keys.

    Args:
        core: The mechanism.
        q: Queries; of the last ``n`` tokens if causal.
        k: Keys.
        v: Values.
        key_mask: ``True`` where a key is real.
        is_causal: Whether an output depends on earlier tokens only.

    Example:
        >>> core = create_attention("linear", 8, 2).core
        >>> q = torch.randn(1, 2, 5, 4)
        >>> whole = run_core(core, q, q, q, is_causal=True)
        >>> last = run_core(core, q[:, :, 4:], q, q, is_causal=True)
        >>> torch.testing.assert_close(last, whole[:, :, 4:])
    """
    n, m = q.shape[2], k.shape[2]
    same = n == m
    if is_causal and not same:
        if core.takes_query_mask:
            raise ValueError(
                f"{type(core).__name__} needs the queries of all {m} tokens and got those of the "
                f"last {n}; pass use_cache=False, or convert the model, which decodes with a state."
            )
        # an output depends on its own query and on no other: the earlier ones can be zero
        q, same = torch.cat([q.new_zeros(*q.shape[:2], m - n, q.shape[3]), q], dim=2), True
    order = None
    if key_mask is not None:
        # where, not multiply: a NaN in a padded slot must not survive
        keep = key_mask[:, None, :, None]
        k, v = torch.where(keep, k, 0.0), torch.where(keep, v, 0.0)
        q = torch.where(keep, q, 0.0) if same else q
        if core.ordered:
            order = real_first(key_mask)
            key_mask = key_mask.gather(1, order)
            k, v = _take(k, order), _take(v, order)
            q = _take(q, order) if same else q
    also: dict[str, Tensor] = {}
    if key_mask is not None and core.takes_query_mask:
        real = torch.ones(q.shape[0], n, dtype=torch.bool, device=q.device)
        also = {"query_mask": key_mask if same else real}
    y = core(q, k, v, key_mask=key_mask, is_causal=is_causal, **also)
    if order is not None and same:
        y = _take(y, order.argsort(1))
    return y[:, :, y.shape[2] - n :]


def _take(x: Tensor, slots: Tensor) -> Tensor:
    return x.gather(2, slots[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _core(name: str, num_heads: int, head_dim: int, **options: Any) -> Core | None:
    """Return the core of a mechanism, or ``None`` if it has none."""
    layer = create_attention(name, num_heads * head_dim, num_heads, **options)
    return layer.core if isinstance(layer, MultiHeadAttention) else None


def _implementation(name: str, alias: str, options: dict[str, object]) -> Callable[..., object]:
    """Return the function that transformers calls in place of its own attention."""

    @functools.cache
    def build(num_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> Core:
        with isolated(_SEED):
            core = _core(name, num_heads, head_dim, device=device, dtype=dtype, **options)
        if core is None:
            # cannot happen: register_implementation refuses a mechanism without a core
            raise RuntimeError(f"{name!r} has no core")
        return core.eval()

    def implementation(
        module: nn.Module,
        query: Float[Tensor, "b h n d"],
        key: Float[Tensor, "b g m d"],
        value: Float[Tensor, "b g m d"],
        attention_mask: Bool[Tensor, "b m"] | None,
        *,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: object,
    ) -> tuple[Float[Tensor, "b n h d"], None]:
        for word in ("position_bias", "sliding_window", "softcap", "s_aux"):
            if kwargs.get(word) is not None:
                raise ValueError(f"{alias} does not support {word}; use 'sdpa' or 'eager' here.")
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(
                f"{alias} takes a mask [batch, keys] with True for real tokens, got shape "
                f"{tuple(attention_mask.shape)}; a mask over pairs of tokens is not supported."
            )
        if key.shape[1] != query.shape[1]:
            groups = query.shape[1] // key.shape[1]
            key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        causal = bool(getattr(module, "is_causal", False)) if is_causal is None else is_causal
        core = build(query.shape[1], query.shape[3], query.device, query.dtype)
        if causal and not core.capabilities.causal:
            others = ", ".join(PREFIX + n for n in _names_without_weights(causal=True))
            raise ValueError(f"{alias} has no causal form; use one of: {others}.")
        ratio = 1.0 if scaling is None else scaling * math.sqrt(query.shape[3])
        if not math.isclose(ratio, 1.0, rel_tol=1e-6):
            # the model has another scale than 1/√d: queries and keys take half of the ratio each
            query, key = query * math.sqrt(ratio), key * math.sqrt(ratio)
        y = run_core(core, query, key, value, key_mask=attention_mask, is_causal=causal)
        y = nn.functional.dropout(y, dropout, training=dropout > 0)
        return y.transpose(1, 2).contiguous(), None

    return implementation


def _keep_mask(
    alias: str,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., object] | None = None,
    attention_mask: Bool[Tensor, "b m"] | None = None,
    **kwargs: object,
) -> Bool[Tensor, "b m"] | None:
    """Return which keys are real; the attention function handles causal order."""
    from transformers import masking_utils

    known = (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function, None)
    if mask_function not in known:
        raise ValueError(
            f"{alias} supports padding and causal order, not windows, chunks or packed sequences; "
            "use 'sdpa' here, or pass one sequence per row with its attention_mask."
        )
    causal = mask_function is masking_utils.causal_mask_function
    if causal and (isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length):
        raise ValueError(
            f"{alias} needs queries that belong to the last keys, which is not so in a cache "
            "allocated in advance; use the default cache."
        )
    return None if attention_mask is None else attention_mask[:, -kv_length:].bool()
