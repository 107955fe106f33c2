"""Shared fixtures: every test starts from the same seeds."""

import os

import numpy as np
import pytest
import torch

# two workers on two cores: more threads only wait for each other, in child processes too
os.environ["OMP_NUM_THREADS"] = "1"

# torchvision from the package index does not load beside a CPU torch for want of two operators, and
# takes timm and parts of transformers with it; the reference keeps the definitions alive
TORCHVISION = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    TORCHVISION.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    np.random.seed(0)


@pytest.fixture(autouse=True, scope="session")
def _one_thread_each() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _poison_fresh_memory() -> None:
    # reading memory nobody wrote must show: torch.empty then starts as NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
