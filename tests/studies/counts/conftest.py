from tests.analysis.counts.conftest import example, positive, sparse_counts

__all__ = ["example", "positive", "sparse_counts"]
