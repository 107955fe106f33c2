from .analyze import analyze_counts
from .association import Association, Targets, asymmetry, compare
from .attention import CountAttention, DistributionalAttention
from .cooccurrence import Cooccurrence, Totals
from .corpus_init import CorpusFactors, CorpusFit, corpus_factors, initialize_from_corpus
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
from .factors import AssociationKernel, CountFactors, count_factors
from .heat_maps import plot_weights
from .layers import CorpusLayer, attention_from_counts, split_directions
from .probe import CountsResult, HeadAssociation, probe_heads, qk_circuit
from .probe_plots import count_weights, plot_head_beside_counts, word_weights
from .projection import (
    PositionTerms,
    Projection,
    balance_violation,
    normalize_rows,
    position_terms,
    position_types,
    project,
    select,
    stationary_distribution,
)
from .transforms import context_probability, transform_counts
from .vocabulary import split_words
from .word_vectors import Neighbor, WordVectors

__all__ = [
    "ANALOGIES",
    "SIMILAR_WORDS",
    "AnalogyScore",
    "Association",
    "AssociationKernel",
    "Cooccurrence",
    "CorpusFactors",
    "CorpusFit",
    "CorpusLayer",
    "CountAttention",
    "CountFactors",
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
    "balance_violation",
    "compare",
    "context_probability",
    "corpus_factors",
    "count_factors",
    "count_weights",
    "evaluate_analogies",
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
    "stationary_distribution",
    "transform_counts",
    "word_weights",
]
