"""The table of Long Range Arena compares like with like."""

import pytest
import torch

from primal_attention.attention import list_attentions
from primal_studies.longrange.cost import (
    BASE,
    PUBLISHED,
    CostOptions,
    CostStudy,
    build_model,
    gains,
    rivals,
)


def test_every_attention_of_the_registry_takes_part():
    assert set(list_attentions()) - set(rivals()) == {"primal-static"}
    assert set(PUBLISHED) <= set(rivals())


@pytest.mark.parametrize("masked", [False, True])
def test_released_softmax_computes_what_fused_softmax_computes(masked):
    released, fused = (build_model(name, "listops").eval() for name in (BASE, "softmax"))
    fused.load_state_dict(released.state_dict())
    x = torch.randint(1, 16, (2, 12))
    keep = torch.arange(12) < torch.tensor([[12], [7]])
    options = {"key_mask": keep} if masked else {}
    results = [model(x, **options).logits for model in (released, fused)]
    torch.testing.assert_close(*results)


def test_released_softmax_drops_weights_in_training_only():
    core = build_model(BASE, "listops").blocks[0].attention.core
    q = torch.randn(1, 2, 6, 4)
    assert not torch.equal(core(q, q, q), core(q, q, q))
    core.eval()
    assert torch.equal(core(q, q, q), core(q, q, q))
    plain = build_model("softmax-explicit", "listops").blocks[0].attention.core
    assert torch.equal(plain(q, q, q), plain(q, q, q))


def test_primal_plus_has_the_softmax_it_says_below():
    released, fused = (build_model(name, "image").blocks for name in ("primal+", "primal+sdpa"))
    names = [type(blocks[0].attention.core).__name__ for blocks in (released, fused)]
    assert names == ["ReleasedSoftmaxCore", "SoftmaxCore"]
    assert type(released[1].attention).__name__ == "PrimalAttention"


def test_gains_are_ratios_with_the_published_ones_beside():
    def row(name, seconds, peak):
        shape = {"task": "image", "n": 1024, "batch": 16, "seed": 0, "machine": "here"}
        return {**shape, "name": name, "cpu_seconds": seconds, "peak_mb": peak}

    rows = [row(BASE, 4.0, 80.0), row("softmax", 2.0, 20.0), row("primal", 1.0, 10.0)]
    assert gains(rows, "cpu_seconds", BASE)["image", "primal"] == 4.0
    assert gains(rows, "peak_mb", "softmax")["image", "primal"] == 2.0
    assert gains(rows, "peak_mb", "softmax-explicit") == {}
    table = CostStudy().tables(rows, CostOptions())["table.md"]
    assert "| primal           | 4.0 (2.3)" in table
    assert "| primal           | 8.0 (4.2)" in table


def test_unknown_tasks_are_refused():
    with pytest.raises(ValueError, match=r"tasks has no 'images'\. Did you mean 'image'\?"):
        CostStudy().cells(CostOptions(tasks=("images",)))
