"""Vision Transformers of timm: a class for ``attn_layer=``, conversion, and models by name.

timm.create_model("vit_small_patch16_224", attn_layer=timm_attention("primal", rank=32))
register_timm_models()
timm.create_model("primal_deit_small_patch16_224")   # Primal.+DeiT-Small/16 of the paper
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from primal_attention.attention import (
    Attention,
    PrimalAttention,
    attention_entry,
    create_attention,
)
from primal_attention.hosts.converted import ConvertedLayer
from primal_attention.hosts.errors import ConversionError
from primal_attention.hosts.inputs import LayerInputs
from primal_attention.hosts.library import HostLibrary, plain_projection, refuse_other_parts
from primal_attention.hosts.masks import read_mask
from primal_attention.hosts.parts import AttentionParts
from primal_attention.support.command import needs

__all__ = ["ConvertedTimm", "Timm", "register_timm_models", "timm_attention"]

_SIZES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}
"""Width and heads of the DeiT family; twelve layers each."""
_RANK, _TOKENS = 96, 197
"""Directions and sampled rows of the published Primal.+DeiT."""


class ConvertedTimm(ConvertedLayer):
    """Takes the arguments of an attention of timm, returns its output."""

    library = "timm"

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Return the layer's output."""
        b, n, _ = x.shape
        keep, documents = read_mask(attn_mask, batch=b, is_causal=is_causal, tokens=n)
        return self.attend(LayerInputs(x, None, keep, is_causal, None, documents))


class Timm(HostLibrary):
    """Reads and replaces attention modules of timm with one fused projection."""

    name = "timm"
    accepts_padding = False

    def matches(self, module: nn.Module) -> bool:
        """Return whether a module has ``qkv``, ``proj`` and heads."""
        parts = dict(module.named_children())
        return {"qkv", "proj"} <= set(parts) and isinstance(getattr(module, "num_heads", None), int)

    def read(self, module: Any) -> AttentionParts:
        """Return weights and sizes of the module."""
        refuse_other_parts(module, ("qkv", "proj"))
        fused, out = plain_projection(module, "qkv"), plain_projection(module, "proj")
        if fused.weight.shape[0] != 3 * fused.weight.shape[1]:
            raise ConversionError(
                f"qkv has shape {tuple(fused.weight.shape)}, so keys are not as wide as tokens"
            )
        q, k, v = fused.split()
        h = module.num_heads
        drop = float(getattr(getattr(module, "proj_drop", None), "p", 0.0))
        return AttentionParts(q, k, v, out, h, h, float(module.scale), dropout=drop)

    def wrap(
        self, module: nn.Module, attention: Attention, parts: AttentionParts
    ) -> ConvertedLayer:
        """Return the module that replaces ``module``."""
        return ConvertedTimm(attention)

    def run_original(self, module: nn.Module, inputs: LayerInputs) -> Tensor:
        """Return the output of the original module."""
        return copy.deepcopy(module).eval()(inputs.x)


def timm_attention(name: str, **options: Any) -> type[nn.Module]:
    """Return a class for ``attn_layer=`` of timm's constructors.

    Args:
        name: Name of an attention in the registry.
        options: Options of its constructor.

    Example:
        >>> layer = timm_attention("primal", rank=8)(64, num_heads=4, qkv_bias=True)
        >>> layer(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """
    attention_entry(name)

    class Layer(ConvertedTimm):
        """An attention of the registry with timm's constructor."""

        def __init__(
            self,
            dim: int,
            num_heads: int = 8,
            qkv_bias: bool = False,
            qk_norm: bool = False,
            scale_norm: bool = False,
            proj_bias: bool = True,
            attn_drop: float = 0.0,
            proj_drop: float = 0.0,
            norm_layer: Callable[[int], nn.Module] | None = None,
            device: Device = None,
            dtype: torch.dtype | None = None,
        ) -> None:
            if qk_norm or scale_norm:
                raise ValueError(
                    f"{name!r} does not normalise queries and keys; build the model with "
                    "qk_norm=False and scale_attn_norm=False."
                )
            factory: dict[str, Any] = {"device": device, "dtype": dtype}
            given = {"dropout": proj_drop, **options}
            attention = create_attention(name, dim, num_heads, bias=proj_bias, **given, **factory)
            for part in ("q_proj", "k_proj", "v_proj"):
                if qkv_bias != proj_bias and hasattr(attention, part):
                    setattr(attention, part, nn.Linear(dim, dim, qkv_bias, **factory))
            super().__init__(attention)

    return Layer


def register_timm_models() -> list[str]:
    """Register the vision models of the paper with timm, and return their names.

    ``primalformer_deit_{tiny,small,base}_patch16_224`` have primal attention in every block;
    ``primal_deit_{tiny,small,base}_patch16_224`` are DeiT with the published layer (``s = 96`` over
    all 197 tokens) in the last one. Both take ``rank=``.
    """
    with needs("vision", "This model"):
        from timm.models import is_model, register_model
    names = []
    for size, (dim, heads) in _SIZES.items():
        for make in (_primalformer, _primal_deit):
            entry = make(f"deit_{size}_patch16_224", dim, heads)
            names.append(entry.__name__)
            if not is_model(entry.__name__):
                # timm finds the function by name in this module
                globals()[entry.__name__] = entry
                register_model(entry)
    return sorted(names)


def _primalformer(host: str, dim: int, heads: int) -> Callable[..., nn.Module]:
    def entry(pretrained: bool = False, rank: int | None = None, **kwargs: Any) -> nn.Module:
        if pretrained:
            raise ValueError(
                "There are no pretrained weights for this model; use pretrained=False, or convert "
                f"a pretrained {host}."
            )
        from timm import create_model

        return create_model(host, attn_layer=timm_attention("primal", rank=rank), **kwargs)

    entry.__name__ = entry.__qualname__ = f"primalformer_{host}"
    entry.__doc__ = "DeiT with primal attention in every block."
    return entry


def _primal_deit(host: str, dim: int, heads: int) -> Callable[..., nn.Module]:
    def entry(pretrained: bool = False, rank: int = _RANK, **kwargs: Any) -> nn.Module:
        from timm import create_model

        model: Any = create_model(host, pretrained=pretrained, **kwargs)
        block = model.blocks[-1]
        old = block.attn.proj.weight
        attention = PrimalAttention.reference(
            "vit",
            dim,
            heads,
            rank=rank,
            num_samples=_TOKENS,
            device=old.device,
            dtype=old.dtype,
        )
        block.attn = ConvertedTimm(attention)
        return model

    entry.__name__ = entry.__qualname__ = f"primal_{host}"
    entry.__doc__ = "DeiT with the published primal attention in the last block."
    return entry
