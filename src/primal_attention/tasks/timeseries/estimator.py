"""Primal-Attention as an aeon classifier.

The class needs aeon, the rest of the package does not: it is defined when its name is first used.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from primal_attention.output import to_json, write_atomically
from primal_attention.tasks.timeseries.data import (
    Series,
    SeriesDataset,
    Standardizer,
    collate_series,
    series_from_arrays,
)
from primal_attention.tasks.timeseries.model import SeriesClassifier, SeriesConfig, patch_for

try:
    from aeon.classification.base import BaseClassifier
except ImportError as error:
    raise ImportError(
        "PrimalTimeSeriesClassifier needs aeon; install primal-attention[timeseries]."
    ) from error

if TYPE_CHECKING:
    from typing import Self

    from primal_attention.training import History

__all__ = ["PrimalTimeSeriesClassifier"]

_FORMAT = "primal-attention/timeseries/1"
_CONFIG, _WEIGHTS = "classifier.json", "classifier.safetensors"
_EPOCHS = 20
"""Records in the history of a fit."""
_PASSES = 6
"""Fewest passes over the training data."""
_PREDICT_BATCH = 256
"""Series that are classified at once."""


class PrimalTimeSeriesClassifier(BaseClassifier):  # type: ignore[misc]
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

    Attributes
    ----------
    model_ : SeriesClassifier
        The trained model.

    standardizer_ : Standardizer
        Mean and deviation of every channel of the training data.

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
        primal_layers: str = "all",
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
        super().__init__()

    def save(self, path: str | Path) -> None:
        """Write the fitted classifier to a folder: JSON and safetensors, nothing pickled.

        Parameters
        ----------
        path : str or Path
            Folder, made if it is not there. Read it with :meth:`load`.
        """
        from safetensors.torch import save

        self._check_is_fitted()
        folder = Path(path)
        labels = self.classes_
        content = {
            "format": _FORMAT,
            "parameters": self._plain_parameters(),
            "model": asdict(self.model_.config),
            "classes": [label.item() if hasattr(label, "item") else label for label in labels],
            "classes_dtype": labels.dtype.str,
            "metadata": {key: _plain(value) for key, value in self.metadata_.items()},
        }
        tensors: dict[str, Tensor] = {
            f"model.{name}": value.contiguous() for name, value in self.model_.state_dict().items()
        }
        tensors["standardizer.mean"] = torch.from_numpy(self.standardizer_.mean.copy())
        tensors["standardizer.std"] = torch.from_numpy(self.standardizer_.std.copy())
        write_atomically(folder / _WEIGHTS, save(tensors))
        write_atomically(folder / _CONFIG, to_json(content))

    @classmethod
    def load(cls, path: str | Path) -> "Self":
        """Return the classifier that :meth:`save` wrote.

        Parameters
        ----------
        path : str or Path
            The folder.

        Returns
        -------
        classifier : PrimalTimeSeriesClassifier
            Fitted, ready to predict.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load

        folder = Path(path)
        for file in (folder / _CONFIG, folder / _WEIGHTS):
            if not file.is_file():
                raise ValueError(f"{folder} holds no saved classifier: {file.name} is missing.")
        try:
            content = json.loads((folder / _CONFIG).read_text())
            tensors = load((folder / _WEIGHTS).read_bytes())
        except (json.JSONDecodeError, UnicodeDecodeError, SafetensorError) as error:
            raise ValueError(f"The classifier in {folder} is damaged ({error}).") from None
        found = content.get("format") if isinstance(content, dict) else None
        if found != _FORMAT:
            raise ValueError(
                f"{folder / _CONFIG} has format {found!r}, expected {_FORMAT!r}; it was written "
                "by another program or version."
            )
        prefix = "model."
        weights = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
        try:
            classifier = cls(**content["parameters"])
            model = SeriesClassifier(SeriesConfig(**content["model"]))
            classifier.standardizer_ = Standardizer(
                tensors["standardizer.mean"].numpy(), tensors["standardizer.std"].numpy()
            )
            classifier.classes_ = np.array(content["classes"], dtype=content["classes_dtype"])
            classifier.metadata_ = content["metadata"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"The classifier in {folder} is damaged ({error!r}).") from None
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            raise ValueError(f"The weights in {folder} do not fit its config: {error}") from None
        classifier.model_ = model.eval()
        classifier.history_ = None
        classifier.n_classes_ = len(classifier.classes_)
        classifier._class_dictionary = {c: i for i, c in enumerate(classifier.classes_)}
        classifier.is_fitted = True
        return classifier

    def _fit(self, X: Any, y: NDArray[Any]) -> "Self":
        from sklearn.utils import check_random_state

        from primal_attention.training import TrainingConfig, fit

        series = self._series(X)
        labels = np.searchsorted(self.classes_, y).astype(np.int64)
        series = Series(series.x, series.length, labels, tuple(map(str, self.classes_)))
        self.standardizer_ = Standardizer.fit(series)
        options: dict[str, Any] = self.attention_options or {}
        config = SeriesConfig(
            num_classes=self.n_classes_,
            num_channels=series.num_channels,
            stem=self.stem,  # type: ignore[arg-type]
            patch=patch_for(int(series.length.max()), self.max_tokens),
            dim=self.dim,
            num_heads=self.num_heads,
            num_layers=self.num_layers,
            attention=self.attention,
            attention_options=options,
            primal_layers=self.primal_layers,
            dropout=self.dropout,
        )
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model_ = SeriesClassifier(config)
        steps = max(self.n_steps, _PASSES * -(-len(series) // self.batch_size))
        training = TrainingConfig(
            epochs=_EPOCHS if steps >= _EPOCHS else 1,
            epoch_steps=-(-steps // _EPOCHS) if steps >= _EPOCHS else steps,
            batch_size=self.batch_size,
            lr=self.lr,
            eta=self.eta,
            seed=seed,
        )
        data = SeriesDataset(self.standardizer_(series), self.jitter)
        self.history_: History | None = fit(
            self.model_, data, config=training, collate=collate_series
        )
        return self

    def _predict(self, X: Any) -> NDArray[Any]:
        return self.classes_[self._predict_proba(X).argmax(1)]

    def _predict_proba(self, X: Any) -> NDArray[np.float64]:
        data = SeriesDataset(self.standardizer_(self._series(X)))
        items = [data[i] for i in range(len(data))]
        probabilities = []
        with torch.no_grad():
            for start in range(0, len(items), _PREDICT_BATCH):
                batch = collate_series(items[start : start + _PREDICT_BATCH])
                logits = self.model_(batch["x"], key_mask=batch["key_mask"]).logits
                probabilities.append(logits.double().softmax(-1))
        return torch.cat(probabilities).numpy()

    def _series(self, X: Any) -> Series:
        return series_from_arrays(list(X))

    def _plain_parameters(self) -> dict[str, Any]:
        parameters: dict[str, Any] = self.get_params(deep=False)
        if not isinstance(parameters["random_state"], int | None):
            parameters["random_state"] = None  # a generator is not part of the result
        return parameters

    @classmethod
    def _get_test_params(cls, parameter_set: str = "default") -> dict[str, Any]:
        """Return parameters with which aeon's checks run in seconds."""
        return {"dim": 8, "num_heads": 2, "num_layers": 1, "max_tokens": 8, "n_steps": 4}


def _plain(value: Any) -> Any:
    """Return a number of numpy as one of Python."""
    return value.item() if isinstance(value, np.generic) else value
