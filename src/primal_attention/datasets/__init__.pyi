from .events.generators import (
    EventProcess,
    GapMarks,
    HawkesProcess,
    IrregularSinusoids,
    PeriodicMarks,
    PoissonProcess,
    SampledEvents,
    SampledSeries,
)
from .events.log import EventSequences, LogColumn
from .events.series import IrregularSeries
from .longrange.listops import ListOpsConfig, generate_listops, read_listops
from .longrange.pathfinder import PathfinderConfig, generate_pathfinder
from .longrange.sequences import PairSequences, TokenSequences
from .public import PublicSet, fetch, find_set, public_sets
from .scenes import Scene, SceneItem, Scenes, draw_scenes, sample_scenes
from .tables import Table, load_table

__all__ = [
    "EventProcess",
    "EventSequences",
    "GapMarks",
    "HawkesProcess",
    "IrregularSeries",
    "IrregularSinusoids",
    "ListOpsConfig",
    "LogColumn",
    "PairSequences",
    "PathfinderConfig",
    "PeriodicMarks",
    "PoissonProcess",
    "PublicSet",
    "SampledEvents",
    "SampledSeries",
    "Scene",
    "SceneItem",
    "Scenes",
    "Table",
    "TokenSequences",
    "draw_scenes",
    "fetch",
    "find_set",
    "generate_listops",
    "generate_pathfinder",
    "load_table",
    "public_sets",
    "read_listops",
    "sample_scenes",
]
