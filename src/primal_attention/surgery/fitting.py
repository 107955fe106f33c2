"""Fit the last linear map of converted layers to the originals by ridge regression."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.attention import Attention, MultiHeadAttention, PrimalAttention
from primal_attention.hosts import Batch, ModuleCall, record_calls
from primal_attention.surgery.recording import (
    Recording,
    differing_layers,
    real_tokens,
    record_layers,
    replay_call,
)
from primal_attention.training.evaluation import eval_mode

__all__ = ["fit_outputs", "fit_recorded"]


class _NormalEquations:
    """Normal equations of a linear map, in float64; one system for each head if heads differ.

    ``weight`` and ``bias`` are views of the map's parameters, ``[h o k]`` and ``[h o]``. Tokens are
    split into two folds, so that the ridge can be chosen by cross-validation.
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

    def solve(self, ridge: float | None) -> bool:
        """Add the solution to the map, unless it does not help on the other fold.

        Returns:
            Whether the map was changed.
        """
        if ridge is None:
            errors = {one: self._unseen_error(one) for one in _RIDGES}
            ridge = min(errors, key=errors.__getitem__)
            if errors[ridge] >= 0:
                return False
        k = self.weight.shape[-1]
        change = self._change(self.gram.sum(0), self.cross.sum(0), ridge)
        self.weight += change[:, :k].mT.to(self.weight)
        if self.bias is not None:
            self.bias += change[:, k].to(self.bias)
        return bool(change.any())

    def _change(self, gram: Tensor, cross: Tensor, ridge: float) -> Float[Tensor, "h k o"]:
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        mean = diagonal[:, : self.weight.shape[-1]].mean(-1, keepdim=True).clamp_min(1e-12)
        shifted = gram + torch.diag_embed((ridge * mean).expand_as(diagonal))
        factor, info = torch.linalg.cholesky_ex(shifted)
        # equal features give a singular matrix: the map of that head is not changed
        solved = torch.cholesky_solve(cross, factor)
        return torch.where((info == 0)[:, None, None], solved, 0.0)

    def _unseen_error(self, ridge: float) -> float:
        """Return the change of the squared error on each fold after a fit on the other."""
        # ‖y − z A‖² − ‖y‖² = tr(Aᵀ zᵀz A) − 2 tr(Aᵀ zᵀy): the sums tell it without the tokens
        total = 0.0
        for mine, other in ((0, 1), (1, 0)):
            change = self._change(self.gram[mine], self.cross[mine], ridge)
            quadratic = (change * (self.gram[other] @ change)).sum()
            total += float(quadratic - 2 * (change * self.cross[other]).sum())
        return total


_RIDGES = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)
"""Ridges to choose from, relative to the mean square of the features."""


@torch.no_grad()
def fit_outputs(
    model: nn.Module,
    teacher: nn.Module,
    data: Sequence[Batch],
    *,
    names: Sequence[str] | None = None,
    ridge: float | None = None,
) -> list[str]:
    """Fit the last linear map of each converted layer in closed form; return the layers changed.

    This is the output map. If another module holds it (BERT), it is the value map of each head, or
    the map of a primal layer from scores to heads. Layers with none of these are not changed, nor
    are layers that a fit does not help on other tokens.

    Args:
        model: The converted model; changed in place.
        teacher: The original.
        data: A few batches; ten times as many tokens as the model is wide are enough.
        names: Layers; all converted ones unless given.
        ridge: Strength of the shrinkage towards the present weights, relative to the mean square of
            the features; chosen by two-fold cross-validation unless given.
    """
    names = differing_layers(model, teacher) if names is None else names
    calls = ((batch, record_layers(teacher, names, batch)) for batch in data)
    return fit_recorded(model, calls, ridge=ridge)


@torch.no_grad()
def fit_recorded(
    model: nn.Module, recordings: Iterable[Recording], *, ridge: float | None = None
) -> list[str]:
    """Do :func:`fit_outputs` with recorded calls of the original."""
    systems: dict[str, _NormalEquations | None] = {}
    with eval_mode(model):
        for batch, calls in recordings:
            for name, call in calls.items():
                if name in systems and systems[name] is None:
                    continue
                systems[name] = _collect(model, name, call, batch, systems.get(name))
    return [name for name, system in systems.items() if system is not None and system.solve(ridge)]


def _collect(
    model: nn.Module, name: str, call: ModuleCall, batch: Batch, system: _NormalEquations | None
) -> _NormalEquations | None:
    """Add one batch to the equations of a layer; return ``None`` if it has no map to fit."""
    layer = model.get_submodule(name)
    names = [n for n, m in layer.named_modules() if isinstance(m, nn.Linear | Attention)]
    with record_calls(layer, names, {}) as calls:
        answer = replay_call(model, name, call)
    seen = {layer.get_submodule(inner): found for inner, found in calls.items()}
    real, missing = real_tokens(batch, answer), call.output - answer
    # the last map is the one whose output is that of the layer; others may have its shape
    for module, (args, _, out) in seen.items():
        if (
            isinstance(module, nn.Linear)
            and out.shape == answer.shape
            and torch.equal(out[real], answer[real])
        ):
            bias = None if module.bias is None else module.bias.data[None]
            system = system or _NormalEquations(module.weight.data[None], bias)
            system.add(args[0][real][None], missing[real][None])
            return system
    for module in seen:
        if isinstance(module, Attention) and isinstance(module.out_proj, nn.Identity):
            return _collect_inside(module, seen, real, missing, system)
    return None


def _collect_inside(
    layer: Attention,
    seen: Mapping[nn.Module, ModuleCall],
    real: Tensor,
    missing: Tensor,
    system: _NormalEquations | None,
) -> _NormalEquations | None:
    """Add one batch to the equations of a layer without an output map of its own."""
    heads = layer.num_heads

    def rows(x: Tensor) -> Tensor:
        return x.transpose(0, 1)[:, real]  # [h t k]

    if isinstance(layer, PrimalAttention):
        if layer.concat not in seen:
            return None
        # all heads share one map, so their rows belong to one system; token by token, because its
        # halves are the folds, and a half of the heads says nothing about the others
        z, y = rows(seen[layer.concat].args[0]), rows(_heads(missing, heads))
        bias = None if layer.concat.bias is None else layer.concat.bias.data[None]
        system = system or _NormalEquations(layer.concat.weight.data[None], bias)
        system.add(*(t.transpose(0, 1).flatten(0, 1)[None] for t in (z, y)))
        return system
    if not isinstance(layer, MultiHeadAttention) or getattr(layer.core, "post", "") == "power":
        return None
    # a head is linear in its values: mix the tokens first, then fit the value map
    args, kwargs, _ = seen[layer]
    with _whole_tokens_as_values(layer):
        z = _heads(layer(*args, **kwargs), heads)
    bias = layer.v_proj.bias
    system = system or _NormalEquations(
        layer.v_proj.weight.data.unflatten(0, (heads, -1)),
        None if bias is None else bias.data.unflatten(0, (heads, -1)),
    )
    system.add(rows(z), rows(_heads(missing, heads)))
    return system


@contextmanager
def _whole_tokens_as_values(layer: MultiHeadAttention) -> Iterator[None]:
    """Let every head mix whole tokens instead of its values, inside the context."""
    projection = layer.v_proj
    layer.v_proj = _Repeat(layer.kv_heads)  # type: ignore[assignment]
    try:
        yield
    finally:
        layer.v_proj = projection


class _Repeat(nn.Module):
    """Every token, once for each head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n hc"]:
        return x.repeat(1, 1, self.heads)


def _heads(x: Float[Tensor, "b n c"], heads: int) -> Float[Tensor, "b h n d"]:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)
