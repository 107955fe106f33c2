"""How the attention modules of other libraries are recognised, read and replaced."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.attention import Attention
from primal_attention.surgery.config import ConversionError
from primal_attention.surgery.layers import Converted, Inputs, Projection, Reading

__all__ = ["Dialect", "dialects", "plain_projection"]


class Dialect:
    """One library's way of writing attention."""

    name: str = ""
    pads: bool = True
    """Whether a trial call may contain padding."""

    def matches(self, module: nn.Module) -> bool:
        """Return whether the module is written in this dialect."""
        raise NotImplementedError  # abstract

    def read(self, module: nn.Module) -> Reading:
        """Return what the module is made of; raise ``ConversionError`` if that cannot be said."""
        raise NotImplementedError  # abstract

    def wrap(self, module: nn.Module, attention: Attention, reading: Reading) -> Converted:
        """Return the module that takes the place of ``module``, with ``attention`` inside."""
        raise NotImplementedError  # abstract

    def ask(self, module: nn.Module, inputs: Inputs) -> Float[Tensor, "b n c"]:
        """Return what a copy of the original module answers in evaluation mode."""
        raise NotImplementedError  # abstract

    def settle(
        self, model: nn.Module, modules: dict[str, nn.Module], every: dict[str, nn.Module]
    ) -> list[Callable[[], None]]:
        """Tell the host model about the replacement; return what undoes it.

        Args:
            model: The converted model.
            modules: The original modules of this dialect that were replaced.
            every: All attention modules that the model had.
        """
        return []


def dialects() -> list[Dialect]:
    """Return every dialect that is spoken here."""
    from primal_attention.surgery.huggingface import HuggingFace
    from primal_attention.surgery.torch_nn import TorchMultihead
    from primal_attention.surgery.vision import Timm

    return [TorchMultihead(), Timm(), HuggingFace()]


def plain_projection(module: nn.Module, name: str) -> Projection:
    """Return the weights of a child that is a plain affine map; refuse anything else.

    Adapted, quantised and parametrised layers compute more than their weight says.
    """
    layer = module.get_submodule(name)
    hooks = layer._forward_hooks or layer._forward_pre_hooks or hasattr(layer, "_hf_hook")
    if type(layer) is nn.Linear and not hooks:
        return Projection(layer.weight, layer.bias)
    if type(layer).__name__ == "Conv1D" and not hooks and isinstance(layer.weight, Tensor):
        return Projection(layer.weight.T, layer.bias)  # type: ignore[arg-type]
    what = f"{type(layer).__module__}.{type(layer).__qualname__}"
    raise ConversionError(
        f"{name} is not a plain nn.Linear but {what}{' with hooks' if hooks else ''}; merge "
        "adapters, dequantise or remove hooks first"
    )
