"""Decisions to explain: a model, an input, and how the model runs without some of its tokens.

A :class:`Subject` is all that the search for explanations sees of a model. Subjects of text are
built by :func:`~primal_attention.analysis.causes.text.text_subject`, those of recommenders by
:class:`~primal_attention.analysis.causes.recommend.RecommenderSubject`. Another kind of model needs
a class with the same attributes and methods.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from primal_attention.analysis.causes.covariance import rollout_factor
from primal_attention.analysis.causes.removal import Removed, Remover, remove
from primal_attention.hosts import CapturedLayer, capture
from primal_attention.hosts.recording import change_output
from primal_attention.training.evaluation import eval_mode

__all__ = [
    "ModelSubject",
    "Names",
    "Outcome",
    "Subject",
    "input_embedding",
    "option_name",
    "pooled_token",
    "rollout_importances",
    "vote",
    "zero_embeddings",
]


class Outcome(NamedTuple):
    """The decision of a model without some tokens."""

    changed: bool
    """Whether the decision is another one."""
    label: str
    """The decision now."""
    score: float
    """Probability of the original decision now."""
    rank: int | None = None
    """Rank of the decision now among all options of the original input; 1 if it is unchanged, 2 for
    the runner-up. A low rank is a specific change."""


@runtime_checkable
class Subject(Protocol):
    """A decision of a model about one input.

    ``importances() -> dict[str, list[float]]`` is optional: further importances of the tokens, by
    the name of the method, that :func:`~primal_attention.analysis.causes.baselines.compare_methods`
    takes as baselines.
    """

    tokens: list[str]
    """Tokens of the captured sequence, the decision included where it belongs."""
    target: int | None
    """Token that stands for the decision; ``None`` for a model that averages its tokens."""
    candidates: list[int]
    """Positions that may be removed."""
    decision: str
    """The decision on the whole input."""
    score: float
    """Its probability."""

    def evaluate(self, sets: Sequence[tuple[int, ...]]) -> list[Outcome]:
        """Return the decision without each set of tokens."""
        ...

    def captured(self) -> CapturedLayer:
        """Return the attention of the chosen layer, with the decision in its place."""
        ...


class ModelSubject(ABC):
    """A decision of a PyTorch model that reads ids of tokens and scores options.

    Args:
        model: The model; it is not changed.
        ids: Ids of the tokens.
        remover: How tokens are removed.
        layer: Attention layer to read: an index in the order of the forward, or a name.
    """

    def __init__(
        self,
        model: nn.Module,
        ids: Int[Tensor, " n"],
        remover: Remover,
        *,
        layer: int | str = -1,
    ) -> None:
        self.model, self.ids, self.remover, self.layer = model, ids.cpu(), remover, layer
        self.embedding = input_embedding(model)
        self._scores = self._run(remove(self.ids, [()], self.remover)[0])[0]
        self.choice = int(self._scores.argmax())
        self.decision = self.name_option(self.choice)
        self.score = float(self._scores.softmax(-1)[self.choice])
        self.tokens: list[str] = []
        self.target: int | None = None
        self.candidates: list[int] = []

    @abstractmethod
    def score_options(self, removed: Removed) -> Float[Tensor, "b options"]:
        """Return the scores (logits) of all options for inputs without some tokens."""

    @abstractmethod
    def name_option(self, option: int) -> str:
        """Return the name of an option."""

    @abstractmethod
    def abduct(self) -> Mapping[str, Tensor] | Tensor:
        """Return the input of the model with the decision in its place."""

    def evaluate(self, sets: Sequence[tuple[int, ...]]) -> list[Outcome]:
        """Return the decision without each set of tokens.

        A set that leaves nothing to attend to counts as unchanged.
        """
        rows: list[list[Tensor]] = [[] for _ in sets]
        for removed in remove(self.ids, sets, self.remover):
            for owner, scores in zip(removed.owners, self._run(removed), strict=True):
                rows[owner].append(scores)
        unchanged = Outcome(False, self.decision, self.score, 1)
        return [self._outcome(torch.stack(found)) if found else unchanged for found in rows]

    def captured(self) -> CapturedLayer:
        """Return the attention of the chosen layer, with the decision in its place."""
        return capture(self.model, self.abduct(), layers=self.layer)[0]

    def importances(self) -> dict[str, list[float]]:
        """Return importances of the tokens: attention rollout, and gradient × input."""
        found = rollout_importances(capture(self.model, self.abduct()), self.target)
        if self.embedding is not None:
            found["gradient × input"] = self._gradients()
        return found

    @torch.no_grad()
    def _run(self, removed: Removed) -> Float[Tensor, "b options"]:
        with eval_mode(self.model), zero_embeddings(self.embedding, removed.zeroed):
            return self.score_options(removed).double().cpu()

    def _outcome(self, scores: Float[Tensor, "samples options"]) -> Outcome:
        return vote(scores, self._scores, self.name_option)

    def _gradients(self) -> list[float]:
        """Return ``|⟨gradient, embedding⟩|`` of the decision's score for each token."""
        if self.embedding is None:
            raise ValueError("The model has no embedding of ids.")
        # one plain input: the set of removed tokens is empty
        plain = remove(self.ids, [()], Remover("zero"))[0]
        with torch.enable_grad(), eval_mode(self.model), _leaf_output(self.embedding) as leaves:
            score = self.score_options(plain)[0, self.choice]
            (gradient,) = torch.autograd.grad(score, leaves[:1])
        products = (gradient * leaves[0]).sum(-1)[0].abs().double().cpu()[: len(self.ids)]
        return [*products.tolist(), *([0.0] * (len(self.tokens) - len(products)))]


def vote(
    scores: Float[Tensor, "samples options"],
    original: Float[Tensor, " options"],
    name: Callable[[int], str],
) -> Outcome:
    """Return the decision of the majority of samples, beside the original one.

    Args:
        scores: Scores of all options without some tokens, one row for each sample.
        original: Scores on the whole input.
        name: Returns the name of an option.

    Example:
        >>> now, before = torch.tensor([[0.0, 9.0, 0.0]]), torch.tensor([3.0, 1.0, 2.0])
        >>> vote(now, before, "abc".__getitem__)[:2], vote(now, before, str).rank
        ((True, 'b'), 3)
    """
    choice, votes = int(original.argmax()), Counter(scores.argmax(-1).tolist())
    # of equally frequent decisions the original one counts, then the one that it ranks higher
    most = max(votes, key=lambda o: (votes[o], o == choice, float(original[o])))
    rank = 1 + int((original > original[most]).sum())
    score = float(scores.softmax(-1)[:, choice].mean())
    return Outcome(most != choice, name(most), score, rank)


def pooled_token(model: nn.Module, batch: Mapping[str, Tensor] | Tensor) -> int | None:
    """Return the token that the head of a classifier reads, ``None`` for several.

    Behind the last attention layer tokens do not meet again before the head. So the gradient of the
    logits at the output of that layer is zero for tokens that the head does not read.

    Args:
        model: The classifier.
        batch: Its input, one sequence.
    """
    name = capture(model, batch, layers="last")[0].name
    attention = model.get_submodule(name)
    with torch.enable_grad(), eval_mode(model), _leaf_output(attention) as leaves:
        output = model(**batch) if isinstance(batch, Mapping) else model(batch)
        logits = output if isinstance(output, Tensor) else output.logits
        (gradient,) = torch.autograd.grad(logits.square().sum(), leaves[:1])
    used = gradient[0].abs().flatten(1).sum(-1).nonzero()[:, 0].tolist()
    return used[0] if len(used) == 1 else None


Names = Mapping[int, str] | Callable[[int], str] | None
"""Names of options by number; without names the number is the name."""


def option_name(names: Names, option: int) -> str:
    """Return the name of an option.

    Example:
        >>> option_name({0: "cat"}, 0), option_name({0: "cat"}, 1), option_name("ab".__getitem__, 1)
        ('cat', '1', 'b')
    """
    return names(option) if callable(names) else str((names or {}).get(option, option))


@contextmanager
def _leaf_output(module: nn.Module) -> Iterator[list[Tensor]]:
    """Cut the graph behind a module; return the list that gets its outputs as new leaves.

    Gradients are then those at the output, and nothing before the module is differentiated.
    """
    leaves: list[Tensor] = []

    def cut(output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    with change_output(module, cut):
        yield leaves


def input_embedding(model: nn.Module) -> nn.Module | None:
    """Return the embedding of the ids: that which the model names, or its first ``nn.Embedding``.

    Example:
        >>> input_embedding(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)))
        Embedding(5, 4)
    """
    named = getattr(model, "get_input_embeddings", None)
    found = named() if callable(named) else None
    if isinstance(found, nn.Module):
        return found
    return next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)


@contextmanager
def zero_embeddings(embedding: nn.Module | None, zeroed: Bool[Tensor, "b n"]) -> Iterator[None]:
    """Set embeddings of some tokens to zero in every forward inside the context."""
    if not zeroed.any():
        yield
        return
    if embedding is None:
        raise ValueError("removal='zero' needs an embedding of ids, and the model has none.")

    def mask(output: Tensor) -> Tensor:
        # the subject may add tokens at the end, which stay
        gone = zeroed.to(output.device)
        gone = nn.functional.pad(gone, (0, output.shape[1] - gone.shape[1]))
        return output.masked_fill(gone[..., None], 0.0)

    with change_output(embedding, mask):
        yield


def rollout_importances(
    layers: Sequence[CapturedLayer], target: int | None
) -> dict[str, list[float]]:
    """Return the attention that reaches the target from each token through all layers, by name.

    Nothing is returned if a layer has no weights.

    Args:
        layers: Captured layers in the order of the forward.
        target: The token; ``None`` for the mean over all tokens.
    """
    if not all(layer.has_weights for layer in layers):
        return {}
    # a layer that attends to another sequence does not mix these tokens
    own = [a for a in layers if int(a.query_keep[0].sum()) == int(a.keep[0].sum())]
    n = int(own[0].keep[0].sum())
    row = torch.full((1, n), 1 / n, dtype=torch.float64)
    if target is not None:
        row = torch.eye(n, dtype=torch.float64)[target : target + 1]
    return {"attention rollout": rollout_factor(own, row)[0].tolist()}
