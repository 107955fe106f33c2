"""How the regulariser travels from the layers to the training loop."""

import copy
import subprocess
import sys
import textwrap

import pytest
import torch
from tests.house.rows import each
from torch import nn

from primal_attention import PrimalAttention, ksvd_loss, ksvd_terms
from primal_attention.attention import PublishesTerms, SoftmaxAttention


def _model():
    return nn.Sequential(PrimalAttention(8, 2), SoftmaxAttention(8, 2), PrimalAttention(8, 2))


def test_terms_carry_the_names_of_their_layers_and_stay_until_collected():
    model, x = _model(), torch.randn(2, 5, 8)
    assert ksvd_terms(model) == {}
    model(x)
    terms = ksvd_terms(model)
    assert list(terms) == ["0", "2"]
    assert list(ksvd_terms(model)) == ["0", "2"]
    assert torch.equal(terms["0"], model[0](x, return_aux=True)[1].loss)


def test_the_loss_is_the_mean_or_the_sum_and_clears_the_terms():
    model, x = _model(), torch.randn(2, 5, 8)
    model(x)
    terms = torch.stack(list(ksvd_terms(model).values()))
    torch.testing.assert_close(ksvd_loss(model), terms.mean())
    assert ksvd_terms(model) == {}
    model(x)
    torch.testing.assert_close(ksvd_loss(model, layers="sum"), terms.sum())


def test_nothing_published_raises():
    model = _model()
    with pytest.raises(RuntimeError, match=r"no published term.*model\.train\(\)"):
        ksvd_loss(model)
    model(torch.randn(2, 5, 8))
    ksvd_loss(model)
    with pytest.raises(RuntimeError, match="no published term"):
        ksvd_loss(model)


def test_the_loss_is_zero_where_there_is_nothing_to_lose():
    x = torch.randn(2, 5, 8)
    without = PrimalAttention(8, 2, regularizer=None)
    quiet = _model().eval()
    for model in (nn.Linear(8, 8), SoftmaxAttention(8, 2), without, quiet):
        (model(x).sum() + ksvd_loss(model)).backward()
        assert ksvd_loss(model).item() == 0
    # a layer in training mode has a term to lose
    quiet[2].train()
    with pytest.raises(RuntimeError, match="no published term"):
        ksvd_loss(quiet)


@pytest.mark.raw
def test_an_unknown_reduction_is_refused_and_clears_nothing():
    model = _model()
    model(torch.randn(2, 5, 8))
    with pytest.raises(ValueError, match="'mean' or 'sum', got 'max'"):
        ksvd_loss(model, layers="max")
    assert len(ksvd_terms(model)) == 2


def test_evaluation_return_aux_and_no_regularizer_publish_nothing():
    x = torch.randn(2, 5, 8)
    quiet = PrimalAttention(8, 2).eval()
    quiet(x)
    layer = PrimalAttention(8, 2)
    layer(x, return_aux=True)
    without = PrimalAttention(8, 2, regularizer=None)
    without(x)
    assert ksvd_terms(quiet) == ksvd_terms(layer) == ksvd_terms(without) == {}
    with pytest.raises(ValueError, match="cannot return an auxiliary loss"):
        without(x, return_aux=True)


def test_decoding_publishes_nothing():
    layer = PrimalAttention(8, 2)
    layer.step(torch.randn(1, 3, 8), layer.init_state(1))
    assert ksvd_terms(layer) == {}


def test_only_the_last_forward_counts():
    layer, x = PrimalAttention(8, 2), torch.randn(2, 5, 8)
    layer(torch.randn(2, 5, 8))
    layer(x)
    assert torch.equal(ksvd_loss(layer), layer(x, return_aux=True)[1].loss)


def test_a_term_without_gradient_raises_where_gradients_are_on():
    layer, x = PrimalAttention(8, 2), torch.randn(2, 5, 8)
    with torch.no_grad():
        layer(x)
        assert ksvd_loss(layer).isfinite()
        layer(x)
    with pytest.raises(RuntimeError, match="layer 'model' carries no gradient"):
        ksvd_loss(layer)


@each("freeze", ["all", "all but the output", "all, under no_grad"])
def test_a_frozen_layer_has_a_constant_term_that_counts(freeze):
    model, x = nn.Sequential(PrimalAttention(8, 2), PrimalAttention(8, 2)), torch.randn(2, 5, 8)
    model(x)
    expected = ksvd_loss(model).item()
    model[0].requires_grad_(False)
    if freeze == "all but the output":  # which no regulariser sees
        model[0].out_proj.requires_grad_()
    with torch.set_grad_enabled(freeze != "all, under no_grad"):
        hidden = model[0](x)
    model[1](hidden)
    loss = ksvd_loss(model)
    assert loss.item() == pytest.approx(expected)
    loss.backward()
    assert model[0].lam.grad is None
    assert model[1].lam.grad.abs().sum() > 0


def test_a_model_without_anything_to_train_has_a_constant_loss():
    model = _model().requires_grad_(False)
    model(torch.randn(2, 5, 8))
    assert not ksvd_loss(model).requires_grad


def test_a_frozen_layer_is_no_excuse_for_another_that_lost_its_gradient():
    model, x = _model(), torch.randn(2, 5, 8)
    model[0].requires_grad_(False)
    with torch.no_grad():
        model(x)
    with pytest.raises(RuntimeError, match="layer '2' carries no gradient"):
        ksvd_loss(model)


def test_a_term_lost_inside_is_noticed_although_another_module_publishes_it():
    class Model(PublishesTerms):
        def __init__(self):
            super().__init__()
            self.layer = PrimalAttention(8, 2)

        def forward(self, x):
            with torch.no_grad():  # as reentrant checkpointing does
                y, aux = self.layer(x, return_aux=True)
            self.publish({"layer": aux.loss})
            return y

    model = Model()
    model(torch.randn(2, 5, 8))
    with pytest.raises(RuntimeError, match="layer 'layer' carries no gradient"):
        ksvd_loss(model)


def test_the_loss_trains_the_layer():
    layer = PrimalAttention(8, 2)
    layer(torch.randn(2, 5, 8))
    ksvd_loss(layer).backward()
    assert layer.lam.grad.abs().sum() > 0
    assert layer.w_e.grad.abs().sum() > 0
    assert layer.q_proj.weight.grad.abs().sum() > 0
    assert not layer.out_proj.weight.grad.any()


def test_copies_right_after_a_forward_leave_the_term_behind():
    layer = PrimalAttention(8, 2)
    layer(torch.randn(2, 5, 8))
    average = torch.optim.swa_utils.AveragedModel(layer)
    assert ksvd_terms(average) == {}
    assert ksvd_terms(copy.copy(layer)) == {}
    assert len(ksvd_terms(layer)) == 1
    average.update_parameters(layer)
    ksvd_loss(layer).backward()


def test_a_model_can_publish_for_its_layers():
    class Model(PublishesTerms):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(PrimalAttention(8, 2) for _ in range(2))

        def forward(self, x):
            terms = {}
            for i, layer in enumerate(self.layers):
                x, aux = layer(x, return_aux=True)
                terms[f"layers.{i}"] = aux.loss
            self.publish(terms)
            return x

    model = nn.ModuleDict({"inner": Model()})
    model["inner"](torch.randn(2, 5, 8))
    assert list(ksvd_terms(model)) == ["inner.layers.0", "inner.layers.1"]
    ksvd_loss(model).backward()
    model.eval()
    model["inner"](torch.randn(2, 5, 8))
    assert ksvd_terms(model) == {}


def test_the_term_is_float32_whatever_the_layer():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        layer = PrimalAttention(8, 2).to(dtype)
        layer(torch.randn(2, 5, 8).to(dtype))
        assert ksvd_loss(layer).dtype == torch.float32


WORKER = """
    import sys
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from primal_attention import PrimalAttention, ksvd_loss

    rank, store = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    single = PrimalAttention(8, 2, rank=3, dtype=torch.float64)
    torch.manual_seed(0)
    model = DistributedDataParallel(PrimalAttention(8, 2, rank=3, dtype=torch.float64))
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    for eta in (0.0, 0.5, 0.0):
        model.zero_grad(), single.zero_grad()
        (model(x[2 * rank :][:2]).square().mean() + eta * ksvd_loss(model)).backward()
        (single(x).square().mean() + eta * ksvd_loss(single)).backward()
        for a, b in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_t17_data_parallel_training_gives_the_gradients_of_the_whole_batch(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    command = [sys.executable, "-W", "ignore", str(script)]
    workers = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    errors = [worker.communicate(timeout=300)[1].decode() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(errors)
