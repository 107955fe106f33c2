"""Skyformer: Gaussian-kernel attention by the lifted Nyström method (Chen et al. 2021, 2111.00035).

    y = κ(q̃, z) (κ(z, z) + γ I)⁻¹ κ(z, k̃) v        with few landmarks z

Landmarks are tokens, half queries and half keys, or learned parameters. Learned landmarks depend on
no token, so they also work for causal attention: the last ``window`` keys have exact weights, older
keys enter through a state of constant size.
"""

import functools
import math
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.types import Device

from primal_attention.attention.base import JOINED_TIME, SQUARES_FIT, Capabilities, State
from primal_attention.attention.gaussian import GaussianCore
from primal_attention.attention.multihead import MultiHeadAttention, close_gaps, count_seen
from primal_attention.attention.registry import register_attention
from primal_attention.functional.landmarks import kmeans_landmarks, segment_means, strided_landmarks
from primal_attention.functional.linear import append_ones
from primal_attention.functional.nystrom import (
    Inverse,
    divide_by_row_sum,
    nystrom_attention,
    nystrom_error,
    nystrom_residual,
    windowed_nystrom,
)
from primal_attention.functional.precision import accumulator
from primal_attention.kernels.base import Factory

__all__ = ["NystromDiagnostics", "SkyformerAttention", "SkyformerCore"]

Landmarks = Literal["strided", "segments", "kmeans", "learned"]

_SAMPLE = 4
"""Number of sampled queries and of sampled keys per landmark, for k-means."""
_WINDOW = 64
"""Default number of keys with exact weights in causal attention."""


class NystromDiagnostics(NamedTuple):
    """Accuracy of the Nyström approximation."""

    residual_q: Float[Tensor, "b h n"]
    """``κ(x, x) − φ(x)·φ(x)`` of each query: 0 is exact, 1 means far from every landmark."""
    residual_k: Float[Tensor, "b h m"]
    """The same for each key."""
    error: Float[Tensor, "b h"]
    """``‖C − C̃‖₂ / ‖C‖₂`` against the exact kernel matrix."""


class SkyformerCore(GaussianCore):
    """The lifted Nyström form of Gaussian attention, ``O(n s (d + v) + s³)`` time per head."""

    undecayed = ("z",)
    ordered = True
    takes_query_mask = True

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        num_landmarks: int,
        landmarks: Landmarks,
        ridge: float,
        inverse: Inverse,
        window: int | None,
        normalize: bool = True,
        qk_norm: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory: Factory = {"device": device, "dtype": dtype}
        super().__init__(num_heads, normalize=normalize, qk_norm=qk_norm, **factory)
        for name, value, choices in (
            ("landmarks", landmarks, get_args(Landmarks)),
            ("inverse", inverse, get_args(Inverse)),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {value!r}.")
        learned = landmarks == "learned"
        if not learned and window is not None:
            raise ValueError(
                f"window={window} cannot be used with landmarks={landmarks!r}; it is for causal "
                "attention. Leave window out, or use landmarks='learned'."
            )
        if learned and inverse != "cholesky":
            raise ValueError(
                f"inverse={inverse!r} cannot be used with landmarks='learned'; use "
                "inverse='cholesky'."
            )
        window = _WINDOW if window is None else window
        if num_landmarks < 2 or window < 1:
            raise ValueError(
                f"num_landmarks is {num_landmarks} and window is {window}; they must be at least 2 "
                "and at least 1."
            )
        if not 0 < ridge < math.inf:
            raise ValueError(
                f"ridge must be positive and finite, got {ridge}; 1e-3 is a good start."
            )
        self.landmarks, self.num_landmarks = landmarks, num_landmarks
        self.ridge, self.inverse, self.window = ridge, inverse, window
        # landmarks made of the tokens turn with them, learned ones do not
        ways = JOINED_TIME if learned else JOINED_TIME | {"rotary"}
        self.capabilities = Capabilities(
            causal=learned, stateful=learned, time=ways, max_magnitude=SQUARES_FIT
        )
        if learned:
            # initial distribution of projected tokens: variance 1/3, times the scale of the points
            start = torch.randn(num_heads, num_landmarks, head_dim, **factory)
            self.z = nn.Parameter(start * 3**-0.5 * head_dim**-0.25)

    def choose_landmarks(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        key_mask: Bool[Tensor, "b m"] | None = None,
        query_mask: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b h s d"]:
        """Return the landmarks for scaled queries and keys."""
        if self.landmarks == "learned":
            return self.z.to(q.dtype).expand(q.shape[0], -1, -1, -1)
        pick = segment_means if self.landmarks == "segments" else strided_landmarks
        half = self.num_landmarks // 2
        z = torch.cat(
            [pick(q, half, query_mask), pick(k, self.num_landmarks - half, key_mask)], dim=2
        )
        if self.landmarks != "kmeans":
            return z
        # a sample of the tokens gives equally good means at fixed cost
        sample = _SAMPLE * self.num_landmarks
        both = [strided_landmarks(q, sample, query_mask), strided_landmarks(k, sample, key_mask)]
        return kmeans_landmarks(torch.cat(both, dim=2), z)

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        v: Float[Tensor, "b h m v"],
        *,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
        query_mask: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b h n v"]:
        """Return the approximate weighted sum or mean of the values.

        Without a ``query_mask`` and with equal numbers of queries and keys, ``key_mask`` is used
        for both, so that no landmark is padding.
        """
        if query_mask is None and key_mask is not None and q.shape[2] == k.shape[2]:
            query_mask = key_mask
        q, k = self.points(q), self.points(k)
        if is_causal:
            return self._attend_causal(q, k, append_ones(v, key_mask), None)[0].to(v.dtype)
        return nystrom_attention(
            q,
            k,
            v,
            self.choose_landmarks(q, k, key_mask, query_mask),
            ridge=self.ridge,
            key_mask=key_mask,
            normalize=self.normalize,
            inverse=self.inverse,
        )

    def _attend_causal(
        self, q: Tensor, k: Tensor, v: Tensor, state: tuple[Tensor, Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        y, after = windowed_nystrom(
            q, k, v, self.z, window=self.window, ridge=self.ridge, state=state
        )
        return (divide_by_row_sum(y, self.ridge) if self.normalize else y[..., :-1]), after

    def init_state(self, k: Float[Tensor, "b h zero d"], v: Float[Tensor, "b h zero v"]) -> State:
        """Return zero sums and an empty window."""
        b, h, _, d = k.shape
        width, wide = v.shape[-1] + 1, accumulator(k)
        sums = k.new_zeros(b, h, self.num_landmarks, width, dtype=wide)
        keys = k.new_zeros(b, h, self.window, d, dtype=wide)
        values = k.new_zeros(b, h, self.window, width, dtype=wide)
        return State((sums, keys, values), torch.zeros(b, dtype=torch.long, device=k.device))

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
        sums, keys, values = state.tensors
        q, k, v_ = self.points(q), self.points(k), append_ones(v, key_mask)
        seen = count_seen(state, k, key_mask)
        if key_mask is None:
            y, after = self._attend_causal(q, k, v_, (sums, keys, values))
            return y.to(v.dtype), State(after, seen)
        moved = close_gaps([keys, values], q, [k, v_], state.seen, key_mask)
        y, after = self._attend_causal(moved.queries, *moved.tokens, (sums, *moved.window))
        return moved.read(y).to(v.dtype), State(after, seen)


class SkyformerAttention(MultiHeadAttention):
    """Multi-head Gaussian attention by landmarks, linear in the number of tokens.

    The paper's layer is ``normalize=False, ridge=0.1, inverse="published"``.

    Args:
        dim: Model width.
        num_heads: Number of heads; must divide ``dim``.
        num_landmarks: Number of landmarks; half of them are queries.
        landmarks: ``"strided"`` (evenly spaced tokens), ``"segments"`` (means of segments, for
            inputs with similar neighbours), ``"kmeans"`` (five Lloyd steps on a sample of the
            tokens; most accurate) or ``"learned"`` (parameters; also causal).
        ridge: ``γ``, relative to the unit diagonal of the landmarks' Gram matrix.
        inverse: ``"cholesky"``; ``"schulz"``, matrix products only; or ``"published"``, the paper's
            six steps, which do not converge. Learned landmarks need ``"cholesky"``.
        window: Number of last keys with exact weights in causal attention; by default 64. Only for
            learned landmarks.
        normalize: Divide each row of weights by its sum; the paper does not.
        qk_norm: Give queries and keys a learned norm per head. Without it, the output and the
            gradient of a query far from all keys are zero.
        bias: Whether the four projections have a bias.
        dropout: Probability of dropping an element of the output in training.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Example:
        >>> attn = SkyformerAttention(16, 4, num_landmarks=8)
        >>> attn(torch.randn(2, 100, 16)).shape
        torch.Size([2, 100, 16])
    """

    core: SkyformerCore

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        num_landmarks: int = 128,
        landmarks: Landmarks = "strided",
        ridge: float = 1e-3,
        inverse: Inverse = "cholesky",
        window: int | None = None,
        normalize: bool = True,
        qk_norm: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        core = SkyformerCore(
            max(dim // max(num_heads, 1), 1),
            max(num_heads, 1),
            num_landmarks=num_landmarks,
            landmarks=landmarks,
            ridge=ridge,
            inverse=inverse,
            window=window,
            normalize=normalize,
            qk_norm=qk_norm,
            device=device,
            dtype=dtype,
        )
        super().__init__(
            dim, num_heads, core, bias=bias, dropout=dropout, device=device, dtype=dtype
        )

    @torch.no_grad()
    def diagnose(
        self,
        x: Float[Tensor, "b n c"],
        context: Float[Tensor, "b m c"] | None = None,
        *,
        key_mask: Bool[Tensor, "b m"] | None = None,
    ) -> NystromDiagnostics:
        """Return the residual of every token and the error of the matrix.

        The residual of padding is zero. The error needs the dense matrix; the residuals are linear
        in the number of tokens.

        Args:
            x: Tokens, as for ``forward``.
            context: Memory, as for ``forward``.
            key_mask: ``True`` where a token of the memory is real.

        Example:
            >>> layer = SkyformerAttention(16, 2, num_landmarks=64)
            >>> bool((layer.diagnose(torch.randn(1, 20, 16)).error < 0.01).all())
            True
        """
        self._check(x, context, key_mask)
        memory = x if context is None else context
        if key_mask is not None:
            memory = torch.where(key_mask[:, :, None], memory, 0.0)
        x = memory if context is None else x
        q, k = (
            self.core.points(self._split(p(t)))
            for p, t in ((self.q_proj, x), (self.k_proj, memory))
        )
        own = key_mask if context is None else None
        if context is not None and key_mask is not None:
            own = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        z, ridge = self.core.choose_landmarks(q, k, key_mask, own), self.core.ridge
        residuals = [
            nystrom_residual(t, z, ridge)
            if keep is None
            else torch.where(keep[:, None], nystrom_residual(t, z, ridge), 0.0)
            for t, keep in ((q, own), (k, key_mask))
        ]
        masks = {"key_mask": key_mask, "query_mask": own}
        error = nystrom_error(q, k, z, ridge=ridge, inverse=self.core.inverse, **masks)
        return NystromDiagnostics(residuals[0], residuals[1], error)


register_attention(
    "skyformer",
    SkyformerAttention,
    capabilities=Capabilities(
        causal=False, stateful=False, time=JOINED_TIME | {"rotary"}, max_magnitude=SQUARES_FIT
    ),
    cost="n",
    summary="Gaussian kernel by landmarks among the tokens",
)
register_attention(
    "skyformer-learned",
    functools.partial(SkyformerAttention, landmarks="learned"),
    capabilities=Capabilities(max_magnitude=SQUARES_FIT),
    cost="n",
    summary="Gaussian kernel by learned landmarks; exact for the last keys if causal",
)
