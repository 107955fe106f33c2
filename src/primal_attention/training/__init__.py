"""One loop to train any model of the library, or your own.

    history = fit(model, train, valid=valid, config=TrainingConfig(epochs=50, eta=0.1))

Needs the extra ``train`` (accelerate). Many processes: ``torchrun --nproc-per-node 4 script.py``.
"""

from primal_attention.training.checkpoint import CheckpointError
from primal_attention.training.config import TrainingConfig
from primal_attention.training.data import Columns, pad_collate
from primal_attention.training.evaluation import Evaluation, cross_entropy, evaluate
from primal_attention.training.history import EpochRecord, History
from primal_attention.training.loop import NonFiniteLossError, fit, join_processes
from primal_attention.training.optimization import parameter_groups

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
