"""What is recorded is what the modules got and returned, and nothing stays behind."""

import pytest
import torch
from torch import nn

from primal_attention.attention import create_attention
from primal_attention.hosts import batch_arguments, layer_inputs, record_run, run_batch
from primal_attention.hosts.recording import change_output, first_tensor, watch_modules


class Twice(nn.Module):
    """Calls its layer twice, inside a module that is recorded, too."""

    def __init__(self):
        super().__init__()
        self.outer = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))

    def forward(self, x, labels=None):
        return {"loss": labels, "y": self.outer(self.outer(x))}


def has_hooks(model):
    return any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_run_records_the_last_call_in_the_order_of_the_forward():
    model, x = Twice(), torch.randn(3, 2)
    calls = record_run(model, ["outer.0", "outer"], x)
    assert list(calls) == ["outer", "outer.0"]
    once = model.outer[0](x)  # without dropout: the run is in evaluation mode
    torch.testing.assert_close(calls["outer.0"].args[0], once)
    torch.testing.assert_close(calls["outer"].output, model.outer[0](once))
    assert model.training
    assert not calls["outer"].output.requires_grad
    assert not has_hooks(model)


def test_every_call_can_be_watched():
    model, seen = Twice(), []
    modules = {"layer": model.outer[0]}
    with watch_modules(modules, leave=lambda name, call: seen.append((name, call.output.shape))):
        model(torch.ones(3, 2))
    assert seen == [("layer", (3, 2))] * 2


def test_hooks_are_removed_after_an_error():
    model = Twice()
    with pytest.raises(RuntimeError):
        record_run(model, ["outer"], torch.ones(3, 5))
    assert not has_hooks(model)
    assert model.training


def test_a_changed_output_is_what_the_model_goes_on_with():
    model = nn.Sequential(nn.Identity(), nn.Linear(2, 1))
    with change_output(model[0], torch.zeros_like):
        assert torch.equal(model(torch.ones(1, 2))[0], model[1].bias)
    assert not has_hooks(model)
    pair = nn.Module()
    pair.forward = lambda x: (x, "rest")
    with change_output(pair, torch.neg):
        assert pair(torch.ones(1)) == (-1, "rest")


def test_a_batch_is_cut_only_if_that_is_asked_for():
    x = torch.randn(3, 2)
    (first, second), _ = batch_arguments((x, x))
    assert first is second is x
    assert batch_arguments([x, "a"], 2)[0][0].shape == (2, 2)


def test_labels_reach_the_model_only_if_that_is_asked_for():
    batch = {"x": torch.ones(1, 2), "labels": torch.ones(1)}
    assert run_batch(Twice().eval(), batch)["loss"] is None
    assert run_batch(Twice().eval(), batch, labels=True)["loss"] is batch["labels"]


@pytest.mark.raw
def test_the_first_tensor_is_found_in_pairs_and_outputs():
    x = torch.ones(2)
    assert first_tensor(((x, None), None)) is x
    assert first_tensor({"loss": None, "y": x}) is x
    with pytest.raises(TypeError, match="a tensor first, got str"):
        first_tensor("text")


def test_inputs_of_our_layers_are_found_inside_any_model():
    model = nn.Sequential(create_attention("softmax", 8, 2), create_attention("linear", 8, 2))
    x = torch.randn(1, 5, 8)
    found = layer_inputs(model, x)
    assert list(found) == ["0", "1"]
    assert found["0"].x is x
