from .columns import EncodedTable, TableColumn
from .encoding import TableEncoder, validate_table

__all__ = ["EncodedTable", "TableColumn", "TableEncoder", "validate_table"]
