"""Tables: attention between rows (NPT), and classes aligned by optimal transport."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
