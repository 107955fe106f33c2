"""The core of all attentions with weights that are inner products of features.

    y_i = φ_q(q_i) (Σ_j φ_k(k_j)ᵀ v_j) / φ_q(q_i) (Σ_j φ_k(k_j)ᵀ 1)

A subclass defines the features. Sums, causal order, padding, state and precision are shared.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from primal_attention.attention.base import Capabilities, State
from primal_attention.attention.multihead import Core, count_seen
from primal_attention.functional import causal_sums
from primal_attention.functional.linear import append_ones
from primal_attention.functional.precision import accumulator, full_precision
from primal_attention.kernels import FeatureMap, RandomFeatureMap

__all__ = ["FeatureCore", "KernelCore", "divide_by_total", "slots"]


def slots(x: Float[Tensor, "b h n d"]) -> Int[Tensor, "b n"]:
    """Return the positions ``0 … n - 1`` for each sequence."""
    return torch.arange(x.shape[2], device=x.device).expand(x.shape[0], -1)


def divide_by_total(sums: Float[Tensor, "b h n w"]) -> Float[Tensor, "b h n v"]:
    """Return the first columns divided by the last one; a row with denominator zero is zero."""
    total = sums[..., -1:]
    return sums[..., :-1] / torch.where(total > 0, total, 1.0)


class FeatureCore(Core):
    """Normalised attention with explicit features in ``O((n + m) p v)`` time, constant state.

    A subclass defines :meth:`query_features`. It overrides :meth:`key_features` if keys have other
    features, and :meth:`divide` if features can be negative. Everything runs in float32 or better.
    """

    capabilities = Capabilities()

    def query_features(
        self, x: Float[Tensor, "b h n d"], position: Int[Tensor, "b n"]
    ) -> Float[Tensor, "b h n p"]:
        """Return ``φ_q(x)`` at the given positions."""
        raise NotImplementedError  # abstract

    def key_features(
        self, x: Float[Tensor, "b h n d"], position: Int[Tensor, "b n"]
    ) -> Float[Tensor, "b h n p"]:
        """Return ``φ_k(x)`` at the given positions."""
        return self.query_features(x, position)

    def divide(self, sums: Float[Tensor, "b h n w"]) -> Float[Tensor, "b h n v"]:
        """Return the first columns divided by the last one."""
        return divide_by_total(sums)

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        v: Float[Tensor, "b h m v"],
        *,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "b h n v"]:
        """Return the weighted mean of the values; zero for a row without keys."""
        with full_precision(q):
            key, value = self._keys(k, v, slots(k), key_mask)
            query = self.query_features(q.to(accumulator(q)), slots(q))
            if is_causal:
                sums = causal_sums(query, key, value).values
            else:
                sums = query @ (key.transpose(-1, -2) @ value)
            return self.divide(sums).to(v.dtype)

    def init_state(self, k: Float[Tensor, "b h zero d"], v: Float[Tensor, "b h zero v"]) -> State:
        """Return zero sums."""
        key, value = self._keys(k, v, slots(k), None)
        sums = key.transpose(-1, -2) @ value
        return State((sums,), torch.zeros(k.shape[0], dtype=torch.long, device=k.device))

    def step(
        self,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b h t d"],
        v: Float[Tensor, "b h t v"],
        state: State,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b h t v"], State]:
        """Continue a causal forward by ``t`` tokens, at constant cost per token."""
        position = state.seen[:, None] + (slots(k) if key_mask is None else key_mask.cumsum(1) - 1)
        with full_precision(q):
            key, value = self._keys(k, v, position, key_mask)
            query = self.query_features(q.to(accumulator(q)), position)
            if k.shape[2] == 1:
                after = state.tensors[0] + key.transpose(-1, -2) @ value
                sums = query @ after
            else:
                sums, after = causal_sums(query, key, value, state=state.tensors[0])
            y = self.divide(sums).to(v.dtype)
        return y, State((after,), count_seen(state, k, key_mask))

    def _keys(
        self, k: Tensor, v: Tensor, position: Tensor, key_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return key features, and values with a column of ones for the denominator."""
        key = self.key_features(k.to(accumulator(k)), position)
        # zero values and a zero in the column of ones remove a masked key from both sums
        return key, append_ones(v, key_mask).to(key.dtype)


class KernelCore(FeatureCore):
    """A core with the features of a map of :mod:`primal_attention.kernels`.

    Args:
        features: The map; its name in state dicts is ``features``.
    """

    def __init__(self, features: FeatureMap) -> None:
        super().__init__()
        self.features: Any = features

    def query_features(
        self, x: Float[Tensor, "b h n d"], position: Int[Tensor, "b n"]
    ) -> Float[Tensor, "b h n p"]:
        """Return the map's query features; positions are not used."""
        return self.features.query_features(x)

    def key_features(
        self, x: Float[Tensor, "b h n d"], position: Int[Tensor, "b n"]
    ) -> Float[Tensor, "b h n p"]:
        """Return the map's key features."""
        return self.features.key_features(x)

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draw new random features in place; call it between training steps."""
        if not isinstance(self.features, RandomFeatureMap):
            raise ValueError(
                f"{type(self.features).__name__} has no random features; redraw_ needs a "
                "RandomFeatureMap."
            )
        self.features.redraw_(generator)
