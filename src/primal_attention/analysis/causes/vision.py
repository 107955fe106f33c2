"""Classes of images to explain: patches without which a vision model decides otherwise."""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.analysis.causes.subjects import (
    Names,
    Outcome,
    option_name,
    pooled_token,
    rollout_importances,
    vote,
)
from primal_attention.hosts import CapturedLayer, capture
from primal_attention.training.evaluation import eval_mode

__all__ = ["PatchSubject"]


class PatchSubject:
    """The class of an image, with its patches as tokens.

    Args:
        model: A vision Transformer of timm, transformers or torchvision: gets images
            ``[b c y x]`` and returns logits, as a tensor or as ``logits`` of an output.
        image: The image ``[c y x]``, as the model takes it.
        patch: Side of a patch in pixels.
        layer: Attention layer to read: an index in the order of the forward, or a name.
        fill: What replaces a patch: the mean colour of the image, or zero.
        names: Names of the classes by number; by default the numbers.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=3, depth=2)
        >>> subject = PatchSubject(model.eval(), torch.randn(3, 64, 64), patch=16)
        >>> subject.target, subject.candidates[0], len(subject.candidates), subject.tokens[:3]
        (0, 1, 16, ['class', '0,0', '0,1'])
    """

    def __init__(
        self,
        model: nn.Module,
        image: Float[Tensor, "c y x"],
        *,
        patch: int,
        layer: int | str = -1,
        fill: Literal["mean", "zero"] = "mean",
        names: Names = None,
    ) -> None:
        if fill not in ("mean", "zero"):
            raise ValueError(f"fill must be 'mean' or 'zero', got {fill!r}.")
        if patch < 1 or image.shape[-2] % patch or image.shape[-1] % patch:
            raise ValueError(
                f"patch must divide the sides of the image, got {patch} and "
                f"{tuple(image.shape[-2:])}."
            )
        self.model, self.image, self.patch, self.layer = model, image, patch, layer
        self.names, self.columns = names, image.shape[-1] // patch
        rows = image.shape[-2] // patch
        mean = image.mean((-1, -2), keepdim=True)
        self._fill = mean if fill == "mean" else torch.zeros_like(mean)
        n = int(self.captured().query_keep[0].sum())
        self._prefix = n - rows * self.columns
        if self._prefix < 0:
            raise ValueError(
                f"The image has {rows * self.columns} patches of {patch} pixels, and the layer "
                f"{n} tokens; give the patch size of the model."
            )
        cells = [f"{i // self.columns},{i % self.columns}" for i in range(rows * self.columns)]
        first = [f"class_{i}" if i else "class" for i in range(self._prefix)]
        self.tokens: list[str] = first + cells
        self.candidates: list[int] = list(range(self._prefix, n))
        self.target: int | None = pooled_token(model, image[None])
        self._scores = self._run(image[None])[0]
        choice = int(self._scores.argmax())
        self.decision = self.name_option(choice)
        self.score = float(self._scores.softmax(-1)[choice])

    def name_option(self, option: int) -> str:
        """Return the name of a class."""
        return option_name(self.names, option)

    def without(self, positions: Sequence[int]) -> Float[Tensor, "c y x"]:
        """Return the image without some patches."""
        found = self.image.clone()
        for position in positions:
            row, column = divmod(position - self._prefix, self.columns)
            y, x = row * self.patch, column * self.patch
            found[:, y : y + self.patch, x : x + self.patch] = self._fill
        return found

    def evaluate(self, sets: Sequence[tuple[int, ...]]) -> list[Outcome]:
        """Return the class without each set of patches."""
        if not sets:
            return []
        scores = self._run(torch.stack([self.without(positions) for positions in sets]))
        return [vote(row[None], self._scores, self.name_option) for row in scores]

    def captured(self) -> CapturedLayer:
        """Return the attention of the chosen layer on the whole image."""
        return capture(self.model, self.image[None], layers=self.layer)[0]

    def importances(self) -> dict[str, list[float]]:
        """Return attention rollout, if all layers have weights."""
        return rollout_importances(capture(self.model, self.image[None]), self.target)

    @torch.no_grad()
    def _run(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b options"]:
        with eval_mode(self.model):
            output = self.model(images)
        return (output if isinstance(output, Tensor) else output.logits).double().cpu()
