from .association import Association, Targets, asymmetry, compare
from .cooccurrence import Cooccurrence, Totals
from .embeddings import association_svd, glove_fit, ksvd_embeddings, pmi_svd
from .evaluation import (
    ANALOGIES,
    SIMILAR_WORDS,
    AnalogyScore,
    SimilarityScore,
    WordPair,
    evaluate_analogies,
    evaluate_similarity,
    read_pairs,
)
from .probe import HeadAssociation, HeadsResult, probe_heads, qk_circuit
from .transforms import context_probability, transform_counts
from .vocabulary import split_words
from .word_vectors import Neighbor, WordVectors

__all__ = [
    "ANALOGIES",
    "SIMILAR_WORDS",
    "AnalogyScore",
    "Association",
    "Cooccurrence",
    "HeadAssociation",
    "HeadsResult",
    "Neighbor",
    "SimilarityScore",
    "Targets",
    "Totals",
    "WordPair",
    "WordVectors",
    "association_svd",
    "asymmetry",
    "compare",
    "context_probability",
    "evaluate_analogies",
    "evaluate_similarity",
    "glove_fit",
    "ksvd_embeddings",
    "pmi_svd",
    "probe_heads",
    "qk_circuit",
    "read_pairs",
    "split_words",
    "transform_counts",
]
