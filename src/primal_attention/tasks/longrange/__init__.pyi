from .listops import ListOpsConfig, generate_listops, read_listops
from .pathfinder import PathfinderConfig, generate_pathfinder
from .published import LRA, build_model, model_config, training_config
from .readers import read_aan, read_cifar10, read_imdb
from .sequences import PairSequences, TokenSequences
from .settings import TokenSettings
from .task import TokenTask

__all__ = [
    "LRA",
    "ListOpsConfig",
    "PairSequences",
    "PathfinderConfig",
    "TokenSequences",
    "TokenSettings",
    "TokenTask",
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
