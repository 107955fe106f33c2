from .published import LRA, build_model, model_config, training_config
from .readers import read_aan, read_cifar10, read_imdb
from .settings import TokenSettings
from .task import TokenTask

__all__ = [
    "LRA",
    "TokenSettings",
    "TokenTask",
    "build_model",
    "model_config",
    "read_aan",
    "read_cifar10",
    "read_imdb",
    "training_config",
]
