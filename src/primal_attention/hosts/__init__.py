"""Attention modules of transformers, timm, torch.nn and this library: find, read, capture, wrap."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
