"""Parquet files in parts: written one by one, then joined as the row groups of one file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from primal_attention.support.files.tables import parquet_errors
from primal_attention.support.output import replaced_file

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["join_parquet", "parquet_types", "write_parquet"]


def write_parquet(path: Path, columns: "Mapping[str, pa.Array]") -> None:
    """Write a table whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with replaced_file(path) as temporary:
        # no dictionary: vectors never repeat
        pq.write_table(pa.table(dict(columns)), temporary, use_dictionary=False)


def join_parquet(parts: Sequence[Path], out: Path) -> None:
    """Write tables with the same columns as one file, in the memory of the largest of them."""
    import pyarrow.parquet as pq

    with parquet_errors(parts[0]):
        schema = pq.read_schema(parts[0])
    with (
        replaced_file(out) as temporary,
        pq.ParquetWriter(temporary, schema, use_dictionary=False) as writer,
    ):
        for part in parts:
            with parquet_errors(part):
                writer.write_table(pq.read_table(part))


def parquet_types(path: Path, names: Sequence[str]) -> "list[pa.DataType]":
    """Return the types of columns of a file."""
    import pyarrow.parquet as pq

    with parquet_errors(path):
        schema = pq.read_schema(path)
        return [schema.field(name).type for name in names]
