"""Backbones of timm as visual parsers (extra ``vision``).

Their last feature map becomes the visual tokens: ``[b n c]`` of a ViT without its class token,
``[b H W c]`` of a Swin Transformer, ``[b c H W]`` of a convolutional network. A last block that
attends over the whole image also gives groups of tokens: that of every ViT, and that of a Swin
Transformer whose last map is one window.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from primal_attention.support.command import needs
from primal_attention.tasks.pairs.config import MultimodalConfig
from primal_attention.tasks.pairs.parser import ImageParser, Parsed, watch_input
from primal_attention.tasks.pairs.rows import take_rows

__all__ = ["TimmParser"]


class TimmParser(ImageParser):
    """A backbone of timm; ``parser="timm:NAME"``.

    Weights are drawn at random. For pre-trained ones make the backbone yourself and pass it to the
    model: ``VisualParser(config, parser=timm.create_model(NAME, pretrained=True))``. A saved model
    holds the weights, so that loading downloads nothing.

    Args:
        config: Configuration of the model.
        backbone: The backbone, if it exists already.

    Example:
        >>> config = MultimodalConfig.from_config("tiny", parser="timm:test_vit", image_size=160)
        >>> TimmParser(config)(torch.randn(1, 3, 160, 160)).features.shape
        torch.Size([1, 100, 64])
    """

    backbone: Any
    _attention: Any

    def __init__(self, config: MultimodalConfig, backbone: nn.Module | None = None) -> None:
        super().__init__()
        self.backbone = _create(config) if backbone is None else backbone
        if not hasattr(self.backbone, "forward_features"):
            raise ValueError(
                f"{type(backbone).__name__} has no forward_features; give a backbone of timm, or "
                "set parser='module'."
            )
        # the head of a backbone has no part in its features
        if hasattr(self.backbone, "reset_classifier"):
            self.backbone.reset_classifier(0)
        attends = [m for m in self.backbone.modules() if _is_attention(m)]
        # no submodule of its own: its weights belong to the backbone
        object.__setattr__(self, "_attention", attends[-1] if attends else None)
        if config.mfr_attention == "rollout":
            raise ValueError(
                "mfr_attention='rollout' is for parser='vit'; use mfr_attention='last' for timm."
            )
        self.prefix = int(getattr(self.backbone, "num_prefix_tokens", 0))
        was_training = self.backbone.training
        self.backbone.eval()
        parameter = next(self.backbone.parameters())
        with torch.no_grad():
            found = self.forward(parameter.new_zeros(2, config.num_channels, *config.image_shape))
        self.backbone.train(was_training)
        self.num_tokens, self.num_features = found.features.shape[1:]
        self.has_attention = found.rows is not None

    def forward(self, pixel_values: Float[Tensor, "b ch H W"]) -> Parsed:
        """Return the visual tokens of images."""
        if self._attention is None:
            return Parsed(self._tokens(self.backbone.forward_features(pixel_values)))
        with watch_input(self._attention) as seen:
            v = self._tokens(self.backbone.forward_features(pixel_values))
        x = seen[-1]
        is_whole = x.shape[:2] == (len(v), v.shape[1] + self.prefix)
        if not is_whole:  # attention in several windows
            return Parsed(v)
        return Parsed(v, lambda which: self._rows(x, which))

    def _tokens(self, found: object) -> Float[Tensor, "b n c"]:
        if not isinstance(found, Tensor) or found.ndim not in (3, 4):
            raise ValueError(
                f"forward_features of {type(self.backbone).__name__} must return one tensor with "
                "three or four axes; wrap the backbone, and set parser='module'."
            )
        if found.ndim == 3:
            return found[:, self.prefix :]
        order = str(getattr(self.backbone, "output_fmt", "NCHW")).upper()
        return found.flatten(1, 2) if order.endswith("NHWC") else found.flatten(2).mT

    @torch.no_grad()
    def _rows(self, x: Float[Tensor, "b n c"], which: Int[Tensor, "b m"]) -> Float[Tensor, "b m n"]:
        """Return rows of the last attention between visual tokens, mean over heads."""
        return take_rows(attention_weights(self._attention, x).mean(1), which + self.prefix)[
            ..., self.prefix :
        ]


def _create(config: MultimodalConfig) -> nn.Module:
    """Return a new backbone for images of the configured size."""
    with needs("vision", "A backbone of timm"):
        import timm
    name = config.parser.partition(":")[2]
    if not timm.is_model(name):
        raise ValueError(
            f"timm has no backbone named {name!r}; timm.list_models() lists the names."
        )
    options: Any = {"pretrained": False, "num_classes": 0, "in_chans": config.num_channels}
    try:
        return timm.create_model(name, img_size=config.image_shape, **options)
    except TypeError:  # convolutional networks take images of any size
        return timm.create_model(name, **options)


def _is_attention(module: nn.Module) -> bool:
    """Return whether a module is softmax attention of the two kinds that can be read."""
    return type(module).__name__ in ("Attention", "WindowAttention") and all(
        hasattr(module, name) for name in ("qkv", "num_heads", "scale", "proj")
    )


@torch.no_grad()
def attention_weights(layer: Any, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b h n n"]:
    """Return the weights of an attention layer of timm.

    Args:
        layer: ``Attention`` of a ViT, or ``WindowAttention`` of a Swin Transformer.
        x: Its input.
    """
    b, n, _ = x.shape
    qkv = layer.qkv(x).reshape(b, n, 3, layer.num_heads, -1).permute(2, 0, 3, 1, 4)
    q, k = qkv[0], qkv[1]
    if getattr(layer, "q_norm", None) is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    logits = layer.scale * q @ k.mT
    if hasattr(layer, "_get_rel_pos_bias"):
        logits = logits + layer._get_rel_pos_bias()
    return logits.softmax(-1)
