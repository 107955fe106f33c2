from .analyze import analyze_counts
from .association import Association, Targets, asymmetry
from .attention import CountAttention, DistributionalAttention
from .cooccurrence import Cooccurrence, Totals
from .corpus_init import CorpusFit, initialize_from_corpus
from .embeddings import association_svd, glove_fit, ksvd_embeddings, pmi_svd
from .evaluation import (
    SIMILAR_WORDS,
    SimilarityScore,
    WordPair,
    evaluate_similarity,
    read_pairs,
)
from .factors import AssociationKernel, CountFactors, count_factors
from .heat_maps import plot_weights
from .layers import CorpusLayer, CountLogits, attention_from_counts, split_directions
from .probe import CountsResult, HeadAssociation, probe_heads, qk_circuit
from .probe_plots import count_weights, plot_head_beside_counts, word_weights
from .projection import (
    PositionTerms,
    Projection,
    normalize_rows,
    position_terms,
    position_types,
    project,
    select,
)
from .transforms import context_probability, transform_counts
from .vocabulary import split_words
from .word_vectors import Neighbor, WordVectors

__all__ = [
    "SIMILAR_WORDS",
    "Association",
    "AssociationKernel",
    "Cooccurrence",
    "CorpusFit",
    "CorpusLayer",
    "CountAttention",
    "CountFactors",
    "CountLogits",
    "CountsResult",
    "DistributionalAttention",
    "HeadAssociation",
    "Neighbor",
    "PositionTerms",
    "Projection",
    "SimilarityScore",
    "Targets",
    "Totals",
    "WordPair",
    "WordVectors",
    "analyze_counts",
    "association_svd",
    "asymmetry",
    "attention_from_counts",
    "context_probability",
    "count_factors",
    "count_weights",
    "evaluate_similarity",
    "glove_fit",
    "initialize_from_corpus",
    "ksvd_embeddings",
    "normalize_rows",
    "plot_head_beside_counts",
    "plot_weights",
    "pmi_svd",
    "position_terms",
    "position_types",
    "probe_heads",
    "project",
    "qk_circuit",
    "read_pairs",
    "select",
    "split_directions",
    "split_words",
    "transform_counts",
    "word_weights",
]
