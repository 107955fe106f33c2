"""Shared fixtures: every test starts from the same seeds."""

import os

import numpy as np
import pytest
import torch

# two workers on two cores: more threads only wait for each other, in child processes too
os.environ["OMP_NUM_THREADS"] = "1"
# aeon's compiled code; numba ends a forked process that uses GNU OpenMP, and some tests fork
os.environ["NUMBA_THREADING_LAYER"] = "forksafe"


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
