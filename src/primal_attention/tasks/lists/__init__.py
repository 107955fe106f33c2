"""Re-ranking of search results: training-free methods and attention over the list."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
