from .config import MultimodalConfig
from .heads import PairClassifier, PairClassifierConfig, PairSearch, Ranked
from .model import VisualParser
from .objectives import CollapseError, CollapseWatch
from .outputs import SimilarityNotice, VisualParserOutput
from .parser import ImageParser, Parsed

__all__ = [
    "CollapseError",
    "CollapseWatch",
    "ImageParser",
    "MultimodalConfig",
    "PairClassifier",
    "PairClassifierConfig",
    "PairSearch",
    "Parsed",
    "Ranked",
    "SimilarityNotice",
    "VisualParser",
    "VisualParserOutput",
]
