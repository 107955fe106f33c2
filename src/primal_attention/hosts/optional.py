"""Import transformers, or say in one sentence why that fails and what to do."""

import importlib
import importlib.util
from importlib.metadata import version
from types import ModuleType

from primal_attention.support.command import MissingPackageError, install_hint

__all__ = ["quiet_transformers", "require_transformers"]


def require_transformers() -> ModuleType:
    """Return the package transformers; raise ``ImportError`` if it cannot be used.

    Transformers imports its parts on first use, so the module of models is imported here, too.
    """
    if importlib.util.find_spec("transformers") is None:
        raise MissingPackageError(
            f"transformers is not installed. {install_hint('hf')}", name="transformers"
        )
    try:
        importlib.import_module("transformers.modeling_utils")
        return importlib.import_module("transformers")
    except (ImportError, RuntimeError) as error:
        raise ImportError(_reason(error), name="transformers") from error


def _reason(error: Exception) -> str:
    """Return why an installed transformers cannot be imported."""
    cause: BaseException = error
    while (inner := cause.__cause__ or cause.__context__) is not None:
        cause = inner
    if "torchvision::nms" in str(cause):
        return (
            f"transformers cannot be imported, because torchvision {version('torchvision')} does "
            f"not fit torch {version('torch')}: one is built for CUDA and the other is not. "
            "Uninstall torchvision, or install both from one index, for example pip install torch "
            "torchvision --index-url https://download.pytorch.org/whl/cpu."
        )
    return f"transformers is installed but cannot be imported: {' '.join(str(cause).split())}"


def quiet_transformers() -> None:
    """Switch off the warnings and progress bars of transformers, if it is installed."""
    if importlib.util.find_spec("transformers") is not None:
        from transformers.utils import logging

        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
