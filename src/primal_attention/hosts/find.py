"""Find the attention modules of a model, and read one."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from primal_attention.hosts.errors import ConversionError
from primal_attention.hosts.library import HostLibrary
from primal_attention.hosts.parts import AttentionParts
from primal_attention.hosts.timm import Timm
from primal_attention.hosts.torch_nn import TorchMultihead
from primal_attention.hosts.transformers import HuggingFace

__all__ = ["FoundModule", "find_attentions", "read_attention"]

_LIBRARIES: tuple[HostLibrary, ...] = (TorchMultihead(), Timm(), HuggingFace())


class FoundModule(NamedTuple):
    """An attention module, and the library it belongs to."""

    name: str
    module: nn.Module
    library: HostLibrary | None


def find_attentions(model: nn.Module) -> Iterator[FoundModule]:
    """Yield the innermost attention modules, also those of unknown libraries."""
    found: list[FoundModule] = []
    for name, module in model.named_modules():
        if any(_is_inside(name, f.name) for f in found if f.library):
            continue
        library = next((one for one in _LIBRARIES if one.matches(module)), None)
        # a user of an unknown library must see why its layers are not converted
        is_named = re.search(r"Atten|Attn", type(module).__name__) is not None
        if library is not None or (is_named and any(True for _ in module.parameters())):
            found.append(FoundModule(name, module, library))
    for one in found:
        if one.library is not None or not any(_is_inside(f.name, one.name) for f in found):
            yield one


def _is_inside(name: str, outer: str) -> bool:
    """Return whether a module is inside another one; the name of the model itself is empty."""
    return name != outer and (not outer or name.startswith(f"{outer}."))


def read_attention(module: nn.Module) -> AttentionParts:
    """Return the weights and sizes of an attention module of another library.

    Example:
        >>> read_attention(nn.MultiheadAttention(16, 2)).head_dim
        8
    """
    for library in _LIBRARIES:
        if library.matches(module):
            parts = library.read(module)
            parts.check()
            return parts
    raise ConversionError(
        f"{type(module).__name__} has an unknown signature: it belongs to no supported library."
    )
