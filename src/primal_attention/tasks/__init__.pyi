from . import longrange, timeseries
from .experiment import (
    Recipe,
    TrainedModel,
    load_trained,
    recipe_type,
    run_experiment,
)
from .results import Result
from .study import Study, find_study, run_study
from .task import (
    ClassificationTask,
    Parts,
    RegressionTask,
    Task,
    find_task,
    register_task,
)

__all__ = [
    "ClassificationTask",
    "Parts",
    "Recipe",
    "RegressionTask",
    "Result",
    "Study",
    "Task",
    "TrainedModel",
    "find_study",
    "find_task",
    "load_trained",
    "longrange",
    "recipe_type",
    "register_task",
    "run_experiment",
    "run_study",
    "timeseries",
]
