"""Which tokens become nodes of a causal graph, and which pieces of words belong together.

Tokens that are not chosen are marginalised, not deleted: they act as hidden causes. A node is an
average of rows of attention: one token, the pieces of a word, or, for models that pool their
tokens, the mean of all.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from primal_attention.support.command import did_you_mean

__all__ = [
    "ColumnChoice",
    "GraphNodes",
    "NodeChoice",
    "TargetChoice",
    "choose_nodes",
    "drop_list",
    "word_groups",
]

NodeChoice = Literal["auto", "all"] | int | Sequence[int | str]
"""``"auto"`` (32), ``"all"``, a number of nodes, or positions and words."""
TargetChoice = int | str | None
"""Position of a token, a word, ``"mean"`` for the mean of all tokens, or ``None``."""
ColumnChoice = Literal["auto", "first", "special"] | Sequence[int] | None
"""Columns to drop."""

BUDGET = 32
"""Nodes that ``"auto"`` chooses by attention."""
LARGEST = 64
"""Most nodes that ``"auto"`` chooses; searches with more nodes take long."""
ENOUGH = 0.01
"""Tokens with at least this attention are chosen beyond the budget."""
MEAN = "mean"
"""Name of the node that averages all tokens."""

_SPECIAL = re.compile(r"\[(CLS|SEP|MASK|PAD|UNK|BOS|EOS)\]|</?s>|<(pad|mask|unk|bos|eos)>|<\|.*\|>")


@dataclass(frozen=True)
class GraphNodes:
    """Nodes of a graph as averages of tokens, in the order of the sequence."""

    members: tuple[tuple[int, ...], ...]
    """Positions of the tokens of each node, counted without padding."""
    labels: tuple[str, ...]
    """Name of each node; names are unique."""
    num_tokens: int
    """Length of the sequence, without padding."""
    target: int | None = None
    """Number of the node to explain."""

    def __len__(self) -> int:
        return len(self.members)

    def matrix(self) -> Float[Tensor, "k n"]:
        """Return the weights that average the tokens of each node."""
        found = torch.zeros(len(self.members), self.num_tokens, dtype=torch.float64)
        for i, member in enumerate(self.members):
            found[i, list(member)] = 1 / len(member)
        return found

    def without(self, removed: set[int]) -> "GraphNodes":
        """Return the nodes without some of them, by number; the target must stay."""
        kept = [i for i in range(len(self)) if i not in removed]
        return GraphNodes(
            tuple(self.members[i] for i in kept),
            tuple(self.labels[i] for i in kept),
            self.num_tokens,
            None if self.target is None else kept.index(self.target),
        )


def is_special(token: str) -> bool:
    """Return whether a token is a mark such as ``[CLS]`` or ``</s>``.

    Example:
        >>> is_special("[CLS]"), is_special("<|endoftext|>"), is_special("<")
        (True, True, False)
    """
    return _SPECIAL.fullmatch(token) is not None


def word_groups(
    tokens: Sequence[str], special: Sequence[bool] | None = None
) -> list[tuple[int, ...]]:
    """Return the positions of the tokens of each word, from the marks of the tokenizer.

    Known marks are ``##`` for a piece that continues a word, and ``Ġ`` or ``▁`` for one that
    begins a word. Tokens without any marks are words. Special tokens stay alone.

    Args:
        tokens: Tokens as the tokenizer names them.
        special: Which tokens are special; by default those that look like ``[CLS]`` or ``<s>``.

    Example:
        >>> word_groups(["[CLS]", "un", "##believ", "##able", "story", "[SEP]"])
        [(0,), (1, 2, 3), (4,), (5,)]
        >>> word_groups(["The", "Ġunbeliev", "able", "."])
        [(0,), (1, 2), (3,)]
    """
    special = [is_special(t) for t in tokens] if special is None else special
    starts = any(t.startswith(("Ġ", "▁")) for t in tokens)

    def continues(i: int) -> bool:
        if i == 0 or special[i] or special[i - 1]:
            return False
        if not starts:
            return tokens[i].startswith("##")
        # punctuation does not belong to the word before; Ġ itself counts as a letter
        is_start = tokens[i].startswith(("Ġ", "▁"))
        return not is_start and tokens[i][:1].isalnum() and tokens[i - 1][-1:].isalnum()

    found: list[list[int]] = []
    for i in range(len(tokens)):
        if continues(i):
            found[-1].append(i)
        else:
            found.append([i])
    return [tuple(group) for group in found]


def groups_of_ids(ids: Sequence[int | None]) -> list[tuple[int, ...]]:
    """Return the positions of each word from the word numbers of a fast tokenizer.

    Example:
        >>> groups_of_ids([None, 0, 1, 1, None])
        [(0,), (1,), (2, 3), (4,)]
    """
    found: list[list[int]] = []
    for i, word in enumerate(ids):
        if i and word is not None and word == ids[i - 1]:
            found[-1].append(i)
        else:
            found.append([i])
    return [tuple(group) for group in found]


def drop_list(
    drop: ColumnChoice, n: int, special: Sequence[bool], default: ColumnChoice
) -> tuple[int, ...]:
    """Return the columns to drop as positions.

    Args:
        drop: ``"first"``, ``"special"``, positions, ``None``, or ``"auto"`` for the default.
        n: Number of tokens.
        special: Which tokens are special.
        default: What ``"auto"`` means.
    """
    drop = default if isinstance(drop, str) and drop == "auto" else drop
    if drop is None:
        return ()
    if isinstance(drop, str):
        if drop not in ("first", "special"):
            raise ValueError(
                f"drop_columns must be 'auto', 'first', 'special', positions or None, got {drop!r}."
            )
        return (0,) if drop == "first" else tuple(i for i in range(n) if special[i])
    found = tuple(sorted({_position(i, n, "drop_columns") for i in drop}))
    if len(found) == n:
        raise ValueError("drop_columns has every token; keep at least one column.")
    return found


def _position(i: object, n: int, what: str) -> int:
    if isinstance(i, bool) or not isinstance(i, int) or not -n <= i < n:
        raise ValueError(
            f"{what} has {i!r}, which is no position of a token; positions are between 0 and "
            f"{n - 1} and count without padding."
        )
    return i % n


def _find_group(
    groups: Sequence[tuple[int, ...]], labels: Sequence[str], which: int | str, what: str
) -> int:
    """Return the number of the group of a position or of a word."""
    if not isinstance(which, str):
        position = _position(which, sum(map(len, groups)), what)
        return next(g for g, group in enumerate(groups) if position in group)
    found = [g for g, label in enumerate(labels) if label == which]
    if not found:
        raise ValueError(
            f"{what} has {which!r}, which is no word of the sequence."
            f"{did_you_mean(which, labels)} Words: {', '.join(labels[:40])}."
        )
    if len(found) > 1:
        places = ", ".join(str(groups[g][0]) for g in found)
        raise ValueError(
            f"{what} has {which!r}, which occurs several times; give the position of one of its "
            f"tokens: {places}."
        )
    return found[0]


def choose_nodes(
    groups: Sequence[tuple[int, ...]],
    labels: Sequence[str],
    *,
    special: Sequence[bool],
    nodes: NodeChoice = "auto",
    target: TargetChoice = None,
    importance: Callable[[Float[Tensor, " n"] | None], Float[Tensor, " n"]],
) -> GraphNodes:
    """Return the nodes of a graph, in the order of the sequence.

    ``"auto"`` takes the 32 words with the most attention from the target, then other words with an
    attention of 0.01 or more, 64 at most. Special tokens are left out unless they are the target.

    Args:
        groups: Positions of the tokens of each word; all tokens of the sequence.
        labels: Name of each word.
        special: Which tokens are special.
        nodes: ``"auto"``, ``"all"``, a number of nodes, or positions and words.
        target: What the graph is to explain.
        importance: Returns the weight of each token for the target, which is given as weights of
            tokens; without a target, its weight for all tokens.

    Example:
        >>> groups, labels = [(0,), (1, 2), (3,)], ["a", "b", "c"]
        >>> weight = lambda target: torch.tensor([0.1, 0.1, 0.1, 0.7])
        >>> choose_nodes(groups, labels, special=[False] * 4, nodes=2, importance=weight).labels
        ('b', 'c')
    """
    n = sum(map(len, groups))
    is_mean = target == MEAN and MEAN not in labels
    goal = None if target is None or is_mean else _find_group(groups, labels, target, "target")
    if isinstance(nodes, str | int):
        common = [g for g, group in enumerate(groups) if not all(special[i] for i in group)]
        if is_mean:
            weights = torch.full((n,), 1 / n, dtype=torch.float64)
        elif goal is not None:
            weights = torch.zeros(n, dtype=torch.float64)
            weights[list(groups[goal])] = 1 / len(groups[goal])
        chosen = _most_important(
            groups,
            [g for g in common if g != goal],
            nodes,
            lambda: importance(None if target is None else weights),
        )
    else:
        chosen = {_find_group(groups, labels, i, "nodes") for i in nodes}
    if goal is not None:
        chosen.add(goal)
    kept = sorted(chosen)
    members, names = [groups[g] for g in kept], _unique([labels[g] for g in kept])
    if is_mean:
        members.append(tuple(range(n)))
        names.append(MEAN)
    place = len(members) - 1 if is_mean else None if goal is None else kept.index(goal)
    if len(members) < 2:
        raise ValueError(
            f"A graph needs at least two nodes, got {len(members)}; give a longer sequence or "
            "more nodes."
        )
    return GraphNodes(tuple(members), tuple(names), n, place)


def _most_important(
    groups: Sequence[tuple[int, ...]],
    candidates: list[int],
    nodes: int | str,
    importance: Callable[[], Tensor],
) -> set[int]:
    if isinstance(nodes, str) and nodes not in ("auto", "all"):
        raise ValueError(
            f"nodes must be 'auto', 'all', a number, or a list of positions and words, got "
            f"{nodes!r}."
        )
    if isinstance(nodes, int) and nodes < 2:
        raise ValueError(f"nodes must be at least 2, got {nodes}.")
    budget = BUDGET if nodes == "auto" else len(candidates) if nodes == "all" else int(nodes)
    if len(candidates) <= budget:
        return set(candidates)
    found = importance()
    weight = {g: float(found[list(groups[g])].sum()) for g in candidates}
    # equal weights: the earlier word first
    ranked = sorted(candidates, key=lambda g: (-weight[g], g))
    chosen = ranked[:budget]
    if nodes == "auto":
        chosen += [g for g in ranked[budget:LARGEST] if weight[g] >= ENOUGH]
    return set(chosen)


def _unique(labels: Sequence[str]) -> list[str]:
    """Return labels with numbers where one occurs again.

    Example:
        >>> _unique(["the", "cat", "the"])
        ['the', 'cat', 'the_2']
    """
    found: list[str] = []
    for label in labels:
        name, number = label, 1
        while name in found:
            number += 1
            name = f"{label}_{number}"
        found.append(name)
    return found
