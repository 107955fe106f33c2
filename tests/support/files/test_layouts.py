"""Arrays that must have a certain name, sort and number of axes."""

from pathlib import Path

import numpy as np
import pytest

from primal_attention.support.command import UserError
from primal_attention.support.files import take_arrays


def test_an_array_of_another_sort_is_refused_and_never_converted(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    for array, sort in [
        (np.zeros(3), "whole numbers"),
        (np.zeros(3, bool), "whole numbers"),
        (np.zeros(3, complex), "numbers"),
        (np.array(["1"]), "numbers"),
        (np.zeros((3, 1)), "numbers"),
        (np.array([1.0, np.nan]), "finite numbers"),
        (np.zeros(3, np.uint16), "bytes"),
        (np.zeros(3), "whole numbers or words"),
        (np.zeros(3, np.uint8), "truth values"),
    ]:
        np.savez(path, x=array)
        with pytest.raises(UserError, match=r"a\.npz: the array 'x' (must hold|holds)"):
            take_arrays(path, {"x": (sort, 1)})


def test_a_missing_array_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros(3), y=np.zeros(3))
    assert list(take_arrays(tmp_path / "a.npz", {"x": ("finite numbers", 1)})) == ["x"]
    with pytest.raises(UserError, match="no array 'z'; it needs x, z, and has x, y"):
        take_arrays(tmp_path / "a.npz", {"x": ("numbers", 1), "z": ("words", 1)})
