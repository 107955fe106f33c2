"""The blend of three parts that the estimators of time series fit.

``ridge`` and ``forest`` are heads in closed form, ``convolutions`` and ``quantiles`` the parts that
use them. ``model`` is the blend with its attention part, and ``fitting`` chooses the shares.
"""
