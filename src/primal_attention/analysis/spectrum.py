"""Singular values of attention layers, and the analysis ``spectrum`` that reports them.

For a primal layer they are those of its induced kernel. They are computed from the factors, without
an ``n × n`` matrix. For a layer of queries, keys and values they are those of its attention matrix,
restricted to real tokens. Untrained layers already have a concentrated spectrum: compare a trained
model with an untrained one (``control``) before you draw conclusions.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.analysis.attention_maps import singular_values
from primal_attention.analysis.options import SpectrumOptions
from primal_attention.analysis.registry import AnalysisResult, ShownTable
from primal_attention.attention import Attention, Diagnostics, MultiHeadAttention, PrimalAttention
from primal_attention.functional import effective_rank
from primal_attention.hosts import Batch, batch_arguments, capture_call
from primal_attention.report.page import Report, to_png
from primal_attention.report.plots import add_legend, model_colors, panel_layout
from primal_attention.support.output import to_json
from primal_attention.support.randomness import isolated

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "LayerSpectrum",
    "SpectrumResult",
    "analyze_spectrum",
    "layer_spectra",
    "plot_spectra",
    "spectrum_summary",
    "untrained_twin",
]


class LayerSpectrum(NamedTuple):
    """Spectrum of one attention layer on a batch of sequences."""

    name: str
    """Name of the layer in the model, such as ``blocks.0.attention``."""
    singular_values: Float[Tensor, "b h k"]
    """Of the induced kernel or the attention matrix, largest first, zero beyond a sequence's
    length."""
    diagnostics: Diagnostics | None
    """Distance of a primal layer from a singular value decomposition; ``None`` for other layers."""

    @property
    def head_ranks(self) -> Float[Tensor, " h"]:
        """Effective rank of each head, mean over sequences."""
        return effective_rank(self.singular_values).mean(0)


_DIAGNOSTICS = {
    "squared KKT residual": "kkt",
    "balance": "balance",
    "off-diagonality": "off_diagonality",
}
"""Names in tables, and the fields of :class:`~primal_attention.attention.Diagnostics`."""


@torch.no_grad()
def layer_spectra(model: nn.Module, *args: Any, **kwargs: Any) -> list[LayerSpectrum]:
    """Return the spectrum of every attention layer, in the order of the forward pass.

    Works for models of every library that :func:`~primal_attention.hosts.capture`
    reads. Layers that are not one matrix (``primal-relative``, and causal ``primal`` with
    data-dependent weights) are left out. An attention matrix takes ``O(n²)`` memory and ``O(n³)``
    time: use a sample of long sequences.

    Args:
        model: A model with attention.
        args: Positional arguments of the model's forward.
        kwargs: Keyword arguments of the model's forward.

    Example:
        >>> from primal_attention.models import EncoderClassifier, EncoderConfig
        >>> model = EncoderClassifier(EncoderConfig(num_classes=2, num_features=3, dim=16))
        >>> [layer.name for layer in layer_spectra(model, torch.randn(4, 9, 3))]
        ['blocks.0.attention', 'blocks.1.attention']
    """
    spectra = []
    for name, found in capture_call(model, args, kwargs).items():
        layer, inputs = found.layer, found.inputs
        if layer is None or inputs is None:
            matrices = [found.weights(i).float() for i in range(len(found))]
            spectra.append(LayerSpectrum(name, singular_values(matrices), None))
        elif isinstance(layer, MultiHeadAttention):
            values = singular_values(inputs.matrices(layer))
            spectra.append(LayerSpectrum(name, values, None))
        elif isinstance(layer, PrimalAttention):
            x, context, key_mask, is_causal = inputs[:4]
            if is_causal and layer.weights == "data":
                continue
            diagnosis = layer.diagnose(x, context, key_mask=key_mask, is_causal=is_causal)
            spectra.append(LayerSpectrum(name, diagnosis.singular_values, diagnosis))
    return spectra


def untrained_twin(model: nn.Module) -> nn.Module:
    """Return a copy of a model with newly initialised weights, in evaluation mode.

    Example:
        >>> layer = nn.Linear(3, 3)
        >>> layer.weight = nn.Parameter(torch.zeros(3, 3))
        >>> bool((untrained_twin(layer).weight != 0).all())
        True
    """
    with isolated(0):
        config = getattr(model, "config", None)
        is_ours_inside = any(isinstance(module, Attention) for module in model.modules())
        if config is not None and hasattr(model, "init_weights") and not is_ours_inside:
            return type(model)(copy.deepcopy(config)).eval()
        twin = copy.deepcopy(model)
        for module in twin.modules():
            for reset in ("reset_parameters", "_reset_parameters"):
                if callable(getattr(module, reset, None)):
                    getattr(module, reset)()
        return twin.eval()


def spectrum_summary(spectra: Sequence[LayerSpectrum]) -> dict[str, float]:
    """Return the mean effective rank and, if there are primal layers, their KSVD diagnostics.

    Example:
        >>> sigma = torch.ones(1, 1, 4)
        >>> spectrum_summary([LayerSpectrum("attention", sigma, None)])
        {'effective rank': 4.0}
    """
    if not spectra:
        return {}
    ranks = [effective_rank(layer.singular_values).mean() for layer in spectra]
    numbers = {"effective rank": torch.stack(ranks).mean().item()}
    measured = [layer.diagnostics for layer in spectra if layer.diagnostics is not None]
    if measured:
        for name, field in _DIAGNOSTICS.items():
            means = [getattr(found, field).mean() for found in measured]
            numbers[name] = torch.stack(means).mean().item()
    return numbers


@dataclass(frozen=True)
class SpectrumResult(AnalysisResult):
    """Spectra of the attention layers of a model."""

    layers: Sequence[LayerSpectrum]
    control: Sequence[LayerSpectrum] = ()
    """The same layers with untrained weights."""
    first: int = 16
    """Number of singular values to draw."""

    def verdict(self) -> str:
        """Return the mean effective rank, and the layers with the lowest and the highest."""
        ranks = {layer.name: float(layer.head_ranks.mean()) for layer in self.layers}
        low, high = min(ranks, key=ranks.__getitem__), max(ranks, key=ranks.__getitem__)
        mean = spectrum_summary(self.layers)["effective rank"]
        most = max(layer.singular_values.shape[-1] for layer in self.layers)
        control = spectrum_summary(self.control).get("effective rank")
        beside = "" if control is None else f"; with untrained weights it is {control:.1f}"
        return (
            f"The effective rank of attention is {mean:.1f} of at most {most}, mean over "
            f"layers{beside}. It is lowest in {low} ({ranks[low]:.1f}) and highest in {high} "
            f"({ranks[high]:.1f})."
        )

    def table(self) -> ShownTable:
        """Return the effective rank and the diagnostics of each layer."""
        # columns that no layer fills are left out
        primal = any(layer.diagnostics is not None for layer in self.layers)
        shown = list(_DIAGNOSTICS) if primal else []
        names = ["effective rank", "untrained", "lowest head", "highest head", *shown]
        untrained = {layer.name: f"{layer.head_ranks.mean():.3g}" for layer in self.control}
        rows = []
        for layer in self.layers:
            ranks, measured = layer.head_ranks, _layer_diagnostics(layer)
            cells = [f"{float(number):.3g}" for number in (ranks.mean(), ranks.min(), ranks.max())]
            cells.insert(1, untrained.get(layer.name, "–"))
            cells += [f"{measured[n]:.3g}" if n in measured else "–" for n in shown]
            rows.append([layer.name, *cells])
        return ["layer", *names], rows

    def plot(self) -> bytes:
        """Return the cumulative spectra as PNG, one panel per layer."""
        return to_png(
            plot_spectra({"model": self.layers}, {"model": self.control}, first=self.first)
        )

    def to_json(self) -> str:
        """Return the summary, and per layer the ranks, singular values and diagnostics as JSON."""
        untrained = {layer.name: layer.head_ranks.tolist() for layer in self.control}
        return to_json(
            {
                "summary": spectrum_summary(self.layers),
                "layers": [
                    {
                        "name": layer.name,
                        "effective_rank": layer.head_ranks.tolist(),
                        "untrained": untrained.get(layer.name),
                        "singular_values": layer.singular_values.mean(0).tolist(),
                        **_layer_diagnostics(layer),
                    }
                    for layer in self.layers
                ],
            }
        )

    def limits(self) -> str:
        """Return what the numbers do not show."""
        return (
            "A low rank on these inputs does not show that the layer can be replaced: untrained "
            "layers have a low rank too, and other inputs may need more."
        )

    def report(self) -> Report:
        """Return a page with the summary, the picture and a table of the layers."""
        summary = spectrum_summary(self.layers)
        page = Report(
            "Spectrum of the attention layers",
            "Primal layers: singular values of the induced kernel. Other layers: of the attention "
            "matrix on real tokens. Dotted: the same model with untrained weights.",
        )
        tiles = {name: f"{value:.3g}" for name, value in summary.items()}
        page.tiles(tiles, max(len(tiles), 3))
        page.figure(
            self.plot(),
            "Share of the sum of singular values in the first k. Mean over sequences and heads; "
            "band: one standard deviation; dotted: untrained weights.",
        )
        return page.section("Layers").text(self.verdict()).table(*self.table())


def _layer_diagnostics(layer: LayerSpectrum) -> dict[str, float]:
    """Return the diagnostics of a layer by name, mean over sequences and heads."""
    if layer.diagnostics is None:
        return {}
    return {
        name: getattr(layer.diagnostics, field).mean().item()
        for name, field in _DIAGNOSTICS.items()
    }


def analyze_spectrum(
    model: nn.Module, batches: Sequence[Batch], options: SpectrumOptions
) -> SpectrumResult:
    """Return the spectra of a model on the first batch, and those of its untrained twin."""
    if not batches:
        raise ValueError("batches is empty; the analysis spectrum needs one batch.")
    args, kwargs = batch_arguments(batches[0], options.sequences)
    layers = layer_spectra(model, *args, **kwargs)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no attention layer with a spectrum; give a model with "
            "attention."
        )
    control = layer_spectra(untrained_twin(model), *args, **kwargs)
    return SpectrumResult(layers, control, options.first)


def plot_spectra(
    spectra: Mapping[str, Sequence[LayerSpectrum]],
    control: Mapping[str, Sequence[LayerSpectrum]] | None = None,
    *,
    first: int = 16,
) -> "Figure":
    """Return a figure of the share of ``Σσ`` in the first ``k`` values, one panel per layer.

    Lines are means over sequences and heads; bands are one standard deviation.

    Args:
        spectra: Layers of each model, by the name of the model.
        control: The same models before training; drawn as dotted lines.
        first: Largest ``k`` to draw.
    """
    from matplotlib import pyplot as plt

    control = control or {}
    columns = max((len(layers) for layers in spectra.values()), default=0)
    if not columns:
        raise ValueError("spectra holds no layer; give at least one layer of one model.")
    width = 6 if columns == 1 else max(12, 3 * columns)
    figure, axes = plt.subplots(
        1, columns, figsize=(width, 4), sharey=True, squeeze=False, layout=panel_layout()
    )
    color = model_colors(spectra)
    for i, axis in enumerate(axes[0]):
        longest = 6
        for name, layers in spectra.items():
            for group, style in ((layers, "-"), (control.get(name, ()), ":")):
                if i >= len(group):
                    continue
                mean, spread = _cumulative(group[i].singular_values, first)
                k = range(1, len(mean) + 1)
                longest = max(longest, _saturation(mean))
                axis.plot(k, mean, style, color=color[name])
                if style == "-":
                    low, high = mean - spread, (mean + spread).clamp_max(1)
                    axis.fill_between(k, low, high, color=color[name], alpha=0.12, lw=0)
        axis.set(title=f"layer {i + 1}", xlabel="singular values k", xlim=(1, longest))
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("share of Σσ in the first k")
    add_legend(figure, color)
    return figure


def _saturation(share: Float[Tensor, " k"]) -> int:
    """Return the smallest ``k`` at which a cumulative share exceeds 0.995, or its length."""
    return int((share < 0.995).sum().clamp_max(len(share) - 1)) + 1


def _cumulative(sigma: Float[Tensor, "b h k"], first: int) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the cumulative shares over sequences and heads."""
    sigma = sigma.flatten(0, 1)
    sigma = sigma[sigma.sum(-1) > 0]
    share = (sigma / sigma.sum(-1, keepdim=True)).cumsum(-1)[:, :first]
    return share.mean(0).cpu(), share.std(0, correction=0).cpu()
