from .cooccurrence import Cooccurrence, Totals
from .transforms import context_probability, transform_counts
from .vocabulary import split_words

__all__ = [
    "Cooccurrence",
    "Totals",
    "context_probability",
    "split_words",
    "transform_counts",
]
