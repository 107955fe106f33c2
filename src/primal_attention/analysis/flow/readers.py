"""From layers to sums of every sample: one layer at a time, rolled out, or through scores."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from primal_attention.analysis.flow.contribution import contribution_shares, split_scores
from primal_attention.analysis.flow.layers import LayerReader, SignedWeightsError
from primal_attention.analysis.flow.primal import block_energy, direction_shares
from primal_attention.analysis.flow.result import PrimalFlow
from primal_attention.analysis.flow.shares import (
    SampleFlow,
    expected_sums,
    summarize,
    visible_counts,
)
from primal_attention.attention import PrimalAttention, PrimalRelativeAttention
from primal_attention.hosts import CapturedLayer

__all__ = ["LayerReading", "PrimalReading", "read_layers", "read_primal", "rollout"]

PrimalReading = Literal["energy", "contribution"]


class LayerReading(NamedTuple):
    """Sums of one layer for every sample, and how they were read."""

    name: str
    samples: list[SampleFlow]
    reading: str
    primal: PrimalFlow | None = None


def read_layers(
    readers: Sequence[LayerReader], primal: PrimalReading
) -> tuple[list[LayerReading], list[str]]:
    """Return the sums of every layer that can be read, and notes about the others."""
    found, notes = [], []
    for reader in readers:
        layer = reader.layer
        if isinstance(layer.layer, PrimalAttention | PrimalRelativeAttention):
            found.append(read_primal(reader, primal))
        elif not layer.has_weights:
            kind = type(layer.layer).__name__
            notes.append(f"{layer.name} is left out: {kind} has neither weights nor scores.")
        else:
            found.append(_read_weights(reader, notes))
    return found, notes


def _read_weights(reader: LayerReader, notes: list[str]) -> LayerReading:
    name, weighting = reader.layer.name, reader.weighting
    try:
        samples = [reader.sample(i) for i in range(len(reader.layer))]
    except SignedWeightsError:
        if reader.layer.layer is None:
            raise
        # approximations of attention may have weights below zero
        notes.append(f"{name} has weights below zero and is read by their energy.")
        weighting = "energy"
        energy = LayerReader(
            reader.layer,
            reader.receivers,
            reader.senders,
            reader.count,
            weighting,
            reader.visibility,
        )
        samples = [energy.sample(i) for i in range(len(reader.layer))]
    return LayerReading(name, samples, weighting)


def rollout(readers: Sequence[LayerReader]) -> list[LayerReading]:
    """Return what has crossed up to every layer: ``Π_l ½ (A^l + I)`` times the indicators.

    Only the products with the indicators are formed, so a layer costs ``O(n² M)``.
    """
    for reader in readers:
        layer = reader.layer
        is_square = layer.query_keep.shape == layer.keep.shape
        if not (layer.has_weights and is_square and bool((layer.query_keep == layer.keep).all())):
            raise ValueError(
                f"mode='rollout' multiplies attention weights from all tokens to all tokens, which "
                f"{layer.name} does not have; use mode='layer'."
            )
    found = [LayerReading(reader.layer.name, [], reader.weighting) for reader in readers]
    for i in range(len(readers[0].layer)):
        carried = readers[0].sent_by(i)
        is_member = carried.sum(1, keepdim=True)
        for reader, reading in zip(readers, found, strict=True):
            sums, counts = reader.sums(i, carried)
            total = sums.sum(-1, keepdim=True)
            rows = torch.where(total > 0, sums / torch.where(total > 0, total, 1.0), carried)
            heads = (rows + carried) / 2 * is_member
            receivers = reader.received_by(i)
            received = torch.einsum("na,hnc->hac", receivers, heads)
            reading.samples.append(SampleFlow(received, expected_sums(receivers, counts)))
            carried = heads.mean(0)
    return found


class _PrimalSample(NamedTuple):
    energy: SampleFlow | None
    contribution_e: SampleFlow | None
    contribution_r: SampleFlow | None
    sigma: Float[Tensor, "h s"] | None
    alignment: Float[Tensor, "h s"] | None
    alignment_chance: float


def read_primal(reader: LayerReader, primal: PrimalReading) -> LayerReading:
    """Return the sums of a primal layer from its scores, and all that they tell."""
    samples = [_primal_sample(reader, i) for i in range(len(reader.layer))]
    first = samples[0]
    if primal == "energy" and first.energy is not None:
        main, reading = [one.energy for one in samples], "energy of scores"
    else:
        main, reading = [_both_sides(one) for one in samples], "contribution to scores"
    chosen = [one for one in main if one is not None]
    if first.sigma is None or first.alignment is None:
        sigma = alignment = share = None
    else:
        sigma = torch.stack([s.sigma for s in samples if s.sigma is not None]).mean(0)
        alignment = torch.stack([s.alignment for s in samples if s.alignment is not None]).mean(0)
        share = sum(map(_alignment_share, samples)) / len(samples)
    chance = None if sigma is None else sum(s.alignment_chance for s in samples) / len(samples)
    flows = [
        None
        if getattr(first, side) is None
        else summarize([getattr(s, side) for s in samples]).flow
        for side in ("energy", "contribution_e", "contribution_r")
    ]
    flow = PrimalFlow(
        flows[0], flows[1], flows[2], sigma, alignment, share, chance, _note(reader.layer)
    )
    return LayerReading(reader.layer.name, chosen, reading, flow)


def _alignment_share(sample: _PrimalSample) -> float:
    if sample.sigma is None or sample.alignment is None:
        return 0.0
    return float((sample.sigma * sample.alignment).sum() / sample.sigma.sum().clamp_min(1e-300))


def _both_sides(sample: _PrimalSample) -> SampleFlow | None:
    e, r = sample.contribution_e, sample.contribution_r
    if e is None or r is None:
        return None
    return SampleFlow((e.received + r.received) / 2, e.expected)


def _note(layer: CapturedLayer) -> str:
    if getattr(layer.layer, "weights", "") == "static" and not layer.is_causal:
        return "Static weights mix no tokens: contribution between modalities is 0 by definition."
    if isinstance(layer.layer, PrimalRelativeAttention):
        return "Weights depend on distance, so the layer is not one kernel and has no energy."
    if getattr(layer.layer, "weights", "") == "data" and layer.is_causal:
        return "The kernel of causal data weights changes with every token: there is no energy."
    return ""


def _primal_sample(reader: LayerReader, sequence: int) -> _PrimalSample:
    layer, own = reader.layer, reader.layer.layer
    receivers, senders = reader.received_by(sequence), reader.sent_by(sequence)
    counts = visible_counts(senders, len(receivers), is_causal=layer.is_causal)
    energy = sigma = alignment = None
    if isinstance(own, PrimalAttention) and not (own.weights == "data" and layer.is_causal):
        scores = layer.scores(sequence)
        blocks = block_energy(scores, receivers, senders, is_causal=layer.is_causal)
        # chance is a kernel that is constant on the visible pairs
        energy = SampleFlow(blocks, expected_sums(receivers, counts, power=0))
        directions = direction_shares(scores, receivers, senders)
        sigma, alignment = directions.sigma, directions.alignment
    parts = split_scores(own, layer.real_inputs(sequence), senders, receivers)  # type: ignore[arg-type]
    expected = expected_sums(receivers, counts)
    sides = [
        SampleFlow(torch.einsum("na,hnc->hac", receivers, contribution_shares(side)), expected)
        for side in parts
    ]
    share = [side.sum(0) / side.sum().clamp_min(1) for side in (receivers, senders)]
    chance = float(share[0].sum() * share[1].sum() - (share[0] * share[1]).sum())
    return _PrimalSample(energy, sides[0], sides[1], sigma, alignment, chance)
