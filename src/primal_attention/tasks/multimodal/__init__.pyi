from .config import MultimodalConfig
from .emoji import Emoji, EmojiSplit, load_emoji, split_emoji
from .estimator import Hit, ImageTextMatcher, UnknownWordsNotice
from .heads import PairClassifier, PairClassifierConfig, PairSearch, Ranked
from .images import ImageError, list_images, read_image, read_images
from .model import VisualParser
from .objectives import CollapseError, CollapseWatch
from .outputs import SimilarityNotice, VisualParserOutput
from .parser import ImageParser, Parsed
from .scenes import Scene, SceneItem, Scenes, draw_scenes, sample_scenes
from .task import PairTask
from .tokenizer import TextTokenizer

__all__ = [
    "CollapseError",
    "CollapseWatch",
    "Emoji",
    "EmojiSplit",
    "Hit",
    "ImageError",
    "ImageParser",
    "ImageTextMatcher",
    "MultimodalConfig",
    "PairClassifier",
    "PairClassifierConfig",
    "PairSearch",
    "PairTask",
    "Parsed",
    "Ranked",
    "Scene",
    "SceneItem",
    "Scenes",
    "SimilarityNotice",
    "TextTokenizer",
    "UnknownWordsNotice",
    "VisualParser",
    "VisualParserOutput",
    "draw_scenes",
    "list_images",
    "load_emoji",
    "read_image",
    "read_images",
    "sample_scenes",
    "split_emoji",
]
