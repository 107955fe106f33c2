"""Long sequences: the tasks of Long Range Arena, their data, models and schedules."""

from primal_attention.tasks.longrange.listops import ListOpsConfig, generate_listops, read_listops
from primal_attention.tasks.longrange.pathfinder import PathfinderConfig, generate_pathfinder
from primal_attention.tasks.longrange.readers import read_aan, read_cifar10, read_imdb
from primal_attention.tasks.longrange.sequences import PairSequences, TokenSequences
from primal_attention.tasks.longrange.settings import (
    LRA,
    build_model,
    model_config,
    training_config,
)

__all__ = [
    "LRA",
    "ListOpsConfig",
    "PairSequences",
    "PathfinderConfig",
    "TokenSequences",
    "build_model",
    "generate_listops",
    "generate_pathfinder",
    "model_config",
    "read_aan",
    "read_cifar10",
    "read_imdb",
    "read_listops",
    "training_config",
]
