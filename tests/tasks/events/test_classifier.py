"""The classifier of whole sequences."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from primal_attention.datasets import EventSequences
from primal_attention.tasks.events import EventClassifier, EventPredictor

SMALL = {"dim": 16, "num_heads": 2, "num_layers": 1}


def paces(count=40, seed=0):
    """Return sequences that differ in their pace alone, and their labels."""
    rng = np.random.default_rng(seed)
    labels = np.array(["slow", "fast"] * (count // 2))
    times = [np.cumsum(rng.exponential(4 if y == "slow" else 1, 12)) for y in labels]
    types = rng.integers(3, size=(count, 12))
    return EventSequences.from_arrays(times, types, unit="hours"), labels


@pytest.fixture(scope="module")
def trained():
    log, labels = paces()
    return EventClassifier(**SMALL, max_epochs=12, learning_rate=5e-3, random_state=0).fit(
        log, labels
    )


def test_the_pace_of_sequences_is_learned(trained):
    log, labels = paces(seed=1)
    assert trained.score(log, labels) >= 0.85
    shares = trained.predict_proba(log)
    assert shares.shape == (40, 2)
    np.testing.assert_allclose(shares.sum(1), 1)
    assert trained.classes_.tolist() == ["fast", "slow"]
    assert trained.t_ref_ == "last_event"


def test_the_reference_time_matters_and_is_checked(trained):
    log, _ = paces()
    now = trained.predict_proba(log)
    np.testing.assert_allclose(trained.predict_proba(log, t_ref=log.last_times), now)
    assert not np.allclose(trained.predict_proba(log, t_ref=log.last_times + 50), now)
    with pytest.raises(ValueError, match="before the last event"):
        trained.predict_proba(log, t_ref=0.0)


def test_labels_of_any_type_survive_a_folder(tmp_path):
    log, labels = paces(12)
    model = EventClassifier(**SMALL, max_epochs=1, random_state=0).fit(log, labels == "slow")
    model.save(tmp_path)
    again = EventClassifier.load(tmp_path)
    assert again.classes_.dtype == bool
    np.testing.assert_array_equal(again.predict(log), model.predict(log))
    with pytest.raises(ValueError, match="not what EventPredictor saves"):
        EventPredictor.load(tmp_path)


def test_scikit_learn_conventions(trained):
    log, labels = paces()
    copy = clone(trained)
    assert copy.get_params() == trained.get_params()
    with pytest.raises(NotFittedError):
        copy.predict(log)
    with pytest.raises(ValueError, match="one label for each of the 40"):
        copy.fit(log, labels[:3])
    with pytest.raises(ValueError, match="two classes"):
        copy.fit(log, np.zeros(40))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_t19_a_label_that_depends_on_the_gap_needs_the_time(seed):
    """T19: an event excites for a while; the label says whether it still does."""
    rng = np.random.default_rng(seed)

    def draw(count):
        waits = rng.exponential(1.0, count)
        labels = (rng.random(count) < np.exp(-((waits / 0.7) ** 4))).astype(int)
        noise = np.sort(rng.uniform(0, 5, (count, 6)), axis=1)
        times = np.concatenate([noise, 6 + np.zeros((count, 1))], 1)
        types = np.concatenate([rng.integers(2, size=(count, 6)), np.full((count, 1), 2)], 1)
        return EventSequences.from_arrays(times, types), labels, 6 + waits

    log, labels, now = draw(1500)
    test, truth, later = draw(1000)
    accuracy = {}
    for time in ("bochner", "none"):
        model = EventClassifier(
            dim=32, num_layers=1, max_epochs=8, options={"time": time}, random_state=seed
        )
        accuracy[time] = model.fit(log, labels, t_ref=now).score(test, truth, t_ref=later)
    assert accuracy["bochner"] >= accuracy["none"] + 0.1, accuracy
