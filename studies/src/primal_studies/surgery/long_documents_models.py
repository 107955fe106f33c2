"""The ways to read a long document, on a trained encoder and on shapes of random weights."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from primal_attention import Embedder
from primal_attention.surgery import (
    SurgeryConfig,
    convert,
    extend_positions,
    register_implementation,
)
from primal_attention.surgery.positions import PositionMethod
from primal_studies.kit.pretrained import minilm
from primal_studies.surgery.long_documents_texts import PIECE, Vectors, cut, split

__all__ = ["embed_way", "forwards"]

_VOCABULARY = 30_000
_MODERN = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 384,
    "local_attention": 128,
    **dict.fromkeys(("bos_token_id", "cls_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
    "pad_token_id": 0,
}
"""ModernBERT in small: heads of 64, every third layer global, the others windows of 128 tokens."""


def embed_way(way: str, texts: Sequence[str]) -> list[Vectors]:
    """Return the vectors of each text, of length one, by MiniLM.

    Args:
        way: ``"whole, softmax"`` or ``"whole, adaptive"``, with interpolated positions; ``"whole,
            repeated positions"``, with softmax; ``"pieces, average"``, ``"pieces, best"``, which
            keeps a vector of every piece, or ``"start"``.
        texts: Documents or queries, of any length.
    """
    original, tokenizer = minilm()
    how, _, detail = way.partition(", ")
    if how == "whole":
        embedder = Embedder(_extended(detail, texts), tokenizer)
        groups = [[text] for text in texts]
    elif detail == "average":
        embedder = Embedder(original, tokenizer, chunk="average")
        groups = [[text] for text in texts]
    else:
        embedder = Embedder(original, tokenizer)
        # two positions are those of the special tokens
        first = [[cut(text, PIECE - 2, tokenizer)] for text in texts]
        groups = first if how == "start" else [split(text, tokenizer) for text in texts]
    vectors = torch.from_numpy(embedder.encode([text for group in groups for text in group]))
    parts = normalize(vectors, dim=-1).split([len(group) for group in groups])
    return [part.numpy() for part in parts]


def _extended(detail: str, texts: Sequence[str]) -> nn.Module:
    """Return MiniLM with enough positions for the texts, and another attention if asked."""
    original, tokenizer = minilm()
    model = copy.deepcopy(original)
    longest = max(len(tokenizer(text, truncation=False, verbose=False).input_ids) for text in texts)
    method: PositionMethod = "repeat" if detail == "repeated positions" else "interpolate"
    extend_positions(model, -(-longest // PIECE) * PIECE, method=method)
    if detail == "adaptive":
        convert(model, SurgeryConfig(detail))
    return model


def forwards(model: str, tokens: int) -> dict[str, Callable[[], object]]:
    """Return forwards over one document of random tokens, by way.

    Args:
        model: ``"minilm"`` or ``"modernbert"``.
        tokens: Length of the document.
    """
    torch.manual_seed(0)
    ids = torch.randint(5, _VOCABULARY, (1, tokens))
    # the pieces of a document make a batch; the last one is padded
    pieces = nn.functional.pad(ids, (0, -tokens % PIECE), value=5).view(-1, PIECE)
    build = {"minilm": _minilm, "modernbert": _modernbert}[model]
    models: Mapping[str, Any] = build(tokens)
    runs: dict[str, Callable[[], object]] = {
        name: partial(_run, found, ids) for name, found in models.items()
    }
    # pieces are read by the model as it is published
    published = models.get("own windows", models["softmax"])
    return runs | {"pieces": partial(_run, published, pieces)}


def _run(model: nn.Module, ids: Tensor) -> object:
    with torch.no_grad():
        return model(input_ids=ids)


def _minilm(tokens: int) -> dict[str, nn.Module]:
    """Return the shape of MiniLM with softmax and with adaptive attention in all layers."""
    # time and memory do not depend on the weights, so a larger table of positions is enough
    settings = minilm()[0].config.to_dict() | {"max_position_embeddings": max(tokens, PIECE)}
    kind = type(minilm()[0])
    softmax = kind(type(minilm()[0].config)(**settings)).eval()
    adaptive = copy.deepcopy(softmax)
    convert(adaptive, SurgeryConfig("adaptive"))
    return {"softmax": softmax, "adaptive": adaptive}


def _modernbert(tokens: int) -> dict[str, nn.Module]:
    """Return a small ModernBERT: global everywhere, its windows, and adaptive in both."""
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        ModernBertConfig,
        ModernBertModel,
    )
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    functions: Any = AttentionInterface
    adaptive = functions()[register_implementation("adaptive")]

    def hybrid(module: nn.Module, *args: Any, sliding_window: int | None, **also: Any) -> Any:
        return (adaptive if sliding_window is None else sdpa_attention_forward)(
            module, *args, **also
        )

    def build(attend: Any, mask: Any, **changes: Any) -> Any:
        name = f"primal:study-{attend.__name__}"
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, mask)
        settings: dict[str, Any] = {**_MODERN, "max_position_embeddings": tokens, **changes}
        model: Any = ModernBertModel(ModernBertConfig(**settings))
        model.set_attn_implementation(name)
        return model.eval()

    # one document has no padding; transformers would make the mask of windows also without windows
    everywhere = {"layer_types": ["full_attention"] * 6}
    return {
        "softmax": build(sdpa_attention_forward, _no_mask, **everywhere),
        "own windows": build(_own_windows, sdpa_mask),
        "own windows, adaptive": build(hybrid, sdpa_mask),
        "adaptive": build(adaptive, _no_mask, **everywhere),
    }


def _own_windows(*args: Any, **also: Any) -> Any:
    """Return attention as transformers computes it, under a name of its own."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(*args, **also)


def _no_mask(*args: object, **also: object) -> None:
    """Return no mask: every token sees every other."""
