"""Structure learning: graphs from tests of independence, with hidden common causes allowed.

    pc           no hidden causes: skeleton from neighbours, colliders, Meek's rules
    fci          skeleton of PC, then sets of *possible-d-sep*, then rules R0 to R10
    icd          rounds of growing sets close to the pair, the graph is oriented after each round
    ordered-icd  the same, with a known order: no node causes an earlier one

Every round looks at the graph of the round before, and removes its edges together at the end. So
the numbering of nodes does not matter, and the graph after round ``r`` is right for all sets up to
``r`` nodes (*anytime*). In ``pc`` graphs, a circle means "direction unknown".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypedDict, Unpack

import numpy as np
from jaxtyping import Bool, Float, Int, Int8, Int16

from .candidates import (
    Candidates,
    InfluenceCandidates,
    SubsetCandidates,
    TooManySetsError,
    in_order,
    influence_reach,
)
from .independence import CallableTest, IndependenceTest, PartialCorrelationTest, p_values
from .marks import ARROW, CIRCLE
from .pag import PAG
from .rules import orient_arrows, orient_colliders, orient_pc, orient_tails

__all__ = ["Algorithm", "Discovery", "IndependenceTable", "discover", "learn_pag"]

Algorithm = Literal["icd", "ordered-icd", "fci", "pc"]
MAX_TESTS = 1_000_000


class IndependenceTable(NamedTuple):
    """All tests of a search, in the order they were made."""

    i: Int16[np.ndarray, " t"]
    j: Int16[np.ndarray, " t"]
    given: Int16[np.ndarray, "t k"]
    """Conditioning sets, filled with ``-1``."""
    rho: Float[np.ndarray, " t"]
    tau: Float[np.ndarray, " t"]
    alpha: float | None

    @property
    def independent(self) -> Bool[np.ndarray, " t"]:
        """The decisions."""
        return np.abs(self.rho) < self.tau

    @property
    def p(self) -> Float[np.ndarray, " t"] | None:
        """The p-values, or ``None`` if the test has no significance level."""
        return None if self.alpha is None else p_values(self.rho, self.tau, self.alpha)

    def rows(self) -> list[tuple[int, int, tuple[int, ...], float, float | None, bool]]:
        """Return ``(i, j, given, rho, p, independent)`` of each test."""
        p = self.p
        return [
            (
                int(self.i[t]),
                int(self.j[t]),
                tuple(v for v in self.given[t].tolist() if v >= 0),
                float(self.rho[t]),
                None if p is None else float(p[t]),
                bool(self.independent[t]),
            )
            for t in range(len(self.i))
        ]


@dataclass(frozen=True)
class Discovery:
    """Graph of a search, and how it was found."""

    pag: PAG
    sepsets: dict[tuple[int, int], tuple[int, ...]]
    """The set that separates ``(i, j)``, ``i < j``, for each pair without an edge."""
    tests: IndependenceTable
    """The tests of all finished rounds."""
    warnings: tuple[str, ...]
    is_complete: bool
    """``False`` if the budget of tests ended the search; the graph is that of the last round
    that was finished."""
    num_tests: int
    """Number of tests made, those of an unfinished round included."""
    settings: dict[str, object] = field(default_factory=dict)
    """Algorithm, largest set, and what else the search was told."""


class SearchArguments(TypedDict, total=False):
    """Arguments of :func:`discover`, without the test."""

    algorithm: Algorithm
    order: Sequence[int] | None
    max_cond: int | None
    max_tests: int | None
    selection_bias: bool
    names: Sequence[str] | None


def learn_pag(
    correlation: Float[np.ndarray, "n n"],
    *,
    m: float | None = None,
    alpha: float | None = None,
    tau: float | None = None,
    **options: Unpack[SearchArguments],
) -> PAG:
    """Return the partial ancestral graph of a correlation matrix.

    Args:
        correlation: Correlation or covariance matrix of the nodes.
        m: Effective number of samples. For attention it only sets the threshold, with ``alpha``.
        alpha: Significance level; 0.01 if ``tau`` is not given.
        tau: Partial correlation below which nodes are independent, instead of ``m`` and ``alpha``.
        options: Arguments of :func:`discover`: algorithm, order, budgets and names.

    Returns:
        The graph. Its ``warnings`` say if nodes were copies, or if the budget was too small. Use
        ``discover`` to see the tests, too.

    Example:
        >>> weights = np.array([[0, 0, 0, 0], [0, 0, 0, 0], [0.6, 0.6, 0, 0], [0, 0, 0.6, 0]])
        >>> mixing = np.linalg.inv(np.eye(4) - weights)
        >>> learn_pag(mixing @ mixing.T, tau=1e-6).edges()
        ['0 o→ 2', '1 o→ 2', '2 → 3']
    """
    test = PartialCorrelationTest(correlation, m, alpha, tau=tau)
    return discover(test, test.num_nodes, **options).pag


def discover(
    test: IndependenceTest | Callable[[int, int, tuple[int, ...]], bool],
    n: int,
    *,
    algorithm: Algorithm = "icd",
    order: Sequence[int] | None = None,
    max_cond: int | None = None,
    max_tests: int | None = None,
    selection_bias: bool = False,
    names: Sequence[str] | None = None,
) -> Discovery:
    """Return the graph that a test of independence implies, with the tests that led to it.

    Args:
        test: A test, or a function ``(i, j, given)`` that returns ``True`` if independent.
        n: Number of nodes.
        algorithm: ``"icd"``, ``"ordered-icd"``, ``"fci"`` or ``"pc"``.
        order: Place of each node in a known order, for ``"ordered-icd"`` (default: 0 to n − 1) and
            ``"fci"``. A node causes no node with a smaller place. Equal places say nothing. The
            order sets arrowheads only, never tails.
        max_cond: Largest conditioning set; 3 up to 20 nodes, 2 above by default.
        max_tests: Budget of tests; one million by default.
        selection_bias: Whether edges may come from selection (rules R5 to R7).
        names: Names of the nodes.

    Example:
        >>> found = discover(lambda i, j, given: {i, j} == {0, 2} and 1 not in given, 3)
        >>> found.pag.edges(), found.sepsets
        (['0 o→ 1', '2 o→ 1'], {(0, 2): ()})
    """
    if algorithm not in ("icd", "ordered-icd", "fci", "pc"):
        raise ValueError(
            f"algorithm must be 'icd', 'ordered-icd', 'fci' or 'pc', got {algorithm!r}."
        )
    tester = test if isinstance(test, IndependenceTest) else CallableTest(test, n)
    if tester.num_nodes != n:
        raise ValueError(f"The test has {tester.num_nodes} nodes, but n is {n}.")
    limit = (3 if n <= 20 else 2) if max_cond is None else max_cond
    if limit < 0:
        raise ValueError(f"max_cond must not be negative, got {max_cond}.")
    search = _Search(
        tester,
        places=_places(order, n, algorithm),
        limit=limit if tester.max_size is None else min(limit, tester.max_size),
        budget=MAX_TESTS if max_tests is None else max_tests,
    )
    marks = _ALGORITHMS[algorithm](search, selection_bias)
    warnings = search.warnings()
    return Discovery(
        pag=PAG(marks, None if names is None else tuple(names), warnings),
        sepsets=search.sepsets,
        tests=search.table(),
        warnings=warnings,
        is_complete=search.is_complete,
        num_tests=search.num_tests,
        settings={
            "algorithm": algorithm,
            "order": None if search.places is None else search.places.tolist(),
            "max_cond": limit,
            "max_tests": search.budget,
            "selection_bias": selection_bias,
        },
    )


def _places(order: Sequence[int] | None, n: int, algorithm: str) -> Int[np.ndarray, " n"] | None:
    if order is None:
        return np.arange(n) if algorithm == "ordered-icd" else None
    if algorithm in ("icd", "pc"):
        raise ValueError(
            f"algorithm {algorithm!r} does not use an order; take 'ordered-icd' or 'fci'."
        )
    places = np.asarray(order)
    if places.shape != (n,) or not np.issubdtype(places.dtype, np.integer):
        raise ValueError(
            f"order must be {n} whole numbers, the place of each node, got shape {places.shape} "
            f"and type {places.dtype}."
        )
    return places.astype(np.intp)


_Tested = tuple[int, int, Int[np.ndarray, "t k"], Float[np.ndarray, " t"], Float[np.ndarray, " t"]]
"""A pair, its sets, their correlations and thresholds."""


class _Search:
    """Edges that are left, sets that removed the others, and the tests made so far."""

    def __init__(
        self,
        test: IndependenceTest,
        *,
        places: Int[np.ndarray, " n"] | None,
        limit: int,
        budget: int,
    ) -> None:
        n = test.num_nodes
        self.test, self.places, self.limit, self.budget = test, places, limit, budget
        self.strength = test.strength()
        self.edge = ~np.eye(n, dtype=bool)
        self.separators = np.zeros((n, n, n), dtype=bool)
        self.sepsets: dict[tuple[int, int], tuple[int, ...]] = {}
        self.is_complete, self.num_tests = True, 0
        self.log: list[_Tested] = []
        self.ridged: list[tuple[int, int, tuple[int, ...]]] = []
        self.num_ridged = 0

    def fresh_marks(self) -> Int8[np.ndarray, "n n"]:
        """Return circles at all ends, and arrowheads at the later node of a known order."""
        marks = self.edge.astype(np.int8) * CIRCLE
        if self.places is not None:
            marks[self.edge & (self.places[:, None] < self.places[None, :])] = ARROW
        return marks

    def round(self, size: int, candidates: Callable[[int, int, int], Candidates]) -> bool:
        """Test every edge with sets of a size, then remove edges; return if there were any sets.

        A round that exceeds the budget leaves the graph as it was.
        """
        removed: dict[tuple[int, int], tuple[int, ...]] = {}
        log: list[_Tested] = []
        has_sets = False
        for i, j in np.argwhere(np.triu(self.edge)).tolist():
            try:
                sets = in_order(candidates(i, j, size), self.strength, i, j)
            except TooManySetsError:
                self.is_complete = False
                return False
            has_sets = has_sets or len(sets) > 0
            found = self._first_separator(i, j, sets, log)
            if self.num_tests > self.budget:
                self.is_complete = False
                return False
            if found is not None:
                removed[i, j] = found
        self.log += log
        for (i, j), given in removed.items():
            self.edge[i, j] = self.edge[j, i] = False
            self.sepsets[i, j] = given
            self.separators[i, j, list(given)] = self.separators[j, i, list(given)] = True
        return has_sets

    def _first_separator(
        self, i: int, j: int, sets: Int[np.ndarray, "t k"], log: list[_Tested]
    ) -> tuple[int, ...] | None:
        for start in range(0, len(sets), self.test.chunk):
            part = sets[start : start + self.test.chunk]
            outcomes = self.test.evaluate(i, j, part)
            independent = outcomes.independent
            hit = int(independent.argmax()) if independent.any() else -1
            count = len(part) if hit < 0 else hit + 1
            self.num_tests += count
            log.append((i, j, part[:count], outcomes.rho[:count], outcomes.tau[:count]))
            self._note_ridges(i, j, part[:count], outcomes.ridged[:count])
            if hit >= 0:
                return tuple(part[hit].tolist())
            if self.num_tests > self.budget:
                return None
        return None

    def _note_ridges(
        self, i: int, j: int, sets: Int[np.ndarray, "t k"], ridged: Bool[np.ndarray, " t"]
    ) -> None:
        if ridged.any():
            self.num_ridged += int(ridged.sum())
            if not self.ridged:
                self.ridged.append((i, j, tuple(sets[ridged.argmax()].tolist())))

    def warnings(self) -> tuple[str, ...]:
        found = list(self.test.warnings)
        if self.ridged:
            i, j, given = self.ridged[0]
            found.append(
                f"{self.num_ridged} of {self.num_tests} tests needed a ridge, because nodes are "
                f"almost linear combinations of each other; the first was {i} and {j} given "
                f"{', '.join(map(str, given))}."
            )
        if not self.is_complete:
            found.append(
                f"The budget of {self.budget} tests ended the search; the graph is that of the "
                "last finished round. Raise max_tests, lower max_cond, or select fewer nodes."
            )
        return tuple(found)

    def table(self) -> IndependenceTable:
        """Return the tests of finished rounds."""
        count = sum(len(rho) for _, _, _, rho, _ in self.log)
        width = max((sets.shape[1] for _, _, sets, _, _ in self.log), default=0)
        i, j = np.empty(count, dtype=np.int16), np.empty(count, dtype=np.int16)
        given = np.full((count, width), -1, dtype=np.int16)
        rho, tau = np.empty(count), np.empty(count)
        start = 0
        for a, b, sets, part, thresholds in self.log:
            here = slice(start, start + len(part))
            i[here], j[here], rho[here], tau[here] = a, b, part, thresholds
            given[here, : sets.shape[1]] = sets
            start += len(part)
        return IndependenceTable(i, j, given, rho, tau, self.test.alpha)


def _icd(search: _Search, selection_bias: bool) -> Int8[np.ndarray, "n n"]:
    marks = search.fresh_marks()
    for size in range(search.limit + 1):
        before = search.edge.copy()
        # possible causes come from the graph of smaller sets, so later rounds try few sets
        has_sets = search.round(size, InfluenceCandidates(marks, search.places))
        if (search.edge != before).any():
            marks = orient_colliders(search.fresh_marks(), search.separators)
            marks = orient_arrows(marks, search.separators)
        if not search.is_complete or not has_sets:
            break
    return orient_tails(marks, search.separators, selection_bias=selection_bias)


def _pc_skeleton(search: _Search) -> None:
    for size in range(search.limit + 1):
        groups = SubsetCandidates(search.edge.copy(), position=search.places)
        if not search.round(size, groups):
            return


def _pc(search: _Search, _: bool) -> Int8[np.ndarray, "n n"]:
    _pc_skeleton(search)
    return orient_pc(search.fresh_marks(), search.separators)


def _fci(search: _Search, selection_bias: bool) -> Int8[np.ndarray, "n n"]:
    _pc_skeleton(search)
    # with hidden causes the set that separates a pair may lie outside of its neighbours
    if search.is_complete:
        marks = orient_colliders(search.fresh_marks(), search.separators)
        groups = SubsetCandidates(
            influence_reach(marks), known=search.edge.copy(), position=search.places
        )
        for size in range(1, search.limit + 1):
            if not search.round(size, groups):
                break
    marks = orient_colliders(search.fresh_marks(), search.separators)
    marks = orient_arrows(marks, search.separators)
    return orient_tails(marks, search.separators, selection_bias=selection_bias)


_ALGORITHMS: dict[str, Callable[[_Search, bool], Int8[np.ndarray, "n n"]]] = {
    "icd": _icd,
    "ordered-icd": _icd,
    "fci": _fci,
    "pc": _pc,
}
