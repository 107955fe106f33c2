"""A small table and model that several tests use."""

from typing import Any

import numpy as np
import torch

from primal_attention.tasks.tables import NPTConfig, NPTModel

KKT = {"regularizer": "kkt"}
ROW_ATTENTIONS: dict[str, dict[str, Any]] = {
    "softmax": {"attention": "softmax"},
    "primal": {"attention": "primal-dual", "attention_options": KKT},
    "sparse": {
        "attention": "primal-sparse",
        "primal_layers": "last:1",
        "other_attention": "primal-dual",
        "other_options": KKT,
    },
    "none": {"has_rows": False},
}
"""Kinds of row attention, as fields of ``NPTOptions``."""
CATEGORIES = (0, 0, 3, 0)
"""Two numbers, a category and a target of numbers."""


def table(rows: int = 24, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return encoded rows with holes in the features."""
    rng = np.random.default_rng(seed)
    values = torch.from_numpy(rng.normal(size=(rows, 4))).float()
    values[:, 2] = torch.from_numpy(rng.integers(0, 3, rows)).float()
    missing = torch.from_numpy(rng.random((rows, 4)) < 0.15)
    missing[:, 3] = False
    return values, missing


def model(row_attention: str = "softmax", rows: int = 24, **options: Any) -> NPTModel:
    """Return an untrained model whose context is :func:`table`, without dropout."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"dropout": 0.0, "dim": 8, "num_heads": 2, "row_dim": 16}
    settings = {**ROW_ATTENTIONS[row_attention], **sizes, **options}
    config = NPTConfig(categories=CATEGORIES, context_rows=rows, **settings)
    found = NPTModel(config).eval()
    found.embedding.start_from([(-1.0, 0.0, 1.0), (-1.0, 1.0), (), (-1.0, 0.5)])
    found.set_context(*table(rows))
    return found
