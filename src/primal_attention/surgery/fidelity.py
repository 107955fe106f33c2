"""How close a copy of a model stays to the original, on inputs of any length.

    original = Original(model, batches)
    original.compare(copy).r2

A language model is compared by its last hidden states and by perplexity: its logits at some
thousand tokens would take gigabytes, so they are formed in parts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from primal_attention.hosts import Batch, run_batch
from primal_attention.hosts.recording import first_tensor
from primal_attention.surgery.recording import Variance, real_tokens
from primal_attention.training.evaluation import eval_mode

__all__ = ["Fidelity", "Original", "longest_input"]

_PART = 512
"""Tokens whose logits are formed at once."""


@dataclass(frozen=True)
class Fidelity:
    """How close a copy is to the original."""

    r2: float
    """Explained variance of the model's output; of the last hidden states of a language model."""
    cosine: float | None = None
    """Mean cosine between the mean vectors of the inputs; for models with an output per token that
    are not causal."""
    lowest_cosine: float | None = None
    perplexity: float | None = None
    """Of the copy; for causal language models."""
    original_perplexity: float | None = None

    def words(self) -> str:
        """Return the numbers as a part of a sentence."""
        found = f"R² of the model's output is {self.r2:.3f}"
        if self.perplexity is not None and self.original_perplexity is not None:
            share = self.perplexity / max(self.original_perplexity, 1e-9)
            found += (
                f" and its perplexity {self.perplexity:.2f}, that of the original "
                f"{self.original_perplexity:.2f} ({share:.3f} ×)"
            )
        if self.cosine is not None:
            found += (
                f" and the cosine of mean vectors {self.cosine:.3f} (lowest "
                f"{self.lowest_cosine:.3f})"
            )
        return found


@dataclass(frozen=True)
class _Answer:
    """What a model computes on one batch."""

    output: Float[Tensor, "..."]
    loss: float = 0.0
    """Sum of the negative log-likelihoods of the next tokens."""
    tokens: int = 0
    """Number of tokens that were predicted."""


class Original:
    """Answers of a model on some batches, kept to compare copies with.

    Args:
        model: The original.
        batches: Inputs that no copy was fitted on.
        is_causal: Whether its tokens see earlier ones only.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Batch], *, is_causal: bool) -> None:
        self.batches, self.is_causal = list(batches), is_causal
        self._answers = [_answer(model, batch, is_causal) for batch in self.batches]

    @property
    def perplexity(self) -> float | None:
        """Perplexity; ``None`` if the model is no causal language model."""
        return _perplexity(self._answers)

    def compare(self, model: nn.Module) -> Fidelity:
        """Return how close another model is."""
        spread, cosines, answers = Variance(), [], []
        for batch, theirs in zip(self.batches, self._answers, strict=True):
            mine = _answer(model, batch, self.is_causal)
            keep = real_tokens(batch, theirs.output)
            spread.add(mine.output[keep].flatten(1), theirs.output[keep].flatten(1))
            if theirs.output.dim() == 3 and not self.is_causal:
                pair = _means(mine.output, keep), _means(theirs.output, keep)
                cosines.append(cosine_similarity(pair[0], pair[1], dim=-1))
            answers.append(mine)
        found = torch.cat(cosines) if cosines else None
        return Fidelity(
            spread.r2,
            None if found is None else float(found.mean()),
            None if found is None else float(found.min()),
            _perplexity(answers),
            self.perplexity,
        )


def longest_input(batches: Sequence[Batch]) -> int:
    """Return the number of tokens of the longest input; 0 if inputs are no token numbers."""
    ids = [b["input_ids"] for b in batches if isinstance(b, Mapping) and "input_ids" in b]
    return max((int(i.shape[-1]) for i in ids), default=0)


@torch.no_grad()
def _answer(model: nn.Module, batch: Batch, is_causal: bool) -> _Answer:
    with eval_mode(model):
        head, inner = _language_head(model), getattr(model, "base_model", None)
        if head is None or not isinstance(inner, nn.Module) or inner is model:
            return _Answer(first_tensor(run_batch(model, batch)))
        hidden = first_tensor(run_batch(inner, batch))
        if not is_causal or not isinstance(batch, Mapping) or "input_ids" not in batch:
            return _Answer(hidden)
        return _Answer(hidden, *_surprise(model, inner, head, batch, hidden))


def _language_head(model: nn.Module) -> nn.Module | None:
    """Return the map from hidden states to words; ``None`` if the model has none."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    return head if isinstance(head, nn.Module) else None


def _surprise(
    model: nn.Module, inner: nn.Module, head: nn.Module, batch: Mapping[str, Any], hidden: Tensor
) -> tuple[float, int]:
    """Return the sum of the negative log-likelihoods of the next tokens, and their number."""
    ids = batch["input_ids"]
    keep = real_tokens(batch, hidden)
    following = keep[:, 1:] & keep[:, :-1]
    # some models scale or cap what the head returns
    few = {"input_ids": ids[:1, :8]}
    logits = first_tensor(run_batch(model, few))
    plain = head(first_tensor(run_batch(inner, few)))
    whole = None
    if logits.shape != plain.shape or not torch.allclose(logits, plain, atol=1e-3, rtol=1e-3):
        whole = first_tensor(run_batch(model, batch))
    total = 0.0
    for start in range(0, ids.shape[1] - 1, _PART):
        part = slice(start, min(start + _PART, ids.shape[1] - 1))
        scores = head(hidden[:, part]) if whole is None else whole[:, part]
        real, words = following[:, part], ids[:, 1:][:, part]
        total += float(cross_entropy(scores[real].float(), words[real], reduction="sum"))
    return total, int(following.sum())


def _perplexity(answers: Sequence[_Answer]) -> float | None:
    count = sum(answer.tokens for answer in answers)
    # beyond 700 nats a number overflows; such a model predicts nothing
    return math.exp(min(sum(a.loss for a in answers) / count, 700)) if count else None


def _means(output: Float[Tensor, "b n c"], keep: Bool[Tensor, "b n"]) -> Float[Tensor, "b c"]:
    # where, not multiply: a NaN at padding must not survive
    total = torch.where(keep[..., None], output, 0.0).sum(1)
    return total / keep.sum(1, keepdim=True).clamp_min(1)
