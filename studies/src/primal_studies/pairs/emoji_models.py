"""Models that find emoji by name: ours, a contrastive dual encoder, and a bag of words.

All learn from the same pairs: drawings of seen concepts in two styles, with names and tags. A model
is a pair of functions from images and texts to scores; scores are measured in the third style.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from primal_attention.datasets.scenes import encode_captions
from primal_attention.support.command import needs
from primal_attention.tasks.pairs.config import MultimodalConfig
from primal_attention.tasks.pairs.model import VisualParser
from primal_attention.tasks.pairs.objectives import CollapseWatch
from primal_attention.tasks.pairs.pairs import to_pixel_values
from primal_attention.tasks.pairs.scoring import make_search
from primal_attention.tasks.pairs.searching import find_images, find_texts
from primal_studies.pairs.emoji_data import Emoji, EmojiSplit

__all__ = [
    "EmojiPairs",
    "Scorer",
    "bag_of_words",
    "dual_encoder",
    "matcher",
    "recalls",
    "visual_parser",
]

_BATCH = 64
_MAX_WORDS = 12
"""Tokens of a text, with [CLS] and [SEP]."""
_SEP = 2
_NAME_SHARE = 0.75
"""Share of training texts that are names; the others are tags."""
_SHIFT = 2
"""Largest shift of a training image in pixels."""
_COMPONENTS = 200
_ALPHAS = (1.0, 10.0, 100.0, 1000.0)
"""Ridge penalties to choose from."""
_READ = 20
"""Candidates of the first stage that the joint encoder reads."""

Images = Float[Tensor, "b 3 H W"]


class Scorer(NamedTuple):
    """What a trained model gives."""

    scores: Callable[[Images, list[str]], dict[str, tuple[Tensor, Tensor]]]
    """From images and texts to scores by stage: images × texts for finding texts, and for finding
    images."""
    parameters: int
    seconds: float
    """Processor time of the training."""


class EmojiPairs:
    """Training pairs of seen concepts, and test pairs in the third style.

    Args:
        emoji: The concepts.
        split: Which are seen.

    Example:
        >>> from primal_studies.pairs.emoji_data import split_emoji
        >>> names = ["red cat", "blue cat", "red dog", "blue dog"]
        >>> emoji = Emoji(np.zeros((3, 4, 32, 32, 3), np.uint8), names, [[]] * 4)
        >>> pairs = EmojiPairs(emoji, split_emoji(emoji, unseen=1))
        >>> images, ids = next(pairs.batches(1, seed=0))
        >>> pairs.words, images.shape, ids.shape
        (('blue', 'cat', 'dog', 'red'), torch.Size([3, 3, 32, 32]), torch.Size([3, 4]))
    """

    def __init__(self, emoji: Emoji, split: EmojiSplit) -> None:
        self.emoji, self.split = emoji, split
        texts = [text for i in split.seen for text in emoji.texts(int(i))]
        self.words = tuple(sorted({word for text in texts for word in text.split()}))
        self.size = emoji.images.shape[2]

    def ids(self, texts: Sequence[str]) -> Int[Tensor, "b n"]:
        """Return ids of texts, cut to the longest text of the models."""
        short = [" ".join(text.split()[: _MAX_WORDS - 2]) for text in texts]
        return encode_captions(short, words=self.words)

    def batches(self, steps: int, seed: int) -> Iterator[tuple[Images, Int[Tensor, "b n"]]]:
        """Yield images and texts of different concepts; images are shifted and change in contrast.

        Args:
            steps: Number of batches.
            seed: Seed.
        """
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            size = min(_BATCH, len(self.split.seen))
            concepts = rng.choice(self.split.seen, size, replace=False)
            images = to_pixels(self.emoji.images[rng.integers(0, 2, size), concepts])
            texts = [
                options[0] if rng.random() < _NAME_SHARE else options[-1]
                for options in map(self.emoji.texts, concepts.tolist())
            ]
            yield _vary(images, rng), self.ids(texts)

    def test(self, concepts: NDArray[np.int64]) -> tuple[Images, list[str]]:
        """Return drawings of the third style, and their names."""
        return to_pixels(self.emoji.images[2, concepts]), [self.emoji.names[i] for i in concepts]


def to_pixels(images: NDArray[np.uint8]) -> Images:
    """Return images as a model takes them, between -1 and 1."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def _vary(images: Images, rng: np.random.Generator) -> Images:
    """Return images that are shifted, and whose color channels change in contrast."""
    b, size = len(images), images.shape[-1]
    padded = nn.functional.pad(images, (_SHIFT,) * 4, mode="replicate")
    y, x = rng.integers(0, 2 * _SHIFT + 1, (2, b))
    moved = [padded[i, :, y[i] : y[i] + size, x[i] : x[i] + size] for i in range(b)]
    gains = torch.from_numpy(rng.uniform(0.6, 1.4, (b, 3, 1, 1)).astype(np.float32))
    return torch.stack(moved) * gains


def visual_parser(pairs: EmojiPairs, *, steps: int, seed: int) -> Scorer:
    """Return our model: contrast, matching, masked words and masked features together.

    Its first stage compares vectors; both stages together also read the best candidates.

    Args:
        pairs: What to learn from.
        steps: Training steps of 64 pairs.
        seed: Seed.

    Example:
        >>> names = ["red cat", "blue cat", "red dog", "blue dog"]
        >>> emoji = Emoji(np.zeros((3, 4, 32, 32, 3), np.uint8), names, [[]] * 4)
        >>> pairs = EmojiPairs(emoji, EmojiSplit(np.arange(3), np.array([3])))
        >>> found = visual_parser(pairs, steps=1, seed=0)
        >>> sorted(found.scores(*pairs.test(np.arange(3))))
        ['both stages', 'first stage']
    """
    config = MultimodalConfig.from_config(
        "tiny",
        vocab_size=5 + len(pairs.words),
        max_words=_MAX_WORDS,
        image_size=pairs.size,
        objectives=("mlm", "itm", "mfr", "itc"),
        negatives="in-batch-hard",
    )
    watch = CollapseWatch()
    with _seeded(seed):
        model = VisualParser(config).train()

    def loss(images: Tensor, ids: Tensor) -> Tensor:
        output = model(images, ids)
        watch.update(output.variance)
        return output.loss

    seconds = _train(model, loss, pairs, steps, seed)
    model.eval()

    @torch.no_grad()
    def scores(images: Images, texts: list[str]) -> dict[str, tuple[Tensor, Tensor]]:
        visual = torch.cat([model.parse(part).features for part in images.split(256)])
        ids = pairs.ids(texts)
        vectors = torch.cat([model.encode_text(part) for part in ids.split(256)])
        first = model.log_scale.exp() * (model.image_vectors(visual) @ vectors.mT)
        to_text = _read_best(model, first, visual, ids)
        to_image = _read_best(model, first.mT, visual, ids, is_text=True).mT
        return {"first stage": (first, first), "both stages": (to_text, to_image)}

    return Scorer(scores, _count(model), seconds)


def _read_best(
    model: VisualParser, first: Tensor, visual: Tensor, ids: Tensor, *, is_text: bool = False
) -> Tensor:
    """Return first-stage scores with the best candidates of every query read again.

    Mismatches of the training are drawn in proportion to the exponential of the first stage, so
    that the logit is what the first stage does not know, and the sum of both orders candidates.
    """
    count = min(_READ, first.shape[1])
    best = first.topk(count, dim=1).indices
    query = torch.arange(len(first))[:, None].expand_as(best).flatten()
    items = best.flatten()
    which = (items, query) if is_text else (query, items)
    parts = zip(*(one.split(1024) for one in which), strict=True)
    logits = torch.cat([model.match(visual[i], ids[j]) for i, j in parts]).view_as(best)
    # candidates that were not read stay behind those that were
    behind = first - first.amax(1, keepdim=True) - 1e6
    return behind.scatter(1, best, first.gather(1, best) + logits)


def matcher(pairs: EmojiPairs, *, seed: int, time_limit: float | None = None) -> Scorer:
    """Return the estimator with its own settings: contrast and matching, 2,000 steps, names only.

    Args:
        pairs: What to learn from.
        seed: Seed.
        time_limit: Processor seconds after which the training ends.
    """
    from primal_attention.tasks.pairs.estimator import ImageTextMatcher

    emoji, seen = pairs.emoji, pairs.split.seen
    names = [emoji.names[i] for i in seen]
    began = time.process_time()
    estimator = ImageTextMatcher(
        options={"image_size": pairs.size}, verbose=False, random_state=seed
    )
    drawings = np.concatenate([emoji.images[0, seen], emoji.images[1, seen]])
    estimator.fit(drawings, names * 2, time_limit=time_limit)
    seconds = time.process_time() - began

    def scores(images: Images, texts: list[str]) -> dict[str, tuple[Tensor, Tensor]]:
        drawings = ((images.permute(0, 2, 3, 1) + 1) * 127.5).round().to(torch.uint8).numpy()
        data = estimator.task_.pairs(drawings, texts)
        search = make_search(estimator.model_, data)
        text_of, image_of = torch.from_numpy(data.text_of), torch.from_numpy(data.image_of)
        pixels = to_pixel_values(data.pixels[image_of])
        texts_found = find_texts(search, pixels, _READ).ids
        images_found = find_images(search, data.ids[text_of], data.keep[text_of], _READ).ids
        to_text = _of_lists(texts_found, len(data.ids))[:, text_of]
        to_image = _of_lists(images_found, len(data.pixels))[:, image_of].mT
        return {"": (to_text, to_image)}

    return Scorer(scores, _count(estimator.model_), seconds)


def _of_lists(ids: Int[Tensor, "q k"], count: int) -> Float[Tensor, "q count"]:
    """Return scores that order items as the lists do; items that are not listed come last."""
    scores = torch.full((len(ids), count), -float(ids.shape[1]))
    return scores.scatter(1, ids, -torch.arange(float(ids.shape[1])).expand(ids.shape))


def dual_encoder(pairs: EmojiPairs, *, steps: int, seed: int) -> Scorer:
    """Return a contrastive dual encoder: the architecture of open_clip at the size of our model.

    Args:
        pairs: What to learn from.
        steps: Training steps of 64 pairs.
        seed: Seed.
    """
    with needs("studies[pairs]", "The contrastive dual encoder"):
        from open_clip.loss import ClipLoss
        from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
    width = 84
    vision = CLIPVisionCfg(
        layers=2, width=width, head_width=width // 4, patch_size=8, image_size=pairs.size
    )
    text = CLIPTextCfg(
        context_length=_MAX_WORDS,
        vocab_size=5 + len(pairs.words),
        width=width,
        heads=4,
        layers=3,
        pool_type="eos",
        eos_id=_SEP,
    )
    contrast = ClipLoss()
    with _seeded(seed):
        model = CLIP(64, vision, text).train()

    def loss(images: Tensor, ids: Tensor) -> Tensor:
        with torch.no_grad():
            model.logit_scale.clamp_(max=math.log(100))
        return contrast(*model(images, _padded(ids)))

    seconds = _train(model, loss, pairs, steps, seed)
    model.eval()

    @torch.no_grad()
    def scores(images: Images, texts: list[str]) -> dict[str, tuple[Tensor, Tensor]]:
        ids = _padded(pairs.ids(texts))
        found = (
            model.encode_image(images, normalize=True) @ model.encode_text(ids, normalize=True).mT
        )
        return {"": (found, found)}

    return Scorer(scores, _count(model), seconds)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch inside the context, and leave the global seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _padded(ids: Tensor) -> Tensor:
    return nn.functional.pad(ids, (0, _MAX_WORDS - ids.shape[1]))


def _train(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    pairs: EmojiPairs,
    steps: int,
    seed: int,
) -> float:
    """Train with AdamW, 50 steps of warm-up and a cosine schedule; return processor seconds."""
    began = time.process_time()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps)),
    )
    with _seeded(seed):
        for images, ids in pairs.batches(steps, seed):
            optimizer.zero_grad()
            loss(images, ids).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return time.process_time() - began


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def bag_of_words(pairs: EmojiPairs) -> Scorer:
    """Return ridge regression from principal components of pixels to the words of the name.

    The penalty is the one with which a fit on the first style names the second style best.

    Args:
        pairs: What to learn from.

    Example:
        >>> names = ["red cat", "blue cat", "red dog", "blue dog"]
        >>> images = np.random.default_rng(0).integers(0, 255, (3, 4, 8, 8, 3), np.uint8)
        >>> split = EmojiSplit(np.arange(3), np.array([3]))
        >>> pairs = EmojiPairs(Emoji(images, names, [[]] * 4), split)
        >>> to_text, _ = bag_of_words(pairs).scores(*pairs.test(np.arange(3)))[""]
        >>> to_text.shape
        torch.Size([3, 3])
    """
    began = time.process_time()
    emoji, seen = pairs.emoji, pairs.split.seen
    index = {word: i for i, word in enumerate(pairs.words)}
    names = [emoji.names[i] for i in seen]
    rarity = 1 / np.sqrt(1 + _counts(names, index).sum(0))

    def targets(texts: list[str]) -> NDArray[np.float64]:
        found = _counts(texts, index) * rarity
        return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)

    def fit(styles: Sequence[int], alpha: float) -> Callable[[Images], NDArray[np.float64]]:
        images = np.concatenate([emoji.images[style, seen] for style in styles])
        return _ridge(_flat(to_pixels(images)), np.tile(targets(names), (len(styles), 1)), alpha)

    right = to_pixels(emoji.images[1, seen])

    def hits(alpha: float) -> float:
        found = fit([0], alpha)(right) @ targets(names).T
        return float((found.argmax(1) == np.arange(len(seen))).mean())

    model = fit([0, 1], max(_ALPHAS, key=hits))
    seconds = time.process_time() - began

    def scores(images: Images, texts: list[str]) -> dict[str, tuple[Tensor, Tensor]]:
        guess = model(images)
        guess /= np.maximum(np.linalg.norm(guess, axis=1, keepdims=True), 1e-12)
        found = torch.from_numpy(guess @ targets(texts).T)
        return {"": (found, found)}

    return Scorer(scores, _COMPONENTS * len(pairs.words), seconds)


def _counts(texts: Sequence[str], index: dict[str, int]) -> NDArray[np.float64]:
    """Return how often every word is in every text."""
    found = np.zeros((len(texts), len(index)))
    for row, text in enumerate(texts):
        for word in text.split():
            if word in index:
                found[row, index[word]] += 1
    return found


def _flat(images: Images) -> NDArray[np.float64]:
    return images.flatten(1).numpy().astype(np.float64)


def _ridge(x: NDArray[Any], y: NDArray[Any], alpha: float) -> Callable[[Images], NDArray[Any]]:
    """Return the ridge regression on standardised principal components of ``x``."""
    mean, centre = x.mean(0), y.mean(0)
    _, sigma, components = np.linalg.svd(x - mean, full_matrices=False)
    used = min(_COMPONENTS, int((sigma > 1e-9 * sigma[0]).sum()))
    basis = components[:used].T * (math.sqrt(len(x)) / sigma[:used])
    z = (x - mean) @ basis
    weights = z.T @ (y - centre) / (len(x) + alpha)  # zᵀz = n I

    def predict(images: Images) -> NDArray[Any]:
        return (_flat(images) - mean) @ basis @ weights + centre

    return predict


def recalls(to_text: Float[Tensor, "q q"], to_image: Float[Tensor, "q q"]) -> dict[str, float]:
    """Return R@1 and R@5 in both directions.

    Args:
        to_text: Scores of image ``i`` and text ``j``; the text of image ``i`` is ``i``.
        to_image: The same, for finding the image of a text.

    Example:
        >>> recalls(torch.eye(3), torch.eye(3))["image to text R@1"]
        1.0
    """
    found = {}
    for name, scores in (("image to text", to_text), ("text to image", to_image.mT)):
        own = scores.diagonal()[:, None]
        # ties count as misses: a constant score finds nothing
        rank = (scores >= own).sum(1) - 1
        for k in (1, 5):
            found[f"{name} R@{k}"] = float((rank < k).float().mean())
    return found
