from .aligned import OTAlignedClassifier
from .aligned_base import MapScore
from .aligned_model import AlignedConfig, AlignedMap, MappedPoints, pretrain_head
from .aligned_regressor import OTAlignedRegressor
from .columns import EncodedTable, TableColumn
from .encoding import TableEncoder, validate_table
from .estimator import CorruptionTest, NPTClassifier, NPTRegressor
from .imputer import NPTImputer
from .influence import RowInfluence
from .model import NPTConfig, NPTModel, NPTOutput
from .sets import Table, load_table
from .settings import NPTOptions, TableSettings
from .task import TableTask

__all__ = [
    "AlignedConfig",
    "AlignedMap",
    "CorruptionTest",
    "EncodedTable",
    "MapScore",
    "MappedPoints",
    "NPTClassifier",
    "NPTConfig",
    "NPTImputer",
    "NPTModel",
    "NPTOptions",
    "NPTOutput",
    "NPTRegressor",
    "OTAlignedClassifier",
    "OTAlignedRegressor",
    "RowInfluence",
    "Table",
    "TableColumn",
    "TableEncoder",
    "TableSettings",
    "TableTask",
    "load_table",
    "pretrain_head",
    "validate_table",
]
