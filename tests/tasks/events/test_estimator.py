"""The predictor of next events: what a user meets, and what goes wrong."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from primal_attention.datasets import EventSequences, PoissonProcess
from primal_attention.support.files import write_sealed
from primal_attention.tasks.events import EventPredictor, scoring
from primal_attention.tasks.trained import load_trained, save_trained

SMALL = {
    "dim": 16,
    "num_heads": 2,
    "num_layers": 1,
    "max_epochs": 2,
    "options": {"components": 4},
}


def test_a_prediction_has_types_waits_and_an_interval_and_states_t_ref_and_unit(predictor, hawkes):
    found = predictor.predict_next(hawkes)
    assert found.probabilities.shape == (24, 2)
    np.testing.assert_allclose(found.probabilities.sum(1), 1, atol=1e-6)
    assert (found.lower > 0).all()
    assert (found.lower < found.median).all()
    assert (found.median < found.upper).all()
    assert (found.mean > 0).all()
    assert "t_ref=last_event" in repr(found)
    assert "hours" in repr(found)
    np.testing.assert_allclose(found.times, hawkes.last_times + found.median)
    table = found.to_frame()
    assert table.index.name == "sequence"
    assert set(table["t_ref"]) == {"last_event"}
    assert set(table["unit"]) == {"hours"}


def test_a_later_reference_time_means_that_nothing_has_happened_since(predictor, hawkes):
    later = hawkes.last_times + 4.0
    found = predictor.predict_next(hawkes, t_ref=later)
    # waits count from the reference time, so none is negative
    assert (found.lower > 0).all()
    # at the last event itself nothing more is known
    again = predictor.predict_next(hawkes, t_ref=hawkes.last_times)
    now = predictor.predict_next(hawkes)
    np.testing.assert_allclose(again.median, now.median, rtol=1e-9)
    whole = predictor.predict_next(hawkes, t_ref=float(hawkes.last_times.max() + 1))
    assert whole.t_ref == str(float(hawkes.last_times.max() + 1))


def test_samples_agree_with_the_prediction(predictor, hawkes):
    one = hawkes.take([3])
    found = predictor.predict_next(one)
    samples = predictor.sample(one, n=4000, horizon=1e3 * predictor.task_.scheme.scale / 100)
    first = samples.wait[samples.step == 1]
    shorter = (first < found.median[0]).sum() / 4000
    assert shorter == pytest.approx(0.5, abs=0.03)
    types = np.bincount(samples.type[samples.step == 1], minlength=2) / len(first)
    np.testing.assert_allclose(types, found.probabilities[0], atol=0.03)


def test_samples_are_ordered_bounded_and_drawn_from_the_seed(predictor, hawkes):
    samples = predictor.sample(hawkes, n=7, horizon="6h", random_state=1)
    assert "t_ref=last_event" in repr(samples)
    assert samples.horizon == 6
    assert (samples.wait <= 6).all()
    frame = samples.to_frame()
    for _, path in frame.groupby(["sequence", "path"]):
        assert path["step"].tolist() == list(range(1, len(path) + 1))
        assert path["wait"].is_monotonic_increasing
    again = predictor.sample(hawkes, n=7, horizon="6h", random_state=1)
    np.testing.assert_array_equal(samples.wait, again.wait)
    assert not np.array_equal(
        samples.wait, predictor.sample(hawkes, n=7, horizon="6h", random_state=2).wait
    )
    assert samples.counts().sum() == pytest.approx(len(samples.type) / 7)
    assert (samples.chances() <= np.minimum(samples.counts(), 1) + 1e-12).all()


def test_sampled_waits_after_a_reference_time_start_there(predictor, hawkes):
    samples = predictor.sample(hawkes, n=20, horizon=5.0, t_ref=hawkes.last_times + 2)
    assert (samples.wait >= 0).all()
    assert (samples.wait <= 5).all()


def test_the_likelihood_is_the_sum_of_its_parts_and_states_its_unit(predictor, hawkes):
    found = predictor.log_likelihood(hawkes)
    assert found.per_event == pytest.approx(found.time + found.type)
    assert found.total == pytest.approx(found.per_event * found.events)
    assert found.events == 24 * 29
    assert float(found) == predictor.score(hawkes)
    assert "'hours'" in repr(found)
    assert "t_ref=target" in repr(found)
    # a sequence alone has the likelihood that it has among others
    alone = predictor.log_likelihood(hawkes.take([5]))
    assert alone.total == pytest.approx(found.by_sequence[5], rel=1e-5)


def test_scores_state_both_reference_times(predictor, hawkes):
    scores = predictor.evaluate(hawkes)
    assert 0 < scores["accuracy, t_ref=last_event"] <= 1
    assert 0 < scores["accuracy, t_ref=target"] <= 1
    assert "t_ref=target" in repr(scores)


def test_true_types_are_ranked_among_many_types(monkeypatch, predictor, hawkes):
    assert "at 10" not in repr(predictor.evaluate(hawkes))
    data = predictor.task_.windows(hawkes, labelled=True)
    read = predictor.task_.measure(predictor.model_, data)
    told, label = read.answers["log_type"], read.answers["type"]
    # of two types the true one is first if its probability is above one half
    first = (told > math.log(0.5)).double()
    answers = dict(read.answers, rank=2 - first.long(), rank_blind=torch.where(label > 0, 11, 10))
    scores = predictor.task_.score(answers)
    assert scores["hit rate at 10, t_ref=target"].value == 1
    expected = (first + (1 - first) / math.log2(3)).mean()
    assert scores["NDCG at 10, t_ref=target"].value == pytest.approx(float(expected))
    share = float((label == 0).double().mean())
    assert scores["hit rate at 10, t_ref=last_event"].value == pytest.approx(share)
    gain = share / math.log2(11)
    assert scores["NDCG at 10, t_ref=last_event"].value == pytest.approx(gain)
    monkeypatch.setattr(scoring, "MANY_TYPES", 2)
    ranked = predictor.task_.measure(predictor.model_, data)
    assert torch.equal(ranked.answers["rank"] == 1, first.bool())
    assert set(ranked.answers["rank_blind"].tolist()) == {1, 2}


def test_other_units_change_the_likelihood_by_their_logarithm_only():
    times, types = PoissonProcess((1.0, 0.5)).sample(12, 20, seed=0)
    hours = EventSequences.from_arrays(times, types, unit="hours")
    minutes = EventSequences.from_arrays(60 * times, types, unit="minutes")
    found = [
        EventPredictor(**SMALL, random_state=0).fit(log).log_likelihood(log)
        for log in (hours, minutes)
    ]
    assert found[0].per_event - found[1].per_event == pytest.approx(np.log(60), abs=1e-3)


def test_long_sequences_are_read_in_windows_and_scored_once(predictor):
    times, types = PoissonProcess((1.0, 0.5)).sample(2, 500, seed=0)
    log = EventSequences.from_arrays(times, types, unit="hours")
    assert predictor.log_likelihood(log).events == 2 * 499
    assert len(predictor.predict_next(log)) == 2


def test_one_long_sequence_is_enough():
    times, types = PoissonProcess((1.0, 0.5)).sample(1, 300, seed=0)
    log = EventSequences.from_arrays(times, types)
    model = EventPredictor(
        **SMALL | {"options": {"components": 4, "max_events": 32}}, random_state=0
    ).fit(log)
    assert np.isfinite(model.score(log))


def test_dates_marks_and_covariates(dated, tmp_path):
    model = EventPredictor(**SMALL, random_state=0).fit(dated)
    found = model.predict_next(dated)
    assert found.unit == "days"
    assert found.times.dtype.kind == "M"
    assert (found.times > dated.dates[dated.offsets[1:] - 1]).all()
    assert len(model.sample(dated, n=3, horizon="2D").keys) == 20
    assert model.predict_next(dated, t_ref="2024-06-30").t_ref == "2024-06-30"
    # another log with an unseen level: counts as missing
    model.save(tmp_path)
    again = EventPredictor.load(tmp_path)
    np.testing.assert_array_equal(again.predict_next(dated).median, found.median)


def test_reference_times_are_dates_of_any_kind(dated):
    model = EventPredictor(**SMALL, random_state=0).fit(dated)
    last = dated.dates[dated.offsets[1:] - 1]
    later = last + np.timedelta64(2, "D")
    kinds = later, later.astype("datetime64[ns]"), pd.Series(later), list(pd.to_datetime(later))
    found = [model.predict_next(dated, t_ref=t).median for t in kinds]
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0])
    assert not np.allclose(found[0], model.predict_next(dated).median)


def test_single_events_can_be_predicted_after_and_do_not_count_in_scores(predictor):
    log = EventSequences.from_arrays([[5.0], [1.0, 2.0]], [[0], [1, 0]], unit="hours")
    assert len(predictor.predict_next(log)) == 2
    found = predictor.log_likelihood(log)
    assert found.events == 1
    assert found.by_sequence[0] == 0


def test_events_at_the_same_time_count_with_the_smallest_gap(predictor):
    log = EventSequences.from_arrays([[1.0, 1.0, 2.0]], [[0, 1, 0]], unit="hours")
    assert np.isfinite(predictor.log_likelihood(log).per_event)


def test_seeds_decide_everything(hawkes):
    one, two, other = (
        EventPredictor(**SMALL, random_state=seed).fit(hawkes).score(hawkes) for seed in (3, 3, 4)
    )
    assert one == two
    assert one != other


def test_fitting_leaves_the_callers_random_numbers_alone(hawkes):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    EventPredictor(**SMALL, random_state=0).fit(hawkes.take(range(4)))
    assert torch.equal(torch.rand(3), expected)


def test_scikit_learn_conventions(predictor, hawkes):
    copy = clone(predictor)
    assert copy.get_params() == predictor.get_params()
    assert not hasattr(copy, "model_")
    assert copy.set_params(dim=32).dim == 32
    for call in (copy.predict_next, copy.sample, copy.log_likelihood, copy.score):
        with pytest.raises(NotFittedError):
            call(hawkes)
    with pytest.raises(NotFittedError):
        copy.save("nowhere")


def test_a_time_limit_ends_training(hawkes):
    model = EventPredictor(**SMALL | {"max_epochs": 10_000}, random_state=0)
    assert model.fit(hawkes, time_limit=0.5).history_.ended == "seconds"


def test_folders_are_shared_with_the_command_line(predictor, hawkes, tmp_path):
    predictor.save(tmp_path / "a")
    task, model = load_trained(tmp_path / "a")
    assert type(model).__name__ == "NextEventModel"
    # a folder of primal train has no file of the estimator
    save_trained(tmp_path / "b", task, model)
    again = EventPredictor.load(tmp_path / "b")
    assert (again.dim, again.num_layers, again.options.components) == (16, 1, 4)
    assert again.score(hawkes) == predictor.score(hawkes)


def test_damaged_and_foreign_folders_are_errors(predictor, tmp_path):
    with pytest.raises(ValueError, match="no folder"):
        EventPredictor.load(tmp_path / "none")
    predictor.save(tmp_path)
    write_sealed(tmp_path, {"estimator.json": json.dumps({"parameters": {"width": 3}})})
    with pytest.raises(ValueError, match="EventPredictor has no parameter 'width'"):
        EventPredictor.load(tmp_path)


BAD = {
    "a frame instead of a log": (lambda m, log: m.fit([1, 2]), TypeError, "from_frame"),
    "unseen types": (
        lambda m, log: m.predict_next(EventSequences.from_arrays([[1.0]], [["new"]], unit="hours")),
        ValueError,
        "new.*only_types",
    ),
    "another unit": (
        lambda m, log: m.predict_next(EventSequences.from_arrays([[1.0]], [[0]], unit="days")),
        ValueError,
        "unit='hours'",
    ),
    "a reference before the last event": (
        lambda m, log: m.predict_next(log, t_ref=0.0),
        ValueError,
        "before the last event of sequence '0'.*log.before",
    ),
    "the target as a reference": (
        lambda m, log: m.predict_next(log, t_ref="target"),
        ValueError,
        "not known here",
    ),
    "too few references": (
        lambda m, log: m.predict_next(log, t_ref=[1e6]),
        ValueError,
        "one for each of the 24",
    ),
    "a date for numbers": (
        lambda m, log: m.predict_next(log, t_ref="2024-01-01"),
        ValueError,
        "is a date",
    ),
    "a level of 1": (lambda m, log: m.predict_next(log, level=1.0), ValueError, "level"),
    "a horizon in words": (lambda m, log: m.sample(log, horizon="soon"), ValueError, "duration"),
    "no paths": (lambda m, log: m.sample(log, n=0), ValueError, "at least 1"),
    "too many events": (
        lambda m, log: m.sample(log, n=2, horizon=1e4, max_events=5),
        ValueError,
        "more than 5 events",
    ),
    "single events only": (
        lambda m, log: clone(m).fit(EventSequences.from_arrays([[1.0], [2.0]], [[0], [1]])),
        ValueError,
        "two events at different times",
    ),
    "nothing to score": (
        lambda m, log: m.score(EventSequences.from_arrays([[1.0]], [[0]], unit="hours")),
        ValueError,
        "No sequence has two events",
    ),
    "an attention that is not causal": (
        lambda m, log: clone(m).set_params(attention="skyformer").fit(log),
        ValueError,
        "cannot run causally",
    ),
    "a wrong share": (
        lambda m, log: clone(m).set_params(validation=1.5).fit(log),
        ValueError,
        "validation",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_an_error_that_says_so(case, predictor, hawkes):
    call, kind, words = BAD[case]
    with pytest.raises(kind, match=words):
        call(predictor, hawkes)


def test_a_missing_mark_is_an_error(dated, frame):
    model = EventPredictor(**SMALL, random_state=0).fit(dated)
    with pytest.raises(ValueError, match="lacks the mark 'price'"):
        model.predict_next(EventSequences.from_frame(frame, unit="days"))
