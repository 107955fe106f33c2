"""Scores of easy-tpp's models are right for processes whose answer is known."""

import math

import numpy as np
import pytest
import torch

from primal_attention.datasets import EventSequences, HawkesProcess, PoissonProcess

pytest.importorskip("easy_tpp")

from primal_studies.peers.events import (
    PEERS,
    FittedPeer,
    _own_log_likelihood,
    build_peer,
    fit_peer,
    peer_stepper,
)

RATES = (0.7, 0.2, 0.4)


def as_log(events):
    return EventSequences.from_arrays(list(events.times), list(events.types))


@torch.no_grad()
def set_rates(name, model, rates):
    """Make the intensities constant: no weight of the last layer, the rates in its bias."""
    last, before = {
        "RMTPP": ("hidden_to_intensity_logits", torch.log),
        "THP": ("layer_intensity_hidden", lambda x: x.expm1().log()),
        "AttNHP": ("inten_linear", lambda x: x.expm1().log()),
    }[name]
    for part in ("w_t", "b_t", "factor_intensity_decay", "factor_intensity_base"):
        if hasattr(model, part):
            getattr(model, part).zero_()
    getattr(model, last).weight.zero_()
    getattr(model, last).bias.copy_(before(torch.tensor(rates)))
    for module in model.modules():
        if type(module).__name__ == "ScaledSoftplus":
            module.log_beta.zero_()


@pytest.fixture
def poisson_log():
    process = PoissonProcess(RATES)
    events = process.sample(20, 30)
    # a short sequence, so that there is padding
    times, types = [*events.times, events.times[0, :5]], [*events.types, events.types[0, :5]]
    truth = np.concatenate([process.log_density(*events).ravel(), process.log_density(
        events.times[:1, :5], events.types[:1, :5]).ravel()])  # fmt: skip
    return EventSequences.from_arrays(times, types), truth


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_with_the_rates_of_a_poisson_process_has_its_log_likelihood(name, poisson_log):
    log, truth = poisson_log
    unit = 2.5
    model = build_peer(name, 3)
    set_rates(name, model, [unit * rate for rate in RATES])  # per unit of the model
    scores = FittedPeer(name, model, unit).score(log)
    assert scores.events == len(truth)
    assert scores.log_likelihood == pytest.approx(truth.mean(), abs=1e-4)
    # sequence by sequence, in the order of the log
    np.testing.assert_allclose(
        scores.sums[-1], [4, truth[-4:].sum(), *scores.sums[-1, 2:]], rtol=1e-4
    )
    np.testing.assert_array_equal(scores.sums[:, 0], log.lengths - 1)
    # the most frequent type, whatever is known
    types = np.concatenate([log.types[part][1:] for part in log])
    assert scores.accuracy_target == pytest.approx((types == 0).mean())
    assert scores.accuracy_last_event == pytest.approx((types == 0).mean())
    # the package's own sum agrees in its unit, since its integral is exact for constants
    own = _own_log_likelihood(model, log, unit)
    assert own - math.log(unit) == pytest.approx(truth.mean(), abs=1e-3)


def test_the_integral_of_a_growing_intensity_is_exact():
    # λ(g) = exp(a + w g): the integral has a closed form, easy-tpp's mean of points is off
    model, (a, w) = build_peer("RMTPP", 1), (-0.5, 0.8)
    set_rates("RMTPP", model, [math.exp(a)])
    with torch.no_grad():
        model.w_t.fill_(w)
    log = as_log(PoissonProcess((0.5,)).sample(4, 12))
    gaps = log.gaps[~np.isnan(log.gaps)]
    truth = (a + w * gaps - (np.exp(a + w * gaps) - np.exp(a)) / w).mean()
    scores = FittedPeer("RMTPP", model, 1.0).score(log)
    assert scores.log_likelihood == pytest.approx(truth, rel=1e-5)
    assert abs(_own_log_likelihood(model, log, 1.0) - truth) > 1e-3


@pytest.mark.parametrize("name", ["RMTPP", "THP"])
def test_training_comes_close_to_a_poisson_process(name):
    process = PoissonProcess((0.02, 0.01))  # gaps of 33 units
    train, valid, test = (process.sample(60, 30, seed=s) for s in range(3))
    peer = fit_peer(
        name, as_log(train), as_log(valid), seconds=60, epochs=40, batch_size=8, lr=1e-2
    )
    assert peer.epochs == 40 >= peer.best_epoch >= 1
    assert peer.events == 40 * 60 * 29
    assert 0 < peer.seconds < 60
    scores = peer.score(as_log(test))
    assert scores.log_likelihood == pytest.approx(process.log_likelihood(test), abs=0.05)


def test_a_peer_stops_when_its_time_is_over():
    log = as_log(HawkesProcess().sample(30, 20))
    peer = fit_peer("RMTPP", log, log, seconds=1e-6)
    assert peer.epochs == 1
    peer_stepper("THP", log)()


def test_an_unknown_peer_is_refused():
    with pytest.raises(ValueError, match="choose from RMTPP, THP, AttNHP"):
        build_peer("NHP", 2)
