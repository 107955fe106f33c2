"""What a conversion kept and what it costs, in words, numbers and pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from primal_attention.report.page import Report, to_png
from primal_attention.report.plots import panel_layout
from primal_attention.surgery.fidelity import Fidelity
from primal_attention.training.cost import Cost

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["ConvertedModel", "CurvePoint", "ExtensionLoss"]


class CurvePoint(NamedTuple):
    """The model with the first layers of an order converted."""

    layers: int
    """Number of converted layers."""
    r2: float
    """R² of the model's output."""
    saved: float
    """Estimated share of the model's time that is saved; below zero if it is slower."""


@dataclass(frozen=True)
class ExtensionLoss:
    """What longer positions cost on inputs that the model took before."""

    verdict: str
    """What was done to the positions."""
    method: str
    before: int
    after: int
    short: Fidelity
    """The extended model beside the original, at ``before`` tokens."""
    short_tokens: int
    long_perplexity: float | None = None
    """Of the extended model, at the length of the measurement; for causal language models."""

    def words(self) -> str:
        """Return in words what was done and what it lost."""
        found = (
            f"{self.verdict} This alone changes the model: on inputs of {self.short_tokens:,} "
            f"tokens, beside the original, {self.short.words()}."
        )
        if self.long_perplexity is None:
            return found + " On longer inputs there is no original to compare with."
        return found


@dataclass(frozen=True)
class ConvertedModel:
    """Quality and cost of a converted model, measured on held-out inputs."""

    model: str
    """Class of the model."""
    attention: str
    options: Mapping[str, object]
    layers: dict[str, float]
    """R² of the converted layers."""
    all_layers: int
    fidelity: Fidelity
    length: int
    """Tokens at which the costs were measured."""
    data_length: int
    """Tokens of the longest input on which the quality was measured."""
    inputs: int
    """Number of inputs on which the quality was measured."""
    costs: dict[str, Cost]
    """Of the whole model at ``length`` tokens; of one layer if the model takes fewer."""
    whole: bool
    """Whether ``costs`` are of the whole model."""
    limit: int | None = None
    """Most tokens that the model takes; ``None`` if nothing limits it."""
    reach: int | None = None
    """Tokens up to which every converted layer is softmax; ``None`` if it never is."""
    curve: tuple[CurvePoint, ...] = ()
    """Loss and saving of more and more layers, those with the least loss a saving first."""
    threshold: float | None = None
    """Least R² of the output by which the layers were chosen; ``None`` if the user chose."""
    neglected: dict[str, list[float]] = field(default_factory=dict)
    """Share of the mass of each head that came from moments, in every ``adaptive`` layer."""
    linear_off: Fidelity | None = None
    """The converted model without its linear part; for ``window-linear``."""
    extension: ExtensionLoss | None = None

    @property
    def output_r2(self) -> float:
        """R² of the output of the whole model."""
        return self.fidelity.r2

    def verdict(self) -> str:
        """Return in words what is exact, what was lost, and what it costs."""
        return " ".join(self._sentences())

    def _sentences(self) -> list[str]:
        """Return the verdict in parts: what was converted, lost and saved, and the positions."""
        parts = [
            f"Converted {len(self.layers)} of {self.all_layers} layers of {self.model} to "
            f"{self.attention}. {self._exact()}".strip(),
            self._lost(),
            f"{self._cost()} {self._not_measured()}".strip(),
            "" if self.extension is None else self.extension.words(),
        ]
        return [part for part in parts if part]

    def _exact(self) -> str:
        if self.reach is None:
            return ""
        return (
            f"Up to {self.reach:,} tokens its output is that of the original; beyond, every token "
            "reads the nearest and best blocks exactly and the others by their moments."
        )

    def _lost(self) -> str:
        low, high = min(self.layers.values()), max(self.layers.values())
        r2 = f"{low:.3f}" if f"{low:.3f}" == f"{high:.3f}" else f"{low:.3f} to {high:.3f}"
        tokens = f"{self.data_length:,} tokens" if self.data_length else "their own size"
        found = (
            f"On {self.inputs} held-out inputs of {tokens}, {self.fidelity.words()}; R² of the "
            f"layers is {r2}."
        )
        if self.linear_off is not None:
            found += f" With the linear part off, {self.linear_off.words()}."
        return found

    def _cost(self) -> str:
        before, after = self.costs["original"], self.costs["converted"]
        return (
            f"At {self.length:,} tokens {'the model' if self.whole else 'a layer'} takes "
            f"{_amount(after.milliseconds)} ms instead of {_amount(before.milliseconds)} "
            f"({_change(before.milliseconds, after.milliseconds)}) and {after.megabytes:.1f} MB "
            f"instead of {before.megabytes:.1f} ({_change(before.megabytes, after.megabytes)})."
        )

    def _not_measured(self) -> str:
        if not self.data_length or self.data_length >= self.length:
            return ""
        if self.whole:
            return (
                f"The texts gave inputs of {self.data_length:,} tokens only, so the loss at "
                f"{self.length:,} was not measured; give more text with --data."
            )
        return (
            f"The model takes at most {self.limit or self.data_length:,} tokens, so the loss at "
            f"{self.length:,} could not be measured; --extend {self.length} lets it take them."
        )

    @property
    def numbers(self) -> dict[str, object]:
        """Everything measured, as plain values."""
        return {
            "model": self.model,
            "attention": self.attention,
            "options": dict(self.options),
            "length": self.length,
            "data_length": self.data_length,
            "inputs": self.inputs,
            "exact_up_to": self.reach,
            "layer_r2": self.layers,
            "output_r2": self.output_r2,
            "fidelity": asdict(self.fidelity),
            "linear_part_off": None if self.linear_off is None else asdict(self.linear_off),
            "costs_of": "model" if self.whole else "layer",
            "costs": {name: cost._asdict() for name, cost in self.costs.items()},
            "curve": [point._asdict() for point in self.curve],
            "neglected_mass": self.neglected,
            "extension": None if self.extension is None else asdict(self.extension),
        }

    def layer_table(self) -> tuple[list[str], list[list[str]]]:
        """Return header and rows of the converted layers."""
        header, rows = ["layer", "R²"], [[name, f"{r2:.3f}"] for name, r2 in self.layers.items()]
        if self.neglected:
            header += ["neglected mass", "largest of a head"]
            for row in rows:
                heads = self.neglected[row[0]]
                row += [f"{sum(heads) / len(heads):.3f}", f"{max(heads):.3f}"]
        return header, rows

    def report(self, source: str = "the inputs") -> Report:
        """Return the page: verdict, main numbers, curve, layers, neglected mass.

        Args:
            source: What was measured on, in words.
        """
        before, after = self.costs["original"], self.costs["converted"]
        page = Report(f"{self.model} with {self.attention} attention")
        first, *others = self._sentences()
        page.verdict(first)
        for words in others:
            page.text(words)
        tiles = {"R² of the model's output": f"{self.output_r2:.3f}"}
        if self.fidelity.perplexity is not None:
            was = f"perplexity, from {self.fidelity.original_perplexity:.2f}"
            tiles[was] = f"{self.fidelity.perplexity:.2f}"
        if self.fidelity.cosine is not None:
            tiles["cosine of mean vectors"] = f"{self.fidelity.cosine:.3f}"
        if self.reach is not None:
            tiles["tokens up to which it is exact"] = f"{self.reach:,}"
        where = f"at {self.length:,} tokens{'' if self.whole else ', one layer'}"
        tiles[f"ms {where}, from {_amount(before.milliseconds)}"] = _amount(after.milliseconds)
        tiles[f"MB {where}, from {before.megabytes:.1f}"] = f"{after.megabytes:.1f}"
        page.tiles(tiles)
        if len(self.curve) > 1:
            page.section("Loss and saving").figure(
                self.plot_curve(),
                "Loss of the model's output against the time saved, with more and more layers "
                "converted. Layers with the least loss for the time that they save come first. "
                "Savings are estimated from one layer of each kind. The ring marks what was taken.",
            )
        page.section("Converted layers").text(
            f"Explained variance (R²) of each layer's output, measured on {source}: 1 is a "
            "perfect copy, 0 is no better than the mean output."
        )
        page.table(*self.layer_table())
        if self.neglected:
            page.section("Neglected mass").text(
                "Share of the attention of each head that was not read key by key, but summed by "
                "the moments of blocks. 0 is exact. To bound it, convert with --option top=auto "
                "--option error=0.05."
            )
            page.figure(self.plot_neglected(), "Neglected mass of every head and layer.")
        if self.extension is not None:
            page.section("Longer positions").text(self.extension.words())
            page.table(*_extension_table(self.extension, self.fidelity, self.data_length))
        return page

    def plot_curve(self) -> bytes:
        """Return the curve of loss against time saved as PNG."""
        from matplotlib import pyplot as plt

        figure, axes = plt.subplots(figsize=(7.5, 4), layout=panel_layout())
        draw_curve(axes, self.curve, len(self.layers), self.threshold)
        return to_png(figure)

    def plot_neglected(self) -> bytes:
        """Return the neglected mass of every head and layer as PNG."""
        from matplotlib import pyplot as plt

        grid = list(self.neglected.values())
        figure, axes = plt.subplots(
            figsize=(2.2 + 0.42 * len(grid[0]), 1.2 + 0.26 * len(grid)), layout=panel_layout()
        )
        image = axes.imshow(grid, vmin=0, vmax=max(0.05, *map(max, grid)), cmap="OrRd",
                            aspect="auto")  # fmt: skip
        axes.set_yticks(range(len(grid)), [str(i + 1) for i in range(len(grid))], fontsize=8)
        axes.set_xticks(range(len(grid[0])), [str(i + 1) for i in range(len(grid[0]))])
        axes.set(xlabel="head", ylabel="converted layer")
        figure.colorbar(image, ax=axes, label="neglected mass", fraction=0.06, pad=0.03)
        return to_png(figure)


def draw_curve(
    axes: "Axes", curve: Sequence[CurvePoint], taken: int, threshold: float | None
) -> None:
    """Draw loss against time saved, and mark the point that was taken."""
    saved = [100 * point.saved for point in curve]
    loss = [1 - point.r2 for point in curve]
    axes.plot(saved, loss, "-o", color="#1d4ed8", markersize=4)
    for point, x, y in zip(curve, saved, loss, strict=True):
        label = f"{point.layers} layers" if point.layers != 1 else "1 layer"
        axes.annotate(label, (x, y), xytext=(6, -11), textcoords="offset points", fontsize=8,
                      color="#5b6472")  # fmt: skip
        if point.layers == taken:
            axes.plot(x, y, "o", markersize=13, markerfacecolor="none", markeredgewidth=2,
                      color="#c2410c")  # fmt: skip
            axes.annotate("taken", (x, y), xytext=(8, 8), textcoords="offset points",
                          color="#c2410c", fontweight="bold")  # fmt: skip
    if threshold is not None:
        axes.axhline(1 - threshold, color="#c2410c", linewidth=1, linestyle=":")
    axes.margins(0.12, 0.18)
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    axes.set(
        xlabel="time saved, % of the model (below 0: slower)", ylabel="loss of the output, 1 − R²"
    )
    axes.grid(alpha=0.25)


def _extension_table(
    extension: ExtensionLoss, converted: Fidelity, length: int
) -> tuple[list[str], list[list[str]]]:
    """Return rows for the original, the extended and the converted model."""
    short, tokens = extension.short, f"{extension.short_tokens:,}"
    if short.perplexity is not None:
        header = ["model", "tokens", "perplexity"]
        rows = [
            ["original", tokens, f"{short.original_perplexity:.2f}"],
            ["longer positions", tokens, f"{short.perplexity:.2f}"],
        ]
        if extension.long_perplexity is not None:
            rows.append(["longer positions", f"{length:,}", f"{extension.long_perplexity:.2f}"])
        rows.append(["longer positions, converted", f"{length:,}", f"{converted.perplexity:.2f}"])
        return header, rows
    header = ["model", "compared with", "tokens", "R²", "cosine"]
    lines = [
        ("longer positions", "original", tokens, short),
        ("longer positions, converted", "longer positions", f"{length:,}", converted),
    ]
    return header, [
        [name, other, n, f"{f.r2:.3f}", "" if f.cosine is None else f"{f.cosine:.3f}"]
        for name, other, n, f in lines
    ]


def _amount(milliseconds: float) -> str:
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.1f}"


def _change(before: float, after: float) -> str:
    share = after / max(before, 1e-9) - 1
    if not round(share, 2):
        return "the same"
    if share > 1:
        return f"{1 + share:.1f} × as much"
    return f"{abs(share):.0%} {'less' if share < 0 else 'more'}"
