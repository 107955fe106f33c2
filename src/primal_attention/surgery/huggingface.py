"""Attention modules of Hugging Face transformers, encoders and decoders.

They are recognised by their parts, not by their class: BERT, RoBERTa, ELECTRA (``query``, ``key``,
``value``; the output map is another module's), DistilBERT (``q_lin`` …), the Llama family, ViT and
CLIP (``q_proj`` … ``o_proj`` or ``out_proj``), GPT-2 (``c_attn``, ``c_proj``). Anything that
computes more than softmax attention is found out by the trial call that every conversion makes.
"""

import copy
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from primal_attention.attention import Attention, Rotary
from primal_attention.surgery.config import ConversionError
from primal_attention.surgery.dialects import Dialect, plain_projection
from primal_attention.surgery.layers import (
    Converted,
    Inputs,
    Projection,
    Reading,
    conversion_record,
)
from primal_attention.surgery.masks import key_mask_of, padding_mask

__all__ = ["ConvertedHuggingFace", "HuggingFace"]

IMPLEMENTATION = "primal:converted"
"""Name under which converted models ask transformers for a padding mask instead of a square one."""

_CHOICE = "_attn_implementation_internal"
"""Where a config of transformers keeps which attention function, and so which masks, it uses."""

_NAMES: dict[str, tuple[str, str, str, str | None]] = {
    "bert": ("query", "key", "value", None),
    "distilbert": ("q_lin", "k_lin", "v_lin", "out_lin"),
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "clip": ("q_proj", "k_proj", "v_proj", "out_proj"),
}
# what transformers hands down to every attention without a meaning for ours
_IGNORED = frozenset(
    (
        "cache_position",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    )
)


class ConvertedHuggingFace(Converted):
    """Takes what transformers passes to an attention, returns ``(output, None)``.

    Args:
        attention: The layer that does the work.
        is_causal: Whether the layer is causal unless the call says otherwise.
        rotary: Whether the host passes rotary positions.
        layer_idx: Which layer of the cache is its own.
    """

    dialect = "huggingface"

    def __init__(
        self,
        attention: Attention,
        *,
        is_causal: bool = False,
        rotary: bool = False,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__(attention, is_causal=is_causal, rotary=rotary)
        self.layer_idx = layer_idx

    def forward(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        is_causal: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Return the layer's output, and ``None`` for weights that it never forms."""
        if output_attentions:
            raise ValueError(
                "A converted layer forms no attention weights; call the model without "
                "output_attentions, or look at them before converting."
            )
        unknown = [k for k, v in kwargs.items() if k not in _IGNORED and v is not None]
        if unknown:
            raise TypeError(
                f"A converted layer does not know what to do with {', '.join(unknown)}; leave "
                "that argument out, or this layer unconverted."
            )
        causal = self.is_causal if is_causal is None else is_causal
        if past_key_values is None:
            inputs = self._inputs(hidden_states, attention_mask, position_embeddings, causal, 0)
            return self.attend(inputs), None
        if not causal:
            raise ValueError(
                "A cache was passed to a converted layer that is not causal; call the model with "
                "use_cache=False."
            )
        return self._decode(
            hidden_states, attention_mask, position_embeddings, past_key_values
        ), None

    def _inputs(
        self,
        x: Tensor,
        mask: Tensor | None,
        positions: tuple[Tensor, Tensor] | None,
        causal: bool,
        seen: int,
    ) -> Inputs:
        b, n, _ = x.shape
        keep = key_mask_of(mask, batch=b, is_causal=causal, tokens=n, seen=seen)
        rotary = None if positions is None else Rotary(*positions)
        return Inputs(x, keep, causal, rotary)

    def _decode(
        self,
        x: Tensor,
        mask: Tensor | None,
        positions: tuple[Tensor, Tensor] | None,
        cache: Any,
    ) -> Tensor:
        from primal_attention.surgery.generation import state_layer

        if self.layer_idx is None:
            raise ValueError("A layer without an index cannot use a cache; pass use_cache=False.")
        layer = state_layer(cache, self.layer_idx)
        inputs = self._inputs(x, mask, positions, True, layer.seen)
        if self.training and not layer.seen:
            # a model in training makes a cache nobody continues; the loss term needs forward
            y = self.attend(inputs)
            layer.advance(None, x.shape[1])
            return y
        state = layer.state
        if state is None:
            state = self.attention.init_state(x.shape[0])
        also = {"rotary": inputs.rotary} if self.uses_rotary else {}
        y, state = self.attention.step(x, state, key_mask=inputs.key_mask, **also)
        layer.advance(state, x.shape[1])
        return y


class HuggingFace(Dialect):
    """Reads and replaces attention modules of transformers."""

    name = "huggingface"

    def matches(self, module: nn.Module) -> bool:
        """Return whether a module has the parts of one of the known families."""
        parameters = list(inspect.signature(module.forward).parameters)
        return parameters[:1] == ["hidden_states"] and self._family(module) is not None

    def _family(self, module: nn.Module) -> str | None:
        children = {name for name, _ in module.named_children()}
        if {"c_attn", "c_proj"} <= children:
            return "gpt2"
        for family, names in _NAMES.items():
            if {n for n in names if n is not None} <= children:
                return family
        return None

    def read(self, module: nn.Module) -> Reading:
        """Return what the module is made of."""
        family = self._family(module)
        given = inspect.signature(module.forward).parameters
        if getattr(module, "is_cross_attention", False) or (
            family == "bert" and "encoder_hidden_states" in given
        ):
            raise ConversionError("cross-attention: queries and keys come from two sequences")
        if "key_value_states" in given:
            raise ConversionError("it is used for cross-attention as well, and does not say where")
        if (window := self._window(module)) is not None:
            raise ConversionError(f"a sliding window of {window} tokens is a mask over pairs")
        extra = self._extra(module, family)
        if extra:
            raise ConversionError(f"it has parts that have no place in ours: {', '.join(extra)}")
        q, k, v, out = self._projections(module, family)
        heads = self._heads(module)
        d = q.weight.shape[0] // heads
        scaling = getattr(module, "scaling", d**-0.5)
        return Reading(
            q,
            k,
            v,
            out,
            heads,
            k.weight.shape[0] // d,
            float(scaling),
            is_causal=bool(getattr(module, "is_causal", False)),
            rotary="position_embeddings" in given,
            dropout=float(getattr(getattr(module, "resid_dropout", None), "p", 0.0)),
        )

    def _window(self, module: Any) -> int | None:
        if hasattr(module, "sliding_window"):
            return module.sliding_window
        config = getattr(module, "config", None)
        if not getattr(config, "use_sliding_window", True):
            return None
        return getattr(config, "sliding_window", None)

    def _extra(self, module: nn.Module, family: str | None) -> list[str]:
        known = {"c_attn", "c_proj"} if family == "gpt2" else {*_NAMES[str(family)]}
        parts = [
            name
            for name, child in module.named_children()
            if name not in known and not isinstance(child, nn.Dropout | nn.Identity)
        ]
        return parts + [name for name, _ in module.named_parameters(recurse=False)]

    def _projections(
        self, module: Any, family: str | None
    ) -> tuple[Projection, Projection, Projection, Projection | None]:
        if family != "gpt2":
            q, k, v, out = (
                None if name is None else plain_projection(module, name)
                for name in _NAMES[str(family)]
            )
            return q, k, v, out  # type: ignore[return-value]
        fused, out = plain_projection(module, "c_attn"), plain_projection(module, "c_proj")
        weights = fused.weight.chunk(3)
        biases = (None,) * 3 if fused.bias is None else fused.bias.chunk(3)
        q, k, v = (Projection(w, b) for w, b in zip(weights, biases, strict=True))
        return q, k, v, out

    def _heads(self, module: Any) -> int:
        for name in ("num_attention_heads", "num_heads", "n_heads"):
            for owner in (module, getattr(module, "config", None)):
                if isinstance(getattr(owner, name, None), int):
                    return int(getattr(owner, name))
        raise ConversionError("it does not say how many heads it has")

    def wrap(self, module: nn.Module, attention: Attention, reading: Reading) -> Converted:
        """Return the module that takes the place of ``module``."""
        return ConvertedHuggingFace(
            attention,
            is_causal=reading.is_causal,
            rotary=reading.rotary,
            layer_idx=getattr(module, "layer_idx", None),
        )

    def ask(self, module: nn.Module, inputs: Inputs) -> Tensor:
        """Return what the original module answers, or raise."""
        module = copy.deepcopy(module).eval()
        config = getattr(module, "config", None)
        if hasattr(config, _CHOICE):
            setattr(config, _CHOICE, "eager")
        x, keep, causal, rotary = inputs
        pairs = torch.ones(x.shape[0], 1, x.shape[1], x.shape[1], dtype=torch.bool)
        pairs = pairs if keep is None else pairs & keep[:, None, None, :].cpu()
        pairs = (pairs.tril() if causal else pairs).to(x.device)
        mask = torch.zeros_like(pairs, dtype=x.dtype)
        mask = mask.masked_fill(~pairs, torch.finfo(x.dtype).min)
        also = {} if rotary is None else {"position_embeddings": tuple(rotary)}
        answer = module(hidden_states=x, attention_mask=mask, **also)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise ConversionError("it does not return (output, weights)")
        return answer[0]

    def settle(
        self, model: nn.Module, modules: dict[str, nn.Module], every: dict[str, nn.Module]
    ) -> list[Callable[[], None]]:
        """Note the conversion in the model's config, and ask for padding masks where that suffices.

        Where all layers of a config are converted, nobody needs a mask over pairs of tokens.
        """
        undo: list[Callable[[], None]] = []
        replaced = {id(m) for m in modules.values()}
        left = _own_configs(m for m in every.values() if id(m) not in replaced)
        complete = _own_configs(modules.values()).keys() - left.keys()
        own = _own_configs([*model.modules(), *modules.values()])
        # models may share a config: this one gets its own, parts of parts copied together
        mine = dict(zip(own, copy.deepcopy(list(own.values())), strict=True))
        for module in model.modules():
            before: Any = getattr(module, "config", None)
            if id(before) in mine:
                undo.append(partial(setattr, module, "config", before))
                setattr(module, "config", mine[id(before)])  # noqa: B010 - not a Tensor or Module
        for key in complete:
            _register()
            setattr(mine[key], _CHOICE, IMPLEMENTATION)
        config: Any = getattr(model, "config", None)
        if hasattr(config, "to_json_string"):
            config.primal_attention = conversion_record(model)
        return undo


def _own_configs(modules: Iterable[nn.Module]) -> dict[int, Any]:
    """Return the configs of transformers among the modules' attributes, by identity."""
    configs = (getattr(module, "config", None) for module in modules)
    return {id(c): c for c in configs if hasattr(c, _CHOICE)}


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionMaskInterface.register(IMPLEMENTATION, padding_mask)
    AttentionInterface.register(IMPLEMENTATION, _nobody_calls_this)


def _nobody_calls_this(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f"{type(module).__name__} was asked for softmax attention although all layers of its model "
        "were converted; revert the conversion before adding layers."
    )
