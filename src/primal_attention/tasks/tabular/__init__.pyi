from .columns import EncodedTable, TableColumn
from .encoding import TableEncoder, validate_table
from .estimator import CorruptionTest, NPTClassifier, NPTRegressor
from .influence import RowInfluence
from .model import NPTConfig, NPTModel, NPTOutput
from .settings import NPTOptions, TableSettings
from .task import TableTask

__all__ = [
    "CorruptionTest",
    "EncodedTable",
    "NPTClassifier",
    "NPTConfig",
    "NPTModel",
    "NPTOptions",
    "NPTOutput",
    "NPTRegressor",
    "RowInfluence",
    "TableColumn",
    "TableEncoder",
    "TableSettings",
    "TableTask",
    "validate_table",
]
