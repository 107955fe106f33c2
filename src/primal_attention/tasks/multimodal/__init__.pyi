from .config import MultimodalConfig

__all__ = [
    "MultimodalConfig",
]
