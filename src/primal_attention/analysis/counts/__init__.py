"""Attention from counts: co-occurrence, word vectors, count attention and probes of heads."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
