"""Mechanisms that promise less than quadratic cost allocate nothing of quadratic size."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from primal_attention.attention import attention_entry, create_attention, list_attentions

LINEAR = [name for name in list_attentions() if "²" not in attention_entry(name).cost]


class Sizes(TorchDispatchMode):
    """Records the number of elements of every new tensor an operator returns."""

    def __init__(self):
        super().__init__()
        self.largest = self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        for t in _tensors(result):
            if t.untyped_storage().data_ptr() not in given:  # not a view of what was there
                # an expanded tensor costs what its storage costs
                size = t.untyped_storage().nbytes() // max(t.element_size(), 1)
                self.largest, self.total = max(self.largest, size), self.total + size
        return result


def _tensors(tree):
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _sizes(name, n, flags):
    layer = create_attention(name, 16, 2).train()
    x = torch.randn(1, n, 16, requires_grad=True)
    with Sizes() as sizes:
        layer(x, key_mask=torch.ones(1, n, dtype=torch.bool), **flags).sum().backward()
    return sizes


@pytest.mark.parametrize(
    ("name", "is_causal"),
    [(name, False) for name in LINEAR]
    + [(name, True) for name in LINEAR if attention_entry(name).capabilities.causal],
)
def test_t25_memory_grows_linearly(name, is_causal):
    flags = {"is_causal": True} if is_causal else {}
    short, long = _sizes(name, 2048, flags), _sizes(name, 4096, flags)
    assert long.largest < 4096 * 4096 / 4
    # n log n: one more level of blocks at twice the length
    logarithmic = "log" in attention_entry(name).cost
    assert long.total < (3.2 if logarithmic else 2.3) * short.total


@pytest.mark.parametrize("name", list_attentions(stateful=True))
def test_a_state_keeps_nothing_of_its_prompt_alive(name):
    layer = create_attention(name, 16, 2).eval()
    with torch.no_grad():
        _, state = layer.step(torch.randn(1, 2000, 16), layer.init_state(1))
    tensors = (*state.tensors, state.seen)
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert sum(held.values()) <= 1.1 * sum(t.nbytes for t in tensors)
