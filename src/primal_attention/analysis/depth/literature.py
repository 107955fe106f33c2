"""What later work found about depth and width, beside the rule.

These are one-sentence summaries of published findings. None of them was derived again here, and
they do not agree with each other. This is why the planner returns a range.
"""

from typing import Literal, NamedTuple

__all__ = ["FINDINGS", "Finding"]


class Finding(NamedTuple):
    """A published result about the shape of Transformers."""

    work: str
    """Authors and year."""
    says: str
    """What they report, in one sentence."""
    pull: Literal["deeper", "wider", "none"]
    """Towards which end of the range it points."""


FINDINGS = (
    Finding(
        "Kaplan et al. 2020",
        "at equal size the loss hardly depends on the shape, over a wide range of shapes",
        "none",
    ),
    Finding(
        "Tay et al. 2022",
        "deep and narrow models do better after fine-tuning than their loss in pretraining says",
        "deeper",
    ),
    Finding(
        "Liu et al. 2024, MobileLLM",
        "below a billion parameters deep and thin models do better at equal size",
        "deeper",
    ),
    Finding(
        "Petty et al. 2024",
        "deeper models generalize better to new compositions, with quickly falling returns",
        "deeper",
    ),
    Finding(
        "McLeish et al. 2025, Gemstones",
        "shape laws depend strongly on how they are fitted; depth helps benchmarks at equal FLOPs, "
        "width helps at equal time",
        "none",
    ),
    Finding(
        "Fahim and Karim 2026",
        "with more compute C the best depth grows as C^0.12 and the best width as C^0.34",
        "wider",
    ),
)
"""As reported by the authors; not derived again here."""
