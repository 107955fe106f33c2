"""Damages files: in their bytes, their numbers and their structure.

``mutate(data, ".json", random.Random(7))`` returns the same damage for the same seed. Each ending
has damages of its own, because flipped bytes alone rarely get past the parser.
"""

from random import Random
from typing import NamedTuple

from .binary_damages import NPY, NPZ, PARQUET, PICTURE, TENSORS
from .text_damages import BYTES, JSON, JSON_LINES, LINES, NUMBERS, YAML, Damage

__all__ = ["Mutation", "mutate"]

_TEXT = [LINES, LINES, NUMBERS, BYTES]
_FAMILIES: dict[str, list[dict[str, Damage]]] = {
    ".json": [JSON, JSON, JSON, NUMBERS, BYTES],
    ".jsonl": [JSON_LINES, JSON_LINES, LINES, NUMBERS, BYTES],
    ".yaml": [YAML, YAML, YAML, NUMBERS, BYTES],
    ".npz": [NPZ, NPZ, NPZ, BYTES],
    ".npy": [NPY, NPY, BYTES],
    ".safetensors": [TENSORS, TENSORS, BYTES],
    ".png": [PICTURE, BYTES, BYTES],
    ".parquet": [PARQUET, BYTES],
    **dict.fromkeys((".txt", ".csv", ".tsv", ".ts", ""), _TEXT),
}


class Mutation(NamedTuple):
    """A damage and what it makes of a file."""

    name: str
    data: bytes


def mutate(data: bytes, ending: str, rng: Random) -> Mutation:
    """Return a damaged copy of the content of a file with this ending."""
    families = _FAMILIES.get(ending, [BYTES])
    for _ in range(20):
        family = rng.choice(families)
        name = rng.choice(sorted(family))
        found = family[name](data, rng)
        if found != data:
            return Mutation(name, found)
    return Mutation("empty", b"")
