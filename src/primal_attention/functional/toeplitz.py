"""Sums of outer products weighted by distance (Luo et al. 2021, arXiv 2106.12566).

    y_i = Σ_j c_{j-i} ⟨q_i, k_j⟩ v_j        over all keys, or over j ≤ i

The lag is ``key position − query position``: past keys have negative lags. A table ``c`` holds one
row of weights per head. There are three algorithms:

- :func:`windowed_sums`, for weights that are constant beyond a window: dense inside the window, one
  running sum outside; ``O(n w)``, strictly causal, constant state;
- :func:`toeplitz_sums` by FFT, for any table: ``O(n log n)``;
- :func:`toeplitz_sums` by divide and conquer, for causal sums: ``O(n log² n)``. One FFT of the
  whole sequence has an error relative to its largest value. Small early rows lose all accuracy, and
  later tokens influence earlier outputs. FFTs of separate blocks avoid both.

Positions on a grid use the same functions: :func:`grid_positions` puts the tokens of a grid on a
line on which every pair of row and column lags is one lag.
"""

from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from primal_attention.functional.precision import accumulator, full_precision, is_traced
from primal_attention.functional.twice import Context, gradients

__all__ = [
    "Backend",
    "WindowState",
    "WindowedSums",
    "grid_lags",
    "grid_positions",
    "toeplitz_matrix",
    "toeplitz_sums",
    "windowed_step",
    "windowed_sums",
]

Backend = Literal["auto", "dense", "fft", "split"]

_DENSE = 1024
"""Length up to which two dense products are faster than FFTs."""
_BLOCK = 256
"""Longest diagonal block that divide and conquer computes with dense products."""
_CHUNK = 64
"""Shortest chunk of windowed sums."""


def toeplitz_matrix(c: Float[Tensor, "h l"], n: int, m: int) -> Float[Tensor, "h n m"]:
    """Return the matrices ``T_ij = c_{j-i}`` from tables of the lags ``1 − n … m − 1``.

    Example:
        >>> toeplitz_matrix(torch.arange(4.0)[None], 2, 3)
        tensor([[[1., 2., 3.],
                 [0., 1., 2.]]])
    """
    lag = torch.arange(m, device=c.device) - torch.arange(n, device=c.device)[:, None]
    return c[:, lag + (n - 1)]


def toeplitz_sums(
    q: Float[Tensor, "b h n p"],
    k: Float[Tensor, "b h m p"],
    v: Float[Tensor, "b h m v"],
    c: Float[Tensor, "h l"],
    *,
    is_causal: bool = False,
    backend: Backend = "auto",
) -> Float[Tensor, "b h n v"]:
    """Return ``y_i = Σ_j c_{j-i} ⟨q_i, k_j⟩ v_j``, in float32 or better.

    Besides inputs and output it needs the memory of one feature at a time, also in backward.

    Args:
        q: Query features.
        k: Key features, zero where a key is masked.
        v: Values.
        c: Weights of the lags ``1 − n … m − 1``; ``l = n + m − 1``.
        is_causal: Sum over ``j ≤ i`` only; needs as many keys as queries.
        backend: ``"dense"``, ``"fft"``, ``"split"`` (divide and conquer, causal only), or
            ``"auto"``, the fastest for the size.

    Example:
        >>> ones = torch.ones(1, 1, 3, 1)
        >>> toeplitz_sums(ones, ones, ones, torch.arange(5.0)[None]).flatten()
        tensor([9., 6., 3.])
    """
    n, m = q.shape[2], k.shape[2]
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {get_args(Backend)}, got {backend!r}.")
    if backend == "split" and not is_causal:
        raise ValueError("backend='split' needs is_causal=True; otherwise use backend='fft'.")
    if is_causal and n != m:
        raise ValueError(f"There are {m} keys and {n} queries; is_causal=True needs equal numbers.")
    if backend == "auto":
        backend = _choose_backend(n, m, is_causal)
    wide = accumulator(q)
    with full_precision(q):
        q, k, v, c = (t.to(wide) for t in (q, k, v, c))
        if backend == "split":
            return _split_sums(q, k, v, c[:, :n].flip(-1))
        if is_causal:
            c = torch.where(torch.arange(c.shape[1], device=c.device) < n, c, 0.0)
        if backend == "dense":
            return _dense_sums(q, k, v, toeplitz_matrix(c, n, m))
        if is_causal and torch.compiler.is_compiling():
            # divide and conquer needs a known length; float64 keeps the FFT error below float32
            return _fft_sums(*(t.double() for t in (q, k, v, c))).to(wide)
        return _fft_sums(q, k, v, c)


def _choose_backend(n: int, m: int, is_causal: bool) -> Backend:
    if torch.compiler.is_compiling():
        return "fft"  # the only algorithm with one program for every length
    if is_causal:
        return "dense" if n <= _BLOCK else "split"
    return "dense" if max(n, m) <= _DENSE else "fft"


def _dense_sums(q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> Tensor:
    return (q @ k.mT * weights) @ v


def _fft_sums(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Tensor:
    n, m = q.shape[2], k.shape[2]
    if torch.compiler.is_compiling():
        length = n + m
        spectrum = torch.fft.rfft(_impulse(c, n, m, length))[:, None, None]
        values = v.mT.contiguous()
        y = torch.zeros((), dtype=v.dtype, device=v.device)
        # a few features at a time keep the program short and its memory small
        for query, key in zip(q.mT.split(8, 2), k.mT.split(8, 2), strict=True):
            _, part = _convolve(values[:, :, None] * key[:, :, :, None], spectrum, length)
            y = y + (query[:, :, :, None] * part[..., :n]).sum(2)
        return y.mT
    if is_traced():
        return _fft_forward(q, k, v, c, in_place=False)
    return _FFTSums.apply(q, k, v, c)  # type: ignore[no-untyped-call]


def _impulse(c: Tensor, n: int, m: int, length: int) -> Tensor:
    """Return the circular filter: lags ``0, −1, …`` from the start, positive lags at the end."""
    at = torch.arange(length, device=c.device)
    lag = torch.where(at < n, -at, length - at)
    entry = c[:, (lag + (n - 1)).clamp(0, n + m - 2)]
    return torch.where((at < n) | (at > length - m), entry, 0.0)


def _convolve(x: Tensor, spectrum: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the FFT of ``x`` and its circular convolution with a filter."""
    x_hat = torch.fft.rfft(x, length)
    return x_hat, torch.fft.irfft(x_hat * spectrum, length)


class _FFTSums(torch.autograd.Function):
    """The sums, one feature at a time; backward recomputes each FFT."""

    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v, c)
        return _fft_forward(q, k, v, c, in_place=True)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, c = given = ctx.saved_tensors
        if torch.is_grad_enabled():

            def formula(*own: Tensor) -> tuple[Tensor]:
                return (_fft_forward(*own, in_place=False),)

            return gradients(formula, given, ctx.needs_input_grad, (grad,))
        return _fft_backward(q, k, v, c, grad)


def _fft_forward(q: Tensor, k: Tensor, v: Tensor, c: Tensor, *, in_place: bool) -> Tensor:
    n, m = q.shape[2], k.shape[2]
    # n + m - 1 entries: a shorter circle would wrap the last lags onto the first
    length = _fast_length(n + m - 1)
    spectrum = torch.fft.rfft(_impulse(c, n, m, length))[:, None]  # [h 1 f]
    # an FFT along a strided axis is several times slower than along a contiguous last axis
    queries, keys, values = (t.mT.contiguous() for t in (q, k, v))  # [b h p n]
    y = torch.zeros_like(values[..., :1]).expand(-1, -1, -1, n).contiguous()
    for r in range(q.shape[-1]):
        _, part = _convolve(values * keys[:, :, r, None], spectrum, length)
        y = torch.addcmul(y, queries[:, :, r, None], part[..., :n], out=y if in_place else None)
    return y.mT


def _fft_backward(
    q: Tensor, k: Tensor, v: Tensor, c: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, m = q.shape[2], k.shape[2]
    length = _fast_length(n + m - 1)
    spectrum = torch.fft.rfft(_impulse(c, n, m, length))[:, None]
    queries, keys, values, grad = (t.mT.contiguous() for t in (q, k, v, grad))
    grad_q, grad_k = torch.empty_like(queries), torch.empty_like(keys)
    grad_v, grad_filter = torch.zeros_like(values), torch.zeros_like(spectrum)
    for r in range(q.shape[-1]):
        query, key = queries[:, :, r, None], keys[:, :, r, None]
        x_hat, part = _convolve(values * key, spectrum, length)
        grad_q[:, :, r] = torch.linalg.vecdot(grad, part[..., :n], dim=2)
        # the adjoint of a convolution is the correlation, with the conjugate filter
        g_hat, back = _convolve(grad * query, spectrum.conj(), length)
        back = back[..., :m]
        grad_k[:, :, r] = torch.linalg.vecdot(back, values, dim=2)
        grad_v.addcmul_(back, key)
        grad_filter += (g_hat * x_hat.conj()).sum((0, 2))[:, None]
    impulse = torch.fft.irfft(grad_filter[:, 0], length)
    past, future = impulse[:, :n].flip(-1), impulse[:, length - m + 1 :].flip(-1)
    return grad_q.mT, grad_k.mT, grad_v.mT, torch.cat([past, future], dim=-1)


def _fast_length(least: int) -> int:
    """Return the next even length with small prime factors."""
    best = 2
    while best < least:
        best *= 2
    for odd in (3, 5, 9, 15):
        length = 2 * odd
        while length < least:
            length *= 2
        best = min(best, length)
    return best


def _split_sums(q: Tensor, k: Tensor, v: Tensor, past: Float[Tensor, "h n"]) -> Tensor:
    """Return causal sums by divide and conquer; ``past_t`` is the weight of the lag ``−t``."""
    n, levels = q.shape[2], 0
    # halve until a block is small enough for one dense product
    while n > _BLOCK << levels:
        levels += 1
    block = max(-(-n // (1 << levels)), 1)
    fill = (block << levels) - n
    q, k, v = (pad(t, (0, 0, 0, fill)) for t in (q, k, v))
    past = pad(past, (0, fill))
    if is_traced():
        y = _split_forward(q, k, v, past, block, levels)
    else:
        y = _SplitSums.apply(q, k, v, past, block, levels)  # type: ignore[no-untyped-call]
    return y[:, :, :n]


class _SplitSums(torch.autograd.Function):
    """Divide and conquer; keeps only its inputs for backward."""

    @staticmethod
    def forward(
        ctx: Context, q: Tensor, k: Tensor, v: Tensor, past: Tensor, block: int, levels: int
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, past)
        ctx.block, ctx.levels = block, levels
        return _split_forward(q, k, v, past, block, levels)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, past = given = ctx.saved_tensors
        block, heads = ctx.block, past.shape[0]
        if torch.is_grad_enabled():

            def formula(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> tuple[Tensor]:
                return (_split_forward(q, k, v, past, block, ctx.levels),)

            return *gradients(formula, given, ctx.needs_input_grad[:4], (grad,)), None, None
        lag = _block_lags(block, q.device)
        query, key, value, g = (t.unflatten(2, (-1, block)) for t in (q, k, v, grad))
        scores, outer = query @ key.mT, g @ value.mT
        by_weight = (scores * outer).sum((0, 2)).tril().flatten(1)  # [h i·j]
        grad_past = torch.zeros_like(past)
        grad_past.index_add_(1, lag.clamp_min(0).flatten(), by_weight)
        weights = _block_weights(past, lag)
        # the gradients of queries and of keys both need this product
        outer.mul_(weights)
        grad_q, grad_k = (outer @ key).flatten(2, 3), (outer.mT @ query).flatten(2, 3)
        grad_v = (scores.mul_(weights).mT @ g).flatten(2, 3)
        # each level sends left keys to right queries, as forward does
        for level in range(ctx.levels):
            size = block << level
            right_q, left_k, left_v = _halves(q, k, v, size)
            right_g = _pairs(grad.unflatten(2, (-1, 2, size))[:, :, :, 1])
            grads = _fft_backward(right_q, left_k, left_v, _cross_weights(past, size), right_g)
            for total, half, part in zip((grad_q, grad_k, grad_v), (1, 0, 0), grads, strict=False):
                slot = total.unflatten(2, (-1, 2, size))[:, :, :, half]
                slot += part.unflatten(0, (q.shape[0], -1)).transpose(1, 2)
            grad_past[:, 1 : 2 * size] += grads[3].flip(-1)
        return grad_q, grad_k, grad_v, grad_past.view(heads, -1), None, None


def _split_forward(
    q: Tensor, k: Tensor, v: Tensor, past: Tensor, block: int, levels: int
) -> Tensor:
    tiles = [t.unflatten(2, (-1, block)) for t in (q, k, v)]
    weights = _block_weights(past, _block_lags(block, q.device))
    y = _dense_sums(tiles[0], tiles[1], tiles[2], weights).flatten(2, 3)
    for level in range(levels):
        size = block << level
        right = _fft_sums(*_halves(q, k, v, size), _cross_weights(past, size))
        sums = y.unflatten(2, (-1, 2, size))
        right = sums[:, :, :, 1] + right.unflatten(0, (q.shape[0], -1)).transpose(1, 2)
        y = torch.stack([sums[:, :, :, 0], right], dim=3).flatten(2, 4)
    return y


def _block_lags(block: int, device: torch.device) -> Int[Tensor, "i j"]:
    at = torch.arange(block, device=device)
    return at[:, None] - at


def _block_weights(past: Tensor, lag: Tensor) -> Float[Tensor, "h 1 i j"]:
    return torch.where(lag >= 0, past[:, lag.clamp_min(0)], 0.0)[:, None]


def _halves(q: Tensor, k: Tensor, v: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the right queries and the left keys and values of each pair of blocks."""
    query, key, value = (t.unflatten(2, (-1, 2, size)) for t in (q, k, v))
    return _pairs(query[:, :, :, 1]), _pairs(key[:, :, :, 0]), _pairs(value[:, :, :, 0])


def _pairs(x: Float[Tensor, "b h g s p"]) -> Float[Tensor, "b*g h s p"]:
    return x.transpose(1, 2).flatten(0, 1)


def _cross_weights(past: Tensor, size: int) -> Tensor:
    """Return the weights of the lags ``1 − 2 size … −1`` between right queries and left keys."""
    return past[:, 1 : 2 * size].flip(-1)


class WindowState(NamedTuple):
    """State of windowed sums; its size is constant."""

    sums: Float[Tensor, "b h p v"]
    """``Σ k_j v_jᵀ`` over keys before the window."""
    keys: Float[Tensor, "b h w p"]
    """The last ``w`` keys, oldest first."""
    values: Float[Tensor, "b h w v"]
    """Their values; zero where there is no key."""


class WindowedSums(NamedTuple):
    """Causal sums and the state after the last key."""

    values: Float[Tensor, "b h n v"]
    state: WindowState


def windowed_sums(
    q: Float[Tensor, "b h n p"],
    k: Float[Tensor, "b h m p"],
    v: Float[Tensor, "b h m v"],
    c: Float[Tensor, "h odd"],
    *,
    is_causal: bool = False,
) -> Float[Tensor, "b h n v"]:
    """Return ``y_i = Σ_j c_{j-i} ⟨q_i, k_j⟩ v_j`` for weights that are constant beyond a window.

    Neighbouring chunks use dense products, distant chunks prefix and suffix sums. Nothing is
    subtracted, so positive weights give positive sums. ``O(n (w + p) (p + v))`` time.

    Args:
        q: Query features.
        k: Key features.
        v: Values, zero where a key is masked.
        c: Weights of the lags ``−w … w``. The first is also used for all smaller lags, the last for
            all larger lags.
        is_causal: Sum over ``j ≤ i`` only; needs as many keys as queries.

    Example:
        >>> ones = torch.ones(1, 1, 4, 1)
        >>> windowed_sums(ones, ones, ones, torch.tensor([[1.0, 10.0, 0.0]])).flatten()
        tensor([10., 11., 12., 13.])
    """
    wide, window = accumulator(q), c.shape[1] // 2
    n, m = q.shape[2], k.shape[2]
    if is_causal and n != m:
        raise ValueError(f"There are {m} keys and {n} queries; is_causal=True needs equal numbers.")
    chunk = max(window, _CHUNK)
    # one extra chunk in a compiled program, because torch specialises on a single chunk
    spare = chunk if torch.compiler.is_compiling() else 0
    groups = (torch.sym_max(n, m) + spare + chunk - 1) // chunk
    with full_precision(q):
        c = c.to(wide)
        if not torch.compiler.is_compiling() and groups == 1:
            q, k, v = (t.to(wide) for t in (q, k, v))
            lag = torch.arange(m, device=q.device) - torch.arange(n, device=q.device)[:, None]
            weights = _lag_weights(c, lag)
            return _dense_sums(q, k, v, weights.tril() if is_causal else weights)
        q, k, v = (
            pad(t.to(wide), (0, 0, 0, groups * chunk - t.shape[2])).unflatten(2, (-1, chunk))
            for t in (q, k, v)
        )  # [b h g i p]
        total = k.mT @ v  # [b h g p v]
        y = _chunk_sums(q, k, v, c, is_causal=is_causal)
        y = y + _chunk_sums(q, _shift(k, 1), _shift(v, 1), c, -chunk)
        past, future = c[:, :1, None, None], c[:, -1:, None, None]  # [h 1 1 1]
        # two chunks away every lag lies beyond the window, so one weight serves all
        y = y + q @ (past * _shift(total.cumsum(2), 2))
        if not is_causal:
            y = y + _chunk_sums(q, _shift(k, -1), _shift(v, -1), c, chunk)
            y = y + q @ (future * _shift(total.flip(2).cumsum(2).flip(2), -2))
        # a copy instead of a view: torch.export cannot prove the strides for every length
        return y.flatten(2, 3).index_select(2, torch.arange(n, device=q.device))


def _chunk_sums(
    q: Tensor, k: Tensor, v: Tensor, c: Tensor, offset: int = 0, is_causal: bool = False
) -> Tensor:
    """Return the sums of each chunk of queries over the chunk of keys at a distance ``offset``."""
    at = torch.arange(q.shape[-2], device=q.device)
    weights = _lag_weights(c, at - at[:, None] + offset)
    return _dense_sums(q, k, v, (weights.tril() if is_causal else weights)[:, None])


def _lag_weights(c: Float[Tensor, "h odd"], lag: Int[Tensor, "n m"]) -> Float[Tensor, "h n m"]:
    window = c.shape[1] // 2
    return c[:, lag.clamp(-window, window) + window]


def _shift(x: Float[Tensor, "b h g i v"], by: int) -> Float[Tensor, "b h g i v"]:
    """Return the chunks shifted ``by`` chunks to the right, with zeros at the edge."""
    groups = x.shape[2]
    if by > 0:
        return pad(x, (0, 0, 0, 0, by, 0))[:, :, :groups]
    return pad(x, (0, 0, 0, 0, 0, -by))[:, :, -by:]


def windowed_step(
    q: Float[Tensor, "b h t p"],
    k: Float[Tensor, "b h t p"],
    v: Float[Tensor, "b h t v"],
    c: Float[Tensor, "h odd"],
    state: WindowState,
) -> WindowedSums:
    """Continue causal :func:`windowed_sums` by ``t`` tokens; ``O(w (p + v) + p v)`` for one."""
    wide, window, t = accumulator(q), c.shape[1] // 2, q.shape[2]
    with full_precision(q):
        q, k, v, c = (x.to(wide) for x in (q, k, v, c))
        keys, values = torch.cat([state.keys, k], dim=2), torch.cat([state.values, v], dim=2)
        if t <= max(window, _CHUNK):
            lag = torch.arange(window + t, device=q.device) - window
            lag = lag - torch.arange(t, device=q.device)[:, None]
            weights = torch.where(lag <= 0, _lag_weights(c, lag), 0.0)
            y = _dense_sums(q, keys, values, weights)
        else:
            y = windowed_sums(pad(q, (0, 0, window, 0)), keys, values, c, is_causal=True)
            y = y[:, :, window:]
        y = y + c[:, :1, None] * (q @ state.sums)
        sums = state.sums + keys[:, :, :t].mT @ values[:, :, :t]
        return WindowedSums(y, WindowState(sums, keys[:, :, t:], values[:, :, t:]))


def grid_positions(index: Int[Tensor, "*n"], width: int) -> Int[Tensor, "*n"]:
    """Return positions of grid tokens on a line, row after row, with gaps between rows.

    Gaps of ``width − 1`` give each pair of row and column lags a different lag on the line.

    Example:
        >>> grid_positions(torch.arange(4), 2)
        tensor([0, 1, 3, 4])
    """
    return index + index // width * (width - 1)


def grid_lags(lag: Int[Tensor, "*n"], width: int) -> tuple[Int[Tensor, "*n"], Int[Tensor, "*n"]]:
    """Return the row and column lags of a lag between two positions of :func:`grid_positions`."""
    # column lags lie between 1 - width and width - 1: as many as the stride
    stride = 2 * width - 1
    rows = torch.div(lag + width - 1, stride, rounding_mode="floor")
    return rows, lag - rows * stride
