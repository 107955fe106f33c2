"""Generators agree with closed forms, and their own log-likelihood is the best."""

import math
from dataclasses import replace

import numpy as np
import pytest

from primal_attention.datasets.events.generators import (
    GapMarks,
    HawkesProcess,
    IrregularSinusoids,
    PeriodicMarks,
    PoissonProcess,
)

HAWKES = HawkesProcess((0.3, 0.1), ((0.4, 0.3), (0.1, 0.2)), decay=2.0)
PROCESSES = [PoissonProcess((1.0, 0.5)), HAWKES, PeriodicMarks(), GapMarks()]


@pytest.mark.parametrize("process", PROCESSES, ids=lambda p: type(p).__name__)
class TestEveryProcess:
    def test_times_ascend_and_types_are_in_range(self, process):
        times, types = process.sample(5, 40)
        assert times.shape == types.shape == (5, 40)
        assert (np.diff(times) > 0).all()
        assert set(np.unique(types)) == set(range(process.num_types))

    def test_a_seed_repeats_and_another_differs(self, process):
        first, again, other = (process.sample(2, 5, seed=s) for s in (1, 1, 2))
        np.testing.assert_array_equal(first.times, again.times)
        assert not np.allclose(first.times, other.times)

    def test_events_come_at_the_mean_rates(self, process):
        times, types = process.sample(200, 400)
        late = types[:, 200:]  # the start without a past is over
        duration = (times[:, -1] - times[:, 199]).sum()
        rates = np.bincount(late.ravel(), minlength=process.num_types) / duration
        np.testing.assert_allclose(rates, process.mean_rates, rtol=0.03)

    def test_densities_of_the_next_event_integrate_to_one(self, process):
        past = process.sample(1, 6)
        gaps = np.linspace(1e-6, 60, 60_001)
        times = np.concatenate(
            [np.tile(past.times, (len(gaps), 1)), past.times[0, -1] + gaps[:, None]], axis=1
        )
        total = 0.0
        for kind in range(process.num_types):
            types = np.concatenate(
                [np.tile(past.types, (len(gaps), 1)), np.full((len(gaps), 1), kind)], axis=1
            )
            total += np.trapezoid(np.exp(process.log_density(times, types)[:, -1]), gaps)
        assert total == pytest.approx(1, abs=2e-3)

    def test_counts_must_be_positive(self, process):
        with pytest.raises(ValueError, match="num_events must be 1 or more"):
            process.sample(1, 0)


@pytest.mark.parametrize(
    ("truth", "others"),
    [
        (PoissonProcess((1.0, 0.5)), [PoissonProcess((1.1, 0.5)), PoissonProcess((1.0, 0.4))]),
        (
            HAWKES,
            [
                replace(HAWKES, decay=1.5),
                replace(HAWKES, decay=2.6),
                replace(HAWKES, baseline=(0.36, 0.1)),
                replace(HAWKES, branching=((0.3, 0.3), (0.1, 0.2))),
                PoissonProcess(tuple(HAWKES.mean_rates)),
            ],
        ),
        (PeriodicMarks(7.0, swing=0.8), [PeriodicMarks(7.1, swing=0.8), PeriodicMarks(7.0)]),
        (GapMarks(), [GapMarks(decay=1.1), GapMarks(decay=0.9), GapMarks(median_gap=1.1)]),
    ],
    ids=lambda p: type(p).__name__ if not isinstance(p, list) else "",
)
def test_no_other_parameters_explain_the_samples_better(truth, others):
    events = truth.sample(200, 200)
    best = truth.log_likelihood(events)
    assert all(other.log_likelihood(events) < best for other in others)


def test_poisson_nats_per_event_have_a_closed_form():
    process = PoissonProcess((1.0, 0.5, 0.2))
    events = process.sample(100, 1_000)
    assert process.log_likelihood(events) == pytest.approx(process.mean_log_likelihood, abs=0.01)
    assert PoissonProcess((2.0,)).mean_log_likelihood == pytest.approx(math.log(2) - 1)


def test_hawkes_density_is_that_of_the_formula():
    times, types = HAWKES.sample(1, 7)
    mu, n = np.array(HAWKES.baseline), np.array(HAWKES.branching)

    def rates(t, past):
        kernel = HAWKES.decay * np.exp(-HAWKES.decay * (t - times[0, :past]))
        return mu + (n[:, types[0, :past]] * kernel).sum(axis=1)

    for i in range(1, 7):
        grid = np.linspace(times[0, i - 1], times[0, i], 20_001)
        integral = np.trapezoid([rates(t, i).sum() for t in grid], grid)
        expected = np.log(rates(times[0, i], i)[types[0, i]]) - integral
        assert HAWKES.log_density(times, types)[0, i - 1] == pytest.approx(expected, abs=1e-6)


def test_hawkes_rescaled_by_its_compensator_is_a_unit_poisson_process():
    times, types = HAWKES.sample(50, 400)
    density = HAWKES.log_density(times, types)
    # log λ of the same events with the integral taken away again
    mu, jumps = np.array(HAWKES.baseline), HAWKES.decay * np.array(HAWKES.branching)
    excited, rests = np.zeros((50, 2)), []
    for i, gap in enumerate(np.diff(times).T):
        excited = (excited + jumps.T[types[:, i]]) * np.exp(-HAWKES.decay * gap)[:, None]
        rate = (mu + excited)[np.arange(50), types[:, i + 1]]
        rests.append(np.log(rate) - density[:, i])
    integrals = np.sort(np.concatenate(rests))
    uniform = 1 - np.exp(-integrals)
    steps = np.arange(1, len(uniform) + 1) / len(uniform)
    # Kolmogorov-Smirnov distance; 1.63 / sqrt(n) is the 1 % level
    assert np.abs(uniform - steps).max() < 1.63 / math.sqrt(len(uniform))


def test_pairs_of_periodic_marks_agree_as_often_as_stated():
    process = PeriodicMarks(period=5.0, num_types=3)
    times, types = process.sample(20_000, 2)
    same, gaps = types[:, 0] == types[:, 1], np.diff(times)[:, 0]
    near = gaps < 1
    assert same[near].mean() == pytest.approx(process.same_type(gaps[near]).mean(), abs=0.015)
    far = (gaps > 2) & (gaps < 3)
    assert same[far].mean() == pytest.approx(process.same_type(gaps[far]).mean(), abs=0.02)


def test_only_the_gap_tells_the_type_of_gap_marks():
    process = GapMarks()
    times, types = process.sample(100, 500)
    right = (process.follow_up(np.diff(times)) > 0.5) == types[:, 1:]
    assert right.mean() == pytest.approx(process.best_accuracy, abs=0.01)
    share = types.mean()
    assert max(share, 1 - share) == pytest.approx(process.blind_accuracy, abs=0.01)
    # the type before says nothing
    assert abs(np.corrcoef(types[:, :-1].ravel(), types[:, 1:].ravel())[0, 1]) < 0.02


def test_sinusoids_have_their_periods_noise_and_holes():
    process = IrregularSinusoids(periods=(3.0, 10.0), noise=0.2, missing=0.4)
    series = process.sample(50, 300)
    assert series.observed.mean() == pytest.approx(0.6, abs=0.01)
    rest = (series.values - process.truth(series.times, series.phases))[series.observed]
    assert rest.std() == pytest.approx(0.2, rel=0.03)
    later = process.truth(series.times + 30.0, series.phases)  # whole periods of both
    np.testing.assert_allclose(later, process.truth(series.times, series.phases), atol=1e-9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PoissonProcess((1.0, -1.0)), "rates must be positive"),
        (lambda: HawkesProcess((1.0,), ((1.0,),)), "spectral radius 1; it must be below 1"),
        (lambda: HawkesProcess((1.0,), ((0.1, 0.2),)), "1 by 1 table"),
        (lambda: PeriodicMarks(num_types=1), "2 or more"),
        (lambda: PeriodicMarks(swing=1.5), "from 0 to 1"),
        (lambda: GapMarks(decay=0.0), "decay must be positive"),
        (lambda: IrregularSinusoids(missing=1.0), "less than 1"),
    ],
)
def test_impossible_parameters_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
