from . import events, lists, longrange, pairs, series, tables
from .experiment import Recipe, check_experiment, recipe_type, run_experiment
from .results import Result, result_table, verdict, write_report
from .sources import Column, Recognition, Source, look_at
from .splits import Split, stratified_sample, stratified_split
from .study import Study, StudyEntry, find_study, known_studies, read_rows, run_study
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
    "TASKS",
    "ClassificationTask",
    "Column",
    "DataSettings",
    "Parts",
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
    "find_study",
    "find_task",
    "known_studies",
    "lists",
    "load_task",
    "load_trained",
    "longrange",
    "look_at",
    "pairs",
    "read_rows",
    "recipe_type",
    "register_task",
    "result_table",
    "run_experiment",
    "run_study",
    "save_task",
    "save_trained",
    "series",
    "stratified_sample",
    "stratified_split",
    "tables",
    "verdict",
    "write_report",
]
