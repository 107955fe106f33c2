"""Search in two stages: unit vectors find candidates, the joint encoder reads them with the query.

Mismatched texts of the training are drawn in proportion to ``exp(τ cos)``, the first stage of that
moment. The best matching logit is then what the first stage does not know yet:

    logit = log p(pair) − log p(mismatch) = log p(pair) − τ cos + const

So the sum ``logit + τ cos`` orders candidates, and not the logit alone. With mismatches drawn at
random the logit itself does.
"""

from typing import Any, NamedTuple, Protocol, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from primal_attention.tasks.pairs.heads import PairSearch
from primal_attention.tasks.pairs.model import VisualParser
from primal_attention.training.evaluation import eval_mode

__all__ = ["Found", "Rerank", "find_images", "find_texts", "pair_scores", "similarity_weight"]

_LARGEST_WEIGHT = 100.0
"""Bound of the inverse temperature, as in training."""


class Rerank(Protocol):
    """What orders the results of a search anew, from their vectors alone."""

    def rerank(self, xq: object, xb: object, ids: object) -> Any:
        """Return the results of queries in a better order, as ``ids`` and ``scores``.

        Args:
            xq: Vectors of the queries [queries, width].
            xb: Vectors of all items [items, width].
            ids: Results of each query [queries, results], best first.
        """


class Found(NamedTuple):
    """Candidates of every query, best first."""

    ids: Int[Tensor, "q k"]
    scores: Float[Tensor, "q k"]
    """Matching logit plus weighted cosine: a log-odds up to a constant."""
    cosines: Float[Tensor, "q k"]
    """Cosine of the first stage."""


def similarity_weight(model: VisualParser) -> float:
    """Return the weight of the cosine in the score of a pair.

    Example:
        >>> similarity_weight(VisualParser.from_config("tiny"))  # mismatches at random
        0.0
    """
    if model.config.negatives != "in-batch-hard":
        return 0.0
    return float(model.log_scale.detach().exp().clamp_max(_LARGEST_WEIGHT))


@torch.no_grad()
def find_images(
    search: PairSearch, input_ids: Int[Tensor, "q n"], keep: Tensor, candidates: int
) -> Found:
    """Return the best images of texts.

    Args:
        search: Has the images.
        input_ids: Ids of the texts.
        keep: ``True`` where a token is real.
        candidates: Results of the first stage, all of which are read with the text.
    """
    model = search.model
    found = search.images_for(input_ids, keep, k=candidates, rerank=candidates)
    with eval_mode(model):
        query = model.encode_text(input_ids, keep)
    return _add_up(model, found.ids, found.scores, query, cast(Tensor, search.image_vectors))


@torch.no_grad()
def find_texts(
    search: PairSearch, pixel_values: Float[Tensor, "q ch H W"], candidates: int
) -> Found:
    """Return the best texts of images.

    Args:
        search: Has the texts.
        pixel_values: The images.
        candidates: Results of the first stage, all of which are read with the image.
    """
    model = search.model
    found = search.texts_for(pixel_values, k=candidates, rerank=candidates)
    with eval_mode(model):
        query = model.encode_image(pixel_values)
    return _add_up(model, found.ids, found.scores, query, cast(Tensor, search.text_vectors))


def _add_up(
    model: VisualParser, ids: Tensor, logits: Tensor, query: Tensor, items: Tensor
) -> Found:
    cosines = torch.einsum("qc,qkc->qk", query, items[ids])
    scores = logits.float() + similarity_weight(model) * cosines.float()
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    return Found(ids.gather(1, order), scores, cosines.gather(1, order))


@torch.no_grad()
def pair_scores(
    model: VisualParser,
    pixel_values: Float[Tensor, "b ch H W"],
    input_ids: Int[Tensor, "b n"],
    keep: Tensor,
) -> Float[Tensor, " b"]:
    """Return the score of every pair, as a search computes it.

    Args:
        model: The model.
        pixel_values: Images.
        input_ids: Ids of their texts.
        keep: ``True`` where a token is real.

    Example:
        >>> model, ids = VisualParser.from_config("tiny"), torch.tensor([[1, 7, 2]])
        >>> pair_scores(model, torch.zeros(1, 3, 32, 32), ids, ids > 0).shape
        torch.Size([1])
    """
    with eval_mode(model):
        output = model(pixel_values, input_ids, keep)
    image, text = cast(Tensor, output.image_features), cast(Tensor, output.text_features)
    return cast(Tensor, output.logits) + similarity_weight(model) * (image * text).sum(1)
