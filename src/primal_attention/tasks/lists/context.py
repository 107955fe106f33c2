"""A trained re-ranker that looks at the list as a whole."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.utils.data import Dataset

from primal_attention.models import PretrainedModel
from primal_attention.support.options import read_options
from primal_attention.support.randomness import isolated
from primal_attention.tasks.estimators import SavedEstimator, check_fit
from primal_attention.tasks.lists.affinity import affinities_of_cosines
from primal_attention.tasks.lists.base import BaseReranker, Lists, Reranked, ordered
from primal_attention.tasks.lists.context_model import ContextEncoder, list_loss
from primal_attention.tasks.lists.gallery import Gallery, as_vectors
from primal_attention.tasks.lists.lists import GivenLists, TrainingLists, collate_lists
from primal_attention.tasks.lists.metrics import mean_average_precision
from primal_attention.tasks.lists.settings import ContextConfig, ListFitOptions
from primal_attention.tasks.lists.task import RerankTask
from primal_attention.tasks.task import Task
from primal_attention.training import TrainingConfig, fit

if TYPE_CHECKING:
    from primal_attention.training import History

__all__ = ["Reranker"]

_SMALLEST_BLOCK = 2048
"""Candidates to read at once at least: the anchors and the graph of a list."""


class Reranker(SavedEstimator, BaseReranker):
    """Order by a small Transformer over the similarities of the list.

    Only similarities enter, so one trained model serves descriptors of any kind and width. With
    ``attention="primal-dual"`` a list takes ``O(K)`` time and memory; with ``"softmax"`` ``O(K²)``
    time. Lists whose vectors exceed ``max_memory`` are read in blocks, except with softmax.

    Args:
        attention: ``"primal-dual"``, ``"softmax"``, or ``"primal-static"``, which does not mix
            candidates.
        dim: Width of the encoder.
        num_heads: Heads; must divide ``dim``.
        num_layers: Number of blocks.
        max_epochs: Epochs of 100 training steps.
        batch_size: Lists per step.
        learning_rate: Peak learning rate.
        options: What is rarely changed, as :class:`ListFitOptions` or a dictionary: length of the
            training lists (``candidates``), ``anchors``, ``affinity``, ``input``,
            ``temperature``, steps of an epoch (``epoch_steps``).
        random_state: Seed, a generator that draws it, or None for another seed in each fit.
        verbose: Whether to show progress; by default a bar if there is a terminal.

    Attributes:
        model_: The trained :class:`ContextEncoder`.
        task_: The :class:`RerankTask`, with the length of the training lists.
        history_: Loss, epoch by epoch; None after :meth:`load`.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> x = np.repeat(rng.standard_normal((6, 8)), 5, 0) + 0.3 * rng.standard_normal((30, 8))
        >>> x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype("float32")
        >>> options = {"candidates": 12, "epoch_steps": 2}
        >>> reranker = Reranker(max_epochs=1, options=options).fit(x, np.arange(30) // 5)
        >>> reranker.rerank(x[:2], x, np.argsort(-x[:2] @ x.T)).ids.shape
        (2, 30)
    """

    _task: ClassVar[type[Task]] = RerankTask
    _model: ClassVar[type[PretrainedModel]] = ContextEncoder
    _options_type: ClassVar[type[ListFitOptions]] = ListFitOptions
    task_: RerankTask
    model_: ContextEncoder
    history_: "History | None"

    def __init__(
        self,
        attention: str = "primal-dual",
        dim: int = 64,
        num_heads: int = 4,
        num_layers: int = 2,
        max_epochs: int = 6,
        batch_size: int = 8,
        learning_rate: float = 1e-3,
        options: ListFitOptions | Mapping[str, object] | None = None,
        random_state: int | np.random.RandomState | None = 0,
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
        self, X: object, y: object, *, normalize: bool = False, time_limit: float | None = None
    ) -> Self:
        """Train on items of known groups: the members of a group are relevant to each other.

        Args:
            X: Unit vectors [items, width].
            y: Group of each item.
            normalize: Whether to scale vectors to norm one.
            time_limit: Seconds of training after which it ends; the schedule is shortened to fit.
        """
        vectors, groups = as_vectors(X, "X", normalize), np.asarray(y)
        if groups.ndim != 1 or len(groups) != len(vectors):
            raise ValueError(
                f"y must hold one group for each of the {len(vectors)} items, got the shape "
                f"{groups.shape}."
            )
        if len(np.unique(groups)) < 2:
            raise ValueError("y holds one group only; relevance needs at least two groups.")
        return self.fit_sets([(vectors, groups)], time_limit=time_limit)

    def fit_lists(
        self,
        xq: object,
        xb: object,
        ids: object,
        relevance: object,
        *,
        normalize: bool = False,
        time_limit: float | None = None,
    ) -> Self:
        """Train on the lists of a search whose relevant results are known, such as clicked ones.

        Args:
            xq: Unit vectors of the queries [queries, width].
            xb: The gallery, as for :meth:`rerank`.
            ids: Results of the search [queries, results], best first; -1 is an empty slot.
            relevance: 1 or ``True`` where a result is relevant, in the shape of ``ids``. Lists
                without relevant results, or with nothing else, are left out.
            normalize: Whether to scale vectors to norm one.
            time_limit: Seconds of training after which it ends; the schedule is shortened to fit.
        """
        options = self._fit_options()
        data = GivenLists(xq, xb, ids, relevance, options.candidates, normalize)
        return self._train(data, options, time_limit)

    def fit_sets(
        self, sets: Sequence[tuple[object, object]], *, time_limit: float | None = None
    ) -> Self:
        """Train on several sets of vectors and groups; each item is searched in its own set.

        Args:
            sets: Vectors and groups of each set, as for :meth:`fit`.
            time_limit: Seconds of training after which it ends; the schedule is shortened to fit.
        """
        options = self._fit_options()
        return self._train(TrainingLists(sets, options.candidates + 1), options, time_limit)

    def _train(
        self,
        data: Dataset[dict[str, Tensor]],
        options: ListFitOptions,
        time_limit: float | None,
    ) -> Self:
        check_fit(self, time_limit)
        seed = self.random_state
        if not isinstance(seed, int):
            from sklearn.utils import check_random_state

            seed = int(check_random_state(seed).randint(np.iinfo(np.int32).max))
        config = ContextConfig(
            dim=self.dim,
            num_heads=self.num_heads,
            num_layers=self.num_layers,
            attention=self.attention,
            affinity=options.affinity,
            anchors=options.anchors,
            input=options.input,
        )
        with isolated(seed):
            model = ContextEncoder(config)
        training = TrainingConfig(
            epochs=self.max_epochs,
            epoch_steps=options.epoch_steps,
            batch_size=self.batch_size,
            lr=self.learning_rate,
            eta=0.05,
            max_seconds=time_limit,
            seed=seed,
        )
        self.history_ = fit(
            model,
            data,
            config=training,
            objective=partial(list_loss, temperature=options.temperature),
            collate=collate_lists,
            verbose=self.verbose,
        )
        self.task_, self.model_ = RerankTask(options.candidates), model
        return self

    def score_lists(self, lists: Lists) -> tuple[Float[Tensor, "b k"], Lists]:
        """Return the cosines of the refined candidates with the refined query."""
        tokens = torch.cat([lists.query[:, None], lists.items], 1)
        keep = torch.cat([torch.ones_like(lists.keep[:, :1]), lists.keep], 1)
        return self._fitted()(tokens, keep).scores[:, 1:], lists

    @torch.no_grad()
    def _rerank_block(
        self,
        queries: Tensor,
        gallery: Gallery,
        ids: NDArray[np.int64],
        blend: float,
        max_memory: int,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Read lists that are larger than ``max_memory`` in blocks."""
        width = queries.shape[1]
        if 4 * ids.size * width <= max_memory or self._fitted().config.attention == "softmax":
            return super()._rerank_block(queries, gallery, ids, blend, max_memory)
        size = max(_SMALLEST_BLOCK, self._fitted().config.anchors, max_memory // (4 * width))
        scores, first = (torch.zeros(ids.shape) for _ in range(2))
        for i, row in enumerate(ids):
            real = row[row >= 0]  # empty slots are last
            cosines: list[Tensor] = []
            blocks = self._blocks(queries[i], gallery, real, size, cosines)
            scores[i, : len(real)] = self._fitted().score_stream(blocks)[1:]
            first[i, : len(real)] = torch.cat(cosines)[1:]
        return ordered(scores, first, torch.from_numpy(ids >= 0), blend)

    def _blocks(
        self,
        query: Tensor,
        gallery: Gallery,
        ids: NDArray[np.int64],
        size: int,
        cosines: list[Tensor],
    ) -> Iterator[Tensor]:
        """Yield query and candidates in blocks; their cosines with the query are appended."""
        for start in range(0, max(len(ids), 1), size):
            block = gallery.take(ids[start : start + size])
            block = torch.cat([query[None], block]) if start == 0 else block
            cosines.append(block @ query)
            yield block

    @torch.no_grad()
    def rerank_affinity(self, a: object, keep: object = None) -> Reranked:
        """Return the order of candidates of which only similarities are known.

        Args:
            a: Cosines [queries, K + 1, K + 1] of query and candidates with each other, query
                first, best candidate next. With the affinity ``"inner"`` the first columns, one for
                each anchor, are enough.
            keep: ``True`` where there is a token [queries, K + 1]; by default everywhere.

        Returns:
            Places of the candidates in their list, counted from 0, best first, and scores; -1 and
            ``-inf`` for empty slots.

        Example:
            >>> x = np.eye(4, dtype="float32")[[0, 0, 1, 0]]
            >>> found = Reranker.pretrained().rerank_affinity((x @ x.T)[None])
            >>> int(found.ids[0, -1])  # the second candidate differs from the query
            1
        """
        cosines = torch.as_tensor(np.asarray(a)).float()
        if cosines.ndim != 3 or not 0 < cosines.shape[2] <= cosines.shape[1]:
            raise ValueError(
                f"a must have the shape [queries, K + 1, K + 1], got {tuple(cosines.shape)}."
            )
        kept = torch.ones(cosines.shape[:2], dtype=torch.bool)
        if keep is not None:
            kept = torch.as_tensor(np.asarray(keep)).bool()
        if kept.shape != cosines.shape[:2] or not bool(kept[:, 0].all()):
            raise ValueError(
                f"keep must have the shape {tuple(cosines.shape[:2])} and be true for the query."
            )
        if bool((kept[:, 1:] & ~kept[:, :-1]).any()):
            raise ValueError("keep may be false at the end of a list only; move empty slots there.")
        model = self._fitted()
        pairs = kept[:, :, None] & kept[:, None, : cosines.shape[2]]
        given = torch.where(pairs, cosines, 0.0)
        if not given.isfinite().all() or float(given.abs().amax()) > 1.001:
            raise ValueError("a holds a value that is no cosine; they lie between -1 and 1.")
        features = affinities_of_cosines(given, kept, model.config.anchors, model.config.affinity)
        scores = model.score_affinities(features, kept).scores[:, 1:]
        order, values = ordered(scores, scores, kept[:, 1:], 0.0)
        return Reranked(np.where(np.isneginf(values), -1, order), values)

    def score(self, xq: object, xb: object, ids: object, relevant: Sequence[ArrayLike]) -> float:
        """Return the mean average precision after re-ranking."""
        return mean_average_precision(self.rerank(xq, xb, ids).ids, relevant)

    def _fitted(self) -> ContextEncoder:
        if not hasattr(self, "model_"):
            raise RuntimeError("The re-ranker is not trained; call fit or load first.")
        return self.model_.eval()

    @classmethod
    def _parameters_of(cls, task: RerankTask, model: ContextEncoder) -> dict[str, object]:
        config = model.config
        names = ("attention", "dim", "num_heads", "num_layers")
        options = ListFitOptions(
            candidates=task.candidates,
            anchors=config.anchors,
            affinity=config.affinity,
            input=config.input,
        )
        return {**{name: getattr(config, name) for name in names}, "options": options}

    def _fit_options(self) -> ListFitOptions:
        """Return the options, checked."""
        return read_options(self._options_type, self.options)

    def _check_fitted(self) -> None:
        self._fitted()

    @classmethod
    def pretrained(cls) -> Self:
        """Return the re-ranker that comes with the package, for vectors of any kind and width.

        It was trained by ``primal train reranker`` on half of the groups of COIL-20 (objects),
        Palm and emoji, and on synthetic curves. ``docs/evidence/lists.md`` shows how it does
        on other data.

        Example:
            >>> Reranker.pretrained().attention
            'primal-dual'
        """
        return cls.load(Path(__file__).parent / "pretrained")
