"""Multiply the two output maps of primal layers once, for faster inference.

A primal layer maps the scores of a head by ``C`` and merges the heads by ``O``. The product ``O C``
replaces both and saves a matrix product of ``2 s c²`` per forward pass, which is most of the work
when decoding token by token.
"""

import torch
from torch import Tensor, nn

from primal_attention.attention import PrimalAttention
from primal_attention.hosts import ConversionError, ConvertedLayer

__all__ = ["fold_output", "is_folded"]


class _FoldedMap(nn.Identity):
    """Replaces a map that was multiplied into the next one."""


def is_folded(layer: ConvertedLayer) -> bool:
    """Return whether the output maps of a layer were multiplied."""
    return isinstance(getattr(layer.attention, "concat", None), _FoldedMap)


@torch.no_grad()
def fold_output(model: nn.Module) -> int:
    """Multiply the two output maps of every primal layer of a model in place; return how many.

    The output of the model does not change. ``save_converted`` and ``load_state_dict`` do not work
    on the model afterwards.

    Args:
        model: A model, converted or ours.

    Raises:
        ConversionError: If there is no layer to fold.

    Example:
        >>> layer = PrimalAttention(16, 2, rank=4).eval()
        >>> x = torch.randn(1, 5, 16)
        >>> y = layer(x)
        >>> fold_output(layer)
        1
        >>> torch.allclose(layer(x), y, atol=1e-6)
        True
    """
    folded = 0
    for name, module in model.named_modules():
        if not isinstance(module, PrimalAttention) or isinstance(module.concat, _FoldedMap):
            continue
        where = _output_of(model, name, module)
        if where is None:
            continue
        owner, part = where
        setattr(owner, part, _folded(module, getattr(owner, part)))
        setattr(module, "concat", _FoldedMap())  # noqa: B010 - another type than it was
        folded += 1
    if not folded:
        raise ConversionError(
            "There is no primal layer with two plain output maps; only primal layers have them."
        )
    return folded


def _output_of(model: nn.Module, name: str, layer: PrimalAttention) -> tuple[nn.Module, str] | None:
    """Return the module and the name of the map that merges the heads; ``None`` if not plain."""
    if layer.conventions.mask == "output" or type(layer.concat) is not nn.Linear:
        return None
    if type(layer.out_proj) is nn.Linear:
        return layer, "out_proj"
    if isinstance(layer.out_proj, nn.Identity):
        # BERT keeps it beside the attention: …attention.self.attention and …attention.output.dense
        parent = model.get_submodule(".".join(name.split(".")[:-2]))
        output = getattr(parent, "output", None)
        if isinstance(output, nn.Module) and type(getattr(output, "dense", None)) is nn.Linear:
            return output, "dense"
    return None


def _folded(layer: PrimalAttention, out: nn.Linear) -> nn.Linear:
    heads = out.weight.unflatten(1, (layer.num_heads, -1))  # [c h d]
    weight: Tensor = (heads @ layer.concat.weight).flatten(1)  # [c h·2s]
    bias = out.bias
    # O (C s + b) + o = O C s + (O b + o): every head has the bias b, so O b sums over heads
    if layer.concat.bias is not None:
        inner = (heads @ layer.concat.bias).sum(1)
        bias = inner if bias is None else bias + inner
    result = nn.Linear(
        weight.shape[1],
        weight.shape[0],
        bias is not None,
        device=weight.device,
        dtype=weight.dtype,
    )
    result.weight.copy_(weight)
    if bias is not None:
        result.bias.copy_(bias)
    return result.requires_grad_(out.weight.requires_grad).train(out.training)
