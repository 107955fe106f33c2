"""Image-text matching and search as a scikit-learn estimator."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from primal_attention.models import PretrainedModel
from primal_attention.support.command import needs
from primal_attention.support.files.images import Picture
from primal_attention.support.options import plain_options, read_options
from primal_attention.support.randomness import isolated
from primal_attention.tasks.estimators import SavedEstimator, check_fit
from primal_attention.tasks.pairs.heads import PairSearch
from primal_attention.tasks.pairs.images import ReadImages, read_images
from primal_attention.tasks.pairs.model import VisualParser
from primal_attention.tasks.pairs.pairs import PairData, check_pairs, to_pixel_values
from primal_attention.tasks.pairs.parts import check_learnable, split_images
from primal_attention.tasks.pairs.scoring import (
    fit_probability,
    measure_pairs,
    mismatches,
    score_all,
)
from primal_attention.tasks.pairs.searching import Rerank, find_images
from primal_attention.tasks.pairs.settings import PairFitOptions, PairOptions
from primal_attention.tasks.pairs.task import QUICK, TRAINING, PairTask
from primal_attention.tasks.pairs.tokenizer import TextTokenizer, as_text
from primal_attention.tasks.task import Task
from primal_attention.tasks.trained import check_finite

with needs("sklearn", "ImageTextMatcher"):
    from sklearn.base import BaseEstimator
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_is_fitted

if TYPE_CHECKING:
    from primal_attention.training import History

__all__ = ["Hit", "ImageTextMatcher", "UnknownWordsNotice"]

_FEW = 20
"""Fewer pairs than this give no validation part."""
_FIRST = 3
"""Best matches whose mean is the query of a re-ranker."""


class UnknownWordsNotice(UserWarning):
    """A text has words that none of the training texts has; they are read as unknown."""


@dataclass(frozen=True)
class Hit:
    """One result of a search."""

    index: int
    """Place of the image among those that were indexed."""
    image: Any
    """The image as it was given: a path, an image of Pillow, or an array."""
    probability: float
    """Probability that the text matches, beside as many random mismatches."""
    score: float
    """What the results are ordered by."""


class ImageTextMatcher(SavedEstimator, BaseEstimator):  # type: ignore[misc]
    """Images for a text, and whether a text matches an image, learned from pairs.

    A small vision-language model (:class:`VisualParser`) is trained from scratch on images and
    their texts: a contrastive first stage, and matching against similar wrong texts. A few thousand
    pairs take minutes on a CPU. It learns what is in the pairs and nothing else.

    Parameters
    ----------
    attention : str, default="softmax"
        Attention of the joint encoder, any name of ``primal_attention.list_attentions()``.

    dim : int, default=64
        Model width.

    num_heads : int, default=4
        Heads; must divide ``dim``.

    num_layers : int, default=3
        Blocks of the joint encoder.

    max_epochs : int, default=10
        Passes over the pairs; with little data at least 2,000 steps in all.

    batch_size : int, default=64
        Pairs per step; each image is contrasted with the texts of the others.

    learning_rate : float, default=1e-3
        Peak learning rate.

    options : PairFitOptions, dict or None, default=None
        What is rarely changed: size of the images (``image_size``), longest text (``max_words``),
        losses (``objectives``), ``tokenizer``, validation, options of the attention.

    random_state : int, RandomState instance or None, default=None
        Draws the parameters, the validation part, masks and the order of the batches.

    verbose : bool or None, default=None
        Whether to show progress; by default a bar if there is a terminal.

    Attributes
    ----------
    model_ : VisualParser
        The trained model.

    task_ : PairTask
        Tokenizer, image size and fitted probabilities.

    history_ : History
        Loss and scores, epoch by epoch; None after :meth:`load`.

    Examples
    --------
    >>> from primal_attention.tasks.pairs import ImageTextMatcher
    >>> from primal_attention.datasets.scenes import sample_scenes
    >>> scenes = sample_scenes(40)
    >>> matcher = ImageTextMatcher(options={"image_size": 24}, random_state=0)
    >>> matcher.fit(scenes.images, scenes.captions, time_limit=1)
    ImageTextMatcher(options={'image_size': 24}, random_state=0)
    >>> matcher = matcher.index(scenes.images)
    >>> len(matcher.search("a red circle left", k=3))
    3
    """

    _task: ClassVar[type[Task]] = PairTask
    _model: ClassVar[type[PretrainedModel]] = VisualParser
    _options_type: ClassVar[type[PairFitOptions]] = PairFitOptions
    task_: PairTask
    model_: VisualParser

    def __init__(
        self,
        attention: str = "softmax",
        dim: int = 64,
        num_heads: int = 4,
        num_layers: int = 3,
        max_epochs: int = 10,
        batch_size: int = 64,
        learning_rate: float = 1e-3,
        options: PairFitOptions | Mapping[str, object] | None = None,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool | None = None,
    ) -> None:
        self.attention = attention
        self.dim = dim
        self.num_heads = num_heads
        self.num_layers = num_layers
        self.max_epochs = max_epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.options = options
        self.random_state = random_state
        self.verbose = verbose

    def fit(
        self, images: "Sequence[Picture]", texts: Sequence[str], *, time_limit: float | None = None
    ) -> Self:
        """Train on pairs.

        Parameters
        ----------
        images : sequence
            Paths, images of Pillow or arrays, one for each text. An image may come several times,
            with other texts. Missing and broken files raise an error that names them.

        texts : sequence of str
            The texts; none may be empty, and at least two must differ.

        time_limit : float or None, default=None
            Seconds of training (processor time) after which it ends; the schedule is shortened
            to fit.

        Returns
        -------
        self : ImageTextMatcher
            Fitted.
        """
        check_fit(self, time_limit)
        options = read_options(self._options_type, self.options)
        images, texts = check_pairs(images, texts)
        check_learnable(texts, "fit")
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        words = None if options.tokenizer is None else TextTokenizer.wrap(options.tokenizer)
        rows = np.arange(len(texts))
        train, valid = rows, rows[:0]
        if options.validation and len(texts) >= _FEW:
            names = _names(images)
            rng = np.random.default_rng(seed)
            train, valid = split_images(names, rows, options.validation, rng)
            if len({texts[i].lower() for i in train}) < 2:
                train, valid = rows, rows[:0]
        task = PairTask(
            words or TextTokenizer.learn(texts[i] for i in train),
            size=options.image_size,
            length=options.max_words,
        )
        parts = [
            task.pairs([images[i] for i in part], [texts[i] for i in part], most=QUICK)
            for part in (train, valid)
            if len(part)
        ]
        self._train(task, parts[0], parts[1] if len(parts) > 1 else None, seed, time_limit)
        return self

    def _train(
        self,
        task: PairTask,
        train: PairData,
        valid: PairData | None,
        seed: int,
        time_limit: float | None,
    ) -> None:
        """Train a new model and set the fitted attributes."""
        from primal_attention.training import TrainingConfig, fit

        options = read_options(self._options_type, self.options)
        network = PairOptions(
            attention=self.attention,
            dim=self.dim,
            num_heads=self.num_heads,
            num_layers=self.num_layers,
            attention_options=options.attention_options,
            objectives=options.objectives,
            image_size=options.image_size,
            max_words=options.max_words,
        )
        with isolated(seed):
            model = task.build(network)
        config = TrainingConfig(
            epochs=self.max_epochs,
            min_steps=TRAINING["training"]["min_steps"],
            batch_size=self.batch_size,
            lr=self.learning_rate,
            monitor=TRAINING["training"]["monitor"],
            max_seconds=time_limit,
            seed=seed,
        )
        self.history_: History | None = fit(
            model,
            train,
            config=config,
            valid=valid,
            objective=task.objective,
            measure=lambda m, part: task.measure(m, part).scores,
            collate=task.collate,
            verbose=self.verbose,
        )
        judged = train if valid is None else valid
        search = PairSearch(model).add_images(to_pixel_values(judged.pixels))
        search.add_texts(judged.ids, judged.keep)
        wrong = mismatches(search, judged)[0]
        slope, offset = fit_probability(score_all(model, judged), score_all(model, judged, wrong))
        self.task_, self.model_ = replace(task, slope=slope, offset=offset), model
        self.__dict__.pop("_search", None)  # images that an earlier model has encoded

    def predict_proba(
        self, images: "Sequence[Picture]", texts: Sequence[str]
    ) -> NDArray[np.float64]:
        """Return the probability that each text matches its image.

        It is fitted on the validation part, beside as many random mismatches. A text that is wrong
        in one detail may well get a high probability; see ``"hard mismatches"`` of
        :meth:`evaluate`.

        Parameters
        ----------
        images : sequence
            Images, one for each text.

        texts : sequence of str
            The texts.

        Returns
        -------
        probabilities : array of shape (n_pairs,)
            One number for each pair, not one for each class.
        """
        check_is_fitted(self)
        data = self.task_.pairs(images, texts)
        answers = score_all(self.model_, data).double()
        check_finite({"scores": answers})
        scores = answers.numpy()
        found: NDArray[np.float64] = 1 / (1 + np.exp(-self._log_odds(scores)))
        return found

    def predict(self, images: "Sequence[Picture]", texts: Sequence[str]) -> NDArray[np.bool_]:
        """Return whether each text matches its image: a probability of at least one half."""
        return self.predict_proba(images, texts) >= 0.5

    def score(self, images: "Sequence[Picture]", texts: Sequence[str]) -> float:
        """Return R@1: the share of texts whose first image, among all of these, is right.

        It depends on the number of images: compare galleries of equal size only. Images that share
        a text are all right.

        Parameters
        ----------
        images : sequence
            Images, one for each text.

        texts : sequence of str
            The texts.

        Returns
        -------
        share : float
            From 0 to 1.
        """
        return self.evaluate(images, texts)["R@1"]

    def evaluate(self, images: "Sequence[Picture]", texts: Sequence[str]) -> dict[str, float]:
        """Return all scores of pairs: searches in both directions, and matching.

        Parameters
        ----------
        images : sequence
            Images, one for each text.

        texts : sequence of str
            The texts.

        Returns
        -------
        scores : dict
            ``"R@1"`` and ``"R@5"`` of images for a text, the same ``"of texts"`` for an image;
            ``"matching"``, the share of pairs and random mismatches that :meth:`predict` judges
            right; ``"hard mismatches"``, the share of the most similar wrong texts it rejects.
        """
        check_is_fitted(self)
        data = self.task_.pairs(images, texts)
        task = self.task_
        found = measure_pairs(self.model_, data, slope=task.slope, offset=task.offset)
        check_finite({"logits": found.answers["logits"]})
        return {name: score.value for name, score in found.scores.items() if name != "loss"}

    def index(self, images: "Sequence[Picture]", *, skip_broken: bool = False) -> Self:
        """Encode the images that :meth:`search` searches in.

        Parameters
        ----------
        images : sequence
            Paths, images of Pillow or arrays; ``list_images(folder)`` lists those of a folder.

        skip_broken : bool, default=False
            Leave out images that cannot be read; ``problems_`` then says why.

        Returns
        -------
        self : ImageTextMatcher
            With an index.
        """
        check_is_fitted(self)
        size = (self.task_.size, self.task_.size)
        images = images if isinstance(images, str | Path) else list(images)
        read: ReadImages = read_images(images, size, skip_broken=skip_broken)
        pixels = torch.from_numpy(read.pixels)
        search = PairSearch(self.model_)
        self._search = search.add_images(to_pixel_values(pixels))
        self._images = [(int(i), images[i]) for i in read.kept]
        self.problems_ = read.problems
        return self

    def search(
        self,
        text: str,
        k: int = 5,
        *,
        candidates: int = 100,
        reranker: Rerank | None = None,
    ) -> list[Hit]:
        """Return the best images of a text, among those of :meth:`index`.

        The contrastive first stage finds candidates, the joint encoder reads each of them with the
        text. Words that no training text has are read as unknown, with an
        :class:`UnknownWordsNotice`.

        Parameters
        ----------
        text : str
            What to look for.

        k : int, default=5
            Number of results.

        candidates : int, default=100
            Results of the first stage that are read with the text.

        reranker : object or None, default=None
            Anything with ``rerank(queries, gallery, ids)``, such as ``DiffusionReranker()`` of
            ``primal_attention.tasks.lists``: images that look like the three best matches move up.
            Its scores and those of the matching count the same.

        Returns
        -------
        hits : list of Hit
            Best first.
        """
        check_is_fitted(self)
        if not hasattr(self, "_search"):
            raise RuntimeError("There are no images to search in; call index(images) first.")
        for name, value in (("k", k), ("candidates", candidates)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
        text = as_text(text, "text")
        self._warn_unknown(text)
        ids, keep = self.task_.tokenizer.batch([text], self.task_.length)
        count = min(max(k, candidates), len(self._images))
        found = find_images(self._search, ids, keep, count)
        places, order_by = found.ids[0], found.scores[0].double()
        check_finite({"scores": order_by})
        odds = self._log_odds(order_by.numpy())
        if reranker is not None and count > 1:
            order_by = _rerank(reranker, cast(Tensor, self._search.image_vectors), places, order_by)
            order = order_by.argsort(descending=True, stable=True)
            places, order_by, odds = places[order], order_by[order], odds[order.numpy()]
        return [
            Hit(*self._images[int(i)], float(1 / (1 + np.exp(-o))), float(s))
            for i, o, s in zip(places[:k], odds, order_by, strict=False)
        ]

    @classmethod
    def _parameters_of(cls, task: Any, model: Any) -> dict[str, object]:
        config = model.config
        names = ("attention", "dim", "num_heads", "num_layers")
        options = PairFitOptions(
            image_size=task.size,
            max_words=task.length,
            objectives=config.objectives,
            attention_options=config.attention_options,
        )
        return {**{name: getattr(config, name) for name in names}, "options": options}

    def _plain_parameters(self) -> dict[str, object]:
        options = plain_options(self._options_type, self.options)
        if options is not None:
            options["tokenizer"] = None  # the task has it
        return {**super()._plain_parameters(), "options": options}

    def _log_odds(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.clip(self.task_.slope * scores + self.task_.offset, -50, 50)

    def _warn_unknown(self, text: str) -> None:
        unknown = self.task_.tokenizer.unknown(text)
        if unknown:
            warnings.warn(
                f"No training text has {', '.join(map(repr, unknown))}; the search reads "
                f"{'them' if len(unknown) > 1 else 'it'} as unknown.",
                UnknownWordsNotice,
                stacklevel=3,
            )


def _names(images: "Sequence[Picture]") -> list[str]:
    """Return a name for each image; the same object or path has the same name."""
    return [str(i) if isinstance(i, str | Path) else f"{id(i)}" for i in images]


def _rerank(
    reranker: Rerank, vectors: Tensor, places: Int[Tensor, " k"], scores: Float[Tensor, " k"]
) -> Float[Tensor, " k"]:
    """Return matching scores and those of a re-ranker, both standardised, and averaged."""
    weights = torch.softmax(scores[:_FIRST], 0).float()
    query = torch.nn.functional.normalize(weights @ vectors[places[:_FIRST]], dim=0)
    found = reranker.rerank(query[None].numpy(), vectors.numpy(), places[None].numpy())
    new = torch.full_like(scores, float("-inf"))
    where = {int(item): i for i, item in enumerate(places)}
    for item, value in zip(found.ids[0], found.scores[0], strict=True):
        new[where[int(item)]] = float(value)
    parts = [(x - x.mean()) / x.std(correction=0).clamp_min(1e-12) for x in (scores, new)]
    return (parts[0] + parts[1]) / 2
