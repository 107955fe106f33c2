"""Depth and width of Transformers: a planner, exact separation ranks, and checks of models."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
