"""What people do with the models: one folder a domain, behind one seam (:mod:`.task`)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
