"""Configuration of a conversion."""

import dataclasses
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from primal_attention.attention import attention_entry, create_attention
from primal_attention.support.command import did_you_mean

__all__ = ["DEFAULT_ATTENTION", "KEEPS_WEIGHTS", "SurgeryConfig", "conversion_defaults"]

DEFAULT_ATTENTION = "adaptive"
"""What attention is converted to unless another mechanism is named."""
KEEPS_WEIGHTS = ("adaptive", "softmax")
"""Mechanisms that approximate softmax with the weights as they are: nothing is fitted."""
_DEFAULTS: dict[str, dict[str, object]] = {
    # the convolution of the values needs training; untrained, it only adds noise
    "nystromformer": {"kernel_size": None},
}
"""Options where they differ from the constructor's. Adaptive layers need none: smaller blocks for
encoders were slower and no closer beyond the length up to which they are exact."""
_TAKEN = ("dim", "num_heads", "bias", "device", "dtype")
"""Options that the model determines."""


def conversion_defaults(attention: str) -> dict[str, object]:
    """Return the options of a converted layer, where they differ from the constructor's.

    Example:
        >>> conversion_defaults("nystromformer")
        {'kernel_size': None}
    """
    return dict(_DEFAULTS.get(attention, {}))


@dataclass(frozen=True)
class SurgeryConfig:
    """Which attention replaces which layers; by default ``adaptive`` replaces all.

    Example:
        >>> SurgeryConfig("primal-dual", {"rank": 16}, layers="last:2").layers
        'last:2'
    """

    attention: str = DEFAULT_ATTENTION
    """Name of an attention in the registry."""
    options: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Options of its constructor, such as ``{"rank": 16}``. The model determines sizes, biases,
    device and type. ``nystromformer`` has no convolution unless ``kernel_size`` is given."""
    layers: str | int | Sequence[str | int] = "all"
    """``"all"``, ``"last:k"``, an index, a name, a regular expression that matches a whole name, or
    a sequence of these. ``"auto"`` selects by :func:`~primal_attention.surgery.advise` on the data
    given to ``convert``."""

    def __post_init__(self) -> None:
        if not isinstance(self.attention, str):
            raise TypeError(f"attention must be a name, got {type(self.attention).__name__}.")
        attention_entry(self.attention)
        if not isinstance(self.options, Mapping):
            raise TypeError(f"options must be a mapping, got {type(self.options).__name__}.")
        _check_options(self.attention, self.options)
        layers = self.layers
        each = [layers] if isinstance(layers, str | int) else list(layers)
        if not each or not all(isinstance(i, str | int) for i in each):
            raise ValueError(
                f"layers must be 'all', 'last:k', 'auto', a name, a regular expression, an index "
                f"or a sequence of those, got {layers!r}."
            )
        for one in each:
            if isinstance(one, str):
                try:
                    re.compile(one)
                except re.error as error:
                    raise ValueError(
                        f"layers={one!r} is not a regular expression: {error}."
                    ) from None
        # a list would make the config unhashable
        object.__setattr__(self, "layers", layers if isinstance(layers, str | int) else tuple(each))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Return the configuration in a mapping, such as a section of a YAML file.

        Example:
            >>> SurgeryConfig.from_dict({"attention": "linear", "layers": [0, -1]}).layers
            (0, -1)
        """
        known = [f.name for f in dataclasses.fields(cls)]
        for key in content:
            if key not in known:
                hint = did_you_mean(str(key), known)
                raise ValueError(f"There is no setting {key!r}.{hint} Known: {', '.join(known)}.")
        # a damaged record must not become another conversion
        if "attention" not in content:
            raise ValueError("The setting 'attention' is missing; give the name of an attention.")
        return cls(**content)

    def to_dict(self) -> dict[str, object]:
        """Return the configuration as a mapping of JSON values."""
        layers = self.layers if isinstance(self.layers, str | int) else list(self.layers)
        return {"attention": self.attention, "options": dict(self.options), "layers": layers}


def _check_options(attention: str, options: Mapping[str, object]) -> None:
    """Raise for an option that the attention does not have or that the model determines."""
    for key in options:
        if key in _TAKEN:
            raise ValueError(f"The option {key!r} is determined by the model; leave it out.")
    try:
        json.dumps(dict(options))
    except TypeError as error:
        raise ValueError(f"options must be JSON values: {error}.") from error
    layer = create_attention(attention, 8, 2, device="meta")
    known = [name for name in inspect.signature(type(layer)).parameters if name not in _TAKEN]
    for key in options:
        if key not in known:
            raise ValueError(
                f"The attention {attention!r} has no option {key!r}.{did_you_mean(key, known)} "
                f"Known: {', '.join(known)}."
            )
