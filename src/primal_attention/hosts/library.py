"""What this package must know of a library: how to recognise, read and replace its attention."""

from collections.abc import Callable, Iterable, Mapping

from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.attention import Attention
from primal_attention.hosts.converted import ConvertedLayer
from primal_attention.hosts.errors import ConversionError
from primal_attention.hosts.inputs import LayerInputs
from primal_attention.hosts.parts import AttentionParts, LinearWeights

__all__ = ["HostLibrary", "plain_projection", "refuse_other_parts"]


class HostLibrary:
    """How to recognise, read and replace the attention modules of one library."""

    name: str = ""
    accepts_padding: bool = True
    """Whether its modules take a padding mask."""

    def matches(self, module: nn.Module) -> bool:
        """Return whether a module is an attention of this library."""
        raise NotImplementedError  # abstract

    def read(self, module: nn.Module) -> AttentionParts:
        """Return weights and sizes of a module; raise ``ConversionError`` if unsupported."""
        raise NotImplementedError  # abstract

    def wrap(
        self, module: nn.Module, attention: Attention, parts: AttentionParts
    ) -> ConvertedLayer:
        """Return the module that replaces ``module`` and calls ``attention``."""
        raise NotImplementedError  # abstract

    def run_original(self, module: nn.Module, inputs: LayerInputs) -> Float[Tensor, "b n c"]:
        """Return the output of the original module in evaluation mode, computed by a copy."""
        raise NotImplementedError  # abstract

    def adapt_model(
        self,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        every: Mapping[str, nn.Module],
        record: Mapping[str, object] | None,
    ) -> list[Callable[[], None]]:
        """Adapt the model around the replaced modules; return functions that undo it.

        Args:
            model: The converted model.
            modules: The original modules of this library that were replaced.
            every: All attention modules of the original model.
            record: What the model is to remember of the conversion, as JSON values.
        """
        return []


def refuse_other_parts(module: nn.Module, known: Iterable[str | None]) -> None:
    """Raise if a module has children or parameters of its own besides the known children."""
    names = set(known)
    extra = [
        name
        for name, child in module.named_children()
        if name not in names and not isinstance(child, nn.Dropout | nn.Identity)
    ]
    extra += [name for name, _ in module.named_parameters(recurse=False)]
    if extra:
        raise ConversionError(f"it has parts that our layers do not have: {', '.join(extra)}")


def plain_projection(module: nn.Module, name: str) -> LinearWeights:
    """Return the weights of a child module that is a plain linear map; refuse anything else.

    Layers with adapters, quantisation or parametrisation compute more than their weight shows.
    """
    layer = module.get_submodule(name)
    hooks = layer._forward_hooks or layer._forward_pre_hooks or hasattr(layer, "_hf_hook")
    if type(layer) is nn.Linear and not hooks:
        return LinearWeights(layer.weight, layer.bias)
    if type(layer).__name__ == "Conv1D" and not hooks and isinstance(layer.weight, Tensor):
        return LinearWeights(layer.weight.T, layer.bias)  # type: ignore[arg-type]
    what = f"{type(layer).__module__}.{type(layer).__qualname__}"
    raise ConversionError(
        f"{name} is not a plain nn.Linear but {what}{' with hooks' if hooks else ''}; merge "
        "adapters, dequantise or remove hooks first"
    )
