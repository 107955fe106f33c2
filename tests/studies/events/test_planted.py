"""What is planted in a process is learned from its samples."""

import numpy as np
import pytest
import torch

from primal_attention.datasets import GapMarks, HawkesProcess, PeriodicMarks, PoissonProcess
from primal_attention.kernels import BochnerTime, TimeKernel
from primal_attention.tasks.events import EventPredictor
from primal_attention.tasks.study import run_study
from primal_studies.events.planted import (
    Pairs,
    Planted,
    fit_kernel,
    follow_ups,
    learn_decay,
    learn_period,
    same_types,
)


@pytest.mark.parametrize(
    "period", [7.0, *(pytest.param(p, marks=pytest.mark.slow) for p in (3.0, 5.0, 11.0))]
)
def test_mercer_recovers_a_planted_period_within_two_per_cent(period):
    found, features = learn_period(PeriodicMarks(period=period).sample(100, 20, seed=1))
    assert found == pytest.approx(period, rel=0.02)
    # and the kernel is the probability that two types agree
    gaps = torch.linspace(0, 2 * period, 50, dtype=torch.float64)
    truth = PeriodicMarks(period=period).same_type(gaps.numpy())
    with torch.no_grad():
        np.testing.assert_allclose(TimeKernel(features).psi(gaps), truth, atol=0.03)


@pytest.mark.parametrize(
    "decay", [1.0, *(pytest.param(d, marks=pytest.mark.slow) for d in (0.5, 3.0))]
)
def test_bochner_normal_recovers_a_planted_decay_within_ten_per_cent(decay):
    found, features = learn_decay(GapMarks(decay=decay).sample(200, 20, seed=1))
    assert found == pytest.approx(decay, rel=0.1)
    gaps = torch.linspace(0, 3 / decay, 50, dtype=torch.float64)
    truth = GapMarks(decay=decay).follow_up(gaps.numpy())
    with torch.no_grad():
        np.testing.assert_allclose(TimeKernel(features).psi(gaps), truth, atol=0.05)


def test_without_a_period_the_kernel_is_flat():
    events = PeriodicMarks(period=7.0, swing=0.0).sample(100, 20)
    _, features = learn_period(events)
    with torch.no_grad():
        values = TimeKernel(features).psi(torch.linspace(0, 10, 50, dtype=torch.float64))
    np.testing.assert_allclose(values, 1 / 3, atol=0.05)


def test_pairs_hold_distances_and_agreement():
    events = PeriodicMarks().sample(2, 4)
    pairs = same_types(events)
    assert len(pairs.gaps) == 2 * 6
    assert pairs.gaps[0].item() == events.times[0, 1] - events.times[0, 0]
    assert pairs.happened[0].item() == (events.types[0, 1] == events.types[0, 0])
    assert len(follow_ups(events).gaps) == 2 * 3


def test_least_squares_finds_a_kernel_that_is_in_the_family():
    gaps = torch.linspace(0, 5, 300, dtype=torch.float64)
    truth = (-(0.8 * gaps).square() / 2).exp()
    features = BochnerTime(64, spectrum="normal").start_from(gaps[1:], 5.0)
    fit_kernel(features, Pairs(gaps, truth), steps=200)
    with torch.no_grad():
        torch.testing.assert_close(TimeKernel(features).psi(gaps), truth, atol=0.02, rtol=0)


def learn(process, *, sequences, epochs):
    train, test = (process.sample(sequences, 100, seed=s) for s in (0, 1))
    model = EventPredictor(
        dim=32, num_heads=2, num_layers=1, max_epochs=epochs, batch_size=8,
        options={"components": 8, "dropout": 0.0}, random_state=0, verbose=False,
    ).fit(train.to_log(unit="hours"))  # fmt: skip
    likelihood = model.log_likelihood(test.to_log(unit="hours"))
    waits = [
        model.predict_next(test._replace(times=test.times[:, :n], types=test.types[:, :n])
                           .to_log(unit="hours")).mean
        for n in range(20, 100, 20)
    ]  # fmt: skip
    return likelihood.per_event - process.log_likelihood(test), np.mean(waits)


@pytest.mark.parametrize("unit", [1.0, 1e6])
def test_poisson_likelihood_is_within_two_hundredths_and_the_wait_within_five_per_cent(unit):
    # gaps of 33, then of 33 million: users of other libraries meet times off by such factors
    process = PoissonProcess((0.02 / unit, 0.01 / unit))
    below, wait = learn(process, sequences=60, epochs=6)
    assert -0.02 < below < 0.02
    assert wait == pytest.approx(1 / process.mean_rates.sum(), rel=0.05)


def test_hawkes_is_told_from_a_poisson_process_of_its_rates():
    process = HawkesProcess()
    test = process.sample(60, 100, seed=1)
    flat = PoissonProcess(tuple(process.mean_rates)).log_likelihood(test)
    below, _ = learn(process, sequences=60, epochs=6)
    gain = process.log_likelihood(test) - flat
    assert below + gain > 0.7 * gain


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.5, 1.0, 3.0])
def test_hawkes_likelihood_is_within_five_hundredths_and_the_wait_within_five_per_cent(decay):
    process = HawkesProcess(decay=decay)
    below, wait = learn(process, sequences=300, epochs=12)
    assert -0.05 < below < 0.02
    assert wait == pytest.approx(1 / process.mean_rates.sum(), rel=0.05)


def test_the_study_writes_its_tables_and_measures_nothing_twice(tmp_path):
    options = Planted.Options(
        periods=(7.0,), decays=(1.0,), processes=("Poisson",), seeds=(0,), sequences=8
    )
    rows = run_study(Planted(), options, out=tmp_path, report=lambda _: None)
    assert len(rows) == 3
    assert {p.name for p in tmp_path.iterdir() if p.suffix in (".md", ".png")} == {
        "kernels.md",
        "likelihoods.md",
        "picture.png",
    }
    said = []
    assert run_study(Planted(), options, out=tmp_path, report=said.append) == rows
    assert not said
