import pytest
import torch
from torch.nn.functional import cross_entropy

from primal_attention.tasks.tables.cells import CellHeads
from primal_attention.tasks.tables.masking import (
    feature_share,
    hidden_feature_loss,
    hide_cells,
    target_losses,
)
from primal_attention.tasks.tables.scoring import coverage, deviation_factor, fit_temperature


def test_rates_of_hidden_and_random_cells():
    # N12, three standard deviations
    values, missing = torch.randn(4000, 5), torch.rand(4000, 5) < 0.2
    values[:, 1] = 2
    found = hide_cells(values, missing, (0, 4, 0, 0, 0), 0.15)
    known = int((~missing).sum())
    share = found.selected.sum() / known
    assert abs(share - 0.15) < 3 * (0.15 * 0.85 / known) ** 0.5
    is_random = found.selected & ~found.hidden
    count = int(found.selected.sum())
    assert abs(is_random.sum() / count - 0.1) < 3 * (0.09 / count) ** 0.5
    assert not (found.selected & missing).any()
    assert torch.equal(found.hidden, missing | (found.selected & ~is_random))
    kept = ~is_random
    assert torch.equal(found.values[kept], values[kept])


def test_random_values_are_of_their_column():
    values = torch.zeros(5000, 2)
    found = hide_cells(values, torch.zeros(5000, 2, dtype=torch.bool), (0, 3), 1.0)
    drawn = found.values[~found.hidden[:, 1], 1]
    assert set(drawn.tolist()) == {0.0, 1.0, 2.0}
    counts = torch.bincount(drawn.long(), minlength=3) / len(drawn)
    assert (counts - 1 / 3).abs().max() < 0.1
    numbers = found.values[~found.hidden[:, 0], 0]
    assert abs(numbers.mean()) < 0.15
    assert abs(numbers.std() - 1) < 0.15


def test_the_weight_of_features_falls_to_zero():
    # N9
    shares = [feature_share(0.5, t / 50) for t in range(51)]
    assert shares[0] == pytest.approx(0.5, abs=1e-7)
    assert shares[-1] == pytest.approx(0, abs=1e-7)
    assert shares == sorted(shares, reverse=True)


def test_the_loss_is_a_mean_over_selected_cells():
    # N13
    torch.manual_seed(0)
    heads, h = CellHeads((0, 3, 0), 4, num_targets=1), torch.randn(6, 3, 4)
    values = torch.randn(6, 3)
    values[:, 1] = torch.tensor([0.0, 1, 2, 0, 1, 2])
    selected = torch.zeros(6, 3, dtype=torch.bool)
    assert hidden_feature_loss(heads, h, values, selected, (0, 3)) == 0
    selected[0, 0] = selected[2, 1] = selected[3, 1] = selected[5, 2] = True
    error = (heads.column(h, 0)[0, 0] - values[0, 0]).square()
    losses = cross_entropy(heads.column(h, 1), values[:, 1].long(), reduction="none")
    want = (error + losses[2] + losses[3]) / 3  # the target's column does not count
    got = hidden_feature_loss(heads, h, values, selected[:, :2], (0, 3))
    torch.testing.assert_close(got, want)


def test_the_deviation_does_not_change_the_gradient_of_the_mean():
    prediction = torch.tensor([[0.5, -1.0], [2.0, 0.3]], requires_grad=True)
    target = torch.tensor([1.0, 1.5])
    target_losses(prediction, target, is_class=False).sum().backward()
    torch.testing.assert_close(prediction.grad[:, 0], 2 * (prediction[:, 0].detach() - target))


def test_the_best_deviation_is_the_error():
    log_std = torch.linspace(-3, 2, 5001)
    prediction = torch.stack([torch.full_like(log_std, 0.4), log_std], 1)
    losses = target_losses(prediction, torch.zeros(5001), is_class=False)
    assert log_std[losses.argmin()].exp() == pytest.approx(0.4, rel=2e-3)


def test_the_temperature_undoes_a_wrong_scale():
    torch.manual_seed(0)
    logits = 2 * torch.randn(4000, 3)
    labels = torch.multinomial(logits.softmax(1), 1)[:, 0]
    assert fit_temperature(3 * logits, labels) == pytest.approx(3, rel=0.08)
    assert fit_temperature(logits / 2, labels) == pytest.approx(0.5, rel=0.08)


def test_deviations_are_scaled_to_held_out_errors():
    torch.manual_seed(0)
    errors = 3 * torch.randn(2000)
    assert deviation_factor(errors, torch.ones(2000), torch.zeros(2000)) == pytest.approx(
        3, rel=0.1
    )
    answers = {"values": errors, "labels": torch.zeros(2000), "std": torch.full((2000,), 3.0)}
    assert coverage(answers).value == pytest.approx(0.9, abs=0.02)
