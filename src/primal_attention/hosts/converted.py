"""The module that replaces an attention of another library."""

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.attention import Attention
from primal_attention.hosts.inputs import LayerInputs

__all__ = ["ConvertedLayer", "converted_layers"]


class ConvertedLayer(nn.Module):
    """Base of the modules that replace an attention of another library.

    Args:
        attention: The attention of this library.
        is_causal: Whether the layer is causal by default.
        rotary: Whether the host passes rotary positions.
    """

    library: str = ""
    settings: Mapping[str, object] | None = None
    """Configuration of the conversion as JSON values; ``None`` if ``convert`` did not make the
    layer."""

    def __init__(
        self, attention: Attention, *, is_causal: bool = False, rotary: bool = False
    ) -> None:
        super().__init__()
        self.attention = attention
        self.is_causal = is_causal
        self.uses_rotary = rotary and attention.capabilities.rotary

    def attend(self, inputs: LayerInputs) -> Float[Tensor, "b n c"]:
        """Return the output of the attention."""
        also = {"rotary": inputs.rotary} if self.uses_rotary else {}
        return self.attention(
            inputs.x,
            key_mask=inputs.key_mask,
            is_causal=inputs.is_causal,
            document_ids=inputs.document_ids,
            **also,
        )


def converted_layers(model: nn.Module) -> dict[str, ConvertedLayer]:
    """Return the converted modules of a model by name.

    Example:
        >>> converted_layers(nn.Linear(2, 2))
        {}
    """
    return {name: m for name, m in model.named_modules() if isinstance(m, ConvertedLayer)}
