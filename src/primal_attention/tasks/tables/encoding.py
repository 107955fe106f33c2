"""Tables as numbers: the encoder that every estimator of tables uses.

scikit-learn's encoders keep Python objects. This one keeps plain values (:class:`TableColumn`), so
that a saved model needs no pickle.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from primal_attention.support.command import did_you_mean, needs
from primal_attention.tasks.tables.columns import (
    Cells,
    EncodedTable,
    TableColumn,
    TableLike,
    ValidTable,
    is_frame,
    read_cells,
)
from primal_attention.tasks.tables.settings import Categorical

with needs("sklearn", "The encoder of tables"):
    from sklearn.base import BaseEstimator, TransformerMixin
    from sklearn.utils import Tags, check_array
    from sklearn.utils.validation import (
        _check_feature_names_in,
        _check_sample_weight,
        check_is_fitted,
        validate_data,
    )

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "EncodedTable",
    "TableColumn",
    "TableEncoder",
    "accept_tables",
    "rank_cells",
    "validate_table",
]

_APART = float(np.sqrt(0.5))
"""Entry of a one-hot code: two different categories then are at distance one."""


def validate_table(estimator: BaseEstimator, X: TableLike, *, reset: bool) -> ValidTable:
    """Return a table after scikit-learn's checks: a pandas frame as it is, or an array.

    Sets or checks ``n_features_in_`` and ``feature_names_in_`` of the estimator. Missing values,
    text and dates pass.

    Args:
        estimator: The estimator whose name errors use.
        X: Frame, array or nested lists.
        reset: Whether this is the training table.
    """
    if hasattr(X, "to_pandas"):
        X = X.to_pandas()  # other libraries of frames
    if not is_frame(X):
        dtype = None
        if not hasattr(X, "dtype") and np.asarray(X).dtype.kind == "U":
            dtype = object  # numpy makes text of the numbers in mixed lists
        return validate_data(estimator, X, dtype=dtype, ensure_all_finite=False, reset=reset)
    twice = X.columns[X.columns.duplicated()]
    if len(twice):
        raise ValueError(
            f"The table has two columns {str(twice[0])[:80]!r}; give each its own name."
        )
    # the checks of sizes, with the usual messages
    check_array(np.zeros(X.shape, np.int8), estimator=estimator)
    return validate_data(estimator, X, skip_check_array=True, reset=reset)


def accept_tables(tags: Tags) -> Tags:
    """Return the tags of an estimator that takes missing values, categories and words."""
    tags.input_tags.allow_nan = True
    tags.input_tags.categorical = True
    tags.input_tags.string = True
    return tags


def rank_cells(X: ValidTable) -> NDArray[np.int64]:
    """Return the rank of every cell among the distinct values of its column; -1 where missing.

    Equal rows have equal ranks, whatever the types of the columns.

    Args:
        X: What :func:`validate_table` returned.

    Example:
        >>> rank_cells(np.array([[3.0, np.nan], [1.0, 5.0], [3.0, 5.0]])).tolist()
        [[1, -1], [0, 0], [1, 0]]
    """
    return np.stack([cells.ranks() for cells in _read_columns(X)], 1)


class TableEncoder(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Encoder of tables with numbers, categories, dates and missing values.

    :meth:`encode` gives one number for each cell and a mask, for models with embeddings.
    :meth:`transform` gives a dense matrix, for methods that compare rows by distance.
    :meth:`decode` is the inverse of :meth:`encode`.

    Numbers are standardised and clipped to ±10,000 deviations. Dates are numbers. A category that
    training has not seen is missing; if the column has a bucket of rare categories, it is rare. A
    column without any value in training stays missing.

    Parameters
    ----------
    categorical_features : "auto" or array-like of int, str or bool, default="auto"
        Columns of numbers that are categories: indices, names or a mask. Columns of text, booleans
        and pandas categoricals always are categories; ``"auto"`` adds none.

    max_categories : int, default=64
        Most codes of a column. With more categories, the last code is the bucket of rare ones.

    Attributes
    ----------
    columns_ : tuple of TableColumn
        What training learned of each column; plain values.

    is_frame_ : bool
        Whether the training table was a frame, so :meth:`decode` returns one.

    n_features_in_ : int
        Number of columns.

    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the columns, if the training table was a frame with string names.

    Examples
    --------
    >>> encoder = TableEncoder().fit([[1.0, "red"], [3.0, "blue"], [None, "red"]])
    >>> encoder.encode([[3.0, "blue"], [1.0, "green"]]).values
    array([[ 1.,  1.],
           [-1.,  0.]], dtype=float32)
    >>> encoder.get_feature_names_out().tolist()
    ['x0', 'missingindicator_x0', 'x1_red', 'x1_blue']
    """

    def __init__(
        self,
        categorical_features: Literal["auto"] | Categorical | ArrayLike = "auto",
        max_categories: int = 64,
    ) -> None:
        self.categorical_features = categorical_features
        self.max_categories = max_categories

    def fit(self, X: TableLike, y: object = None, sample_weight: ArrayLike | None = None) -> Self:
        """Learn means, deviations and categories of a training table.

        Parameters
        ----------
        X : frame or array-like of shape (n_samples, n_features)
            The training table.

        y : None
            Ignored.

        sample_weight : array-like of shape (n_samples,), default=None
            Weight of each row in means, deviations and counts; a row of weight zero is left out.

        Returns
        -------
        self : TableEncoder
            The fitted encoder.
        """
        if self.max_categories < 2:
            raise ValueError(f"max_categories must be at least 2, got {self.max_categories}.")
        X = validate_table(self, X, reset=True)
        weights = _check_sample_weight(sample_weight, X, ensure_non_negative=True)
        if not weights.any():
            raise ValueError("all of sample_weight is zero; at least one must be positive.")
        keep = weights > 0
        self.is_frame_ = is_frame(X)
        names = _names(self)
        forced = self._forced(names)
        self.columns_ = tuple(
            TableColumn.fit(
                name,
                cells._replace(values=cells.values[keep]),
                weights[keep],
                is_categorical=i in forced or not cells.is_numeric,
                max_categories=self.max_categories,
            )
            for i, (name, cells) in enumerate(zip(names, _read_columns(X), strict=True))
        )
        return self

    @classmethod
    def from_columns(
        cls, columns: Sequence[TableColumn], *, is_frame: bool = False, **parameters: object
    ) -> Self:
        """Return a fitted encoder from the columns of another one.

        Parameters
        ----------
        columns : sequence of TableColumn
            ``columns_`` of a fitted encoder.

        is_frame : bool, default=False
            Whether the training table was a frame with names.

        **parameters : object
            Parameters of the encoder.

        Returns
        -------
        encoder : TableEncoder
            Fitted, ready to encode.
        """
        encoder = cls(**parameters)  # type: ignore[arg-type]
        encoder.columns_, encoder.is_frame_ = tuple(columns), is_frame
        encoder.n_features_in_ = len(encoder.columns_)
        names = [c.name for c in columns]
        if is_frame and names != _numbered(len(names)):
            encoder.feature_names_in_ = np.array(names, object)
        return encoder

    def encode(self, X: TableLike) -> EncodedTable:
        """Return standardised numbers and codes of categories, and which cells are missing.

        Parameters
        ----------
        X : frame or array-like of shape (n_samples, n_features)
            A table with the columns of the training table.

        Returns
        -------
        table : EncodedTable
            ``values`` (float32, 0 where missing) and ``missing`` (bool), each of shape
            (n_samples, n_features).
        """
        found = np.stack(self._encoded(X), 1)
        missing = np.isnan(found)
        return EncodedTable(np.where(missing, 0, found).astype(np.float32), missing)

    def transform(self, X: TableLike) -> NDArray[np.float64]:
        """Return a dense matrix for methods that compare rows by Euclidean distance.

        Numbers are standardised, with the mean where missing. Each column that had missing values
        in training has an indicator of them. Categories are one-hot, scaled so that two different
        ones are at distance one; a missing category is zero.

        Parameters
        ----------
        X : frame or array-like of shape (n_samples, n_features)
            A table with the columns of the training table.

        Returns
        -------
        dense : ndarray of shape (n_samples, n_features_out)
            Finite numbers; :meth:`get_feature_names_out` names the columns.
        """
        parts = []
        for column, found in zip(self.columns_, self._encoded(X), strict=True):
            missing = np.isnan(found)
            known = np.where(missing, 0, found)[:, None]
            if column.is_categorical:
                known = _APART * (known == np.arange(column.width)) * ~missing[:, None]
            parts.append(known)
            if _has_indicator(column):
                parts.append(missing[:, None])
        return np.concatenate(parts, 1, dtype=np.float64)

    def decode(self, values: ArrayLike, missing: ArrayLike | None = None) -> ValidTable:
        """Return a table in the form of the training table from encoded values.

        Parameters
        ----------
        values : array-like of shape (n_samples, n_features)
            Standardised numbers and codes, as :meth:`encode` gives them; NaN is missing.

        missing : array-like of shape (n_samples, n_features), default=None
            Cells to leave missing.

        Returns
        -------
        table : DataFrame or ndarray of shape (n_samples, n_features)
            Numbers in their units, whole where training had whole numbers; categories and dates in
            their type. The bucket of rare categories is missing.
        """
        check_is_fitted(self)
        found = np.array(values, np.float64, ndmin=2)
        if found.ndim != 2 or found.shape[1] != len(self.columns_):
            raise ValueError(
                f"values has shape {found.shape}; it must be (rows, {len(self.columns_)}), one "
                "number for each column of the training table."
            )
        if missing is not None:
            found[np.asarray(missing, bool)] = np.nan
        cells = [c.decode(v) for c, v in zip(self.columns_, found.T, strict=True)]
        return self._decoded_frame(cells) if self.is_frame_ else self._decoded_array(cells)

    def get_feature_names_out(self, input_features: ArrayLike | None = None) -> np.ndarray:
        """Return the names of the columns of :meth:`transform`.

        Parameters
        ----------
        input_features : array-like of str, default=None
            Names of the columns of the training table.

        Returns
        -------
        names : ndarray of str
            One for each column of the dense matrix.
        """
        check_is_fitted(self)
        names: list[str] = []
        given = _check_feature_names_in(self, input_features)
        for name, column in zip(given, self.columns_, strict=True):
            if column.is_categorical and (column.categories or column.has_other):
                words = [*column.categories, *["(other)"] * column.has_other]
                names += [f"{name}_{word}" for word in words]
            else:
                names.append(name)
            if _has_indicator(column):
                names.append(f"missingindicator_{name}")
        return np.array(names, object)

    def _encoded(self, X: TableLike) -> list[NDArray[np.float64]]:
        """Return each column as numbers, with NaN where missing."""
        check_is_fitted(self)
        table = validate_table(self, X, reset=False)
        return [c.encode(v) for c, v in zip(self.columns_, _read_columns(table), strict=True)]

    def _forced(self, names: Sequence[str]) -> set[int]:
        """Return the indices of the columns that the user calls categories."""
        given = self.categorical_features
        if given is None or (isinstance(given, str) and given == "auto"):
            return set()
        chosen = np.asarray(given)
        if chosen.ndim != 1:
            raise ValueError(
                f"categorical_features is {given!r}; it must be 'auto' or a list of indices, of "
                "names, or one boolean for each column."
            )
        if chosen.dtype.kind == "b":
            if len(chosen) != len(names):
                raise ValueError(
                    f"categorical_features has {len(chosen)} booleans for {len(names)} columns; "
                    "pass one for each."
                )
            return set(np.flatnonzero(chosen).tolist())
        return {_column_index(item, names) for item in chosen.tolist()}

    def _decoded_frame(self, cells: list[np.ndarray]) -> "pd.DataFrame":
        with needs("tables", "A table as a frame"):
            import pandas as pd
        frame = pd.concat([_to_series(c, v) for c, v in self._with(cells)], axis=1)
        frame.columns = getattr(self, "feature_names_in_", range(len(cells)))
        return frame

    def _decoded_array(self, cells: list[np.ndarray]) -> np.ndarray:
        if len({v.dtype for v in cells}) > 1:
            cells = [_to_objects(c, v) for c, v in self._with(cells)]
        table = np.stack(cells, 1)
        dtype = np.dtype(self.columns_[0].dtype)
        is_lost = dtype.kind in "iu" and np.isnan(table.astype(np.float64)).any()
        # text and booleans with missing values stay objects
        return table if is_lost or dtype.kind in "USO" or None in table else table.astype(dtype)

    def _with(self, cells: list[np.ndarray]) -> list[tuple[TableColumn, np.ndarray]]:
        return list(zip(self.columns_, cells, strict=True))

    def __sklearn_tags__(self) -> Tags:
        return accept_tables(super().__sklearn_tags__())


def _read_columns(X: ValidTable) -> list[Cells]:
    columns = X.iloc if is_frame(X) else X
    return [read_cells(columns[:, i]) for i in range(X.shape[1])]


def _names(encoder: TableEncoder) -> list[str]:
    given = getattr(encoder, "feature_names_in_", None)
    return _numbered(encoder.n_features_in_) if given is None else [str(n) for n in given]


def _numbered(count: int) -> list[str]:
    return [f"x{i}" for i in range(count)]


def _column_index(item: object, names: Sequence[str]) -> int:
    if isinstance(item, str):
        if item not in names:
            raise ValueError(
                f"categorical_features names the column {item!r}, which the table does not have."
                f"{did_you_mean(item, names)} Use names or indices of its columns."
            )
        return names.index(item)
    if not isinstance(item, int) or not -len(names) <= item < len(names):
        raise ValueError(
            f"categorical_features holds {item!r}; it must hold names or indices of the "
            f"{len(names)} columns."
        )
    return item % len(names)


def _has_indicator(column: TableColumn) -> bool:
    return 0 < column.missing_share < 1


def _to_series(column: TableColumn, cells: np.ndarray) -> "pd.Series":
    """Return decoded cells as a pandas column of the training table's type."""
    import pandas as pd

    if column.dtype == "category":
        return pd.Series(pd.Categorical(cells, categories=column.category_values()))
    series = pd.Series(cells, dtype=cells.dtype)
    dtype = column.dtype
    if column.form == "datetime" and "," in dtype:
        return series.dt.tz_localize("UTC").astype(dtype)  # the type names a zone
    is_lost = dtype[:3] in ("int", "uin", "boo") and dtype != "boolean" and series.isna().any()
    return series if is_lost else series.astype(dtype)


def _to_objects(column: TableColumn, cells: np.ndarray) -> np.ndarray:
    """Return decoded cells as Python objects."""
    if column.form == "integer" and cells.dtype != object:
        whole = [None if np.isnan(v) else int(v) for v in cells]
        return np.array([*whole, None], object)[:-1]
    return cells.astype(object)
