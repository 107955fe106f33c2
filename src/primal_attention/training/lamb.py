"""LAMB and Lookahead, the optimisers of Non-Parametric Transformers (Kossen et al. 2021).

LAMB (You et al. 2020) here has Adam's moments without bias correction::

    m ← β₁ m + (1 - β₁) g      v ← β₂ v + (1 - β₂) g²      u = m / (√v + ε) + λ w
    w ← w - lr · r · u         r = min(‖w‖, 10) / ‖u‖, or 1 if either norm is zero

Lookahead (Zhang et al. 2019): every ``k`` steps ``slow ← slow + α (fast - slow)``, ``fast ← slow``.
The slow weights are those at the start of the training.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

__all__ = ["Lamb", "Lookahead"]

_LARGEST_NORM = 10.0
"""Largest norm of a tensor of weights that enters its trust ratio."""


class Lamb(torch.optim.Optimizer):
    """Adam whose step is scaled by the norm of each tensor.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        betas: Decays of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Added to the step as a multiple of the weights.
        is_adaptive: Whether to scale by the trust ratio; without it the step is Adam's, without
            bias correction.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> optimizer = Lamb(layer.parameters())
        >>> layer(torch.ones(3, 2)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        is_adaptive: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "is_adaptive": is_adaptive})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; a closure computes the loss again first."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[p], group["betas"]
        if not state:
            state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
        state["mean"].lerp_(p.grad, 1 - beta1)
        state["square"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
        update = state["mean"] / (state["square"].sqrt() + group["eps"])
        update = update + group["weight_decay"] * p
        ratio = _trust_ratio(p, update) if group["is_adaptive"] else 1.0
        p.sub_(group["lr"] * ratio * update)


def _trust_ratio(weight: Tensor, update: Tensor) -> Tensor:
    size, length = weight.norm().clamp_max(_LARGEST_NORM), update.norm()
    # where() computes both branches: the clamp keeps the one that is not taken finite
    return torch.where((size > 0) & (length > 0), size / length.clamp_min(1e-38), 1.0)


class Lookahead(torch.optim.Optimizer):
    """Another optimiser whose weights return half-way to slow weights every few steps.

    Args:
        inner: The optimiser that takes the steps; its groups and state are shared.
        alpha: Share of the way from slow to fast weights.
        every: Steps between two returns.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> Lookahead(torch.optim.SGD(layer.parameters(), lr=0.1)).every
        6
    """

    def __init__(self, inner: torch.optim.Optimizer, *, alpha: float = 0.5, every: int = 6) -> None:
        self.inner, self.alpha, self.every = inner, alpha, every
        super().__init__(inner.param_groups, {})
        # the same groups, not copies: a learning rate that is set here must reach the inner one
        self.param_groups = inner.param_groups
        slow = {p: p.detach().clone() for g in self.param_groups for p in g["params"]}
        for p, start in slow.items():
            # a tensor, because checkpoints hold the state of optimisers as tensors
            self.state[p].update(slow=start, count=torch.zeros(()))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of the inner optimiser, and return to the slow weights when it is time."""
        loss = self.inner.step(closure)
        for p, own in self.state.items():
            own["count"] += 1
            if own["count"] % self.every == 0:
                own["slow"].lerp_(p, self.alpha)
                p.copy_(own["slow"])
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return groups and both states, by parameter."""
        own = super().state_dict()
        # both have a state for every parameter; no name is in both
        inner = self.inner.state_dict()["state"]
        own["state"] = {k: {**v, **inner.get(k, {})} for k, v in own["state"].items()}
        return own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore groups and both states."""
        parts = {
            k: ({n: t for n, t in v.items() if n in ("slow", "count")}, v)
            for k, v in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": {k: v[0] for k, v in parts.items()}})
        rest = {
            k: {n: t for n, t in both.items() if n not in own} for k, (own, both) in parts.items()
        }
        self.inner.load_state_dict({**state_dict, "state": rest})
        # loading makes new groups: share them again
        self.param_groups = self.inner.param_groups
