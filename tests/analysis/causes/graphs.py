"""True graphs of causes, and their partial ancestral graphs by brute force.

Nothing here uses the library. A DAG becomes a MAG by inducing paths. All graphs with the same edges
are listed, those with the same independences are kept, and a mark is a circle where they differ.
Independence in a mixed graph is separation in the augmented graph, not a search for open paths.
"""

from itertools import chain, combinations, product

import numpy as np

CIRCLE, ARROW, TAIL = 1, 2, 3


def random_dag(rng, n, *, density, hidden=0):
    """Return edges ``(cause, effect)`` of a random DAG, and its observed nodes in causal order."""
    edges = [(a, b) for b in range(n) for a in range(b) if rng.random() < density]
    latent = set(rng.permutation(n - 1)[:hidden].tolist())
    observed = [node for node in range(n) if node not in latent]
    number = {node: k for k, node in enumerate([*observed, *sorted(latent)])}
    return [(number[a], number[b]) for a, b in edges], len(observed)


def mixing(edges, n, noise=None):
    """Return ``(I − G)⁻¹ Λ`` for edges ``(cause, effect, weight)``."""
    direct = np.zeros((n, n))
    for a, b, weight in edges:
        direct[b, a] = weight
    return np.linalg.inv(np.eye(n) - direct) @ np.diag(np.ones(n) if noise is None else noise)


def covariance(edges, n, observed):
    """Return the population covariance of the first ``observed`` nodes."""
    m = mixing(edges, n)
    return (m @ m.T)[:observed, :observed]


def random_sem(rng, n, *, degree=2.0):
    """Return the edges of a random DAG, and its row-normalised mixing matrix: an attention."""
    edges = [(a, b) for b in range(n) for a in range(b) if rng.random() < degree / (n - 1)]
    weighted = [(a, b, rng.uniform(0.3, 0.8)) for a, b in edges]
    m = mixing(weighted, n, rng.uniform(0.5, 1.5, n))
    return edges, m / m.sum(1, keepdims=True)


def skeleton(edges, n):
    """Return the adjacency matrix of a DAG."""
    adjacent = np.zeros((n, n), dtype=bool)
    for a, b in edges:
        adjacent[a, b] = adjacent[b, a] = True
    return adjacent


def powerset(items):
    """Return all subsets."""
    items = list(items)
    return chain.from_iterable(combinations(items, k) for k in range(len(items) + 1))


def dag_ancestors(edges, node):
    """Return a node and everything that causes it."""
    found, new = set(), {node}
    while new:
        found |= new
        new = {a for a, b in edges if b in new} - found
    return found


def dag_to_mag(edges, observed, selected=()):
    """Return the marks of the maximal ancestral graph over nodes ``0 … observed − 1``."""
    above = {
        v: dag_ancestors(edges, v) for v in {x for e in edges for x in e} | set(range(observed))
    }
    marks = np.zeros((observed, observed), dtype=int)
    chosen = set().union(*(above[s] for s in selected)) if selected else set()
    for i, j in combinations(range(observed), 2):
        if has_inducing_path(edges, observed, i, j, above[i] | above[j] | chosen, set(selected)):
            marks[i, j] = TAIL if j in above[i] | chosen else ARROW
            marks[j, i] = TAIL if i in above[j] | chosen else ARROW
    return marks


def has_inducing_path(edges, observed, i, j, above, selected):
    """Return whether a path has only colliders above its ends, and hidden non-colliders."""
    arrows = set(edges)
    stack = [(i, (i,))]
    while stack:
        node, path = stack.pop()
        for a, b in edges:
            if node not in (a, b):
                continue
            other = b if node == a else a
            if other in path:
                continue
            if len(path) > 1:
                before = path[-2]
                collider = (before, node) in arrows and (other, node) in arrows
                hidden = node >= observed and node not in selected
                if not (node in above if collider else hidden):
                    continue
            if other == j:
                return True
            stack.append((other, (*path, other)))
    return False


def m_separated(marks, i, j, given):
    """Return whether a mixed graph separates two nodes, by its augmented graph."""
    n = len(marks)
    keep, new = set(), {i, j, *given}
    while new:
        keep |= new
        # anterior: v -> k or v - k, that is a tail at v
        new = {v for k in new for v in range(n) if marks[k, v] == TAIL} - keep
    linked = {v: {w for w in keep if marks[v, w]} for v in keep}
    district_of = {}
    for v in keep:
        if v in district_of:
            continue
        district, new = set(), {v}
        while new:
            district |= new
            new = {w for u in new for w in keep if marks[u, w] == marks[w, u] == ARROW} - district
        district_of.update(dict.fromkeys(district, v))
        parents = {
            w for u in district for w in keep if marks[w, u] == ARROW and marks[u, w] == TAIL
        }
        for u, w in combinations(district | parents, 2):
            linked[u].add(w)
            linked[w].add(u)
    reached, new = set(), {i}
    while new:
        reached |= new
        new = {w for u in new for w in linked[u] if w not in given} - reached
    return j not in reached


def statements(marks):
    """Return ``(i, j, given)`` for all pairs without an edge: whether the graph separates them."""
    n = len(marks)
    return {
        (i, j, s): m_separated(marks, i, j, s)
        for i, j in combinations(range(n), 2)
        if not marks[i, j]
        for s in powerset(set(range(n)) - {i, j})
    }


def is_ancestral(marks):
    """Return whether no arrowhead points at a cause, nor at the end of an undirected edge."""
    n = len(marks)
    directed = (marks == ARROW) & (marks.T == TAIL)
    reach = directed.copy()
    for _ in range(n):
        reach |= (reach.astype(int) @ directed.astype(int)) > 0
    if (np.diagonal(reach)).any() or (reach & (marks.T == ARROW)).any():
        return False
    undirected = ((marks == TAIL) & (marks.T == TAIL)).any(0)
    return not (undirected & (marks == ARROW).any(0)).any()


def true_pag(mag, *, selection=False, places=None):
    """Return the marks that all graphs with the independences of a MAG share; circles elsewhere.

    With ``places``, only graphs count in which no node causes one with a smaller place.
    """
    pairs = [(i, j) for i, j in combinations(range(len(mag)), 2) if mag[i, j]]
    kinds = [(TAIL, ARROW), (ARROW, TAIL), (ARROW, ARROW)] + [(TAIL, TAIL)] * selection
    options = [
        [k for k in kinds if places is None or not is_backward(k, places[i], places[j])]
        for i, j in pairs
    ]
    # where the mark at b on the edge of a and b is: number of the pair, and its end
    place = {(a, b): (k, e) for k, p in enumerate(pairs) for e, (b, a) in enumerate((p, p[::-1]))}
    triples = [
        (*place[a, b], *place[c, b], mag[a, b] == mag[c, b] == ARROW)
        for a, b in place
        for c in range(a)
        if (c, b) in place and not mag[a, c]
    ]
    wanted = statements(mag)
    common = [[mag[j, i], mag[i, j]] for i, j in pairs]
    for choice in product(*options):
        # a graph that agrees would change nothing
        news = [
            (k, e)
            for k, ends in enumerate(common)
            for e in (0, 1)
            if ends[e] not in (CIRCLE, choice[k][e])
        ]
        # equal unshielded colliders are necessary, and quick to compare
        if not news or any(
            (choice[k][e] == choice[o][f] == ARROW) != collider for k, e, o, f, collider in triples
        ):
            continue
        marks = to_marks(len(mag), pairs, choice)
        if is_ancestral(marks) and all(
            m_separated(marks, *key) == value for key, value in wanted.items()
        ):
            for k, e in news:
                common[k][e] = CIRCLE
            if all(end == CIRCLE for ends in common for end in ends):
                break
    return to_marks(len(mag), pairs, common)


def to_marks(n, pairs, ends):
    """Return the matrix for the marks at the two ends of each pair."""
    marks = np.zeros((n, n), dtype=int)
    for (i, j), (at_i, at_j) in zip(pairs, ends, strict=True):
        marks[j, i], marks[i, j] = at_i, at_j
    return marks


def is_backward(kind, first, second):
    """Return whether an edge says that a later node causes an earlier one."""
    at_first, at_second = kind
    return (first > second and at_second == ARROW and at_first == TAIL) or (
        second > first and at_first == ARROW and at_second == TAIL
    )


def recursive_correlation(corr, i, j, given=()):
    """Return one partial correlation by the recursion: readable, slow, without safeguards."""
    part = np.asarray(corr, dtype=np.float64)[np.ix_([i, j, *given], [i, j, *given])]
    while len(part) > 2:
        last, rest = part[-1, :-1], part[:-1, :-1]
        scale = np.sqrt(1 - last**2)
        part = (rest - np.outer(last, last)) / np.outer(scale, scale)
    return float(part[0, 1])


def is_connected(tree, nodes):
    """Return whether paths of a tree that use only these nodes reach all of them."""
    chosen = set(nodes)
    inner = [set(tree.path(k)[1:-1]) for k in range(len(tree.entries))]
    return all(
        any(e.node == node and path <= chosen for e, path in zip(tree.entries, inner, strict=True))
        for node in chosen
    )


def connected_subsets(tree, size):
    """Return the sets of ``size`` nodes that a tree connects, sorted."""
    others = sorted(set(tree.distances) - {tree.root})
    return [s for s in combinations(others, size) if is_connected(tree, s)]
