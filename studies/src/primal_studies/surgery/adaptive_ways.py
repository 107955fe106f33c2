"""Ways to read a part of the keys in trained softmax attention, and the models that read so.

The dense sums here compute every score and then hide what a way does not read, so they show
quality, not cost. What the library does itself is taken from the library.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import normalize, pad, scaled_dot_product_attention

from primal_attention.functional.adaptive import adaptive_attention
from primal_attention.functional.adaptive_blocks import CAP, REACH, BlockPlan, block_moments
from primal_studies.kit.pretrained import compare_embeddings, minilm, perplexity, smollm2, wikitext
from primal_studies.kit.texts import imdb_reviews

__all__ = ["Way", "attend", "compare_encoders", "measure_decoder", "reading"]

_TILE = 256
"""Queries whose scores are computed together."""
_NAME = "primal-study-ways"


class Way(NamedTuple):
    """What is read of the keys, and what becomes of the others."""

    plan: BlockPlan
    score: str = "bound"
    """How blocks are chosen: ``"bound"``, ``"mass"`` or ``"mean"``."""
    far: str = "moments"
    """How other blocks enter: by ``"moments"``, ``"means"`` or ``"nothing"``."""


class Share:
    """Counts pairs of queries and keys."""

    def __init__(self) -> None:
        self.read = self.allowed = 0

    @property
    def value(self) -> float:
        """Share of the allowed pairs that was read exactly."""
        return self.read / max(self.allowed, 1)


def attend(
    q: Float[Tensor, "h n d"],
    k: Float[Tensor, "h n d"],
    v: Float[Tensor, "h n v"],
    way: Way,
    is_causal: bool,
    share: Share,
) -> Float[Tensor, "h n v"]:
    """Return the sum of one sequence, and count the pairs that were read.

    Args:
        q: Queries, with the scale inside.
        k: Keys.
        v: Values.
        way: What is read.
        is_causal: Read keys ``j ≤ i`` only.
        share: Counts the pairs.
    """
    plan, n = way.plan, q.shape[1]
    moments = block_moments(k, v, plan)
    num = moments.mean.shape[1]
    sizes = q.new_full((num,), float(plan.block))
    sizes[-1] = n - plan.sinks - plan.block * (num - 1)
    block = (torch.arange(n) - plan.sinks).div(plan.block, rounding_mode="floor").clamp_min(-1)
    found = []
    for start in range(0, n, _TILE):
        rows = torch.arange(start, min(start + _TILE, n))
        stop = int(rows[-1]) + 1 if is_causal else n
        lag = ((rows - plan.sinks) // plan.block).clamp(0, num - 1)[:, None] - torch.arange(num)
        near, far = lag.abs() <= plan.window, lag > plan.window
        far = far if is_causal else ~near
        own = q[:, rows]
        base, steps, square = _project(own, moments.mean, moments.axes)
        capped = square.clamp_max(2 * CAP)
        log_mass = base + (capped / 2 if way.far != "means" else 0) + sizes.log()
        score = {
            "bound": base + REACH * square.sqrt(),
            "mass": base + capped / 2 + sizes.log(),
            "mean": base,
        }[way.score]
        chosen = _chosen(score.masked_fill(~far, -torch.inf), plan.top or 0)
        # the first keys are as a block more, which every query reads
        read = pad(near | chosen, (0, 1), value=True)[..., block[:stop]]
        allowed = (rows[:, None] >= torch.arange(stop)) | (not is_causal)
        read = read & allowed
        share.read += int(read.sum())
        share.allowed += int(allowed.sum()) * len(q)
        exact = (own @ k[:, :stop].mT).masked_fill_(~read, -torch.inf)
        rest = far & ~chosen & (way.far != "nothing")
        log_mass = log_mass.masked_fill(~rest, -torch.inf)
        weights = torch.cat([exact, log_mass], -1).softmax(-1)
        weights, mass = weights[..., :stop], weights[..., stop:]
        y = weights @ v[:, :stop] + mass @ moments.value
        if way.far == "moments":
            steps = steps * (square / (2 * CAP)).clamp_min(1).rsqrt()
            for step, slope in zip(steps, moments.slopes.unbind(2), strict=True):
                y += (step * mass) @ slope
        found.append(y)
    return torch.cat(found, 1)


def _project(q: Tensor, mean: Tensor, axes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores of the means, and lengths along the axes with the sum of their squares."""
    base = q @ mean.mT
    steps = base.new_empty(axes.shape[2], *base.shape)
    for number, axis in enumerate(axes.unbind(2)):
        steps[number] = q @ axis.mT
    return base, steps, steps.square().sum(0)


def _chosen(score: Tensor, top: int) -> Tensor:
    """Return which blocks have the largest scores."""
    chosen = torch.zeros_like(score, dtype=torch.bool)
    best = score.topk(min(top, score.shape[-1]), -1)
    return chosen.scatter_(-1, best.indices, best.values > -torch.inf)


@contextmanager
def reading(model: Any, way: Way | None) -> Iterator[Share]:
    """Return a context in which all layers of a model of transformers read in some way."""
    from transformers import AttentionInterface

    share = Share()

    def forward(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        is_causal = bool(getattr(module, "is_causal", False))
        if way is None:
            y = scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
        elif way.score == "bound" and way.far == "moments":
            y = adaptive_attention(q, k, v, way.plan, is_causal=is_causal)
            count, allowed = pairs(q.shape[2], way.plan, is_causal)
            share.read += count * len(q) * q.shape[1]
            share.allowed += allowed * len(q) * q.shape[1]
        else:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
            q = q * q.shape[-1] ** -0.5
            rows = zip(q, k, v, strict=True)
            y = torch.stack([attend(*row, way, is_causal, share) for row in rows])
        return y.transpose(1, 2), None

    before = model.config._attn_implementation
    AttentionInterface.register(_NAME, forward)
    model.set_attn_implementation(_NAME)
    try:
        yield share
    finally:
        model.set_attn_implementation(before)


def pairs(n: int, plan: BlockPlan, is_causal: bool) -> tuple[int, int]:
    """Return how many pairs of tokens a plan reads exactly, and how many there are."""
    if n <= plan.reach:
        count = n * (n + 1) // 2 if is_causal else n * n
        return count, count
    place = torch.arange(n)
    own = ((place - plan.sinks) // plan.block).clamp_min(0)
    last = plan.num_blocks(n) - 1
    begin = plan.sinks + (own - plan.window).clamp_min(0) * plan.block
    if is_causal:
        far = (own - plan.window).clamp_min(0)
        read = place + 1 - begin + plan.sinks + far.clamp_max(plan.top or 0) * plan.block
        read = torch.where(place < plan.reach, place + 1, read)
        return int(read.sum()), n * (n + 1) // 2
    sizes = torch.full((last + 1,), plan.block)
    sizes[-1] = n - plan.sinks - last * plan.block
    ends = pad(sizes.cumsum(0), (1, 0))
    high, low = (own + plan.window).clamp_max(last), (own - plan.window).clamp_min(0)
    near = ends[high + 1] - ends[low]
    # a choice of the last block, which may be short, counts as a whole one
    far = (last + 1 - (high - low + 1)).clamp_max(plan.top or 0) * plan.block
    return int((near + far + plan.sinks).clamp_max(n).sum()), n * n


def measure_decoder(
    way: Way | None, tokens: int, count: int, split: str, data: Path | None
) -> dict[str, float]:
    """Return the perplexity of SmolLM2 on WikiText-2, and the share of pairs read."""
    model, tokenizer = smollm2()
    # a token has about four characters
    text = wikitext(split, data)[: 8 * tokens * count]
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    sequences = [ids[i * tokens : (i + 1) * tokens][None] for i in range(count)]
    with reading(model, way) as share:
        found = perplexity(model, sequences)
    return {"perplexity": round(found, 3), "read": round(share.value, 4) if way else 1.0}


@torch.no_grad()
def compare_encoders(
    way: Way, tokens: int, count: int, split: str, data: Path | None
) -> dict[str, float]:
    """Return how close outputs of MiniLM on reviews stay to the original, and the pairs read."""
    model, tokenizer = minilm()
    texts = []
    for review in imdb_reviews(split, data):
        ids = tokenizer(review.text, truncation=True, max_length=tokens, return_tensors="pt")
        if ids.input_ids.shape[1] == tokens:
            texts.append(ids)
        if len(texts) == count:
            break
    with reading(model, None):
        original = torch.cat([model(**text).last_hidden_state for text in texts])
    with reading(model, way) as share:
        hidden = torch.cat([model(**text).last_hidden_state for text in texts])
    mine, theirs = (normalize(t.mean(1), dim=-1) for t in (hidden, original))
    error = (hidden - original).square().sum()
    spread = (original - original.mean((0, 1))).square().sum()
    return {
        **compare_embeddings(mine, theirs),
        "lowest": round(float((mine * theirs).sum(1).min()), 4),
        "R²": round(float(1 - error / spread), 4),
        "read": round(share.value, 4),
    }
