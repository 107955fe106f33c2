"""Files of counts: ``.npz`` without pickle, checked before and after they are read."""

import io
import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from primal_attention.output import write_atomically

if TYPE_CHECKING:
    from primal_attention.analysis.distributional.cooccurrence import Cooccurrence

__all__ = ["load_counts", "save_counts"]

_FORMAT = "primal-attention counts 1"
_OPTIONS = ("window", "weighting", "directional", "boundary", "smoothing")
_ARRAYS = {
    "about": ("u", 1),
    "words": ("u", 1),
    "unigram": ("i", 1),
    "tail": ("i", 1),
    "data": ("f", 1),
    "indices": ("i", 1),
    "indptr": ("i", 1),
}
"""Kind of dtype and number of axes of every array of a file."""

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
    try:
        arrays = _read_arrays(path, max_bytes)
        about, words = _unpack(arrays["about"]), _unpack(arrays["words"])
        if not isinstance(about, dict) or about.get("format") != _FORMAT:
            raise ValueError(f"its format is not {_FORMAT!r}")
        return _build(kind, about, words, arrays)
    except (ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{path} is not a readable file of counts: {why}. Write one with Cooccurrence.save or "
            "primal distrib count."
        ) from error


def _build(kind: type[Counts], about: dict[str, Any], words: Any, arrays: Any) -> Counts:
    import scipy.sparse

    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError("its vocabulary is not a list of words")
    found = kind(words, **{name: about["options"][name] for name in _OPTIONS})
    n = len(found)
    sums = scipy.sparse.csr_array(
        (arrays["data"].astype(np.float64), arrays["indices"], arrays["indptr"]), shape=(n, n)
    )
    sums.check_format(full_check=True)
    if not np.isfinite(sums.data).all() or (sums.data < 0).any():
        raise ValueError("its counts are negative or not finite")
    if arrays["unigram"].shape != (n,) or (arrays["unigram"] < 0).any():
        raise ValueError(f"its unigram counts are not {n} numbers of at least 0")
    unit = about["unit"]
    if unit not in (1, found._unit):
        raise ValueError(f"its unit is {unit!r}, not 1 or {found._unit}")
    found._sums, found._unit = sums, unit
    found._tail = np.clip(arrays["tail"].astype(np.int64), -1, n - 1)[-found.window :]
    found.unigram = arrays["unigram"].astype(np.int64)
    found.num_tokens, found.num_documents = int(about["num_tokens"]), int(about["num_documents"])
    return found


def _read_arrays(path: Path, max_bytes: int) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file whose sizes are checked before they are unpacked."""
    with zipfile.ZipFile(path) as archive:
        sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
        if sum(sizes.values()) > max_bytes:
            raise ValueError(
                f"it unpacks to {sum(sizes.values())} bytes, more than max_bytes={max_bytes}"
            )
        found = {}
        for name, (letter, axes) in _ARRAYS.items():
            with archive.open(f"{name}.npy") as file:
                found[name] = _read_array(file, sizes[f"{name}.npy"])
            if found[name].dtype.kind != letter or found[name].ndim != axes:
                raise ValueError(f"its array {name!r} has the wrong type or shape")
    return found


def _read_array(file: Any, size: int) -> NDArray[Any]:
    """Return an array without pickle; a header that promises more than the file has is an error."""
    npy: Any = np.lib.format
    version = npy.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"an array has the npy version {version}, not (1, 0)")
    shape, _, dtype = npy.read_array_header_1_0(file)
    promised = dtype.itemsize * int(np.prod(shape, dtype=object))
    if dtype.hasobject or promised > size:
        raise ValueError("an array has Python objects, or is larger than its file")
    return np.frombuffer(file.read(promised), dtype).reshape(shape).copy()


def _pack(value: Any) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _unpack(array: NDArray[Any]) -> Any:
    return json.loads(array.tobytes().decode())
