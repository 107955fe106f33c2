"""Small models that copy, sort and classify, with and without relative positions."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from primal_attention.attention import Core, MultiHeadAttention
from primal_attention.attention.positions import RelativePosition
from primal_attention.kernels import FeatureMap, PositiveFeatures, TrigonometricFeatures
from primal_attention.models import EncoderClassifier, EncoderConfig
from primal_attention.tasks.longrange import read_cifar10
from primal_attention.training import Columns

__all__ = [
    "HEADS",
    "HEAD_DIM",
    "TASKS",
    "RelativeCore",
    "SmallModel",
    "draw",
    "feature_attention",
    "grid_model",
    "grid_pictures",
    "share_right",
    "train",
]

SYMBOLS, TOKENS, BACK, WIDTH, HEADS = 10, 25, 5, 64, 4
HEAD_DIM = WIDTH // HEADS
IGNORED = -100
"""Label of a token that is not scored."""
SIDE, PATCH = 32, 4
GRID = SIDE // PATCH

Task = Callable[[Tensor], Tensor]
"""From tokens to the wanted symbol at each of them, or to ``IGNORED``."""


def _copy(tokens: Tensor) -> Tensor:
    return pad(tokens[:, :-BACK], (BACK, 0), value=IGNORED)


def _sort(tokens: Tensor) -> Tensor:
    return tokens.sort(dim=-1).values


TASKS: dict[str, Task] = {"copy": _copy, "sort": _sort}
"""Copy the token five positions back, where positions decide; sort, where content does."""

_MAPS: dict[str, Callable[..., FeatureMap]] = {
    "positive": partial(PositiveFeatures, directions="iid"),
    "positive, on the sphere": partial(PositiveFeatures, directions="sphere"),
    "positive, orthogonal": PositiveFeatures,
    "positive, orthogonal ±, tilted": partial(PositiveFeatures, antithetic=True, spread=2.0),
    "trigonometric": partial(TrigonometricFeatures, kernel="exponential", directions="iid"),
}


class _Block(nn.Module):
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


class SmallModel(nn.Module):
    """Embedding, absolute positions, two blocks, one score per symbol."""

    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(TOKENS, WIDTH))
        self.blocks = nn.Sequential(*(_Block(attention()) for _ in range(2)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the symbols at each token."""
        return self.head(self.blocks(self.embed(tokens) + self.position))


def train(attention: Callable[[], nn.Module], task: str, steps: int, seed: int) -> SmallModel:
    """Return a model that was trained for some steps of 64 random sequences."""
    torch.manual_seed(seed)
    model = SmallModel(attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        tokens = torch.randint(SYMBOLS, (64, TOKENS))
        loss = cross_entropy(model(tokens).flatten(0, 1), TASKS[task](tokens).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def share_right(model: nn.Module, task: str, count: int, seed: int | None = None) -> float:
    """Return the share of symbols that are right on some random sequences."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    tokens = torch.randint(SYMBOLS, (count, TOKENS), generator=generator)
    labels = TASKS[task](tokens)
    right = model(tokens).argmax(-1) == labels
    return round(right[labels != IGNORED].float().mean().item(), 3)


class RelativeCore(Core):
    """Weights ``c_{j-i} κ(q_i, k_j)``, divided by their sum: exact, or by features of ``κ``."""

    def __init__(self, features: FeatureMap, *, is_exact: bool) -> None:
        super().__init__()
        self.features, self.is_exact = features, is_exact
        self.position = RelativePosition(HEADS, window=TOKENS)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Return the weighted average of the values; no token is masked."""
        kernel = self.features.gram if self.is_exact else self.features.approximate
        index = torch.arange(q.shape[2])
        weights = self.position.weight(index - index[:, None]) * kernel(q, k)
        total = weights.sum(-1, keepdim=True)
        # features of both signs can sum to nothing
        return weights @ v / torch.where(total.abs() < 1e-6, 1e-6, total)


def draw(kind: str, size: int, is_unit: bool, seed: int) -> FeatureMap:
    """Return a map of ``exp(q̂·k̂)``, or of ``exp(q·k / √d)`` as in softmax attention."""
    return _MAPS[kind](
        HEAD_DIM,
        size,
        scale=1.0 if is_unit else HEAD_DIM**-0.5,
        normalize=is_unit,
        num_heads=HEADS,
        generator=torch.Generator().manual_seed(seed),
    )


def feature_attention(kind: str, size: int, is_unit: bool, *, is_exact: bool) -> MultiHeadAttention:
    """Return attention with relative positions over a kernel or its features."""
    features = draw(kind, size, is_unit, int(torch.randint(2**31, ()).item()))
    return MultiHeadAttention(WIDTH, HEADS, RelativeCore(features, is_exact=is_exact))


def grid_pictures(folder: Path, part: str, count: int) -> Columns:
    """Return grey CIFAR-10 as sequences of 64 patches, values from -1 to 1."""
    found = read_cifar10(folder / f"{part}_jpeg.npz", limit=count)
    pixels = torch.from_numpy(np.stack([found.row(i) for i in range(count)])).float() / 127.5 - 1
    patches = pixels.reshape(count, GRID, PATCH, GRID, PATCH).transpose(2, 3)
    return Columns(x=patches.reshape(count, GRID**2, PATCH**2), labels=torch.tensor(found.labels))


def grid_model(positions: str) -> EncoderClassifier:
    """Return the classifier; without relative positions the table of lags stays at zero."""
    grid = {"position": "grid", "width": GRID, "window": GRID - 1}
    model = EncoderClassifier(
        EncoderConfig(
            num_classes=10,
            num_features=PATCH**2,
            dim=64,
            num_heads=4,
            num_layers=2,
            hidden_dim=128,
            attention="softmax" if positions == "softmax" else "kernelized",
            attention_options={} if positions == "softmax" else grid,
            positions="learned",
            max_length=GRID**2,
        )
    )
    if positions == "no relative positions":
        for module in model.modules():
            if isinstance(module, RelativePosition):
                module.table.requires_grad_(False)
    return model
