"""From attention to causal graphs: one graph between tokens for each head.

The steps are: read the attention of a layer, choose the nodes, estimate their correlations
(:mod:`~primal_attention.analysis.causes.covariance`), test independences and learn a graph
(:mod:`~primal_attention.analysis.causes.discovery`), and say how clear the decisions were
(:mod:`~primal_attention.analysis.causes.confidence`).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.analysis.causes.confidence import bootstrap_stability, confidence
from primal_attention.analysis.causes.covariance import (
    attention_factor,
    center_features,
    correlate,
    mix_rows,
    rollout_factor,
    values_factor,
)
from primal_attention.analysis.causes.discovery import Algorithm, Discovery, discover
from primal_attention.analysis.causes.graph_result import CausalGraphs, HeadGraph
from primal_attention.analysis.causes.independence import PartialCorrelationTest
from primal_attention.analysis.causes.inputs import AttentionSource, read_source
from primal_attention.analysis.causes.nodes import (
    ColumnChoice,
    GraphNodes,
    TargetChoice,
    choose_nodes,
    drop_list,
)
from primal_attention.analysis.causes.primal import Matrix, captured_scores
from primal_attention.analysis.causes.settings import CausalGraphOptions, Samples
from primal_attention.hosts import Batch, CapturedLayer
from primal_attention.support.options import read_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["causal_graph"]

_SCORE_RIDGE = 1e-3
"""Ridge for scores, whose rank is small."""
_PER_HEAD = ("attention", "values", "scores", "key-scores")
_WITH_COLUMNS = ("attention", "values", "rollout")
_SCORES = ("scores", "key-scores")


class _Search(NamedTuple):
    """How graphs are learned from correlations."""

    m: int | None
    alpha: float | None
    tau: float | None
    algorithm: Algorithm
    max_cond: int | None
    max_tests: int | None
    labels: tuple[str, ...]

    def run(self, corr: Float[Tensor, "k k"]) -> tuple[Discovery, tuple[str, ...]]:
        """Return what the search found, and its warnings except those about equal tokens."""
        test = PartialCorrelationTest(corr.numpy(), self.m, self.alpha, tau=self.tau)
        found = discover(
            test,
            test.num_nodes,
            algorithm=self.algorithm,
            max_cond=self.max_cond,
            max_tests=self.max_tests,
            names=self.labels,
        )
        # equal tokens are reported with their names already
        return found, tuple(text for text in found.warnings if text not in test.warnings)


def causal_graph(
    model_or_attention: nn.Module | CapturedLayer | Matrix,
    batch: Batch | str | None = None,
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    tokens: Sequence[str] | None = None,
    layer: int | str = -1,
    target: TargetChoice = None,
    alpha: float = 0.01,
    m: Samples = None,
    tau: float | None = None,
    options: CausalGraphOptions | Mapping[str, object] | None = None,
) -> CausalGraphs:
    """Return causal graphs between the tokens of one sequence, one for each head of a layer.

    ``m`` and ``alpha`` are not about sampling: attention is not random. Together they set the
    partial correlation ``tau`` below which two tokens count as independent.

    Args:
        model_or_attention: A model, a layer that
            :func:`~primal_attention.hosts.capture` returns, or attention matrices
            ``[n n]`` or ``[heads n n]`` of one sequence without padding.
        batch: Inputs of the model, or a text if there is a tokenizer.
        tokenizer: The model's tokenizer, for names of nodes, words and special tokens.
        tokens: Names of the tokens, where there is no tokenizer.
        layer: Attention layer by its number in the order of the forward, or by name.
        target: What to explain: the position of a token, a word, or ``"mean"`` for a node that is
            the mean of all tokens, as in models that pool.
        alpha: Significance level.
        m: Effective number of samples: by default the width of a head, of the model or of the
            scores, by method. ``"hidden"`` is the width of the model. Matrices alone do not know
            any width, so they need ``m`` or ``tau``.
        tau: Threshold of partial correlations instead of ``alpha`` and ``m``.
        options: :class:`CausalGraphOptions`, or some of them by name: heads, method, algorithm,
            nodes and others.

    Example:
        >>> import torch
        >>> effects = torch.zeros(4, 4, dtype=torch.float64)
        >>> effects[2, 0] = effects[2, 1] = effects[3, 2] = 0.6
        >>> attention = torch.linalg.inv(torch.eye(4) - effects)
        >>> known = {"tau": 1e-6, "tokens": list("abcd")}
        >>> graphs = causal_graph(attention, **known, options={"algorithm": "icd"})
        >>> graphs.heads[0].pag.edges()
        ['a o→ c', 'b o→ c', 'c → d']
    """
    chosen = read_options(CausalGraphOptions, options)
    _check(chosen, m, tau, alpha)
    source = read_source(
        model_or_attention,
        batch,
        tokenizer=tokenizer,
        tokens=tokens,
        sequence=chosen.sequence,
        layer=layer,
        method=chosen.method,
    )
    method = chosen.method or ("attention" if source.has_weights else "scores")
    heads = _heads(chosen.heads, source.num_heads, method)
    dropped = _dropped(source, method, chosen)
    nodes, words = _nodes(source, chosen, target, dropped)
    factor = _factor(source, method, nodes, dropped, chosen.center, words)
    factor = factor[[head or 0 for head in heads]]
    nodes, factor, notes = _without_empty(nodes, factor, dropped)
    auto: Algorithm = "ordered-icd" if source.is_causal and method != "key-scores" else "icd"
    search = _Search(
        None if tau is not None and m is None else _samples(source, method, m, factor),
        alpha if tau is None else None,
        tau,
        auto if chosen.algorithm == "auto" else chosen.algorithm,
        _largest_set(chosen.max_cond, method, factor),
        chosen.max_tests,
        nodes.labels,
    )
    ridge = chosen.ridge
    if ridge is None:
        ridge = _SCORE_RIDGE if method in _SCORES else 0.0
    graphs = tuple(
        _head_graph(head, x, search, ridge, chosen.stability)
        for head, x in zip(heads, factor, strict=True)
    )
    settings = {
        "method": method,
        **{name: value for name, value in search._asdict().items() if name != "labels"},
        "nodes": chosen.nodes if isinstance(chosen.nodes, str | int) else list(chosen.nodes),
        "group": chosen.group,
        "target": target,
        "dropped_columns": list(dropped),
        "dropped_tokens": [source.tokens[i] for i in dropped],
        "center": chosen.center,
        "ridge": ridge,
        "stability": chosen.stability,
        "sequence": chosen.sequence,
        "num_tokens": source.num_tokens,
        "is_causal": source.is_causal,
        "notes": notes,
    }
    return CausalGraphs(source.name, nodes, graphs, settings)


def _check(options: CausalGraphOptions, m: Samples, tau: float | None, alpha: float) -> None:
    if isinstance(m, str) and m != "hidden":
        raise ValueError(f"m must be a number, 'hidden' or None, got {m!r}.")
    if tau is not None and not 0 <= tau < 1:
        raise ValueError(f"tau must be at least 0 and below 1, got {tau}.")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be between 0 and 1, got {alpha}.")
    stability, method = options.stability, options.method
    if stability < 0 or (stability and method not in ("values", "hidden")):
        raise ValueError(
            f"stability={stability} with method={method!r}: resamples need feature columns; use "
            "method='values' or 'hidden' and a number of resamples, or stability=0."
        )


def _dropped(source: AttentionSource, method: str, options: CausalGraphOptions) -> tuple[int, ...]:
    """Return the columns to drop; only attention has columns."""
    drop = options.drop_columns
    if method not in _WITH_COLUMNS:
        if drop not in (None, "auto") or options.center:
            raise ValueError(
                f"drop_columns and center change attention matrices, and method={method!r} has "
                f"none; leave them out, or use one of {_WITH_COLUMNS}."
            )
        return ()
    is_sink = source.is_causal and isinstance(source.attention, CapturedLayer)
    default: ColumnChoice = "first" if is_sink and source.num_tokens > 2 else None
    return drop_list(drop, source.num_tokens, source.special, default)


def _heads(heads: int | Sequence[int] | None, count: int, method: str) -> tuple[int | None, ...]:
    """Return the numbers of the heads; one ``None`` for methods that join all heads."""
    if method not in _PER_HEAD:
        if heads is not None:
            raise ValueError(f"method={method!r} joins all heads; leave heads out.")
        return (None,)
    if heads is None:
        return tuple(range(count))
    found = (heads,) if isinstance(heads, int) else tuple(heads)
    wrong = [head for head in found if not -count <= head < count]
    if wrong or not found:
        raise ValueError(
            f"heads must be between 0 and {count - 1}, got {list(found)}; leave heads out for all."
        )
    return tuple(dict.fromkeys(head % count for head in found))


def _nodes(
    source: AttentionSource,
    options: CausalGraphOptions,
    target: TargetChoice,
    dropped: tuple[int, ...],
) -> tuple[GraphNodes, list[tuple[int, ...]]]:
    """Return the nodes, and the positions of the tokens of every word or single token."""
    singles: list[tuple[int, ...]] = [(i,) for i in range(source.num_tokens)]
    words = source.words if options.group == "word" else singles
    nodes = choose_nodes(
        words,
        [source.word([source.tokens[i] for i in word]) for word in words],
        special=source.special,
        nodes=options.nodes,
        target=target,
        importance=lambda weights: source.importance(weights, dropped),
    )
    return nodes, words


def _factor(
    source: AttentionSource,
    method: str,
    nodes: GraphNodes,
    dropped: tuple[int, ...],
    center: bool,
    words: list[tuple[int, ...]],
) -> Float[Tensor, "h k p"]:
    """Return the factor ``X`` of the covariance of the nodes, for each head."""
    rows = nodes.matrix()
    if method in _SCORES:
        scores = captured_scores(source.layer(method), source.sequence)
        return rows @ (scores.e if method == "scores" else scores.r)
    if method == "hidden":
        return (rows @ center_features(source.states()))[None]
    if method == "rollout":
        layers = source.layers or [source.layer(method)]
        found = rollout_factor(layers, rows, source.sequence)[None]
        return attention_factor(found, drop=dropped, center=center, groups=words)
    mixed = mix_rows(source.attention, rows, source.sequence)
    if method == "values":
        values = source.layer(method).values(source.sequence)
        return values_factor(mixed, values, drop=dropped, center=center)
    return attention_factor(mixed, drop=dropped, center=center, groups=words)


def _without_empty(
    nodes: GraphNodes, factor: Float[Tensor, "h k p"], dropped: tuple[int, ...]
) -> tuple[GraphNodes, Float[Tensor, "h k p"], list[str]]:
    """Leave out nodes that depend on dropped columns alone: they are fixed."""
    empty = set((~factor.any(-1).any(0)).nonzero()[:, 0].tolist())
    if not empty:
        return nodes, factor, []
    names = ", ".join(nodes.labels[i] for i in sorted(empty))
    if nodes.target in empty or len(nodes) - len(empty) < 2:
        raise ValueError(
            f"The nodes {names} depend on the dropped columns {list(dropped)} alone, so they are "
            "fixed; choose another target or more nodes, or drop_columns=None."
        )
    kept = [i for i in range(len(nodes)) if i not in empty]
    note = f"The nodes {names} depend on the dropped columns alone; they are fixed and left out."
    return nodes.without(empty), factor[:, kept], [note]


def _samples(source: AttentionSource, method: str, m: Samples, factor: Tensor) -> int:
    if isinstance(m, int):
        if m < 4:
            raise ValueError(f"m must be at least 4, got {m}: a test needs m − 3 above zero.")
        return m
    if method in _SCORES and m is None:
        found: int | None = factor.shape[-1]
    elif method in ("hidden", "rollout") or m == "hidden":
        found = source.width
    else:
        found = source.head_width
    if found is None:
        raise ValueError(
            "Matrices alone do not say how wide a head is; give m (the width of a head, such as "
            "64), or tau (a threshold for partial correlations)."
        )
    return found


def _largest_set(wanted: int | None, method: str, factor: Float[Tensor, "h k p"]) -> int | None:
    """Return the largest conditioning set; scores determine none above a quarter of their rank."""
    if method not in _SCORES:
        return wanted
    default = 3 if factor.shape[1] <= 20 else 2
    return min(default if wanted is None else wanted, factor.shape[-1] // 4)


def _head_graph(
    head: int | None,
    x: Float[Tensor, "k p"],
    search: _Search,
    ridge: float,
    stability: int,
) -> HeadGraph:
    rho = correlate(x, ridge=ridge, labels=search.labels)
    found, warnings = search.run(rho.matrix)
    stable = None
    if stability:
        stable = bootstrap_stability(
            x,
            lambda corr: search.run(corr)[0].pag,
            found.pag,
            replicates=stability,
            ridge=ridge,
        )
    return HeadGraph(
        head,
        found.pag,
        rho,
        confidence(found.tests),
        found.num_tests,
        found.is_complete,
        rho.warnings + warnings,
        stable,
    )
