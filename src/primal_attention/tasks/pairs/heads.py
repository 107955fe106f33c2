"""What people do with a pre-trained :class:`VisualParser`: search, and classes of pairs.

- :class:`PairSearch`: images for a text or texts for an image. A first stage compares unit vectors,
  a second reads the best candidates together with the query.
- :class:`PairClassifier`: answers to questions (soft targets), entailment (three classes), and
  statements about two images.
"""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal, NamedTuple, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.types import Device

from primal_attention.models.base import ModelOutput
from primal_attention.tasks.pairs.config import MultimodalConfig
from primal_attention.tasks.pairs.model import VisualParser
from primal_attention.tasks.pairs.outputs import Text
from primal_attention.training.evaluation import eval_mode

__all__ = ["PairClassifier", "PairClassifierConfig", "PairSearch", "Ranked"]

_Pairs = Callable[[Tensor, Tensor], tuple[Tensor, Text]]
"""From numbers of queries and of items to the images and texts of these pairs."""


class Ranked(NamedTuple):
    """The best candidates of every query."""

    ids: Int[Tensor, "q k"]
    """Indices of the candidates, best first."""
    scores: Float[Tensor, "q k"]
    """Matching logits of the first ``rerank`` candidates; below them, the similarities."""


class PairSearch:
    """Search in images and texts that were encoded once.

    Args:
        model: A trained model. Its first stage needs the objective ``"itc"``.
        batch_size: Items or pairs that are encoded at once.

    Example:
        >>> model = VisualParser.from_config("tiny", vocab_size=20)
        >>> search = PairSearch(model).add_images(torch.randn(5, 3, 32, 32))
        >>> search.images_for(torch.tensor([[1, 7, 2]]), k=3).ids.shape
        torch.Size([1, 3])
    """

    def __init__(self, model: VisualParser, *, batch_size: int = 256) -> None:
        self.model, self.batch_size = model, batch_size
        self.visual: Tensor | None = None
        """Visual tokens of the images."""
        self.image_vectors: Tensor | None = None
        """Unit vectors of the images."""
        self.text: Text | None = None
        """The texts."""
        self.text_vectors: Tensor | None = None
        """Unit vectors of the texts."""

    @torch.no_grad()
    def add_images(self, pixel_values: Float[Tensor, "b ch H W"]) -> Self:
        """Encode the images to search in, in place of those before."""
        with eval_mode(self.model):
            parts = [self.model.parse(x).features for x in pixel_values.split(self.batch_size)]
            self.visual = torch.cat(parts)
            self.image_vectors = self.model.image_vectors(self.visual)
        return self

    @torch.no_grad()
    def add_texts(
        self, input_ids: Int[Tensor, "b n"], attention_mask: Tensor | None = None
    ) -> Self:
        """Encode the texts to search in, in place of those before."""
        self.text = self.model.check_text(input_ids, attention_mask)
        self.text_vectors = self._encode(self.text)
        return self

    def images_for(
        self,
        input_ids: Int[Tensor, "b n"],
        attention_mask: Tensor | None = None,
        *,
        k: int = 10,
        rerank: int | None = None,
    ) -> Ranked:
        """Return the best images of every text.

        Args:
            input_ids: Ids of the texts.
            attention_mask: One or ``True`` where a token is real.
            k: Number of results.
            rerank: Candidates that the joint encoder reads; by default ``k``, and 0 for none.
        """
        if self.visual is None or self.image_vectors is None:
            raise RuntimeError("There are no images to search in; call add_images first.")
        text = self.model.check_text(input_ids, attention_mask)
        similarity = self._encode(text) @ self.image_vectors.mT
        visual = self.visual
        return self._rank(
            similarity,
            k,
            rerank,
            lambda query, item: (visual[item], text.take(query)),
        )

    @torch.no_grad()
    def texts_for(
        self, pixel_values: Float[Tensor, "b ch H W"], *, k: int = 10, rerank: int | None = None
    ) -> Ranked:
        """Return the best texts of every image.

        Args:
            pixel_values: The images.
            k: Number of results.
            rerank: Candidates that the joint encoder reads; by default ``k``, and 0 for none.
        """
        if self.text is None or self.text_vectors is None:
            raise RuntimeError("There are no texts to search in; call add_texts first.")
        with eval_mode(self.model):
            visual = self.model.parse(pixel_values).features
            similarity = self.model.image_vectors(visual) @ self.text_vectors.mT
        text = self.text
        return self._rank(
            similarity,
            k,
            rerank,
            lambda query, item: (visual[query], text.take(item)),
        )

    @torch.no_grad()
    def _encode(self, text: Text) -> Float[Tensor, "b c"]:
        with eval_mode(self.model):
            parts = zip(*(t.split(self.batch_size) for t in text), strict=True)
            return torch.cat([self.model.text_vectors(Text(*part))[0] for part in parts])

    @torch.no_grad()
    def _rank(self, similarity: Tensor, k: int, rerank: int | None, pairs: _Pairs) -> Ranked:
        """Return the best of both stages; candidates that were not read keep their order."""
        k = min(k, similarity.shape[1])
        count = min(k if rerank is None else rerank, similarity.shape[1])
        found, ids = similarity.topk(max(k, count), dim=1)
        if count:
            query = torch.arange(len(ids)).repeat_interleave(count)
            logits = self._match(query, ids[:, :count].flatten(), pairs).view(-1, count)
            logits, order = logits.sort(dim=1, descending=True, stable=True)
            ids = torch.cat([ids[:, :count].gather(1, order), ids[:, count:]], 1)
            found = torch.cat([logits, found[:, count:]], 1)
        return Ranked(ids[:, :k], found[:, :k])

    def _match(self, query: Tensor, item: Tensor, pairs: _Pairs) -> Float[Tensor, " p"]:
        parts = zip(query.split(self.batch_size), item.split(self.batch_size), strict=True)
        with eval_mode(self.model):
            logits = []
            for part in parts:
                visual, text = pairs(*part)
                logits.append(self.model.match(visual, *text))
        return torch.cat(logits)


@dataclass(frozen=True, kw_only=True)
class PairClassifierConfig(MultimodalConfig):
    """Configuration of a :class:`PairClassifier`.

    Example:
        >>> PairClassifierConfig(num_classes=3).num_images
        1
    """

    num_classes: int
    """Classes or answers."""
    targets: Literal["class", "soft"] = "class"
    """One class for each pair, or a score from 0 to 1 for each answer."""
    num_images: int = 1
    """Images of a text; each is read with the text in a pass of its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_classes", "num_images"):
            self._check_count(name)
        if self.targets not in ("class", "soft"):
            raise ValueError(f"targets must be 'class' or 'soft', got {self.targets!r}.")


class PairClassifier(VisualParser):
    """Classes of a text with its image or images, on a :class:`VisualParser`.

    Visual questions have ``targets="soft"``, visual entailment three classes, statements about two
    images ``num_images=2``. The head has one hidden layer on [CLS], of each image in turn.

    Args:
        config: Configuration of the model.
        parser: As for :class:`VisualParser`.
        device: Where to create the parameters.
        dtype: Type of the parameters.

    Example:
        >>> base = VisualParser.from_config("tiny", vocab_size=20)
        >>> model = PairClassifier.from_model(base, num_classes=3)
        >>> output = model(torch.randn(2, 3, 32, 32), torch.tensor([[1, 7, 2], [1, 8, 2]]))
        >>> output.logits.shape
        torch.Size([2, 3])
    """

    config_class: ClassVar[type[MultimodalConfig]] = PairClassifierConfig
    config: PairClassifierConfig

    def __init__(
        self,
        config: PairClassifierConfig,
        *,
        parser: nn.Module | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, parser=parser)
        width = config.num_images * config.dim
        self.head = nn.Sequential(
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Linear(2 * width, config.num_classes),
        )
        self.to(device=device, dtype=dtype)

    @classmethod
    def from_model(cls, model: VisualParser, **fields: object) -> Self:
        """Return a classifier that starts from the weights of a model.

        Args:
            model: A trained model.
            fields: Fields of :class:`PairClassifierConfig`, such as ``num_classes``.
        """
        config = PairClassifierConfig(**{**asdict(model.config), **fields})
        parser = copy.deepcopy(model.parser) if config.parser == "module" else None
        found = cls(config, parser=parser)
        own = {f"head.{name}": weight for name, weight in found.head.state_dict().items()}
        found.load_state_dict({**model.state_dict(), **own})
        return found

    def forward(  # type: ignore[override]
        self,
        pixel_values: Float[Tensor, "b *images ch H W"],
        input_ids: Int[Tensor, "b n"],
        attention_mask: Tensor | None = None,
    ) -> ModelOutput:
        """Return the logits of every text with its image or images.

        Args:
            pixel_values: Images, ``[b ch H W]``; with several, ``[b images ch H W]``.
            input_ids: Ids of the texts.
            attention_mask: One or ``True`` where a token is real.
        """
        count = self.config.num_images
        images = pixel_values if pixel_values.ndim == 5 else pixel_values[:, None]
        if images.ndim != 5 or images.shape[1] != count:
            raise ValueError(
                f"pixel_values must have {count} images for each text, got shape "
                f"{tuple(pixel_values.shape)}; give [batch, {count}, channels, height, width]."
            )
        parsed = self.parse(images.flatten(0, 1))
        text = self.check_text(input_ids, attention_mask)
        text = text.take(torch.arange(len(text.ids)).repeat_interleave(count))
        hidden, terms = self.join(*self.together(text, self.embed_image(parsed.features)))
        first = hidden[:, 0].unflatten(0, (-1, count)).flatten(1)
        return ModelOutput(self.head(first), self.publish_all({**parsed.terms, **terms}))

    def objective(self, output: ModelOutput, labels: Tensor) -> Float[Tensor, ""]:
        """Return the loss: cross-entropy of classes, or binary cross-entropy of soft answers.

        Args:
            output: Output of the model.
            labels: Classes ``[b]``, or scores ``[b answers]`` from 0 to 1.
        """
        if self.config.targets == "soft":
            # the sum over answers, so that a rare answer keeps its weight among many
            losses = binary_cross_entropy_with_logits(
                output.logits.float(), labels.float(), reduction="none"
            )
            return losses.sum(1).mean()
        return cross_entropy(output.logits.float(), labels)
