"""Finding an attention by name."""

import pytest

from primal_attention import create_attention, list_attentions, register_attention
from primal_attention.attention import Capabilities, SoftmaxAttention, attention_entry
from primal_attention.attention.registry import _ENTRIES


def test_names_filter_by_pattern_and_capability():
    assert {"linear", "primal", "primal-dual", "primal-static", "softmax"} <= set(list_attentions())
    assert {"primal", "primal-dual", "primal-static"} <= set(list_attentions("primal*"))
    assert all(name.startswith("primal") for name in list_attentions("primal*"))
    assert "primal-static" not in list_attentions(cross=True)
    assert "primal-static" in list_attentions("primal*", cross=False)
    assert list_attentions("nothing-*") == []
    assert list_attentions() == sorted(list_attentions())


def test_options_reach_the_constructor():
    layer = create_attention("primal", 16, 4, rank=2, regularizer="kkt")
    assert (layer.rank, layer.regularizer, layer.num_heads) == (2, "kkt", 4)


def test_every_entry_says_what_it_costs_in_one_line():
    for name in list_attentions():
        entry = attention_entry(name)
        assert entry.name == name
        assert entry.cost
        assert entry.summary
        assert "\n" not in entry.summary


@pytest.mark.raw
def test_a_misspelt_name_suggests_the_right_one():
    with pytest.raises(ValueError, match=r"named 'sofmax'.*Did you mean 'softmax'\?.*Known names"):
        create_attention("sofmax", 16)
    with pytest.raises(ValueError, match=r"There is no attention named 'zzz'\. Known names"):
        attention_entry("zzz")


@pytest.mark.raw
def test_unknown_options_and_capabilities_are_refused():
    with pytest.raises(TypeError, match="rnak"):
        create_attention("primal", 16, 4, rnak=2)
    with pytest.raises((TypeError, ValueError, AttributeError), match="flying"):
        list_attentions(flying=True)


def test_new_names_can_be_added_once():
    arguments = {"capabilities": Capabilities(), "cost": "n²", "summary": "for a test"}
    register_attention("test-only", SoftmaxAttention, **arguments)
    try:
        assert create_attention("test-only", 8, 2).num_heads == 2
        with pytest.raises(ValueError, match="already registered"):
            register_attention("test-only", SoftmaxAttention, **arguments)
    finally:
        del _ENTRIES["test-only"]
