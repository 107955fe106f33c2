"""The rule of Levine et al. 2020 for the depth of a language model, and a notice that applies it.

In trained decoders of 6 to 48 layers, the width at which one more layer begins to pay follows

    log d*(L) = a + b L,        a = 5.039 ± 0.030,   b = 0.0555 ± 0.0013

With blocks of ``12 d²`` parameters this gives a size for each depth and a depth for each size:

    N*(L) = 12 L d*(L)²         L*(N) = W(N b e^(-2a) / 6) / (2b)

``W`` is the Lambert function. ``N`` leaves embeddings out. The constants come from one data set,
one tokenizer and one optimizer. The covariance is taken as reported and was not derived again here.

The paper is *Limits to Depth Efficiencies of Self-Attention* (later title: *The Depth-to-Width
Interplay in Self-Attention*), arXiv 2006.12467.
"""

import math
import sys
import warnings
from collections.abc import Callable

__all__ = [
    "DepthNotice",
    "depth_error",
    "depth_notice",
    "depth_of_width",
    "optimal_depth",
    "optimal_params",
    "optimal_width",
    "relative_error",
    "warn_of_depth",
]

INTERCEPT, SLOPE = 5.039, 0.0555
"""The fitted constants ``a`` and ``b``."""
VARIANCES = 9.4e-4, 1.7e-6, -3.74e-5
"""Variance of ``a``, variance of ``b`` and their covariance, as reported."""
FITTED_LAYERS = 6, 48
"""Depths of the models to which the constants were fitted."""
SHALLOW, DEEP = 0.5, 1.5
"""A depth below or above these multiples of ``L*(N)`` gives a notice."""


class DepthNotice(UserWarning):
    """A model is much shallower or deeper than the rule suggests for its size.

    It is advice, no error. Silence it with
    ``warnings.filterwarnings("ignore", category=DepthNotice)``.
    """


def optimal_width(layers: float) -> float:
    """Return the width ``d*(L)`` that suits a depth.

    Example:
        >>> round(optimal_width(70))
        7510
    """
    return math.exp(INTERCEPT + SLOPE * layers)


def depth_of_width(width: float) -> float:
    """Return the depth ``L*(d)`` that suits a width; negative for widths below 154.

    Example:
        >>> round(depth_of_width(768), 1)
        28.9
    """
    if width <= 0:
        raise ValueError(f"width must be positive, got {width}.")
    return (math.log(width) - INTERCEPT) / SLOPE


def optimal_params(layers: float) -> float:
    """Return the size ``N*(L)`` that suits a depth, in parameters without embeddings.

    Example:
        >>> f"{optimal_params(24):.2g}"
        '9.8e+07'
    """
    return 12 * layers * optimal_width(layers) ** 2


def optimal_depth(params: float, *, size: Callable[[float, float], float] | None = None) -> float:
    """Return the depth ``L*(N)`` that suits a size.

    Args:
        params: Parameters without embeddings.
        size: Parameters of a model by its depth and width, growing in both; by default
            ``12 L d²``.

    Example:
        >>> round(optimal_depth(12 * 12 * 768**2))  # the shape of BERT-base
        23
    """
    if not params > 0:
        raise ValueError(f"params must be positive, got {params}.")
    if size is None:
        return _lambert_w(params * SLOPE * math.exp(-2 * INTERCEPT) / 6) / (2 * SLOPE)
    low, high = 0.0, 1.0
    while size(high, optimal_width(high)) < params:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        is_small = size(middle, optimal_width(middle)) < params
        low, high = (middle, high) if is_small else (low, middle)
    return (low + high) / 2


def _lambert_w(x: float) -> float:
    """Return the ``w`` with ``w eʷ = x``, for positive ``x``."""
    # Newton on w + log w = log x converges from any start and never overflows
    target = math.log(x)
    w = max(target - math.log(max(target, 1.0)), 0.5 * min(x, 1.0))
    for _ in range(60):
        step = (w + math.log(w) - target) * w / (w + 1)
        w = max(w - step, w / 10)
        if abs(step) <= 1e-15 * w:
            break
    return w


def relative_error(layers: float) -> float:
    """Return the standard error of ``N*(L)``, relative to it.

    Example:
        >>> f"{relative_error(24):.1%}"
        '2.2%'
    """
    of_a, of_b, of_both = VARIANCES
    return 2 * math.sqrt(of_a + 2 * layers * of_both + layers**2 * of_b)


def depth_error(params: float) -> float:
    """Return the standard error of ``L*(N)`` in layers, from that of the constants.

    Example:
        >>> round(depth_error(1e9), 2)
        0.38
    """
    layers = optimal_depth(params)
    return relative_error(layers) / (1 / layers + 2 * SLOPE)


def depth_notice(layers: int, width: int, vocab_size: int | None) -> str | None:
    """Return advice about the shape of a model, or ``None`` where the rule has nothing to say.

    The rule comes from language models. Advice is given for models that read token ids and have at
    least ``N*(6)``, about 3.3 million, parameters in their blocks; ``12 L d²`` stands for these. A
    small vocabulary makes more depth reasonable, so such a model is never called too deep.

    Args:
        layers: Blocks that mix tokens.
        width: Model width.
        vocab_size: Distinct token ids; ``None`` for other inputs.

    Example:
        >>> depth_notice(2, 1024, 32000)[:65]
        'With 2 layers of width 1024 the model is shallow for its size: th'
        >>> depth_notice(2, 128, 32000) is None  # too small for the rule
        True
    """
    size = 12 * layers * width**2
    if vocab_size is None or size < optimal_params(FITTED_LAYERS[0]):
        return None
    best = optimal_depth(size)
    ratio = layers / best
    if SHALLOW <= ratio <= DEEP or (ratio > DEEP and vocab_size < optimal_width(best)):
        return None
    side = "shallow" if ratio < SHALLOW else "deep"
    beyond = "" if best <= FITTED_LAYERS[1] else ", an extrapolation above 48 layers"
    return (
        f"With {layers} layers of width {width} the model is {side} for its size: the rule of "
        f"Levine et al. 2020 gives {best:.0f} layers of width {optimal_width(best):.0f}{beyond}. "
        "Other shapes often cost little; primal_attention.analysis.depth.plan shows a range. "
        "Silence this notice with warnings.filterwarnings('ignore', category=DepthNotice)."
    )


def warn_of_depth(layers: int, width: int, vocab_size: int | None) -> None:
    """Warn with a :class:`DepthNotice`, at the first caller outside this library, if there is one.

    Args:
        layers: Blocks that mix tokens.
        width: Model width.
        vocab_size: Distinct token ids; ``None`` for other inputs.
    """
    words = depth_notice(layers, width, vocab_size)
    if words is None:
        return
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(words, DepthNotice, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "primal_attention"
