from .checkpoint import CheckpointError
from .config import TrainingConfig
from .data import Columns, pad_collate
from .evaluation import Evaluation, evaluate
from .history import EpochRecord, History
from .loop import NonFiniteLossError, fit
from .optimization import parameter_groups
from .processes import join_processes
from .scores import Score, cross_entropy, squared_error

__all__ = [
    "CheckpointError",
    "Columns",
    "EpochRecord",
    "Evaluation",
    "History",
    "NonFiniteLossError",
    "Score",
    "TrainingConfig",
    "cross_entropy",
    "evaluate",
    "fit",
    "join_processes",
    "pad_collate",
    "parameter_groups",
    "squared_error",
]
