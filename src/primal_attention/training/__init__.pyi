from .checkpoint import CheckpointError
from .config import TrainingConfig
from .cost import Cost, FitCost, compare_costs, fit_cost
from .data import Columns, PackedCollator, pad_collate
from .evaluation import Evaluation, evaluate
from .history import EpochRecord, History
from .loop import fit
from .memory import PeakMemory, kept_for_backward
from .optimization import parameter_groups
from .processes import join_processes
from .run import NonFiniteLossError
from .scores import Score, cross_entropy, squared_error

__all__ = [
    "CheckpointError",
    "Columns",
    "Cost",
    "EpochRecord",
    "Evaluation",
    "FitCost",
    "History",
    "NonFiniteLossError",
    "PackedCollator",
    "PeakMemory",
    "Score",
    "TrainingConfig",
    "compare_costs",
    "cross_entropy",
    "evaluate",
    "fit",
    "fit_cost",
    "join_processes",
    "kept_for_backward",
    "pad_collate",
    "parameter_groups",
    "squared_error",
]
