"""``modality_flow``: who listens to whom, for given attentions or for a model and a batch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from primal_attention.analysis.flow.ablation import BlindScore
from primal_attention.analysis.flow.adapters import Layout, output_map
from primal_attention.analysis.flow.coattention import CoAttention
from primal_attention.analysis.flow.layers import FlowWeighting, GivenLayer, LayerReader, Visibility
from primal_attention.analysis.flow.readers import (
    LayerReading,
    read_layers,
    rollout,
)
from primal_attention.analysis.flow.result import SPECIAL, FlowResult
from primal_attention.analysis.flow.shares import average_shares
from primal_attention.analysis.flow.sources import (
    FlowDetails,
    blind_layout,
    given_layout,
    model_layout,
)
from primal_attention.hosts import Batch

__all__ = ["Mode", "Special", "modality_flow"]

Mode = Literal["layer", "rollout"]
Special = Literal["separate", "text", "drop"]


def modality_flow(
    source: nn.Module | Sequence[Tensor] | Tensor,
    batch: Batch | None = None,
    modality_ids: Int[Tensor, "*b n"] | Literal["segments"] | None = None,
    *,
    keep: Bool[Tensor, "b n"] | None = None,
    names: Sequence[str] | None = None,
    special: Special = "separate",
    special_ids: Bool[Tensor, "b n"] | Sequence[int] | None = None,
    weighting: FlowWeighting = "attention",
    mode: Mode = "layer",
    details: FlowDetails | None = None,
) -> FlowResult:
    """Return how much the tokens of each modality receive from every other, layer by layer.

    Call it with attentions, ``modality_flow(attentions, modality_ids, keep=keep)``, or with a
    model, ``modality_flow(model, batch)``. Shares depend on the numbers of tokens, so look at
    ``lift``: the share over what uniform attention would give. Rows are receivers.

    Args:
        source: Attention weights of each layer, ``[b h n n]``; or a model. Fused attention is
            recomputed by blocks of rows. Primal layers are read through their scores.
        batch: Inputs of the model. For attentions, the modality ids.
        modality_ids: Modality of every token, from 0 on; -1 is padding. Known kinds of models
            (ViLT, VisualBERT, LXMERT, BLIP, CLIP, decoders with image tokens) need none.
            ``"segments"`` takes the segments of ``token_type_ids``.
        keep: ``True`` where a token is real. Models know it from their masks.
        names: Names of the modalities.
        special: What to do with [CLS], [SEP] and the like: a modality of their own
            (``"separate"``), count them as what ``modality_ids`` says (``"text"``), or leave them
            out and normalise again (``"drop"``).
        special_ids: Where these tokens are, as a mask, or for models their token ids. By default
            those of the model's configuration.
        weighting: What a key contributes: ``"attention"`` (its weight), ``"norm"`` (the norm of
            its weighted value), ``"energy"`` (its squared weight) or ``"gradient"`` (relevance for
            one output).
        mode: ``"layer"``, or ``"rollout"`` for what has crossed up to a layer, residuals included.
        details: Labels for blind scores, gradients, and which layers to read.

    Example:
        >>> ids = torch.tensor([[0, 0, 1, 1, 1, 1]])
        >>> found = modality_flow([torch.full((1, 2, 6, 6), 1 / 6)], ids)
        >>> round(float(found.direction("text", "image")), 3), round(float(found.lift[0, 0, 1]), 3)
        (0.667, 1.0)
    """
    for name, value, choices in (
        ("special", special, get_args(Special)),
        ("weighting", weighting, get_args(FlowWeighting)),
        ("mode", mode, get_args(Mode)),
    ):
        if value not in choices:
            raise ValueError(f"{name} must be one of {choices}, got {value!r}.")
    details = FlowDetails() if details is None else details
    if isinstance(source, nn.Module):
        layout = model_layout(source, batch, modality_ids, keep, special_ids, weighting, details)
        blind = blind_layout(source, batch, layout, details)
    else:
        ids = batch if modality_ids is None else modality_ids
        layout = given_layout(source, ids, keep, special_ids, weighting, details.gradients)
        blind = []
    if names is not None:
        layout = replace(layout, names=_checked_names(names, layout))
    layout = _apply_special(layout, special)
    readers = _readers(source, layout, "attention" if layout.separate else weighting)
    if mode == "rollout":
        readings, notes = rollout(readers), list[str]()
    else:
        readings, notes = read_layers(readers, details.primal)
    return _result(readings, layout, mode, tuple(blind), notes)


def _result(
    readings: Sequence[LayerReading],
    layout: Layout,
    mode: str,
    blind: tuple[BlindScore, ...],
    notes: Sequence[str],
) -> FlowResult:
    """Return the means over samples."""
    if not readings:
        raise ValueError("No layer can be read: " + " ".join(notes))
    flows = [average_shares(reading.samples) for reading in readings]
    heads = [len(flow.by_head) for flow in flows]
    by_head = torch.zeros(len(flows), max(heads), *flows[0].flow.shape, dtype=torch.float64)
    for i, flow in enumerate(flows):
        by_head[i, : heads[i]] = flow.by_head
    primal = [reading.primal for reading in readings]
    words = dict.fromkeys(one.note for one in primal if one is not None and one.note)
    return FlowResult(
        layers=tuple(reading.name for reading in readings),
        names=layout.names,
        **{
            name: torch.stack([getattr(flow, name) for flow in flows])
            for name in ("flow", "chance", "lift", "has_lift", "imf", "imf_chance", "imf_lift")
        },
        by_head=by_head,
        num_heads=tuple(heads),
        readings=tuple(reading.reading for reading in readings),
        mode=mode,
        samples=len(readings[0].samples),
        primal=tuple(primal),
        blind=blind,
        notes=(*layout.notes, *words, *notes),
        separate=layout.separate,
    )


def _checked_names(names: Sequence[str], layout: Layout) -> tuple[str, ...]:
    if len(names) < int(layout.ids.max()) + 1 or len(set(names)) != len(names) or SPECIAL in names:
        raise ValueError(
            f"names must be {int(layout.ids.max()) + 1} different names other than {SPECIAL!r}, "
            f"got {tuple(names)}."
        )
    return tuple(names)


def _apply_special(layout: Layout, special: Special) -> Layout:
    """Return the layout with special tokens as a modality, as they are, or without modality."""
    mask = layout.special
    if mask is None or special == "text" or not bool((mask & (layout.ids >= 0)).any()):
        return layout
    mask = mask & (layout.ids >= 0)
    if special == "drop":
        return replace(layout, ids=torch.where(mask, -1, layout.ids))
    ids = torch.where(mask, len(layout.names), layout.ids)
    return replace(layout, ids=ids, names=(*layout.names, SPECIAL))


def _readers(
    source: nn.Module | Sequence[Tensor] | Tensor, layout: Layout, weighting: FlowWeighting
) -> list[LayerReader]:
    """Return a reader for every layer."""
    found = []
    for layer in layout.layers:
        visibility: Visibility = "causal" if layer.is_causal else "all"
        is_known = isinstance(layer, GivenLayer | CoAttention) or layer.layer is not None
        if not is_known and weighting != "gradient":
            visibility = "weights"  # windows and prefixes, too, have weights of zero
        n, m = layer.query_keep.shape[1], layer.keep.shape[1]
        is_block, out = isinstance(layer, CoAttention), None
        if weighting == "norm" and isinstance(source, nn.Module) and not is_block:
            out = output_map(source, layer)
        found.append(
            LayerReader(
                layer,
                layout.ids[:, m - n :],
                layout.ids,
                len(layout.names),
                weighting,
                visibility,
                out,
                is_block,
            )
        )
    return found
