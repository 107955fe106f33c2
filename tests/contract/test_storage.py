"""Copies, pickles and files give back the same layer, bit for bit."""

import copy
import io
import pickle

import torch
from safetensors.torch import load_file, save_file

from primal_attention.attention import ksvd_terms


def _after_training_step(case):
    """Return a layer that has just run a training forward, and its output in eval mode."""
    layer, arguments = case.build(), case.inputs()
    layer.train()(**arguments).sum()
    return layer, arguments, layer.eval()(**arguments)


def test_deep_copies_agree_also_right_after_a_training_forward(any_case):
    layer, arguments, expected = _after_training_step(any_case)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin.eval()(**arguments), expected)
    assert ksvd_terms(twin) == {}
    assert twin.q_proj.weight.data_ptr() != layer.q_proj.weight.data_ptr()


def test_pickles_agree_also_right_after_a_training_forward(any_case):
    layer, arguments, expected = _after_training_step(any_case)
    twin = pickle.loads(pickle.dumps(layer))
    assert torch.equal(twin.eval()(**arguments), expected)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    twin = torch.load(buffer, weights_only=False)
    assert torch.equal(twin.eval()(**arguments), expected)


def test_safetensors_files_restore_a_layer_built_from_another_seed(any_case, tmp_path):
    layer, arguments, expected = _after_training_step(any_case)
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other = any_case.build(seed=5)
    assert not torch.equal(other.eval()(**arguments), expected)
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    assert torch.equal(other.eval()(**arguments), expected)


def test_a_layer_built_on_meta_takes_a_state_dict(any_case):
    layer, arguments, expected = _after_training_step(any_case)
    other = any_case.build(device="meta")
    other.load_state_dict(layer.state_dict(), assign=True)
    left_behind = [name for name, t in other.named_buffers() if t.device.type == "meta"]
    assert left_behind == []
    assert torch.equal(other.eval()(**arguments), expected)
