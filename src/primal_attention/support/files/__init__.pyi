from .arrays import list_arrays, read_array, read_arrays
from .headers import check_large_weights
from .layouts import take_arrays
from .locks import locked
from .rows import TEXT_SUFFIXES, TextRow, read_text_rows
from .seals import (
    SUMS,
    SealedFolder,
    UnsealedWarning,
    finish_save,
    new_folder,
    save_sealed,
    write_sealed,
)
from .tensors import parse_tensors, read_tensors, to_bytes
from .text import (
    MAX_BYTES,
    check_regular,
    file_errors,
    open_bytes,
    open_text,
    read_bytes,
    read_lines,
    read_start,
    read_text,
)
from .values import JsonLine, parse_json, read_json, read_json_lines, read_yaml

__all__ = [
    "MAX_BYTES",
    "SUMS",
    "TEXT_SUFFIXES",
    "JsonLine",
    "SealedFolder",
    "TextRow",
    "UnsealedWarning",
    "check_large_weights",
    "check_regular",
    "file_errors",
    "finish_save",
    "list_arrays",
    "locked",
    "new_folder",
    "open_bytes",
    "open_text",
    "parse_json",
    "parse_tensors",
    "read_array",
    "read_arrays",
    "read_bytes",
    "read_json",
    "read_json_lines",
    "read_lines",
    "read_start",
    "read_tensors",
    "read_text",
    "read_text_rows",
    "read_yaml",
    "save_sealed",
    "take_arrays",
    "to_bytes",
    "write_sealed",
]
