"""Copy the token five positions back: what relative positions give to kernel and primal attention.

    python examples/relative_copy.py

Two blocks of width 64 with four heads and learned absolute positions, 25 tokens of 10 symbols, 600
steps of 64 sequences. Prints the accuracy of each mechanism over three seeds, and writes it to
``outputs/relative_copy.csv``. About ten minutes on one core.
"""

import csv
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

import primal_attention as pa

SYMBOLS, TOKENS, BACK, WIDTH, HEADS = 10, 25, 5, 64, 4
NAMES = ("softmax", "linear", "favor", "primal-dual", "kernelized", "primal-relative")
UNCOUNTED = -100

Task = Callable[[Tensor], Tensor]
"""From tokens to the symbol asked for at each of them, or to ``UNCOUNTED``."""


def copy(tokens: Tensor) -> Tensor:
    """Return the token ``BACK`` positions back."""
    return pad(tokens[:, :-BACK], (BACK, 0), value=UNCOUNTED)


class Block(nn.Module):
    """Attention and a small network, each on normalised input and added."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens after one block."""
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """Embedding, absolute positions, two blocks, one score per symbol."""

    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(TOKENS, WIDTH))
        self.blocks = nn.Sequential(*(Block(attention()) for _ in range(2)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the symbols at each token."""
        return self.head(self.blocks(self.embed(tokens) + self.position))


def train(attention: Callable[[], nn.Module], task: Task, steps: int, seed: int) -> Model:
    """Return a model that was trained for some steps of 64 random sequences."""
    torch.manual_seed(seed)
    model = Model(attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        tokens = torch.randint(SYMBOLS, (64, TOKENS))
        loss = cross_entropy(model(tokens).flatten(0, 1), task(tokens).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def share_right(model: nn.Module, task: Task, tokens: Tensor) -> float:
    """Return the share of symbols that are right, of those that count."""
    labels = task(tokens)
    right = model(tokens).argmax(-1) == labels
    return right[labels != UNCOUNTED].float().mean().item()


def accuracy(name: str, steps: int, seed: int) -> float:
    """Return how well an attention of the registry learns to copy."""
    options = {"regularizer": None} if name == "primal-dual" else {}
    attention = partial(pa.create_attention, name, WIDTH, HEADS, **options)
    model = train(attention, copy, steps, seed)
    return share_right(model, copy, torch.randint(SYMBOLS, (1000, TOKENS)))


def main(steps: int = 600, seeds: int = 3) -> None:
    rows = []
    print(f"copy the token {BACK} back, {steps} steps, {seeds} seeds; chance is {1 / SYMBOLS:.2f}")
    for name in NAMES:
        found = [accuracy(name, steps, seed) for seed in range(seeds)]
        rows.append([name, *(f"{a:.3f}" for a in found), f"{mean(found):.3f}"])
        print("  ".join([f"{name:16}", *rows[-1][1:]]), flush=True)
    path = Path("outputs/relative_copy.csv")
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["attention", *(f"seed {i}" for i in range(seeds)), "mean"])
        writer.writerows(rows)
    print(f"written to {path}")


if __name__ == "__main__":
    main(*(int(a) for a in sys.argv[1:]))
