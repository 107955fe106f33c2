"""What a visual parser and masked features do to a small model of scenes.

A model is trained on scenes that are drawn afresh at every step, with masked words, matching (half
of the negatives are hard) and, if asked for, masked features. Then it is asked about new scenes.
"""

import math
import time
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from primal_attention.datasets.scenes import (
    SCENE_WORDS,
    SIDES,
    Scenes,
    encode_captions,
    holds,
    sample_scenes,
)
from primal_attention.tasks.pairs.config import MultimodalConfig
from primal_attention.tasks.pairs.model import VisualParser
from primal_attention.tasks.pairs.objectives import CollapseWatch
from primal_attention.tasks.pairs.outputs import SimilarityNotice

__all__ = [
    "MASKS",
    "PARSERS",
    "TrainedOnScenes",
    "measure_scenes",
    "scene_model",
    "train_on_scenes",
]

PARSERS: Mapping[str, Mapping[str, Any]] = {
    "linear": {"parser": "linear"},
    "cnn": {"parser": "cnn"},
    "self-attention": {"parser": "vit"},
    "dual-tied": {
        "parser": "vit",
        "parser_attention": "primal-dual",
        "parser_options": {"rank": 8},
    },
}
"""Parsers of about the same number of parameters, as changes of the configuration."""
MASKS: Mapping[str, Mapping[str, Any]] = {
    "none": {"objectives": ("mlm", "itm")},
    "random": {"mfr_masks": "random"},
    "groups": {"mfr_masks": "groups"},
}
"""Masked features: none, tokens drawn at random, or as many in groups."""

_BATCH = 64
_ETA = 0.1
"""Weight of the regulariser of primal layers."""
_MASK_ID = 3
_CANDIDATES = 50
"""Images, and captions, of a retrieval."""
_FIRST_TEST_SEED = 2**32
"""Seeds of test scenes lie above those of training."""


def scene_model(
    parser: str = "self-attention", mfr: str = "none", *, image_size: int = 24, **changes: Any
) -> VisualParser:
    """Return a new model of scenes: patches of 8 pixels, 2 + 3 blocks of width 64.

    Args:
        parser: A name of ``PARSERS``.
        mfr: A name of ``MASKS``.
        image_size: Pixels of a side.
        changes: Other fields of the configuration.

    Example:
        >>> sum(p.numel() for p in scene_model("linear").parser.parameters())
        112960
    """
    options: dict[str, Any] = {
        "vocab_size": 5 + len(SCENE_WORDS),
        "image_size": image_size,
        "mfr_group": 3,
        **PARSERS[parser],
        **MASKS[mfr],
    }
    return VisualParser(MultimodalConfig.from_config("tiny", **{**options, **changes}))


class TrainedOnScenes(NamedTuple):
    """A model and its training."""

    model: VisualParser
    losses: dict[str, list[float]]
    """Losses by name, means of a twentieth of the steps each."""
    seconds: float
    """Processor time."""


def train_on_scenes(
    parser: str = "self-attention",
    mfr: str = "none",
    *,
    seed: int = 0,
    steps: int = 2000,
    style: Any = "sides",
    **changes: Any,
) -> TrainedOnScenes:
    """Return a model that was trained on scenes.

    Args:
        parser: A name of ``PARSERS``.
        mfr: A name of ``MASKS``.
        seed: Seed of parameters, masks and scenes.
        steps: Training steps of 64 scenes; AdamW with a cosine schedule from 0.001.
        style: Captions.
        changes: Other options of :func:`scene_model`.

    Example:
        >>> found = train_on_scenes("linear", "random", steps=2, dim=16)
        >>> sorted(found.losses)
        ['itm', 'mfr', 'mlm']
    """
    began = time.process_time()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", SimilarityNotice)
        torch.manual_seed(seed)
        model = scene_model(parser, mfr, **changes).train()
        rng = np.random.default_rng(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps))
        )
        size = model.config.image_shape[0]
        watch, seen = CollapseWatch(), list[dict[str, float]]()
        for step in range(steps):
            scenes = sample_scenes(_BATCH, style, image_size=size, seed=rng)
            output = model(
                scenes.pixel_values,
                encode_captions(scenes.captions),
                negative_input_ids=encode_captions(scenes.negatives),
            )
            regulariser = 0.0 if output.aux_loss is None else _ETA * output.aux_loss
            optimizer.zero_grad()
            (output.loss + regulariser).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            seen.append({name: float(loss.detach()) for name, loss in output.losses.items()})
            if step % 50 == 0:
                watch.update(output.variance)
    return TrainedOnScenes(model.eval(), _twentieths(seen), time.process_time() - began)


def _twentieths(seen: list[dict[str, float]]) -> dict[str, list[float]]:
    size = max(1, len(seen) // 20)
    parts = [seen[i : i + size] for i in range(0, len(seen), size)]
    return {
        name: [round(sum(one[name] for one in part) / len(part), 4) for part in parts]
        for name in seen[0]
    }


@torch.no_grad()
def measure_scenes(
    model: VisualParser, *, style: Any = "sides", count: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """Return what a model knows of new scenes, and the flow between its modalities.

    Accuracies of matching are means over true captions that are accepted and false ones that are
    rejected, so that 0.5 is chance. A caption is a hit of a retrieval if it is true of the image.

    Args:
        model: The model.
        style: Captions.
        count: Number of scenes.
        seed: Seed.

    Example:
        >>> found = measure_scenes(scene_model().eval(), count=60)
        >>> [name for name in found if "words" in name]
        ['words', 'words blind', 'words shuffled']
    """
    size = model.config.image_shape[0]
    scenes = sample_scenes(count, style, image_size=size, seed=_FIRST_TEST_SEED + seed)
    pixels, ids = scenes.pixel_values, encode_captions(scenes.captions)
    visual = model.parse(pixels).features
    return {
        **_matching(model, scenes, visual, ids),
        **_words(model, scenes, pixels, ids),
        **_retrieval(model, scenes, visual),
        **_flow(model, pixels, ids),
    }


def _matching(model: VisualParser, scenes: Scenes, visual: Tensor, ids: Tensor) -> dict[str, float]:
    accepted = float((model.match(visual, ids) > 0).float().mean())
    # the caption of the next scene for which it is false
    n = len(scenes.scenes)
    others = [
        next(
            scenes.captions[(i + j) % n]
            for j in range(1, n)
            if not holds(scene, scenes.captions[(i + j) % n])
        )
        for i, scene in enumerate(scenes.scenes)
    ]
    rejected = {"random": model.match(visual, encode_captions(others)) <= 0}
    hard = torch.zeros(n, 3)
    for column, kind in enumerate(("nouns", "attributes", "relation")):
        texts = [scene.negative(kind) for scene in scenes.scenes]
        hard[:, column] = (model.match(visual, encode_captions(texts)) <= 0).float()
        rejected[f"hard {kind}"] = hard[:, column]
    rejected["hard"] = hard
    return {
        "accepted": accepted,
        **{f"itm {k}": (accepted + float(v.float().mean())) / 2 for k, v in rejected.items()},
    }


def _words(model: VisualParser, scenes: Scenes, pixels: Tensor, ids: Tensor) -> dict[str, float]:
    """Return how many words are right if each is hidden in turn: with images, without, shuffled."""
    hits: dict[str, list[Tensor]] = {"words": [], "words blind": [], "words shuffled": []}
    side = torch.isin(ids, encode_captions([" ".join(SIDES)])[0, 1:-1])
    places = list(range(1, ids.shape[1]))
    inputs = {
        "words": pixels,
        "words blind": torch.zeros_like(pixels),
        "words shuffled": pixels.roll(1, 0),
    }
    for name, images in inputs.items():
        for j in places:
            masked = ids.clone()
            masked[:, j] = _MASK_ID
            output = model(
                images, masked, ids != 0, output_words=True, output_features=False, objectives=()
            )
            hits[name].append(output.word_logits[:, j].argmax(-1) == ids[:, j])
    article = encode_captions(["a"])[0, 1]  # known without looking
    is_word = ((ids > 4) & (ids != article))[:, places]
    rows = {name: torch.stack(found, 1) for name, found in hits.items()}
    side_hits = rows["words"][side[:, places]]
    return {
        **{name: float(found[is_word].float().mean()) for name, found in rows.items()},
        "side word": float(side_hits.float().mean()),
    }


def _retrieval(model: VisualParser, scenes: Scenes, visual: Tensor) -> dict[str, float]:
    """Return R@1 in both directions; images and distinct captions are those of 50 scenes."""
    captions = list(dict.fromkeys(scenes.captions))[:_CANDIDATES]
    chosen = [scenes.captions.index(caption) for caption in captions]
    ids, n = encode_captions(captions), len(captions)
    logits = torch.stack([model.match(visual[i].expand(n, -1, -1), ids) for i in chosen])
    is_true = torch.tensor([[holds(scenes.scenes[i], text) for text in captions] for i in chosen])
    return {
        "image to text": float(is_true[torch.arange(n), logits.argmax(1)].float().mean()),
        "text to image": float(is_true[logits.argmax(0), torch.arange(n)].float().mean()),
        "retrieval chance": float(is_true.float().mean()),
    }


def _flow(model: VisualParser, pixels: Tensor, ids: Tensor) -> dict[str, Any]:
    """Return lifts of attention by layer, in both directions, and the plain IMF."""
    from primal_attention.analysis.flow import FlowDetails, modality_flow

    batch = {"pixel_values": pixels[:200], "input_ids": ids[:200]}
    ids, mask, bare = model.modality_ids(batch), model.special_mask(batch), FlowDetails(ablate=None)
    found = modality_flow(model, batch, ids, special_ids=mask, details=bare)
    text, image = found.names.index("text"), found.names.index("image")
    plain = modality_flow(model, batch, ids, special="text", details=bare)
    return {
        "text from image": _rounded(found.lift[:, text, image]),
        "image from text": _rounded(found.lift[:, image, text]),
        "imf": _rounded(plain.imf),
        "imf lift": _rounded(plain.imf_lift),
    }


def _rounded(values: Tensor) -> list[float]:
    return [round(float(v), 4) for v in values]
