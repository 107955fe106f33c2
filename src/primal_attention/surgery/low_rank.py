"""Train converted layers by low-rank changes of their projections (Hu et al. 2021, 2106.09685)::

    with low_rank_changes(layers, rank=8, seed=0) as trained:
        ...                              # train the parameters of these modules
    # the changes are part of the weights now; no adapter is left

The adapters are those of ``peft``. A layer has ``W + 2 B A`` in place of ``W``; ``B`` starts at
zero. The other parameters of the layers, such as learned features, are trained as they are.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from primal_attention.attention import Attention
from primal_attention.support.command import needs
from primal_attention.support.randomness import isolated

__all__ = ["low_rank_changes", "new_parts"]

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
_SCALE = 2
"""Factor of a low-rank change: the ``alpha / rank`` of peft."""


def new_parts(layers: nn.Module) -> nn.ModuleList:
    """Return what the attentions inside a module have besides their four projections.

    Example:
        >>> from primal_attention.attention import create_attention
        >>> parts = new_parts(create_attention("window-linear", 8, 2))
        >>> sorted(name for name, _ in parts.named_parameters())[0]
        '0.features.center_levels'
    """
    found = nn.ModuleList()
    for layer in _attentions(layers):
        own = nn.ParameterDict(dict(layer.named_parameters(recurse=False)))
        parts = [part for name, part in layer.named_children() if name not in _PROJECTIONS]
        found.extend(part for part in (own, *parts) if any(True for _ in part.parameters()))
    return found


@contextmanager
def low_rank_changes(layers: nn.ModuleList, rank: int, seed: int) -> Iterator[nn.ModuleList]:
    """Give the modules to train in place of the projections; merge the changes at the end.

    If the context ends with an error, the projections are as they were.

    Args:
        layers: Layers with attentions of this library.
        rank: Rank of the change of each projection.
        seed: Seed of the start.

    Raises:
        MissingPackageError: If ``peft`` is not installed.
    """
    with needs("lora", "low-rank training of the projections"):
        from peft import LoraConfig, inject_adapter_in_model
    attentions = set(_attentions(layers))
    names = [
        f"{name}.{part}"
        for name, module in layers.named_modules()
        if module in attentions
        for part in _PROJECTIONS
        if isinstance(getattr(module, part, None), nn.Linear)
    ]
    parts = new_parts(layers)
    pattern = "|".join(map(re.escape, names))
    config = LoraConfig(r=rank, lora_alpha=_SCALE * rank, target_modules=pattern)
    with isolated(seed):
        inject_adapter_in_model(config, layers)
    adapters = {name: layers.get_submodule(name) for name in names}
    try:
        yield nn.ModuleList(
            [*parts, *(nn.ModuleList([a.lora_A, a.lora_B]) for a in adapters.values())]  # type: ignore[list-item]
        )
        for adapter in adapters.values():
            adapter.merge()  # type: ignore[operator]
    finally:
        for name, adapter in adapters.items():
            layers.set_submodule(name, adapter.get_base_layer())  # type: ignore[operator]


def _attentions(layers: nn.Module) -> list[Attention]:
    return [module for module in layers.modules() if isinstance(module, Attention)]
