"""Decisions of models of transformers about a text: a class, the next token, or a masked token."""

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from primal_attention.analysis.causes.removal import Removed, choose_removal
from primal_attention.analysis.causes.subjects import ModelSubject, pooled_token
from primal_attention.hosts import capture
from primal_attention.training.evaluation import eval_mode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "ClassSubject",
    "MaskedTokenSubject",
    "NextTokenSubject",
    "NoDecisionError",
    "TextSubject",
    "encode_text",
    "text_subject",
    "token_names",
]

TextTarget = int | Literal["auto", "first", "last", "mean"]
"""The token that stands for the decision."""
_SPECIAL = ("cls", "sep", "bos", "eos", "pad", "mask")
_MOST_LOGITS = 1 << 24
"""Largest number of logits to compute at once."""


class NoDecisionError(ValueError):
    """The output of a model has no logits, so there is no decision to explain."""


class RemovalArguments(TypedDict, total=False):
    """Arguments of :func:`~primal_attention.analysis.causes.removal.choose_removal`."""

    removal: str
    samples: int
    proposal: Sequence[int] | None
    seed: int


class SubjectArguments(RemovalArguments, total=False):
    """Arguments of :class:`TextSubject`."""

    layer: int | str


class TextSubject(ModelSubject):
    """A decision of a model of transformers about one text.

    Args:
        model: The model.
        tokenizer: Its tokenizer; ``None`` if ``encoded`` comes from elsewhere.
        encoded: Arguments of the forward for one sequence, from :func:`encode_text`.
        layer: Attention layer to read.
        options: How tokens are removed: arguments of
            :func:`~primal_attention.analysis.causes.removal.choose_removal`.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: "PreTrainedTokenizerBase | None",
        encoded: Mapping[str, Tensor],
        *,
        layer: int | str = -1,
        **options: Unpack[RemovalArguments],
    ) -> None:
        ids = encoded["input_ids"][0].cpu()
        self.tokenizer = tokenizer
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        self._extra = {
            name: value[0].cpu()
            for name, value in encoded.items()
            if name in self._takes and name not in ("input_ids", "attention_mask")
        }
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        super().__init__(model, ids, choose_removal(tokenizer, ids, **options), layer=layer)
        self.tokens = token_names(tokenizer, ids)
        self.pieces = _pieces(tokenizer, ids)
        special = {getattr(tokenizer, f"{name}_token_id", None) for name in _SPECIAL}
        self.candidates = [i for i, token in enumerate(ids.tolist()) if token not in special]

    def arguments(self, removed: Removed) -> dict[str, Tensor]:
        """Return the arguments of the forward for inputs without some tokens."""
        found: dict[str, Tensor] = {"input_ids": removed.ids}
        if "attention_mask" in self._takes:
            found["attention_mask"] = removed.keep.long()
        elif not removed.keep.all():
            raise ValueError(
                f"removal='attend' needs the argument attention_mask, which "
                f"{type(self.model).__name__} does not take; use another removal."
            )
        found |= {name: value[removed.positions] for name, value in self._extra.items()}
        return {name: value.to(self._device) for name, value in found.items()}

    def name_option(self, option: int) -> str:
        """Return a token of the vocabulary."""
        return token_names(self.tokenizer, [option])[0]

    def abduct(self) -> Mapping[str, Tensor]:
        """Return the input of the model with the decision in its place."""
        return self._single(self.ids)

    def _single(self, ids: Int[Tensor, " n"]) -> dict[str, Tensor]:
        """Return the arguments of the forward for one sequence of ids, nothing removed."""
        n = len(ids)
        positions = torch.arange(n).clamp(max=len(self.ids) - 1)[None]
        every = torch.ones(1, n, dtype=torch.bool)
        return self.arguments(Removed([0], ids[None], positions, every, ~every))


class ClassSubject(TextSubject):
    """The class that a sequence classifier of transformers gives to a text.

    Args:
        model: A model whose output has ``logits [b, classes]``.
        tokenizer: Its tokenizer.
        encoded: Arguments of the forward for one sequence.
        target: Token whose vector the classifier reads: a position, ``"first"``, ``"last"``,
            ``"mean"`` for a mean over tokens, or ``"auto"`` to find it by a gradient.
        options: Options of :class:`TextSubject`.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: "PreTrainedTokenizerBase | None",
        encoded: Mapping[str, Tensor],
        *,
        target: TextTarget = "auto",
        **options: Unpack[SubjectArguments],
    ) -> None:
        super().__init__(model, tokenizer, encoded, **options)
        n = len(self.tokens)
        if target == "auto":
            self.target = pooled_token(model, self._single(self.ids))
        elif isinstance(target, int):
            self.target = target % n
        else:
            self.target = {"first": 0, "last": n - 1, "mean": None}[target]
        self.candidates = [i for i in self.candidates if i != self.target] or self.candidates

    def score_options(self, removed: Removed) -> Float[Tensor, "b options"]:
        """Return the logits of the classes."""
        logits = self.model(**self.arguments(removed)).logits
        if logits.shape[-1] == 1:
            # one logit decides between yes and no
            logits = torch.cat([torch.zeros_like(logits), logits], -1)
        return logits

    def name_option(self, option: int) -> str:
        """Return the name of a class from the model's config."""
        names = getattr(getattr(self.model, "config", None), "id2label", None) or {}
        if len(names) == 1:
            return str(names[0]) if option else f"not {names[0]}"
        return str(names.get(option, option))


class NextTokenSubject(TextSubject):
    """The token that a language model adds to a text.

    Args:
        model: A model of transformers whose output has ``logits [b, n, vocabulary]``.
        tokenizer: Its tokenizer.
        encoded: Arguments of the forward for one sequence.
        options: Options of :class:`TextSubject`.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: "PreTrainedTokenizerBase | None",
        encoded: Mapping[str, Tensor],
        **options: Unpack[SubjectArguments],
    ) -> None:
        super().__init__(model, tokenizer, encoded, **options)
        self.tokens = [*self.tokens, self.decision]
        self.pieces.append(
            _as_word(_pieces(tokenizer, torch.tensor([self.choice]))[0], self.pieces)
        )
        self.target = len(self.ids)

    def score_options(self, removed: Removed) -> Float[Tensor, "b options"]:
        """Return the logits of the next token."""
        arguments = self.arguments(removed)
        if self.remover.kind == "attend":
            # positions must not depend on the mask
            arguments |= _positions(self._takes, arguments["input_ids"])
        # the cache and the other positions would only cost memory
        saved = {"use_cache": False, "logits_to_keep": 1}
        saved = {name: value for name, value in saved.items() if name in self._takes}
        return self.model(**arguments, **saved).logits[:, -1]

    def abduct(self) -> Mapping[str, Tensor]:
        """Return the text with the next token at its end."""
        return self._single(torch.cat([self.ids, torch.tensor([self.choice])]))


class MaskedTokenSubject(TextSubject):
    """The token that a masked language model fills in.

    Args:
        model: A model of transformers whose output has ``logits [b, n, vocabulary]``.
        tokenizer: Its tokenizer, with a mask token.
        encoded: Arguments of the forward for one sequence.
        target: Position to mask and explain; ``"auto"`` for the only mask token of the text.
        options: Options of :class:`TextSubject`.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: "PreTrainedTokenizerBase | None",
        encoded: Mapping[str, Tensor],
        *,
        target: TextTarget = "auto",
        **options: Unpack[SubjectArguments],
    ) -> None:
        ids = encoded["input_ids"].cpu().clone()
        mask = getattr(tokenizer, "mask_token_id", None)
        if mask is None:
            raise ValueError("The tokenizer has no mask token, so no token can be masked.")
        if isinstance(target, int):
            self._place = target % ids.shape[1]
        else:
            places = [i for i, token in enumerate(ids[0].tolist()) if token == mask]
            if len(places) != 1:
                raise ValueError(
                    f"The text has {len(places)} mask tokens, and one is needed; write one "
                    f"{getattr(tokenizer, 'mask_token', 'mask token')}, or give the position to "
                    "explain as target."
                )
            self._place = places[0]
        ids[0, self._place] = mask
        super().__init__(model, tokenizer, {**encoded, "input_ids": ids}, **options)
        self.target = self._place
        self.tokens[self._place] = self.decision
        piece = _pieces(tokenizer, torch.tensor([self.choice]))[0]
        self.pieces[self._place] = _as_word(piece, self.pieces)
        self.candidates = [i for i in self.candidates if i != self._place]

    def score_options(self, removed: Removed) -> Float[Tensor, "b options"]:
        """Return the logits of the masked token."""
        arguments = self.arguments(removed)
        place = (removed.positions == self._place).int().argmax(1)
        vocabulary = int(getattr(getattr(self.model, "config", None), "vocab_size", 30_000))
        size = max(1, _MOST_LOGITS // (vocabulary * removed.ids.shape[1]))
        found = []
        for start in range(0, len(place), size):
            part = {name: value[start : start + size] for name, value in arguments.items()}
            logits = self.model(**part).logits
            where = place[start : start + size].to(logits.device)
            found.append(logits[torch.arange(len(where)), where])
        return torch.cat(found)

    def abduct(self) -> Mapping[str, Tensor]:
        """Return the text with the prediction in place of the mask."""
        ids = self.ids.clone()
        ids[self._place] = self.choice
        return self._single(ids)


def text_subject(
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerBase | None",
    text: str | Mapping[str, Tensor],
    *,
    target: TextTarget = "auto",
    **options: Unpack[SubjectArguments],
) -> TextSubject:
    """Return the decision of a model about a text, of the kind that its output has.

    Args:
        model: A classifier, a decoder or a masked language model of transformers.
        tokenizer: Its tokenizer.
        text: The text, or arguments of the forward for one sequence.
        target: Token that stands for the decision; found by itself in most models.
        options: Options of :class:`TextSubject`: ``layer``, ``removal``, ``samples``, ``proposal``,
            ``seed``.

    Raises:
        NoDecisionError: If the model makes no decision.

    Example:
        >>> from transformers import BertConfig, BertForMaskedLM, BertTokenizer
        >>> names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "dull", "film"]
        >>> tokenizer = BertTokenizer(vocab={name: i for i, name in enumerate(names)})
        >>> config = BertConfig(vocab_size=8, hidden_size=16, num_hidden_layers=1,
        ...     num_attention_heads=2, intermediate_size=16)
        >>> subject = text_subject(BertForMaskedLM(config).eval(), tokenizer, "a [MASK] film")
        >>> subject.target, subject.candidates, len(subject.evaluate([(1,), (1, 3)]))
        (2, [1, 3], 2)
    """
    if isinstance(text, str):
        if tokenizer is None:
            raise ValueError("A text needs a tokenizer; give one, or arguments of the forward.")
        encoded = encode_text(tokenizer, text, model)
    else:
        encoded = _unpadded(text)
    takes = inspect.signature(model.forward).parameters
    arguments = {name: value for name, value in encoded.items() if name in takes}
    with torch.no_grad(), eval_mode(model):
        logits = getattr(model(**arguments), "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim not in (2, 3):
        raise NoDecisionError(
            f"{type(model).__name__} makes no decision: its output has no logits. Use a model with "
            "a head, such as AutoModelForSequenceClassification, or draw the graph alone with "
            "causal_graph."
        )
    if logits.ndim == 2:
        return ClassSubject(model, tokenizer, encoded, target=target, **options)
    mask = getattr(tokenizer, "mask_token_id", None)
    has_mask = mask is not None and bool((encoded["input_ids"] == mask).any())
    is_causal = capture(model, arguments, layers="last")[0].is_causal
    if has_mask or (mask is not None and not is_causal):
        return MaskedTokenSubject(model, tokenizer, encoded, target=target, **options)
    return NextTokenSubject(model, tokenizer, encoded, **options)


def encode_text(
    tokenizer: "PreTrainedTokenizerBase", text: str, model: nn.Module | None = None
) -> dict[str, Tensor]:
    """Return a text as arguments of the forward, cut to the longest input of the model."""
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    # some models count positions from the id of the padding token on
    limit = limit - 2 if isinstance(limit, int) else None
    found = tokenizer(text, return_tensors="pt", truncation=limit is not None, max_length=limit)
    if not found["input_ids"].shape[1]:
        raise ValueError("The text is empty; give a text with at least one token.")
    return dict(found)


def _unpadded(encoded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the arguments of one sequence without its padding."""
    if len(encoded["input_ids"]) != 1:
        raise ValueError(
            f"One sequence is explained at a time, got {len(encoded['input_ids'])}; give one row."
        )
    mask = encoded.get("attention_mask")
    keep = torch.ones_like(encoded["input_ids"][0]).bool() if mask is None else mask[0].bool()
    return {
        name: value[:, keep]
        for name, value in encoded.items()
        if value.ndim == 2 and value.shape == encoded["input_ids"].shape
    }


def token_names(
    tokenizer: "PreTrainedTokenizerBase | None", ids: Tensor | Sequence[int]
) -> list[str]:
    """Return tokens as a reader writes them; word pieces keep their marks.

    Example:
        >>> token_names(None, [7, 8])
        ['7', '8']
    """
    numbers = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    if tokenizer is None:
        return [str(i) for i in numbers]
    found = []
    for number in numbers:
        # byte-level tokenizers write spaces and accents as other characters
        word = str(tokenizer.decode([number]))
        found.append(word.strip() or word.replace(" ", "␣").replace("\n", "⏎") or str(number))
    return found


def _pieces(tokenizer: "PreTrainedTokenizerBase | None", ids: Int[Tensor, " n"]) -> list[str]:
    """Return tokens as the tokenizer writes them; its marks tell which of them form a word."""
    numbers = ids.tolist()
    return list(
        map(str, numbers if tokenizer is None else tokenizer.convert_ids_to_tokens(numbers))
    )


def _as_word(piece: str, others: Sequence[str]) -> str:
    """Return a piece with marks that begin a word, so that it is not joined to the token before."""
    mark = next((p[0] for p in others if p[:1] in ("Ġ", "▁")), "")
    return piece.removeprefix("##") if not mark or piece.startswith(mark) else mark + piece


def _positions(takes: frozenset[str], ids: Tensor) -> dict[str, Tensor]:
    if "position_ids" not in takes:
        return {}
    return {"position_ids": torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)}
