"""Layers with an exact window and a linear far part: where to start, and what the far part adds::

    start_at_clusters(model, data)       # slots of learned features start at clusters of keys
    with linear_part_off(model):         # the score that the window alone reaches
        ...

Both work on ``window-linear`` layers, also inside converted models.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.attention import MultiHeadAttention
from primal_attention.attention.windowed import LearnedFar, WindowedCore
from primal_attention.functional.landmarks import kmeans_landmarks
from primal_attention.functional.primal import even_indices
from primal_attention.hosts import Batch, ModuleCall, run_batch
from primal_attention.hosts.recording import watch_modules
from primal_attention.training.evaluation import eval_mode

__all__ = ["linear_part_off", "linear_parts", "start_at_clusters"]

_KEYS_PER_SLOT = 64
"""Keys that are clustered for each slot."""
_LLOYD_STEPS = 10
_FLOOR = 1e-3
"""Least spread of a cluster, relative to the spread of all keys: a cluster of one key has none."""


def linear_parts(model: nn.Module) -> list[str]:
    """Return the names of the attentions of a model that read far keys through a linear part.

    Example:
        >>> from primal_attention.attention import create_attention
        >>> linear_parts(nn.Sequential(create_attention("window-linear", 8, 2)))
        ['0']
    """
    return list(_cores(model))


@contextmanager
def linear_part_off(model: nn.Module) -> Iterator[None]:
    """Let ``window-linear`` layers read their window and first tokens alone, inside the context.

    Args:
        model: A model with such layers, or one layer.

    Raises:
        ValueError: If no layer has a linear part.

    Example:
        >>> from primal_attention.attention import create_attention
        >>> layer, x = create_attention("window-linear", 8, 2, window=4), torch.randn(1, 20, 8)
        >>> with linear_part_off(layer):
        ...     y = layer(x)
        >>> torch.equal(layer(x), y)
        False
    """
    cores = _cores(model)
    if not cores:
        raise ValueError(
            f"{type(model).__name__} has no layer with a linear part; only window-linear layers "
            "with far='learned' or 'favor' have one. Convert the model to 'window-linear' first."
        )
    before = {core: core.reads_far for core in cores.values()}
    try:
        for core in before:
            core.reads_far = False
        yield
    finally:
        for core, reads_far in before.items():
            core.reads_far = reads_far


@torch.no_grad()
def start_at_clusters(model: nn.Module, data: Sequence[Batch]) -> list[str]:
    """Set the slots of learned features to clusters of the keys of each head; return the layers.

    The keys are those that the model has with exact softmax in these layers, after rotary
    positions. Distances are measured by what queries see of them: ``‖x‖² = E (q·x)² / d``. Equal
    data give equal slots.

    Args:
        model: A model with trained ``window-linear`` layers; its learned features are replaced.
        data: A few batches of its inputs; 64 keys for each slot are clustered.

    Raises:
        ValueError: If no layer has learned features, or ``data`` holds no batch.

    Example:
        >>> from primal_attention.attention import create_attention
        >>> layer = create_attention("window-linear", 8, 2, num_features=4)
        >>> start_at_clusters(layer, [torch.randn(1, 50, 8)])
        ['']
    """
    cores = {n: c for n, c in _cores(model).items() if isinstance(c.features, LearnedFar)}
    if not cores:
        raise ValueError(
            f"{type(model).__name__} has no layer with learned features; convert it to "
            "'window-linear' with far='learned' first."
        )
    if len(data) == 0:
        raise ValueError("data holds no batch; pass at least one.")
    windows = {name: core.window for name, core in cores.items()}
    seen: dict[str, list[_Sample]] = {name: [] for name in cores}

    def enter(name: str, call: ModuleCall) -> None:
        core = cores[name]
        # softmax at this length: the keys of the next layer are those of the original
        core.window = call.args[1].shape[2]
        slots = core.features.num_features if core.features is not None else 0
        seen[name].append(_sample(core, call, -(-_KEYS_PER_SLOT * slots // len(data))))

    try:
        with eval_mode(model), watch_modules(cores, enter=enter):
            for batch in data:
                run_batch(model, batch)
    finally:
        for name, core in cores.items():
            core.window = windows[name]
    for name, core in cores.items():
        if isinstance(core.features, LearnedFar):
            _place(core.features, seen[name])
    return list(cores)


def _cores(model: nn.Module) -> dict[str, WindowedCore]:
    """Return the cores with a linear part by the name of their attention."""
    return {
        name: module.core
        for name, module in model.named_modules()
        if isinstance(module, MultiHeadAttention)
        and isinstance(module.core, WindowedCore)
        and module.core.features is not None
    }


class _Sample(NamedTuple):
    """Some keys of one batch, and the second moment of its queries."""

    keys: Float[Tensor, "h m d"]
    moment: Float[Tensor, "h d d"]


def _sample(core: WindowedCore, call: ModuleCall, count: int) -> _Sample:
    q, k, _ = call.args
    b, _, n, _ = k.shape
    mask = call.kwargs.get("key_mask")
    real = torch.ones(b, n, dtype=torch.bool, device=k.device) if mask is None else mask
    far = real & (torch.arange(n, device=k.device) >= core.sinks)  # the first keys stay exact
    queries, keys = q.float().transpose(1, 2)[real], k.float().transpose(1, 2)[far]  # [t h d]
    if count < len(keys):
        keys = keys[even_indices(len(keys), count, keys.device)]
    moment = torch.einsum("thd,the->hde", queries, queries) / max(len(queries), 1)
    return _Sample(keys.transpose(0, 1), moment)


def _place(features: LearnedFar, samples: Sequence[_Sample]) -> None:
    keys = torch.cat([sample.keys for sample in samples], dim=1)  # [h m d]
    d, m = keys.shape[-1], keys.shape[1]
    if m == 0:
        raise ValueError(
            "data hold no token behind the first ones that layers read exactly; give longer inputs."
        )
    metric = torch.stack([sample.moment for sample in samples]).mean(0) / d
    values, vectors = torch.linalg.eigh(metric)
    root = (vectors * values.clamp_min(0).sqrt()[:, None]) @ vectors.mT
    seen = keys @ root  # Euclidean distances are now those of the metric
    start = _spread_out(seen, features.num_features)
    means = kmeans_landmarks(seen[None], start[None], steps=_LLOYD_STEPS)[0]
    nearest = torch.cdist(seen, means).argmin(-1)  # [h m]
    chosen = nn.functional.one_hot(nearest, features.num_features).to(keys.dtype)  # [h m p]
    count = chosen.sum(1)[..., None]
    # an empty cluster takes the mean of all keys
    centers = torch.where(count > 0, chosen.mT @ keys / count.clamp_min(1), keys.mean(1)[:, None])
    left = seen - (chosen @ centers) @ root
    whole = (seen - seen.mean(1, keepdim=True)).square().mean((1, 2))
    spread = left.square().mean((1, 2)).maximum(_FLOOR * whole).clamp_min(1e-12)
    features.place_centers(centers, spread, metric)


def _spread_out(x: Float[Tensor, "h m d"], count: int) -> Float[Tensor, "h {count} d"]:
    """Return some of the rows, drawn by their squared distance to those before (k-means++)."""
    generator = torch.Generator(x.device).manual_seed(0)
    heads, at = torch.arange(len(x), device=x.device), torch.zeros_like(x[:, 0, 0]).long()
    found, distance = [x[heads, at]], torch.full_like(x[..., 0], torch.inf)
    while len(found) < count:
        distance = distance.minimum((x - found[-1][:, None]).square().sum(-1))
        # with fewer different rows than asked for, any row will do
        at = torch.multinomial(distance + 1e-12, 1, generator=generator)[:, 0]
        found.append(x[heads, at])
    return torch.stack(found, dim=1)
