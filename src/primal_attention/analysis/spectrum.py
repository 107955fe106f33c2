"""What attention layers have learned, seen through their singular values.

A primal layer is measured through the kernel it induces, from its factors and without an ``n × n``
matrix. A layer of queries, keys and values is measured through its attention matrix, rows and
columns of real tokens alone. Untrained layers already concentrate their spectrum: draw them beside
the trained ones (``control``) before reading anything into a picture.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.attention import Attention, Diagnostics, MultiHeadAttention, PrimalAttention
from primal_attention.functional import effective_rank

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import LayoutEngine

__all__ = ["LayerSpectrum", "layer_spectra", "plot_spectra", "spectrum_summary"]

COLORS = ("#c2410c", "#1d4ed8", "#047857", "#7c3aed", "#b45309", "#0e7490")
"""Line colours, in the order of the models."""


class LayerSpectrum(NamedTuple):
    """One attention layer on a batch of sequences."""

    name: str
    """Where the layer is in the model, such as ``blocks.0.attention``."""
    singular_values: Float[Tensor, "b h k"]
    """Of the induced kernel or the attention matrix, largest first; zero beyond a sequence's
    length."""
    diagnostics: Diagnostics | None
    """How far a primal layer is from a singular value decomposition; ``None`` for other layers."""


class _Call(NamedTuple):
    """What a layer was asked."""

    x: Tensor
    context: Tensor | None
    key_mask: Tensor | None
    is_causal: bool


@torch.no_grad()
def layer_spectra(model: nn.Module, *args: Any, **kwargs: Any) -> list[LayerSpectrum]:
    """Return the spectrum of every attention layer, in the order of the forward pass.

    Layers without one matrix behind them (``primal-relative``, and causal ``primal`` with
    data-dependent weights) are left out. Attention matrices take ``O(n²)`` memory and ``O(n³)``
    time: give long sequences in samples.

    Args:
        model: Any module with layers of :class:`~primal_attention.attention.Attention` inside.
        args: What the model's forward takes.
        kwargs: What the model's forward takes by name.

    Example:
        >>> from primal_attention.models import EncoderClassifier, EncoderConfig
        >>> model = EncoderClassifier(EncoderConfig(num_classes=2, num_features=3, dim=16))
        >>> [layer.name for layer in layer_spectra(model, torch.randn(4, 9, 3))]
        ['blocks.0.attention', 'blocks.1.attention']
    """
    calls: dict[str, _Call] = {}

    def hook(name: str) -> Any:
        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            context = args[1] if len(args) > 1 else kwargs.get("context")
            x = args[0] if args else kwargs["x"]
            calls[name] = _Call(
                x, context, kwargs.get("key_mask"), bool(kwargs.get("is_causal", False))
            )

        return keep

    layers = {n: m for n, m in model.named_modules() if isinstance(m, Attention)}
    hooks = [m.register_forward_pre_hook(hook(n), with_kwargs=True) for n, m in layers.items()]
    was_training = model.training
    try:
        model.eval()(*args, **kwargs)
    finally:
        model.train(was_training)
        for handle in hooks:
            handle.remove()
    found = (_measure(name, layers[name], call) for name, call in calls.items())
    return [spectrum for spectrum in found if spectrum is not None]


def _measure(name: str, layer: nn.Module, call: _Call) -> LayerSpectrum | None:
    if isinstance(layer, PrimalAttention):
        if call.is_causal and layer.weights == "data":
            return None
        found = layer.diagnose(
            call.x, call.context, key_mask=call.key_mask, is_causal=call.is_causal
        )
        return LayerSpectrum(name, found.singular_values, found)
    if isinstance(layer, MultiHeadAttention):
        return LayerSpectrum(name, _matrix_spectrum(layer, call), None)
    return None


def _matrix_spectrum(layer: MultiHeadAttention, call: _Call) -> Float[Tensor, "b h k"]:
    """Return the singular values of the attention matrix, sequence by sequence of one length.

    Without padding there is nothing to mask: every mechanism treats a sequence alone as it does in
    a padded batch.
    """
    memory = call.x if call.context is None else call.context
    b, m, _ = memory.shape
    keep = memory.new_ones(b, m, dtype=torch.bool) if call.key_mask is None else call.key_mask
    lengths = keep.sum(1)
    sigma = memory.new_zeros(b, layer.num_heads, min(call.x.shape[1], m))
    for length in lengths.unique().tolist():
        if length == 0:
            continue
        chosen = lengths == length
        answers = memory[chosen][keep[chosen]].view(-1, length, memory.shape[-1])
        asks = answers if call.context is None else call.x[chosen]
        q, k = layer.q_proj(asks), layer.k_proj(answers)
        q, k = (t.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for t in (q, k))
        matrix = layer.core.weights(q, k, is_causal=call.is_causal)
        values = torch.linalg.svdvals(matrix.float())
        sigma[chosen, :, : values.shape[-1]] = values.to(sigma.dtype)
    return sigma


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
        for name, key in (
            ("squared KKT residual", "kkt"),
            ("balance", "balance"),
            ("off-diagonality", "off_diagonality"),
        ):
            means = [getattr(found, key).mean() for found in measured]
            numbers[name] = torch.stack(means).mean().item()
    return numbers


def plot_spectra(
    spectra: Mapping[str, Sequence[LayerSpectrum]],
    control: Mapping[str, Sequence[LayerSpectrum]] | None = None,
    *,
    first: int = 16,
) -> "Figure":
    """Draw how much of the spectrum the first ``k`` singular values hold, layer by layer.

    Args:
        spectra: Layers of each model, by its name: mean over sequences and heads, with a band of
            one standard deviation.
        control: The same before training, dotted.
        first: Largest ``k`` to draw.
    """
    from matplotlib import pyplot as plt

    control = control or {}
    columns = max((len(layers) for layers in spectra.values()), default=0)
    if not columns:
        raise ValueError("There is no spectrum to draw; give at least one layer of one model.")
    width = 6 if columns == 1 else max(12, 3 * columns)
    figure, axes = plt.subplots(
        1, columns, figsize=(width, 4), sharey=True, squeeze=False, layout=spaced()
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
                longest = max(longest, _settled(mean))
                axis.plot(k, mean, style, color=color[name])
                if style == "-":
                    low, high = mean - spread, (mean + spread).clamp_max(1)
                    axis.fill_between(k, low, high, color=color[name], alpha=0.12, lw=0)
        axis.set(title=f"layer {i + 1}", xlabel="singular values k", xlim=(1, longest))
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("share of Σσ in the first k")
    name_models(figure, color)
    return figure


def model_colors(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for every model, in the order in which their names come."""
    return {name: COLORS[i % len(COLORS)] for i, name in enumerate(dict.fromkeys(names))}


def spaced() -> "LayoutEngine":
    """Return a layout in which neighbouring panels do not touch."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)


def name_models(figure: "Figure", colors: Mapping[str, str]) -> None:
    """Write the names of the models above all panels, where they cover nothing."""
    from matplotlib.lines import Line2D

    figure.legend(
        [Line2D([], [], color=color) for color in colors.values()],
        list(colors),
        loc="outside upper center",
        ncols=min(len(colors), 6),
        frameon=False,
    )


def _settled(share: Float[Tensor, " k"]) -> int:
    """Return where a cumulative share has all but reached one, or its end."""
    return int((share < 0.995).sum().clamp_max(len(share) - 1)) + 1


def _cumulative(sigma: Float[Tensor, "b h k"], first: int) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the cumulative shares, over sequences and heads."""
    sigma = sigma.flatten(0, 1)
    sigma = sigma[sigma.sum(-1) > 0]
    share = (sigma / sigma.sum(-1, keepdim=True)).cumsum(-1)[:, :first]
    return share.mean(0).cpu(), share.std(0, correction=0).cpu()
