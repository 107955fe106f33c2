"""Put a primal layer into your own model and training loop.

Sequences of 64 tokens are sorted into two classes by the sum of one feature.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import primal_attention as pa


class Classifier(nn.Module):
    """One attention layer, the mean over tokens, two scores."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 32)
        self.attention = pa.PrimalAttention(dim=32, num_heads=4, rank=8)
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of both classes."""
        x = self.embed(x)
        return self.head((x + self.attention(x)).mean(1))


torch.manual_seed(0)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(200):
    x = torch.randn(32, 64, 4)
    labels = (x[:, :, 0].sum(1) > 0).long()
    scores = model(x)
    loss = cross_entropy(scores, labels) + 0.1 * pa.ksvd_loss(model)  # the only new line
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"accuracy of the last batch: {(scores.argmax(1) == labels).float().mean():.2f}")
