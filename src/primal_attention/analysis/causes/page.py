"""The part of a page that shows graphs around a decision: tokens, a slider, and a tab per head.

The HTML loads nothing and has no ids, so several explorers fit into one report. One script serves
them all. Without scripts the first tab is shown with its full radius.
"""

import math
from collections.abc import Collection, Sequence
from html import escape
from typing import NamedTuple

from primal_attention.analysis.causes.drawing import EDGE_MEANING, edge_color
from primal_attention.analysis.causes.graph_result import CausalGraphs
from primal_attention.analysis.causes.marks import ARROW, CIRCLE
from primal_attention.analysis.causes.pag import PAG
from primal_attention.report.page import Report

__all__ = [
    "CAVEATS",
    "HeadView",
    "add_caveats",
    "add_explorer",
    "consensus_view",
    "explorer",
    "graph_views",
    "radial_svg",
]

CAVEATS = (
    "The graph describes dependence as the model encodes it, not causation in the world.",
    "A set is an explanation because the model was run without its tokens, not because the graph "
    "says so.",
    "Other heads, another layer, another threshold (alpha, m) or another way to remove tokens may "
    "give another answer.",
)
"""What a reader must know, in the order of importance."""


class HeadView(NamedTuple):
    """A graph to show in one tab."""

    title: str
    """Words of the tab."""
    pag: PAG
    """The graph."""
    members: Sequence[Sequence[int]]
    """Positions of the tokens of each node."""
    root: int
    """Node of the graph that is explained."""
    distances: dict[int, int]
    """Distance of the nodes that the tree around the root reaches."""
    note: str = ""
    """A sentence about the graph."""


_CROWD = 14
"""Nodes above which labels are turned."""

_STYLE = """
.causes{border:1px solid var(--line,#e3e7ee);border-radius:.6rem;padding:1rem 1.2rem;
  margin:1.2rem 0}
.causes-tokens{line-height:2.1;font-size:1.05rem;margin:.2rem 0 .8rem}
.causes-token{padding:.14rem .32rem;border-radius:.3rem;margin-right:.15rem;white-space:pre}
.causes-token[data-near="1"]{background:#c2410c;color:#fff}
.causes-token[data-near="2"]{background:#f3a675}
.causes-token[data-near="3"]{background:#fad8c1}
.causes-token[data-near="4"]{background:#fdeee4}
.causes-token.is-target{outline:2px solid #1c2330}
.causes-token.is-set{text-decoration:underline 3px #1d4ed8;text-underline-offset:.28rem}
.causes-bar{display:flex;flex-wrap:wrap;gap:.4rem 1.4rem;align-items:center;font-size:.92rem}
.causes-bar input{vertical-align:middle;width:10rem;accent-color:#c2410c}
.causes-tabs{display:flex;flex-wrap:wrap;gap:.3rem}
.causes-tabs button{font:inherit;font-size:.88rem;border:1px solid var(--line,#e3e7ee);
  background:#fff;border-radius:.4rem;padding:.15rem .6rem;cursor:pointer}
.causes-tabs button[aria-selected=true]{background:#1c2330;color:#fff;border-color:#1c2330}
.causes-panel[hidden]{display:none}.causes-panel svg{width:100%;max-width:44rem;height:auto}
.causes-key{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;font-size:.9rem;margin-top:.5rem}
.causes-note{color:var(--soft,#5b6472);font-size:.92rem;margin:.5rem 0}
.causes-panel details{font-size:.9rem}.causes .is-far{opacity:.13}
.causes svg text{font:13px system-ui,sans-serif;fill:#1c2330;paint-order:stroke;stroke:#fff;
  stroke-width:3px}
"""

_KINDS = "".join(
    f".causes-kind-{i}{{color:{edge_color(kind)}}}\n" for i, kind in enumerate(EDGE_MEANING)
)

_SCRIPT = """
(() => {
  const show = box => {
    const radius = +box.querySelector('input').value;
    const tabs = [...box.querySelectorAll('.causes-tabs button')];
    const chosen = Math.max(tabs.findIndex(t => t.getAttribute('aria-selected') === 'true'), 0);
    const panels = [...box.querySelectorAll('.causes-panel')];
    panels.forEach((panel, i) => panel.hidden = i !== chosen);
    box.querySelector('output').textContent = radius;
    const near = panels[chosen].dataset.near.split(' ').map(Number);
    box.querySelectorAll('.causes-token').forEach((token, i) => {
      const d = near[i];
      token.dataset.near = d > 0 && d <= radius ? Math.min(d, 4) : 0;
    });
    panels[chosen].querySelectorAll('[data-d]').forEach(part => {
      part.classList.toggle('is-far', +part.dataset.d > radius);
    });
  };
  document.addEventListener('input', e => {
    const box = e.target.closest('.causes');
    if (box) show(box);
  });
  document.addEventListener('click', e => {
    const tab = e.target.closest('.causes-tabs button');
    if (!tab) return;
    tab.parentElement.querySelectorAll('button').forEach(
      other => other.setAttribute('aria-selected', other === tab));
    show(tab.closest('.causes'));
  });
})();
"""


def add_caveats(page: Report) -> None:
    """Add what a reader must know before relying on graphs or sets."""
    page.section("Before you rely on it")
    for caveat in CAVEATS:
        page.text(caveat)


def add_explorer(
    page: Report,
    tokens: Sequence[str],
    views: Sequence[HeadView],
    *,
    target: int | None,
    chosen: Collection[int] = (),
    legend: str = "",
) -> None:
    """Add an explorer with its style and script to a page; arguments as :func:`explorer`."""
    page.assets(style=_STYLE + _KINDS, script=_SCRIPT)
    page.fragment(explorer(tokens, views, target=target, chosen=chosen, legend=legend))


def explorer(
    tokens: Sequence[str],
    views: Sequence[HeadView],
    *,
    target: int | None,
    chosen: Collection[int] = (),
    legend: str = "",
) -> str:
    """Return HTML with the tokens, a slider for the radius and a tab for each graph.

    Args:
        tokens: All tokens of the input.
        views: The graphs; the first tab is shown first.
        target: Position of the explained token, if it is one.
        chosen: Positions to underline: the found set.
        legend: A sentence below the tokens.

    Example:
        >>> pag = PAG([[0, 2], [1, 0]], names=("good", "[CLS]"))
        >>> view = HeadView("head 0", pag, [(1,), (0,)], 1, {1: 0, 0: 1})
        >>> html = explorer(["[CLS]", "good"], [view], target=0, chosen=[1])
        >>> 'data-near="1">good<' in html
        True
    """
    if not views:
        raise ValueError("views is empty; give at least one graph.")
    near = [_near(view, len(tokens)) for view in views]
    radius = max((d for view in views for d in view.distances.values()), default=1) or 1
    words = "".join(
        f'<span class="causes-token{" is-target" if i == target else ""}'
        f'{" is-set" if i in chosen else ""}" data-near="{max(0, min(near[0][i], 4))}">'
        f"{escape(token)}</span> "
        for i, token in enumerate(tokens)
    )
    tabs = "".join(
        f'<button type="button" role="tab" aria-selected="{str(not i).lower()}">'
        f"{escape(view.title)}</button>"
        for i, view in enumerate(views)
    )
    panels = "".join(
        f'<div class="causes-panel" role="tabpanel"{" hidden" if i else ""} '
        f'data-near="{" ".join(map(str, near[i]))}">'
        f'<p class="causes-note">{escape(view.note)}</p>{radial_svg(view)}{_edge_list(view)}</div>'
        for i, view in enumerate(views)
    )
    note = f'<p class="causes-note">{escape(legend)}</p>' if legend else ""
    kinds = {view.pag.symbol(a, b) for view in views for a, b in view.pag.ordered_pairs()}
    key = "".join(
        f'<span class="causes-kind-{i}"><b>{kind}</b> {meaning}</span>'
        for i, (kind, meaning) in enumerate(EDGE_MEANING.items())
        if kind in kinds
    )
    return (
        f'<div class="causes"><div class="causes-tokens">{words}</div>{note}'
        f'<div class="causes-bar"><label>radius <input type="range" min="0" max="{radius}" '
        f'value="{radius}"> <output>{radius}</output></label>'
        f'<div class="causes-tabs" role="tablist">{tabs}</div></div>{panels}'
        f'<div class="causes-key">{key}</div></div>'
    )


def graph_views(graphs: CausalGraphs, radius: int | None = 3) -> list[HeadView]:
    """Return graphs as tabs, the most confident head first, and their consensus last.

    Args:
        graphs: Graphs with a target.
        radius: Largest distance from the target; ``None`` for all.
    """
    root, found = graphs.root, []
    for graph in graphs.ranked():
        note = (
            f"Confidence {graph.confidence.low_margin:.2f}; {len(graph.pag.edges())} edges between "
            f"{len(graph.pag)} nodes after {graph.num_tests} tests."
        )
        distances = graph.pag.tree(root, radius).distances
        found.append(HeadView(graph.name, graph.pag, graphs.nodes.members, root, distances, note))
    return [*found, consensus_view(graphs, root, radius)] if len(found) > 1 else found


def consensus_view(graphs: CausalGraphs, root: int, radius: int | None = 3) -> HeadView:
    """Return the edges of at least half of the heads, weighted by confidence, as a tab."""
    pag = graphs.consensus.graph(0.5, graphs.labels)
    note = (
        "Edges of at least half of the heads, weighted by their confidence. This graph summarises "
        "heads; it is not the outcome of one search."
    )
    distances = pag.tree(root, radius).distances
    return HeadView("consensus", pag, graphs.nodes.members, root, distances, note)


def _near(view: HeadView, n: int) -> list[int]:
    """Return the distance of each token; 0 for the target, -1 for tokens that are not reached."""
    found = [-1] * n
    for node, distance in view.distances.items():
        # a node that averages all tokens is none of them
        if len(view.members[node]) == n > 1:
            continue
        for i in view.members[node]:
            found[i] = distance
    return found


def _edge_list(view: HeadView) -> str:
    edges = view.pag.edges()
    if not edges:
        return ""
    words = "; ".join(map(escape, edges))
    return f"<details><summary>{len(edges)} edges as text</summary><p>{words}</p></details>"


def radial_svg(view: HeadView) -> str:
    """Return a graph as SVG: the explained token in the middle, the others by distance around it.

    A filled triangle is an arrowhead, an open circle an unknown mark, a bare end a tail. Nodes that
    the tree does not reach are on the outermost, dashed circle.

    Args:
        view: The graph.
    """
    others = [i for i in range(len(view.pag)) if i != view.root]
    far = max(view.distances.values(), default=0) + 1
    level = {i: view.distances.get(i, far) for i in others}
    rings = max(level.values(), default=1)
    # the innermost circle needs room for its labels
    step = 290 / (rings + 0.35)
    place = {view.root: (0.0, 0.0)}
    angle = {}
    for number, i in enumerate(others):
        angle[i] = 2 * math.pi * number / len(others) - math.pi / 2
        r = step * (level[i] + 0.35)
        place[i] = r * math.cos(angle[i]), r * math.sin(angle[i])
    parts = [
        f'<circle r="{step * (d + 0.35):.0f}" fill="none" stroke="#e3e7ee"'
        f"{' stroke-dasharray=' + chr(34) + '3 5' + chr(34) if d == far else ''}/>"
        for d in range(1, rings + 1)
    ]
    for a, b in view.pag.ordered_pairs():
        depth = max(level.get(a, 0), level.get(b, 0))
        parts.append(_edge(view.pag, a, b, place, depth))
    for i in range(len(view.pag)):
        parts.append(_node(view, i, place[i], angle.get(i), level.get(i, 0), len(others) > _CROWD))
    xs, ys = zip(*place.values(), strict=True)
    is_crowded = len(others) > _CROWD
    wide, high = 110, 110 if is_crowded else 45
    left, top = min(xs) - wide, min(ys) - high
    box = f"{left:.0f} {top:.0f} {max(xs) + wide - left:.0f} {max(ys) + high - top:.0f}"
    return (
        f'<svg viewBox="{box}" role="img" aria-label="Graph around '
        f'{escape(view.pag.name(view.root))}">{"".join(parts)}</svg>'
    )


def _edge(pag: PAG, a: int, b: int, place: dict[int, tuple[float, float]], depth: int) -> str:
    (x1, y1), (x2, y2) = place[a], place[b]
    length = math.hypot(x2 - x1, y2 - y1) or 1.0
    ux, uy = (x2 - x1) / length, (y2 - y1) / length
    color = edge_color(pag.symbol(a, b))
    x1, y1, x2, y2 = x1 + 8 * ux, y1 + 8 * uy, x2 - 8 * ux, y2 - 8 * uy
    marks = _mark(int(pag.marks[b, a]), x1, y1, -ux, -uy, color)
    marks += _mark(int(pag.marks[a, b]), x2, y2, ux, uy, color)
    return (
        f'<g data-d="{depth}"><line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="{color}" stroke-width="{1.8 if depth < 2 else 1.1}"/>{marks}</g>'
    )


def _mark(mark: int, x: float, y: float, ux: float, uy: float, color: str) -> str:
    """Return the mark at the end of an edge that points in the direction ``u``."""
    if mark == CIRCLE:
        cx, cy = x - 4 * ux, y - 4 * uy
        return f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4" fill="#fff" stroke="{color}"/>'
    if mark == ARROW:
        back, side = (x - 11 * ux, y - 11 * uy), (-4.5 * uy, 4.5 * ux)
        points = (
            f"{x:.1f},{y:.1f} {back[0] + side[0]:.1f},{back[1] + side[1]:.1f} "
            f"{back[0] - side[0]:.1f},{back[1] - side[1]:.1f}"
        )
        return f'<polygon points="{points}" fill="{color}"/>'
    return ""


def _node(
    view: HeadView,
    i: int,
    place: tuple[float, float],
    angle: float | None,
    level: int,
    is_crowded: bool,
) -> str:
    x, y = place
    name = escape(view.pag.name(i))
    if angle is None:
        dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="#c2410c"/>'
        label = f'<text x="{x:.1f}" y="{y - 13:.1f}" text-anchor="middle">{name}</text>'
        return f'<g data-d="0">{dot}{label}</g>'
    is_right = math.cos(angle) >= -1e-9
    anchor = "start" if is_right else "end"
    turn = ""
    lx, ly = x + 12 * math.cos(angle), y + 12 * math.sin(angle)
    if is_crowded:
        degrees = math.degrees(angle) + (0 if is_right else 180)
        turn = f' transform="rotate({degrees:.1f} {lx:.1f} {ly:.1f})"'
    elif abs(math.cos(angle)) < 0.2:
        anchor, ly = "middle", ly + (6 if math.sin(angle) > 0 else -2)
    fill = "#1c2330" if i in view.distances else "#fff"
    return (
        f'<g data-d="{level}"><circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{fill}" '
        f'stroke="#1c2330"/><text x="{lx:.1f}" y="{ly:.1f}" text-anchor="{anchor}" '
        f'dominant-baseline="middle"{turn}>{name}</text></g>'
    )
