"""Primal-Attention as an aeon classifier.

The class needs aeon, the rest of the package does not: it is defined when its name is first used.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from primal_attention.command import UserError, needs
from primal_attention.models import PretrainedModel
from primal_attention.tasks.saving import SavedEstimator, restore_classes
from primal_attention.tasks.task import Task
from primal_attention.tasks.timeseries.data import (
    SeriesCollection,
    SeriesDataset,
    collate_series,
    series_from_arrays,
)
from primal_attention.tasks.timeseries.model import SeriesClassifier
from primal_attention.tasks.timeseries.settings import SeriesOptions
from primal_attention.tasks.timeseries.task import SeriesTask
from primal_attention.tasks.trained import check_finite

with needs("timeseries", "PrimalTimeSeriesClassifier"):
    from aeon.classification.base import BaseClassifier

if TYPE_CHECKING:
    from typing import Self

    from primal_attention.training import History

__all__ = ["PrimalTimeSeriesClassifier"]

_EPOCHS = 20
"""Epochs in the history of a fit."""
_PASSES = 6
"""Fewest passes over the training data."""
_PREDICT_BATCH = 256
"""Series that are classified at once."""


class PrimalTimeSeriesClassifier(SavedEstimator, BaseClassifier):  # type: ignore[misc]
    """Transformer with linear attention for series of any length, number of channels and gaps.

    Channels are standardised by the training data, missing values interpolated, long series cut
    into patches. The defaults are meant to be left alone; they are those of the column "ours" of
    the reproduction study, chosen on held-out training data of six sets.

    Parameters
    ----------
    attention : str, default="primal-dual"
        Any name of ``primal_attention.list_attentions()``, such as ``"softmax"``.

    attention_options : dict, default=None
        Options of that attention, such as ``{"rank": 8}``.

    primal_layers : str, default="all"
        Blocks that use ``attention``: ``"all"`` or ``"last:k"``. The others use softmax.

    eta : float, default=0.1
        Weight of the KSVD term of primal layers.

    stem : {"both", "conv", "patch"}, default="both"
        How time steps become tokens: convolutions of three widths, one linear map per patch, or the
        sum of the two.

    dim : int, default=64
        Model width.

    num_heads : int, default=4
        Heads; must divide ``dim``.

    num_layers : int, default=2
        Blocks.

    max_tokens : int, default=48
        Longer series are cut into this many patches.

    dropout : float, default=0.2
        Dropout of every branch.

    jitter : float, default=0.1
        Strength of the changes of a training series each time it is seen: its pace, its start, the
        scale of its channels, and noise. With 0 every pass sees the same series.

    n_steps : int, default=240
        Optimiser steps; more if they would not make six passes over the training data.

    batch_size : int, default=32
        Series per step.

    lr : float, default=2e-3
        Peak learning rate.

    random_state : int, RandomState instance or None, default=None
        Draws the parameters, the order of the batches and the jitter.

    verbose : bool or None, default=None
        Whether ``fit`` shows its progress: a bar, or lines where there is no terminal. None draws a
        bar on a terminal and prints nothing elsewhere.

    Attributes
    ----------
    model_ : SeriesClassifier
        The trained model.

    task_ : SeriesTask
        Classes, and mean and deviation of every channel of the training data.

    history_ : History
        Loss, KSVD term and learning rate, epoch by epoch; None after :meth:`load`.

    References
    ----------
    Y. Chen, Q. Tao, F. Tonin, J. A. K. Suykens, "Primal-Attention: Self-attention through
    Asymmetric Kernel SVD in Primal Representation", NeurIPS 2023.

    Examples
    --------
    >>> import numpy as np
    >>> from primal_attention.tasks.timeseries import PrimalTimeSeriesClassifier
    >>> rng = np.random.default_rng(0)
    >>> y = np.array(["rising", "falling"] * 10)
    >>> slope = np.where(y == "rising", 1.0, -1.0)[:, None, None]
    >>> X = slope * np.linspace(-1, 1, 20) + 0.1 * rng.normal(size=(20, 1, 20))
    >>> clf = PrimalTimeSeriesClassifier(dim=16, n_steps=40, random_state=0).fit(X, y)
    >>> float(clf.score(X, y))
    1.0
    """

    _task: ClassVar[type[Task]] = SeriesTask
    _model: ClassVar[type[PretrainedModel]] = SeriesClassifier
    _tags = {  # noqa: RUF012 the name and the type are aeon's
        "X_inner_type": ["np-list", "numpy3D"],
        "algorithm_type": "deeplearning",
        "capability:missing_values": True,
        "capability:multivariate": True,
        "capability:unequal_length": True,
    }

    def __init__(
        self,
        attention: str = "primal-dual",
        attention_options: dict[str, Any] | None = None,
        primal_layers: str | tuple[int, ...] = "all",
        eta: float = 0.1,
        stem: str = "both",
        dim: int = 64,
        num_heads: int = 4,
        num_layers: int = 2,
        max_tokens: int = 48,
        dropout: float = 0.2,
        jitter: float = 0.1,
        n_steps: int = 240,
        batch_size: int = 32,
        lr: float = 2e-3,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool | None = None,
    ) -> None:
        self.attention = attention
        self.attention_options = attention_options
        self.primal_layers = primal_layers
        self.eta = eta
        self.stem = stem
        self.dim = dim
        self.num_heads = num_heads
        self.num_layers = num_layers
        self.max_tokens = max_tokens
        self.dropout = dropout
        self.jitter = jitter
        self.n_steps = n_steps
        self.batch_size = batch_size
        self.lr = lr
        self.random_state = random_state
        self.verbose = verbose
        super().__init__()

    def _fit(self, X: Any, y: NDArray[Any]) -> "Self":
        from sklearn.utils import check_random_state

        from primal_attention.training import TrainingConfig, fit

        series = self._series(X)
        labels = np.searchsorted(self.classes_, y).astype(np.int64)
        series = replace(series, y=labels, classes=tuple(map(str, self.classes_)))
        self.task_ = SeriesTask.fit(series)
        options = SeriesOptions(
            stem=self.stem,  # type: ignore[arg-type]
            max_tokens=self.max_tokens,
            dim=self.dim,
            num_heads=self.num_heads,
            num_layers=self.num_layers,
            attention=self.attention,
            attention_options=self.attention_options or {},
            primal_layers=self.primal_layers,
            dropout=self.dropout,
        )
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model_ = self.task_.build(options)
        steps = max(self.n_steps, _PASSES * -(-len(series) // self.batch_size))
        training = TrainingConfig(
            epochs=_EPOCHS if steps >= _EPOCHS else 1,
            epoch_steps=-(-steps // _EPOCHS) if steps >= _EPOCHS else steps,
            batch_size=self.batch_size,
            lr=self.lr,
            eta=self.eta,
            seed=seed,
        )
        data = SeriesDataset(self.task_.prepare(series).series, self.jitter)
        self.history_: History | None = fit(
            self.model_, data, config=training, collate=collate_series, verbose=self.verbose
        )
        return self

    def _predict(self, X: Any) -> NDArray[Any]:
        return self.classes_[self._predict_proba(X).argmax(1)]

    def _predict_proba(self, X: Any) -> NDArray[np.float64]:
        data = self.task_.prepare(self.task_.without_labels(self._series(X)))
        answers = self.task_.measure(self.model_, data, batch_size=_PREDICT_BATCH).answers
        check_finite(answers)
        return answers["logits"].double().softmax(-1).numpy()

    def _series(self, X: Any) -> SeriesCollection:
        return series_from_arrays(list(X))

    def _check_fitted(self) -> None:
        self._check_is_fitted()

    @classmethod
    def _parameters_of(cls, task: Any, model: Any) -> dict[str, Any]:
        config = model.config
        names = ("attention", "primal_layers", "stem", "dim", "num_heads", "num_layers")
        parameters = {name: getattr(config, name) for name in (*names, "max_tokens", "dropout")}
        return {**parameters, "attention_options": dict(config.attention_options) or None}

    def _extra(self) -> dict[str, Any]:
        return {
            "classes": [c.item() if hasattr(c, "item") else c for c in self.classes_],
            "classes_dtype": self.classes_.dtype.str,
            "metadata": {key: _plain(value) for key, value in self.metadata_.items()},
        }

    def _restore(self, content: Mapping[str, Any]) -> None:
        names = self.task_.classes
        if content:
            for key in ("classes", "classes_dtype", "metadata"):
                if key not in content:
                    raise UserError(f"it has no {key}.")
            dtype = content["classes_dtype"]
            self.classes_ = restore_classes(content["classes"], dtype, len(names))
            self.metadata_ = dict(content["metadata"])
        else:  # of primal train
            self.classes_, channels = np.array(names), len(self.task_.mean)
            self.metadata_ = {"multivariate": channels > 1, "n_channels": channels}
        self.n_classes_ = len(self.classes_)
        self._class_dictionary = {c: i for i, c in enumerate(self.classes_)}
        self.is_fitted = True

    @classmethod
    def _get_test_params(cls, parameter_set: str = "default") -> dict[str, Any]:
        """Return parameters with which aeon's checks run in seconds."""
        return {"dim": 8, "num_heads": 2, "num_layers": 1, "max_tokens": 8, "n_steps": 4}


def _plain(value: Any) -> Any:
    """Return a number of numpy as one of Python."""
    return value.item() if isinstance(value, np.generic) else value
