"""Linear attention as an asymmetric kernel machine."""

__version__ = "0.1.0"
