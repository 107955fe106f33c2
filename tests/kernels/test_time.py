"""Time features against closed forms; T numbers are those of the list of invariants."""

import math

import pytest
import torch
from tests.house.rows import each

from primal_attention.kernels import (
    TIME_FEATURES,
    BochnerTime,
    LogGapTime,
    MercerTime,
    TGATTime,
    Time2VecTime,
    TimeKernel,
    TimeScaler,
    create_time,
)
from primal_attention.kernels.quantiles import monotone_spline

F64 = torch.float64


def _times(n: int = 50, span: float = 5.0) -> torch.Tensor:
    return torch.rand(n, dtype=F64) * span


def _normal(m: int, mu: float, sigma: float, **options) -> BochnerTime:
    phi = BochnerTime(2 * m, spectrum="normal", dtype=F64, **options)
    with torch.no_grad():
        phi.quantile.mu.fill_(mu)
        phi.quantile.log_sigma.fill_(math.log(sigma))
    return phi


def _gaussian(t: torch.Tensor, mu: float, sigma: float) -> torch.Tensor:
    delta = t[:, None] - t
    return (-(sigma**2) * delta.square() / 2).exp() * (mu * delta).cos()


def _shift_error(phi, t: torch.Tensor, shift: float) -> float:
    kernel = TimeKernel(phi.eval())
    return (kernel.gram(t, t) - kernel.gram(t + shift, t + shift)).abs().max().item()


@each("mu", [0.0, 2.0])
@each("m", [16, 256, 4096])
def test_t1_random_draws_approach_the_gaussian_at_the_monte_carlo_rate(m, mu):
    t = _times(200)
    gram = TimeKernel(_normal(m, mu, 1.3, resample="never")).gram(t, t)
    error = (gram - _gaussian(t, mu, 1.3)).abs().max()
    assert 0.05 / math.sqrt(m) < error < 2.5 / math.sqrt(m)


@each("m, most", [(16, 0.12), (64, 0.025), (256, 0.006)])
def test_t2_mid_quantiles_are_far_more_accurate(m, most):
    t = _times(200)
    error = TimeKernel(_normal(m, 0.0, 1.3).eval()).gram(t, t) - _gaussian(t, 0.0, 1.3)
    assert error.abs().max() <= most


@each("is_random, most", [(False, 0.01), (True, 0.06)])
def test_t3_cauchy_frequencies_give_the_exponential(is_random, most):
    m = 4096
    u = torch.rand(m, dtype=F64) if is_random else (torch.arange(m, dtype=F64) + 0.5) / m
    phi = BochnerTime(2 * m, dtype=F64)
    with torch.no_grad():
        phi.quantile.omega.copy_((math.pi * (u - 0.5)).tan())
    delta = torch.linspace(0, 5, 200, dtype=F64)
    assert (TimeKernel(phi).psi(delta) - (-delta).exp()).abs().max() <= most


@each("spectrum", ["free", "normal", "inverse-cdf"])
@each("amplitudes", [False, True])
def test_t4_norm_of_bochner_features_is_one(spectrum, amplitudes):
    phi = BochnerTime(32, spectrum=spectrum, amplitudes=amplitudes, dtype=F64)
    if amplitudes:
        torch.nn.init.normal_(phi.amplitude)
    norm = phi(_times(50, 1e4)).square().sum(-1)
    assert (norm - 1).abs().max() <= 1e-12


@each("spectrum", ["free", "normal", "inverse-cdf"])
def test_t5_bochner_kernels_do_not_change_with_a_shift(spectrum):
    phi = BochnerTime(32, spectrum=spectrum, dtype=F64)
    assert _shift_error(phi, _times(), 12_345.0) <= 1e-9


def test_t6_unix_seconds_keep_their_digits_through_the_scaler():
    gaps = torch.rand(100, dtype=F64) * 120
    t = 1.3e9 + gaps.cumsum(0)
    scaler = TimeScaler().fit(gaps)
    phi = BochnerTime(32, spectrum="normal").eval()
    elapsed = (t[-1] - t) / gaps.sort().values[49]
    angle = elapsed[:, None] * phi.frequencies().detach()
    truth = angle.cos() / 4
    for times in (scaler(t, t[-1]), scaler.scale(t, t[-1])):
        assert (phi(times)[:, :16] - truth).abs().max() <= 1e-5
    # without the scaler, float32 seconds lose everything
    raw = phi(t.float() / scaler.unit.float())
    assert (raw @ raw.T - TimeKernel(phi).gram(elapsed, elapsed)).abs().max() > 0.1


def test_long_times_and_short_periods_keep_their_digits():
    phi = BochnerTime(32)
    with torch.no_grad():
        phi.quantile.omega.copy_(2 * math.pi / torch.logspace(-1, 4, 16))
    days = 2000 * torch.rand(1000, dtype=F64)
    angle = days[:, None] * phi.frequencies().detach()
    truth = torch.cat([angle.cos(), angle.sin()], dim=-1) / 4
    assert (phi(days) - truth).abs().max() <= 2e-7
    in_float32 = (days.float()[:, None] * phi.frequencies().detach().float()).cos() / 4
    assert (in_float32 - truth[:, :16]).abs().max() > 1e-3


def test_t7_tied_mercer_is_stationary_and_periodic():
    phi = MercerTime(3, 4, dtype=F64)
    torch.nn.init.normal_(phi.gamma)
    t = _times()
    assert _shift_error(phi, t, 3.7) <= 1e-12
    single = MercerTime(1, 4, dtype=F64)
    assert (single(t) - single(t + single.periods)).abs().max() <= 1e-12


def test_t8_untied_and_summed_mercer_are_not_stationary():
    for phi in (MercerTime(3, 4, tie=False, dtype=F64), MercerTime(3, 4, summed=True, dtype=F64)):
        if not phi.summed:
            torch.nn.init.normal_(phi.gamma)
        assert not phi.is_stationary
        assert _shift_error(phi, _times(), 3.7) > 1e-2
        with pytest.raises(ValueError, match="not stationary"):
            TimeKernel(phi).psi(torch.zeros(1))


def test_summed_mercer_is_the_published_form():
    phi = MercerTime(2, 3, summed=True, dtype=F64)
    torch.nn.init.normal_(phi.bias)
    t = _times(5)
    for i, period in enumerate(phi.periods.tolist()):
        for row, time in enumerate(t.tolist()):
            angles = [2 * math.pi * j * time / period for j in (1, 2, 3)]
            parts = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
            sums = sum(w * p for w, p in zip(phi.weight[i].tolist(), parts, strict=True))
            assert phi(t)[row, i].item() == pytest.approx(sums + phi.bias[i].item(), abs=1e-12)


def test_mercer_series_of_a_smooth_periodic_kernel_converges():
    # exp(cos(Ωδ) − 1) = Σ_j c_j cos(jΩδ) with Bessel coefficients, by numerical integration
    grid = 2 * math.pi * torch.arange(256, dtype=F64) / 256
    kernel = (grid.cos() - 1).exp()
    for degree, most in ((1, 1.3e-1), (3, 2.3e-3), (6, 1.4e-6)):
        c = torch.stack([(kernel * (j * grid).cos()).mean() for j in range(degree + 1)])
        c[1:] *= 2
        phi = MercerTime(1, degree, dtype=F64)
        with torch.no_grad():
            phi.gamma.copy_(c.expm1().log()[None])
        error = TimeKernel(phi).psi(grid / (2 * math.pi) * phi.periods.item()) - kernel
        assert most / 10 < error.abs().max() <= most


@pytest.mark.parametrize("name", TIME_FEATURES)
def test_t9_grams_are_positive_semidefinite(name):
    phi = create_time(name, 28, dtype=F64).eval()
    t = _times(60, 30.0)
    least = torch.linalg.eigvalsh(TimeKernel(phi).gram(t, t)).min()
    assert least >= -1e-10 * max(1.0, phi(t).square().sum(-1).max().item())


@pytest.mark.parametrize("name", ["bochner", "bochner-normal", "bochner-inverse-cdf", "mercer"])
def test_psi_is_the_gram_matrix_of_stationary_features(name):
    phi = create_time(name, 28, dtype=F64).eval()
    t = _times(20)
    kernel = TimeKernel(phi)
    torch.testing.assert_close(kernel.psi(t[:, None] - t), kernel.gram(t, t), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "apart"), [("tgat", 0.2), ("time2vec", 1e-2), ("log-gap", 1e-2)])
def test_baselines_are_labelled_and_are_not_stationary(name, apart):
    phi = create_time(name, 16, dtype=F64)
    assert not phi.is_stationary
    assert _shift_error(phi, _times(), 2.9) > apart
    with pytest.raises(ValueError, match="not stationary"):
        phi.spectrum()


def test_time2vec_and_tgat_are_their_formulas_with_any_phase():
    t = _times()[:, None] * 40
    for phi in (Time2VecTime(6, dtype=F64), TGATTime(6, dtype=F64)):
        for parameter in phi.parameters():
            torch.nn.init.normal_(parameter)
        angle = phi.omega * t + phi.phase
        if isinstance(phi, TGATTime):
            expected = angle.cos() / 6**0.5
        else:
            expected = torch.cat([phi.trend[0] * t + phi.trend[1], angle.sin()], dim=-1)
        torch.testing.assert_close(phi(t[:, 0]), expected)


def test_log_gap_is_an_mlp_of_the_logarithm_that_keeps_the_direction_of_time():
    phi = LogGapTime(6, dtype=F64).start_from([0.5, 1.0, 9.0], span=20.0)
    logs = torch.tensor([0.5, 1.0, 9.0], dtype=F64).log1p()
    t = _times() - 2.5
    log = torch.where(t < 0, -1.0, 1.0) * (1 + t.abs()).log()
    log = (log - logs.mean()) / logs.std(correction=0)
    torch.testing.assert_close(phi(t), phi.out(phi.hidden(log[:, None]).clamp_min(0)))


@pytest.mark.parametrize("name", TIME_FEATURES)
def test_t16_gradients_of_all_parameters_match_finite_differences(name):
    phi = create_time(name, 14, dtype=F64).eval()
    for parameter in phi.parameters():
        with torch.no_grad():
            parameter.add_(0.1 * torch.randn_like(parameter))
    t = _times(7)
    weight = torch.randn(7, phi.num_features, dtype=F64)
    names, values = zip(*phi.named_parameters(), strict=True)

    def loss(*values):
        return torch.func.functional_call(phi, dict(zip(names, values, strict=True)), t) * weight

    assert torch.autograd.gradcheck(loss, values, rtol=1e-4, atol=1e-8)
    (phi(t) * weight).sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in phi.parameters())


@each("resample", ["train", "never"])
@pytest.mark.parametrize("name", ["normal", "inverse-cdf"])
def test_t17_evaluation_is_deterministic(name, resample):
    phi = BochnerTime(16, spectrum=name, resample=resample)
    t = _times()
    assert torch.equal(phi(t), phi(t)) == (resample == "never") == phi.is_deterministic
    phi.eval()
    assert torch.equal(phi(t), phi(t))


def test_evaluation_uses_the_mid_quantiles():
    phi = BochnerTime(8, spectrum="normal").eval()
    nodes = torch.tensor([0.125, 0.375, 0.625, 0.875], dtype=F64)
    torch.testing.assert_close(phi.frequencies(), torch.special.ndtri(nodes))


def test_always_draws_in_evaluation_too():
    phi = BochnerTime(16, spectrum="normal", resample="always").eval()
    assert not torch.equal(phi(_times()), phi(_times()))


def test_training_draws_one_frequency_in_each_part_of_the_distribution():
    phi = BochnerTime(32, spectrum="inverse-cdf", dtype=F64)
    edges = phi.quantile(torch.arange(1, 16, dtype=F64) / 16)
    for _ in range(20):
        omega = phi.frequencies()
        assert (omega[:-1] <= edges).all()
        assert (omega[1:] >= edges).all()


def test_never_saves_its_draw():
    first = BochnerTime(16, spectrum="normal", resample="never")
    second = BochnerTime(16, spectrum="normal", resample="never")
    second.load_state_dict(first.state_dict())
    t = _times(9)
    assert torch.equal(first(t), second.eval()(t))


def test_inverse_cdf_increases_for_any_parameters():
    phi = BochnerTime(2, spectrum="inverse-cdf", dtype=F64)
    u = torch.linspace(1e-4, 1 - 1e-4, 2001, dtype=F64)
    for _ in range(10):
        for parameter in phi.quantile.parameters():
            torch.nn.init.normal_(parameter, std=2.0)
        assert (phi.quantile(u).diff() > 0).all()


def test_the_spline_has_its_values_and_slopes_at_the_knots():
    widths, heights, slopes = *torch.randn(2, 5, dtype=F64), torch.randn(4, dtype=F64)
    at, value = (
        6 * torch.cat([torch.zeros(1), (1e-3 + 0.995 * logits.softmax(0)).cumsum(0)]) - 3
        for logits in (widths, heights)
    )
    # the slope is one at both ends, where the spline turns into the identity
    one = torch.ones(1, dtype=F64)
    start = math.log(math.expm1(1 - 1e-3))
    slope = torch.cat([one, (1 + (slopes + start).exp()).log() + 1e-3, one])
    for side in (-1e-7, 1e-7):
        x = (at + side).requires_grad_()
        y = monotone_spline(x, widths, heights, slopes, 3.0)
        y.sum().backward()
        torch.testing.assert_close(y.detach(), value, rtol=0, atol=1e-5)
        torch.testing.assert_close(x.grad, slope, rtol=0, atol=1e-4)


def test_inverse_cdf_learns_a_uniform_spectrum():
    # U(−a, a) has the kernel sin(aΔ) / aΔ
    phi = BochnerTime(64, spectrum="inverse-cdf", dtype=F64).eval()
    delta = torch.linspace(0.01, 8, 100, dtype=F64)
    truth = (2 * delta).sin() / (2 * delta)
    optimizer = torch.optim.Adam(phi.parameters(), lr=0.1)
    for _ in range(300):
        loss = (TimeKernel(phi).psi(delta) - truth).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (TimeKernel(phi).psi(delta) - truth).abs().max() < 0.03


@pytest.mark.parametrize("name", TIME_FEATURES)
@each("poison", [math.nan, math.inf, 1e30])
def test_padding_never_leaks(name, poison):
    phi = create_time(name, 14).eval()
    t, keep = _times(10).reshape(2, 5), torch.arange(5) < torch.tensor([[5], [3]])
    features = phi(torch.where(keep, t, poison), keep)
    assert features.shape == (2, 5, phi.num_features)
    assert (features[~keep] == 0).all()
    assert torch.equal(features[keep], phi(t)[keep])
    features.sum().backward()
    assert all(p.grad.isfinite().all() for p in phi.parameters())


@pytest.mark.parametrize("name", TIME_FEATURES)
def test_features_have_the_dtype_of_the_parameters_and_any_leading_axes(name):
    phi = create_time(name, 14)
    assert phi(torch.zeros(())).shape == (phi.num_features,)
    assert phi(torch.zeros(2, 3, 4)).shape == (2, 3, 4, phi.num_features)
    assert phi(torch.zeros(2, dtype=F64)).dtype == torch.float32
    assert phi(torch.arange(3)).dtype == torch.float32


@pytest.mark.raw
@pytest.mark.parametrize("name", TIME_FEATURES)
def test_features_survive_compile_and_storage(name):
    phi = create_time(name, 14).eval()
    twin = create_time(name, 14).eval()
    twin.load_state_dict(phi.start_from(_times(), 9.0).state_dict())
    t = _times()
    torch.testing.assert_close(phi(t), twin(t), rtol=0, atol=0)
    compiled = torch.compile(phi, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(t), phi(t))


def test_frequencies_start_from_the_data():
    gaps = torch.linspace(0.5, 4.5, 101, dtype=F64)
    phi = BochnerTime(16).start_from(gaps, 200.0)
    periods = 2 * math.pi / phi.frequencies().detach()
    assert periods[0].item() == pytest.approx(2 * 0.9, rel=1e-5)
    assert periods[-1].item() == pytest.approx(800.0, rel=1e-5)
    assert (periods.log().diff().diff().abs() < 1e-5).all()
    normal = BochnerTime(16, spectrum="normal").start_from(gaps, 200.0).quantile
    assert normal.log_sigma.exp().item() == pytest.approx(1 / 2.5)
    mercer = MercerTime(4, 3).start_from(gaps, 200.0)
    assert mercer.periods[0].item() == pytest.approx(3 * 2 * 0.9, rel=1e-5)
    for name in TIME_FEATURES:
        create_time(name, 14).start_from(gaps, 200.0).warn_about(gaps)  # no warning


def test_events_that_come_together_do_not_set_the_shortest_period():
    gaps = torch.ones(1000, dtype=F64)
    gaps[:50] = 1e-9
    assert MercerTime(4, 3).start_from(gaps, 100.0).periods.min() > 1.0


@each("gaps", [[], [0.0, 0.0], [1.0, math.nan], [1.0, -2.0]])
def test_gaps_that_hold_no_scale_are_refused(gaps):
    with pytest.raises(ValueError, match="gaps"):
        BochnerTime().start_from(gaps, 1.0)


def test_a_span_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="span is 0"):
        BochnerTime().start_from([1.0], 0.0)


def test_t20_raw_seconds_carry_no_information_and_warn():
    phi = BochnerTime(512, spectrum="normal").eval()
    gaps = torch.tensor([60.0, 3600.0, 86400.0], dtype=F64)
    assert TimeKernel(phi).psi(gaps).abs().max() < 0.1
    with pytest.warns(UserWarning, match="seconds, fed raw"):
        TimeScaler(1.0).fit(gaps, phi)
    TimeScaler().fit(gaps[1:2].expand(9), phi)  # scaled: no warning


def test_aliasing_warns():
    phi = BochnerTime(2)
    with torch.no_grad():
        phi.quantile.omega.fill_(4.0)
    with pytest.warns(UserWarning, match="aliases"):
        phi.warn_about([1.0, 2.0])
    phi.warn_about([0.5, 2.0])


@pytest.mark.raw
@each("unit", [0.0, -1.0, math.nan, "day"])
def test_a_unit_must_be_positive(unit):
    with pytest.raises(ValueError, match="unit is"):
        TimeScaler(unit)


def test_the_scaler_keeps_float64_through_casts_and_storage():
    scaler = TimeScaler()
    with pytest.raises(RuntimeError, match="fit"):
        scaler(torch.zeros(1))
    scaler.fit([7.0, 1e-9 + 7.0, 7.0]).half()
    assert scaler.unit.dtype == F64
    assert scaler.unit.item() == 7.0
    twin = TimeScaler()
    twin.load_state_dict(scaler.state_dict())
    assert twin.unit == scaler.unit
    elapsed = twin(torch.tensor([[1.0, 8.0]], dtype=F64), torch.tensor([8.0], dtype=F64))
    assert elapsed.dtype == torch.float32
    assert elapsed.tolist() == [[1.0, 0.0]]
    assert twin(torch.tensor([14.0])).item() == 2.0


def test_t18_scaled_times_do_not_depend_on_the_unit():
    t = _times(20, 1e6)
    one, other = TimeScaler(3600.0), TimeScaler(3.6e6)
    torch.testing.assert_close(one(t, t[-1]), other(1000 * t, 1000 * t[-1]), rtol=0, atol=1e-5)


@pytest.mark.raw
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BochnerTime(7), "num_features is 7"),
        (lambda: BochnerTime(8, spectrum="cauchy"), "spectrum must be"),
        (lambda: BochnerTime(8, resample="sometimes"), "resample must be"),
        (lambda: MercerTime(0), "num_periods must be"),
        (lambda: MercerTime(1, 0), "degree must be"),
        (lambda: LogGapTime(0), "at least 1"),
        (lambda: Time2VecTime(1), "at least 2"),
        (lambda: TGATTime(0), "at least 1"),
        (lambda: create_time("mercer", 6), "at least 7"),
        (lambda: create_time("fourier"), "no time features named 'fourier'"),
    ],
)
def test_wrong_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
