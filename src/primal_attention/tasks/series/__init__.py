"""Time series: readers, estimators, and a network for whole series."""

import lazy_loader

from primal_attention.support.compiled import prepare_numba

# every module that imports aeon is inside this package, so that this comes first
prepare_numba("aeon")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
