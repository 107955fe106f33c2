"""A step of pre-training: every objective has a pass of its own, and all passes run as one batch.

The losses are in ``objectives.py``.
"""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from primal_attention.tasks.pairs.config import Objective
from primal_attention.tasks.pairs.objectives import (
    IGNORED,
    contrastive_pair_loss,
    draw_negatives,
    draw_seeds,
    feature_loss,
    feature_variance,
    group_mask,
    mask_words,
    matching_loss,
    random_mask,
    word_loss,
)
from primal_attention.tasks.pairs.outputs import SimilarityNotice, Text, VisualParserOutput
from primal_attention.tasks.pairs.parser import Parsed
from primal_attention.tasks.pairs.rows import cosine_rows

if TYPE_CHECKING:
    from primal_attention.tasks.pairs.model import VisualParser

__all__ = ["Request", "hide_tokens", "pretrain"]

_LARGEST_SCALE = 100.0
"""Bound of the inverse temperature of contrast."""


class Request(NamedTuple):
    """A batch and what to compute of it."""

    parsed: Parsed
    text: Text
    matched: Bool[Tensor, " b"] | None
    """Which texts belong to their images; ``None`` if all do."""
    objectives: tuple[str, ...]
    hard: Any = None
    """Mismatched texts, or a function that makes them."""

    @property
    def counts(self) -> Bool[Tensor, " b"]:
        """``True`` where hidden words and features count."""
        if self.matched is not None:
            return self.matched.bool()
        return torch.ones(len(self.text.ids), dtype=torch.bool, device=self.text.ids.device)


class _Found(NamedTuple):
    """Result of one objective."""

    loss: Float[Tensor, ""]
    score: Tensor | None = None
    logits: Tensor | None = None
    matched: Tensor | None = None


class _Pass(NamedTuple):
    """One pass through the joint encoder, and what to do with its stream."""

    text: Text
    image: Float[Tensor, "b n c"]
    finish: Callable[[Tensor], _Found]


class _Contrast(NamedTuple):
    """Texts and images apart."""

    text: Float[Tensor, "b c"]
    image: Float[Tensor, "b c"]
    similarity: Float[Tensor, "b b"]
    """Of image ``i`` and text ``j``."""
    loss: Float[Tensor, ""]
    terms: dict[str, Tensor]


def pretrain(model: "VisualParser", request: Request) -> VisualParserOutput:
    """Return the losses of a batch.

    Args:
        model: The model.
        request: The batch.
    """
    _check(model, request.objectives)
    parsed = request.parsed
    visual = parsed.features
    contrast = _contrast(model, request) if "itc" in request.objectives else None
    image = model.embed_image(visual)
    text, hard = _same_length(request.text, request.hard)
    request = request._replace(text=text, hard=hard)
    passes: dict[str, _Pass] = {}
    if "itm" in request.objectives:
        passes["itm"] = _matching(model, request, image, contrast)
    if "mlm" in request.objectives:
        passes["mlm"] = _words(model, request, image)
    if "mfr" in request.objectives:
        passes["mfr"] = _features(model, request)
    found, terms = _run(model, passes)
    losses = {name: one.loss for name, one in found.items()}
    terms = {**parsed.terms, **terms}
    if contrast is not None:
        losses["itc"] = contrast.loss
        terms |= contrast.terms
    losses = {name: losses[name] for name in request.objectives}
    return VisualParserOutput(
        loss=model.weigh(losses),
        losses=losses,
        logits=found["itm"].logits if "itm" in found else None,
        matched=found["itm"].matched if "itm" in found else None,
        text_features=None if contrast is None else contrast.text,
        image_features=None if contrast is None else contrast.image,
        visual=visual,
        scores={name: one.score for name, one in found.items() if one.score is not None},
        variance=feature_variance(visual),
        aux_loss=model.publish_all(terms),
    )


def _check(model: "VisualParser", objectives: tuple[str, ...]) -> None:
    if wrong := sorted(set(objectives) - set(get_args(Objective))):
        raise ValueError(
            f"objectives has {wrong[0]!r}; known are {', '.join(get_args(Objective))}."
        )
    is_hard = model.config.negatives == "in-batch-hard" and "itm" in objectives
    if is_hard and "itc" not in objectives:
        raise ValueError(
            "negatives='in-batch-hard' needs the similarity of texts and images; add 'itc' to the "
            f"objectives {objectives}."
        )


def _run(
    model: "VisualParser", passes: dict[str, _Pass]
) -> tuple[dict[str, _Found], dict[str, Tensor]]:
    """Return the results of all passes, from one run of the joint encoder."""
    if not passes:
        return {}, {}
    ids, keep, image = (
        torch.cat(parts)
        for parts in zip(*((*one.text, one.image) for one in passes.values()), strict=True)
    )
    hidden, terms = model.join(*model.together(Text(ids, keep), image))
    streams = hidden.chunk(len(passes))
    found = {
        name: one.finish(stream)
        for (name, one), stream in zip(passes.items(), streams, strict=True)
    }
    return found, terms


def _matching(
    model: "VisualParser", request: Request, image: Tensor, contrast: _Contrast | None
) -> _Pass:
    """Return the pass of pairs of which half do not match."""
    text, matched = request.text, request.counts
    if request.matched is None:
        similarity = None
        if model.config.negatives == "in-batch-hard" and contrast is not None:
            similarity = contrast.similarity
        ids, keep, matched = draw_negatives(*text, similarity=similarity, texts=request.hard)
        text = Text(ids, keep)

    def finish(hidden: Tensor) -> _Found:
        logits = model.match_logits(hidden)
        score = ((logits.detach() > 0) == matched).float().mean()
        return _Found(matching_loss(logits, matched), score, logits, matched)

    return _Pass(text, image, finish)


def _words(model: "VisualParser", request: Request, image: Tensor) -> _Pass:
    """Return the pass of hidden words."""
    config = model.config
    ids, labels = mask_words(
        *request.text,
        vocab_size=config.vocab_size,
        mask_id=config.mask_token_id,
        special_ids=config.special_ids,
        share=config.mask_share,
    )
    chosen = (labels != IGNORED) & request.counts[:, None]

    def finish(hidden: Tensor) -> _Found:
        logits, wanted = model.word_head(hidden[:, : ids.shape[1]][chosen]), labels[chosen]
        hits = (logits.detach().argmax(-1) == wanted).sum()
        return _Found(word_loss(logits, wanted), hits / chosen.sum().clamp_min(1))

    return _Pass(Text(ids, request.text.keep), image, finish)


def _features(model: "VisualParser", request: Request) -> _Pass:
    """Return the pass of hidden visual tokens; the text is complete."""
    visual = request.parsed.features
    hidden_tokens = hide_tokens(model, request.parsed)
    image = model.embed_image(visual, hidden_tokens)
    counted = hidden_tokens & request.counts[:, None]
    start = request.text.ids.shape[1]

    def finish(hidden: Tensor) -> _Found:
        guess = model.feature_head(hidden[:, start:])
        return _Found(feature_loss(guess, visual, counted, distance=model.config.mfr_distance))

    return _Pass(request.text, image, finish)


def hide_tokens(model: "VisualParser", parsed: Parsed) -> Bool[Tensor, "b n"]:
    """Return which visual tokens to hide.

    Groups come from the parser's attention of the seeds, or from cosine similarity if it has none;
    the first time this is said in a :class:`SimilarityNotice`.

    Args:
        model: The model.
        parsed: Its visual tokens.
    """
    config, visual = model.config, parsed.features
    (b, n, _), device = visual.shape, visual.device
    group = min(config.mfr_group, n)
    seeds = draw_seeds(b, n, share=config.mfr_share, group=group, device=device)
    if config.mfr_masks == "random":
        return random_mask(b, n, min(n, seeds.shape[1] * group), device=device)
    if parsed.rows is not None:
        return group_mask(parsed.rows(seeds), seeds, group)
    if not model.has_noticed:
        model.has_noticed = True
        warnings.warn(
            f"The parser {config.parser!r} gives no attention, so visual tokens are grouped by "
            "cosine similarity. Set mfr_masks='random' to draw them at random.",
            SimilarityNotice,
            stacklevel=2,
        )
    return group_mask(cosine_rows(visual, seeds), seeds, group)


def _contrast(model: "VisualParser", request: Request) -> _Contrast:
    """Return texts and images apart, their similarities and the loss of matched pairs."""
    text, terms = model.text_vectors(request.text)
    image = model.image_vectors(request.parsed.features)
    scale = model.log_scale.exp().clamp_max(_LARGEST_SCALE)
    words = torch.where(request.text.keep, request.text.ids, -1)[request.counts]
    same = (words[:, None] == words[None]).all(-1)
    loss = contrastive_pair_loss(image[request.counts], text[request.counts], scale, same=same)
    similarity = (scale * (image @ text.mT)).detach()
    return _Contrast(text, image, similarity, loss, terms)


def _same_length(text: Text, hard: object) -> tuple[Text, Any]:
    """Return texts and given mismatched texts, padded to one length."""
    if not isinstance(hard, Text):
        return text, hard
    n = max(text.ids.shape[1], hard.ids.shape[1])
    return tuple(  # type: ignore[return-value]
        Text(*(pad(t, (0, n - t.shape[1])) for t in one)) for one in (text, hard)
    )
