"""Which layers of a model to convert, and into what: the measurements and the recommendation."""

from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import NamedTuple

from primal_attention.analysis.registry import AnalysisResult
from primal_attention.hosts import ConversionError
from primal_attention.report.page import Report, to_png
from primal_attention.report.plots import panel_layout
from primal_attention.support.output import markdown_table, to_json
from primal_attention.surgery.config import SurgeryConfig

__all__ = ["Advice", "AdviceTable", "HeadStatistics", "LayerCost", "LayerFit"]


@dataclass(frozen=True)
class HeadStatistics:
    """Spectrum of the attention matrices of one head; means over sequences."""

    layer: str
    head: int
    rank: float
    """Effective rank."""
    rank_control: float
    """The same with random weights."""
    rank_centred: float
    """Effective rank without the means over queries and keys."""
    rank_centred_control: float
    mass: float
    """Share of the singular values in the first ``s``."""
    mass_control: float
    mass_centred: float
    mass_centred_control: float
    needed: int
    """Directions that hold nine tenths of the singular values."""


@dataclass(frozen=True)
class LayerFit:
    """How well a mechanism replaces a layer, on batches it was not fitted on."""

    layer: str
    attention: str
    r2_copied: float
    """Explained variance of the layer's output with copied weights, before any fit."""
    r2: float
    """The same after the closed-form fit and the training steps, if any."""


@dataclass(frozen=True)
class LayerCost:
    """Forward pass of one layer on one sequence."""

    attention: str
    milliseconds: float
    """Median time in one thread."""
    megabytes: float
    """Peak memory of its tensors."""


class AdviceTable(NamedTuple):
    """One table of the report."""

    heading: str
    text: str
    header: list[str]
    rows: list[list[object]]


@dataclass(frozen=True)
class Advice(AnalysisResult):
    """Measurements of :func:`~primal_attention.surgery.advise`, and the recommendation.

    A mechanism may replace a layer if it explains at least ``threshold`` of the layer's output.
    Among such mechanisms the recommended one saves most time at ``length`` tokens.
    """

    heads: list[HeadStatistics]
    fits: list[LayerFit]
    costs: list[LayerCost]
    """Softmax in the first row, then each mechanism."""
    length: int
    """Number of tokens for the costs."""
    data_length: int
    """Number of tokens of the longest input in the data."""
    rank: int
    """The ``s`` at which singular mass was measured."""
    threshold: float
    """Lowest R² at which a mechanism may replace a layer."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Mechanisms and layers that could not be tried, and why."""
    options: dict[str, dict[str, object]] = field(default_factory=dict)
    """Options of each mechanism."""

    def layers_for(self, attention: str) -> list[str]:
        """Return the layers that a mechanism may replace, in the order of the model."""
        return [
            fit.layer
            for fit in self.fits
            if fit.attention == attention and fit.r2 >= self.threshold
        ]

    def saved_time(self, attention: str) -> float:
        """Return the share of all attention time that is saved if a mechanism replaces what it may.

        Zero if it may replace nothing, negative if it is slower than softmax.
        """
        cost, softmax = self._cost(attention), self.costs[0]
        share = len(self.layers_for(attention)) / len(self._tried("layer"))
        return share * (1 - cost.milliseconds / max(softmax.milliseconds, 1e-9))

    @property
    def attention(self) -> str | None:
        """The recommended mechanism; ``None`` if no mechanism is both good enough and faster."""
        useful = [n for n in self._good_enough() if self.saved_time(n) > 0]
        if not useful:
            return None
        # times within a percent are equal: the smaller memory decides, then the better fit
        return max(
            useful,
            key=lambda n: (
                round(self.saved_time(n), 2),
                -round(self._cost(n).megabytes, 1),
                self._mean_r2(n),
            ),
        )

    @property
    def layers(self) -> list[str]:
        """Layers to convert to the recommended mechanism; empty if there is none."""
        return [] if self.attention is None else self.layers_for(self.attention)

    @property
    def needed(self) -> dict[str, int]:
        """Directions per layer that hold nine tenths of the singular values of every head."""
        layers: dict[str, int] = {}
        for head in self.heads:
            layers[head.layer] = max(layers.get(head.layer, 0), head.needed)
        return layers

    def config(self) -> SurgeryConfig:
        """Return the recommended conversion; raise if nothing is recommended."""
        if self.attention is None:
            raise ConversionError(
                f"{self.verdict()} Lower the threshold, ask for a longer length, or choose a "
                "mechanism yourself and distil."
            )
        return SurgeryConfig(
            self.attention, self.options.get(self.attention, {}), layers=self.layers
        )

    def verdict(self) -> str:
        """Return the recommendation in words."""
        good = self._good_enough()
        if not good:
            best = max(self.fits, key=lambda fit: fit.r2)
            return (
                f"Convert nothing: no mechanism explains {self.threshold:.0%} of a layer's output "
                f"(best: {best.attention} with R² {best.r2:.2f} in {best.layer})."
            )
        softmax = self.costs[0]
        if self.attention is None:
            best_cost = min((self._cost(n) for n in good), key=lambda c: c.milliseconds)
            return (
                f"Convert nothing: at {self.length:,} tokens softmax takes "
                f"{softmax.milliseconds:.1f} ms a layer, and no mechanism that explains "
                f"{self.threshold:.0%} of a layer is faster (best: {best_cost.attention} with "
                f"{best_cost.milliseconds:.1f} ms)."
            )
        cost, layers = self._cost(self.attention), self._tried("layer")
        others = (
            f"{len(good)} mechanisms explain {self.threshold:.0%} of a layer's output or more, and "
            "this one saves most time"
            if len(good) > 1
            else f"Only this mechanism explains {self.threshold:.0%} of a layer's output"
        )
        return (
            f"Convert {len(self.layers)} of {len(layers)} layers to {self.attention}: "
            f"{', '.join(self.layers)}. {others}: at {self.length:,} tokens a layer takes "
            f"{cost.milliseconds:.1f} ms instead of {softmax.milliseconds:.1f} and "
            f"{cost.megabytes:.1f} MB instead of {softmax.megabytes:.1f}.{self._caution()}"
        )

    def _caution(self) -> str:
        if self.data_length >= self.length:
            return ""
        return (
            f" R² was measured on inputs of at most {self.data_length:,} tokens: it can be lower "
            "on longer ones."
        )

    def tables(self) -> list[AdviceTable]:
        """Return the tables of the report."""
        return [self._fit_table(), self._cost_table(), self._head_table()]

    def _fit_table(self) -> AdviceTable:
        names = self._tried("attention")
        score = {(fit.layer, fit.attention): fit.r2 for fit in self.fits}
        return AdviceTable(
            "Fit of each layer",
            "Explained variance (R²) of the layer's output on batches that were not fitted: 1 is a "
            "perfect copy, 0 is no better than the mean output.",
            ["layer", *names],
            [
                [layer, *(f"{score[layer, name]:.2f}" for name in names)]
                for layer in self._tried("layer")
            ],
        )

    def _cost_table(self) -> AdviceTable:
        softmax = self.costs[0]
        return AdviceTable(
            f"Cost at {self.length:,} tokens",
            "Forward pass of one layer on one sequence, in one thread. Saved: the share of all "
            "attention time, if the mechanism replaces each layer that it may.",
            ["attention", "ms", "faster", "MB", "smaller", "layers", "saved"],
            [
                [
                    c.attention,
                    f"{c.milliseconds:.1f}",
                    f"{softmax.milliseconds / max(c.milliseconds, 1e-9):.1f}×",
                    f"{c.megabytes:.1f}",
                    f"{softmax.megabytes / max(c.megabytes, 1e-9):.1f}×",
                    "" if c is softmax else len(self.layers_for(c.attention)),
                    "" if c is softmax else f"{self.saved_time(c.attention):.0%}",
                ]
                for c in self.costs
            ],
        )

    def _head_table(self) -> AdviceTable:
        s = self.rank
        return AdviceTable(
            "Spectrum of each head",
            "Effective rank of the attention matrices and the share of their singular values in "
            f"the first {s}, each beside the same model with random weights. Centred: without the "
            "means over queries and keys.",
            ["layer", "head", "rank", "random", "centred", "random", f"mass@{s}", "random",
             "centred", "random", "for 90 %"],
            [
                [
                    h.layer,
                    h.head,
                    *(f"{x:.1f}" for x in (h.rank, h.rank_control)),
                    *(f"{x:.1f}" for x in (h.rank_centred, h.rank_centred_control)),
                    *(f"{x:.2f}" for x in (h.mass, h.mass_control)),
                    *(f"{x:.2f}" for x in (h.mass_centred, h.mass_centred_control)),
                    h.needed,
                ]
                for h in self.heads
            ],
        )  # fmt: skip

    def __str__(self) -> str:
        parts = [
            f"{heading}\n{text}\n\n{markdown_table(header, rows)}"
            for heading, text, header, rows in self.tables()
        ]
        skipped = [f"Not tried: {name}: {why}" for name, why in self.skipped.items()]
        return "\n\n".join([self.verdict(), *parts, *skipped])

    def table(self) -> tuple[list[str], list[list[object]]]:
        """Return header and rows of the table of fits."""
        found = self._fit_table()
        return found.header, found.rows

    def to_json(self) -> str:
        """Return the verdict, the recommendation and all numbers as JSON."""
        found = {"verdict": self.verdict(), "attention": self.attention, "layers": self.layers}
        return to_json({**found, **asdict(self)})

    def plot(self) -> bytes:
        """Return a picture as PNG: R² of each mechanism in each layer, and time of a layer."""
        from matplotlib import pyplot as plt

        names, layers = self._tried("attention"), self._tried("layer")
        score = {(fit.layer, fit.attention): fit.r2 for fit in self.fits}
        grid = [[score[layer, name] for layer in layers] for name in names]
        figure, (left, right) = plt.subplots(
            1,
            2,
            figsize=(11, 2 + 0.34 * len(names)),
            layout=panel_layout(),
            width_ratios=(max(len(layers), 4), 5),
        )
        image = left.imshow(grid, vmin=0, vmax=1, cmap="YlGn", aspect="auto")
        for row, values in enumerate(grid):
            for column, value in enumerate(values):
                color = "white" if value > 0.6 else "black"
                bold = "bold" if value >= self.threshold else "normal"
                left.text(
                    column, row, f"{value:.2f}", ha="center", va="center", color=color,
                    fontsize=8, fontweight=bold,
                )  # fmt: skip
        left.set_yticks(range(len(names)), names)
        left.set_xticks(range(len(layers)), [str(i + 1) for i in range(len(layers))])
        left.set(xlabel="layer", title=f"R² of a layer's output (bold: at least {self.threshold})")
        figure.colorbar(image, ax=left, pad=0.02)
        colors = ["#c2410c", *["#1d4ed8"] * len(names)]
        times = [cost.milliseconds for cost in self.costs]
        right.barh([cost.attention for cost in self.costs], times, color=colors, height=0.6)
        right.invert_yaxis()
        right.set(xlabel="milliseconds", title=f"time of one layer at {self.length:,} tokens")
        right.grid(axis="x", alpha=0.25)
        return to_png(figure)

    def limits(self) -> str:
        """Return what the numbers do not show."""
        return (
            "R² of single layers does not show how errors of several converted layers add up, nor "
            "what distillation recovers."
        )

    def report(self) -> Report:
        """Return a page with the verdict, the picture and the tables."""
        page = Report("Advice before conversion", self.verdict())
        self.add_to(page)
        return page

    def add_to(self, page: Report) -> None:
        """Add the picture and the tables to a page."""
        page.section("Mechanisms").figure(
            self.plot(), "How well each mechanism replaces each layer, and the time of one layer."
        )
        for heading, text, header, rows in self.tables():
            page.section(heading).text(text).table(header, rows)
        for name, why in self.skipped.items():
            page.text(f"Not tried: {name}: {why}")

    def _cost(self, attention: str) -> LayerCost:
        return next(c for c in self.costs[1:] if c.attention == attention)

    def _tried(self, kind: str) -> list[str]:
        return list(dict.fromkeys(getattr(fit, kind) for fit in self.fits))

    def _good_enough(self) -> list[str]:
        return [name for name in self._tried("attention") if self.layers_for(name)]

    def _mean_r2(self, attention: str) -> float:
        return mean(max(fit.r2, -1.0) for fit in self.fits if fit.attention == attention)
