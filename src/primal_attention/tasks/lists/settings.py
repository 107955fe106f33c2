"""Settings of re-rankers: data and model of an experiment, and the estimator.

Nothing here imports torch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from primal_attention.models.config import StackConfig
from primal_attention.support.settings import at_least_one

__all__ = ["Affinity", "ContextConfig", "ListFitOptions", "VectorSettings", "kernel_names"]

Affinity = Literal["both", "inner", "diffusion"]

SET_ATTENTIONS = ("softmax", "primal-dual", "primal-static")
"""Attentions that treat candidates as a set; others depend on their positions."""
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of anchors over which means are taken."""


def kernel_names(affinity: Affinity) -> tuple[str, ...]:
    """Return the kernels of an affinity.

    Example:
        >>> kernel_names("both")
        ('inner', 'diffusion')
    """
    if affinity not in get_args(Affinity):
        raise ValueError(
            f"affinity must be one of {', '.join(get_args(Affinity))}, got {affinity!r}."
        )
    return ("inner", "diffusion") if affinity == "both" else (affinity,)


@dataclass(frozen=True, kw_only=True)
class ContextConfig(StackConfig):
    """Configuration of a :class:`ContextEncoder`.

    Example:
        >>> ContextConfig().attention
        'primal-dual'
    """

    dim: int = 64
    """Model width."""
    num_heads: int = 4
    """Heads; must divide ``dim``."""
    attention: str = "primal-dual"
    """``"softmax"``, ``"primal-dual"`` (linear), or ``"primal-static"`` (candidates do not mix)."""
    affinity: Affinity = "both"
    """Kernels between tokens and anchors."""
    anchors: int = 64
    """Number of anchors, the query among them."""
    input: Literal["means", "linear"] = "means"
    """Means over the first anchors, or one weight for each anchor (published)."""
    augment: bool = True
    """In training, vary vectors and lengths of lists."""

    def __post_init__(self) -> None:
        super().__post_init__()
        kernel_names(self.affinity)
        self._check_count("anchors")
        if self.input not in ("means", "linear"):
            raise ValueError(f"input must be 'means' or 'linear', got {self.input!r}.")
        if self.attention not in SET_ATTENTIONS:
            raise ValueError(
                f"attention must treat candidates as a set: {', '.join(SET_ATTENTIONS)}; got "
                f"{self.attention!r}."
            )

    @property
    def num_inputs(self) -> int:
        """Number of input features of a token."""
        kernels = len(kernel_names(self.affinity))
        return kernels * (len(WIDTHS) if self.input == "means" else self.anchors)


@dataclass(frozen=True, kw_only=True)
class VectorSettings:
    """Vectors with groups: pictures, curves (generated), or an .npz file with x and groups.

    The members of a group are relevant to each other. Training, validation and test parts have
    different groups.
    """

    name: Literal["pictures", "curves"] | None = None
    """COIL-20, Palm, emoji and curves together, or curves alone."""
    train: Path | None = None
    """File to train on, instead of a known set."""
    test: Path | None = None
    """File to score at the end; without one some groups of the training file are held out."""
    test_share: float = 0.2
    """Share of the groups that are scored at the end, if there is no test file."""
    valid: float = 0.2
    """Share of the training groups that chooses the epoch."""
    candidates: int = 200
    """Results in the list of an item."""
    seed: int = 0
    """Seed of the split into groups, and of curves."""

    def __post_init__(self) -> None:
        for key in ("valid", "test_share"):
            if not 0 < getattr(self, key) < 1:
                raise ValueError(
                    f"{key} must be a share between 0 and 1, got {getattr(self, key)}."
                )
        if self.candidates < 2:
            raise ValueError(f"candidates must be at least 2, got {self.candidates}.")
        if self.test is not None and self.train is None:
            raise ValueError("test needs train: a file to learn from.")
        if self.name is not None and self.train is not None:
            raise ValueError("give a name or the files train and test, not both.")


@dataclass(frozen=True, kw_only=True)
class ListFitOptions:
    """What is rarely changed in ``Reranker``.

    Example:
        >>> ListFitOptions(candidates=100).epoch_steps
        100
    """

    candidates: int = 256
    """Length of the training lists."""
    anchors: int = 64
    """Results at the top of the list that describe the others."""
    affinity: Affinity = "both"
    """``"both"`` kernels, ``"inner"`` products (published), or ``"diffusion"``."""
    input: Literal["means", "linear"] = "means"
    """Means over the first anchors, or one weight for each anchor (published)."""
    temperature: float = 2.0
    """Temperature of the contrastive loss."""
    epoch_steps: int = 100
    """Training steps of an epoch."""

    def __post_init__(self) -> None:
        at_least_one(self, "candidates", "anchors", "epoch_steps")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}.")
