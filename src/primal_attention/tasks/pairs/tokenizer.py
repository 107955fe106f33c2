"""Texts as token ids: words of the training texts, or a tokenizer of your own.

A tokenizer is a frozen dataclass of strings and numbers, saved as JSON. Reading one runs no code.
"""

import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from primal_attention.support.command import UserError, needs, user_errors
from primal_attention.support.files import UnsealedWarning, read_json
from primal_attention.support.output import to_json, write_atomically
from primal_attention.support.settings import build, fingerprint

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TextTokenizer", "as_text"]

FORMAT = 1
# the package tokenizers has another \w, so that words of saved models would be split differently
_WORD = re.compile(r"\w+|[^\w\s]")
_SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]")
_ALSO = (("<pad>",), ("<s>", "<cls>"), ("</s>", "<sep>"), ("<mask>",), ("<unk>",))
"""Names of the same tokens in other vocabularies."""
_MAX_BYTES = 50_000_000
"""Largest file of a tokenizer that is read."""
_MAX_WORDS = 1_000_000
_LONGEST = 100_000
"""Characters of a text beyond which nothing is read; only the first tokens count anyway."""


def as_text(text: object, where: str) -> str:
    """Return a text with at least one visible character.

    Args:
        text: The text.
        where: What it is called in an error.

    Raises:
        ValueError: If it is no text, or empty.

    Example:
        >>> as_text("a red circle ", "texts[0]")
        'a red circle'
    """
    if not isinstance(text, str):
        raise ValueError(f"{where} must be a text, got {type(text).__name__}.")
    if not text.strip():
        raise ValueError(f"{where} is empty; give it a caption, or leave the pair out.")
    return text.strip()


@dataclass(frozen=True)
class TextTokenizer:
    """Texts as token ids, with [CLS] in front and [SEP] at the end.

    Make one with :meth:`learn` or :meth:`wrap`.

    Example:
        >>> tokenizer = TextTokenizer.learn(["a red circle", "a blue square"])
        >>> tokenizer.vocab_size, tokenizer.split("A RED square!")
        (10, ['a', 'red', 'square', '!'])
        >>> tokenizer.encode(["a red star"], 16)[0]
        [1, 5, 8, 4, 2]
    """

    vocab_size: int
    """Number of ids."""
    words: tuple[str, ...] = ()
    """Words, which have the ids from 5 on; empty if another tokenizer is wrapped."""
    backend: str = ""
    """The wrapped tokenizer as JSON of the package ``tokenizers``."""
    special: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Ids of padding, [CLS], [SEP], [MASK] and unknown words."""

    def __post_init__(self) -> None:
        if len(self.special) != len(_SPECIAL) or len(set(self.special)) != len(_SPECIAL):
            raise ValueError(f"special must be five different ids, got {self.special}.")
        if not all(0 <= i < self.vocab_size <= _MAX_WORDS for i in self.special):
            raise ValueError(
                f"special ids must lie below vocab_size, at most {_MAX_WORDS:,}; got "
                f"{self.special} and {self.vocab_size}."
            )
        if not self.backend and len(self.words) + len(_SPECIAL) != self.vocab_size:
            raise ValueError(
                f"{len(self.words)} words and {len(_SPECIAL)} special tokens are not "
                f"{self.vocab_size} ids."
            )

    @classmethod
    def learn(cls, texts: Iterable[str], *, max_size: int = 8192) -> Self:
        """Return the tokenizer of the words of some texts.

        Words are runs of letters and digits in lower case, or single other characters. Words that
        are not among the texts become one unknown word.

        Args:
            texts: Such as the captions of the training pairs.
            max_size: Most ids; the most frequent words are kept, ties in alphabetical order.
        """
        if max_size <= len(_SPECIAL):
            raise ValueError(f"max_size must be above {len(_SPECIAL)}, got {max_size}.")
        counts = Counter(word for text in texts for word in _split(text))
        order = sorted(counts, key=lambda word: (-counts[word], word))
        words = tuple(sorted(order[: max_size - len(_SPECIAL)]))
        return cls(len(words) + len(_SPECIAL), words)

    @classmethod
    def wrap(cls, tokenizer: object) -> Self:
        """Return a tokenizer of ``tokenizers`` or a fast one of ``transformers`` in this form.

        Its own special tokens are used where it has them. Others get new ids behind its words.

        Args:
            tokenizer: ``tokenizers.Tokenizer``, or an object with ``backend_tokenizer``.
        """
        if isinstance(tokenizer, cls):
            return tokenizer
        inner: Any = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not hasattr(inner, "to_str") or not hasattr(inner, "token_to_id"):
            raise TypeError(
                f"tokenizer must be a tokenizers.Tokenizer or a fast tokenizer of transformers, "
                f"got {type(tokenizer).__name__}; None learns the words of the training texts."
            )
        size = inner.get_vocab_size(with_added_tokens=True)
        size = max(size, 1 + max(inner.get_vocab().values(), default=-1))
        ids: list[int] = []
        roles = ("pad", "cls", "sep", "mask", "unk")
        for role, name, others in zip(roles, _SPECIAL, _ALSO, strict=True):
            found = getattr(tokenizer, f"{role}_token_id", None)
            for word in (name, *others):
                found = inner.token_to_id(word) if found is None else found
            if found is None or found in ids:
                found, size = size, size + 1
            ids.append(int(found))
        return cls(size, (), inner.to_str(), tuple(ids))

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words, len(_SPECIAL))}

    @cached_property
    def _inner(self) -> Any:
        with needs("hf", "A wrapped tokenizer"):
            from tokenizers import Tokenizer
        try:
            inner = Tokenizer.from_str(self.backend)
        except Exception as error:  # tokenizers raises nothing more special
            raise UserError(f"The wrapped tokenizer is damaged: {error}.") from error
        inner.no_padding()
        inner.no_truncation()
        return inner

    def split(self, text: str) -> list[str]:
        """Return the tokens of a text as words, without special tokens."""
        if self.backend:
            return list(self._inner.encode(text[:_LONGEST], add_special_tokens=False).tokens)
        return _split(text)

    def unknown(self, text: str) -> list[str]:
        """Return the words of a text that the tokenizer does not know."""
        if not self.backend:
            return [word for word in _split(text) if word not in self._ids]
        found = self._inner.encode(text[:_LONGEST], add_special_tokens=False)
        unknown = self.special[-1]
        return [t for t, i in zip(found.tokens, found.ids, strict=True) if i == unknown]

    def encode(self, texts: Sequence[str], max_words: int) -> list[list[int]]:
        """Return the ids of texts, at most ``max_words`` with [CLS] and [SEP].

        Args:
            texts: The texts.
            max_words: Most ids of a text; further words are left out.
        """
        if max_words < 3:
            raise ValueError(f"max_words must be at least 3, got {max_words}.")
        _, first, last, _, unknown = self.special
        found = []
        for text in texts:
            if self.backend:
                ids = self._inner.encode(text[:_LONGEST], add_special_tokens=False).ids
            else:
                ids = [self._ids.get(word, unknown) for word in _split(text)]
            found.append([first, *ids[: max_words - 2], last])
        return found

    def batch(self, texts: Sequence[str], max_words: int) -> "tuple[Tensor, Tensor]":
        """Return ids and mask of texts as tensors ``[texts, tokens]``, padded to the longest.

        Args:
            texts: The texts.
            max_words: Most ids of a text.

        Example:
            >>> tokenizer = TextTokenizer.learn(["a red circle"])
            >>> tokenizer.batch(["a", "red circle"], 16)[0]
            tensor([[1, 5, 2, 0],
                    [1, 7, 6, 2]])
        """
        import torch

        rows = self.encode(texts, max_words)
        longest = max(map(len, rows), default=1)
        ids = torch.tensor([row + [self.special[0]] * (longest - len(row)) for row in rows])
        lengths = torch.tensor([len(row) for row in rows])
        return ids, torch.arange(longest) < lengths[:, None]

    def save(self, path: str | Path) -> None:
        """Write the tokenizer to a JSON file, with a checksum."""
        values = asdict(self)
        content = {"format": FORMAT, "checksum": fingerprint(values), **values}
        write_atomically(Path(path), to_json(content))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the tokenizer in a file that :meth:`save` wrote.

        Args:
            path: The file.

        Raises:
            UserError: If the file is missing, too large, no such tokenizer, or was changed.

        Example:
            >>> import tempfile
            >>> file = Path(tempfile.mkdtemp()) / "tokenizer.json"
            >>> tokenizer = TextTokenizer.learn(["a red circle"])
            >>> tokenizer.save(file)
            >>> TextTokenizer.load(file) == tokenizer
            True
        """
        path = Path(path)
        with user_errors(f"{path} is no tokenizer of this library", UserError, ValueError):
            content = read_json(path, max_bytes=_MAX_BYTES)
            if content.pop("format", None) != FORMAT:
                raise UserError(f"it has no format {FORMAT}.")
            checksum = content.pop("checksum", None)
            lost = [f.name for f in fields(cls) if f.name not in content]
            if lost:
                raise UserError(f"it lacks {', '.join(lost)}.")
            found = build(cls, content)
        if checksum is None:
            words = "an earlier version saved it, or it was changed; save it again."
            warnings.warn(f"{path} has no checksum; {words}", UnsealedWarning, stacklevel=2)
        elif checksum != fingerprint(asdict(found)):
            raise UserError(f"{path} was changed or damaged after it was saved; restore it.")
        return found


def _split(text: str) -> list[str]:
    """Return the words of a text."""
    return _WORD.findall(unicodedata.normalize("NFKC", text[:_LONGEST]).lower())
