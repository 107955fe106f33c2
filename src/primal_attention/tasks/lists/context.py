"""A trained re-ranker that looks at the list as a whole."""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import Dataset

from primal_attention.support.command import UserError, user_errors
from primal_attention.support.files import SealedFolder, UnsealedWarning, parse_json, write_sealed
from primal_attention.support.output import to_json
from primal_attention.tasks.lists.affinity import affinities_of_cosines
from primal_attention.tasks.lists.base import Lists, Reranked, Reranker, ordered
from primal_attention.tasks.lists.context_model import (
    ContextEncoder,
    ContextOutput,
    list_loss,
)
from primal_attention.tasks.lists.gallery import Gallery, as_vectors
from primal_attention.tasks.lists.lists import GivenLists, TrainingLists, collate_lists
from primal_attention.tasks.lists.metrics import mean_average_precision
from primal_attention.tasks.lists.settings import Affinity, ContextConfig
from primal_attention.tasks.saving import check_parameters
from primal_attention.training import TrainingConfig, fit

__all__ = ["ContextReranker"]

_FILE = "reranker.json"
_SMALLEST_BLOCK = 2048
"""Candidates to read at once at least: the anchors and the graph of a list."""


class ContextReranker(Reranker):
    """Order by a small Transformer over the similarities of the list.

    Only similarities enter, so one trained model serves descriptors of any kind and width. With
    ``attention="primal-dual"`` a list takes ``O(K)`` time and memory; with ``"softmax"`` ``O(K²)``
    time. Lists whose vectors exceed ``max_memory`` are read in blocks, except with softmax.

    Args:
        candidates: Length of the training lists.
        anchors: Results at the top of the list that describe the others.
        affinity: ``"both"`` kernels, ``"inner"`` products (published), or ``"diffusion"``.
        input: ``"means"`` over the first anchors, or ``"linear"`` (published).
        attention: ``"primal-dual"``, ``"softmax"``, or ``"primal-static"``, which does not mix
            candidates.
        dim: Width of the encoder.
        depth: Number of blocks.
        steps: Training steps of 8 lists.
        temperature: Temperature of the contrastive loss.
        random_state: Seed.

    Attributes:
        model_: The trained :class:`ContextEncoder`.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> x = np.repeat(rng.standard_normal((6, 8)), 5, 0) + 0.3 * rng.standard_normal((30, 8))
        >>> x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype("float32")
        >>> reranker = ContextReranker(candidates=12, steps=2).fit(x, np.arange(30) // 5)
        >>> reranker.rerank(x[:2], x, np.argsort(-x[:2] @ x.T)).ids.shape
        (2, 30)
    """

    model_: ContextEncoder

    def __init__(
        self,
        candidates: int = 256,
        anchors: int = 64,
        affinity: Affinity = "both",
        input: Literal["means", "linear"] = "means",
        attention: Literal["primal-dual", "softmax", "primal-static"] = "primal-dual",
        dim: int = 64,
        depth: int = 2,
        steps: int = 600,
        temperature: float = 2.0,
        random_state: int = 0,
    ) -> None:
        self.candidates = candidates
        self.anchors = anchors
        self.affinity = affinity
        self.input = input
        self.attention = attention
        self.dim = dim
        self.depth = depth
        self.steps = steps
        self.temperature = temperature
        self.random_state = random_state

    def fit(self, X: Any, y: Any, *, normalize: bool = False) -> Self:
        """Train on items of known groups: the members of a group are relevant to each other.

        Args:
            X: Unit vectors [items, width].
            y: Group of each item.
            normalize: Whether to scale vectors to norm one.
        """
        vectors, groups = as_vectors(X, "X", normalize), np.asarray(y)
        if groups.ndim != 1 or len(groups) != len(vectors):
            raise ValueError(
                f"y must hold one group for each of the {len(vectors)} items, got the shape "
                f"{groups.shape}."
            )
        if len(np.unique(groups)) < 2:
            raise ValueError("y holds one group only; relevance needs at least two groups.")
        return self.fit_sets([(vectors, groups)])

    def fit_lists(
        self, xq: Any, xb: Any, ids: Any, relevance: Any, *, normalize: bool = False
    ) -> Self:
        """Train on the lists of a search whose relevant results are known, such as clicked ones.

        Args:
            xq: Unit vectors of the queries [queries, width].
            xb: The gallery, as for :meth:`rerank`.
            ids: Results of the search [queries, results], best first; -1 is an empty slot.
            relevance: 1 or ``True`` where a result is relevant, in the shape of ``ids``. Lists
                without relevant results, or with nothing else, are left out.
            normalize: Whether to scale vectors to norm one.
        """
        return self._train(GivenLists(xq, xb, ids, relevance, self.candidates, normalize))

    def fit_sets(self, sets: Sequence[tuple[Any, Any]]) -> Self:
        """Train on several sets of vectors and groups; each item is searched in its own set."""
        return self._train(TrainingLists(sets, self.candidates + 1))

    def _train(self, data: Dataset[dict[str, Tensor]]) -> Self:
        config = ContextConfig(
            dim=self.dim,
            num_layers=self.depth,
            attention=self.attention,
            affinity=self.affinity,
            anchors=self.anchors,
            input=self.input,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.random_state)
            model = ContextEncoder(config)
        training = TrainingConfig(
            epochs=1,
            epoch_steps=self.steps,
            batch_size=8,
            lr=1e-3,
            eta=0.05,
            seed=self.random_state,
        )
        fit(
            model,
            data,
            config=training,
            objective=self._objective,
            collate=collate_lists,
            verbose=False,
        )
        self.model_ = model
        return self

    def _objective(self, output: ContextOutput, labels: Tensor) -> Tensor:
        return list_loss(output, labels, temperature=self.temperature)

    def score_lists(self, lists: Lists) -> tuple[Float[Tensor, "b k"], Lists]:
        """Return the cosines of the refined candidates with the refined query."""
        tokens = torch.cat([lists.query[:, None], lists.items], 1)
        keep = torch.cat([torch.ones_like(lists.keep[:, :1]), lists.keep], 1)
        return self._fitted()(tokens, keep).scores[:, 1:], lists

    @torch.no_grad()
    def _rerank_block(
        self, queries: Tensor, gallery: Gallery, ids: Any, blend: float, max_memory: int
    ) -> tuple[Any, Any]:
        """Read lists that are larger than ``max_memory`` in blocks."""
        width = queries.shape[1]
        if 4 * ids.size * width <= max_memory or self._fitted().config.attention == "softmax":
            return super()._rerank_block(queries, gallery, ids, blend, max_memory)
        size = max(_SMALLEST_BLOCK, self.anchors, max_memory // (4 * width))
        scores, first = (torch.zeros(ids.shape) for _ in range(2))
        for i, row in enumerate(ids):
            real = row[row >= 0]  # empty slots are last
            cosines: list[Tensor] = []
            blocks = self._blocks(queries[i], gallery, real, size, cosines)
            scores[i, : len(real)] = self._fitted().score_stream(blocks)[1:]
            first[i, : len(real)] = torch.cat(cosines)[1:]
        return ordered(scores, first, torch.from_numpy(ids >= 0), blend)

    def _blocks(
        self, query: Tensor, gallery: Gallery, ids: Any, size: int, cosines: list[Tensor]
    ) -> Iterator[Tensor]:
        """Yield query and candidates in blocks; their cosines with the query are appended."""
        for start in range(0, max(len(ids), 1), size):
            block = gallery.take(ids[start : start + size])
            block = torch.cat([query[None], block]) if start == 0 else block
            cosines.append(block @ query)
            yield block

    @torch.no_grad()
    def rerank_affinity(self, a: Any, keep: Any = None) -> Reranked:
        """Return the order of candidates of which only similarities are known.

        Args:
            a: Cosines [queries, K + 1, K + 1] of query and candidates with each other, query
                first, best candidate next. With ``affinity="inner"`` the first columns, one for
                each anchor, are enough.
            keep: ``True`` where there is a token [queries, K + 1]; by default everywhere.

        Returns:
            Places of the candidates in their list, counted from 0, best first, and scores; -1 and
            ``-inf`` for empty slots.

        Example:
            >>> x = np.eye(4, dtype="float32")[[0, 0, 1, 0]]
            >>> found = ContextReranker.pretrained().rerank_affinity((x @ x.T)[None])
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

    def score(self, xq: Any, xb: Any, ids: Any, relevant: Sequence[Any]) -> float:
        """Return the mean average precision after re-ranking."""
        return mean_average_precision(self.rerank(xq, xb, ids).ids, relevant)

    def _fitted(self) -> ContextEncoder:
        if not hasattr(self, "model_"):
            raise RuntimeError("The re-ranker is not trained; call fit or load first.")
        return self.model_.eval()

    def save(self, folder: str | Path) -> None:
        """Write the trained re-ranker to a folder."""
        files = self._fitted().to_files()
        write_sealed(Path(folder), {**files, _FILE: to_json(self.get_params())})

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Return the re-ranker in a folder that :meth:`save` or ``primal train`` wrote.

        Raises:
            UserError: If it holds none, or a file in it was changed or damaged.
        """
        path = Path(folder)
        if not (path / _FILE).exists() and (path / "model").is_dir():
            return cls._of_encoder(ContextEncoder.from_pretrained(path / "model"))
        if not (path / _FILE).is_file():
            raise UserError(
                f"{folder} holds no re-ranker: it has no {_FILE}; give a folder that save or "
                "primal train wrote."
            )
        model = ContextEncoder.from_pretrained(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnsealedWarning)  # the model has warned
            parameters = parse_json(SealedFolder(path).read(_FILE), path / _FILE)
        with user_errors(f"{path / _FILE} is damaged", UserError, ValueError, TypeError):
            loaded = cls(**check_parameters(cls, parameters))
        loaded.model_ = model
        return loaded

    @classmethod
    def pretrained(cls) -> Self:
        """Return the re-ranker that comes with the package, for vectors of any kind and width.

        It was trained by ``primal train reranker`` on half of the groups of COIL-20 (objects),
        Palm and emoji, and on synthetic curves. ``docs/evidence/lists.md`` shows how it does
        on other data.

        Example:
            >>> ContextReranker.pretrained().attention
            'primal-dual'
        """
        return cls.load(Path(__file__).parent / "pretrained")

    @classmethod
    def _of_encoder(cls, model: ContextEncoder) -> Self:
        """Return the re-ranker of a trained encoder."""
        options: Any = model.config
        names = ("anchors", "affinity", "input", "attention", "dim")
        made = cls(**{name: getattr(options, name) for name in names}, depth=options.num_layers)
        made.model_ = model
        return made
