"""What :func:`modality_flow` returns: numbers, words, pictures and a page."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from primal_attention.analysis.flow.ablation import BlindScore
from primal_attention.analysis.registry import AnalysisResult, ShownTable
from primal_attention.report.page import Report, to_png
from primal_attention.support.output import to_json

__all__ = ["FlowResult", "PrimalFlow"]

SPECIAL = "special"
"""Name of the modality of [CLS], [SEP] and the like."""


class PrimalFlow(NamedTuple):
    """What the scores of a primal layer tell, mean over samples."""

    energy: Float[Tensor, "M M"] | None
    """Shares of the energy of the kernel; ``None`` where the layer is not one kernel."""
    contribution_e: Float[Tensor, "M M"] | None
    """Shares of the parts of query-side scores."""
    contribution_r: Float[Tensor, "M M"] | None
    """Shares of the parts of key-side scores."""
    sigma: Float[Tensor, "h s"] | None
    """Singular values of the kernel."""
    alignment: Float[Tensor, "h s"] | None
    """How much of each singular direction leads from one modality to another."""
    alignment_share: float | None
    """Mean of ``alignment``, weighted by the singular values: the spectrum spent on alignment."""
    alignment_chance: float | None
    """The same for directions that lie on all tokens equally."""
    note: str = ""
    """Why something is missing or zero."""


@dataclass(frozen=True, eq=False)
class FlowResult(AnalysisResult):
    """Shares of attention between modalities, for every layer; receivers are rows."""

    layers: tuple[str, ...]
    """Names of the layers."""
    names: tuple[str, ...]
    """Names of the modalities."""
    flow: Float[Tensor, "layers M M"]
    """Share of what the row's tokens receive that comes from the column; rows sum to one."""
    chance: Float[Tensor, "layers M M"]
    """The same for attention that is uniform over what each token can see."""
    lift: Float[Tensor, "layers M M"]
    """Mean over samples of flow over chance; 1 is indifferent. Zero where ``has_lift`` is not."""
    has_lift: Bool[Tensor, "layers M M"]
    """Whether some token of the row can see a token of the column."""
    imf: Float[Tensor, " layers"]
    """Inter-modality flow: share of all attention that crosses between modalities."""
    imf_chance: Float[Tensor, " layers"]
    """The same for uniform attention."""
    imf_lift: Float[Tensor, " layers"]
    """Mean over samples of IMF over its chance level."""
    by_head: Float[Tensor, "layers h M M"]
    """Shares of every head; zero beyond the heads of a layer."""
    num_heads: tuple[int, ...]
    """Heads of each layer."""
    readings: tuple[str, ...]
    """What each layer was read by: a weighting, ``"energy"`` or ``"contribution"`` of scores."""
    mode: str
    """``"layer"``, or ``"rollout"`` for what has crossed up to a layer."""
    samples: int
    """Number of samples."""
    primal: tuple[PrimalFlow | None, ...] = ()
    """What the scores of primal layers tell; ``None`` for other layers."""
    blind: tuple[BlindScore, ...] = ()
    """Scores with and without each modality."""
    notes: tuple[str, ...] = ()
    """What the reader must know about these numbers."""
    separate: str = ""
    """Why nothing can flow between modalities; empty if it can."""

    @property
    def intra(self) -> Float[Tensor, " layers"]:
        """Share of all attention that stays inside its modality: 1 minus IMF."""
        return 1 - self.imf

    @property
    def head_lift(self) -> Float[Tensor, "layers h M M"]:
        """Lift of every head, from mean shares; zero where ``has_lift`` is not."""
        chance = torch.where(self.has_lift, self.chance, 1.0)[:, None]
        return torch.where(self.has_lift[:, None], self.by_head / chance, 0.0)

    def direction(self, receiver: str, sender: str) -> Float[Tensor, " layers"]:
        """Return the share that one modality receives from another, for every layer.

        Args:
            receiver: Name of the modality that attends.
            sender: Name of the modality that is attended to.
        """
        for name in (receiver, sender):
            if name not in self.names:
                raise ValueError(
                    f"There is no modality {name!r}; the result has {', '.join(self.names)}."
                )
        return self.flow[:, self.names.index(receiver), self.names.index(sender)]

    def directions(self) -> list[tuple[int, int]]:
        """Return the pairs (receiver, sender) of different modalities, special tokens left out."""
        real = [i for i, name in enumerate(self.names) if name != SPECIAL]
        return [(a, c) for a in real for c in real if a != c]

    def _mean_lift(self, pair: tuple[int, int]) -> float | None:
        """Return the lift of a direction, mean over the layers that have it."""
        has = self.has_lift[:, *pair]
        return float(self.lift[:, *pair][has].mean()) if bool(has.any()) else None

    def verdict(self) -> str:
        """Return how much each modality receives from the others, compared with chance."""
        if self.separate:
            return f"Inter-modality flow is 0 by construction. {self.separate}"
        found = []
        for pair in self.directions():
            receiver, sender = (self.names[i] for i in pair)
            mean = self._mean_lift(pair)
            if mean is None:
                found.append(f"{receiver} tokens cannot see {sender} tokens")
                continue
            lifts = torch.where(self.has_lift[:, *pair], self.lift[:, *pair], -1.0)
            top = int(lifts.argmax())
            most = f", most in {self.layers[top]} ({float(lifts[top]):.2f})"
            found.append(
                f"{receiver} tokens receive {mean:.2f} times the chance level from {sender}"
                + (most if len(self.layers) > 1 else "")
            )
        words = "; ".join(found)
        words = words[:1].upper() + words[1:] + "."
        words += (
            f" Inter-modality flow is {float(self.imf.mean()):.2f}, and "
            f"{float(self.imf_chance.mean()):.2f} would be chance."
        )
        for score in self.blind:
            words += (
                f" Without {score.modality} ({score.how}) the {score.measure} goes from "
                f"{score.full:.3g} to {score.blind:.3g}."
            )
        return words

    def table(self) -> ShownTable:
        """Return for each layer the share and lift of every direction, and IMF."""
        pairs = self.directions()
        header = [f"{self.names[a]} ← {self.names[c]}" for a, c in pairs]
        rows = []
        for i, name in enumerate(self.layers):
            cells = [
                f"{float(self.flow[i, a, c]):.3f} (×{float(self.lift[i, a, c]):.2f})"
                if self.has_lift[i, a, c]
                else "–"
                for a, c in pairs
            ]
            imf = [self.imf[i], self.imf_chance[i]]
            rows.append([name, self.readings[i], *cells, *(f"{float(x):.3f}" for x in imf)])
        return ["layer", "read by", *header, "IMF", "chance of IMF"], rows

    def plot(self) -> bytes:
        """Return the lift of every layer and direction as PNG, and that of every head."""
        from primal_attention.analysis.flow.plots import plot_flow

        return to_png(plot_flow(self))

    def to_json(self) -> str:
        """Return all numbers as JSON."""
        tensors = {
            name: getattr(self, name).tolist()
            for name in ("flow", "chance", "lift", "has_lift", "imf", "imf_chance", "imf_lift")
        }
        heads = [
            layer[:count].tolist()
            for layer, count in zip(self.by_head, self.num_heads, strict=True)
        ]
        return to_json(
            {
                "verdict": self.verdict(),
                "modalities": list(self.names),
                "layers": list(self.layers),
                "readings": list(self.readings),
                "mode": self.mode,
                "samples": self.samples,
                **tensors,
                "by_head": heads,
                "primal": [None if one is None else _plain(one) for one in self.primal],
                "blind": [{**one._asdict(), "harm": one.harm} for one in self.blind],
                "notes": list(self.notes),
            }
        )

    def limits(self) -> str:
        """Return what the numbers do not show."""
        words = "Attention is not use: a model can look at a modality and ignore it"
        if self.blind:
            return f"{words}; the blind scores tell what this batch loses without it, no more."
        return f"{words}, and no blind score was measured here."

    def report(self) -> Report:
        """Return a page with the verdict, the pictures, the table and the blind scores."""
        from primal_attention.analysis.flow.plots import plot_directions

        page = Report(
            "Flow between modalities",
            "Share of what the tokens of one modality receive from another, and its lift over "
            f"attention that is uniform over the visible tokens. {self.samples} samples, mode "
            f"{self.mode}.",
        )
        page.verdict(self.verdict())
        page.figure(
            self.plot(),
            "Lift over chance by layer and direction, with the share below it; 1 is indifferent. "
            "Beside it, one dot for each head.",
        )
        page.section("Layers").table(*self.table())
        if self.blind:
            page.section("Blind scores")
            page.table(
                ["without", "replaced by", "measure", "with all", "without", "harm"],
                [
                    [
                        one.modality,
                        one.how,
                        one.measure,
                        *(f"{x:.4g}" for x in (one.full, one.blind, one.harm)),
                    ]
                    for one in self.blind
                ],
            )
        if any(one is not None for one in self.primal):
            page.section("Primal layers").table(*self.primal_table())
            if any(one is not None and one.sigma is not None for one in self.primal):
                page.figure(
                    to_png(plot_directions(self)),
                    "Singular directions of the kernel of each primal layer: how much of each "
                    "leads from one modality to another, against its share of the spectrum.",
                )
        for note in self.notes:
            page.text(note)
        return page

    def primal_table(self) -> ShownTable:
        """Return for each primal layer how much crosses, by energy, contribution and spectrum."""
        rows = []
        for name, one in zip(self.layers, self.primal, strict=True):
            if one is None:
                continue
            shares = [
                [_share(matrix, a, c) for a, c in self.directions()]
                for matrix in (one.energy, one.contribution_e, one.contribution_r)
            ]
            spectrum = [_number(one.alignment_share), _number(one.alignment_chance)]
            rows.append([name, *(cell for group in shares for cell in group), *spectrum])
        pairs = [f"{self.names[a]} ← {self.names[c]}" for a, c in self.directions()]
        kinds = ("energy", "contribution to e", "contribution to r")
        header = [f"{kind}, {pair}" for kind in kinds for pair in pairs]
        return ["layer", *header, "spectrum on alignment", "its chance"], rows


def _share(matrix: Tensor | None, a: int, c: int) -> str:
    return "–" if matrix is None else f"{float(matrix[a, c]):.3f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _plain(one: PrimalFlow) -> dict[str, object]:
    return {
        name: value.tolist() if isinstance(value, Tensor) else value
        for name, value in one._asdict().items()
    }
