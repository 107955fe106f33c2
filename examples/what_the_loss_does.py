"""Show in numbers what the published KSVD loss does, and what it does not do.

Four small experiments behind ``docs/theory.md``; half a minute on one core.

    python examples/what_the_loss_does.py
"""

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from primal_attention import PrimalAttention
from primal_attention.functional import (
    kkt_residual,
    ksvd_objective,
    off_diagonality,
    parameter_trace,
    score_gram,
)

PROBLEMS, TOKENS, WIDTH, RANK = 4, 40, 8, 3


class Problem(NamedTuple):
    """Four heads, each with a kernel ``K = Φ_q Φ_kᵀ`` whose singular vectors are known."""

    gram_q: Tensor  # ΦᵀΦ / n, [1 h d d]
    gram_k: Tensor
    phi_q: Tensor  # [h n d]
    left: Tensor  # left singular vectors, [h n d]


class Weights(NamedTuple):
    """What is optimised."""

    w_e: Tensor  # [h d s]
    w_r: Tensor
    lam: Tensor  # [h s]


class Found(NamedTuple):
    """How close the weights of every head are to a singular value decomposition."""

    objective: Tensor  # |J|, [h]
    residual: Tensor  # relative KKT residual, [h]
    cosines: Tensor  # of each score column with the nearest singular vector, [h s]
    distinct: list[int]  # how many different singular vectors were found, per head


def orthonormal(rows: int, columns: int) -> Tensor:
    return torch.linalg.qr(torch.randn(PROBLEMS, rows, columns, dtype=torch.float64)).Q


def problem() -> Problem:
    torch.manual_seed(0)
    left, right, mix = (orthonormal(rows, WIDTH) for rows in (TOKENS, TOKENS, WIDTH))
    root = (TOKENS * 0.6 ** torch.arange(WIDTH, dtype=torch.float64)).sqrt()
    phi_q, phi_k = left * root @ mix, right * root @ mix
    gram_q, gram_k = (phi.mT @ phi / TOKENS for phi in (phi_q, phi_k))
    return Problem(gram_q[None], gram_k[None], phi_q, left)


def published(p: Problem, w: Weights) -> Tensor:
    """Return ``J`` of every head."""
    sides = ((p.gram_q, w.w_e), (p.gram_k, w.w_r))
    moments = (score_gram(gram, side[None]).diagonal(dim1=-2, dim2=-1) for gram, side in sides)
    return ksvd_objective(*moments, w.lam, parameter_trace(w.w_e, w.w_r)[None])[0]


def residual(p: Problem, w: Weights) -> Tensor:
    """Return the relative KKT residual of every head, squared."""
    return kkt_residual(p.gram_q, p.gram_k, w.w_e[None], w.w_r[None], w.lam)[0]


def orthogonality(p: Problem, w: Weights) -> Tensor:
    """Return the sum of squared cosines between the score columns of every head."""
    return off_diagonality(score_gram(p.gram_q, w.w_e[None]))[0]


LOSSES: dict[str, Callable[[Problem, Weights], Tensor]] = {
    "J², the published loss": lambda p, w: published(p, w).square(),
    "KKT residual": residual,
    "KKT residual + 0.1 orthogonality": lambda p, w: residual(p, w) + 0.1 * orthogonality(p, w),
}


def minimise(p: Problem, loss: Callable[[Problem, Weights], Tensor], steps: int = 3000) -> Weights:
    """Return the weights after Adam has minimised ``loss`` and nothing else."""
    torch.manual_seed(1)
    w_e, w_r = (0.3 * torch.randn(PROBLEMS, WIDTH, RANK, dtype=torch.float64) for _ in range(2))
    w = Weights(w_e, w_r, 1 + torch.randn(PROBLEMS, RANK, dtype=torch.float64).abs())
    optimizer = torch.optim.Adam([t.requires_grad_() for t in w], lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(p, w).sum().backward()
        optimizer.step()
        schedule.step()
    return Weights(*(t.detach() for t in w))


def judge(p: Problem, w: Weights) -> Found:
    columns = normalize(p.phi_q @ w.w_e, dim=1)
    cosines, nearest = (columns.mT @ p.left).abs().max(-1)
    hits = [set(n[c > 0.99].tolist()) for n, c in zip(nearest, cosines, strict=True)]
    objective, kkt = published(p, w).abs(), residual(p, w).sqrt()
    return Found(objective, kkt, cosines, [len(hit) for hit in hits])


class Mixing(NamedTuple):
    """How strongly an output depends on tokens, and what it does when all tokens change sign."""

    others: float
    future: float
    even: float
    odd: float


def mixing(weights: str, is_causal: bool) -> Mixing:
    torch.manual_seed(0)
    layer = PrimalAttention(8, 2, rank=3, weights=weights, bias=False, dtype=torch.float64)
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the static layer warns about what is shown here
        jacobian = torch.autograd.functional.jacobian(lambda x: layer(x, is_causal=is_causal), x)
        y, mirrored = layer(x, is_causal=is_causal), layer(-x, is_causal=is_causal)
    size = jacobian[0, :, :, 0].norm(dim=(1, 3))  # [outputs inputs]
    own = torch.eye(6, dtype=torch.bool)
    return Mixing(
        size[~own].max().item(),
        size.triu(1).max().item(),
        ((mirrored - y).norm() / y.norm()).item(),
        ((mirrored + y).norm() / y.norm()).item(),
    )


class Amortised(NamedTuple):
    """Root mean squares over new sequences, after training on others."""

    head_mean: float
    per_head: float
    residual: float


def amortised(weights: str, regularizer: str, steps: int = 400) -> Amortised:
    """Train the regulariser of one layer over many sequences, and nothing else."""
    torch.manual_seed(0)
    layer = PrimalAttention(32, 2, rank=4, weights=weights, regularizer=regularizer)
    optimizer = torch.optim.Adam(layer.parameters(), lr=3e-3)
    scale = torch.linspace(2, 0.2, 32)
    for _ in range(steps):
        optimizer.zero_grad()
        layer(scale * torch.randn(8, 64, 32), return_aux=True)[1].loss.backward()
        optimizer.step()
    found = layer.diagnose(scale * torch.randn(64, 64, 32))
    squares = (found.objective.mean(1).square(), found.objective.square(), found.kkt)
    return Amortised(*(square.mean().sqrt().item() for square in squares))


def first_share(correlation: float, centred: bool, n: int = 197, d: int = 64) -> list[float]:
    """Return what the first singular value holds of the sum, untrained: primal, softmax, cosine."""
    torch.manual_seed(0)
    shared, own = torch.randn(1, d), torch.randn(n, d)
    x = math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own
    q, k = (torch.nn.Linear(d, d, bias=False)(x).detach() for _ in range(2))
    phi_q, phi_k = normalize(q, dim=-1), normalize(k, dim=-1)
    matrices = [
        phi_q @ x.T @ x @ phi_k.T,
        (q @ k.T / math.sqrt(d)).softmax(-1),
        phi_q @ phi_k.T,
    ]
    if centred:
        matrices = [a - a.mean(0) - (a - a.mean(0)).mean(1, keepdim=True) for a in matrices]
    sigma = [torch.linalg.svdvals(a) for a in matrices]
    return [(s[0] / s.sum()).item() for s in sigma]


def main() -> None:
    print("1. Adam minimises one loss and nothing else: four heads, three directions each.")
    print(f"   {'loss':34}{'largest |J|':>12}{'KKT residual':>18}{'cosine':>16}   distinct")
    p = problem()
    for name, loss in LOSSES.items():
        found = judge(p, minimise(p, loss))
        print(
            f"   {name:34}{found.objective.max():12.1e}"
            f"{f'{found.residual.min():.4f} – {found.residual.max():.4f}':>18}"
            f"{f'{found.cosines.min():.3f} – {found.cosines.max():.3f}':>16}"
            f"   {' '.join(map(str, found.distinct))}"
        )
    print("\n2. One layer, many sequences: the regulariser alone is trained, new sequences judge.")
    print(f"   {'weights':10}{'regulariser':14}{'J, head mean':>14}{'J, per head':>14}{'KKT':>8}")
    for weights in ("data", "dual"):
        for regularizer in ("ksvd", "kkt"):
            row = amortised(weights, regularizer)
            print(
                f"   {weights:10}{regularizer:14}{row.head_mean:14.3f}{row.per_head:14.3f}"
                f"{row.residual:8.2f}"
            )
    print("\n3. What an output depends on, largest derivative; and y(-X) beside y(X), no biases.")
    print(f"   {'weights':10}{'causal':8}{'other tokens':>14}{'later tokens':>14}   under x → -x")
    for weights, is_causal in (
        ("static", False),
        ("static", True),
        ("data", False),
        ("data", True),
        ("dual", False),
        ("dual", True),
    ):
        row = mixing(weights, is_causal)
        parity = "even" if row.even < 1e-6 else "odd" if row.odd < 1e-6 else "neither"
        causal = "yes" if is_causal else "no"
        print(f"   {weights:10}{causal:8}{row.others:14.1e}{row.future:14.1e}   {parity}")
    print("\n4. Share of the first singular value in Σσ at random initialisation, 197 tokens.")
    print(f"   {'tokens':24}{'centred':9}{'primal':>9}{'softmax':>9}{'cosine':>9}")
    for correlation, name in ((0.5, "pairwise correlation ½"), (0.0, "independent")):
        for centred in (False, True):
            shares = "".join(f"{share:9.0%}" for share in first_share(correlation, centred))
            print(f"   {name:24}{'yes' if centred else 'no':9}{shares}")


if __name__ == "__main__":
    main()
