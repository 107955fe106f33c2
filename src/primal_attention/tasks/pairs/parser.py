"""Visual parsers: from an image to tokens ``[b n_v c_v]``.

- ``vit``: patches, positions of unit scale, blocks of any attention of the registry;
- ``linear``: two linear maps of each patch; tokens never meet;
- ``cnn``: three convolutions; tokens meet their neighbours;
- any backbone of timm, and any module that returns ``[b n_v c_v]``.

A parser that has an attention says so, and then gives rows of that of its last block. The inner
width of ``linear`` and ``cnn`` is chosen such that all three have about as many parameters.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from primal_attention.attention import Attention, MultiHeadAttention
from primal_attention.models.stack import BlockStack
from primal_attention.tasks.pairs.config import MultimodalConfig
from primal_attention.tasks.pairs.rows import attention_rows, has_rows, rollout_rows

__all__ = [
    "ConvolutionParser",
    "ImageParser",
    "LinearParser",
    "ModuleParser",
    "Parsed",
    "TransformerParser",
    "create_parser",
]

Rows = Callable[[Int[Tensor, "b m"]], Float[Tensor, "b m n"]]


class Parsed(NamedTuple):
    """What a parser makes of images."""

    features: Float[Tensor, "b n c"]
    """The visual tokens."""
    rows: Rows | None = None
    """From tokens to their rows of the last block's attention; ``None`` if there is none."""
    terms: dict[str, Float[Tensor, ""]] = {}  # noqa: RUF012  # never changed
    """Regularisers of primal layers, in training."""


class ImageParser(nn.Module):
    """Base class of parsers: images in, visual tokens out.

    A subclass sets ``num_features``, and ``num_tokens`` if these are not the patches, and writes
    ``forward``. A model takes it as ``VisualParser.from_config("tiny", parser=...)``.
    """

    num_features: int
    """Width of a visual token."""
    has_attention: bool = False
    """Whether :class:`Parsed` has rows of attention."""

    def forward(self, pixel_values: Float[Tensor, "b ch H W"]) -> Parsed:
        """Return the visual tokens of images."""
        raise NotImplementedError  # abstract

    def patches(self, pixel_values: Tensor, size: int) -> Float[Tensor, "b n f"]:
        """Return the pixels of every patch, row by row."""
        return nn.functional.unfold(pixel_values, size, stride=size).mT


class TransformerParser(ImageParser):
    """Patches, learned positions of unit scale, and blocks of attention.

    Positions start large: with the customary scale of 0.02 a small model trained from scratch does
    not learn where things are.

    Args:
        config: Configuration of the model.

    Example:
        >>> parser = TransformerParser(MultimodalConfig.from_config("tiny"))
        >>> parsed = parser(torch.randn(2, 3, 32, 32))
        >>> parsed.features.shape, parsed.rows(torch.tensor([[0], [5]])).shape
        (torch.Size([2, 16, 64]), torch.Size([2, 1, 16]))
    """

    def __init__(self, config: MultimodalConfig) -> None:
        super().__init__()
        stack = config.parser_stack
        self.num_features, self.patch_size = stack.dim, config.patch_size
        self.embed = nn.Linear(config.num_channels * config.patch_size**2, stack.dim)
        self.positions = nn.Parameter(torch.randn(config.num_patches, stack.dim))
        self.blocks = BlockStack(stack)
        self.is_rolled_out = config.mfr_attention == "rollout"
        self.has_attention = has_rows(self._layers[-1])
        if self.is_rolled_out and not isinstance(self._layers[0], MultiHeadAttention):
            raise ValueError(
                f"mfr_attention='rollout' needs weights, but parser_attention="
                f"{config.parser_attention!r} has none; use mfr_attention='last'."
            )

    @property
    def _layers(self) -> list[Attention]:
        return [block.attention for block in self.blocks]  # type: ignore[misc]

    def forward(self, pixel_values: Float[Tensor, "b ch H W"]) -> Parsed:
        """Return the visual tokens of images."""
        x = self.embed(self.patches(pixel_values, self.patch_size)) + self.positions
        layers = self._layers if self.is_rolled_out else self._layers[-1:]
        with watch_input(*layers) as seen:
            hidden, terms = self.blocks(x)
        rows = None
        if self.has_attention:

            def rows(which: Tensor) -> Tensor:
                if self.is_rolled_out:
                    return rollout_rows(layers, seen, which)
                return attention_rows(layers[-1], seen[-1], which)

        return Parsed(hidden, rows, {f"parser.{name}": term for name, term in terms.items()})


class LinearParser(ImageParser):
    """Two linear maps of each patch, without anything between them.

    Args:
        config: Configuration of the model.

    Example:
        >>> LinearParser(MultimodalConfig.from_config("tiny"))(torch.randn(2, 3, 32, 32))[0].shape
        torch.Size([2, 16, 64])
    """

    def __init__(self, config: MultimodalConfig) -> None:
        super().__init__()
        self.num_features, self.patch_size = config.parser_stack.dim, config.patch_size
        pixels = config.num_channels * config.patch_size**2
        hidden = config.parser_hidden
        if hidden is None:
            hidden = max(1, _num_parameters(config) // (pixels + self.num_features))
        self.embed = nn.Sequential(
            nn.Linear(pixels, hidden, bias=False), nn.Linear(hidden, self.num_features)
        )

    def forward(self, pixel_values: Float[Tensor, "b ch H W"]) -> Parsed:
        """Return the visual tokens of images."""
        return Parsed(self.embed(self.patches(pixel_values, self.patch_size)))


class ConvolutionParser(ImageParser):
    """Three convolutions whose strides multiply to the size of a patch.

    Args:
        config: Configuration of the model.

    Example:
        >>> parser = ConvolutionParser(MultimodalConfig.from_config("tiny"))
        >>> parser(torch.randn(2, 3, 32, 32)).features.shape
        torch.Size([2, 16, 64])
    """

    def __init__(self, config: MultimodalConfig) -> None:
        super().__init__()
        self.num_features, channels = config.parser_stack.dim, config.num_channels
        strides = _strides(config.patch_size)
        areas = [_kernel(stride) ** 2 for stride in strides]
        hidden = config.parser_hidden
        if hidden is None:  # a h² + b h = budget
            a, b = areas[1], areas[0] * channels + areas[2] * self.num_features
            budget = _num_parameters(config)
            hidden = max(1, round((math.sqrt(b * b + 4 * a * budget) - b) / (2 * a)))
        widths = [channels, hidden, hidden, self.num_features]
        layers: list[nn.Module] = []
        for i, stride in enumerate(strides):
            size = _kernel(stride)
            layers += [nn.GELU()] * (i > 0)
            layers.append(nn.Conv2d(widths[i], widths[i + 1], size, stride, (size - 1) // 2))
        self.layers = nn.Sequential(*layers)

    def forward(self, pixel_values: Float[Tensor, "b ch H W"]) -> Parsed:
        """Return the visual tokens of images."""
        return Parsed(self.layers(pixel_values).flatten(2).mT)


class ModuleParser(ImageParser):
    """A module that returns visual tokens ``[b n_v c_v]``, or maps ``[b c_v H W]``.

    Args:
        module: Takes images ``[b ch H W]``.
        config: Configuration of the model.

    Example:
        >>> maps = nn.Conv2d(3, 24, 8, 8)
        >>> ModuleParser(maps, MultimodalConfig.from_config("tiny")).num_features
        24
    """

    def __init__(self, module: nn.Module, config: MultimodalConfig) -> None:
        super().__init__()
        self.module = module
        shape = 1, config.num_channels, *config.image_shape
        parameter = next(module.parameters(), torch.zeros(()))
        was_training = module.training
        module.eval()
        with torch.no_grad():
            found = self.forward(parameter.new_zeros(shape)).features
        module.train(was_training)
        self.num_tokens, self.num_features = found.shape[1:]

    def forward(self, pixel_values: Float[Tensor, "b ch H W"]) -> Parsed:
        """Return the visual tokens of images."""
        found = self.module(pixel_values)
        if not isinstance(found, Tensor) or found.ndim not in (3, 4):
            what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(
                f"A parser must return visual tokens [batch, tokens, width], got {what}; wrap it "
                "in a module that does."
            )
        return Parsed(found if found.ndim == 3 else found.flatten(2).mT)


def create_parser(config: MultimodalConfig, module: nn.Module | None = None) -> ImageParser:
    """Return the parser of a configuration.

    Args:
        config: Configuration of the model.
        module: The parser itself, for ``parser="module"``; or a backbone of timm with its weights.

    Example:
        >>> type(create_parser(MultimodalConfig.from_config("tiny", parser="cnn"))).__name__
        'ConvolutionParser'
    """
    if config.parser.startswith("timm:"):
        from primal_attention.tasks.pairs.backbone import TimmParser

        return TimmParser(config, module)
    if module is not None:
        if config.parser != "module":
            raise ValueError(
                f"parser= gives a module, but the configuration has parser={config.parser!r}; set "
                "it to 'module'."
            )
        return module if isinstance(module, ImageParser) else ModuleParser(module, config)
    if config.parser == "module":
        raise ValueError(
            "This configuration has parser='module': give the module with parser=, also when "
            "you load a saved model."
        )
    own = {"vit": TransformerParser, "linear": LinearParser, "cnn": ConvolutionParser}
    return own[config.parser](config)


@contextmanager
def watch_input(*modules: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list that gets the first input of every call of some modules."""
    seen: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0].detach())

    handles = [module.register_forward_pre_hook(keep) for module in modules]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _num_parameters(config: MultimodalConfig) -> int:
    """Return the number of parameters of the ``vit`` parser with softmax attention."""
    stack, pixels = config.parser_stack, config.num_channels * config.patch_size**2
    c, hidden = stack.dim, stack.mlp_dim
    block = 4 * c * (c + 1) + 2 * c * hidden + hidden + c + 4 * c
    return (pixels + 1 + config.num_patches) * c + stack.num_layers * block


def _strides(patch: int) -> list[int]:
    """Return three strides whose product is the size of a patch, as equal as possible."""
    strides, rest = [1, 1, 1], patch
    for factor in range(patch, 1, -1):
        while rest % factor == 0 and all(factor % i for i in range(2, factor)):
            strides[strides.index(min(strides))] *= factor
            rest //= factor
    return sorted(strides, reverse=True)


def _kernel(stride: int) -> int:
    """Return an odd size that covers the stride."""
    return max(3, stride + 1 - stride % 2)
