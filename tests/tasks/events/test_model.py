"""Models of events: invariances of the specification (T12 to T15, T18), heads, windows."""

import math

import numpy as np
import pytest
import torch

from primal_attention.datasets import EventSequences
from primal_attention.kernels import create_time
from primal_attention.tasks.events.heads import GapFeatures, LogNormalMixture, WaitingHead
from primal_attention.tasks.events.model import (
    EventSequenceConfig,
    EventSequenceNetwork,
    NextEventConfig,
    NextEventModel,
)
from primal_attention.tasks.events.sampling import sample_paths
from primal_attention.tasks.events.scheme import LogScheme
from primal_attention.tasks.events.scoring import next_event, score_events
from primal_attention.tasks.events.windows import (
    EventWindows,
    collate_events,
    last_windows,
    tile_windows,
)

SMALL = {"dim": 16, "num_heads": 2, "time_features": 14, "components": 4, "dropout": 0.0}
ATTENTIONS = ["linear", "softmax", "primal-dual"]
FUSIONS = [None, "add", "concat", "concat-mlp", "rotary", "product", "stationary-bias"]
TIMES = ["bochner", "mercer", "log-gap", "none"]


def next_model(**options):
    return NextEventModel(NextEventConfig(num_types=4, **SMALL | options)).eval()


def classifier(**options):
    config = EventSequenceConfig(num_types=4, num_classes=3, **SMALL | options)
    return EventSequenceNetwork(config).eval()


def events(b=2, n=9):
    times = torch.rand(b, n, dtype=torch.float64).cumsum(1)
    return torch.randint(4, (b, n)), times


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("junk", [math.nan, 1e30])
def test_t12_padding_with_any_time_changes_nothing(attention, junk):
    types, times = events()
    keep = torch.arange(13) < 9
    more = torch.full((2, 4), junk, dtype=torch.float64)
    padded = torch.cat([types, torch.randint(4, (2, 4))], 1), torch.cat([times, more], 1)
    mask = keep.expand(2, -1)
    model = next_model(attention=attention)
    alone, together = model(types, times), model(*padded, key_mask=mask)
    for name in ("log_density", "hidden"):
        torch.testing.assert_close(
            getattr(together, name)[:, :9], getattr(alone, name), atol=1e-6, rtol=1e-5
        )
    torch.testing.assert_close(together.logits[:, :8], alone.logits[:, :8], atol=1e-6, rtol=1e-5)
    assert (together.log_density[:, 8:] == 0).all()
    model = classifier(attention=attention)
    torch.testing.assert_close(
        model(*padded, key_mask=mask).logits, model(types, times).logits, atol=1e-6, rtol=1e-5
    )


def test_t12_padding_on_the_left_changes_nothing():
    types, times = events()
    left = torch.zeros(2, 3, dtype=torch.int64), torch.full((2, 3), math.nan, dtype=torch.float64)
    keep = (torch.arange(12) >= 3).expand(2, -1)
    model = next_model()
    got = model(torch.cat([left[0], types], 1), torch.cat([left[1], times], 1), key_mask=keep)
    torch.testing.assert_close(got.hidden[:, 3:], model(types, times).hidden, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_t13_an_event_changes_nothing_before_it(attention):
    types, times = events()
    model = next_model(attention=attention)
    before = model(types, times)
    changed, later = types.clone(), times.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 4
    later[:, 5:] += 0.7
    after = model(changed, later)
    # the distribution at event 4 does not know event 5
    assert torch.equal(after.hidden[:, :5], before.hidden[:, :5])
    assert torch.equal(after.waiting.location[:, :5], before.waiting.location[:, :5])
    assert not torch.equal(after.hidden[:, 5:], before.hidden[:, 5:])


@pytest.mark.parametrize("time", TIMES)
def test_t14_a_shift_of_all_times_changes_nothing(time):
    types, times = events()
    for shift in (12_345.0, -1e6):
        model = next_model(time=time)
        torch.testing.assert_close(
            model(types, times + shift).hidden, model(types, times).hidden, atol=1e-5, rtol=1e-5
        )
        model = classifier(time=time)
        at = times[:, -1:] + 1.5
        torch.testing.assert_close(
            model(types, times + shift, t_ref=at + shift).logits,
            model(types, times, t_ref=at).logits,
            atol=1e-5,
            rtol=1e-5,
        )


@pytest.mark.parametrize("fusion", FUSIONS)
def test_invariances_hold_with_times_inside_attention(fusion):
    """T12 to T14 for every way in which times enter the blocks, and decoding."""
    attention = "softmax" if fusion == "stationary-bias" else "linear"
    model = next_model(attention=attention, time_fusion=fusion)
    types, times = events()
    model.start_from(torch.rand(50).double() + 0.1, 20.0)
    base = model(types, times).hidden
    torch.testing.assert_close(model(types, times + 1e6).hidden, base, atol=1e-5, rtol=1e-5)
    later = times.clone()
    later[:, 5:] += 0.7
    assert torch.equal(model(types, later).hidden[:, :5], base[:, :5])
    junk = torch.full((2, 4), math.nan, dtype=torch.float64)
    keep = (torch.arange(13) < 9).expand(2, -1)
    padded = torch.cat([types, types[:, :4]], 1), torch.cat([times, junk], 1)
    got = model(*padded, key_mask=keep).hidden[:, :9]
    torch.testing.assert_close(got, base, atol=1e-5, rtol=1e-5)
    past = model.read_past(*padded, key_mask=keep & (torch.arange(13) < 8))
    past = model.read_next(types[:, 8], times[:, 8] - times[:, 7], past)
    torch.testing.assert_close(past.hidden, base[:, 8], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_t15_events_at_the_same_time_can_be_exchanged(attention):
    types, times = events()
    times[:, 4] = times[:, 3]
    swapped = types.clone()
    swapped[:, 3], swapped[:, 4] = types[:, 4], types[:, 3]
    model = classifier(attention=attention)
    first, second = model(types, times), model(swapped, times)
    torch.testing.assert_close(second.logits, first.logits, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(second.hidden[:, 4], first.hidden[:, 3], atol=1e-6, rtol=1e-5)
    assert not torch.allclose(model(types.flip(1), times).logits, first.logits)


def test_t18_times_and_unit_in_other_units_change_nothing():
    log = EventSequences.from_arrays(
        [np.cumsum(np.random.rand(12)) for _ in range(4)], np.random.randint(3, size=(4, 12))
    )
    hidden = []
    for factor in (1.0, 86_400.0):
        scaled = EventSequences.from_arrays(
            [factor * log.times[part] for part in log],
            [[log.names[t] for t in log.types[part]] for part in log],
        )
        scheme = LogScheme.fit(scaled)
        torch.manual_seed(0)
        model = NextEventModel(NextEventConfig(**scheme.sizes, **SMALL)).eval()
        scheme.start(model)
        data = EventWindows(scheme.prepare(scaled), last_windows(scaled, None), scheme.scale)
        batch = collate_events([data[i] for i in range(4)])
        batch.pop("labels")
        hidden.append(model(**batch).hidden)
    torch.testing.assert_close(*hidden, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fusion", [None, "concat"])
def test_a_legacy_block_has_the_norms_and_residuals_of_the_published_code(fusion):
    options = {"attention": "softmax", "num_layers": 2, "time_fusion": fusion}
    model = classifier(legacy_block=True, **options).double()
    x, times = torch.randn(2, 9, 16, dtype=torch.float64), events()[1]
    keep = torch.arange(9) < torch.tensor([[9], [6]])
    expected = x
    for block, is_last in zip(model.blocks, (False, True), strict=True):
        queries = torch.nn.functional.layer_norm(
            expected, (16,), block.attention_norm.weight, block.attention_norm.bias
        )
        also = {} if fusion is None else {"times": times, "context_times": times}
        middle = queries + block.attention(queries, expected, key_mask=keep, **also)
        expected = block.mlp(block.mlp_norm(middle)) + (0 if is_last else middle)
    found = model.blocks(x, key_mask=keep, times=times).hidden
    torch.testing.assert_close(found, expected)
    # a standard block with the same weights differs
    plain = classifier(**options).double()
    plain.load_state_dict(model.state_dict())
    assert not torch.allclose(plain.blocks(x, key_mask=keep, times=times).hidden, found)


def test_a_legacy_classifier_ignores_padding_and_trains_with_a_regulariser():
    model = classifier(legacy_block=True, attention="primal-dual")
    types, times = events()
    more = torch.cat([times, torch.full((2, 4), math.nan)], 1)
    padded = torch.cat([types, types[:, :4]], 1)
    mask = (torch.arange(13) < 9).expand(2, -1)
    found = model(padded, more, key_mask=mask).logits
    torch.testing.assert_close(found, model(types, times).logits, atol=1e-6, rtol=1e-5)
    output = model.train()(types, times)
    (output.logits.square().sum() + output.aux_loss).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "nystromformer"}, "which 'nystromformer' cannot do; use one of: "),
        ({"time_fusion": "rotary"}, "allows time_fusion add, concat, concat-mlp or none, got"),
    ],
)
def test_what_a_legacy_block_cannot_do_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        EventSequenceConfig(num_types=4, num_classes=3, legacy_block=True, **options)
    with pytest.raises(ValueError, match="cannot decode step by step"):
        classifier(legacy_block=True).blocks.init_state(2)


def test_times_matter_and_not_only_their_order():
    types, times = events()
    model = next_model()
    stretched = model(types, times**2)
    assert not torch.allclose(stretched.hidden, model(types, times).hidden, atol=1e-3)


def test_marks_and_covariates_matter_and_missing_ones_are_allowed():
    sizes = {
        "mark_numbers": 1,
        "mark_levels": (3,),
        "covariate_numbers": 1,
        "covariate_levels": (2,),
    }
    model = next_model(**sizes)
    types, times = events()
    columns = {
        "marks_numbers": torch.randn(2, 9, 1),
        "marks_levels": torch.randint(3, (2, 9, 1)),
        "covariates_numbers": torch.randn(2, 1),
        "covariates_levels": torch.tensor([[0], [1]]),
    }
    base = model(types, times, **columns).hidden
    for name, column in columns.items():
        missing = torch.full_like(column, -1 if "levels" in name else math.nan)
        other = model(types, times, **columns | {name: missing}).hidden
        assert other.isfinite().all()
        assert not torch.allclose(other, base), name
    with pytest.raises(ValueError, match="has 1 numeric marks, got 0"):
        model(types, times)


def test_a_tenth_of_the_events_hide_all_their_marks_in_training():
    embed = next_model(mark_numbers=1, mark_levels=(3,)).embed
    types = torch.zeros(1, 4_000, dtype=torch.long)
    features = torch.zeros(1, 4_000, embed.project.in_features - 16 - 2 - 8)
    marks = {"marks_numbers": torch.ones(1, 4_000, 1), "marks_levels": types[..., None]}
    none = {
        "marks_numbers": marks["marks_numbers"] * math.nan,
        "marks_levels": types[..., None] - 1,
    }
    shown, hidden = embed(types, features, **marks), embed(types, features, **none)
    found = embed.train()(types, features, **marks)
    is_shown, is_hidden = ((found - x).abs().amax(-1) < 1e-6 for x in (shown, hidden))
    assert (is_shown ^ is_hidden).all()
    assert float(is_hidden.double().mean()) == pytest.approx(0.1, abs=0.02)


def test_a_mixture_agrees_with_numerical_integration():
    mixture = LogNormalMixture(
        torch.tensor([0.2, 0.5, 0.3]).log(),
        torch.tensor([-1.0, 0.3, 1.0]),
        torch.tensor([-1.0, -0.3, 0.1]),
    ).double()
    edges = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    gaps = edges.exp()
    density = mixture.log_prob(gaps).exp()
    step = torch.cat([gaps[1:] - gaps[:-1], gaps[:1]])
    assert float((density * step).sum()) == pytest.approx(1, abs=1e-4)
    after = torch.tensor(0.8, dtype=torch.float64)
    tail = gaps > after
    share = float((density * step)[tail].sum())
    assert float(mixture.log_survival(after).exp()) == pytest.approx(share, abs=1e-4)
    assert float(mixture.cdf(after)) == pytest.approx(1 - share, abs=1e-4)
    mean = float((gaps * density * step)[tail].sum()) / share
    assert float(mixture.mean(1e9, after)) == pytest.approx(mean, rel=1e-3)
    capped = float((gaps.clamp_max(2.0) * density * step).sum())
    assert float(mixture.mean(2.0)) == pytest.approx(capped, rel=1e-3)
    for p in (0.1, 0.5, 0.9):
        at = mixture.quantile(torch.tensor(p, dtype=torch.float64), after)
        lost = float((mixture.log_survival(at) - mixture.log_survival(after)).exp())
        assert lost == pytest.approx(1 - p, abs=1e-6)
    nodes = mixture.nodes(9)
    whole = float((nodes.log_weight.exp() * nodes.gap.sqrt()).sum())
    assert whole == pytest.approx(float((gaps.sqrt() * density * step).sum()), rel=1e-3)


def test_samples_of_a_mixture_follow_it_also_after_a_wait():
    mixture = LogNormalMixture(
        torch.tensor([0.4, 0.6]).log(), torch.tensor([-1.0, 0.8]), torch.tensor([-0.7, -0.2])
    )
    many = LogNormalMixture(*(t.expand(20_000, -1) for t in mixture))
    generator = torch.Generator().manual_seed(0)
    for after in (0.0, 1.5):
        gone = torch.full((20_000,), after, dtype=torch.float64)
        draws = many.sample(generator, gone)
        assert (draws >= after).all()
        middle = float(mixture.double().quantile(torch.tensor(0.5).double(), gone[0]))
        assert float((draws < middle).double().mean()) == pytest.approx(0.5, abs=0.02)


def test_the_waiting_head_starts_at_the_distribution_of_the_gaps():
    gaps = torch.distributions.Exponential(2.0).sample((5_000,)).double()
    model = next_model(components=16)
    model.start_from(gaps, 50.0)
    types, times = events(1, 50)
    found = model(types, times).waiting.double()
    start = LogNormalMixture(*(t[0, 20] for t in found))
    # the entropy of an exponential of rate 2 is 1 - log 2
    assert float(start.log_prob(gaps).mean().detach()) == pytest.approx(-(1 - math.log(2)), abs=0.1)
    # one component at each mid-quantile
    head = WaitingHead(8, 4)
    head.start_from(gaps)
    middle = gaps.log().quantile(torch.tensor([1, 3, 5, 7], dtype=torch.float64) / 8)
    location = head(torch.zeros(8)).location.double().detach()
    torch.testing.assert_close(location, middle, atol=1e-4, rtol=0)


@pytest.mark.parametrize("gone", [None, torch.tensor([0.5, 2.0], dtype=torch.float64)])
def test_the_interval_of_a_wait_leaves_the_same_share_on_both_sides(gone):
    model = next_model()
    output = model(*events())
    found = next_event(model, output, torch.tensor([8, 5]), longest=9.0, gone=gone, level=0.7)
    waiting = LogNormalMixture(*(t[[0, 1], [8, 5]] for t in output.waiting)).double()
    before = torch.zeros(2) if gone is None else waiting.cdf(gone)
    for name, share in (("lower", 0.15), ("median", 0.5), ("upper", 0.85)):
        reached = (waiting.cdf(found[name]) - before) / (1 - before)
        torch.testing.assert_close(reached, torch.full_like(reached, share), atol=1e-5, rtol=0)
    torch.testing.assert_close(found["probabilities"].sum(1), torch.ones(2, dtype=torch.float64))


@torch.no_grad()
@pytest.mark.parametrize("gone", [0.0, 3.0])
def test_types_are_averaged_over_the_waits_that_are_left(gone):
    model = next_model()
    output, last = model(*events()), torch.tensor([8, 5])
    given = torch.full((2,), gone, dtype=torch.float64)
    found = next_event(model, output, last, longest=9.0, gone=given)["probabilities"]
    waiting = LogNormalMixture(*(t[[0, 1], [8, 5], None] for t in output.waiting)).double()
    shares = (torch.arange(1_000, dtype=torch.float64) + 0.5) / 1_000
    gaps = waiting.quantile(shares.expand(2, -1), given[:, None].expand(2, 1_000))
    logits = model.type_head(output.hidden[[0, 1], [8, 5]], model.features(gaps))
    assert (logits[:, 0] - logits[:, -1]).abs().max() > 0.1  # the wait matters
    expected = logits.double().softmax(-1).mean(1)
    torch.testing.assert_close(found, expected, atol=0.01, rtol=0)


def test_scores_are_those_of_the_formulas():
    answers = {
        "type": torch.tensor([0, 1, 1, 2]),
        "guess": torch.tensor([0, 1, 0, 0]),
        "guess_blind": torch.tensor([0, 0, 0, 0]),
        "log_time": torch.tensor([-1.0, -2.0, -3.0, -4.0]),
        "log_type": torch.tensor([-0.1, -0.2, -0.3, -0.4]),
        "log_type_blind": torch.tensor([-0.5, -0.6, -0.7, -0.8]),
        "median": torch.tensor([1.0, 2.0, 3.0, 4.0]),
        "gap": torch.tensor([2.0, 2.0, 1.0, 9.0]),
        "pit": torch.tensor([0.9, 0.1, 0.2, 0.3]),
    }
    found = {name: score.value for name, score in score_events(answers, "hours", 3.0).items()}
    assert found == pytest.approx(
        {
            "loss": 2.75 - math.log(3.0),  # in scaled time, as in training
            "log-likelihood (nats per event, hours)": -2.75,
            "accuracy, t_ref=last_event": 0.25,
            "accuracy, t_ref=target": 0.5,
            "log-likelihood of the time (hours)": -2.5,
            "log-likelihood of the type, t_ref=target": -0.25,
            "log-likelihood of the type, t_ref=last_event": -0.65,
            "absolute error of the wait (hours)": (1 + 0 + 2 + 5) / 4,
            # sorted: 0.1, 0.2, 0.3, 0.9 beside 1/8, 3/8, 5/8, 7/8
            "miscalibration of the wait": 5 / 8 - 0.3,
        },
        abs=1e-6,
    )


def test_every_path_waits_from_the_reference_time_of_its_sequence(monkeypatch):
    (types, times), seen = events(3), []
    draw = LogNormalMixture.sample

    def record(self, generator=None, after=None):
        seen.append(after)
        return draw(self, generator, after)

    monkeypatch.setattr(LogNormalMixture, "sample", record)
    batch = {"types": types, "times": times, "key_mask": torch.ones_like(types, dtype=torch.bool)}
    gone = torch.tensor([0.0, 5.0, 2.0], dtype=torch.float64)
    random = torch.Generator().manual_seed(0)
    options = {"horizon": 3.0, "gone": gone, "generator": random, "max_events": 100}
    paths = sample_paths(next_model(), batch, n=2, **options)
    # nothing happened before the reference time; later waits are not conditioned
    assert seen[0].tolist() == [0, 0, 5, 5, 2, 2]
    assert all(after is None for after in seen[1:])
    assert ((paths.wait >= 0) & (paths.wait <= 3)).all()


def test_a_classifier_sees_the_time_elapsed_until_the_reference():
    model, (types, times) = classifier(time_fusion="concat"), events()
    seen = {}
    model.features.register_forward_pre_hook(lambda _, args: seen.update(features=args[0]))
    model.blocks.register_forward_pre_hook(
        lambda _, args, kwargs: seen.update(blocks=kwargs["times"]), with_kwargs=True
    )
    for given in (None, times[:, -1:] + 2.5):
        t_ref = times[:, -1:] if given is None else given
        model(types, times, t_ref=given)
        # the summary token is at the reference time
        elapsed = torch.cat([t_ref - times, torch.zeros(2, 1)], 1)
        torch.testing.assert_close(seen["features"], elapsed)
        torch.testing.assert_close(seen["blocks"], -elapsed)


def test_a_step_back_in_time_counts_as_no_time():
    types, model = torch.tensor([[0, 1, 2, 3]]), next_model(time_fusion="rotary")
    back, flat = torch.tensor([[[0.0, 2, 1, 3]], [[0.0, 2, 2, 4]]], dtype=torch.float64)
    found, expected = model(types, back), model(types, flat)
    torch.testing.assert_close(found.hidden, expected.hidden)
    torch.testing.assert_close(found.log_density, expected.log_density)


def test_zero_gaps_have_a_finite_likelihood():
    types, times = events()
    times[:, 3:6] = times[:, 3:4]
    output = next_model(smallest_gap=1e-3)(types, times)
    assert output.log_density.isfinite().all()
    assert output.gap[0, 3] == 1e-3


@pytest.mark.parametrize("context", [True, False])
@pytest.mark.parametrize("length", [2, 3, 7, 50, None])
def test_windows_predict_every_event_once(context, length):
    log = EventSequences.from_arrays(
        [np.arange(n) for n in (1, 2, 20, 33)], [[0] * n for n in (1, 2, 20, 33)]
    )
    seen = []
    for window in tile_windows(log, length, context=context):
        seen += range(window.target, window.stop)
        if length is not None:
            assert window.stop - window.start <= length + 1
        assert window.start < window.target
        if context and length is not None and window.start > log.offsets[window.sequence]:
            assert window.target - window.start >= length // 2
    firsts = set(log.offsets[:-1].tolist())
    assert sorted(seen) == [i for i in range(len(log.times)) if i not in firsts]


def test_labels_are_the_next_types_where_they_are_to_be_predicted():
    log = EventSequences.from_arrays([np.arange(6) * 2.0], ["abcdef"])
    data = EventWindows(log, tile_windows(log, 2, context=True), 2.0)
    for window, item in zip(data.windows, data, strict=False):
        for place, label in enumerate(item["labels"].tolist()):
            event = window.start + place + 1
            expected = event if window.target <= event < window.stop else -100
            assert label == expected
    assert data[0]["times"].tolist() == [0, 1, 2]


def test_times_and_references_count_from_the_first_event_of_a_window_in_scaled_units():
    log = EventSequences.from_arrays([[10.0, 14.0, 20.0]], ["aba"])
    data = EventWindows(log, last_windows(log, 2), 4.0, references=np.array([22.0]))
    assert data[0]["times"].tolist() == [0.0, 1.5]
    assert data[0]["t_ref"].tolist() == [2.0]


def test_wrong_inputs_are_errors():
    model = next_model()
    types, times = events()
    for bad, words in (
        ((types[0], times[0]), "types must hold ids"),
        ((types, times[:, :3]), "times must be"),
        ((types.double(), times), "types must hold ids"),
    ):
        with pytest.raises(ValueError, match=words):
            model(*bad)
    with pytest.raises(ValueError, match="key_mask must be boolean"):
        model(types, times, key_mask=torch.ones(2, 9))
    with pytest.raises(ValueError, match="cannot run causally"):
        NextEventConfig(num_types=3, attention="skyformer")


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("time", ["bochner", "position"])
def test_reading_event_by_event_equals_reading_all_at_once(attention, time):
    sizes = {"mark_numbers": 1, "covariate_levels": (2,)}
    model = next_model(attention=attention, time=time, **sizes)
    types, times = events(3, 12)
    marks = torch.randn(3, 12, 1)
    # marks of later events are missing, as those of sampled ones
    marks[0, 7:], marks[1, 9:], marks[2, 5:] = (math.nan,) * 3
    lengths = torch.tensor([7, 9, 5])
    keep = torch.arange(9) < lengths[:, None]
    own = {"covariates_levels": torch.tensor([[0], [1], [1]])}
    whole = model(types, times, marks_numbers=marks, **own).hidden
    past = model.read_past(
        types[:, :9], times[:, :9], key_mask=keep, marks_numbers=marks[:, :9], **own
    )
    rows = torch.arange(3)
    torch.testing.assert_close(past.hidden, whole[rows, lengths - 1], atol=1e-5, rtol=1e-4)
    for step in range(3):
        at = lengths + step
        past = model.read_next(types[rows, at], times[rows, at] - times[rows, at - 1], past)
        torch.testing.assert_close(past.hidden, whole[rows, at], atol=1e-5, rtol=1e-4)
    assert past.seen.tolist() == [10, 12, 8]


def test_types_without_the_gap_are_the_mean_over_its_distribution():
    model = next_model(components=3)
    model.start_from(torch.rand(50).double() + 0.1, 20.0)
    types, times = events(3, 9)
    output = model(types, times)
    waiting = output.waiting.double()
    found = model.type_marginal(output.hidden, waiting.nodes(9)).exp().detach()
    generator = torch.Generator().manual_seed(0)
    draws = [waiting.sample(generator) for _ in range(400)]
    mean = torch.stack([model.type_logits(output.hidden, g).softmax(-1) for g in draws]).mean(0)
    torch.testing.assert_close(found.float(), mean.detach(), atol=0.01, rtol=0)
    coarse = model.type_marginal(output.hidden, waiting.nodes()).exp().detach()
    torch.testing.assert_close(coarse, found, atol=0.01, rtol=0)


@pytest.mark.parametrize("name", ["bochner", "bochner-normal", "mercer"])
def test_features_of_time_are_of_order_one_beside_types(name):
    # features of norm one would be lost beside the embedding of a type
    features = GapFeatures(create_time(name, 28), log=False)
    gaps = torch.linspace(0, 1000, 500, dtype=torch.float64)
    assert features(gaps).square().mean().item() == pytest.approx(1.0, abs=1e-5)
