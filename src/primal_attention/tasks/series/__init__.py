"""Time series: readers, a classifier of whole series, and Table 1 of the paper."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
