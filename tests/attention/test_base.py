"""Capabilities, states and the base class."""

import dataclasses

import pytest
import torch

from primal_attention.attention import Attention, Capabilities, State


def _state():
    return State((torch.arange(6.0).view(3, 2), torch.ones(3, 1, 2)), torch.tensor([1, 2, 3]))


def test_states_reorder_and_repeat_sequences():
    state = _state().reorder(torch.tensor([2, 0, 2, 2]))
    assert state.seen.tolist() == [3, 1, 3, 3]
    assert state.tensors[0].tolist() == [[4, 5], [0, 1], [4, 5], [4, 5]]
    assert state.tensors[1].shape == (4, 1, 2)


def test_states_count_their_numbers():
    assert _state().numel == 6 + 6 + 3


def test_states_move_and_detach():
    grown = State((torch.ones(1, 2, requires_grad=True) * 2,), torch.tensor([1]))
    assert not grown.detach().tensors[0].requires_grad
    assert grown.tensors[0].requires_grad
    assert grown.to("meta").seen.device.type == "meta"


def test_capabilities_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Capabilities().causal = False


def test_the_base_class_cannot_attend_or_decode():
    base = Attention(8, 2)
    with pytest.raises(NotImplementedError):
        base(torch.randn(1, 2, 8))
    with pytest.raises(ValueError, match=r"cannot decode step by step; use one of: .*primal"):
        base.init_state(1)


def test_heads_are_views():
    base, x = Attention(8, 2), torch.randn(2, 3, 8)
    heads = base._split(x)
    assert heads.shape == (2, 2, 3, 4)
    assert heads.data_ptr() == x.data_ptr()
    assert torch.equal(base._merge(heads), x)
