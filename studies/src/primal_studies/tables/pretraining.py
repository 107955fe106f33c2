"""A classifier head that learns where classes belong before attention moves a point."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.training import Columns, History, TrainingConfig, fit

__all__ = ["pretrain_head"]


def pretrain_head(
    head: nn.Module,
    centres: Float[Tensor, "k r"],
    *,
    points_per_class: int = 200,
    freeze: bool = True,
    config: TrainingConfig | None = None,
    verbose: bool | None = None,
) -> History:
    """Train a classifier head alone on Gaussian clouds of deviation one, and freeze it.

    Then train the attention in front of it. The head learns where classes belong before the
    attention moves a point.

    Args:
        head: From keyword ``x`` or first argument ``[b r]`` to logits ``[b k]``.
        centres: Centre of every class.
        points_per_class: Points of a cloud.
        freeze: Whether the parameters of the head stop to learn afterwards.
        config: How to train.
        verbose: As in :func:`primal_attention.training.fit`.

    Example:
        >>> head = nn.Linear(2, 3)
        >>> centres = 9 * torch.tensor([[0.0, 1.0], [1.0, -0.5], [-1.0, -0.5]])
        >>> _ = pretrain_head(head, centres, config=TrainingConfig(epochs=5, lr=0.1))
        >>> head(centres).argmax(-1).tolist(), head.weight.requires_grad
        ([0, 1, 2], False)
    """
    config = config or TrainingConfig(optimizer="adam", lr=1e-2, weight_decay=0.0)
    labels = torch.arange(len(centres)).repeat_interleave(points_per_class)
    noise = torch.randn(
        (len(labels), centres.shape[1]), generator=torch.Generator().manual_seed(config.seed)
    )
    data = Columns(x=centres[labels] + noise, labels=labels)
    history = fit(_ByName(head), data, config=config, verbose=verbose)
    if freeze:
        head.requires_grad_(False)
    return history


class _ByName(nn.Module):
    """A module that takes its input by name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)
