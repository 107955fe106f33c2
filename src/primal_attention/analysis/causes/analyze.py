"""The analysis ``causes`` of ``primal analyze``: why the model decides as it does."""

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

from torch import Tensor, nn

from primal_attention.analysis.causes.drawing import draw_tree
from primal_attention.analysis.causes.explainer import explain_subject
from primal_attention.analysis.causes.explanation import Explanation
from primal_attention.analysis.causes.graph import causal_graph
from primal_attention.analysis.causes.graph_result import CausalGraphs
from primal_attention.analysis.causes.inputs import token_numbers
from primal_attention.analysis.causes.page import add_caveats, add_explorer, graph_views
from primal_attention.analysis.causes.text import (
    NoDecisionError,
    encode_text,
    text_subject,
    token_names,
)
from primal_attention.analysis.options import CausesOptions, GraphArguments
from primal_attention.analysis.registry import AnalysisResult, ShownTable
from primal_attention.hosts import Batch, batch_arguments, capture
from primal_attention.report.page import Report, to_png
from primal_attention.support.output import to_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["CausesResult", "TokenGraphs", "analyze_causes", "graphs_around"]

_RADIUS = 3
_CUT = 90
"""Characters of an input in a table."""


@dataclass(frozen=True)
class TokenGraphs(AnalysisResult):
    """Causal graphs around one token of one input, where there is no decision to explain."""

    tokens: tuple[str, ...]
    """Tokens of the input."""
    target: int | None
    """Position of the token in the middle; ``None`` for the mean of all."""
    graphs: CausalGraphs
    """A graph for each head."""

    def verdict(self) -> str:
        """Return the most frequent neighbours of the token over heads."""
        near = self.nearest()
        words = ", ".join(f"{name} ({100 * share:.0f} %)" for name, share in near[:4])
        found = (
            f"Most frequent neighbours, with their share of heads: {words}."
            if near
            else "No head connects it with another token."
        )
        return (
            f"Graphs around {self._name!r}, one for each of {len(self.graphs.heads)} heads. "
            f"{found} There is no decision, so nothing is explained."
        )

    def nearest(self) -> list[tuple[str, float]]:
        """Return neighbours of the token and the share of heads with the edge, by confidence."""
        shares = self.graphs.consensus.frequency[self.graphs.root]
        found = [(self.graphs.labels[i], float(shares[i])) for i in range(len(shares)) if shares[i]]
        return sorted(found, key=lambda item: -item[1])

    def table(self) -> ShownTable:
        """Return edges and confidence of each head."""
        return self.graphs.table()

    def plot(self) -> bytes:
        """Return the tree around the token as PNG, in the graph of the most confident head."""
        best = self.graphs.best
        title = f"{best.name}, around {self._name}"
        return to_png(draw_tree(best.pag, self.graphs.root, max_range=_RADIUS, title=title))

    def to_json(self) -> str:
        """Return tokens and graphs as JSON."""
        graphs = json.loads(self.graphs.to_json())
        return to_json({"tokens": list(self.tokens), "target": self.target, "graphs": graphs})

    def limits(self) -> str:
        """Return what the graphs do not show."""
        return self.graphs.limits()

    def report(self) -> Report:
        """Return the page: tokens, a tab for each head, a table of the heads, caveats."""
        page = Report("Causal graphs around a token", "As the heads of one layer encode_text them.")
        page.verdict(self.verdict())
        self.add_explorer(page)
        page.section("Heads").table(*self.table())
        add_caveats(page)
        return page.config({"layer": self.graphs.layer, **self.graphs.settings})

    def add_explorer(self, page: Report) -> None:
        """Add tokens, slider and graphs to a page."""
        views = graph_views(self.graphs, _RADIUS)
        legend = "Darker tokens are nearer to the outlined one in the graph of the chosen head."
        add_explorer(page, self.tokens, views, target=self.target, legend=legend)

    @property
    def _name(self) -> str:
        return self.graphs.labels[self.graphs.root]


@dataclass(frozen=True)
class CausesResult(AnalysisResult):
    """Explanations of decisions, or graphs around a token, for a few inputs."""

    inputs: tuple[Explanation | TokenGraphs, ...]
    """One result for each input."""

    def verdict(self) -> str:
        """Return how many decisions change, or that there is none to explain."""
        found = [one for one in self.inputs if isinstance(one, Explanation)]
        count = f"{len(self.inputs)} input{'s' if len(self.inputs) > 1 else ''}"
        if not found:
            return (
                "No decision is explained: a target is given, the output has no logits, or the "
                f"inputs are no tokens that could be removed. Causal graphs around one token of "
                f"{count} are shown for each head of {self.inputs[0].graphs.layer}."
            )
        changed = [one for one in found if one.sets]
        sizes = sorted(len(one.sets[0].tokens) for one in changed)
        words = f"{len(changed)} of {len(found)} decisions change"
        if sizes:
            tokens = "one token" if sizes[-1] == 1 else f"{sizes[0]} to {sizes[-1]} tokens"
            words += f" without {tokens} that the graphs connect with them"
            best = changed[0]
            words += (
                f"; {best.decision!r} becomes {best.sets[0].label!r} without "
                f"{', '.join(best.sets[0].tokens)}"
            )
        runs = sum(one.evals for one in found)
        return f"{words}. The model ran {runs} times to check."

    def table(self) -> ShownTable:
        """Return decision, smallest set and scores of each input."""
        if isinstance(self.inputs[0], TokenGraphs):
            header = ["input", "token", "most frequent neighbours", "confidence", "edges"]
            return header, [_graph_row(one) for one in self.inputs if isinstance(one, TokenGraphs)]
        header = ["input", "decision", "without", "becomes", "score before", "score after", "head"]
        found = [one for one in self.inputs if isinstance(one, Explanation)]
        return [*header, "runs"], [_decision_row(one) for one in found]

    def plot(self) -> bytes:
        """Return the tree of the first input as PNG."""
        return self.inputs[0].plot()

    def to_json(self) -> str:
        """Return the results of all inputs as JSON."""
        return to_json({"inputs": [json.loads(one.to_json()) for one in self.inputs]})

    def limits(self) -> str:
        """Return what the analysis does not show."""
        return self.inputs[0].limits()

    def report(self) -> Report:
        """Return the page: one explorer and one table of sets for each input, and caveats."""
        page = Report(
            "Causes",
            "Which tokens lead to a decision: graphs suggest them, and the model is run without "
            "them to see whether it decides otherwise.",
        )
        page.verdict(self.verdict()).table(*self.table())
        for number, one in enumerate(self.inputs, 1):
            page.section(f"Input {number}")
            page.text(one.verdict())
            one.add_explorer(page)
            if isinstance(one, Explanation) and one.sets:
                page.table(*one.table())
        add_caveats(page)
        first = self.inputs[0]
        settings = first.settings if isinstance(first, Explanation) else first.graphs.settings
        return page.config(dict(settings))


def _graph_row(one: TokenGraphs) -> list[object]:
    near = ", ".join(name for name, _ in one.nearest()[:4])
    best = one.graphs.best
    confidence = f"{best.confidence.low_margin:.2f}"
    return [_start(one.tokens), one._name, near, confidence, len(best.pag.edges())]


def _decision_row(one: Explanation) -> list[object]:
    row: list[object] = [_start(one.tokens), one.decision]
    if not one.sets:
        return [*row, "not found", "", f"{one.score:.3f}", "", "", one.evals]
    best = one.sets[0]
    scores = [f"{best.before:.3f}", f"{best.after:.3f}"]
    return [*row, ", ".join(best.tokens), best.label, *scores, one.winner, one.evals]


def _start(tokens: Sequence[str]) -> str:
    text = " ".join(tokens)
    return text if len(text) <= _CUT else text[: _CUT - 1] + "…"


def graphs_around(
    model: nn.Module,
    batch: Batch,
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    target: int | str | None = None,
    layer: int | str = -1,
    **options: Unpack[GraphArguments],
) -> TokenGraphs:
    """Return causal graphs around one token of the first sequence of a batch.

    Args:
        model: Any model with attention.
        batch: Its inputs.
        tokenizer: Its tokenizer, for names of tokens.
        target: The token: a position, a word, or ``"mean"``. By default the last token of causal
            attention, else the first.
        layer: Attention layer by its number in the order of the forward, or by name.
        options: Threshold and options of
            :func:`~primal_attention.analysis.causes.graph.causal_graph`.

    Example:
        >>> from primal_attention.attention import create_attention
        >>> layer = create_attention("softmax", 16, 2)
        >>> found = graphs_around(layer, torch.randn(1, 6, 16), target=2)
        >>> found.tokens, len(found.graphs.heads)
        (('0', '1', '2', '3', '4', '5'), 2)
    """
    captured = capture(model, batch, layers=layer)[0]
    n = int(captured.query_keep[0].sum())
    names, pieces = _names(batch, tokenizer, captured.query_keep[0], n)
    if target is None:
        target = n - 1 if captured.is_causal else 0
    graphs = causal_graph(captured, tokens=pieces, target=target, **options)
    members = graphs.nodes.members[graphs.root]
    return TokenGraphs(tuple(names), members[0] if len(members) == 1 else None, graphs)


def _names(
    batch: Batch, tokenizer: "PreTrainedTokenizerBase | None", keep: Tensor, n: int
) -> tuple[list[str], list[str]]:
    """Return names of the tokens for readers, and as the tokenizer writes them."""
    ids = token_numbers(batch, len(keep))
    if ids is None:
        numbers = [str(i) for i in range(n)]
        return numbers, numbers
    kept = ids[0].cpu()[keep.cpu()].tolist()
    pieces = kept if tokenizer is None else tokenizer.convert_ids_to_tokens(kept)
    return token_names(tokenizer, kept), [str(piece) for piece in pieces]


def analyze_causes(
    model: nn.Module,
    batches: Sequence[Batch],
    options: CausesOptions,
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
) -> CausesResult | Explanation | TokenGraphs:
    """Return explanations of the model's decisions about the first inputs, or about one text.

    A model without a decision gets causal graphs around its first token instead, or around the last
    one if its attention is causal. With a target, every model gets graphs around it.
    """
    if options.text is not None:
        if tokenizer is None:
            raise ValueError("The model has no tokenizer, so a text cannot be read; leave it out.")
        takes = inspect.signature(model.forward).parameters
        encoded = encode_text(tokenizer, options.text, model)
        row = {name: value for name, value in encoded.items() if name in takes}
        return _one(model, row, options, tokenizer)
    rows = _rows(batches, options.inputs)
    if not rows:
        raise ValueError("batches is empty; the analysis causes needs one input.")
    return CausesResult(tuple(_one(model, row, options, tokenizer) for row in rows))


def _one(
    model: nn.Module,
    row: Batch,
    options: CausesOptions,
    tokenizer: "PreTrainedTokenizerBase | None",
) -> Explanation | TokenGraphs:
    graphs = options.graph_options()
    if options.target is None and isinstance(row, dict) and "input_ids" in row:
        try:
            subject = text_subject(
                model, tokenizer, row, layer=options.layer, removal=options.removal
            )
        except NoDecisionError:
            pass
        else:
            return explain_subject(
                subject,
                search=options.search,
                radius=options.radius,
                max_size=options.max_size,
                max_evals=options.max_evals,
                compare=options.compare,
                **graphs,
            )
    return graphs_around(
        model, row, tokenizer=tokenizer, target=options.target, layer=options.layer, **graphs
    )


def _rows(batches: Sequence[Batch], count: int) -> list[Batch]:
    """Return the first sequences as batches of one."""
    found: list[Batch] = []
    for batch in batches:
        args, kwargs = batch_arguments(batch)
        first = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
        for i in range(len(first)):
            if len(found) == count:
                return found
            part = [v[i : i + 1] if isinstance(v, Tensor) else v for v in args]
            named = {k: v[i : i + 1] if isinstance(v, Tensor) else v for k, v in kwargs.items()}
            found.append(named or part)
    return found
