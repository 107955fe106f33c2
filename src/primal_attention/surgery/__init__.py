"""Convert the attention of existing models: inspect, advise, convert, distil, revert, save."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
