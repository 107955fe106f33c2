from . import events, longrange, multimodal, retrieval, tabular, timeseries
from .datasets import PublicSet, fetch, find_set, public_sets
from .experiment import Recipe, check_experiment, recipe_type, run_experiment
from .results import Result, result_table, verdict, write_report
from .sources import Column, Recognition, Source, look_at
from .splits import Split, stratified_sample, stratified_split
from .study import STUDIES, Study, StudyEntry, find_study, read_rows, run_study
from .task import (
    TASKS,
    ClassificationTask,
    DataSettings,
    Parts,
    RegressionTask,
    Task,
    TaskEntry,
    find_task,
    load_task,
    register_task,
    save_task,
)
from .trained import TrainedModel, load_trained, save_trained

__all__ = [
    "STUDIES",
    "TASKS",
    "ClassificationTask",
    "Column",
    "DataSettings",
    "Parts",
    "PublicSet",
    "Recipe",
    "Recognition",
    "RegressionTask",
    "Result",
    "Source",
    "Split",
    "Study",
    "StudyEntry",
    "Task",
    "TaskEntry",
    "TrainedModel",
    "check_experiment",
    "events",
    "fetch",
    "find_set",
    "find_study",
    "find_task",
    "load_task",
    "load_trained",
    "longrange",
    "look_at",
    "multimodal",
    "public_sets",
    "read_rows",
    "recipe_type",
    "register_task",
    "result_table",
    "retrieval",
    "run_experiment",
    "run_study",
    "save_task",
    "save_trained",
    "stratified_sample",
    "stratified_split",
    "tabular",
    "timeseries",
    "verdict",
    "write_report",
]
