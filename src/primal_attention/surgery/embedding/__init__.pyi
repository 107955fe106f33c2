from .embedder import Embedder
from .pooling import Pooling, read_pooling
from .vectors import Embedded, embed_file

__all__ = ["Embedded", "Embedder", "Pooling", "embed_file", "read_pooling"]
