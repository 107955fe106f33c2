"""What a :class:`VisualParser` takes and returns."""

from dataclasses import dataclass, field
from typing import NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["SimilarityNotice", "Text", "VisualParserOutput"]


class SimilarityNotice(UserWarning):
    """The parser has no attention, so groups of visual tokens come from cosine similarity."""


class Text(NamedTuple):
    """A batch of texts."""

    ids: Int[Tensor, "b n"]
    keep: Bool[Tensor, "b n"]
    """``True`` where a token is real."""

    def take(self, index: Int[Tensor, " k"]) -> "Text":
        """Return the texts at the given places."""
        return Text(self.ids[index], self.keep[index])


@dataclass(frozen=True)
class VisualParserOutput:
    """Output of a :class:`VisualParser`.

    Example:
        >>> VisualParserOutput().losses
        {}
    """

    loss: Float[Tensor, ""] | None = None
    """Weighted sum of the losses; ``None`` if none was asked for."""
    losses: dict[str, Float[Tensor, ""]] = field(default_factory=dict)
    """Losses by name: ``mlm``, ``itm``, ``mfr``, ``itc``."""
    logits: Float[Tensor, " b"] | None = None
    """Logit that a text belongs to its image; ``None`` for texts or images alone."""
    matched: Bool[Tensor, " b"] | None = None
    """What ``logits`` were compared with."""
    word_logits: Float[Tensor, "b n vocab"] | None = None
    """Logits of the word at every token of the text, with ``labels`` or ``output_words=True``."""
    text_features: Float[Tensor, "b c"] | None = None
    """Unit vectors of the texts alone."""
    image_features: Float[Tensor, "b c"] | None = None
    """Unit vectors of the images alone."""
    hidden: Float[Tensor, "b joint c"] | None = None
    """Normalised stream after the last block: the text, then the visual tokens."""
    visual: Float[Tensor, "b v f"] | None = None
    """Normalised features of the parser."""
    attentions: tuple[Float[Tensor, "b h joint joint"], ...] | None = None
    """Attention of every joint layer, with ``output_attentions=True``; rows are receivers."""
    scores: dict[str, Float[Tensor, ""]] = field(default_factory=dict)
    """Accuracy of hidden words (``mlm``) and pairs (``itm``), without gradient."""
    variance: Float[Tensor, ""] | None = None
    """Variance of ``visual`` over tokens and images; see :class:`CollapseWatch`."""
    aux_loss: Float[Tensor, ""] | None = None
    """Mean regulariser of primal layers, unweighted; ``None`` outside training."""
