from .checkpoint import CheckpointError
from .config import TrainingConfig
from .data import Columns, pad_collate
from .evaluation import Evaluation, cross_entropy, evaluate
from .history import EpochRecord, History
from .loop import NonFiniteLossError, fit, join_processes
from .optimization import parameter_groups

__all__ = [
    "CheckpointError",
    "Columns",
    "EpochRecord",
    "Evaluation",
    "History",
    "NonFiniteLossError",
    "TrainingConfig",
    "cross_entropy",
    "evaluate",
    "fit",
    "join_processes",
    "pad_collate",
    "parameter_groups",
]
