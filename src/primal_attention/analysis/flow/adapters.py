"""Which token is of which modality, for models of other libraries.

An adapter takes a model and a batch, and returns a :class:`Layout`: the modality of every token of
the joint sequence, the layers in which modalities meet, and the inputs of each modality.

- *one stream*: ViLT and VisualBERT put image tokens behind the words;
- *co-attention*: LXMERT has two sequences; BLIP lets words attend to the image;
- *decoder*: models such as LLaVA, Idefics and Qwen-VL mark image tokens in ``input_ids``;
- *two towers*: in CLIP and its kin modalities never meet.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from primal_attention.analysis.flow.coattention import CoAttention, Member
from primal_attention.analysis.flow.layers import GivenLayer
from primal_attention.hosts import CapturedLayer, ModuleCall
from primal_attention.hosts.recording import watch_modules
from primal_attention.training.evaluation import eval_mode

__all__ = ["Layout", "find_layout", "output_map", "segment_layout", "special_token_ids"]

TEXT, IMAGE = 0, 1


@dataclass(frozen=True)
class Layout:
    """Modalities of a joint sequence, and where they meet."""

    names: tuple[str, ...]
    ids: Int[Tensor, "b n"]
    """Modality of every token; what is padding is known to the layers."""
    layers: Sequence[CapturedLayer]
    """The layers in which modalities can meet, in the order of the forward."""
    special: Bool[Tensor, "b n"] | None = None
    """``True`` at tokens such as [CLS] and [SEP]."""
    inputs: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Inputs of the model that hold a whole modality, by its number."""
    separate: str = ""
    """Why nothing can flow between modalities; empty if it can."""
    notes: tuple[str, ...] = ()


def find_layout(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    captured: Callable[[], Sequence[CapturedLayer]],
    special_ids: Sequence[int] = (),
    *,
    has_norms: bool = False,
) -> Layout | None:
    """Return the modalities of a known kind of model; ``None`` for any other.

    Args:
        model: A vision-and-language model of transformers, or a model shaped like one.
        batch: Its keyword arguments.
        captured: Returns the attention of the model on the batch.
        special_ids: Token ids of [CLS], [SEP] and the like.
        has_norms: Whether blocks of co-attention weigh values instead of outputs.
    """
    if callable(getattr(model, "modality_ids", None)):
        return _told(model, batch, captured())
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", "")
    if kind == "lxmert":
        return _lxmert(model, batch, special_ids, has_norms)
    if kind in ("vilt", "visual_bert"):
        return _one_stream(kind, batch, captured(), special_ids)
    if kind in _TWO_TOWERS or kind == "blip":
        return _towers(kind, model, batch, captured(), special_ids, has_norms)
    if _image_token(config) is not None and "input_ids" in batch:
        return _decoder(config, batch, captured(), special_ids)
    return None


_TWO_TOWERS = (
    "align",
    "altclip",
    "chinese_clip",
    "clip",
    "siglip",
    "siglip2",
    "vision-text-dual-encoder",
)
_IMAGE_INPUTS = (
    "image_embeds",
    "pixel_values",
    "pixel_values_videos",
    "visual_embeds",
    "visual_feats",
)


def special_token_ids(config: object, tokenizer: object = None) -> list[int]:
    """Return the ids of [CLS], [SEP], the start and the end, as far as a model tells them.

    Args:
        config: Configuration of the model, or ``None``.
        tokenizer: Its tokenizer, where there is one; it knows all special tokens.

    Example:
        >>> from types import SimpleNamespace
        >>> special_token_ids(SimpleNamespace(bos_token_id=1, eos_token_id=[2, 3]))
        [1, 2, 3]
    """
    found: set[int | None] = set(getattr(tokenizer, "all_special_ids", ()))
    for part in (config, getattr(config, "text_config", None)):
        for name in _SPECIAL:
            value = getattr(part, f"{name}_token_id", None)
            found |= set(value) if isinstance(value, list | tuple) else {value}
        if getattr(part, "vocab_size", None) == _BERT_VOCABULARY:
            found |= {101, 102}
    known = {i for i in found if i is not None and i >= 0}
    return sorted(known - {_image_token(config)})


_SPECIAL = ("bos", "eos", "cls", "sep", "vision_start", "vision_end")
_BERT_VOCABULARY = 30522
"""Models with the vocabulary of BERT seldom tell the ids of [CLS] and [SEP]: 101 and 102."""


def segment_layout(batch: Mapping[str, Tensor], captured: Sequence[CapturedLayer]) -> Layout | None:
    """Return the segments of ``token_type_ids`` as modalities; ``None`` without two of them."""
    kinds = batch.get("token_type_ids")
    if not isinstance(kinds, Tensor) or len(kinds.unique()) < 2:
        return None
    names = tuple(f"segment {i}" for i in range(int(kinds.max()) + 1))
    return Layout(names, kinds, _joint(captured, kinds.shape))


def _joint(captured: Sequence[CapturedLayer], shape: Sequence[int]) -> list[CapturedLayer]:
    """Return the layers whose keys are the joint sequence."""
    return [
        layer
        for layer in captured
        if tuple(layer.keep.shape) == tuple(shape)
        and not any(part in layer.name for part in ("vision", "visual."))
    ]


def _is_special(batch: Mapping[str, Tensor], ids: Sequence[int]) -> Bool[Tensor, "b n"]:
    words = batch["input_ids"]
    return torch.isin(words, torch.tensor(list(ids), dtype=words.dtype, device=words.device))


def _image_inputs(batch: Mapping[str, Tensor]) -> dict[int, tuple[str, ...]]:
    return {IMAGE: tuple(name for name in _IMAGE_INPUTS if batch.get(name) is not None)}


def _words(batch: Mapping[str, Tensor]) -> Tensor:
    words = batch.get("input_ids")
    if not isinstance(words, Tensor):
        raise ValueError(
            "batch has no input_ids; modalities are found from them. Add them, or give "
            "modality_ids."
        )
    return words


def _told(model: Any, batch: Mapping[str, Tensor], captured: Sequence[CapturedLayer]) -> Layout:
    """Return the layout that a model tells itself: 0 text, 1 image, -1 padding."""
    ids = model.modality_ids(batch)
    special = model.special_mask(batch) if hasattr(model, "special_mask") else None
    layers = [layer for layer in captured if layer.keep.shape == ids.shape]
    inputs = _image_inputs(batch)
    return Layout(("text", "image"), ids.clamp_min(TEXT), layers, special, inputs)


def _one_stream(
    kind: str, batch: Mapping[str, Tensor], captured: Sequence[CapturedLayer], ids: Sequence[int]
) -> Layout:
    """Return the layout of words followed by image tokens."""
    words = _words(batch)
    (b, n_t), n = words.shape, captured[0].keep.shape[1]
    modality = (torch.arange(n) >= n_t).long().expand(b, -1)
    special = torch.zeros(b, n, dtype=torch.bool)
    special[:, :n_t] = _is_special(batch, ids)
    if kind == "vilt":
        special[:, n_t] = True  # the first visual token is a [CLS] of the image
    layers = [layer for layer in captured if layer.keep.shape == modality.shape]
    return Layout(("text", "image"), modality, layers, special, _image_inputs(batch))


def _image_token(config: object) -> int | None:
    for name in ("image_token_id", "image_token_index"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None


def _decoder(
    config: object,
    batch: Mapping[str, Tensor],
    captured: Sequence[CapturedLayer],
    ids: Sequence[int],
) -> Layout:
    """Return the layout of a decoder whose ``input_ids`` mark image and video tokens."""
    words, names = _words(batch), ["text", "image"]
    modality = words.eq(_image_token(config) or 0).long()
    video = getattr(config, "video_token_id", None)
    if isinstance(video, int) and bool((words == video).any()):
        modality = torch.where(words == video, 2, modality)
        names.append("video")
    special = _is_special(batch, ids) & (modality == TEXT)
    inputs = _image_inputs(batch)
    return Layout(tuple(names), modality, _joint(captured, words.shape), special, inputs)


def _towers(
    kind: str,
    model: nn.Module,
    batch: Mapping[str, Tensor],
    captured: Sequence[CapturedLayer],
    ids: Sequence[int],
    has_norms: bool,
) -> Layout:
    """Return the layout of a text and an image tower, with cross-attention or without."""
    words = _words(batch)
    image = next((layer for layer in captured if "vision" in layer.name), None)
    text = [layer for layer in captured if "vision" not in layer.name]
    if image is None or not text:
        raise ValueError(
            f"Only one tower of this {kind} model ran; give a batch with input_ids and "
            "pixel_values."
        )
    lengths = words.shape[1], image.keep.shape[1]
    modality = torch.cat([torch.full((len(words), n), i) for i, n in enumerate(lengths)], dim=1)
    special = torch.zeros(modality.shape, dtype=torch.bool)
    special[:, : lengths[0]] = _is_special(batch, ids)
    joint = partial(
        Layout, ("text", "image"), modality, special=special, inputs=_image_inputs(batch)
    )
    blocks = _cross_blocks(model, text, lengths, has_norms)
    if blocks:
        note = "Image tokens attend to image tokens only, in a tower of their own."
        return joint(layers=blocks, notes=(note,))
    keep = torch.cat([text[0].keep, image.keep], dim=1)
    tower = GivenLayer(torch.eye(modality.shape[1]).expand(len(words), 1, -1, -1), keep)
    tower.name = "two towers"
    why = (
        "Text and image have a tower each and meet in the final similarity only: no attention "
        "layer carries anything from one to the other."
    )
    return joint(layers=[tower], separate=why)


def _cross_blocks(
    model: nn.Module, text: Sequence[CapturedLayer], lengths: tuple[int, int], has_norms: bool
) -> list[CapturedLayer]:
    """Return blocks of words that attend to words and to the image."""
    by_name = {layer.name: layer for layer in text}
    blocks: list[CapturedLayer] = []
    for name, cross in by_name.items():
        prefix, found, rest = name.partition(".crossattention")
        own = by_name.get(f"{prefix}.attention{rest}")
        if not found or own is None or cross.keep.shape[1] != lengths[1]:
            continue
        members = [
            Member(own, TEXT, TEXT, output_map(model, own)),
            Member(cross, TEXT, IMAGE, output_map(model, cross)),
        ]
        blocks.append(CoAttention(prefix, members, lengths, has_norms=has_norms))
    return blocks


def _lxmert(
    model: nn.Module, batch: Mapping[str, Tensor], ids: Sequence[int], has_norms: bool
) -> Layout:
    """Return the layout of two sequences; one module attends in both directions."""
    words, visual = _words(batch), batch["visual_feats"]
    lengths = words.shape[1], visual.shape[1]
    keeps = [
        torch.ones(len(words), n, dtype=torch.bool) if mask is None else mask.bool()
        for n, mask in zip(
            lengths,
            (batch.get("attention_mask"), batch.get("visual_attention_mask")),
            strict=True,
        )
    ]
    names = [name for name, _ in model.named_modules() if name.split(".")[-2:-1] == ["x_layers"]]
    calls = _calls(model, batch, names)
    blocks: list[CapturedLayer] = []
    for name in names:
        members = []
        for part, receiver, sender in _LXMERT_PARTS:
            module = model.get_submodule(f"{name}.{part}")
            parent = model.get_submodule(f"{name}.{part}".rpartition(".")[0])
            args = calls[f"{name}.{part}"][int(part.endswith("att") and receiver == IMAGE)]
            with torch.no_grad(), eval_mode(module):
                output, weights = module(*args, output_attentions=True)[:2]
                values = module.get_submodule("value")(args[1])
            layer = GivenLayer(
                weights,
                keeps[sender],
                query_keep=keeps[receiver],
                name=name,
                output=output,
                values=values.unflatten(-1, (weights.shape[1], -1)).transpose(1, 2),
            )
            out = parent.get_parameter("output.dense.weight").detach()
            members.append(Member(layer, receiver, sender, out))
        blocks.append(CoAttention(name, members, lengths, has_norms=has_norms))
    special = torch.zeros(len(words), sum(lengths), dtype=torch.bool)
    special[:, : lengths[0]] = _is_special(batch, ids)
    modality = (torch.arange(sum(lengths)) >= lengths[0]).long().expand(len(words), -1)
    note = "Layers before the cross-modality blocks are left out: nothing crosses in them."
    return Layout(("text", "image"), modality, blocks, special, _image_inputs(batch), notes=(note,))


_LXMERT_PARTS = (
    ("visual_attention.att", TEXT, IMAGE),
    ("visual_attention.att", IMAGE, TEXT),
    ("lang_self_att.self", TEXT, TEXT),
    ("visn_self_att.self", IMAGE, IMAGE),
)


def _calls(
    model: nn.Module, batch: Mapping[str, Tensor], blocks: Sequence[str]
) -> dict[str, list[list[Tensor | None]]]:
    """Return queries, context and mask of every call of the attentions of blocks."""
    found: dict[str, list[list[Tensor | None]]] = {}

    def keep(name: str, call: ModuleCall) -> None:
        words = ("hidden_states", "context", "attention_mask")
        given = dict(zip(words, call.args, strict=False)) | call.kwargs
        found.setdefault(name, []).append([given.get(word) for word in words])

    names = {f"{block}.{part}" for block in blocks for part, _, _ in _LXMERT_PARTS}
    watched = watch_modules({n: model.get_submodule(n) for n in names}, enter=keep)
    # one module of LXMERT attends in both directions, so every call counts
    with torch.no_grad(), eval_mode(model), watched:
        model(**batch)
    return found


def output_map(model: nn.Module, layer: CapturedLayer) -> Float[Tensor, "c hv"] | None:
    """Return the weight that maps the heads of a layer to its output, where it is known.

    Args:
        model: The model.
        layer: One of its layers.
    """
    width = layer.num_heads * layer.head_dim
    parent = layer.name.rpartition(".")[0]
    places = [f"{layer.name}.{name}" for name in ("out_proj", "o_proj", "proj", "projection")]
    places += [f"{parent}.output.dense".lstrip("."), f"{layer.name}.dense"]
    for place in places:
        try:
            weight = getattr(model.get_submodule(place.lstrip(".")), "weight", None)
        except AttributeError:
            continue
        if isinstance(weight, Tensor) and weight.ndim == 2 and weight.shape[1] == width:
            return weight.detach()
    return None
