from .config import MultimodalConfig
from .estimator import Hit, ImageTextMatcher, UnknownWordsNotice
from .heads import PairClassifier, PairClassifierConfig, PairSearch, Ranked
from .images import ImageError, list_images, read_image, read_images
from .model import VisualParser
from .objectives import CollapseError, CollapseWatch
from .outputs import SimilarityNotice, VisualParserOutput
from .parser import ImageParser, Parsed
from .settings import PairFitOptions
from .task import PairTask
from .tokenizer import TextTokenizer

__all__ = [
    "CollapseError",
    "CollapseWatch",
    "Hit",
    "ImageError",
    "ImageParser",
    "ImageTextMatcher",
    "MultimodalConfig",
    "PairClassifier",
    "PairClassifierConfig",
    "PairFitOptions",
    "PairSearch",
    "PairTask",
    "Parsed",
    "Ranked",
    "SimilarityNotice",
    "TextTokenizer",
    "UnknownWordsNotice",
    "VisualParser",
    "VisualParserOutput",
    "list_images",
    "read_image",
    "read_images",
]
