"""Separation spectrum of a real model: a diagnostic beside the exact ranks.

Halves of real sequences are recombined on a grid: the first half of sequence ``α`` with the second
half of sequence ``β``. One number of the output makes a matrix ``M[α, β]``. Its rows and columns
are centred, which removes what each half contributes alone. The singular values of the rest show
how many joint patterns of the halves the model reacts to on these data.

This is not the separation rank of the theorem: a real model is no polynomial, the templates are few
and not generic, and a trained model may use less than it could express.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.hosts import Batch, batch_arguments
from primal_attention.hosts.recording import first_tensor
from primal_attention.training.evaluation import eval_mode

__all__ = ["SeparationSpectrum", "grid_spectrum", "separation_spectrum"]

_WORK = 1.2e11
"""Largest number of parameters × tokens × pairs; the grid shrinks for larger models."""
_PROJECTIONS = 8
_BATCH = 32
_Call = tuple[tuple[object, ...], dict[str, object]]
"""Positional and keyword arguments of a forward."""


class SeparationSpectrum(NamedTuple):
    """Singular values of the centred grid, and summaries; medians over projections of the output.

    A grid of ``T × T`` pairs has rank ``T - 1`` at most, because it is centred.
    """

    templates: int
    """Halves on each side, ``T``."""
    tokens: int
    """Tokens of a recombined sequence; 0 for images."""
    values: tuple[float, ...]
    """Singular values, relative to the largest."""
    effective_rank: float
    """Exponential of the entropy of the squared singular values."""
    stable_rank: float
    """Sum of the squared singular values over the largest."""
    rank: int
    """Singular values above 1e-8 of the largest."""
    interaction: float
    """Share of the variance of ``M`` that is left after centring."""

    def rows(self) -> list[list[object]]:
        """Return the rows of a table."""
        where = f"{self.templates} × {self.templates} pairs"
        return [
            ["separation spectrum, grid", where],
            ["separation spectrum, effective rank", f"{self.effective_rank:.1f}"],
            ["separation spectrum, stable rank", f"{self.stable_rank:.1f}"],
            ["separation spectrum, values above 1e-8", self.rank],
            ["variance from both halves jointly", f"{self.interaction:.1%}"],
        ]

    def explain(self) -> str:
        """Return in three sentences what the spectrum is."""
        return (
            "Separation spectrum: first halves of real sequences are joined with second halves of "
            "others, and what each half contributes alone is removed. Its effective rank counts "
            f"joint patterns, at most {self.templates - 1} on this grid. It is a diagnostic on "
            "these data, not the separation rank of the theorem."
        )


def grid_spectrum(grid: Float[Tensor, "k t t"]) -> SeparationSpectrum:
    """Return the spectrum of values on a grid of pairs; medians over the first axis.

    Args:
        grid: One or more matrices ``M[α, β]``.

    Example:
        >>> x, y = torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
        >>> found = grid_spectrum((x[:, None] * y + x[:, None] + y)[None])
        >>> found.rank, round(found.effective_rank, 6)
        (1, 1.0)
    """
    grid = grid.double()
    whole = grid - grid.mean((1, 2), keepdim=True)
    rest = whole - whole.mean(1, keepdim=True) - whole.mean(2, keepdim=True)
    values = torch.linalg.svdvals(rest)
    largest = values[:, :1]
    if not bool((largest > 1e-12 * grid.abs().amax((1, 2))[:, None]).all()):
        # the halves act independently: nothing is left but rounding
        size = grid.shape[-1]
        return SeparationSpectrum(size, 0, (0.0,) * size, 0.0, 0.0, 0, 0.0)
    squares = values.square()
    share = squares / squares.sum(1, keepdim=True)
    entropy = -(share * share.clamp_min(1e-300).log()).sum(1)
    joint = rest.square().sum((1, 2)) / whole.square().sum((1, 2))
    return SeparationSpectrum(
        templates=grid.shape[-1],
        tokens=0,
        values=tuple((values / largest).median(0).values.tolist()),
        effective_rank=float(entropy.exp().median()),
        stable_rank=float((squares.sum(1) / squares[:, 0]).median()),
        rank=int((values > 1e-8 * largest).sum(1).median()),
        interaction=float(joint.median()),
    )


@torch.no_grad()
def separation_spectrum(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    templates: int = 12,
    tokens: int = 64,
) -> SeparationSpectrum:
    """Return the separation spectrum of a model on recombined halves of real sequences.

    The output is read at the last position and projected on eight fixed random directions. A copy
    of the model runs in float64. Large models get a smaller grid, so that it takes seconds.

    Args:
        model: A Transformer that takes ``batches``.
        batches: Inputs of the model; the first ``templates`` sequences that are long enough are
            used. Images ``[b c height width]`` are cut into upper and lower halves.
        templates: Halves on each side, ``T``; there are ``T²`` forwards of one sequence.
        tokens: Largest number of tokens of a recombined sequence.

    Example:
        >>> from primal_attention.models import EncoderClassifier, EncoderConfig
        >>> config = EncoderConfig(num_classes=3, num_features=5, dim=16, attention="softmax")
        >>> found = separation_spectrum(EncoderClassifier(config), [torch.randn(6, 10, 5)])
        >>> found.templates, found.rank
        (6, 5)
    """
    if templates < 3 or tokens < 2:
        raise ValueError(
            f"templates must be at least 3 and tokens at least 2, got {templates} and {tokens}."
        )
    tables = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
    weights = sum(p.numel() for p in model.parameters()) - tables
    items, length = _halves(batches, templates, tokens)
    affordable = int((_WORK / max(weights * max(length, 1), 1)) ** 0.5)
    grid = _grid(model, items[: max(6, affordable)])
    return grid_spectrum(grid)._replace(tokens=length)


def _halves(batches: Sequence[Batch], templates: int, tokens: int) -> tuple[list[_Call], int]:
    """Return inputs of one sequence each, of one length and without padding, and that length.

    Sequences are cut to the shortest of the longest ones. The length of images is 0.
    """
    singles: list[_Call] = []
    for batch in batches:
        args, kwargs = batch_arguments(batch)
        singles += _split(args, kwargs)
    if not singles:
        raise ValueError("batches is empty; the separation spectrum needs sequences.")
    lengths = [_length(args, kwargs) for args, kwargs in singles]
    if lengths[0] == 0:
        items, length = singles[:templates], 0
    else:
        # the longest sequences, so that one short sentence does not cut the others
        order = sorted(range(len(singles)), key=lambda i: (-min(lengths[i], tokens), i))
        chosen = sorted(order[:templates])
        length = min(tokens, *(lengths[i] for i in chosen)) // 2 * 2
        items = [singles[i] for i in chosen]
        if length < 2:
            raise ValueError(
                f"the sequences have {min(lengths)} to {max(lengths)} tokens; the separation "
                "spectrum needs sequences of two tokens or more."
            )
        items = [_map(item, lambda t: t[:, :length]) for item in items]
    if len(items) < 3:
        raise ValueError(f"the separation spectrum needs at least 3 sequences, got {len(items)}.")
    return items, length


def _split(args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[_Call]:
    """Return the sequences of a batch one by one, without padding."""
    tensors = [value for value in (*args, *kwargs.values()) if _has_batch(value)]
    if not tensors:
        raise ValueError("the batch holds no tensor with a batch axis.")
    masks = [v for k, v in kwargs.items() if "mask" in k and _has_batch(v) and v.dim() == 2]
    found = []
    for i in range(tensors[0].shape[0]):
        keep = masks[0][i].bool() if masks else None

        def one(value: Tensor, i: int = i, keep: Tensor | None = keep) -> Tensor:
            row = value[i : i + 1]
            return row if keep is None or row.shape[1] != len(keep) else row[:, keep]

        found.append(_map((args, dict(kwargs)), one))
    return found


def _has_batch(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() >= 2


def _map(item: _Call, change: Callable[[Tensor], Tensor]) -> _Call:
    args, kwargs = item
    return (
        tuple(change(v) if _has_batch(v) else v for v in args),
        {k: change(v) if _has_batch(v) else v for k, v in kwargs.items()},
    )


def _length(args: Sequence[object], kwargs: Mapping[str, object]) -> int:
    first = next(v for v in (*args, *kwargs.values()) if _has_batch(v))
    return 0 if first.dim() == 4 else int(first.shape[1])


def _grid(model: nn.Module, items: list[_Call]) -> Float[Tensor, "k t t"]:
    """Return the projected outputs of all pairs."""
    size = len(items)
    pairs = [(a, b) for a in range(size) for b in range(size)]
    # centring subtracts outputs that are nearly equal: in float32 rounding would remain
    wide = copy.deepcopy(model).double()
    outputs = []
    with eval_mode(wide):
        for start in range(0, len(pairs), _BATCH):
            part = pairs[start : start + _BATCH]
            args, kwargs = _join([items[a] for a, _ in part], [items[b] for _, b in part])
            outputs.append(_read(wide(*args, **kwargs)))
    values = torch.cat(outputs)  # [t·t c]
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(
        values.shape[1], _PROJECTIONS, generator=generator, dtype=torch.float64
    )
    return (values.cpu() @ directions).T.reshape(_PROJECTIONS, size, size)


def _join(first: list[_Call], second: list[_Call]) -> _Call:
    """Return one batch: first halves of some sequences, second halves of others."""

    def glue(left: list[object], right: list[object]) -> object:
        if not _has_batch(left[0]):
            return left[0]
        # the upper and the lower half of images, the earlier and the later one of tokens
        axis = 2 if left[0].dim() == 4 else 1
        half = left[0].shape[axis] // 2
        begin, end = (torch.cat([t for t in side if _has_batch(t)]) for side in (left, right))
        parts = begin.narrow(axis, 0, half), end.narrow(axis, half, end.shape[axis] - half)
        joined = torch.cat(parts, dim=axis)
        return joined.double() if joined.is_floating_point() else joined

    args = tuple(
        glue([item[0][k] for item in first], [item[0][k] for item in second])
        for k in range(len(first[0][0]))
    )
    kwargs = {
        k: glue([item[1][k] for item in first], [item[1][k] for item in second])
        for k in first[0][1]
    }
    return args, kwargs


def _read(output: object) -> Float[Tensor, "b c"]:
    """Return one vector a sequence: the output at the last position, or the output itself."""
    named = (getattr(output, name, None) for name in ("last_hidden_state", "logits"))
    found = next((value for value in named if isinstance(value, Tensor)), None)
    found = first_tensor(output) if found is None else found
    if found.dim() == 3:
        found = found[:, -1]
    return found.flatten(1).double()
