"""The last linear map of a converted layer in closed form, from what the original answered."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.attention import Attention, Core, MultiHeadAttention, PrimalAttention
from primal_attention.attention.multihead import real_first
from primal_attention.surgery.recording import (
    Batch,
    Call,
    Recording,
    ask_again,
    ask_layers,
    differing_layers,
    evaluating,
    real_tokens,
)

__all__ = ["fit_outputs", "fit_recorded"]


class _Normal:
    """The normal equations of a linear map, in float64; one for each head where heads differ.

    ``weight`` and ``bias`` are views of the map's parameters, ``[h o k]`` and ``[h o]``. Tokens are
    kept in two folds, so that the ridge can be chosen on tokens that were not fitted.
    """

    def __init__(self, weight: Float[Tensor, "h o k"], bias: Float[Tensor, "h o"] | None) -> None:
        self.weight, self.bias = weight, bias
        h, out, k = weight.shape
        wide = k + (bias is not None)
        self.gram = torch.zeros(2, h, wide, wide, dtype=torch.float64, device=weight.device)
        self.cross = torch.zeros(2, h, wide, out, dtype=torch.float64, device=weight.device)

    def add(self, z: Float[Tensor, "h t k"], missing: Float[Tensor, "h t o"]) -> None:
        z, missing = z.double(), missing.double()
        if self.bias is not None:
            z = torch.cat([z, torch.ones_like(z[..., :1])], dim=-1)
        for fold, (rows, wanted) in enumerate(zip(z.chunk(2, 1), missing.chunk(2, 1), strict=True)):
            self.gram[fold] += rows.mT @ rows
            self.cross[fold] += rows.mT @ wanted

    def solve(self, ridge: float | None) -> None:
        """Add to the map what the equations say is missing, or nothing if that does not help."""
        if ridge is None:
            ridge = min(_RIDGES, key=self._unseen_error)
            if self._unseen_error(ridge) >= 0:
                return
        k = self.weight.shape[-1]
        change = self._change(self.gram.sum(0), self.cross.sum(0), ridge)
        self.weight += change[:, :k].mT.to(self.weight)
        if self.bias is not None:
            self.bias += change[:, k].to(self.bias)

    def _change(self, gram: Tensor, cross: Tensor, ridge: float) -> Float[Tensor, "h k o"]:
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        mean = diagonal[:, : self.weight.shape[-1]].mean(-1, keepdim=True).clamp_min(1e-12)
        shifted = gram + torch.diag_embed((ridge * mean).expand_as(diagonal))
        factor, info = torch.linalg.cholesky_ex(shifted)
        # features that are all alike leave a matrix without a factor: that head stays as it was
        solved = torch.cholesky_solve(cross, factor)
        return torch.where((info == 0)[:, None, None], solved, 0.0)

    def _unseen_error(self, ridge: float) -> float:
        """Return by how much the squared error changes on each fold after a fit on the other."""
        total = 0.0
        for mine, other in ((0, 1), (1, 0)):
            change = self._change(self.gram[mine], self.cross[mine], ridge)
            quadratic = (change * (self.gram[other] @ change)).sum()
            total += float(quadratic - 2 * (change * self.cross[other]).sum())
        return total


_RIDGES = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)
"""Strengths to choose from, relative to the mean square of the features."""


@torch.no_grad()
def fit_outputs(
    model: nn.Module,
    teacher: nn.Module,
    data: Sequence[Batch],
    *,
    names: Sequence[str] | None = None,
    ridge: float | None = None,
) -> list[str]:
    """Refit the last linear map of each converted layer to the original's answers, closed form.

    That is the output map; where the host model keeps it in another module (BERT), the value map of
    each head, or the map of a primal layer from scores to heads. Layers with none of these are left
    as they are.

    Args:
        model: The converted model; changed in place.
        teacher: The original.
        data: A few batches; as many tokens as the model is wide, times ten, is plenty.
        names: Layers; all converted ones unless given.
        ridge: Pull towards the present weights, relative to the mean square of the features;
            unless given, what does best on one half of the tokens after a fit on the other.

    Returns:
        The names of the layers that were refit.
    """
    names = differing_layers(model, teacher) if names is None else names
    with evaluating(teacher):
        calls = ((batch, ask_layers(teacher, names, batch)) for batch in data)
        return fit_recorded(model, calls, ridge=ridge)


@torch.no_grad()
def fit_recorded(
    model: nn.Module, recordings: Iterable[Recording], *, ridge: float | None = None
) -> list[str]:
    """Do what :func:`fit_outputs` does, from calls of the original that were recorded before."""
    systems: dict[str, _Normal | None] = {}
    with evaluating(model):
        for batch, calls in recordings:
            for name, call in calls.items():
                if name in systems and systems[name] is None:
                    continue
                systems[name] = _collect(model, name, call, batch, systems.get(name))
    for system in systems.values():
        if system is not None:
            system.solve(ridge)
    return [name for name, system in systems.items() if system is not None]


def _collect(
    model: nn.Module, name: str, call: Call, batch: Batch, system: _Normal | None
) -> _Normal | None:
    """Add one batch to the equations of a layer; ``None`` if there is no linear map to refit."""
    layer = model.get_submodule(name)
    seen: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any], Any]] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        seen[module] = args, kwargs, out

    watched = nn.Linear | Core | Attention
    handles = [
        m.register_forward_hook(keep, with_kwargs=True)
        for m in layer.modules()
        if isinstance(m, watched)
    ]
    try:
        answer = ask_again(model, name, call)
    finally:
        for handle in handles:
            handle.remove()
    real, missing = real_tokens(batch, answer), call.output - answer
    for module, (args, _, out) in seen.items():
        if (
            isinstance(module, nn.Linear)
            and out.shape == answer.shape
            and torch.equal(out[real], answer[real])
        ):
            bias = None if module.bias is None else module.bias.data[None]
            system = system or _Normal(module.weight.data[None], bias)
            system.add(args[0][real][None], missing[real][None])
            return system
    for module, (_, kwargs, _) in seen.items():
        if isinstance(module, Attention) and isinstance(module.out_proj, nn.Identity):
            return _collect_inside(module, seen, kwargs.get("key_mask"), real, missing, system)
    return None


def _collect_inside(
    layer: Any,
    seen: Mapping[nn.Module, Any],
    key_mask: Tensor | None,
    real: Tensor,
    missing: Tensor,
    system: _Normal | None,
) -> _Normal | None:
    """Add one batch to the equations of a layer whose host model keeps the output map."""
    heads = layer.num_heads

    def rows(x: Tensor) -> Tensor:
        return x.transpose(0, 1)[:, real]  # [h t k]

    if isinstance(layer, PrimalAttention):
        if layer.concat not in seen:
            return None
        # one map for all heads: their rows are equations of one system
        z, y = rows(seen[layer.concat][0][0]), rows(_heads(missing, heads))
        bias = None if layer.concat.bias is None else layer.concat.bias.data[None]
        system = system or _Normal(layer.concat.weight.data[None], bias)
        system.add(z.flatten(0, 1)[None], y.flatten(0, 1)[None])
        return system
    if not isinstance(layer, MultiHeadAttention) or getattr(layer.core, "post", "") == "power":
        return None
    # heads are linear in their values, so in the map that makes them: average tokens, then map
    (q, k, _), kwargs, _ = seen[layer.core]
    x = seen[layer.v_proj][0][0]
    z = layer.core(q, k, x[:, None].expand(-1, heads, -1, -1), **kwargs)
    if layer.core.ordered and key_mask is not None:
        back = real_first(key_mask).argsort(1)[:, None, :, None]
        z = z.gather(2, back.expand_as(z))
    bias = layer.v_proj.bias
    system = system or _Normal(
        layer.v_proj.weight.data.unflatten(0, (heads, -1)),
        None if bias is None else bias.data.unflatten(0, (heads, -1)),
    )
    system.add(rows(z), rows(_heads(missing, heads)))
    return system


def _heads(x: Float[Tensor, "b n c"], heads: int) -> Float[Tensor, "b h n d"]:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)
