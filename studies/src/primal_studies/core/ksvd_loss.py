"""``primal bench ksvd-loss``: what the published KSVD loss learns.

Four small experiments behind the page on theory. *descent*: Adam minimises one loss and nothing
else, on heads whose singular vectors are known. *sequences*: one layer trains its regulariser on
many sequences. *mixing*: what an output depends on. *spectrum*: layers before any training.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import Files, rows_table

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LOSSES", "LossOptions", "LossStudy", "descend", "first_share", "mixing", "trained"]

LOSSES = ("J², the published loss", "KKT residual", "KKT residual + 0.1 orthogonality")
HEADS, TOKENS, WIDTH, RANK = 4, 40, 8, 3


@dataclass(frozen=True)
class LossOptions:
    """Four small experiments on the published KSVD loss."""

    steps: int = 3000
    """Steps of the descent."""
    layer_steps: int = 400
    """Training steps of the layer on many sequences."""

    def __post_init__(self) -> None:
        at_least_one(self, "steps", "layer_steps")


class LossStudy(Study[LossOptions]):
    """One cell a line of each table."""

    name = "ksvd-loss"
    Options = LossOptions

    def cells(self, options: LossOptions) -> Sequence[Cell]:
        """Return the cells, table by table."""
        kinds, both = ("static", "data", "dual"), (False, True)
        cells: list[Cell] = [
            {"table": "descent", "loss": loss, "steps": options.steps} for loss in LOSSES
        ]
        cells += [
            {"table": "sequences", "weights": w, "regulariser": r, "steps": options.layer_steps}
            for w in ("data", "dual")
            for r in ("ksvd", "kkt")
        ]
        cells += [{"table": "mixing", "weights": w, "causal": c} for w in kinds for c in both]
        cells += [
            {"table": "spectrum", "correlation": share, "centred": centred}
            for share in (0.5, 0.0)
            for centred in both
        ]
        return cells

    def run(self, cell: Cell, options: LossOptions, scratch: Path) -> Row:
        """Run one experiment."""
        if cell["table"] == "descent":
            return descend(cell["loss"], cell["steps"])
        if cell["table"] == "sequences":
            return trained(cell["weights"], cell["regulariser"], cell["steps"])
        if cell["table"] == "mixing":
            return mixing(cell["weights"], cell["causal"])
        return first_share(cell["correlation"], cell["centred"])

    def tables(self, rows: Sequence[Row], options: LossOptions) -> Mapping[str, str | bytes]:
        """Return the four tables."""
        files: Files = {}
        for name, (caption, columns) in _TABLES.items():
            mine = [_shown(row) for row in rows if row["table"] == name]
            if mine:
                files[f"{name}.md"] = page(caption, rows_table(mine, columns))
        spectra = [row for row in rows if row["table"] == "spectrum"]
        if spectra:
            files["spectrum.png"] = _picture(spectra)
        return files


def _picture(spectra: Sequence[Row]) -> bytes:
    from primal_attention.report import plot_dots, to_png

    values = {
        f"correlation {r['correlation']:g}, {'' if r['centred'] else 'not '}centred": {
            kind: r[kind] for kind in ("primal", "softmax", "cosine")
        }
        for r in spectra
    }
    return to_png(plot_dots(values, xlabel="share of the first singular value, untrained layers"))


_TABLES = {
    "descent": (
        "Adam minimises one loss and nothing else: four heads, three directions each. *Cosine* is "
        "that of a score column with the nearest singular vector, *distinct* how many different "
        "singular vectors each head found.",
        ["loss", "largest abs J", "KKT residual", "cosine", "distinct"],
    ),
    "sequences": (
        "One layer, many sequences: only the regulariser is trained; root mean squares on new "
        "sequences.",
        ["weights", "regulariser", "J, head mean", "J, per head", "KKT"],
    ),
    "mixing": (
        "Largest derivative of an output by other and by later tokens, and what it does when all "
        "tokens change sign; no biases.",
        ["weights", "causal", "other tokens", "later tokens", "under x → -x"],
    ),
    "spectrum": (
        "Share of the first singular value in Σσ at random initialisation, 197 tokens.",
        ["tokens", "centred", "primal", "softmax", "cosine"],
    ),
}


def _shown(row: Row) -> Row:
    """Return a row as its table shows it."""
    shown = {key: ("yes" if value else "no") if value is True or value is False else value
             for key, value in row.items()}  # fmt: skip
    for key in ("KKT residual", "cosine"):
        if isinstance(row.get(key), list):
            digits = 4 if key == "KKT residual" else 3
            shown[key] = " – ".join(f"{value:.{digits}f}" for value in row[key])
    if row["table"] == "descent":
        shown["largest abs J"] = f"{row['largest abs J']:.1e}"
    elif row["table"] == "mixing":
        shown |= {key: f"{row[key]:.1e}" for key in ("other tokens", "later tokens")}
    elif row["table"] == "spectrum":
        shown |= {key: f"{row[key]:.0%}" for key in ("primal", "softmax", "cosine")}
        shown["tokens"] = "pairwise correlation ½" if row["correlation"] else "independent"
    return shown


class KnownKernel(NamedTuple):
    """Four heads, each with a kernel ``K = Φ_q Φ_kᵀ`` whose singular vectors are known."""

    gram_q: "Tensor"  # ΦᵀΦ / n, [1 h d d]
    gram_k: "Tensor"
    phi_q: "Tensor"  # [h n d]
    left: "Tensor"  # left singular vectors, [h n d]


class _Weights(NamedTuple):
    """What is optimised."""

    w_e: "Tensor"  # [h d s]
    w_r: "Tensor"
    lam: "Tensor"  # [h s]


def _known_kernel() -> KnownKernel:
    import torch

    torch.manual_seed(0)
    left, right, mix = (
        torch.linalg.qr(torch.randn(HEADS, rows, WIDTH, dtype=torch.float64)).Q
        for rows in (TOKENS, TOKENS, WIDTH)
    )
    root = (TOKENS * 0.6 ** torch.arange(WIDTH, dtype=torch.float64)).sqrt()
    phi_q, phi_k = left * root @ mix, right * root @ mix
    gram_q, gram_k = (phi.mT @ phi / TOKENS for phi in (phi_q, phi_k))
    return KnownKernel(gram_q[None], gram_k[None], phi_q, left)


def descend(loss: str, steps: int = 3000) -> Row:
    """Minimise one loss with Adam; return how close the weights are to singular vectors."""
    import torch
    from torch.nn.functional import normalize

    from primal_attention.functional import (
        kkt_residual,
        ksvd_objective,
        off_diagonality,
        parameter_trace,
        score_gram,
    )

    known = _known_kernel()

    def objective(w: _Weights) -> "Tensor":
        sides = ((known.gram_q, w.w_e), (known.gram_k, w.w_r))
        e, r = (score_gram(gram, side[None]).diagonal(dim1=-2, dim2=-1) for gram, side in sides)
        return ksvd_objective(e, r, w.lam, parameter_trace(w.w_e, w.w_r)[None])[0]

    def residual(w: _Weights) -> "Tensor":
        return kkt_residual(known.gram_q, known.gram_k, w.w_e[None], w.w_r[None], w.lam)[0]

    def orthogonality(w: _Weights) -> "Tensor":
        return off_diagonality(score_gram(known.gram_q, w.w_e[None]))[0]

    losses: tuple[Callable[[_Weights], Tensor], ...] = (
        lambda w: objective(w).square(),
        residual,
        lambda w: residual(w) + 0.1 * orthogonality(w),
    )
    torch.manual_seed(1)
    w_e, w_r = (0.3 * torch.randn(HEADS, WIDTH, RANK, dtype=torch.float64) for _ in range(2))
    w = _Weights(w_e, w_r, 1 + torch.randn(HEADS, RANK, dtype=torch.float64).abs())
    optimizer = torch.optim.Adam([t.requires_grad_() for t in w], lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        losses[LOSSES.index(loss)](w).sum().backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        columns = normalize(known.phi_q @ w.w_e, dim=1)
        cosines, nearest = (columns.mT @ known.left).abs().max(-1)
        kkt = residual(w).sqrt()
        hits = [set(n[c > 0.99].tolist()) for n, c in zip(nearest, cosines, strict=True)]
        return {
            "largest abs J": float(objective(w).abs().max()),
            "KKT residual": [float(kkt.min()), float(kkt.max())],
            "cosine": [float(cosines.min()), float(cosines.max())],
            "distinct": " ".join(str(len(hit)) for hit in hits),
        }


def trained(weights: str, regulariser: str, steps: int = 400) -> dict[str, float]:
    """Train only the regulariser of one layer on many sequences; return its state on new ones."""
    import torch

    from primal_attention import PrimalAttention

    torch.manual_seed(0)
    options: dict[str, Any] = {"weights": weights, "regularizer": regulariser}
    layer = PrimalAttention(32, 2, rank=4, **options)
    optimizer = torch.optim.Adam(layer.parameters(), lr=3e-3)
    scale = torch.linspace(2, 0.2, 32)
    for _ in range(steps):
        optimizer.zero_grad()
        layer(scale * torch.randn(8, 64, 32), return_aux=True)[1].loss.backward()
        optimizer.step()
    found = layer.diagnose(scale * torch.randn(64, 64, 32))
    squares = (found.objective.mean(1).square(), found.objective.square(), found.kkt)
    names = ("J, head mean", "J, per head", "KKT")
    return {a: round(b.mean().sqrt().item(), 3) for a, b in zip(names, squares, strict=True)}


def mixing(weights: str, is_causal: bool) -> Row:
    """Return how strongly an output depends on other tokens, and whether it is even or odd."""
    import torch

    from primal_attention import PrimalAttention

    torch.manual_seed(0)
    options: dict[str, Any] = {"weights": weights, "bias": False, "dtype": torch.float64}
    layer = PrimalAttention(8, 2, rank=3, **options)
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the static layer warns about what is shown here
        jacobian = torch.autograd.functional.jacobian(lambda x: layer(x, is_causal=is_causal), x)
        y, mirrored = layer(x, is_causal=is_causal), layer(-x, is_causal=is_causal)
    size = jacobian[0, :, :, 0].norm(dim=(1, 3))  # [outputs inputs]
    own = torch.eye(6, dtype=torch.bool)
    is_even, is_odd = ((mirrored + sign * y).norm() / y.norm() < 1e-6 for sign in (-1, 1))
    return {
        "other tokens": size[~own].max().item(),
        "later tokens": size.triu(1).max().item(),
        "under x → -x": "even" if is_even else "odd" if is_odd else "neither",
    }


def first_share(
    correlation: float, is_centred: bool, n: int = 197, d: int = 64
) -> dict[str, float]:
    """Return the share of the first singular value in their sum, for untrained attention."""
    import torch
    from torch.nn.functional import normalize

    torch.manual_seed(0)
    shared, own = torch.randn(1, d), torch.randn(n, d)
    x = math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own
    q, k = (torch.nn.Linear(d, d, bias=False)(x).detach() for _ in range(2))
    phi_q, phi_k = normalize(q, dim=-1), normalize(k, dim=-1)
    matrices = {
        "primal": phi_q @ x.T @ x @ phi_k.T,
        "softmax": (q @ k.T / math.sqrt(d)).softmax(-1),
        "cosine": phi_q @ phi_k.T,
    }
    shares = {}
    for name, a in matrices.items():
        if is_centred:
            a = a - a.mean(0)
            a = a - a.mean(1, keepdim=True)
        sigma = torch.linalg.svdvals(a)
        shares[name] = (sigma[0] / sigma.sum()).item()
    return shares
