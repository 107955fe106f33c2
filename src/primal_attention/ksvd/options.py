"""Options of the estimator :class:`~primal_attention.ksvd.KernelSVD`."""

from dataclasses import dataclass

from primal_attention.support.settings import at_least_one

__all__ = ["KernelSVDOptions"]


@dataclass(frozen=True)
class KernelSVDOptions:
    """What is rarely touched of a kernel SVD."""

    n_landmarks: int = 256
    """Landmarks of each side for ``solver="nystrom"``."""
    tol: float = 1e-6
    """Relative residual at which ``"lanczos"`` and ``"matrix_free"`` stop."""
    max_passes: int = 50
    """Largest number of passes over the kernel for ``"matrix_free"``, of restarts for
    ``"lanczos"``."""

    def __post_init__(self) -> None:
        at_least_one(self, "n_landmarks", "max_passes")
