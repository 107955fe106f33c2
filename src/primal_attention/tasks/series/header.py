"""What the beginning of a ``.ts`` file, or the targets of an ``.npz`` file, say of the targets.

Tasks recognise files by these functions, which import neither torch nor, at first, numpy.
"""

import math
import re
from pathlib import Path

from primal_attention.support.command import UserError
from primal_attention.support.files import open_text, read_arrays

__all__ = ["arrays_hold_numbers", "is_number", "last_is_single", "ts_holds_numbers"]

_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")


def is_number(word: str) -> bool:
    """Return whether a word is a finite number in digits."""
    return _NUMBER.fullmatch(word) is not None and math.isfinite(float(word))


def last_is_single(row: str) -> bool:
    """Return whether the last field of a series in a ``.ts`` file is one word: a target."""
    return ":" in row and "," not in row.rpartition(":")[2]


def ts_holds_numbers(path: Path) -> bool:
    """Return whether the targets of a ``.ts`` file are numbers, as far as its beginning tells.

    They are with ``@targetLabel true``; or with ``@classLabel false``, if one number stands behind
    the last colon of the first series. A file that cannot be read holds none.
    """
    has_classes = True
    try:
        with open_text(path) as file:
            for line in map(str.strip, file):
                if not line or line.startswith(("#", "%")):
                    continue
                if not line.startswith("@"):
                    last = line.rpartition(":")[2].strip()
                    return not has_classes and last_is_single(line) and is_number(last)
                tag, *words = line[1:].lower().replace(",", " ").split() or [""]
                if tag == "targetlabel" and words[:1] == ["true"]:
                    return True
                if tag == "classlabel":
                    has_classes = words[:1] != ["false"]
    except UserError:  # the reader says what is wrong
        pass
    return False


def arrays_hold_numbers(path: Path) -> bool:
    """Return whether ``y`` or ``y_train`` of an ``.npz`` file holds numbers that are not whole.

    With ``classes`` beside it, ``y`` indexes them. A file that cannot be read holds none.
    """
    import numpy as np

    try:
        found = read_arrays(path, ("y", "y_train", "classes"))
    except UserError:  # the reader says what is wrong
        return False
    y = found.get("y", found.get("y_train"))
    if y is None or y.dtype.kind != "f" or "classes" in found:
        return False
    return bool((np.isfinite(y) & (y != np.round(y))).any())
