"""Attention modules of Hugging Face transformers, encoders and decoders.

They are recognised by the names of their children, not by their class: BERT, RoBERTa, ELECTRA
(``query``, ``key``, ``value``; another module holds the output map), DistilBERT (``q_lin`` …), the
Llama family, ViT and CLIP (``q_proj`` … ``o_proj`` or ``out_proj``), GPT-2 (``c_attn``,
``c_proj``). The trial call of every conversion finds modules that compute more than softmax
attention.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor, nn

from primal_attention.attention import Attention, Rotary
from primal_attention.hosts.converted import ConvertedLayer
from primal_attention.hosts.errors import ConversionError
from primal_attention.hosts.inputs import LayerInputs
from primal_attention.hosts.library import HostLibrary, plain_projection, refuse_other_parts
from primal_attention.hosts.masks import (
    PACKED,
    packed_arguments,
    packed_positions,
    padding_mask,
    read_mask,
)
from primal_attention.hosts.optional import require_transformers
from primal_attention.hosts.parts import AttentionParts, LinearWeights

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

__all__ = [
    "IMPORT_FIRST",
    "METHOD",
    "RECORD_FORMAT",
    "ConvertedHuggingFace",
    "HuggingFace",
    "allow_build",
]

METHOD = "primal_attention"
"""Name under which transformers finds the loader of converted models: a quantization method."""

RECORD_FORMAT = 1
"""Format of the record of a conversion in ``config.json``."""

IMPORT_FIRST = "import primal_attention first"
"""Name of an attention function that does not exist, in the config of converted models.

Without this package transformers warns of an unknown quantization method, and would build the
original layers with random weights. So it stops with an error that holds this name instead. The
loader of converted models removes it.
"""

IMPLEMENTATION = "primal:converted"
"""Name of the attention function of fully converted models; its mask is the padding mask."""

_CHOICE = "_attn_implementation_internal"
"""Field of a transformers config with the name of the attention function."""

_NAMES: dict[str, tuple[str, str, str, str | None]] = {
    "bert": ("query", "key", "value", None),
    "distilbert": ("q_lin", "k_lin", "v_lin", "out_lin"),
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "clip": ("q_proj", "k_proj", "v_proj", "out_proj"),
}
# arguments that transformers passes to every attention and that do not affect ours
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


class ConvertedHuggingFace(ConvertedLayer):
    """Takes the arguments of an attention of transformers, returns ``(output, None)``.

    Args:
        attention: The attention of this library.
        is_causal: Whether the layer is causal by default.
        rotary: Whether the host passes rotary positions.
        layer_idx: Index of its layer in the cache.
        positional: Names of the arguments after the first that the original takes by position.
    """

    library = "huggingface"

    def __init__(
        self,
        attention: Attention,
        *,
        is_causal: bool = False,
        rotary: bool = False,
        layer_idx: int | None = None,
        positional: tuple[str, ...] = (),
    ) -> None:
        super().__init__(attention, is_causal=is_causal, rotary=rotary)
        self.layer_idx = layer_idx
        self.positional = positional

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Return the layer's output, and ``None`` in place of attention weights."""
        if len(args) > len(self.positional):
            raise TypeError(
                f"A converted layer takes {1 + len(self.positional)} positional arguments, got "
                f"{1 + len(args)}; pass the others by name."
            )
        return self._forward(
            hidden_states, **dict(zip(self.positional, args, strict=False)), **kwargs
        )

    def _forward(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        past_key_values: "Cache | None" = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        is_causal: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        if output_attentions:
            raise ValueError(
                "A converted layer computes no attention weights; call the model without "
                "output_attentions, or read them before the conversion."
            )
        known = _IGNORED | PACKED
        unknown = [k for k, v in kwargs.items() if k not in known and v is not None]
        if unknown:
            raise TypeError(
                f"A converted layer does not support the argument {', '.join(unknown)}; leave it "
                "out, or do not convert this layer."
            )
        causal = self.is_causal if is_causal is None else is_causal
        documents = packed_arguments(kwargs, *hidden_states.shape[:2])
        if past_key_values is None:
            inputs = self._inputs(hidden_states, attention_mask, position_embeddings, causal, 0)
            return self.attend(_packed(inputs, documents)), None
        if not causal:
            raise ValueError(
                "A converted layer that is not causal got a cache; call the model with "
                "use_cache=False."
            )
        if documents is None and attention_mask is None:
            documents = packed_positions(kwargs.get("position_ids"), len(hidden_states))
        return self._decode(
            hidden_states, attention_mask, position_embeddings, past_key_values, documents
        ), None

    def _inputs(
        self,
        x: Tensor,
        mask: Tensor | None,
        positions: tuple[Tensor, Tensor] | None,
        causal: bool,
        seen: int,
    ) -> LayerInputs:
        b, n, _ = x.shape
        keep, documents = read_mask(mask, batch=b, is_causal=causal, tokens=n, seen=seen)
        rotary = None if positions is None else Rotary(*positions)
        return LayerInputs(x, None, keep, causal, rotary, documents)

    def _decode(
        self,
        x: Tensor,
        mask: Tensor | None,
        positions: tuple[Tensor, Tensor] | None,
        cache: "Cache",
        documents: Tensor | None,
    ) -> Tensor:
        # imports transformers, which every other host does without
        from primal_attention.hosts.state_cache import state_layer

        if self.layer_idx is None:
            raise ValueError("A layer without layer_idx cannot use a cache; pass use_cache=False.")
        layer = state_layer(cache, self.layer_idx)
        inputs = self._inputs(x, mask, positions, True, layer.seen)
        inputs = _packed(inputs, documents)
        is_packed = inputs.document_ids is not None
        if is_packed and layer.seen:
            raise ConversionError(
                f"The cache holds {layer.seen} tokens of a document, and the batch packs several; "
                "pass use_cache=False, or one document a row."
            )
        if is_packed or (self.training and not layer.seen):
            # the cache is not used afterwards, and in training the loss term needs forward
            layer.skip(x.shape[1])
            return self.attend(inputs)
        return layer.step(
            self.attention, inputs if self.uses_rotary else inputs._replace(rotary=None)
        )


def _packed(inputs: LayerInputs, documents: Tensor | None) -> LayerInputs:
    """Return inputs with the documents that the arguments of a batch name, if they do."""
    return inputs if documents is None else inputs._replace(document_ids=documents)


class HuggingFace(HostLibrary):
    """Reads and replaces attention modules of transformers."""

    name = "huggingface"

    def matches(self, module: nn.Module) -> bool:
        """Return whether a module has the children of one of the known families."""
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

    def read(self, module: nn.Module) -> AttentionParts:
        """Return weights and sizes of the module."""
        family = self._family(module)
        method = _quantization(module)
        # transformers turns weights from a GGUF file into plain ones
        if method not in (None, METHOD, "gguf"):
            raise ConversionError(
                f"its model is quantised with {method!r}; convert the model before it is quantised"
            )
        given = inspect.signature(module.forward).parameters
        if getattr(module, "is_cross_attention", False) or (
            family == "bert" and "encoder_hidden_states" in given
        ):
            raise ConversionError("cross-attention: queries and keys come from two sequences")
        if "key_value_states" in given:
            raise ConversionError("it can be cross-attention, and its signature does not say when")
        if (window := self._window(module)) is not None:
            raise ConversionError(
                f"it has a sliding window of {window} tokens, which is a mask over pairs"
            )
        refuse_other_parts(module, _NAMES.get(str(family), ("c_attn", "c_proj")))
        q, k, v, out = self._projections(module, family)
        heads = self._heads(module)
        d = q.weight.shape[0] // heads
        scaling = getattr(module, "scaling", d**-0.5)
        return AttentionParts(
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

    def _window(self, module: nn.Module) -> int | None:
        if hasattr(module, "sliding_window"):
            return cast("int | None", module.sliding_window)
        config = getattr(module, "config", None)
        if not getattr(config, "use_sliding_window", True):
            return None
        return getattr(config, "sliding_window", None)

    def _projections(
        self, module: nn.Module, family: str | None
    ) -> tuple[LinearWeights, LinearWeights, LinearWeights, LinearWeights | None]:
        if family != "gpt2":
            q, k, v, out = (
                None if name is None else plain_projection(module, name)
                for name in _NAMES[str(family)]
            )
            return q, k, v, out  # type: ignore[return-value]
        fused, out = plain_projection(module, "c_attn"), plain_projection(module, "c_proj")
        q, k, v = fused.split()
        return q, k, v, out

    def _heads(self, module: nn.Module) -> int:
        for name in ("num_attention_heads", "num_heads", "n_heads"):
            for owner in (module, getattr(module, "config", None)):
                if isinstance(getattr(owner, name, None), int):
                    return int(getattr(owner, name))
        raise ConversionError("its number of heads is unknown")

    def wrap(
        self, module: nn.Module, attention: Attention, parts: AttentionParts
    ) -> ConvertedLayer:
        """Return the module that replaces ``module``."""
        return ConvertedHuggingFace(
            attention,
            is_causal=parts.is_causal,
            rotary=parts.rotary,
            layer_idx=getattr(module, "layer_idx", None),
            positional=_positional(module),
        )

    def run_original(self, module: nn.Module, inputs: LayerInputs) -> Tensor:
        """Return the output of the original module."""
        module = copy.deepcopy(module).eval()
        config = getattr(module, "config", None)
        if hasattr(config, _CHOICE):
            # eager attention takes this mask on every device, fused ones may refuse it; the deep
            # copy has a config of its own
            setattr(config, _CHOICE, "eager")
        x, _, keep, causal, rotary = inputs[:5]
        pairs = torch.ones(x.shape[0], 1, x.shape[1], x.shape[1], dtype=torch.bool)
        pairs = pairs if keep is None else pairs & keep[:, None, None, :].cpu()
        pairs = (pairs.tril() if causal else pairs).to(x.device)
        # the lowest number as transformers adds it, not -inf: a row without keys must not be NaN
        mask = torch.zeros_like(pairs, dtype=x.dtype)
        mask = mask.masked_fill(~pairs, torch.finfo(x.dtype).min)
        also = {} if rotary is None else {"position_embeddings": tuple(rotary)}
        answer = module(hidden_states=x, attention_mask=mask, **also)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise ConversionError("it does not return (output, weights)")
        return answer[0]

    def adapt_model(
        self,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        every: Mapping[str, nn.Module],
        record: Mapping[str, object] | None,
    ) -> list[Callable[[], None]]:
        """Record the conversion in the model's config, and ask for padding masks if they suffice.

        They suffice if all layers of a config are converted: no mask over pairs is needed then.
        """
        undo: list[Callable[[], None]] = []
        # transformers makes one mask for all layers of a config, so its choice is per config
        replaced = {id(m) for m in modules.values()}
        left = _own_configs(m for m in every.values() if id(m) not in replaced)
        complete = _own_configs(modules.values()).keys() - left.keys()
        own = _own_configs([*model.modules(), *modules.values()])
        # other models may share the config, so this model gets a copy
        mine = dict(zip(own, copy.deepcopy(list(own.values())), strict=True))
        for module in model.modules():
            before: object = getattr(module, "config", None)
            if id(before) in mine:
                undo.append(partial(setattr, module, "config", before))
                setattr(module, "config", mine[id(before)])  # noqa: B010 - not a Tensor or Module
        for key in complete:
            # a layer that stays would need the mask over pairs that is no longer made
            _register()
            setattr(mine[key], _CHOICE, IMPLEMENTATION)
        config: Any = getattr(model, "config", None)
        if hasattr(config, "to_json_string") and record is not None:
            config.quantization_config = {"quant_method": METHOD, "format": RECORD_FORMAT, **record}
            config.attn_implementation = IMPORT_FIRST
        return undo


def allow_build(config: Any) -> None:
    """Remove from a config what stops transformers without this package."""
    if getattr(config, _CHOICE, None) == IMPORT_FIRST:
        config._attn_implementation = None
    if getattr(config, "transformers_weights", None) == IMPORT_FIRST:
        del config.transformers_weights


def _quantization(module: nn.Module) -> object:
    """Return the quantization method in the config of a module; ``None`` if it has none."""
    found = getattr(getattr(module, "config", None), "quantization_config", None)
    found = found if found is None or isinstance(found, dict) else found.to_dict()
    return None if found is None else found.get("quant_method")


def _positional(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments after the first that a module takes by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = inspect.signature(module.forward).parameters.values()
    return tuple(p.name for p in given if p.kind in kinds)[1:]


def _own_configs(modules: Iterable[nn.Module]) -> dict[int, object]:
    """Return the transformers configs of the modules, by identity."""
    configs = (getattr(module, "config", None) for module in modules)
    return {id(c): c for c in configs if hasattr(c, _CHOICE)}


def _register() -> None:
    transformers = require_transformers()
    transformers.AttentionMaskInterface.register(IMPLEMENTATION, padding_mask)
    transformers.AttentionInterface.register(IMPLEMENTATION, _refuse_softmax)


def _refuse_softmax(module: nn.Module, *args: object, **kwargs: object) -> NoReturn:
    raise RuntimeError(
        f"{type(module).__name__} asks for softmax attention, but all layers of its model were "
        "converted; revert the conversion before adding layers."
    )
