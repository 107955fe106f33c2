"""ListOps: nested lists of digits under MIN, MAX, MED and SM; the value is the class.

The task is due to Nangia and Bowman 2018; the settings of Long Range Arena (Tay et al. 2021) ask
for expressions of 500 to 2,000 tokens, nested at most ten deep with at most ten arguments. A node
above the greatest depth is an operator with probability 1/4, otherwise a digit; an operator has two
to ten arguments, all counts, operators and digits being equally likely. Expressions outside the
lengths asked for are drawn again.

Every expression has a generator of its own, seeded by (seed, split, index): what comes out depends
neither on the number of processes nor on how many expressions are asked for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import numpy as np

from primal_attention.datasets.longrange.sequences import TokenSequences, in_processes
from primal_attention.support.command import UserError, user_errors
from primal_attention.support.files import read_lines

__all__ = [
    "LISTOPS_TOKENS",
    "ListOpsConfig",
    "encode_expression",
    "encode_line",
    "evaluate_expression",
    "generate_listops",
    "read_listops",
]

LISTOPS_TOKENS = ("<pad>", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
"""The vocabulary; a token's id is its place here."""

_OPERATORS = LISTOPS_TOKENS[11:15]
_IDS = {token: index for index, token in enumerate(LISTOPS_TOKENS) if index}
_OPERATOR_PROBABILITY = 0.25
_TRIES = 1_000_000
"""Draws before an expression is given up; with the published settings one in twelve is taken."""


@dataclass(frozen=True)
class ListOpsConfig:
    """Which expressions to draw; the defaults are those of Long Range Arena."""

    min_length: int = 500
    """Tokens of the shortest expression."""
    max_length: int = 2000
    """Tokens of the longest expression."""
    max_depth: int = 10
    """Levels of nesting, the digits being the last."""
    max_args: int = 10
    """Arguments of an operator, at most; two at least."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_length <= self.max_length:
            raise ValueError(
                f"Lengths must satisfy 1 <= min_length <= max_length, got {self.min_length} and "
                f"{self.max_length}."
            )
        if self.max_args < 2 or self.max_depth < 1:
            raise ValueError(
                f"max_args must be at least 2 and max_depth at least 1, got {self.max_args} and "
                f"{self.max_depth}."
            )
        # the fullest tree: every level but the last one operators
        longest = 1
        for _ in range(self.max_depth - 1):
            longest = 2 + self.max_args * longest
        if self.min_length > longest:
            raise ValueError(
                f"No expression of depth {self.max_depth} with {self.max_args} arguments has "
                f"{self.min_length} tokens, at most {longest}; allow more depth or arguments."
            )


def generate_listops(
    count: int,
    *,
    split: str = "train",
    seed: int = 0,
    config: ListOpsConfig | None = None,
    workers: int = 1,
) -> TokenSequences:
    """Return expressions with their values; the same whatever the number of processes.

    Args:
        count: How many. Long Range Arena has 96,000 to train, 2,000 to select and 2,000 to test.
        split: A word; different words give different expressions.
        seed: Seed of all splits.
        config: Lengths, depth and arguments.
        workers: Processes that share the work.

    Example:
        >>> data = generate_listops(2, config=ListOpsConfig(min_length=4, max_length=12))
        >>> " ".join(LISTOPS_TOKENS[i] for i in data.row(1))
        '[MED 0 6 7 8 ]'
        >>> int(data.labels[1])
        6
    """
    draw = partial(_draw, f"{seed}/{split}", config or ListOpsConfig())
    rows = in_processes(draw, count, workers)
    ids = (np.frombuffer(row, np.uint8) for row, _ in rows)
    return TokenSequences.pack(ids, (label for _, label in rows))


def _draw(key: str, config: ListOpsConfig, index: int) -> tuple[bytes, int]:
    # of Random, only random() is promised to stay the same in later versions of Python
    uniform = Random(f"listops/{key}/{index}").random
    for _ in range(_TRIES):
        tokens = _expression(uniform, config)
        if config.min_length <= len(tokens) <= config.max_length:
            return bytes(_IDS[token] for token in tokens), evaluate_expression(tokens)
    raise ValueError(
        f"None of {_TRIES:,} expressions had {config.min_length} to {config.max_length} tokens; "
        "allow other lengths. There is none of two or three."
    )


def _expression(uniform: Callable[[], float], config: ListOpsConfig) -> list[str]:
    """Return one expression, or as much of it as shows that it is too long."""
    tokens: list[str] = []
    missing: list[int] = []  # arguments that each open operator still waits for
    while len(tokens) <= config.max_length:
        if len(missing) + 1 < config.max_depth and uniform() < _OPERATOR_PROBABILITY:
            tokens.append(_OPERATORS[int(uniform() * len(_OPERATORS))])
            missing.append(2 + int(uniform() * (config.max_args - 1)))
            continue
        tokens.append(str(int(uniform() * 10)))
        while missing:
            missing[-1] -= 1
            if missing[-1]:
                break
            missing.pop()
            tokens.append("]")
        if not missing:
            break
    return tokens


def evaluate_expression(tokens: Sequence[str]) -> int:
    """Return the value of an expression, 0 to 9.

    ``MED`` is the median, rounded down; ``SM`` the sum modulo ten.

    Example:
        >>> evaluate_expression("[MAX 2 [MED 1 4 8 9 ] ]".split())
        6
    """
    stack: list[list[int]] = [[]]
    operators: list[str] = []
    for token in tokens:
        if token in _APPLY:
            operators.append(token)
            stack.append([])
        elif token == "]" and operators and stack[-1]:
            value = _APPLY[operators.pop()](stack.pop())
            stack[-1].append(value)
        elif len(token) == 1 and token.isdecimal():
            stack[-1].append(int(token))
        else:
            raise ValueError(f"{token!r} does not belong here; tokens are {LISTOPS_TOKENS[1:]}.")
    if operators or len(stack[0]) != 1:
        raise ValueError(
            f"The expression must be one digit or one closed list, got {len(stack[0])} values and "
            f"{len(operators)} open lists."
        )
    return stack[0][0]


def _median(values: list[int]) -> int:
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) // 2


_APPLY: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": _median,
    "[SM": lambda values: sum(values) % 10,
}


def encode_expression(expression: str) -> list[int]:
    """Return the ids of an expression; the round brackets of a binary parse are dropped.

    Example:
        >>> encode_expression("( ( ( [MAX 2 ) 3 ) ] )")
        [12, 3, 4, 15]
    """
    try:
        return [_IDS[token] for token in expression.split() if token not in "()"]
    except KeyError as error:
        raise ValueError(
            f"Unknown token {error.args[0][:60]!r} in {expression[:60]!r}; tokens are "
            f"{' '.join(LISTOPS_TOKENS[1:])}."
        ) from None


def read_listops(path: Path) -> TokenSequences:
    """Read a ``.tsv`` or ``.tsv.gz`` of the original release or of Long Range Arena.

    The original has ``label<TAB>expression``; Long Range Arena has ``expression<TAB>label`` under a
    header ``Source<TAB>Target``. Labels are taken from the file.
    """
    path = Path(path)
    lines = read_lines(path)
    has_header = bool(lines) and lines[0].split("\t") == ["Source", "Target"]
    rows, labels = [], []
    for number, line in enumerate(lines[has_header:], 1 + has_header):
        parts = line.split("\t")
        expression, label = parts if len(parts) == 2 else ("", "")
        if not has_header:
            expression, label = label, expression
        if label not in tuple("0123456789") or not expression:
            raise UserError(
                f"{path}, line {number}: expected an expression and a digit separated by a tab, "
                f"got {line[:60]!r}."
            )
        rows.append(encode_line(expression, f"{path}, line {number}"))
        labels.append(int(label))
    return TokenSequences.pack(rows, labels)


def encode_line(expression: str, where: str) -> list[int]:
    """Return the ids of an expression in a file.

    Raises:
        UserError: If it is none, or has unknown words.
    """
    with user_errors(where):
        ids = encode_expression(expression)
    if not ids:
        raise UserError(f"{where} has no expression; remove the line, or write one.")
    return ids
