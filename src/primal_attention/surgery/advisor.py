"""Measure which layers of a model can be converted, and into what.

Three measurements on the user's own data: the spectra of the attention matrices, beside the same
model with random weights; how much of each layer's output each mechanism explains after a fit; time
and memory of each mechanism. :class:`~primal_attention.surgery.Advice` draws the conclusion.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from primal_attention.analysis.attention_maps import (
    MapSpectrum,
    attention_maps,
    map_spectra,
    mass_at_rank,
    rank_for_mass,
)
from primal_attention.analysis.spectrum import untrained_twin
from primal_attention.attention import Attention, attention_entry, list_attentions
from primal_attention.functional import effective_rank
from primal_attention.hosts import Batch, ConversionError, converted_layers
from primal_attention.hosts.inputs import model_arguments
from primal_attention.support.randomness import isolated
from primal_attention.surgery.advice import Advice, HeadStatistics, LayerCost, LayerFit
from primal_attention.surgery.config import SurgeryConfig
from primal_attention.surgery.conversion import convert
from primal_attention.surgery.distillation import DistillConfig, distill
from primal_attention.surgery.fitting import fit_recorded
from primal_attention.surgery.options import AdviceConfig
from primal_attention.surgery.recording import Recording, record_layers, recorded_r2
from primal_attention.surgery.targets import inspect_targets
from primal_attention.training.cost import compare_costs

__all__ = ["advise"]

_MASS = 0.9
"""Share of the singular values that ``HeadStatistics.needed`` directions hold."""
_LONGEST = 4096
"""Largest number of tokens for the costs, unless the user asks for more."""


def advise(
    model: nn.Module,
    data: Sequence[Batch],
    config: AdviceConfig | None = None,
    *,
    options: Mapping[str, Mapping[str, object]] | None = None,
    control: nn.Module | None = None,
    progress: Callable[[str], None] | None = None,
) -> Advice:
    """Return which layers of a model to convert, into what, and what that saves.

    The model is not changed: copies of it are converted.

    Args:
        model: A model of transformers, timm or torch.nn.
        data: At least two batches. The first half fits the mechanisms, the second half tests them.
        config: Mechanisms, length and threshold.
        options: Options of mechanisms by name, such as ``{"skyformer": {"num_landmarks": 64}}``.
        control: The model with random weights; made from the model unless given.
        progress: Called with the name of each mechanism before it is tried.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
        >>> data = [torch.randn(4, 12, 16) for _ in range(4)]
        >>> config = AdviceConfig(("linear", "skyformer"), length=64)
        >>> [(fit.layer, fit.attention) for fit in advise(layer, data, config).fits]
        [('self_attn', 'linear'), ('self_attn', 'skyformer')]
    """
    config = AdviceConfig() if config is None else config
    if len(data) < 2:
        raise ValueError(
            f"advise needs at least two batches, one to fit and one to test, got {len(data)}."
        )
    targets = inspect_targets(model, SurgeryConfig("softmax"))
    skipped = {t.name: t.reason for t in targets if t.reason}
    names = [t.name for t in targets if not t.reason]
    if not names:
        why = "; ".join(f"{n}: {r}" for n, r in skipped.items()) or "it has no attention module"
        raise ConversionError(f"No layer of the model can be converted: {why}.")
    causal = any(t.is_causal for t in targets if not t.reason)
    wanted = {n: (options or {}).get(n, {}) for n in config.attentions or _mechanisms(causal)}
    recordings = [(batch, record_layers(model, names, batch)) for batch in data]
    half = len(data) // 2
    fits: list[LayerFit] = []
    layers = {"softmax": _first_layer(_converted_copy(model, "softmax", {}, names[:1]))}
    for attention, own in wanted.items():
        if progress is not None:
            progress(attention)
        try:
            student = _converted_copy(model, attention, own, names)
        except ConversionError as error:
            skipped[attention] = _first_reason(error)
            continue
        fits += _fit(student, model, attention, recordings, half, config.steps)
        layers[attention] = _first_layer(student)
    if not fits:
        why = "; ".join(f"{n}: {r}" for n, r in skipped.items())
        raise ConversionError(f"No mechanism can replace a layer of the model: {why}.")
    longest = max(call.output.shape[-2] for _, calls in recordings for call in calls.values())
    length = config.length or _default_length(model, longest)
    return Advice(
        heads=_heads(model, control, names, data[half], config.rank),
        fits=fits,
        costs=_costs(layers, length, causal),
        length=length,
        data_length=longest,
        rank=config.rank,
        threshold=config.threshold,
        skipped=skipped,
        options={name: dict(own) for name, own in wanted.items()},
    )


def _mechanisms(causal: bool) -> list[str]:
    """Return the names of all linear mechanisms that fit a model."""
    if causal:
        names = set(list_attentions(causal=True, padding=True))
    else:
        names = set(list_attentions(padding=True, mixes_without_order=True))
    return sorted(name for name in names if attention_entry(name).cost != "n²")


def _default_length(model: nn.Module, longest: int) -> int:
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return max(longest, min(limit, _LONGEST)) if isinstance(limit, int) else longest


def _first_reason(error: ConversionError) -> str:
    """Return why the first layer of a list could not be converted."""
    lines = str(error).splitlines()
    return lines[1].removeprefix("- ") if len(lines) > 1 else lines[0]


def _converted_copy(
    model: nn.Module, attention: str, options: Mapping[str, object], names: Sequence[str]
) -> nn.Module:
    student = copy.deepcopy(model).eval()
    # random weights of a mechanism must not depend on which mechanisms were tried before
    with isolated(0):
        convert(student, SurgeryConfig(attention, options, layers=list(names)))
    return student


def _first_layer(model: nn.Module) -> Attention:
    return next(iter(converted_layers(model).values())).attention


def _fit(
    student: nn.Module,
    model: nn.Module,
    attention: str,
    recordings: list[Recording],
    half: int,
    steps: int,
) -> list[LayerFit]:
    """Fit a converted model on the first half of the data; return its R² on the second half."""
    before = recorded_r2(student, recordings[half:])
    fit_recorded(student, recordings[:half])
    if steps:
        config = DistillConfig(closed_form=False, layer_steps=steps, end_steps=0)
        distill(student, model, [b for b, _ in recordings[:half]], config)
    after = recorded_r2(student, recordings[half:])
    return [LayerFit(name, attention, before[name], r2) for name, r2 in after.items()]


def _heads(
    model: nn.Module, control: nn.Module | None, names: Sequence[str], batch: Batch, rank: int
) -> list[HeadStatistics]:
    """Return the statistics of every head, for the model and for one with random weights."""
    random = untrained_twin(model) if control is None else control
    trained, untrained = (_spectra(m, names, batch) for m in (model, random))
    rows = []
    for layer in names:
        columns = {
            f"{measure}{side}{suffix}": compute(sigma).mean(0)
            for spectrum, suffix in ((trained[layer], ""), (untrained[layer], "_control"))
            for sigma, side in ((spectrum.plain, ""), (spectrum.centred, "_centred"))
            for measure, compute in (
                ("rank", effective_rank),
                ("mass", lambda sigma: mass_at_rank(sigma, rank)),
            )
        }
        needed = rank_for_mass(trained[layer].plain, _MASS).mean(0).ceil()
        for head in range(len(needed)):
            numbers = {name: float(column[head]) for name, column in columns.items()}
            rows.append(HeadStatistics(layer, head, needed=int(needed[head]), **numbers))
    return rows


def _spectra(model: nn.Module, names: Sequence[str], batch: Batch) -> dict[str, MapSpectrum]:
    """Return the spectra of the attention matrices, from a copy with our softmax layers."""
    twin = _converted_copy(model, "softmax", {}, names)
    maps = attention_maps(twin, model_arguments(model, batch))
    return {
        name: map_spectra({name: maps[f"{name}.attention.core"]})[name]
        for name in converted_layers(twin)
    }


def _costs(layers: Mapping[str, Attention], length: int, is_causal: bool) -> list[LayerCost]:
    """Return the cost of each layer on one random sequence."""
    softmax = layers["softmax"]
    x = torch.randn(1, length, softmax.dim, generator=torch.Generator().manual_seed(0))
    x = x.to(next(softmax.parameters()))
    runs = {name: partial(layer, x, is_causal=is_causal) for name, layer in layers.items()}
    return [LayerCost(name, *cost) for name, cost in compare_costs(runs).items()]
