"""Memory, spectra and pictures of models, reports that show them, and a registry of analyses."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
