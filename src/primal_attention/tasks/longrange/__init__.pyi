from .published import LRA, model_config, published_model, training_config
from .readers import read_aan, read_cifar10, read_imdb
from .settings import TokenSettings
from .task import TokenTask

__all__ = [
    "LRA",
    "TokenSettings",
    "TokenTask",
    "model_config",
    "published_model",
    "read_aan",
    "read_cifar10",
    "read_imdb",
    "training_config",
]
