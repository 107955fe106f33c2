from .aligned import OTAlignedClassifier
from .aligned_model import AlignedConfig, AlignedMap, MappedPoints, pretrain_head
from .aligned_regressor import OTAlignedRegressor
from .classifier import NPTClassifier
from .columns import EncodedTable, TableColumn
from .encoding import TableEncoder, validate_table
from .imputer import NPTImputer
from .influence import RowInfluence
from .model import NPTConfig, NPTModel, NPTOutput
from .probe_report import add_probes, plot_row_attention
from .probes import corruption_by_row, data_deletion, intervention
from .regressor import NPTRegressor
from .settings import NPTOptions, TableSettings
from .supervised import CorruptionTest
from .task import TableTask

__all__ = [
    "AlignedConfig",
    "AlignedMap",
    "CorruptionTest",
    "EncodedTable",
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
    "TableColumn",
    "TableEncoder",
    "TableSettings",
    "TableTask",
    "add_probes",
    "corruption_by_row",
    "data_deletion",
    "intervention",
    "plot_row_attention",
    "pretrain_head",
    "validate_table",
]
