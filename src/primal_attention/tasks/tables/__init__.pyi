from .aligned import OTAlignedClassifier
from .aligned_model import AlignedConfig, AlignedMap, MappedPoints
from .aligned_regressor import OTAlignedRegressor
from .classifier import TableClassifier
from .columns import EncodedTable, TableColumn
from .encoding import TableEncoder, validate_table
from .imputer import TableImputer
from .influence import RowInfluence
from .model import NPTConfig, NPTModel, NPTOutput
from .probe_report import add_probes, plot_row_attention
from .probes import corruption_by_row, intervention
from .regressor import TableRegressor
from .settings import (
    AlignedClassFitOptions,
    AlignedFitOptions,
    NPTOptions,
    TableFitOptions,
    TableSettings,
)
from .supervised import CorruptionTest
from .task import TableTask

__all__ = [
    "AlignedClassFitOptions",
    "AlignedConfig",
    "AlignedFitOptions",
    "AlignedMap",
    "CorruptionTest",
    "EncodedTable",
    "MappedPoints",
    "NPTConfig",
    "NPTModel",
    "NPTOptions",
    "NPTOutput",
    "OTAlignedClassifier",
    "OTAlignedRegressor",
    "RowInfluence",
    "TableClassifier",
    "TableColumn",
    "TableEncoder",
    "TableFitOptions",
    "TableImputer",
    "TableRegressor",
    "TableSettings",
    "TableTask",
    "add_probes",
    "corruption_by_row",
    "intervention",
    "plot_row_attention",
    "validate_table",
]
