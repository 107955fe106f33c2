"""Advice before surgery: which layers of a model could do with less, and with what.

Everything is measured on the user's own data. Per layer and head: how many directions the
attention matrices use, beside the same model with random weights (an untrained layer is
concentrated, too). Per layer and mechanism: how much of the layer's output the mechanism explains
on batches it was not fitted on, after the closed-form fit and, if asked for, a few training steps.
Per mechanism: time and memory of a layer at the length that matters.
"""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn

from primal_attention.analysis.attention_maps import (
    MapSpectrum,
    attention_maps,
    map_spectra,
    mass_at_rank,
    rank_for_mass,
)
from primal_attention.analysis.memory import PeakMemory
from primal_attention.analysis.report import Report
from primal_attention.attention import attention_entry, list_attentions
from primal_attention.output import markdown_table
from primal_attention.surgery.config import ConversionError, SurgeryConfig
from primal_attention.surgery.conversion import convert, inspect_targets
from primal_attention.surgery.distillation import DistillConfig, distill
from primal_attention.surgery.fitting import fit_recorded
from primal_attention.surgery.layers import converted_layers
from primal_attention.surgery.recording import (
    Batch,
    Recording,
    ask_layers,
    evaluating,
    recorded_r2,
)

__all__ = ["Advice", "Cost", "HeadAdvice", "LayerFit", "advise"]

_MASS = 0.9
"""Share of the singular values that the recommended rank holds."""


@dataclass(frozen=True)
class HeadAdvice:
    """The attention matrices of one head, means over sequences."""

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
    """How well a mechanism stands in for a layer, on data it was not fitted on."""

    layer: str
    attention: str
    r2_copied: float
    """Explained variance of the layer's output, weights copied and nothing fitted."""
    r2: float
    """The same after the closed-form or short fit."""


@dataclass(frozen=True)
class Cost:
    """One layer's forward at the length asked for, one sequence."""

    attention: str
    milliseconds: float
    """Processor time of one thread, median."""
    megabytes: float
    """Most that its tensors took at once."""


@dataclass(frozen=True)
class Advice:
    """What was measured, and what follows from it."""

    heads: list[HeadAdvice]
    fits: list[LayerFit]
    costs: list[Cost]
    """Of softmax, in the first row, and of each mechanism."""
    length: int
    rank: int
    """The ``s`` at which singular mass was measured."""
    threshold: float
    """R² from which on a layer is worth converting."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Mechanisms and layers that could not be tried, and why."""
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options each mechanism was built with."""

    def layers_for(self, attention: str) -> list[str]:
        """Return the layers that a mechanism explains well enough, in the order of the model."""
        return [
            fit.layer
            for fit in self.fits
            if fit.attention == attention and fit.r2 >= self.threshold
        ]

    @property
    def attention(self) -> str:
        """The mechanism that explains most layers well enough; the best on average among equals."""
        names = dict.fromkeys(fit.attention for fit in self.fits)
        return max(names, key=lambda n: (len(self.layers_for(n)), self._average(n)))

    def _average(self, attention: str) -> float:
        return mean(max(fit.r2, -1.0) for fit in self.fits if fit.attention == attention)

    @property
    def layers(self) -> list[str]:
        """Layers to convert to the recommended mechanism; none if no fit is good enough."""
        return self.layers_for(self.attention)

    @property
    def needed(self) -> dict[str, int]:
        """Directions per layer that hold nine tenths of the singular values of every head."""
        layers: dict[str, int] = {}
        for head in self.heads:
            layers[head.layer] = max(layers.get(head.layer, 0), head.needed)
        return layers

    def config(self) -> SurgeryConfig:
        """Return the recommended conversion; raise if there is nothing to recommend."""
        if not self.layers:
            best = max(self.fits, key=lambda fit: fit.r2)
            raise ConversionError(
                f"No mechanism explains {self.threshold:.0%} of any layer's output on this data; "
                f"closest is {best.attention!r} with R² {best.r2:.2f} in {best.layer!r}. Lower the "
                "threshold, convert by hand and distil, or leave the model as it is."
            )
        return SurgeryConfig(
            self.attention, self.options.get(self.attention, {}), layers=self.layers
        )

    def tables(self) -> list[tuple[str, str, list[str], list[list[Any]]]]:
        """Return the tables of the report: heading, explanation, header and rows."""
        s = self.rank
        rank = ["layer", "head", "rank", "random", "centred", "random",
                f"mass@{s}", "random", "centred", "random", "for 90 %"]  # fmt: skip
        rank_rows: list[list[Any]] = [
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
        ]
        names = list(dict.fromkeys(fit.attention for fit in self.fits))
        layers = list(dict.fromkeys(fit.layer for fit in self.fits))
        score = {(fit.layer, fit.attention): fit.r2 for fit in self.fits}
        fit_rows: list[list[Any]] = [
            [layer, *(f"{score[layer, name]:.2f}" for name in names)] for layer in layers
        ]
        plain = self.costs[0]
        cost_rows: list[list[Any]] = [
            [
                c.attention,
                f"{c.milliseconds:.1f}",
                f"{plain.milliseconds / max(c.milliseconds, 1e-9):.1f}×",
                f"{c.megabytes:.1f}",
                f"{plain.megabytes / max(c.megabytes, 1e-9):.1f}×",
            ]
            for c in self.costs
        ]
        return [
            (
                "How many directions attention uses",
                "Effective rank of the attention matrices and the share of their singular values "
                f"in the first {s}, as they are and centred, each beside the same model with "
                "random weights.",
                rank,
                rank_rows,
            ),
            (
                "How well a mechanism stands in",
                "Explained variance of a layer's output on held-out data, after the fit; 1 is a "
                "perfect copy, 0 no better than the mean output.",
                ["layer", *names],
                fit_rows,
            ),
            (
                f"What it saves at {self.length:,} tokens",
                "One layer, one sequence, one forward in one thread.",
                ["attention", "ms", "faster", "MB", "smaller"],
                cost_rows,
            ),
        ]

    def verdict(self) -> str:
        """Return the recommendation as a sentence."""
        if not self.layers:
            best = max(self.fits, key=lambda fit: fit.r2)
            return (
                f"Convert nothing: no mechanism explains {self.threshold:.0%} of a layer's output "
                f"(closest: {best.attention} with R² {best.r2:.2f} in {best.layer})."
            )
        cost = {c.attention: c for c in self.costs}
        plain, own = self.costs[0], cost[self.attention]
        ranks = [self.needed[layer] for layer in self.layers if layer in self.needed]
        directions = f", where {max(ranks)} directions hold 90 % of attention" if ranks else ""
        return (
            f"Convert {len(self.layers)} of {len({f.layer for f in self.fits})} layers to "
            f"{self.attention}: {', '.join(self.layers)}{directions}. At {self.length:,} tokens "
            f"such a layer takes {own.milliseconds:.1f} ms instead of {plain.milliseconds:.1f} and "
            f"{own.megabytes:.1f} MB instead of {plain.megabytes:.1f}."
        )

    def __str__(self) -> str:
        parts = [
            f"{heading}\n{text}\n\n{markdown_table(header, rows)}"
            for heading, text, header, rows in self.tables()
        ]
        left = [f"Not tried: {name}: {why}" for name, why in self.skipped.items()]
        return "\n\n".join([*parts, *left, self.verdict()])

    def report(self, path: Path | str) -> None:
        """Write the tables and the recommendation as a page."""
        page = Report("Advice before surgery").text(self.verdict())
        for heading, text, header, rows in self.tables():
            page.section(heading).text(text).table(header, rows)
        for name, why in self.skipped.items():
            page.text(f"Not tried: {name}: {why}")
        page.write(Path(path))


def advise(
    model: nn.Module,
    data: Sequence[Batch],
    *,
    attentions: Sequence[str] | Mapping[str, Mapping[str, Any]] | None = None,
    length: int | None = None,
    rank: int = 16,
    threshold: float = 0.9,
    steps: int = 0,
    control: nn.Module | None = None,
    report: Path | str | None = None,
) -> Advice:
    """Measure which layers of a model can be converted, into what, and what that saves.

    The model is not changed; copies of it are converted and thrown away.

    Args:
        model: A model of transformers, timm or torch.nn.
        data: At least two batches; mechanisms are fitted on the first half and judged on the rest.
        attentions: Mechanisms to try, by name, or names with their options; unless given, all that
            are linear and suit the model.
        length: Number of tokens for time and memory; the longest in the data unless given.
        rank: The ``s`` at which singular mass is measured.
        threshold: Explained variance from which on converting a layer is recommended.
        steps: Training steps after the closed-form fit, all layers at once.
        control: The model with random weights; made from the model unless given.
        report: Where to write the page.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
        >>> data = [torch.randn(4, 12, 16) for _ in range(4)]
        >>> advice = advise(layer, data, attentions=["linear", "skyformer"], length=64)
        >>> [(fit.layer, fit.attention) for fit in advice.fits]
        [('self_attn', 'linear'), ('self_attn', 'skyformer')]
    """
    if len(data) < 2:
        raise ValueError(f"advise needs at least two batches, got {len(data)}: fit on one, judge.")
    half = len(data) // 2
    targets = inspect_targets(model, SurgeryConfig("softmax"))
    names = [t.name for t in targets if not t.reason]
    skipped = {t.name: t.reason for t in targets if t.reason}
    if not names:
        why = "; ".join(f"{n}: {r}" for n, r in skipped.items()) or "it has no attention module"
        raise ConversionError(f"No layer of the model can be converted: {why}.")
    causal = any(t.is_causal for t in targets if not t.reason)
    wanted = _wanted(attentions, causal)
    with evaluating(model):
        recordings = [(batch, ask_layers(model, names, batch)) for batch in data]
    heads = _heads(model, control, names, data[half], rank)
    tokens = max(c.output.shape[-2] for _, calls in recordings for c in calls.values())
    length = tokens if length is None else length
    fits: list[LayerFit] = []
    costs: list[Cost] = []
    for attention, options in wanted.items():
        try:
            student = _converted(model, attention, options, names)
        except ConversionError as error:
            skipped[attention] = str(error).splitlines()[-2 if "\n" in str(error) else 0]
            continue
        if not costs:
            plain = _converted(model, "softmax", {}, names[:1])
            costs.append(_cost("softmax", plain, length, causal))
        fits += _fit(student, model, attention, recordings, half, steps)
        costs.append(_cost(attention, student, length, causal))
    if not fits:
        why = "; ".join(f"{n}: {r}" for n, r in skipped.items())
        raise ConversionError(f"None of the mechanisms suits the model: {why}.")
    advice = Advice(
        heads,
        fits,
        costs,
        length,
        rank,
        threshold,
        skipped,
        {n: dict(o) for n, o in wanted.items()},
    )
    if report is not None:
        advice.report(report)
    return advice


def _wanted(
    attentions: Sequence[str] | Mapping[str, Mapping[str, Any]] | None, causal: bool
) -> dict[str, Mapping[str, Any]]:
    if isinstance(attentions, Mapping):
        return dict(attentions)
    if attentions is not None:
        return {name: {} for name in ([attentions] if isinstance(attentions, str) else attentions)}
    if causal:
        names = set(list_attentions(causal=True, padding=True))
    else:
        names = set(list_attentions(padding=True, mixes_without_order=True))
    return {name: {} for name in sorted(names) if attention_entry(name).cost != "n²"}


def _converted(
    model: nn.Module, attention: str, options: Mapping[str, Any], names: Sequence[str]
) -> nn.Module:
    student = copy.deepcopy(model).eval()
    # random weights and features of a mechanism must not depend on what was tried before
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        convert(student, SurgeryConfig(attention, options, layers=list(names)))
    return student


def _fit(
    student: nn.Module,
    model: nn.Module,
    attention: str,
    recordings: list[Recording],
    half: int,
    steps: int,
) -> list[LayerFit]:
    """Return how well the converted layers do on the second half of the data."""
    before = recorded_r2(student, recordings[half:])
    fit_recorded(student, recordings[:half])
    if steps:
        config = DistillConfig(closed_form=False, layer_steps=steps, end_steps=0)
        distill(student, model, [b for b, _ in recordings[:half]], config, progress=False)
    after = recorded_r2(student, recordings[half:])
    return [LayerFit(name, attention, before[name], r2) for name, r2 in after.items()]


def _heads(
    model: nn.Module, control: nn.Module | None, names: Sequence[str], batch: Batch, rank: int
) -> list[HeadAdvice]:
    random = _untrained(model) if control is None else control
    trained, untrained = (_spectra(m, names, batch) for m in (model, random))
    rows = []
    for layer in names:
        mine, theirs = trained[layer], untrained[layer]
        columns = [
            measure(getattr(spectrum, side)).mean(0)
            for measure in (_effective, lambda sigma: mass_at_rank(sigma, rank))
            for side in ("plain", "centred")
            for spectrum in (mine, theirs)
        ]
        needed = rank_for_mass(mine.plain, _MASS).mean(0).ceil()
        for head in range(len(needed)):
            numbers = {name: float(c[head]) for name, c in zip(_MEASURES, columns, strict=True)}
            rows.append(HeadAdvice(layer, head, needed=int(needed[head]), **numbers))
    return rows


_MEASURES = (
    "rank",
    "rank_control",
    "rank_centred",
    "rank_centred_control",
    "mass",
    "mass_control",
    "mass_centred",
    "mass_centred_control",
)
"""Numbers of a head, in the order in which they are measured."""


def _effective(sigma: Tensor) -> Tensor:
    return MapSpectrum(sigma, sigma).ranks().expand(1, -1)


def _spectra(model: nn.Module, names: Sequence[str], batch: Batch) -> dict[str, MapSpectrum]:
    """Return the spectra of the attention matrices, through a softmax twin of the model."""
    twin = _converted(model, "softmax", {}, names)
    if isinstance(batch, Mapping):
        batch = {k: v for k, v in batch.items() if k != "labels"}
        if getattr(getattr(model, "config", None), "use_cache", False) is True:
            batch.setdefault("use_cache", False)
    maps = attention_maps(twin, batch)
    return {
        name: map_spectra({name: maps[f"{name}.attention.core"]})[name]
        for name in converted_layers(twin)
    }


def _untrained(model: nn.Module) -> nn.Module:
    """Return the model with weights drawn anew, as its classes draw them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(model, "config", None)
        if config is not None and hasattr(model, "init_weights"):
            return type(model)(copy.deepcopy(config)).eval()
        twin = copy.deepcopy(model)
        for module in twin.modules():
            for reset in ("reset_parameters", "_reset_parameters"):
                if callable(getattr(module, reset, None)):
                    getattr(module, reset)()
        return twin.eval()


@torch.no_grad()
def _cost(attention: str, model: nn.Module, length: int, is_causal: bool) -> Cost:
    layer: Any = next(iter(converted_layers(model).values())).attention
    weight = layer.q_proj.weight
    x = torch.randn(1, length, layer.dim, dtype=weight.dtype, device=weight.device)

    def run() -> Tensor:
        return layer(x, is_causal=is_causal)

    with PeakMemory() as memory:
        run()
    return Cost(attention, 1e3 * _seconds(run), memory.peak / 2**20)


def _seconds(run: Callable[[], Any], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    return median(times)
