"""Blind scores: how much a model loses without one of its modalities.

Attention is not use: a model can look at an image and ignore it. So the tokens of one modality are
replaced by zeros or by those of another sample, and the score is measured again.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from primal_attention.hosts import Batch, batch_arguments
from primal_attention.training.evaluation import eval_mode

__all__ = ["Ablation", "BlindScore", "blind_scores", "replace_modality"]

Ablation = Literal["zeros", "shuffle"]
ScoreFunction = Callable[[Any, Batch], float]
"""From output and batch to a number; larger is better."""


class BlindScore(NamedTuple):
    """Score of a model with and without one modality."""

    modality: str
    """What was replaced."""
    how: str
    """``"zeros"``, or ``"shuffle"``: by the tokens of another sample."""
    measure: str
    """``"accuracy"``, ``"loss"`` or ``"score"``."""
    full: float
    """With everything."""
    blind: float
    """Without the modality."""

    @property
    def harm(self) -> float:
        """How much is lost without the modality; negative if the model does better."""
        return self.blind - self.full if self.measure == "loss" else self.full - self.blind


def replace_modality(
    batch: Batch,
    ids: Int[Tensor, "b n"],
    modality: int,
    how: Ablation,
    inputs: Sequence[str] = (),
    fill: int = 0,
) -> Batch | None:
    """Return a batch without one modality; ``None`` if no input of the batch holds it.

    Args:
        batch: Inputs of a model.
        ids: Modality of every token of the joint sequence.
        modality: Which one to replace.
        how: ``"zeros"``, or ``"shuffle"`` for the tokens of the sample before.
        inputs: Names of inputs that hold the whole modality and nothing else. Without any, tokens
            are replaced in tensors of shape ``[b, n, …]`` and in ``input_ids``.
        fill: What stands for zero among token ids.

    Example:
        >>> x, ids = torch.ones(1, 3, 1), torch.tensor([[0, 1, 1]])
        >>> replace_modality({"x": x}, ids, 1, "zeros")["x"].flatten()
        tensor([1., 0., 0.])
    """
    args, kwargs = batch_arguments(batch)
    named: dict[Any, object] = dict(enumerate(args)) | kwargs
    changed = {
        name: new
        for name, value in named.items()
        if isinstance(value, Tensor)
        and (new := _replace(name, value, ids, modality, how, inputs, fill)) is not None
    }
    if not changed:
        return None
    named |= changed
    return named if isinstance(batch, Mapping) else tuple(named.values())


def _replace(
    name: int | str,
    value: Tensor,
    ids: Tensor,
    modality: int,
    how: Ablation,
    inputs: Sequence[str],
    fill: int,
) -> Tensor | None:
    """Return an input without the modality; ``None`` if it is to stay."""
    if inputs:
        if name not in inputs or (how == "shuffle" and len(value) != len(ids)):
            return None
        return torch.zeros_like(value) if how == "zeros" else value.roll(1, 0)
    is_words = name == "input_ids"
    is_tokens = value.is_floating_point() and value.ndim >= 2 and value.shape[:2] == ids.shape
    if value.ndim < 2 or not (is_words or (is_tokens and name not in ("attention_mask", "labels"))):
        return None
    here = ids[:, : value.shape[1]] == modality
    # another sample may have another modality in this place: then the token stays
    if how == "shuffle":
        here = here & here.roll(1, 0)
    other = torch.full_like(value, fill if is_words else 0)
    other = other if how == "zeros" else value.roll(1, 0)
    return torch.where(here.reshape(*here.shape, *(1,) * (value.ndim - 2)), other, value)


@torch.no_grad()
def blind_scores(
    model: nn.Module,
    batch: Batch,
    ids: Int[Tensor, "b n"],
    names: Sequence[str],
    *,
    how: Ablation = "zeros",
    inputs: Mapping[int, tuple[str, ...]] | None = None,
    labels: Tensor | None = None,
    score: ScoreFunction | None = None,
    is_causal: bool = False,
) -> list[BlindScore]:
    """Return the score of a model with everything and without each modality.

    Args:
        model: The model; it runs in evaluation mode.
        batch: Its inputs. ``labels`` among them serve as labels.
        ids: Modality of every token; negative for none.
        names: Names of the modalities.
        how: What takes the place of the tokens.
        inputs: Inputs of the model that hold a whole modality, by its number.
        labels: Integer labels, for the accuracy; ``-100`` is ignored.
        score: From output and batch to a number; larger is better. Takes the place of labels.
        is_causal: Whether the logits of a token predict the label of the next one.

    Example:
        >>> x, ids = torch.tensor([[[1.0], [0.0]], [[2.0], [0.0]]]), torch.tensor([[0, 1], [0, 1]])
        >>> total = lambda output, batch: float(output.sum())
        >>> found = blind_scores(torch.nn.Identity(), [x], ids, ["a", "b"], score=total)
        >>> [(one.modality, one.harm) for one in found]
        [('a', 3.0), ('b', 0.0)]
    """
    if how not in ("zeros", "shuffle"):
        raise ValueError(f"ablate must be 'zeros' or 'shuffle', got {how!r}.")
    if how == "shuffle" and len(ids) < 2:
        raise ValueError(
            "ablate='shuffle' takes tokens of another sample, but the batch has one; give two or "
            "more samples, or use ablate='zeros'."
        )
    if labels is None and isinstance(batch, Mapping):
        labels = batch.get("labels")
    config = getattr(model, "config", None)
    fill = getattr(config, "mask_token_id", None) or getattr(config, "pad_token_id", None) or 0
    found = []
    with eval_mode(model):
        measure, full = _measure(model, batch, labels, score, is_causal)
        for number, name in enumerate(names):
            keys = (inputs or {}).get(number, ())
            changed = replace_modality(batch, ids, number, how, keys, fill)
            if changed is None or not bool((ids == number).any()):
                continue
            _, blind = _measure(model, changed, labels, score, is_causal)
            found.append(BlindScore(name, how, measure, full, blind))
    return found


def _measure(
    model: nn.Module,
    batch: Batch,
    labels: Tensor | None,
    score: ScoreFunction | None,
    is_causal: bool,
) -> tuple[str, float]:
    args, kwargs = batch_arguments(batch)
    output = model(*args, **kwargs)
    if score is not None:
        return "score", float(score(output, batch))
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if isinstance(logits, Tensor) and isinstance(labels, Tensor) and not labels.is_floating_point():
        if is_causal and labels.shape == logits.shape[:-1] and labels.ndim == 2:
            logits, labels = logits[:, :-1], labels[:, 1:]
        if labels.shape == logits.shape[:-1]:
            counted = labels != -100
            right = (logits.argmax(-1) == labels) & counted
            return "accuracy", float(right.sum() / counted.sum().clamp_min(1))
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return "loss", float(loss)
    raise ValueError(
        "A blind score needs labels that fit the logits, or a loss of the model; give labels=, or "
        "score=, a function from output and batch to a number."
    )
