"""Time series: readers, estimators, and a network for whole series."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
