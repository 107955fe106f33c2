"""A sweep over depth at equal size, to check the rule on one's own data.

For each budget the width follows from the depth so that all models have the same number of
parameters in their blocks. All see the same batches. The learning rate is tuned for each budget and
scaled with ``1/√d``. A parabola in ``log L`` through the losses gives the best depth.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from primal_attention.analysis.depth.blocks import Block
from primal_attention.models import CausalDecoder, DecoderConfig, DepthNotice
from primal_attention.models.depth_rule import optimal_depth
from primal_attention.training.evaluation import eval_mode
from primal_attention.training.optimization import parameter_groups

__all__ = [
    "BestDepth",
    "SweepRun",
    "SweepShape",
    "SweepText",
    "fit_best_depth",
    "iso_shape",
    "sweep",
    "train_shape",
    "validation_rows",
]

_HEAD = 16
"""Width of a head; widths are multiples of it."""
_RATES = (1e-3, 2e-3, 4e-3)
"""Learning rates to choose from, at width 128."""


class SweepShape(NamedTuple):
    """A decoder of a given size."""

    layers: int
    width: int
    hidden: int
    """Width inside the perceptron, which takes up what rounding the width leaves."""
    params: int
    """Parameters in the blocks."""


def iso_shape(budget: float, layers: int) -> SweepShape:
    """Return the decoder of this depth whose blocks have ``budget`` parameters, within 2 %.

    Args:
        budget: Parameters in the blocks.
        layers: Depth.

    Example:
        >>> [iso_shape(1e6, layers)[:2] for layers in (1, 2, 6)]
        [(1, 288), (2, 208), (6, 112)]
    """
    block = Block()
    share = budget / layers
    width = max(_HEAD, round(math.sqrt(share / 12) / _HEAD) * _HEAD)
    hidden = max(1, round(block.hidden_for(width, share)))
    params = round(layers * block.params(width, hidden))
    if abs(params / budget - 1) > 0.02:
        raise ValueError(
            f"a budget of {budget:g} parameters is too small for {layers} layers; take fewer "
            "layers or a larger budget."
        )
    return SweepShape(layers, width, hidden, params)


class SweepText(NamedTuple):
    """Token ids to train on and to validate with."""

    train: Int[Tensor, " n"]
    valid: Int[Tensor, " m"]
    vocab: int
    """Distinct token ids."""


def train_shape(
    shape: SweepShape,
    text: SweepText,
    *,
    rate: float,
    steps: int,
    seed: int,
    context: int = 128,
    batch: int = 16,
) -> float:
    """Return the best validation loss of a decoder in a short training, in nats a token.

    Args:
        shape: Shape of the decoder.
        text: Training and validation tokens.
        rate: Peak learning rate at width 128; multiplied by ``√(128 / d)``.
        steps: Optimizer steps.
        seed: Seed of weights and batches; equal seeds see equal batches at every depth.
        context: Tokens of a sequence.
        batch: Sequences of a step.
    """
    model = _decoder(shape, text.vocab, seed)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), betas=(0.9, 0.95))
    peak, warm = rate * math.sqrt(128 / shape.width), max(1, steps // 10)
    order = torch.Generator().manual_seed(seed)
    best = math.inf
    for step in range(steps):
        fall = 0.55 + 0.45 * math.cos(math.pi * max(0, step - warm) / max(1, steps - warm))
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1.0, (step + 1) / warm) * fall
        start = torch.randint(len(text.train) - context, (batch, 1), generator=order)
        tokens = text.train[start + torch.arange(context + 1)].long()
        optimizer.zero_grad()
        _loss(model, tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % max(1, steps // 4) == 0 or step + 1 == steps:
            best = min(best, _validate(model, text.valid, context, batch))
    return best


def _decoder(shape: SweepShape, vocab: int, seed: int) -> CausalDecoder:
    config = DecoderConfig(
        vocab_size=vocab,
        dim=shape.width,
        num_heads=shape.width // _HEAD,
        num_layers=shape.layers,
        hidden_dim=shape.hidden,
        attention="softmax",
        dropout=0.0,
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # a sweep builds unusual shapes on purpose
        warnings.simplefilter("ignore", DepthNotice)
        torch.manual_seed(seed)
        return CausalDecoder(config)


def _loss(model: nn.Module, tokens: Int[Tensor, "b n"]) -> Tensor:
    logits = model(tokens[:, :-1]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def _validate(model: nn.Module, valid: Int[Tensor, " m"], context: int, batch: int) -> float:
    tokens = validation_rows(valid, context)
    with eval_mode(model):
        parts = [(_loss(model, part), len(part)) for part in tokens.split(batch)]
    return float(sum(loss * size for loss, size in parts)) / len(tokens)


def validation_rows(valid: Int[Tensor, " m"], context: int) -> Int[Tensor, "rows n"]:
    """Return the first 128 sequences of the validation tokens, each with one token more.

    Args:
        valid: Validation tokens.
        context: Tokens of a sequence.

    Example:
        >>> validation_rows(torch.arange(10), 4).tolist()
        [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    """
    rows = min(len(valid) // (context + 1), 128)
    if rows == 0:
        raise ValueError(
            f"there are {len(valid)} validation tokens, fewer than one sequence of {context} and "
            "its next token; give a longer text or a shorter context."
        )
    return valid[: rows * (context + 1)].reshape(rows, context + 1).long()


class BestDepth(NamedTuple):
    """Where the loss is lowest, by a parabola in the logarithm of the depth."""

    depth: float
    """Best depth; the nearest end of the tested range if the minimum is outside."""
    low: float
    """Lower end of the interval of 90 % over seeds; the same as ``depth`` with one seed."""
    high: float
    """Upper end."""
    is_inside: bool
    """Whether the parabola has its minimum between the tested depths."""


def fit_best_depth(losses: Mapping[int, Sequence[float]], *, draws: int = 500) -> BestDepth:
    """Return the best depth by the losses of each depth, with a bootstrap interval over seeds.

    Args:
        losses: Losses by depth, one for each seed, in the same order of seeds.
        draws: Bootstrap samples.

    Example:
        >>> fit_best_depth({1: [2.0], 2: [1.5], 4: [1.4], 8: [1.7]}).is_inside
        True
    """
    depths = sorted(losses)
    counts = {len(losses[depth]) for depth in depths}
    if len(depths) < 3 or len(counts) != 1 or 0 in counts:
        raise ValueError(
            f"the losses must have three depths or more with equally many seeds, got depths "
            f"{depths} with {sorted(counts)} seeds."
        )
    table = np.array([losses[depth] for depth in depths])  # [depths seeds]
    best, is_inside = _lowest(depths, table.mean(1))
    seeds, rng = table.shape[1], np.random.default_rng(0)
    found = [best]
    if seeds > 1:
        picks = rng.integers(0, seeds, (draws, seeds))
        found = [_lowest(depths, table[:, pick].mean(1))[0] for pick in picks]
    low, high = np.quantile(found, [0.05, 0.95])
    return BestDepth(best, float(low), float(high), is_inside)


def _lowest(depths: Sequence[int], losses: np.ndarray) -> tuple[float, bool]:
    x = np.log(depths)
    curve, slope, _ = np.polyfit(x, losses, 2)
    place = -slope / (2 * curve) if curve > 0 else math.nan
    if x[0] <= place <= x[-1]:
        return float(np.exp(place)), True
    # a minimum outside, or none: the better end of the parabola
    ends = [np.polyval(np.polyfit(x, losses, 2), end) for end in (x[0], x[-1])]
    return float(depths[0] if ends[0] <= ends[1] else depths[-1]), False


class SweepRun(NamedTuple):
    """A training of the sweep."""

    budget: float
    shape: SweepShape
    seed: int
    rate: float
    """Learning rate at width 128, chosen for the budget."""
    loss: float
    """Best validation loss, in nats a token."""


def sweep(
    text: SweepText,
    *,
    budget: float,
    depths: Sequence[int],
    seed: int = 0,
    steps: int = 300,
    context: int = 128,
    batch: int = 16,
    done: Mapping[int, SweepRun] | None = None,
    report: Callable[[SweepRun], None] = lambda run: None,
) -> list[SweepRun]:
    """Train decoders of one size and several depths; return their validation losses.

    The learning rate is chosen among three, with a third of the steps, at the tested depth nearest
    to the rule.

    Args:
        text: Training and validation tokens; your own data as token ids.
        budget: Parameters in the blocks.
        depths: Depths to compare.
        seed: Seed of weights and batches.
        steps: Optimizer steps of each training.
        context: Tokens of a sequence.
        batch: Sequences of a step.
        done: Finished runs by depth, which are not repeated.
        report: Called with each run when it is finished.

    Example:
        >>> ids = torch.arange(600) % 7
        >>> text = SweepText(ids, ids, vocab=7)
        >>> runs = sweep(text, budget=1e4, depths=(1, 2), steps=3, context=8, batch=2)
        >>> [run.shape.layers for run in runs]
        [1, 2]
    """
    shapes = {layers: iso_shape(budget, layers) for layers in depths}
    settings = {"seed": seed, "context": context, "batch": batch}
    runs = dict(done or {})
    rate = next((run.rate for run in runs.values()), None)
    if rate is None:
        middle = min(depths, key=lambda layers: abs(math.log(layers / optimal_depth(budget))))
        short = max(1, steps // 3)
        losses = [
            train_shape(shapes[middle], text, rate=r, steps=short, **settings) for r in _RATES
        ]
        rate = _RATES[losses.index(min(losses))]
    for layers, shape in shapes.items():
        if layers in runs:
            continue
        loss = train_shape(shape, text, rate=rate, steps=steps, **settings)
        runs[layers] = SweepRun(budget, shape, seed, rate, loss)
        report(runs[layers])
    return [runs[layers] for layers in depths]
