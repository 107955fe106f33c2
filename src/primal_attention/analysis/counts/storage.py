"""Files of counts: ``.npz`` without pickle, checked before and after they are read."""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from primal_attention.support.command import UserError
from primal_attention.support.files import parse_json, take_arrays
from primal_attention.support.output import write_atomically

if TYPE_CHECKING:
    from primal_attention.analysis.counts.cooccurrence import Cooccurrence

__all__ = ["load_counts", "save_counts"]

_FORMAT = "primal-attention counts 1"
_OPTIONS = ("window", "weighting", "directional", "boundary", "smoothing")
_ARRAYS = {
    "about": ("bytes", 1),
    "words": ("bytes", 1),
    "unigram": ("whole numbers", 1),
    "tail": ("whole numbers", 1),
    "data": ("finite numbers", 1),
    "indices": ("whole numbers", 1),
    "indptr": ("whole numbers", 1),
}
"""What every array of a file holds, and its number of axes."""

Counts = TypeVar("Counts", bound="Cooccurrence")


def save_counts(counts: "Cooccurrence", path: Path) -> None:
    """Write counts to a file."""
    about = {
        "format": _FORMAT,
        "unit": counts._unit,
        "num_tokens": counts.num_tokens,
        "num_documents": counts.num_documents,
        "options": {name: getattr(counts, name) for name in _OPTIONS},
    }
    sums = counts._sums
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        about=_pack(about),
        words=_pack(counts.words),
        unigram=counts.unigram,
        tail=counts._tail,
        data=sums.data,
        indices=sums.indices.astype(np.int64),
        indptr=sums.indptr.astype(np.int64),
    )
    write_atomically(path, buffer.getvalue())


def load_counts(kind: type[Counts], path: Path, max_bytes: int) -> Counts:
    """Return the counts of a file, as an object of the class ``kind``."""
    arrays = take_arrays(path, _ARRAYS, max_bytes=max_bytes)
    about = parse_json(arrays["about"].tobytes(), f"{path}, array 'about'")
    words = parse_json(arrays["words"].tobytes(), f"{path}, array 'words'", list)
    try:
        _check_about(about)
        return _build(kind, about, words, arrays)
    except ValueError as error:
        why = str(error).rstrip(".")
        raise UserError(
            f"{path} is not a readable file of counts: {why}. Write one with Cooccurrence.save or "
            "primal analyze counts count."
        ) from error


def _check_about(about: dict[str, Any]) -> None:
    """Raise if what a file says of itself has another form than :func:`save_counts` writes."""
    if about.get("format") != _FORMAT:
        raise ValueError(f"its format is not {_FORMAT!r}")
    options = about.get("options")
    sorts = {"window": (int,), "directional": (bool,), "smoothing": (float, int)}
    if not isinstance(options, dict) or set(options) != set(_OPTIONS):
        raise ValueError(f"its options are not {', '.join(_OPTIONS)}")
    for name, value in options.items():
        sort = sorts.get(name, (str,))
        if not isinstance(value, sort) or (isinstance(value, bool) and bool not in sort):
            raise ValueError(f"its option {name} is {str(value)[:40]!r}")
    for name in ("num_tokens", "num_documents"):
        if type(about.get(name)) is not int or about[name] < 0:
            raise ValueError(f"its {name} is not a whole number of at least 0")


def _build(
    kind: type[Counts],
    about: dict[str, Any],
    words: list[object],
    arrays: Mapping[str, NDArray[Any]],
) -> Counts:
    import scipy.sparse

    names = [word for word in words if isinstance(word, str)]
    if len(names) < len(words):
        raise ValueError("its vocabulary is not a list of words")
    found = kind(names, **{name: about["options"][name] for name in _OPTIONS})
    n = len(found)
    sums = scipy.sparse.csr_array(
        (arrays["data"].astype(np.float64), arrays["indices"], arrays["indptr"]), shape=(n, n)
    )
    sums.check_format(full_check=True)
    if (sums.data < 0).any():
        raise ValueError("its counts are negative")
    if arrays["unigram"].shape != (n,) or (arrays["unigram"] < 0).any():
        raise ValueError(f"its unigram counts are not {n} numbers of at least 0")
    unit = about.get("unit")
    if unit not in (1, found._unit):
        raise ValueError(f"its unit is {unit!r}, not 1 or {found._unit}")
    found._sums, found._unit = sums, unit
    found._tail = np.clip(arrays["tail"].astype(np.int64), -1, n - 1)[-found.window :]
    found.unigram = arrays["unigram"].astype(np.int64)
    found.num_tokens, found.num_documents = about["num_tokens"], about["num_documents"]
    return found


def _pack(value: object) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)
