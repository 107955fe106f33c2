"""Losses of pre-training: masked words, matching, masked features, contrast.

    MLM   some words are hidden, the image is seen              cross-entropy of the hidden words
    ITM   half of the texts belong to another image             binary cross-entropy of the pair
    MFR   groups of visual tokens are hidden, the text is seen  mean over channels of (ṽ − sg(v))²
    ITC   texts and images apart                                cross-entropy of their similarities

Words and visual tokens are hidden in separate passes, because a hidden word cannot explain a hidden
part of the image. A group is a seed and the tokens to which the parser attends from it: a single
hidden token could be read off its neighbours.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, normalize
from torch.types import Device

__all__ = [
    "CollapseError",
    "CollapseWatch",
    "MaskedWords",
    "NegativeTexts",
    "contrastive_pair_loss",
    "draw_negatives",
    "draw_seeds",
    "feature_loss",
    "feature_variance",
    "group_mask",
    "mask_words",
    "matching_loss",
    "random_mask",
    "word_loss",
]

IGNORED = -100
"""Label of words that are not hidden, as in transformers."""

NegativeTexts = Callable[[Int[Tensor, "b n"], Bool[Tensor, "b n"]], tuple[Tensor, Tensor]]
"""From ids and mask of texts to ids and mask of texts that do not match; same shapes."""


class MaskedWords(NamedTuple):
    """Texts with hidden words."""

    input_ids: Int[Tensor, "b n"]
    """Ids in which hidden words are replaced."""
    labels: Int[Tensor, "b n"]
    """The hidden words; -100 everywhere else."""


def mask_words(
    input_ids: Int[Tensor, "b n"],
    keep: Bool[Tensor, "b n"],
    *,
    vocab_size: int,
    mask_id: int,
    special_ids: Sequence[int],
    share: float = 0.15,
    generator: torch.Generator | None = None,
) -> MaskedWords:
    """Return texts with hidden words; every text with a word has at least one.

    Of the hidden words 80 % become the mask, 10 % another word, and 10 % stay.

    Args:
        input_ids: Ids of the texts.
        keep: ``True`` where a token is real.
        vocab_size: Number of ids.
        mask_id: Id of the mask.
        special_ids: Ids that are never hidden, nor drawn as another word.
        share: Share of hidden words.
        generator: Source of random numbers.

    Example:
        >>> ids = torch.tensor([[1, 7, 8, 2, 0]])
        >>> masked = mask_words(
        ...     ids, ids > 0, vocab_size=9, mask_id=3, special_ids=(0, 1, 2, 3, 4)
        ... )
        >>> bool((masked.labels != -100).sum() >= 1), masked.labels[0, [0, 3, 4]].tolist()
        (True, [-100, -100, -100])
    """
    options: Any = {"generator": generator, "device": input_ids.device}
    special = torch.tensor(list(special_ids), device=input_ids.device)
    is_word = keep & ~torch.isin(input_ids, special)
    draw = torch.rand(input_ids.shape, **options).masked_fill(~is_word, 2.0)
    first = draw == draw.amin(1, keepdim=True)
    hidden = is_word & ((draw < share) | first)
    how = torch.rand(input_ids.shape, **options)
    is_ordinary = torch.ones(vocab_size, dtype=torch.bool, device=input_ids.device)
    is_ordinary[special] = False
    ordinary = is_ordinary.nonzero()[:, 0]
    if not len(ordinary):  # a vocabulary without words has nothing to draw
        ordinary = special[:1]
    drawn = ordinary[torch.randint(len(ordinary), input_ids.shape, **options)]
    ids = torch.where(hidden & (how < 0.8), mask_id, input_ids)
    ids = torch.where(hidden & (how >= 0.9), drawn, ids)
    return MaskedWords(ids, torch.where(hidden, input_ids, IGNORED))


class Negatives(NamedTuple):
    """Texts of which some were exchanged."""

    input_ids: Int[Tensor, "b n"]
    keep: Bool[Tensor, "b n"]
    matched: Bool[Tensor, " b"]
    """``True`` where a text belongs to its image."""


def draw_negatives(
    input_ids: Int[Tensor, "b n"],
    keep: Bool[Tensor, "b n"],
    *,
    similarity: Float[Tensor, "b b"] | None = None,
    texts: NegativeTexts | tuple[Tensor, Tensor] | None = None,
    share: float = 0.5,
    generator: torch.Generator | None = None,
) -> Negatives:
    """Return texts of which half belong to another image.

    A text is never exchanged for an equal one. Where a batch has no other text, it stays.

    Args:
        input_ids: Ids of the texts, each with its own image.
        keep: ``True`` where a token is real.
        similarity: Similarity of image ``i`` and text ``j``; similar texts are drawn more often,
            in proportion to its exponential. By default all are equally likely.
        texts: Mismatched texts of the caller, as ids and mask or as a function of the texts; they
            replace half of those that are drawn.
        share: Share of texts that are exchanged.
        generator: Source of random numbers.

    Example:
        >>> ids = torch.tensor([[1, 5, 2], [1, 6, 2]])
        >>> found = draw_negatives(ids, ids > 0, share=1.0)
        >>> found.input_ids[:, 1].tolist(), found.matched.tolist()
        ([6, 5], [False, False])
    """
    b, device = len(input_ids), input_ids.device
    options: Any = {"generator": generator, "device": device}
    words = torch.where(keep, input_ids, -1)
    differs = (words[:, None] != words[None]).any(-1)  # [b b]
    # the largest of log-weights plus Gumbel noise is a draw in proportion to the weights
    noise = -torch.rand(b, b, **options).clamp(1e-9, 1 - 1e-7).log().neg().log()
    if similarity is not None:
        noise = noise + similarity.detach()
    other = noise.masked_fill(~differs, -torch.inf).argmax(1)
    has_other = differs.any(1)
    new_ids, new_keep = input_ids[other], keep[other]
    if texts is not None:
        given, given_keep = texts(input_ids, keep) if callable(texts) else texts
        if given.shape != input_ids.shape or given_keep.shape != keep.shape:
            raise ValueError(
                f"Mismatched texts must have the shape {tuple(input_ids.shape)} of the texts, got "
                f"{tuple(given.shape)} with a mask {tuple(given_keep.shape)}."
            )
        usable = (torch.where(given_keep, given, -1) != words).any(1)
        chosen = usable & ((torch.rand(b, **options) < 0.5) | ~has_other)
        has_other = has_other | usable
        new_ids = torch.where(chosen[:, None], given, new_ids)
        new_keep = torch.where(chosen[:, None], given_keep, new_keep)
    swapped = has_other & (torch.rand(b, **options) < share)
    return Negatives(
        torch.where(swapped[:, None], new_ids, input_ids),
        torch.where(swapped[:, None], new_keep, keep),
        ~swapped,
    )


def draw_seeds(
    b: int,
    n: int,
    *,
    share: float,
    group: int,
    keep: Bool[Tensor, "b n"] | None = None,
    generator: torch.Generator | None = None,
    device: Device = None,
) -> Int[Tensor, "b m"]:
    """Return ``max(1, round(share · n / (group + 1)))`` different tokens of every image.

    Args:
        b: Number of images.
        n: Visual tokens of an image.
        share: Share of tokens that sets the number of seeds.
        group: Tokens in a group.
        keep: ``True`` where a token is real; by default all are. Images with fewer real tokens
            than seeds repeat one of them.
        generator: Source of random numbers.
        device: Where to put the result.

    Example:
        >>> draw_seeds(2, 36, share=0.2, group=5).shape
        torch.Size([2, 1])
    """
    count = max(1, round(share * n / (group + 1)))
    draw = torch.rand(b, n, generator=generator, device=device)
    if keep is not None:
        draw = draw.masked_fill(~keep, -1.0)
    seeds = draw.argsort(dim=1, descending=True)[:, :count]
    if keep is not None:
        seeds = torch.where(keep.gather(1, seeds), seeds, seeds[:, :1])
    return seeds


def group_mask(
    rows: Float[Tensor, "b m n"],
    seeds: Int[Tensor, "b m"],
    group: int,
    *,
    keep: Bool[Tensor, "b n"] | None = None,
) -> Bool[Tensor, "b n"]:
    """Return the union of groups: every seed with the largest entries of its row.

    Args:
        rows: Attention of the seeds to all tokens.
        seeds: The seeds.
        group: Tokens in a group, the seed included; ties go to the lower index.
        keep: ``True`` where a token is real; no other token is ever in a group.

    Example:
        >>> rows = torch.tensor([[[0.1, 0.4, 0.2, 0.3]]])
        >>> group_mask(rows, torch.tensor([[0]]), 3).int()
        tensor([[1, 1, 0, 1]], dtype=torch.int32)
    """
    b, _, n = rows.shape
    if keep is not None:
        rows = rows.masked_fill(~keep[:, None], -torch.inf)
    rows = rows.scatter(2, seeds[:, :, None], torch.inf)  # the seed comes first
    chosen = rows.argsort(dim=2, descending=True, stable=True)[..., :group].flatten(1)
    found = torch.zeros(b, n, dtype=torch.bool, device=rows.device).scatter(1, chosen, True)
    return found if keep is None else found & keep


def random_mask(
    b: int,
    n: int,
    count: int,
    *,
    generator: torch.Generator | None = None,
    device: Device = None,
) -> Bool[Tensor, "b n"]:
    """Return ``count`` tokens of every image, drawn at random.

    Example:
        >>> random_mask(2, 9, 3).sum(1)
        tensor([3, 3])
    """
    draw = torch.rand(b, n, generator=generator, device=device)
    chosen = draw.argsort(dim=1)[:, :count]
    return torch.zeros(b, n, dtype=torch.bool, device=draw.device).scatter(1, chosen, True)


def word_loss(logits: Float[Tensor, "k vocab"], labels: Int[Tensor, " k"]) -> Float[Tensor, ""]:
    """Return the mean cross-entropy of hidden words; zero without any.

    Example:
        >>> word_loss(torch.zeros(0, 9), torch.zeros(0, dtype=torch.long))
        tensor(0.)
    """
    total = cross_entropy(logits.float(), labels, reduction="sum", ignore_index=IGNORED)
    return total / (labels != IGNORED).sum().clamp_min(1)


def matching_loss(logits: Float[Tensor, " b"], matched: Bool[Tensor, " b"]) -> Float[Tensor, ""]:
    """Return the binary cross-entropy of pairs.

    Example:
        >>> matching_loss(torch.zeros(2), torch.tensor([True, False])).exp().round(decimals=4)
        tensor(2.)
    """
    return binary_cross_entropy_with_logits(logits.float(), matched.float())


def feature_loss(
    guess: Float[Tensor, "b n c"],
    target: Float[Tensor, "b n c"],
    hidden: Bool[Tensor, "b n"],
    *,
    distance: str = "squared",
) -> Float[Tensor, ""]:
    """Return the mean distance of predicted features over hidden tokens; zero without any.

    No gradient flows into the target.

    Args:
        guess: Predicted features.
        target: True features.
        hidden: ``True`` at hidden tokens.
        distance: ``"squared"``, the mean over channels, or ``"cosine"``, one minus the cosine.

    Example:
        >>> v = torch.ones(1, 2, 4)
        >>> feature_loss(3 * v, v, torch.tensor([[True, False]]))
        tensor(4.)
    """
    guess, target = guess.float(), target.detach().float()
    if distance == "cosine":
        far = 1 - (normalize(guess, dim=-1) * normalize(target, dim=-1)).sum(-1)
    else:
        far = (guess - target).square().mean(-1)
    return torch.where(hidden, far, 0.0).sum() / hidden.sum().clamp_min(1)


def contrastive_pair_loss(
    image: Float[Tensor, "b c"],
    text: Float[Tensor, "b c"],
    scale: Float[Tensor, ""] | float,
    *,
    same: Bool[Tensor, "b b"] | None = None,
) -> Float[Tensor, ""]:
    """Return the cross-entropy of similarities, mean of both directions; zero without pairs.

    Args:
        image: Unit vectors of the images.
        text: Unit vectors of the texts, in the same order.
        scale: Inverse temperature.
        same: Pairs that also match, such as equal texts; they share the target.

    Example:
        >>> v = torch.ones(2, 1)
        >>> contrastive_pair_loss(v, v, 1.0).exp().round(decimals=4)
        tensor(2.)
    """
    logits = scale * (image.float() @ text.float().mT)
    b = len(logits)
    own = torch.eye(b, dtype=torch.bool, device=logits.device)
    share = (own if same is None else own | same).float()
    both = (logits, share), (logits.mT, share.mT)
    total = sum(
        cross_entropy(found, target / target.sum(1, keepdim=True), reduction="sum")
        for found, target in both
    )
    return total / (2 * max(b, 1))  # type: ignore[return-value]


def feature_variance(v: Float[Tensor, "b n c"]) -> Float[Tensor, ""]:
    """Return the variance of visual features over tokens and images, mean over channels.

    Example:
        >>> feature_variance(torch.ones(3, 4, 5))
        tensor(0.)
    """
    return v.detach().float().flatten(0, 1).var(0, correction=0).mean()


class CollapseError(RuntimeError):
    """All visual tokens have become alike, so that predicting them means nothing."""


@dataclass
class CollapseWatch:
    """A watch over the variance of visual features in training.

    The target of masked features comes from the network that is being trained. It could make all
    features equal, which would be easy to predict and useless.

    Give it ``output.variance`` of training steps.

    Args:
        share: Smallest variance that is allowed, as a share of the first.

    Example:
        >>> watch = CollapseWatch()
        >>> watch.update(torch.tensor(0.8)), watch.update(torch.tensor(0.4))
        (1.0, 0.5)
    """

    share: float = 0.01
    first: float | None = field(default=None, init=False)
    """Variance of the first step."""

    def update(self, variance: Float[Tensor, ""] | float) -> float:
        """Return the variance as a share of the first.

        Raises:
            CollapseError: If it is below ``share``.
        """
        now = float(variance)
        self.first = now if self.first is None else self.first
        left = now / self.first if self.first > 0 else 0.0
        if left < self.share:
            raise CollapseError(
                f"The variance of visual features fell to {left:.2%} of its first value "
                f"{self.first:.3g}; the parser has collapsed. Use a smaller learning rate, or "
                "leave out the objective 'mfr'."
            )
        return left
