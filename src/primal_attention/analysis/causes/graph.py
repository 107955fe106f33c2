"""From attention to causal graphs: one graph between tokens for each head.

The steps are: read the attention of a layer, choose the nodes, estimate their correlations
(:mod:`~primal_attention.analysis.causes.covariance`), test independences and learn a graph
(:mod:`~primal_attention.analysis.causes.discovery`), and say how clear the decisions were
(:mod:`~primal_attention.analysis.causes.confidence`).
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.analysis.causes.confidence import bootstrap_stability, confidence
from primal_attention.analysis.causes.covariance import (
    Method,
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
    Columns,
    GraphNodes,
    NodeChoice,
    Target,
    choose_nodes,
    drop_list,
)
from primal_attention.analysis.causes.primal import Matrix, captured_scores
from primal_attention.hosts import Batch, CapturedLayer

__all__ = ["causal_graph"]

_SCORE_RIDGE = 1e-3
"""Ridge for scores, whose rank is small."""
_PER_HEAD = ("attention", "values", "scores", "key-scores")
_WITH_COLUMNS = ("attention", "values", "rollout")


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
    model_or_attention: "nn.Module | CapturedLayer | Matrix",
    batch: Batch | str | None = None,
    *,
    tokenizer: Any = None,
    tokens: Sequence[str] | None = None,
    sequence: int = 0,
    layer: int | str = -1,
    heads: int | Sequence[int] | None = None,
    method: Method | None = None,
    alpha: float = 0.01,
    m: int | Literal["hidden"] | None = None,
    tau: float | None = None,
    algorithm: Algorithm | Literal["auto"] = "auto",
    nodes: NodeChoice = "auto",
    group: Literal["word", "token"] = "word",
    drop_columns: Columns = "auto",
    center: bool = False,
    ridge: float | None = None,
    target: Target = None,
    max_cond: int | None = None,
    max_tests: int | None = None,
    stability: int = 0,
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
        sequence: Which sequence of the batch.
        layer: Attention layer by its number in the order of the forward, or by name.
        heads: Which heads; by default all.
        method: Estimator of the covariance; see
            :mod:`~primal_attention.analysis.causes.covariance`. By default ``"attention"``, and
            ``"scores"`` for primal layers.
        alpha: Significance level.
        m: Effective number of samples: by default the width of a head, of the model or of the
            scores, by method. ``"hidden"`` is the width of the model. Matrices alone do not know
            any width, so they need ``m`` or ``tau``.
        tau: Threshold of partial correlations instead of ``alpha`` and ``m``.
        algorithm: ``"icd"``, ``"ordered-icd"``, ``"fci"``, ``"pc"``, or ``"auto"``: ordered ICD for
            causal attention, which knows the order of the tokens, and ICD otherwise.
        nodes: ``"auto"`` (the 32 words with most attention from the target), ``"all"``, a number,
            or positions and words. All other tokens act as hidden causes.
        group: ``"word"`` joins the pieces of a word to one node, ``"token"`` does not.
        drop_columns: Tokens to condition on: ``"first"``, ``"special"``, positions, or ``None``.
            ``"auto"`` is ``"first"`` for causal layers, whose first token collects attention, and
            ``None`` for other layers and for matrices.
        center: Whether to subtract the mean of each row of attention.
        ridge: Independent noise per token, as a share of its variance. By default 0, and 1e-3 for
            scores.
        target: What to explain: the position of a token, a word, or ``"mean"`` for a node that is
            the mean of all tokens, as in models that pool.
        max_cond: Largest conditioning set; by default 3 up to 20 nodes and 2 above. For scores
            never more than a quarter of the rank.
        max_tests: Budget of tests for each head.
        stability: Number of resamples of feature columns that show how stable edges are; needs
            ``method="values"`` or ``"hidden"``.

    Example:
        >>> import torch
        >>> effects = torch.zeros(4, 4, dtype=torch.float64)
        >>> effects[2, 0] = effects[2, 1] = effects[3, 2] = 0.6
        >>> attention = torch.linalg.inv(torch.eye(4) - effects)
        >>> graphs = causal_graph(attention, tau=1e-6, algorithm="icd", tokens=list("abcd"))
        >>> graphs.heads[0].pag.edges()
        ['a o→ c', 'b o→ c', 'c → d']
    """
    _check_choices(method, group, m, tau, alpha, stability)
    source = read_source(
        model_or_attention,
        batch,
        tokenizer=tokenizer,
        tokens=tokens,
        sequence=sequence,
        layer=layer,
        method=method,
    )
    method = method or ("attention" if source.has_weights else "scores")
    which = _heads(heads, source.num_heads, method)
    estimate = _estimate(source, method, which, nodes, group, target, drop_columns, center)
    is_scores = method in ("scores", "key-scores")
    if is_scores:
        default = 3 if len(estimate.nodes) <= 20 else 2
        limit = estimate.factor.shape[-1] // 4
        max_cond = min(default if max_cond is None else max_cond, limit)
    search = _Search(
        None if tau is not None and m is None else _samples(source, method, m, estimate.factor),
        alpha if tau is None else None,
        tau,
        _algorithm(algorithm, source.is_causal and method != "key-scores"),
        max_cond,
        max_tests,
        estimate.nodes.labels,
    )
    noise = (_SCORE_RIDGE if is_scores else 0.0) if ridge is None else ridge
    graphs = tuple(
        _head_graph(head, x, search, noise, stability)
        for head, x in zip(estimate.heads, estimate.factor, strict=True)
    )
    settings = {
        "method": method,
        **{name: value for name, value in search._asdict().items() if name != "labels"},
        "nodes": nodes if isinstance(nodes, str | int) else list(nodes),
        "group": group,
        "target": target,
        "dropped_columns": list(estimate.dropped),
        "dropped_tokens": [source.tokens[i] for i in estimate.dropped],
        "center": center,
        "ridge": noise,
        "stability": stability,
        "sequence": sequence,
        "num_tokens": source.num_tokens,
        "is_causal": source.is_causal,
        "notes": estimate.notes,
    }
    return CausalGraphs(source.name, estimate.nodes, graphs, settings)


class _Estimate(NamedTuple):
    """Nodes, and a factor of their covariance for each head."""

    nodes: GraphNodes
    heads: tuple[int | None, ...]
    factor: Float[Tensor, "h k p"]
    dropped: tuple[int, ...]
    notes: list[str]


def _estimate(
    source: AttentionSource,
    method: str,
    heads: tuple[int | None, ...],
    nodes: NodeChoice,
    group: str,
    target: Target,
    drop_columns: Columns,
    center: bool,
) -> _Estimate:
    dropped = _dropped(source, method, drop_columns, center)
    singles: list[tuple[int, ...]] = [(i,) for i in range(source.num_tokens)]
    words = source.words if group == "word" else singles
    chosen = choose_nodes(
        words,
        [source.word([source.tokens[i] for i in word]) for word in words],
        special=source.special,
        nodes=nodes,
        target=target,
        importance=lambda weights: source.importance(weights, dropped),
    )
    factor = _factor(source, method, chosen, dropped, center, words if group == "word" else None)
    factor = factor[[head or 0 for head in heads]]
    chosen, factor, notes = _without_empty(chosen, factor, dropped)
    return _Estimate(chosen, heads, factor, dropped, notes)


def _check_choices(
    method: str | None, group: str, m: Any, tau: float | None, alpha: float, stability: int
) -> None:
    if method is not None and method not in get_args(Method):
        raise ValueError(f"method must be one of {get_args(Method)}, got {method!r}.")
    if group not in ("word", "token"):
        raise ValueError(f"group must be 'word' or 'token', got {group!r}.")
    if isinstance(m, str) and m != "hidden":
        raise ValueError(f"m must be a number, 'hidden' or None, got {m!r}.")
    if tau is not None and not 0 <= tau < 1:
        raise ValueError(f"tau must be at least 0 and below 1, got {tau}.")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be between 0 and 1, got {alpha}.")
    if stability < 0 or (stability and method not in ("values", "hidden")):
        raise ValueError(
            f"stability={stability} with method={method!r}: resamples need feature columns; use "
            "method='values' or 'hidden' and a number of resamples, or stability=0."
        )


def _dropped(source: AttentionSource, method: str, drop: Columns, center: bool) -> tuple[int, ...]:
    """Return the columns to drop; only attention has columns."""
    asks = drop is not None and not (isinstance(drop, str) and drop == "auto")
    if method not in _WITH_COLUMNS and (asks or center):
        raise ValueError(
            f"drop_columns and center change attention matrices, and method={method!r} has none; "
            f"leave them out, or use one of {_WITH_COLUMNS}."
        )
    if method not in _WITH_COLUMNS:
        return ()
    is_sink = source.is_causal and isinstance(source.attention, CapturedLayer)
    default: Columns = "first" if is_sink and source.num_tokens > 2 else None
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


def _factor(
    source: AttentionSource,
    method: str,
    nodes: GraphNodes,
    dropped: tuple[int, ...],
    center: bool,
    groups: list[tuple[int, ...]] | None,
) -> Float[Tensor, "h k p"]:
    """Return the factor ``X`` of the covariance of the nodes, for each head."""
    rows = nodes.matrix()
    if method in ("scores", "key-scores"):
        scores = captured_scores(source.layer(method), source.sequence)
        return rows @ (scores.e if method == "scores" else scores.r)
    if method == "hidden":
        return (rows @ center_features(source.states()))[None]
    if method == "rollout":
        layers = source.layers or [source.layer(method)]
        found = rollout_factor(layers, rows, source.sequence)[None]
        return attention_factor(found, drop=dropped, center=center, groups=groups)
    mixed = mix_rows(source.attention, rows, source.sequence)
    if method == "values":
        values = source.layer(method).values(source.sequence)
        return values_factor(mixed, values, drop=dropped, center=center)
    return attention_factor(mixed, drop=dropped, center=center, groups=groups)


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


def _samples(source: AttentionSource, method: str, m: Any, factor: Tensor) -> int:
    if isinstance(m, int):
        if m < 4:
            raise ValueError(f"m must be at least 4, got {m}: a test needs m − 3 above zero.")
        return m
    if method in ("scores", "key-scores") and m is None:
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


def _algorithm(algorithm: Any, is_causal: bool) -> Algorithm:
    if algorithm != "auto":
        return algorithm
    return "ordered-icd" if is_causal else "icd"


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
