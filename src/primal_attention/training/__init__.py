"""One loop to train any model of the library, or your own.

    history = fit(model, train, valid=valid, config=TrainingConfig(epochs=50, eta=0.1))

Needs the extra ``train`` (accelerate). Many processes: ``torchrun --nproc-per-node 4 script.py``.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
