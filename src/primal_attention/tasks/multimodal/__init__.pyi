from .config import MultimodalConfig
from .model import VisualParser
from .objectives import CollapseError, CollapseWatch
from .outputs import SimilarityNotice, VisualParserOutput
from .parser import ImageParser, Parsed

__all__ = [
    "CollapseError",
    "CollapseWatch",
    "ImageParser",
    "MultimodalConfig",
    "Parsed",
    "SimilarityNotice",
    "VisualParser",
    "VisualParserOutput",
]
