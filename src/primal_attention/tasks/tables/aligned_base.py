"""What the classifier and the regressor of aligned classes share."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from primal_attention.analysis.transport.metrics import MapMetrics, map_metrics
from primal_attention.functional.transport import EXACT_UP_TO
from primal_attention.support.command import UserError, needs, progress, user_errors
from primal_attention.support.files import SealedFolder, UnsealedWarning, parse_json, save_sealed
from primal_attention.support.files.seals import Files
from primal_attention.support.options import read_options
from primal_attention.support.output import to_json
from primal_attention.support.randomness import isolated
from primal_attention.support.settings import build
from primal_attention.tasks.estimators import check_fit, check_parameters, plain_parameters
from primal_attention.tasks.splits import stratified_split
from primal_attention.tasks.tables.aligned_geometry import (
    Floats,
    Labels,
    MatchedClasses,
    match_classes,
)
from primal_attention.tasks.tables.aligned_model import (
    AlignedConfig,
    AlignedMap,
    RowBatches,
    learned_loss,
    map_loss,
)
from primal_attention.tasks.tables.columns import TableColumn, TableLike, ValidTable, take_items
from primal_attention.tasks.tables.encoding import (
    TableEncoder,
    accept_tables,
    rank_cells,
    validate_table,
)
from primal_attention.tasks.tables.settings import AlignedFitOptions
from primal_attention.tasks.task import ESTIMATOR
from primal_attention.tasks.trained import check_finite
from primal_attention.training import History, TrainingConfig, fit

with needs("sklearn", "An estimator of aligned classes"):
    from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
    from sklearn.utils import Tags, check_random_state
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["AlignedEstimator"]

_FORMAT = 1
_FEW = 10
"""Fewer instances than this give no validation part."""
_BATCHES = 10
"""Batches of an epoch."""
_BLOCK = 256
"""Rows are mapped in padded blocks of this size, so that a row never feels its neighbours."""


class Instances(NamedTuple):
    """Rows of a table, in groups of equally many tokens."""

    rows: ValidTable
    """Table with a row for every token of every instance."""
    places: Labels
    """Row of each token of each instance ``[n t]``."""

    def take(self, chosen: Labels) -> "Instances":
        """Return some of the instances."""
        places = self.places[chosen]
        rows = take_items(self.rows, places.ravel())
        return Instances(rows, np.arange(places.size).reshape(places.shape))


class Problem(NamedTuple):
    """What a network is trained on."""

    x: Floats
    """Dense rows ``[n t r]``."""
    points: Floats
    """Where they start ``[n t q]``."""
    y: np.ndarray
    """Targets of the instances, as the subclass wants them."""
    weights: Floats
    """Weight of every instance, with mean one."""

    def take(self, chosen: Labels) -> "Problem":
        """Return some of the instances."""
        return Problem(*(part[chosen] for part in self))


class AlignedEstimator(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Base class: a small network trained to carry rows to matched targets."""

    _options_type: ClassVar[type[AlignedFitOptions]] = AlignedFitOptions
    encoder_: TableEncoder
    model_: AlignedMap
    targets_: Floats
    history_: History | None

    def __init__(
        self,
        *,
        hidden: Sequence[int] = (32, 32),
        n_components: int | None = None,
        max_epochs: int = 60,
        batch_size: int | None = None,
        learning_rate: float = 0.01,
        options: AlignedFitOptions | Mapping[str, object] | None = None,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool | None = None,
    ) -> None:
        self.hidden = hidden
        self.n_components = n_components
        self.max_epochs = max_epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.options = options
        self.random_state = random_state
        self.verbose = verbose

    def _fit_options(self) -> AlignedFitOptions:
        return read_options(self._options_type, self.options)

    def _check(self, y: ArrayLike | None, time_limit: float | None) -> None:
        """Raise for wrong parameters, or if there is no target, before any work."""
        if y is None:
            raise ValueError(
                f"{type(self).__name__} requires y to be passed, but the target y is None."
            )
        check_fit(self, time_limit, any_batch=True)
        self._fit_options()

    def transform(self, X: TableLike) -> Floats:
        """Return where the learned map carries the rows.

        Parameters
        ----------
        X : frame or array-like of shape (n_samples, n_features) or \
                (n_samples, n_tokens, n_features)
            A table, or instances of several rows.

        Returns
        -------
        points : ndarray of shape (n_samples, n_outputs) or (n_samples, n_tokens, n_outputs)
            Mapped points.
        """
        found = self._mapped(self._dense(self._read(X, reset=False)))
        return found if _dimensions(X) == 3 else found[:, 0]

    def score_map(self, X: TableLike, y: ArrayLike | None = None) -> MapMetrics:
        """Return how near the learned map is to an optimal one on these rows.

        Parameters
        ----------
        X : frame or array-like
            Rows as in :meth:`transform`; of more than 1,500 points a random sample is taken.

        y : array-like of shape (n_samples,), default=None
            Groups. If given, the best map may exchange points of the same group only.

        Returns
        -------
        score : MapMetrics
            Cost, optimal cost, Monge gap, optimality, share of points that the best map sends to
            the same place, and spread.
        """
        before, after, labels = self._ends(X, y)
        chosen = np.random.default_rng(0).permutation(len(before))[:EXACT_UP_TO]
        return map_metrics(before[chosen], after[chosen], labels[chosen], scope="class")

    def plot_map(self, X: TableLike, y: ArrayLike | None = None) -> "Figure":
        """Return a figure of the learned map as arrows, beside the optimal map to the same points.

        Parameters
        ----------
        X : frame or array-like
            Rows as in :meth:`transform`. More than two coordinates are shown by their principal
            components.

        y : array-like of shape (n_samples,), default=None
            Groups, shown by colour.

        Returns
        -------
        figure : matplotlib Figure
            Two panels.
        """
        with needs("analysis", "A picture"):
            from primal_attention.analysis.transport.plots import plot_map

        return plot_map(*self._ends(X, y))

    def _ends(self, X: TableLike, y: ArrayLike | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return start, end and group of all points."""
        dense = self._dense(self._read(X, reset=False))
        start = (dense @ self.model_.projection.numpy()).reshape(-1, self._n_features_out)
        end = self._mapped(dense).reshape(start.shape)
        groups = np.zeros(len(dense), np.int64)
        if y is not None:
            groups = np.unique(self._groups(np.asarray(y)), return_inverse=True)[1]
        labels = np.repeat(groups, dense.shape[1])
        return torch.from_numpy(start), torch.from_numpy(end), torch.from_numpy(labels)

    def save(self, path: str | Path) -> None:
        """Write the fitted estimator to a folder; no file in it can run code.

        Parameters
        ----------
        path : str or Path
            Folder, made if it is not there. Read it with :meth:`load`.
        """
        check_is_fitted(self)
        content = {
            "format": _FORMAT,
            "class": type(self).__name__,
            "parameters": plain_parameters(self),
            "columns": [asdict(column) for column in self.encoder_.columns_],
            "is_frame": self.encoder_.is_frame_,
            "fitted": self._fitted(),
        }
        files: Files = {ESTIMATOR: to_json(content), "model": self.model_.to_files()}
        save_sealed(Path(path), files)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the estimator in a folder that :meth:`save` wrote.

        Parameters
        ----------
        path : str or Path
            The folder.

        Returns
        -------
        estimator : OTAlignedClassifier or OTAlignedRegressor
            Fitted, ready to predict.

        Raises
        ------
        UserError
            A ``ValueError``, if the folder holds something else, or a file in it was changed or
            damaged after it was saved.
        """
        folder = SealedFolder(path)
        file = folder.path / ESTIMATOR
        content = parse_json(folder.read(ESTIMATOR), file)
        with warnings.catch_warnings():
            if folder.sums is None:  # of which the folder itself has warned
                warnings.simplefilter("ignore", UnsealedWarning)
            model = AlignedMap.from_pretrained(folder.part("model").path)
        with user_errors(f"{file} cannot be read", UserError, ValueError, TypeError, LookupError):
            if (content["format"], content["class"]) != (_FORMAT, cls.__name__):
                raise ValueError(
                    f"it holds a {content['class']} in format {content['format']}, not a "
                    f"{cls.__name__} in format {_FORMAT}"
                )
            estimator = cls(**check_parameters(cls, content["parameters"]))
            estimator.encoder_ = TableEncoder.from_columns(
                [build(TableColumn, column) for column in content["columns"]],
                is_frame=bool(content["is_frame"]),
                categorical_features=estimator._fit_options().categorical_features,
                max_categories=estimator._fit_options().max_categories,
            )
            for name in ("n_features_in_", "feature_names_in_"):
                if hasattr(estimator.encoder_, name):
                    setattr(estimator, name, getattr(estimator.encoder_, name))
            estimator.model_, estimator.history_ = model, None
            estimator._restore(content["fitted"])
        return estimator

    def _groups(self, y: np.ndarray) -> np.ndarray:
        """Return the groups of :meth:`score_map`."""
        return y

    def _fitted(self) -> dict[str, Any]:
        """Return fitted values besides the network and the encoder, as plain values."""
        raise NotImplementedError

    def _restore(self, fitted: dict[str, Any]) -> None:
        """Set what :meth:`_fitted` returned."""
        raise NotImplementedError

    def _match(self, part: Problem, seed: int) -> MatchedClasses:
        """Return the targets of the points of a part."""
        raise NotImplementedError

    def _match_classes(
        self, points: Floats, labels: Labels, centres: Floats, weights: Floats, seed: int
    ) -> MatchedClasses:
        options = self._fit_options()
        return match_classes(
            points,
            labels,
            centres,
            weights=weights,
            match=options.match,
            dummies=options.dummies,
            ot_batch=options.ot_batch,
            seed=seed,
        )

    def _distinct(
        self, X: TableLike, y: np.ndarray, sample_weight: ArrayLike | None
    ) -> tuple[Instances, np.ndarray, Floats]:
        """Return distinct instances in a fixed order, with targets and sums of weights.

        So a weight of two is the same as two equal instances, and the order has no effect.
        """
        found = self._read(X, reset=True)
        count = len(found.places)
        weights = _check_sample_weight(sample_weight, found.places, ensure_non_negative=True)
        if len(y) != count:
            raise ValueError(f"X has {count} instances and y has {len(y)} values; pass one each.")
        if not weights.any():
            raise ValueError("all of sample_weight is zero; at least one must be positive.")
        kept = np.flatnonzero(weights > 0)
        part = found.take(kept)
        keys = rank_cells(part.rows)[part.places].reshape(len(kept), -1)
        keys = np.column_stack([np.unique(y[kept], return_inverse=True)[1], keys])
        _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        mass = np.bincount(inverse.ravel(), weights[kept]).astype(np.float64)
        return part.take(first), y[kept][first], mass

    def _train(
        self,
        instances: Instances,
        y: np.ndarray,
        mass: Floats,
        strata: Labels,
        time_limit: float | None,
    ) -> None:
        """Train the network and set the fitted attributes that both estimators have.

        Subclasses set the sizes of the map before, in ``_config``.
        """
        options = self._fit_options()
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        tokens = instances.places.shape[1]
        self.encoder_ = TableEncoder(options.categorical_features, options.max_categories)
        self.encoder_.fit(instances.rows, sample_weight=np.repeat(mass, tokens))
        x = self._dense(instances)
        config = self._config(x.shape[-1])
        with isolated(seed):
            model = AlignedMap(config)
        weights = mass / mass.mean()
        projection = _projection(x.reshape(-1, x.shape[-1]), np.repeat(weights, tokens), config)
        model.projection.copy_(torch.from_numpy(projection))
        whole = Problem(x, x @ projection, y, mass)
        centres = torch.from_numpy(self._place(whole)).float()
        with torch.no_grad():
            model.centres.copy_(centres)
        self.model_ = model.double()  # matching and maps read centres from here
        train, valid = self._split(strata, seed)
        parts = [self._match_part(whole.take(i), seed + j) for j, i in enumerate((train, valid))]
        self.targets_ = parts[0].labels[..., : config.num_outputs].double().numpy()
        self.history_ = self._run(model.float(), parts[0], parts[1], seed, time_limit)
        self.model_ = model.double()
        self._calibrate(whole.take(valid if len(valid) else train))

    def _match_part(self, part: Problem, seed: int) -> RowBatches:
        """Return rows with their targets, weights and classes."""
        count, tokens, width = part.points.shape
        labels = np.empty((count, tokens, width + 2))
        if count:
            most = self._fit_options().ot_batch
            if self.verbose and count * tokens > most:
                progress(f"matching {count * tokens:,} points, at most {most} at once")
            labels[..., :width] = self._match(part, seed).targets
            labels[..., width] = (part.weights / part.weights.mean())[:, None]
            labels[..., width + 1] = self._codes(part.y)[:, None]
            if self._learns_centres:
                centres = self.model_.centres.detach().numpy()
                labels[..., :width] -= centres[self._codes(part.y)][:, None]
        return RowBatches(torch.from_numpy(part.x).float(), torch.from_numpy(labels).float())

    def _run(
        self,
        model: AlignedMap,
        train: RowBatches,
        valid: RowBatches,
        seed: int,
        time_limit: float | None,
    ) -> History:
        size = self.batch_size or max(1, len(train) // _BATCHES)
        config = TrainingConfig(
            epochs=self.max_epochs,
            batch_size=size,
            lr=self.learning_rate,
            optimizer="adam",
            weight_decay=0.0,
            patience=self._fit_options().patience if len(valid) else None,
            max_seconds=time_limit,
            seed=seed,
        )
        return fit(
            model,
            train,
            config=config,
            valid=valid if len(valid) else None,
            objective=learned_loss if self._learns_centres else map_loss,
            collate=dict,
            verbose=self.verbose,
        )

    def _split(self, strata: Labels, seed: int) -> tuple[Labels, Labels]:
        """Return the instances to train on and those that choose the epoch; perhaps none."""
        share = self._fit_options().validation
        if not share or len(strata) < _FEW:
            return np.arange(len(strata)), np.zeros(0, np.int64)
        return stratified_split(strata, share, seed=seed)

    def _read(self, X: TableLike, *, reset: bool) -> Instances:
        if not reset:
            check_is_fitted(self)
        count, tokens = None, 1
        if _dimensions(X) == 3:
            X = np.asarray(X)
            count, tokens = X.shape[:2]
            X = X.reshape(-1, X.shape[2])
        rows = validate_table(self, X, reset=reset)
        return Instances(rows, np.arange(len(rows)).reshape(count or -1, tokens))

    def _dense(self, instances: Instances) -> Floats:
        """Return dense rows ``[n t r]``."""
        dense = np.asarray(self.encoder_.transform(instances.rows))
        return dense[instances.places]

    @torch.no_grad()
    def _mapped(self, dense: Floats) -> Floats:
        """Return mapped points ``[n t q]``."""
        rows = torch.from_numpy(dense.reshape(-1, 1, dense.shape[-1]))
        parts = []
        for block in rows.split(_BLOCK):
            padded = torch.cat([block, block.new_zeros(_BLOCK - len(block), *block.shape[1:])])
            parts.append(self.model_(padded).points[: len(block), 0])
        points = torch.cat(parts)
        check_finite({"points": points})
        return points.numpy().reshape(*dense.shape[:2], -1)

    @property
    def _n_features_out(self) -> int:
        return int(self.model_.config.num_outputs)

    @property
    def _learns_centres(self) -> bool:
        return False

    def _config(self, num_inputs: int) -> AlignedConfig:
        raise NotImplementedError

    def _place(self, whole: Problem) -> Floats:
        """Return the centres, or what the subclass keeps in their place."""
        raise NotImplementedError

    def _codes(self, y: np.ndarray) -> Labels:
        """Return the class of every instance."""
        raise NotImplementedError

    def _calibrate(self, part: Problem) -> None:
        """Choose what depends on rows that training has not seen."""

    def __sklearn_tags__(self) -> Tags:
        tags = accept_tables(super().__sklearn_tags__())
        tags.input_tags.three_d_array = True
        tags.target_tags.required = True
        return tags


def _dimensions(X: TableLike) -> int:
    if hasattr(X, "ndim"):
        return int(X.ndim)
    try:
        return np.asarray(X).ndim
    except ValueError:
        return 2  # lists of unequal length, which validation explains


def _projection(rows: Floats, weights: Floats, config: AlignedConfig) -> Floats:
    """Return the map ``[r q]`` to the start: padding with zeros, or principal components."""
    if config.num_outputs >= config.num_inputs:
        return np.eye(config.num_inputs, config.num_outputs)
    centred = rows - np.average(rows, 0, weights)
    _, vectors = np.linalg.eigh((weights[:, None] * centred).T @ centred)
    return vectors[:, ::-1][:, : config.num_outputs].copy()
