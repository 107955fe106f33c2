"""From layers to sums of every sample: one layer at a time, rolled out, or through scores."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from primal_attention.analysis.flow.contribution import contribution_shares, split_scores
from primal_attention.analysis.flow.layers import LayerReader, SignedWeightsError
from primal_attention.analysis.flow.primal import DirectionShares, block_energy, direction_shares
from primal_attention.analysis.flow.result import PrimalFlow
from primal_attention.analysis.flow.shares import (
    SampleFlow,
    average_shares,
    expected_sums,
    visible_counts,
)
from primal_attention.analysis.flow.sources import PrimalReading
from primal_attention.attention import PrimalAttention, PrimalRelativeAttention
from primal_attention.hosts import CapturedLayer

__all__ = ["LayerReading", "read_layers", "rollout"]


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
            found.append(_read_primal(reader, primal))
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
        energy = replace(reader, weighting=weighting)
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
    sides: list[SampleFlow]
    """Contributions to the scores of the query side and of the key side."""
    chance: float
    """Alignment of directions that lie on all tokens equally."""
    kernel: tuple[SampleFlow, DirectionShares] | None
    """Energy and directions of the kernel; ``None`` where the layer is not one kernel."""


def _read_primal(reader: LayerReader, primal: PrimalReading) -> LayerReading:
    """Return the sums of a primal layer from its scores, and all that they tell."""
    samples = [_primal_sample(reader, i) for i in range(len(reader.layer))]
    by_side = list(zip(*(sample.sides for sample in samples), strict=True))
    kernels = [sample.kernel for sample in samples if sample.kernel is not None]
    side_e, side_r = (average_shares(side).flow for side in by_side)
    flow = PrimalFlow(None, side_e, side_r, None, None, None, None, _note(reader.layer))
    if kernels:
        energies, directions = zip(*kernels, strict=True)
        flow = flow._replace(
            energy=average_shares(energies).flow,
            sigma=torch.stack([found.sigma for found in directions]).mean(0),
            alignment=torch.stack([found.alignment for found in directions]).mean(0),
            alignment_share=sum(map(_alignment_share, directions)) / len(samples),
            alignment_chance=sum(sample.chance for sample in samples) / len(samples),
        )
        if primal == "energy":
            return LayerReading(reader.layer.name, list(energies), "energy of scores", flow)
    both = [
        SampleFlow((e.received + r.received) / 2, e.expected) for e, r in zip(*by_side, strict=True)
    ]
    return LayerReading(reader.layer.name, both, "contribution to scores", flow)


def _alignment_share(found: DirectionShares) -> float:
    return float((found.sigma * found.alignment).sum() / found.sigma.sum().clamp_min(1e-300))


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
    kernel = None
    if isinstance(own, PrimalAttention) and not (own.weights == "data" and layer.is_causal):
        scores = layer.scores(sequence)
        blocks = block_energy(scores, receivers, senders, is_causal=layer.is_causal)
        # chance is a kernel that is constant on the visible pairs
        energy = SampleFlow(blocks, expected_sums(receivers, counts, power=0))
        kernel = energy, direction_shares(scores, receivers, senders)
    parts = split_scores(own, layer.real_inputs(sequence), senders, receivers)  # type: ignore[arg-type]
    expected = expected_sums(receivers, counts)
    sides = [
        SampleFlow(torch.einsum("na,hnc->hac", receivers, contribution_shares(side)), expected)
        for side in parts
    ]
    share = [side.sum(0) / side.sum().clamp_min(1) for side in (receivers, senders)]
    chance = float(share[0].sum() * share[1].sum() - (share[0] * share[1]).sum())
    return _PrimalSample(sides, chance, kernel)
