"""A small vision-language model: a visual parser, a joint encoder, and their losses.

::

    image → parser → v → LayerNorm(W v) + type + position ┐
                                                          ├→ blocks → [CLS]: matching, words, …
    text  → LayerNorm(word + position + type)             ┘

The parser relates parts of the image to each other, so that the joint layers are free for words and
parts. (After Xue et al., *Probing Inter-modality*, NeurIPS 2021; there is no published code.)
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import normalize, pad
from torch.types import Device

from primal_attention.models.base import PretrainedModel
from primal_attention.models.stack import BlockStack
from primal_attention.tasks.pairs.attentions import joint_attentions
from primal_attention.tasks.pairs.config import MultimodalConfig
from primal_attention.tasks.pairs.objectives import (
    IGNORED,
    NegativeTexts,
    matching_loss,
    word_loss,
)
from primal_attention.tasks.pairs.outputs import Text, VisualParserOutput
from primal_attention.tasks.pairs.parser import Parsed, create_parser
from primal_attention.tasks.pairs.pretraining import Request, pretrain

__all__ = ["VisualParser"]

TEXT, IMAGE, PADDING = 0, 1, -1


class VisualParser(PretrainedModel):
    """Matching, hidden words and features of image-text pairs.

    In training a forward draws the masks and mismatched texts by itself and returns the losses.
    Otherwise it returns logits and features of the pairs as they are.

    Args:
        config: Configuration of the model.
        parser: The parser as a module ``[b ch H W] → [b n_v c_v]``, with ``parser="module"``; or a
            backbone of timm with its weights.
        device: Where to create the parameters.
        dtype: Type of the parameters.

    Example:
        >>> model = VisualParser.from_config("tiny", vocab_size=20)
        >>> ids = torch.tensor([[1, 7, 9, 2, 0], [1, 8, 12, 13, 2]])
        >>> output = model(torch.randn(2, 3, 32, 32), ids)
        >>> sorted(output.losses), output.loss.ndim
        (['itm', 'mfr', 'mlm'], 0)
        >>> output = model.eval()(torch.randn(2, 3, 32, 32), ids)
        >>> output.logits.shape, output.hidden.shape, output.text_features.shape
        (torch.Size([2]), torch.Size([2, 21, 64]), torch.Size([2, 64]))
    """

    config_class: ClassVar[type[MultimodalConfig]] = MultimodalConfig
    config: MultimodalConfig

    def __init__(
        self,
        config: MultimodalConfig,
        *,
        parser: nn.Module | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config, c = config, config.dim
        self.parser = create_parser(config, _GIVEN.get() if parser is None else parser)
        width = self.parser.num_features
        tokens = getattr(self.parser, "num_tokens", config.num_patches)
        # no gain: shrinking features would make them easy to predict
        self.visual_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.visual = nn.Sequential(nn.Linear(width, c), nn.LayerNorm(c))
        self.visual_positions = nn.Parameter(torch.randn(tokens, c))
        self.mask_vector = nn.Parameter(torch.zeros(c))
        self.words = nn.Embedding(config.vocab_size, c)
        self.word_positions = nn.Parameter(torch.randn(config.max_words, c))
        self.word_norm = nn.LayerNorm(c)
        self.types = nn.Embedding(2, c)
        self.blocks = BlockStack(config)
        self.norm = nn.LayerNorm(c)
        self.match_head = nn.Linear(c, 1)
        self.word_head = nn.Sequential(
            nn.Linear(c, c), nn.GELU(), nn.LayerNorm(c), nn.Linear(c, config.vocab_size)
        )
        self.feature_head = nn.Sequential(nn.Linear(c, 2 * c), nn.GELU(), nn.Linear(2 * c, width))
        self.text_head, self.image_head = nn.Linear(c, c), nn.Linear(width, c)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.has_noticed = False
        self.to(device=device, dtype=dtype)

    @classmethod
    def from_config(
        cls, name: str | MultimodalConfig, *, parser: nn.Module | None = None, **changes: Any
    ) -> Self:
        """Return a new model of a named configuration.

        Args:
            name: ``"tiny"``, ``"small"``, or a configuration.
            parser: Name of a parser; or the parser itself.
            changes: Fields of the configuration that differ.
        """
        if isinstance(parser, str):
            changes, parser = {**changes, "parser": parser}, None
        elif parser is not None:
            changes.setdefault("parser", "module")
        if isinstance(name, str):
            config = cls.config_class.from_config(name, **changes)
        else:
            config = replace(name, **changes)
        return cls(config, parser=parser)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        parser: nn.Module | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Return the model in a folder, in eval mode; nothing is downloaded.

        Args:
            folder: What ``save_pretrained`` wrote.
            parser: The parser, for models with a parser of your own; its weights are loaded.
            device: Where to put the parameters.
            dtype: Type of the parameters; by default that of the file.
        """
        with _given(parser):
            return super().from_pretrained(folder, device=device, dtype=dtype)

    # parts

    def parse(self, pixel_values: Float[Tensor, "b ch H W"]) -> Parsed:
        """Return the visual tokens of images: normalised features of the parser.

        Args:
            pixel_values: Images of the configured size, with values of order one.
        """
        self._check_images(pixel_values)
        found = self.parser(pixel_values)
        return cast(Parsed, found._replace(features=self.visual_norm(found.features)))

    def embed_image(
        self, visual: Float[Tensor, "b n c_v"], hidden: Bool[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n c"]:
        """Return visual tokens as the joint encoder sees them.

        Args:
            visual: Features of :meth:`parse`.
            hidden: ``True`` at tokens that are replaced by the mask vector; their position and
                type stay.
        """
        x = self.visual(visual)
        if hidden is not None:
            x = torch.where(hidden[:, :, None], self.mask_vector, x)
        return cast(Tensor, x + self.visual_positions + self.types.weight[IMAGE])

    def embed_text(
        self, input_ids: Int[Tensor, "b n"], keep: Bool[Tensor, "b n"]
    ) -> Float[Tensor, "b n c"]:
        """Return words as the joint encoder sees them."""
        ids = torch.where(keep, input_ids, self.config.pad_token_id)
        x = self.words(ids) + self.word_positions[: ids.shape[1]] + self.types.weight[TEXT]
        return cast(Tensor, self.word_norm(x))

    def join(
        self, x: Float[Tensor, "b n c"], keep: Bool[Tensor, "b n"] | None
    ) -> tuple[Float[Tensor, "b n c"], dict[str, Tensor]]:
        """Return the normalised stream of the joint encoder, and the regularisers of its layers.

        Args:
            x: Embedded text, image, or both; text first.
            keep: ``True`` where a token is real.
        """
        hidden, terms = self.blocks(x, key_mask=keep)
        return self.norm(hidden), {f"blocks.{name}": term for name, term in terms.items()}

    def encode_text(
        self, input_ids: Int[Tensor, "b n"], attention_mask: Tensor | None = None
    ) -> Float[Tensor, "b c"]:
        """Return unit vectors of texts, for the first stage of a search.

        Args:
            input_ids: Ids of the texts.
            attention_mask: One or ``True`` where a token is real; by default where there is no
                padding.
        """
        text = self.check_text(input_ids, attention_mask)
        return self.text_vectors(text)[0]

    def encode_image(self, pixel_values: Float[Tensor, "b ch H W"]) -> Float[Tensor, "b c"]:
        """Return unit vectors of images, for the first stage of a search."""
        return self.image_vectors(self.parse(pixel_values).features)

    def match(
        self,
        visual: Float[Tensor, "b n c_v"],
        input_ids: Int[Tensor, "b m"],
        attention_mask: Tensor | None = None,
    ) -> Float[Tensor, " b"]:
        """Return the matching logit of pairs whose images were parsed before.

        Args:
            visual: Features of :meth:`parse`.
            input_ids: Ids of the texts.
            attention_mask: One or ``True`` where a token is real.
        """
        text = self.check_text(input_ids, attention_mask)
        hidden, _ = self.join(*self.together(text, self.embed_image(visual)))
        return self.match_logits(hidden)

    def modality_ids(self, batch: Mapping[str, Tensor]) -> Int[Tensor, "b n"]:
        """Return the modality of every joint token: 0 text, 1 image, -1 padding.

        Args:
            batch: Arguments of :meth:`forward`, with texts and images.

        Example:
            >>> from primal_attention.analysis.flow import modality_flow
            >>> model = VisualParser.from_config("tiny", vocab_size=20).eval()
            >>> ids = torch.tensor([[1, 7, 9, 2, 0]])
            >>> batch = {"pixel_values": torch.randn(1, 3, 32, 32), "input_ids": ids}
            >>> flow = modality_flow(model, batch, model.modality_ids(batch))
            >>> flow.layers[0], flow.names
            ('blocks.0.attention', ('text', 'image'))
        """
        text = self.check_text(batch["input_ids"], batch.get("attention_mask"))
        words = torch.where(text.keep, TEXT, PADDING)
        return pad(words, (0, len(self.visual_positions)), value=IMAGE)

    def special_mask(self, batch: Mapping[str, Tensor]) -> Bool[Tensor, "b n"]:
        """Return where [CLS] and [SEP] are among the joint tokens, for ``modality_flow``.

        Args:
            batch: Arguments of :meth:`forward`.
        """
        ids = batch["input_ids"]
        special = (ids == self.config.cls_token_id) | (ids == self.config.sep_token_id)
        return pad(special, (0, len(self.visual_positions)), value=False)

    # forward

    def forward(
        self,
        pixel_values: Float[Tensor, "b ch H W"] | None = None,
        input_ids: Int[Tensor, "b n"] | None = None,
        attention_mask: Tensor | None = None,
        *,
        labels: Int[Tensor, "b n"] | None = None,
        matched: Bool[Tensor, " b"] | None = None,
        objectives: Sequence[str] | None = None,
        negatives: NegativeTexts | None = None,
        negative_input_ids: Int[Tensor, "b m"] | None = None,
        negative_attention_mask: Tensor | None = None,
        output_attentions: bool = False,
        output_words: bool = False,
        output_features: bool = True,
    ) -> VisualParserOutput:
        """Return the losses of pairs in training; otherwise logits and features.

        Args:
            pixel_values: Images of the configured size; without them, texts alone are encoded.
            input_ids: Ids of the texts, which begin with [CLS]; without them, images alone.
            attention_mask: One or ``True`` where a token is real; by default where there is no
                padding.
            labels: Hidden words of texts that are masked already, -100 elsewhere. Their loss is
                computed instead of the objectives.
            matched: ``True`` where a text belongs to its image; by default all do. If given, no
                mismatched texts are drawn. Losses of hidden words and features count matched pairs.
            objectives: Losses to compute, with masks drawn by the model: ``"mlm"``, ``"itm"``,
                ``"mfr"``, ``"itc"``. By default those of the configuration in training, and none
                otherwise.
            negatives: Function that makes mismatched texts; they replace half of those drawn from
                the batch.
            negative_input_ids: Mismatched texts, one for each image, used in the same way.
            negative_attention_mask: Their mask.
            output_attentions: Also return the attention of every joint layer.
            output_words: Also return the logits of all words.
            output_features: Also return unit vectors of texts and images apart.
        """
        if pixel_values is None and input_ids is None:
            raise ValueError("Give pixel_values, input_ids or both; got neither.")
        if objectives is None:
            is_plain = not self.training or labels is not None
            objectives = () if is_plain else self.config.objectives
        if objectives and (pixel_values is None or input_ids is None):
            raise ValueError(
                "Objectives need pixel_values and input_ids; give objectives=() to encode one of "
                "them alone."
            )
        text = None if input_ids is None else self.check_text(input_ids, attention_mask)
        parsed = None if pixel_values is None else self.parse(pixel_values)
        if text is not None and parsed is not None and len(text.ids) != len(parsed.features):
            raise ValueError(
                f"pixel_values and input_ids must have the same batch size, got "
                f"{len(parsed.features)} and {len(text.ids)}."
            )
        if objectives and text is not None and parsed is not None:
            hard: object = negatives
            if negative_input_ids is not None:
                hard = self.check_text(negative_input_ids, negative_attention_mask)
            return pretrain(self, Request(parsed, text, matched, tuple(objectives), hard))
        return self._encode(
            parsed, text, labels, matched, output_attentions, output_words, output_features
        )

    def _encode(
        self,
        parsed: Parsed | None,
        text: Text | None,
        labels: Tensor | None,
        matched: Tensor | None,
        output_attentions: bool,
        output_words: bool,
        output_features: bool,
    ) -> VisualParserOutput:
        """Return logits and features of one joint pass."""
        vectors: dict[str, Any] = {}
        if output_features and text is not None:
            # before the joint pass: analyses keep the last call of every layer
            vectors["text_features"] = self.text_vectors(text)[0]
        if output_features and parsed is not None:
            vectors["image_features"] = self.image_vectors(parsed.features)
        x, keep = self.together(text, None if parsed is None else self.embed_image(parsed.features))
        if output_attentions:
            (hidden, terms), attentions = joint_attentions(self.blocks, lambda: self.join(x, keep))
        else:
            (hidden, terms), attentions = self.join(x, keep), None
        losses: dict[str, Tensor] = {}
        logits, words = None, None
        if text is not None and parsed is not None:
            logits = self.match_logits(hidden)
            if matched is not None:
                losses["itm"] = matching_loss(logits, matched.bool())
        if text is not None and (output_words or labels is not None):
            words = self.word_head(hidden[:, : text.ids.shape[1]])
        if labels is not None and words is not None:
            if matched is not None:
                labels = torch.where(matched.bool()[:, None], labels, IGNORED)
            losses["mlm"] = word_loss(words.flatten(0, 1), labels.flatten())
        return VisualParserOutput(
            loss=self.weigh(losses) if losses else None,
            losses=losses,
            logits=logits,
            matched=matched,
            word_logits=words,
            hidden=hidden,
            visual=None if parsed is None else parsed.features,
            attentions=attentions,
            aux_loss=self.publish_all({**({} if parsed is None else parsed.terms), **terms}),
            **vectors,
        )

    def weigh(self, losses: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """Return the weighted sum of losses."""
        weights = self.config.loss_weights
        return torch.stack([weights.get(k, 1.0) * v for k, v in losses.items()]).sum()

    def publish_all(self, terms: dict[str, Tensor]) -> Tensor | None:
        """Publish the regularisers of all layers once; return their mean, if there are any."""
        if not terms:
            return None
        self.publish(terms)
        return torch.stack(list(terms.values())).mean()

    def text_vectors(self, text: Text) -> tuple[Float[Tensor, "b c"], dict[str, Tensor]]:
        """Return unit vectors of texts, and the regularisers of the layers."""
        hidden, terms = self.join(self.embed_text(*text), text.keep)
        terms = {f"text.{name}": term for name, term in terms.items()}
        return normalize(self.text_head(hidden[:, 0]), dim=-1), terms

    def image_vectors(self, visual: Float[Tensor, "b n f"]) -> Float[Tensor, "b c"]:
        """Return unit vectors of images from their visual tokens."""
        return normalize(self.image_head(visual.mean(1)), dim=-1)

    def match_logits(self, hidden: Float[Tensor, "b n c"]) -> Float[Tensor, " b"]:
        """Return the matching logit of every joint sequence, from its first token."""
        return cast(Tensor, self.match_head(hidden[:, 0])[:, 0])

    def together(
        self, text: Text | None, image: Float[Tensor, "b n c"] | None
    ) -> tuple[Float[Tensor, "b n c"], Bool[Tensor, "b n"] | None]:
        """Return the embedded text and image as one sequence."""
        if text is None:
            return cast(Tensor, image), None
        x = self.embed_text(*text)
        if image is None:
            return x, text.keep
        return torch.cat([x, image], 1), pad(text.keep, (0, image.shape[1]), value=True)

    def check_text(self, input_ids: Tensor, attention_mask: Tensor | None) -> Text:
        """Return texts and their mask, or raise if they do not fit the model."""
        if input_ids.ndim != 2 or input_ids.is_floating_point():
            raise ValueError(
                f"input_ids must hold token ids of shape [batch, tokens], got {input_ids.dtype} "
                f"{tuple(input_ids.shape)}."
            )
        if not 0 < input_ids.shape[1] <= self.config.max_words:
            raise ValueError(
                f"input_ids has {input_ids.shape[1]} tokens, allowed are 1 to "
                f"max_words={self.config.max_words}; cut the texts, or configure max_words."
            )
        if attention_mask is None:
            return Text(input_ids, input_ids != self.config.pad_token_id)
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask must have shape {tuple(input_ids.shape)} as input_ids, got "
                f"{tuple(attention_mask.shape)}."
            )
        return Text(input_ids, attention_mask.bool())

    def _check_images(self, pixel_values: Tensor) -> None:
        shape = self.config.num_channels, *self.config.image_shape
        if tuple(pixel_values.shape[1:]) != shape or not pixel_values.is_floating_point():
            raise ValueError(
                f"pixel_values must be floating point of shape [batch, "
                f"{', '.join(map(str, shape))}], got {pixel_values.dtype} "
                f"{tuple(pixel_values.shape)}; resize and normalise the images."
            )


_GIVEN: ContextVar[nn.Module | None] = ContextVar("parser of a saved model", default=None)


@contextmanager
def _given(parser: nn.Module | None) -> Iterator[None]:
    """Hand a parser to the model that is built inside."""
    token = _GIVEN.set(parser)
    try:
        yield
    finally:
        _GIVEN.reset(token)
