"""Attention as a map of points, compared with optimal transport.

- :func:`map_metrics`, :func:`path_metrics`: cost, optimum, Monge gap, optimality, matching,
  efficiency, regret; see :mod:`primal_attention.analysis.transport.metrics`.
- :class:`TransportRecorder`: the same for the points inside a model, epoch by epoch.
- :func:`analyze_transport`: the analysis ``transport`` of ``primal analyze``.
- :func:`~primal_attention.functional.transport.monge_gap`: the gap with gradients.

The analysis asks how far the attention layers of a model are from optimal maps. The tokens of one
sequence have one context, so within a sequence a layer is one map from its input to its output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from primal_attention.analysis.options import TransportOptions
from primal_attention.analysis.registry import AnalysisResult, ShownTable
from primal_attention.analysis.transport.metrics import (
    MapMetrics,
    PathMetrics,
    RootMetrics,
    map_metrics,
    path_metrics,
    root_metrics,
)
from primal_attention.analysis.transport.plots import evenly, plot_map, plot_metrics, plot_paths
from primal_attention.analysis.transport.recorder import (
    PathResult,
    TransportRecorder,
    warn_of_narrow_norms,
)
from primal_attention.attention import Attention
from primal_attention.functional.transport import monge_gap
from primal_attention.hosts import Batch, LayerInputs, ModuleCall, batch_arguments
from primal_attention.hosts.recording import first_tensor, watch_modules
from primal_attention.report.page import Report, to_png
from primal_attention.report.plots import plot_dots
from primal_attention.support.output import to_json
from primal_attention.training.evaluation import eval_mode

__all__ = [
    "LayerTransport",
    "MapMetrics",
    "PathMetrics",
    "PathResult",
    "RootMetrics",
    "TransportRecorder",
    "TransportResult",
    "analyze_transport",
    "layer_transport",
    "map_metrics",
    "monge_gap",
    "path_metrics",
    "plot_map",
    "plot_metrics",
    "plot_paths",
    "root_metrics",
]


class LayerTransport(NamedTuple):
    """An attention layer as a map of the tokens of each sequence."""

    name: str
    """Name of the layer in the model, such as ``blocks.0.attention``."""
    plain: MapMetrics
    """From the input of the layer to its output."""
    residual: MapMetrics
    """From the input of the layer to input plus output."""


@torch.no_grad()
def layer_transport(
    model: nn.Module,
    batch: Batch,
    *,
    sequences: int = 8,
    tokens: int = 256,
    p: Literal[1, 2] = 2,
) -> list[LayerTransport]:
    """Return how far each attention layer is from an optimal map, in the order of the forward.

    Optimal maps are computed within each sequence. Padding is left out.

    Args:
        model: A module with layers of :class:`~primal_attention.attention.Attention` inside.
        batch: Inputs of the model.
        sequences: Number of sequences of the batch to measure.
        tokens: Largest number of tokens of a sequence, evenly spaced.
        p: Exponent of the distance.

    Example:
        >>> from primal_attention.attention import TiedSoftmaxAttention
        >>> (found,) = layer_transport(TiedSoftmaxAttention(8, 2), torch.randn(2, 30, 8))
        >>> found.plain.optimality, found.residual.optimality
        (1.0, 1.0)
    """
    args, kwargs = batch_arguments(batch, sequences)
    found = []
    for name, (x, y, keep) in _layer_maps(model, args, kwargs).items():
        real = [row.nonzero().flatten() for row in keep]
        picked = [slots[evenly(len(slots), tokens)] for slots in real]
        # a sequence with one token moves it optimally, and says nothing
        used = [(i, chosen) for i, chosen in enumerate(picked) if len(chosen) > 1]
        if not used:
            continue
        start, end = (torch.cat([t[i, chosen] for i, chosen in used]) for t in (x, y))
        owner = torch.cat([torch.full((len(chosen),), i) for i, chosen in used])
        plain, residual = (
            map_metrics(start, target, owner, scope="class", p=p) for target in (end, start + end)
        )
        found.append(LayerTransport(name, plain, residual))
    return found


def _layer_maps(
    model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return input, output and mask of real tokens of every attention layer."""
    found: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def keep(name: str, call: ModuleCall) -> None:
        inputs = LayerInputs.of_call(call.args, call.kwargs)
        mask = inputs.key_mask if inputs.context is None else None
        x, y = inputs.x, first_tensor(call.output)
        real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask.cpu()
        found[name] = x.double().cpu(), y.double().cpu(), real

    layers = {name: m for name, m in model.named_modules() if isinstance(m, Attention)}
    with eval_mode(model), watch_modules(layers, leave=keep):
        model(*args, **kwargs)
    return found


_COLUMNS = ("cost", "gap", "optimality", "matching", "spread")


@dataclass(frozen=True)
class TransportResult(AnalysisResult):
    """Distance of the attention layers of a model from optimal maps."""

    layers: Sequence[LayerTransport]
    p: int = 2

    def verdict(self) -> str:
        """Return the mean optimality, and the layers that are nearest and farthest."""
        of = {layer.name: layer.plain.optimality for layer in self.layers}
        high, low = max(of, key=of.__getitem__), min(of, key=of.__getitem__)
        mean = sum(of.values()) / len(of)
        with_input = sum(layer.residual.optimality for layer in self.layers) / len(of)
        words = (
            f"The optimality of attention as a map of tokens is {mean:.2f}, mean over layers, and "
            f"{with_input:.2f} with the residual; an optimal map has 1. It is highest in {high} "
            f"({of[high]:.2f}) and lowest in {low} ({of[low]:.2f})."
        )
        collapsed = [layer.name for layer in self.layers if layer.plain.spread < 0.05]
        if collapsed:
            words += (
                f" {', '.join(collapsed)} maps all tokens of a sequence to nearly one point, which "
                "is optimal for a trivial reason."
            )
        return words

    def table(self) -> ShownTable:
        """Return cost, gap, optimality, matching and spread of each layer."""
        header = ["layer", *_COLUMNS, "optimality with residual", "matching with residual"]
        rows = []
        for layer in self.layers:
            numbers = [getattr(layer.plain, name) for name in _COLUMNS]
            numbers += [layer.residual.optimality, layer.residual.matching]
            rows.append([layer.name, *(f"{number:.3g}" for number in numbers)])
        return header, rows

    def plot(self) -> bytes:
        """Return the optimality of each layer as PNG, without and with the residual."""
        values = {
            layer.name: {
                "attention": layer.plain.optimality,
                "with residual": layer.residual.optimality,
            }
            for layer in self.layers
        }
        return to_png(plot_dots(values, xlabel="optimality, 1 for an optimal map"))

    def to_json(self) -> str:
        """Return all numbers of each layer as JSON."""
        return to_json(
            {
                "p": self.p,
                "layers": [
                    {
                        "name": layer.name,
                        "plain": layer.plain._asdict(),
                        "residual": layer.residual._asdict(),
                    }
                    for layer in self.layers
                ],
            }
        )

    def limits(self) -> str:
        """Return what the numbers do not show."""
        return (
            "A layer near an optimal map is not therefore useful: the distances say nothing about "
            "the task."
        )

    def report(self) -> Report:
        """Return a page with the verdict, the picture and a table of the layers."""
        page = Report(
            "Attention layers and optimal transport",
            "A layer moves every token from its input to its output. The gap is what this costs "
            "above the best way to reach the same outputs, within each sequence.",
        )
        page.verdict(self.verdict())
        page.figure(
            self.plot(),
            f"Optimality: (least cost / cost)^(1/{self.p}), in which cost is the mean distance to "
            f"the power {self.p}.",
        )
        page.section("Layers").table(*self.table())
        return page.text(
            "Matching: share of tokens that the best map sends where the layer does. Spread: "
            "standard deviation of the outputs over that of the inputs. A layer with a spread near "
            "zero maps all tokens to one point; its optimality means nothing."
        )


def analyze_transport(
    model: nn.Module, batches: Sequence[Batch], options: TransportOptions
) -> TransportResult:
    """Return how far the attention layers are from optimal maps, on the first batch.

    Convert a model of another library to ``"softmax"`` first. This does not change its output.
    """
    if not batches:
        raise ValueError("batches is empty; the analysis transport needs one batch.")
    warn_of_narrow_norms(model)
    sizes = {"sequences": options.sequences, "tokens": options.tokens}
    layers = layer_transport(model, batches[0], **sizes, p=options.p)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no attention layer with two tokens or more; use a model "
            "of this library and longer sequences, or convert its layers to 'softmax' first."
        )
    return TransportResult(layers, options.p)
