"""What small models with each mechanism can learn: looking up by content, copying by position.

Two blocks of width 64 with four heads and learned absolute positions. Look-up: 24 tokens carry a
key and a value, the last token asks for a key. Copy: 25 tokens, the answer at each is the token
five back; without relative positions no kernel attention solves it, some of it is learned.
"""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from primal_attention.attention import SchoenbatAttention, create_attention

pytestmark = pytest.mark.slow

KEYS, VALUES, SYMBOLS, BACK = 24, 8, 10, 5
OPTIONS = {"skyformer": {"num_landmarks": 16}}  # eight queries and eight keys: every third token


class _Block(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        if name == "schoenbat-published":
            self.attention: nn.Module = SchoenbatAttention.published(64, 4)
        else:
            self.attention = create_attention(name, 64, 4, **OPTIONS.get(name, {}))
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class _Model(nn.Module):
    def __init__(self, name: str, symbols: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, 64)
        self.position = nn.Parameter(0.02 * torch.randn(25, 64))
        self.blocks = nn.Sequential(_Block(name), _Block(name))
        self.head = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, classes))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).sum(2) + self.position
        return self.head(self.blocks(x))


def _look_up(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens as pairs of symbols, and the value asked for at the last token only."""
    keys = torch.rand(batch, KEYS).argsort(1)
    values = torch.randint(VALUES, (batch, KEYS))
    asked = torch.randint(KEYS, (batch, 1))
    keys = torch.cat([keys, keys.gather(1, asked)], dim=1)
    seen = torch.cat([KEYS + values, torch.full((batch, 1), KEYS + VALUES)], dim=1)
    targets = torch.full((batch, KEYS + 1), -100)
    targets[:, -1:] = values.gather(1, asked)
    return torch.stack([keys, seen], dim=2), targets


def _copy(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(SYMBOLS, (batch, 25))
    targets = torch.full((batch, 25), -100)
    targets[:, BACK:] = tokens[:, :-BACK]
    return tokens[:, :, None], targets


def _accuracy(name: str, task, symbols: int, classes: int, steps: int) -> float:
    torch.manual_seed(0)
    model = _Model(name, symbols, classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        tokens, targets = task(64)
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    tokens, targets = task(1000)
    with torch.no_grad():
        right = model.eval()(tokens).argmax(-1) == targets
    return right[targets >= 0].float().mean().item()


each_mechanism = pytest.mark.parametrize(
    "name", ["linear", "favor", "schoenbat", "cosformer", "flow"]
)


@pytest.mark.parametrize(
    "name",
    [
        "softmax",
        "gaussian",
        "skyformer",
        "linear",
        "favor",
        "kernelized",
        "schoenbat",
        "cosformer",
        "flow",
    ],
)
def test_content_is_looked_up_among_24_tokens(name):
    assert _accuracy(name, _look_up, KEYS + VALUES + 1, VALUES, 1000) > 0.95


def test_the_published_temperature_of_schoenbat_learns_look_up_later():
    # after 1,000 steps it is at 0.97 (0.57 in spec 05 §6); the learned one needs fewer than 400
    task = (_look_up, KEYS + VALUES + 1, VALUES, 400)
    assert _accuracy("schoenbat", *task) > 0.95
    assert _accuracy("schoenbat-published", *task) < 0.7


@each_mechanism
def test_copying_by_absolute_position_is_learned_above_chance(name):
    assert _accuracy(name, _copy, SYMBOLS, SYMBOLS, 600) > 1.5 / SYMBOLS
