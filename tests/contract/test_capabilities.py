"""What a layer says it can do is true, and what it cannot do raises with a way out."""

import dataclasses

import pytest
import torch
from tests.contract.cases import rows
from tests.house.rows import each

from primal_attention.attention import Capabilities, Rotary, attention_entry, list_attentions

X = torch.randn(2, 5, 16)
ASK = {
    "padding": lambda layer: layer(X, key_mask=torch.ones(2, 5, dtype=torch.bool)),
    "causal": lambda layer: layer(X, is_causal=True),
    "cross": lambda layer: layer(X, torch.randn(2, 3, 16)),
    "stateful": lambda layer: layer.step(X, layer.init_state(2)),
    "aux_loss": lambda layer: layer(X, return_aux=True),
    "documents": lambda layer: layer(X, document_ids=torch.zeros(2, 5, dtype=torch.long)),
    "rotary": lambda layer: layer(X, rotary=Rotary(*torch.randn(2, 1, 5, 2))),
}


@each("any_case", rows())
def test_a_layer_has_the_capabilities_of_its_registry_entry(any_case):
    assert any_case.build().capabilities == attention_entry(any_case.name).capabilities


@each("any_case", rows())
@each("capability", ASK)
def test_a_capability_is_honoured_or_refused_with_an_alternative(any_case, capability):
    layer, able = any_case.build(), getattr(any_case.capabilities, capability)
    if able:
        ASK[capability](layer)
        return
    with pytest.raises(ValueError, match="cannot") as caught:
        ASK[capability](layer)
    alternatives = list_attentions(**{capability: True})
    assert any(name in str(caught.value) for name in alternatives)


def test_every_capability_but_the_descriptive_ones_is_asked_for_here():
    # test_time.py asks for every value of time, test_magnitudes.py for large tokens
    described = {
        "relative_position",
        "deterministic",
        "mixes_without_order",
        "time",
        "max_magnitude",
        "max_magnitude_float16",
    }
    assert {f.name for f in dataclasses.fields(Capabilities)} == described | set(ASK)


@each("cross_case", rows(cross=True))
def test_causal_order_and_a_context_exclude_each_other(cross_case):
    with pytest.raises(ValueError, match="share no order"):
        cross_case.build()(X, X, is_causal=True)


@each("any_case", rows())
def test_queries_keys_and_values_by_position_are_refused_in_words(any_case):
    with pytest.raises(TypeError, match=r"got 3 arguments.*write attn\(x\) for self-attention"):
        any_case.build()(X, X, X)


@pytest.mark.raw
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": torch.randn(5, 16)}, ValueError, r"\[batch, tokens, 16\], got \(5, 16\)"),
        ({"x": torch.randn(2, 5, 12)}, ValueError, r"got \(2, 5, 12\)"),
        ({"x": X, "context": torch.randn(2, 16)}, ValueError, "context must have shape"),
        ({"x": X, "context": torch.randn(3, 5, 16)}, ValueError, "same batch size, got 2 and 3"),
        ({"x": X, "key_mask": torch.ones(2, 5)}, TypeError, "must be boolean"),
        ({"x": X, "key_mask": torch.ones(2, 4).bool()}, ValueError, r"\(2, 5\), got \(2, 4\)"),
        ({"x": X, "key_mask": torch.ones(5).bool()}, ValueError, r"got \(5,\)"),
        ({"x": X, "key_mask": torch.ones(5, 5).bool()}, ValueError, "pairs of tokens"),
        ({"x": X, "key_mask": torch.ones(2, 5, 5).bool()}, ValueError, "pairs of tokens"),
    ],
    ids=lambda value: None if isinstance(value, dict) else getattr(value, "__name__", None),
)
@each("any_case", rows())
def test_bad_tensors_are_refused_in_words(any_case, arguments, error, message):
    needs = {"context": "cross", "key_mask": "padding"}
    unable = any(
        name in arguments and not getattr(any_case.capabilities, capability)
        for name, capability in needs.items()
    )
    with pytest.raises((error, ValueError), match=f"{message}|cannot" if unable else message):
        any_case.build()(**arguments)


@pytest.mark.raw
@each("stateful_case", rows(stateful=True))
def test_steps_refuse_bad_tensors_in_words(stateful_case):
    layer = stateful_case.build()
    with pytest.raises(ValueError, match=r"\[batch, tokens, 16\]"):
        layer.step(torch.randn(2, 16), layer.init_state(2))
    with pytest.raises(ValueError, match=r"\(2, 5\), got \(2, 4\)"):
        layer.step(X, layer.init_state(2), key_mask=torch.ones(2, 4).bool())


@each("stateful_case", rows(stateful=True))
def test_steps_refuse_the_state_of_another_batch_in_words(stateful_case):
    layer = stateful_case.build()
    _, state = layer.step(X, layer.init_state(2))
    for b in (1, 3):
        with pytest.raises(ValueError, match=rf"same batch size, got {b} and 2; use init_state"):
            layer.step(torch.randn(b, 1, 16), state)
    layer.step(torch.randn(1, 1, 16), state.reorder(torch.tensor([1])))


@pytest.mark.raw
@each("any_case", rows())
@each("dim, num_heads", [(16, 3), (16, 0), (0, 1), (16, -2)])
def test_heads_must_divide_the_width(any_case, dim, num_heads):
    with pytest.raises(ValueError, match=f"got dim={dim} and num_heads={num_heads}"):
        any_case.build(dim, num_heads)


@each("any_case", rows())
def test_unknown_options_are_refused(any_case):
    with pytest.raises(TypeError, match="colour"):
        any_case.build(colour="blue")
