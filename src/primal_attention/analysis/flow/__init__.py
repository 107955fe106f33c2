"""Flow between modalities: how much the tokens of each modality receive from the others."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
