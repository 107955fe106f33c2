"""Texts to vectors with any encoder, long documents whole.

Embedder(model).encode(texts)            an array, one row a text
embed_file(embedder, file, out)          a Parquet file, in bounded memory, which can be resumed
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
