"""Causal graphs between tokens, read from attention, and explanations that follow them.

The graph describes dependence as the model encodes it, not causation in the world. An explanation
is trustworthy because the model was run again with tokens removed, not because the graph says so.
Both depend on the head, the layer, the threshold, and on how a token is removed.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
