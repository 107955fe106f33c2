"""The error of models that cannot be converted."""

__all__ = ["ConversionError"]


class ConversionError(ValueError):
    """Raised if a model cannot be converted, loaded or saved as asked. The model is unchanged."""
