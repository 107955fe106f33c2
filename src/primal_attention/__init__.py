"""Linear attention as an asymmetric kernel machine.

    attn = PrimalAttention(dim=256, num_heads=8)     # linear in length
    loss = task_loss + eta * ksvd_loss(model)        # one line in any training loop

Names are imported when they are first used, so that a command can answer ``--help`` without
waiting for torch.

Converted models load with ``from_pretrained`` of transformers. The loader is registered when
transformers is imported, before or after this package; neither imports the other.
"""

import importlib

import lazy_loader

from primal_attention.support.imports import when_imported

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

when_imported(
    "transformers.quantizers.auto",
    lambda: importlib.import_module("primal_attention.surgery.quantizer"),
)
