"""Why did the model decide this? Smallest sets of tokens without which it decides otherwise.

Three steps. *Abduction*: the decision is put into the sequence where it belongs, and the attention
of one layer is read. *Discovery*: a causal graph of the tokens for each head. *Reasoning*: sets of
tokens near the decision in a graph are removed, small and near ones first, and the model runs
without them. Only a set that changes the decision is an explanation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Literal, Unpack

from torch import Tensor, nn

from primal_attention.analysis.causes.explanation import Explanation
from primal_attention.analysis.causes.graph import causal_graph
from primal_attention.analysis.causes.reasoning import Reasoning
from primal_attention.analysis.causes.recommend import RecommenderSubject
from primal_attention.analysis.causes.settings import (
    CausalGraphOptions,
    ExplainArguments,
    ExplainOptions,
    Samples,
)
from primal_attention.analysis.causes.subjects import Names, Subject
from primal_attention.analysis.causes.text import TextTarget, text_subject
from primal_attention.support.options import read_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["explain", "explain_recommendation", "explain_subject"]


def explain(
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerBase | None",
    text: str | Mapping[str, Tensor],
    *,
    layer: int | str = -1,
    removal: str = "auto",
    target: TextTarget = "auto",
    samples: int = 5,
    proposal: Sequence[int] | None = None,
    seed: int = 0,
    **options: Unpack[ExplainArguments],
) -> Explanation:
    """Return the smallest sets of tokens without which a model of transformers decides otherwise.

    The decision is the class of a sequence classifier, the next token of a decoder, or the token
    that a masked language model fills in.

    Args:
        model: The model; it is not changed.
        tokenizer: Its tokenizer.
        text: The text, or arguments of the forward for one sequence.
        layer: Attention layer to read: an index in the order of the forward, or a name.
        removal: How tokens are removed: ``"mask"``, ``"pad"``, ``"drop"``, ``"attend"``,
            ``"zero"`` or ``"resample"``; ``"auto"`` is ``"mask"`` if the tokenizer has a mask
            token, else ``"attend"``.
        target: Token that stands for the decision. ``"auto"`` finds the token that a classifier
            reads, or the mask token; a masked model may also be given a position to mask.
        samples: Inputs to draw for each set, for ``"resample"``.
        proposal: Ids to draw from, for ``"resample"``.
        seed: Seed of the draws.
        options: Arguments of :func:`explain_subject`, such as ``compare=True``.

    Raises:
        ValueError: If the model makes no decision.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification, BertTokenizer
        >>> names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "dull", "film"]
        >>> tokenizer = BertTokenizer(vocab={name: i for i, name in enumerate(names)})
        >>> config = BertConfig(vocab_size=8, hidden_size=16, num_hidden_layers=1,
        ...     num_attention_heads=2, intermediate_size=16)
        >>> model = BertForSequenceClassification(config).eval()
        >>> result = explain(model, tokenizer, "a dull film", tau=0.1)
        >>> result.tokens, result.target, result.settings["removal"]
        (('[CLS]', 'a', 'dull', 'film', '[SEP]'), 0, 'mask')
    """
    subject = text_subject(
        model,
        tokenizer,
        text,
        layer=layer,
        removal=removal,
        target=target,
        samples=samples,
        proposal=proposal,
        seed=seed,
    )
    return explain_subject(subject, **options)


def explain_recommendation(
    model: nn.Module,
    items: Sequence[int],
    *,
    mask_id: int | None = None,
    pad_id: int | None = None,
    names: Names = None,
    layer: int | str = -1,
    removal: str = "auto",
    exclude_seen: bool = True,
    exclude: Sequence[int] = (),
    **options: Unpack[ExplainArguments],
) -> Explanation:
    """Return the items of a history without which a recommender puts another item first.

    Args:
        model: The recommender; see
            :class:`~primal_attention.analysis.causes.recommend.RecommenderSubject`.
        items: Ids of the history, oldest first.
        mask_id: Id of the mask item, for models in the style of BERT4Rec.
        pad_id: Id of padding.
        names: Names of the items by id.
        layer: Attention layer to read.
        removal: How items are removed; ``"auto"`` is ``"mask"`` with ``mask_id``, else ``"drop"``.
        exclude_seen: Whether items of the history are never recommended.
        exclude: Further ids that are never recommended.
        options: Arguments of :func:`explain_subject`.

    Example:
        >>> from primal_attention.models import EncoderClassifier, EncoderConfig
        >>> config = EncoderConfig(num_classes=12, vocab_size=13, dim=16, attention="softmax")
        >>> model = EncoderClassifier(config).eval()
        >>> found = explain_recommendation(model, [3, 1, 4, 7, 5], mask_id=12)
        >>> found.tokens[-1] == found.decision
        True
    """
    subject = RecommenderSubject(
        model,
        items,
        mask_id=mask_id,
        pad_id=pad_id,
        names=names,
        layer=layer,
        removal=removal,
        exclude_seen=exclude_seen,
        exclude=exclude,
    )
    return explain_subject(subject, **options)


def explain_subject(
    subject: Subject,
    *,
    alpha: float = 0.01,
    m: Samples = None,
    tau: float | None = None,
    search: Literal["subset", "radius"] = "subset",
    radius: int | None = 3,
    max_size: int = 3,
    max_evals: int = 2000,
    compare: bool = False,
    options: ExplainOptions | Mapping[str, object] | None = None,
) -> Explanation:
    """Return the smallest sets of tokens without which a subject decides otherwise.

    Heads share all runs of the model. All heads finish the sets of one size before the next size
    begins, and the search ends after the first size that changes the decision. Every set that is
    returned was run again on its own, and no part of it suffices.

    Args:
        subject: The decision.
        alpha: Level of the tests of independence.
        m: Effective sample size of the tests; by default the width of a head.
        tau: Threshold of partial correlations, instead of ``alpha`` and ``m``.
        search: ``"subset"`` tries all connected sets by size and gives sets of which no part
            suffices. ``"radius"`` removes everything within distance 1, 2, …: few runs, large sets.
        radius: Largest distance from the decision; ``None`` for all.
        max_size: Largest sets of ``search="subset"``.
        max_evals: Largest number of sets to run the model without.
        compare: Whether to run the baselines too, each with a budget of ``max_evals``.
        options: :class:`ExplainOptions`, or some of them by name, such as heads, nodes and group.

    Example:
        >>> from primal_attention.models import EncoderClassifier, EncoderConfig
        >>> config = EncoderConfig(num_classes=12, vocab_size=13, dim=16, attention="softmax")
        >>> subject = RecommenderSubject(EncoderClassifier(config).eval(), [3, 1, 4, 7, 5])
        >>> result = explain_subject(subject, tau=0.1, search="radius")
        >>> result.decision == subject.decision, result.settings["removal"]
        (True, 'drop')
    """
    if search not in ("subset", "radius"):
        raise ValueError(f"search must be 'subset' or 'radius', got {search!r}.")
    if max_size < 1:
        raise ValueError(f"max_size must be at least 1, got {max_size}.")
    chosen = read_options(ExplainOptions, options)
    captured = subject.captured()
    graphs = causal_graph(
        captured,
        tokens=getattr(subject, "pieces", None) or subject.tokens,
        target="mean" if subject.target is None else subject.target,
        alpha=alpha,
        m=m,
        tau=tau,
        options={f.name: getattr(chosen, f.name) for f in fields(CausalGraphOptions)},
    )
    work = Reasoning(subject, captured, graphs, radius, max_evals, chosen.batch_size)
    settings = {
        "search": search,
        "radius": radius,
        "max_size": max_size,
        "batch_size": chosen.batch_size,
        "removal": getattr(getattr(subject, "remover", None), "kind", "of the subject"),
        "layer": graphs.layer,
        **graphs.settings,
    }
    return work.run(search, max_size, compare, settings)
