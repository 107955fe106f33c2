"""Can this attention module be replaced? Checks of one module, before anything is changed.

The last check is a trial call. The module and a softmax attention built from its weights get the
same random tokens, and must return the same. So a relative bias, a norm or a cap on scores is
found even in code of an unknown library.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn

from primal_attention.attention import Attention, Rotary, attention_entry
from primal_attention.hosts import AttentionParts, ConversionError, HostLibrary, LayerInputs
from primal_attention.surgery.building import build_attention
from primal_attention.surgery.config import SurgeryConfig

__all__ = ["Target", "examine"]

_TOLERANCE = 1e-3
"""Largest difference in the trial call, relative to the largest output."""


@dataclass(frozen=True)
class Target:
    """An attention module of a model, and what a conversion does with it."""

    name: str
    library: str
    """Library of the module; empty if it is unknown."""
    kind: str
    """Class of the module."""
    selected: bool
    """Whether ``layers`` of the configuration selects it."""
    num_heads: int | None = None
    dim: int | None = None
    is_causal: bool = False
    parameters_before: int = 0
    parameters_after: int | None = None
    reason: str = ""
    """Why it cannot be converted; empty if it can."""
    note: str = ""
    """What else changes."""


def examine(
    target: Target,
    module: nn.Module,
    library: HostLibrary | None,
    config: SurgeryConfig,
    shared: str | None,
) -> Target:
    """Return the target with its sizes, and with a reason if it cannot be converted.

    Args:
        target: Name and class of the module.
        module: The module.
        library: Its library, ``None`` if unknown.
        config: What to convert it into.
        shared: With which other module it shares weights, in words.
    """
    try:
        if isinstance(module, Attention):
            raise ConversionError("it is an attention of this library already")
        if library is None:
            raise ConversionError("unknown signature: it belongs to no supported library")
        if not target.name:
            raise ConversionError("it is the whole model; convert the model around it")
        parts = library.read(module)
        target = dataclasses.replace(
            target, num_heads=parts.num_heads, dim=parts.dim, is_causal=parts.is_causal
        )
        parts.check()
        if shared is not None:
            raise ConversionError(f"{shared}, and the conversion would separate the two")
        _check_tensors(module)
        _check_hooks(module)
        _check_capabilities(parts, config)
        attention = _build_on_meta(config, parts)
        layer = library.wrap(module, attention, parts)
        target = dataclasses.replace(
            target,
            parameters_after=sum(p.numel() for p in layer.parameters()),
            note=_note(parts, attention),
        )
        _check_trial_call(library, module, parts)
    except ConversionError as error:
        return dataclasses.replace(target, reason=str(error))
    return target


def _build_on_meta(config: SurgeryConfig, parts: AttentionParts) -> Attention:
    try:
        return build_attention(config.attention, config.options, parts.canonical(), device="meta")
    except (TypeError, ValueError) as error:
        raise ConversionError(f"{config.attention!r} cannot be built: {error}") from error


def _check_tensors(module: nn.Module) -> None:
    tensors = [*module.parameters(), *module.buffers()]
    devices = sorted({str(t.device) for t in tensors})
    if "meta" in devices:
        raise ConversionError(
            "its parameters are on the meta device and have no values; load the weights first"
        )
    if len(devices) > 1:
        raise ConversionError(f"it is spread over {', '.join(devices)}; move it to one device")
    for name, p in module.named_parameters():
        if p.dtype not in (torch.float32, torch.float64):
            raise ConversionError(
                f"{name} is {p.dtype}; convert in float32 (model.float()) and lower the "
                "precision afterwards"
            )


def _check_hooks(module: nn.Module) -> None:
    for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
        for hook in hooks.values():
            # transformers leaves this hook in place after output_hidden_states=True
            if "output_capturing_hook" not in getattr(hook, "__qualname__", ""):
                name = getattr(hook, "__qualname__", repr(hook))
                raise ConversionError(f"it has a hook ({name}) that would be lost; remove it first")
    if hasattr(module, "_hf_hook"):
        raise ConversionError("accelerate has put hooks on it; remove them first")


def _check_capabilities(parts: AttentionParts, config: SurgeryConfig) -> None:
    can = attention_entry(config.attention).capabilities
    if parts.is_causal and not can.causal:
        raise ConversionError(f"the layer is causal, and {config.attention!r} has no causal form")
    if not can.padding:
        raise ConversionError(f"{config.attention!r} does not support padding masks")
    if not can.mixes_without_order and not parts.is_causal:
        raise ConversionError(f"{config.attention!r} mixes no tokens in a layer that is not causal")


def _note(parts: AttentionParts, attention: Attention) -> str:
    notes = []
    if parts.kv_heads != getattr(attention, "kv_heads", parts.num_heads):
        notes.append(f"keys and values of {parts.kv_heads} groups repeated, exactly")
    if parts.rotary and not attention.capabilities.rotary:
        notes.append("rotary positions are dropped")
    if not hasattr(attention, "v_proj") and not hasattr(attention, "dual_r"):
        notes.append("value weights are dropped")
    return "; ".join(notes)


@torch.no_grad()
def _check_trial_call(library: HostLibrary, module: nn.Module, parts: AttentionParts) -> None:
    """Raise unless the module computes softmax attention with the weights that were read."""
    inputs = _trial_inputs(parts, library.accepts_padding)
    canonical = parts.canonical()
    softmax = build_attention("softmax", {}, canonical).eval()
    try:
        output = library.run_original(module, inputs)
    except ConversionError:
        raise
    except Exception as error:
        raise ConversionError(
            f"unknown signature: a trial call failed with {type(error).__name__}: {error}"
        ) from error
    expected = library.wrap(module, softmax, canonical).eval().attend(inputs)
    real = torch.ones_like(output[..., :1], dtype=torch.bool)
    real = real if inputs.key_mask is None else inputs.key_mask[:, :, None]
    difference = torch.where(real, output - expected, 0.0).abs().max()
    scale = torch.where(real, expected, 0.0).abs().max()
    if not bool(difference <= _TOLERANCE * scale + 1e-6):
        raise ConversionError(
            "it does not compute plain softmax attention (it may have a relative bias, a norm or a "
            f"cap on scores): a trial output is off by {float(difference / scale):.0%}"
        )


def _trial_inputs(parts: AttentionParts, padded: bool) -> LayerInputs:
    """Return a few random tokens, some of them padding."""
    weight, n = parts.q.weight, 6
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, n, parts.dim, generator=generator).to(weight)
    keep = torch.arange(n, device=weight.device) < torch.tensor([[n], [4]], device=weight.device)
    q, k = (x @ p.weight.T for p in (parts.q, parts.k))
    # scaled so that scores are of order one, whatever the scale of the weights
    scores = q.square().mean().sqrt() * k.square().mean().sqrt()
    scores = scores * parts.scaling * parts.head_dim**0.5
    x = x * (2 / scores.clamp_min(1e-12)).sqrt().clamp_max(1e3)
    rotary: Rotary | None = None
    if parts.rotary:
        half = parts.head_dim // 2
        angle = torch.arange(n)[None, :, None] * torch.linspace(0.5, 0.1, half)
        angles = angle.repeat(1, 1, 2).to(weight)
        rotary = Rotary(angles.cos(), angles.sin())
    return LayerInputs(x, None, keep if padded else None, parts.is_causal, rotary)
