"""Where layers and modalities come from: given tensors, or a model and a batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import torch
from jaxtyping import Int
from torch import Tensor, nn

from primal_attention.analysis.flow.ablation import (
    Ablation,
    BlindScore,
    ScoreFunction,
    blind_scores,
)
from primal_attention.analysis.flow.adapters import (
    Layout,
    find_layout,
    segment_layout,
    special_token_ids,
)
from primal_attention.analysis.flow.coattention import CoAttention
from primal_attention.analysis.flow.gradient import OutputLoss, relevance_layers
from primal_attention.analysis.flow.layers import FlowWeighting, GivenLayer
from primal_attention.hosts import Batch, CapturedLayer, Layers, capture

__all__ = ["FlowDetails", "PrimalReading", "blind_layout", "given_layout", "model_layout"]

PrimalReading = Literal["energy", "contribution"]


@dataclass(frozen=True)
class FlowDetails:
    """What :func:`modality_flow` is rarely asked: blind scores, gradients, parts of a model.

    Example:
        >>> FlowDetails(labels=torch.tensor([0, 1]), ablate="shuffle").primal
        'energy'
    """

    labels: Tensor | None = None
    """Labels of the samples or tokens, for blind scores; by default those of the batch."""
    score: ScoreFunction | None = None
    """From output and batch to a number, larger is better, for blind scores without labels."""
    ablate: Ablation | None = "zeros"
    """For blind scores, replace a modality by ``"zeros"``, or by that of another sample
    (``"shuffle"``); ``None`` measures none."""
    loss: OutputLoss | None = None
    """From the output of a model to the number to explain, for ``weighting="gradient"``; by default
    the largest logit."""
    gradients: Sequence[Tensor] | None = None
    """Gradients of given attentions, for ``weighting="gradient"``."""
    layers: Layers = "all"
    """Which layers of a model, as for :func:`~primal_attention.hosts.capture`."""
    primal: PrimalReading = "energy"
    """What ``flow`` shows of primal layers: the energy of their kernel, or the contribution of each
    modality to their scores."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("primal", get_args(PrimalReading)),
            ("ablate", (*get_args(Ablation), None)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}.")


def model_layout(
    model: nn.Module,
    batch: Batch | None,
    ids: Tensor | str | None,
    keep: Tensor | None,
    special: Tensor | Sequence[int] | None,
    weighting: FlowWeighting,
    details: FlowDetails,
) -> Layout:
    """Return the modalities of a model's tokens, and the layers in which they meet."""
    if batch is None:
        raise ValueError("A model needs a batch; call modality_flow(model, batch).")
    captured = partial(capture, model, batch, layers=details.layers)
    if isinstance(ids, Tensor):
        layout = _layout_from_ids(ids, captured())
    else:
        if special is None or isinstance(special, Tensor):
            token_ids: Sequence[int] = special_token_ids(getattr(model, "config", None))
        else:
            token_ids = special
        layout = _known_layout(model, batch, ids, captured, token_ids, weighting == "norm")
    if not layout.layers:
        raise ValueError(
            f"No attention layer of {type(model).__name__} has the {layout.ids.shape[1]} tokens of "
            "modality_ids as keys; give one id for each token."
        )
    if keep is not None:
        for layer in layout.layers:
            if layer.keep.shape == keep.shape:
                layer.keep = layer.keep & keep
            if layer.query_keep.shape == keep.shape:
                layer.query_keep = layer.query_keep & keep
    if isinstance(special, Tensor):
        layout = replace(layout, special=special.bool().expand(layout.ids.shape))
    if weighting == "gradient" and not layout.separate:
        _refuse_blocks(layout)
        layout = replace(layout, layers=relevance_layers(model, batch, layout.layers, details.loss))
    return layout


def _layout_from_ids(ids: Tensor, captured: Sequence[CapturedLayer]) -> Layout:
    ids = _checked_ids(ids, len(captured[0]))
    m = ids.shape[1]
    fits = [
        layer for layer in captured if layer.keep.shape[1] == m and layer.query_keep.shape[1] <= m
    ]
    left = [layer.name for layer in captured if layer not in fits]
    notes = (f"Layers over other tokens are left out: {', '.join(left)}.",) if left else ()
    return Layout(_default_names(ids), ids, fits, notes=notes)


def _known_layout(
    model: nn.Module,
    batch: Batch,
    ids: str | None,
    captured: Callable[[], list[CapturedLayer]],
    special_ids: Sequence[int],
    has_norms: bool,
) -> Layout:
    """Return the layout of a known kind of model, or of segments; raise for any other."""
    named = batch if isinstance(batch, Mapping) else None
    if ids == "segments":
        found = None if named is None else segment_layout(named, captured())
        if found is None:
            raise ValueError(
                "modality_ids='segments' needs token_type_ids with two segments in the batch; "
                "tokenize pairs of texts, or give ids."
            )
        return found
    if named is not None:
        layout = find_layout(model, named, captured, special_ids, has_norms=has_norms)
        if layout is not None:
            return layout
    raise ValueError(
        f"{type(model).__name__} has one modality only on this batch, so nothing can flow "
        "between modalities; give modality_ids if its tokens are of several kinds, or "
        "'segments' for pairs of texts."
    )


def blind_layout(
    model: nn.Module,
    batch: Batch | None,
    layout: Layout,
    details: FlowDetails,
) -> list[BlindScore]:
    """Return the blind scores of a model, if there is something to score."""
    has_labels = isinstance(batch, Mapping) and batch.get("labels") is not None
    is_scored = has_labels or details.labels is not None or details.score is not None
    if batch is None or details.ablate is None or not is_scored:
        return []
    ids = layout.ids
    if layout.special is not None:
        ids = torch.where(layout.special, -1, ids)  # [CLS] and [SEP] stay
    return blind_scores(
        model,
        batch,
        ids,
        layout.names,
        how=details.ablate,
        inputs=layout.inputs,
        labels=details.labels,
        score=details.score,
        is_causal=any(layer.is_causal for layer in layout.layers),
    )


def _refuse_blocks(layout: Layout) -> None:
    if any(isinstance(layer, CoAttention) for layer in layout.layers):
        raise ValueError(
            "weighting='gradient' does not exist for blocks of self- and cross-attention; use "
            "'attention', 'norm' or 'energy'."
        )


def given_layout(
    source: Sequence[Tensor] | Tensor,
    ids: object,
    keep: Tensor | None,
    special: object,
    weighting: FlowWeighting,
    gradients: Sequence[Tensor] | None,
) -> Layout:
    """Return the layout of attentions that are given as tensors."""
    attentions = [source] if isinstance(source, Tensor) else list(source)
    if not attentions or not all(isinstance(a, Tensor) and a.ndim == 4 for a in attentions):
        raise ValueError(
            "attentions must be tensors of shape [batch, heads, queries, keys], one for each "
            "layer; a model that returns None uses fused attention: call modality_flow(model, "
            "batch)."
        )
    ids = _checked_ids(ids, len(attentions[0]))
    keep = ids >= 0 if keep is None else keep.bool() & (ids >= 0)
    if weighting == "norm":
        raise ValueError("weighting='norm' needs values; call modality_flow(model, batch).")
    if weighting == "gradient" and (gradients is None or len(gradients) != len(attentions)):
        raise ValueError(
            f"weighting='gradient' needs gradients=, one tensor for each of the {len(attentions)} "
            "attentions."
        )
    layers = []
    for i, weights in enumerate(attentions):
        n, m = weights.shape[-2:]
        if m != ids.shape[1] or n > m:
            raise ValueError(
                f"attentions[{i}] has {n} queries and {m} keys, but modality_ids has "
                f"{ids.shape[1]} tokens; give one id for each key."
            )
        given = partial(GivenLayer, keep=keep, query_keep=keep[:, m - n :], name=f"layer {i + 1}")
        layer = given(weights)
        # relevance has zeros of its own, so the order is read from the weights
        layer.is_causal = is_causal = layer.is_triangular()
        if gradients is not None and weighting == "gradient":
            layer = given((weights * gradients[i]).clamp_min(0), is_causal=is_causal)
        layers.append(layer)
    layout = Layout(_default_names(ids), ids, layers)
    if special is None:
        return layout
    if not isinstance(special, Tensor) or special.dtype != torch.bool:
        raise ValueError(
            "special_ids of given attentions must be a boolean mask [b n], True at special tokens; "
            "token ids serve for models only."
        )
    return replace(layout, special=special.expand(ids.shape))


def _checked_ids(ids: object, b: int) -> Int[Tensor, "b n"]:
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.ndim not in (1, 2):
        raise ValueError(
            f"modality_ids must be an integer tensor [b n] or [n], got {type(ids).__name__}; give "
            "0, 1, … for modalities and -1 for padding."
        )
    if ids.ndim == 2 and len(ids) not in (1, b):
        raise ValueError(f"modality_ids has {len(ids)} samples, but the batch has {b}.")
    if int(ids.max()) < 1:
        raise ValueError(
            "modality_ids has one modality only; flow between modalities needs at least 0 and 1."
        )
    return ids.long().expand(b, -1)


def _default_names(ids: Tensor) -> tuple[str, ...]:
    count = int(ids.max()) + 1
    return ("text", "image") if count == 2 else tuple(f"modality {i}" for i in range(count))
