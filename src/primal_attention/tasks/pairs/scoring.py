"""How well a model finds images for texts, texts for images, and tells pairs apart.

R@k is the share of searches with a right result among the first k. Every part is its own gallery:
the fewer images, the easier. The random mismatch of an image is any wrong text, the hard one is the
wrong text that the first stage likes best.
"""

from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from primal_attention.tasks.pairs.heads import PairSearch
from primal_attention.tasks.pairs.model import VisualParser
from primal_attention.tasks.pairs.pairs import PairData, to_pixel_values
from primal_attention.tasks.pairs.searching import find_images, find_texts, pair_scores
from primal_attention.training.evaluation import Evaluation
from primal_attention.training.scores import Answers, Score, Scores

__all__ = [
    "CANDIDATES",
    "PairLists",
    "fit_probability",
    "measure_pairs",
    "score_all",
    "score_pairs",
    "search_pairs",
    "share_score",
]

CANDIDATES = 20
"""Results of the first stage that are read together with the query."""
_SHOWN = 5
_BATCH = 256


class PairLists(NamedTuple):
    """Searches in both directions; -1 where a pair was not searched for."""

    images: NDArray[np.int64]
    """Best images of the text of each pair ``[pairs, 5]``."""
    texts: NDArray[np.int64]
    """Best texts of the image of each pair ``[pairs, 5]``."""
    image_rank: NDArray[np.int64]
    """Place of the first right image; 0 if it is not among the candidates."""
    text_rank: NDArray[np.int64]
    """Place of the first right text."""


def make_search(model: VisualParser, data: PairData) -> PairSearch:
    """Return a search in the images and texts of a data set."""
    search = PairSearch(model, batch_size=_BATCH).add_images(to_pixel_values(data.pixels))
    return search.add_texts(data.ids, data.keep)


def score_all(
    model: VisualParser, data: PairData, text_of: NDArray[np.int64] | None = None
) -> Tensor:
    """Return the score of every pair; with other texts, of the images with those.

    Args:
        model: The model.
        data: The pairs.
        text_of: Indices of texts to take instead; the score of -1 is NaN.
    """
    text_of = data.text_of if text_of is None else text_of
    scores = torch.full((len(data),), torch.nan)
    for rows in torch.from_numpy(np.flatnonzero(text_of >= 0)).split(_BATCH):
        text = torch.from_numpy(text_of[rows.numpy()])
        pixels = data.pixels[torch.from_numpy(data.image_of[rows.numpy()])]
        scores[rows] = pair_scores(
            model, to_pixel_values(pixels), data.ids[text], data.keep[text]
        ).float()
    return scores


def search_pairs(search: PairSearch, data: PairData, candidates: int = CANDIDATES) -> PairLists:
    """Return the results of searches for the pairs of a data set, in itself.

    Args:
        search: Of :func:`make_search`.
        data: Pairs; of more than ``data.most`` only so many are searched for.
        candidates: Results of the first stage that are read together with the query.
    """
    step = -(-len(data) // data.most)
    rows = np.arange(0, len(data), step)
    text = torch.from_numpy(data.text_of[rows])
    image = torch.from_numpy(data.image_of[rows])
    images = find_images(search, data.ids[text], data.keep[text], candidates).ids.numpy()
    texts = find_texts(search, to_pixel_values(data.pixels[image]), candidates).ids.numpy()
    hits = (
        data.is_relevant(data.text_of[rows, None], images),
        data.is_relevant(texts, data.image_of[rows, None]),
    )
    lists: list[NDArray[np.int64]] = []
    for found in (images, texts):
        lists.append(np.full((len(data), _SHOWN), -1, dtype=np.int64))
        lists[-1][rows, : found.shape[1]] = found[:, :_SHOWN]
    for hit in hits:
        lists.append(np.full(len(data), -1, dtype=np.int64))
        lists[-1][rows] = np.where(hit.any(1), hit.argmax(1) + 1, 0)
    return PairLists(*lists)


def mismatches(
    search: PairSearch, data: PairData
) -> tuple[NDArray[np.int64], NDArray[np.int64], float]:
    """Return a random and the hardest wrong text of every pair, and the contrastive loss.

    Texts are -1 where all are right.
    """
    images, texts = cast(Tensor, search.image_vectors), cast(Tensor, search.text_vectors)
    scale = float(search.model.log_scale.detach().exp().clamp_max(100.0))
    rng = np.random.default_rng(0)
    drawn, hard = (np.full(len(data.pixels), -1, dtype=np.int64) for _ in range(2))
    loss = 0.0
    for start in range(0, len(images), 512):
        close = (images[start : start + 512] @ texts.mT).numpy()
        rows = np.arange(start, start + len(close))
        right = data.is_relevant(np.arange(len(texts))[None], rows[:, None])
        logits = torch.from_numpy(scale * close).double()
        inside = logits.masked_fill(~torch.from_numpy(right), -torch.inf).logsumexp(1)
        loss += float((logits.logsumexp(1) - inside).sum())
        has_wrong = ~right.all(1)
        noise = rng.random(close.shape)
        for found, values in ((drawn, noise), (hard, close)):
            best = np.where(right, -np.inf, values).argmax(1)
            found[rows] = np.where(has_wrong, best, -1)
    return drawn[data.image_of], hard[data.image_of], loss / len(images)


def measure_pairs(
    model: VisualParser, data: PairData, *, slope: float = 1.0, offset: float = 0.0
) -> Evaluation:
    """Return the scores of a model on pairs, and its answers to each of them.

    Args:
        model: The model.
        data: The pairs.
        slope: Of :func:`fit_probability`.
        offset: Of :func:`fit_probability`.
    """
    search = make_search(model, data)
    drawn, hard, loss = mismatches(search, data)
    logits = {"logits": None, "random": drawn, "hard": hard}
    answers: dict[str, Tensor] = {
        name: slope * score_all(model, data, which) + offset for name, which in logits.items()
    }
    for name, values in search_pairs(search, data)._asdict().items():
        answers[name] = torch.from_numpy(values)
    return Evaluation(
        {"loss": Score(loss, larger_is_better=False), **score_pairs(answers)}, answers
    )


def score_pairs(answers: Answers) -> Scores:
    """Return R@1 and R@5 in both directions, and shares of pairs that are judged right.

    *Matching* counts true pairs and as many random mismatches, *hard mismatches* are apart.

    Args:
        answers: Of :func:`measure_pairs`.
    """
    scores: dict[str, Score] = {}
    for name, words in (("image_rank", ""), ("text_rank", " of texts")):
        ranks = answers[name]
        ranks = ranks[ranks >= 0]
        for k in (1, 5):
            scores[f"R@{k}{words}"] = share_score((ranks > 0) & (ranks <= k))
    wrong, hard = (answers[name][~answers[name].isnan()] for name in ("random", "hard"))
    scores["matching"] = share_score(torch.cat([answers["logits"] > 0, wrong <= 0]))
    scores["hard mismatches"] = share_score(hard <= 0)
    return scores


def share_score(hits: Tensor | NDArray[np.bool_]) -> Score:
    """Return the share of hits with its binomial standard error, which is never zero.

    Example:
        >>> str(share_score(torch.tensor([True, False, True, False])))
        '50.0 ± 25.0 %'
    """
    count, found = len(hits), int(hits.sum())
    if not count:
        return Score(float("nan"), None, is_share=True)
    sure = found / count if 0 < found < count else (found + 1) / (count + 2)
    return Score(found / count, (sure * (1 - sure) / count) ** 0.5, is_share=True)


def fit_probability(matched: Tensor, mismatched: Tensor) -> tuple[float, float]:
    """Return slope and offset that make log-odds of scores, by logistic regression.

    Targets are smoothed by one case, so that separable scores give finite numbers.

    Args:
        matched: Scores of true pairs.
        mismatched: Scores of as many mismatches.

    Example:
        >>> slope, offset = fit_probability(torch.tensor([3.0, 5.0]), torch.tensor([-1.0, 1.0]))
        >>> slope > 0, round(-offset / slope, 3)
        (True, 2.0)
    """
    good, bad = (x[x.isfinite()].double().numpy() for x in (matched, mismatched))
    if not len(good) or not len(bad):
        return 1.0, 0.0
    x = np.concatenate([good, bad])
    centre, spread = float(x.mean()), float(x.std()) or 1.0
    z = (x - centre) / spread
    target = np.r_[
        np.full(len(good), (len(good) + 1) / (len(good) + 2)),
        np.full(len(bad), 1 / (len(bad) + 2)),
    ]
    a, b = 0.0, 0.0
    for _ in range(50):  # Newton steps, damped by a small ridge
        p = 1 / (1 + np.exp(-np.clip(a * z + b, -30, 30)))
        w = np.maximum(p * (1 - p), 1e-9)
        g = np.array([((p - target) * z).sum(), (p - target).sum()])
        h = np.array([[(w * z * z).sum(), (w * z).sum()], [(w * z).sum(), w.sum()]])
        move = np.linalg.solve(h + 1e-6 * len(z) * np.eye(2), g)
        step = min(1.0, 2.0 / max(float(np.abs(move).max()), 1e-12))
        a, b = a - step * float(move[0]), b - step * float(move[1])
        if np.abs(move).max() < 1e-10:
            break
    if a <= 0:  # the scores tell nothing
        return 0.0, 0.0
    return a / spread, b - a * centre / spread
