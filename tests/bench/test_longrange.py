"""The table of Long Range Arena compares like with like and loses no measurement."""

import csv

import pytest
import torch

from primal_attention.attention import list_attentions
from primal_attention.bench.longrange import (
    MEASURE,
    PUBLISHED,
    Plan,
    build,
    contestants,
    main,
    measure,
    summarize,
)
from primal_attention.tasks.longrange import LRA


def test_every_attention_of_the_registry_takes_part():
    assert set(list_attentions()) - set(contestants()) == {"primal-static"}
    assert set(PUBLISHED) <= set(contestants())


@pytest.mark.parametrize("masked", [False, True])
def test_released_softmax_computes_what_fused_softmax_computes(masked):
    released, fused = (build(name, "listops").eval() for name in (MEASURE, "softmax"))
    fused.load_state_dict(released.state_dict())
    x = torch.randint(1, 16, (2, 12))
    keep = torch.arange(12) < torch.tensor([[12], [7]])
    options = {"key_mask": keep} if masked else {}
    results = [model(x, **options).logits for model in (released, fused)]
    torch.testing.assert_close(*results)


def test_released_softmax_drops_weights_in_training_only():
    core = build(MEASURE, "listops").blocks[0].attention.core
    q = torch.randn(1, 2, 6, 4)
    assert not torch.equal(core(q, q, q), core(q, q, q))
    core.eval()
    assert torch.equal(core(q, q, q), core(q, q, q))
    plain = build("softmax-explicit", "listops").blocks[0].attention.core
    assert torch.equal(plain(q, q, q), plain(q, q, q))


def test_primal_plus_has_the_softmax_it_says_below():
    released, fused = (build(name, "image").blocks for name in ("primal+", "primal+sdpa"))
    names = [type(blocks[0].attention.core).__name__ for blocks in (released, fused)]
    assert names == ["ReleasedSoftmaxCore", "SoftmaxCore"]
    assert type(released[1].attention).__name__ == "PrimalAttention"


@pytest.mark.parametrize("task", LRA)
def test_every_task_is_measured_and_continued(task, tmp_path):
    plan = Plan(tasks=(task,), names=(MEASURE, "primal"), rounds=1, shrink=64)
    path = tmp_path / "steps.csv"
    lines = []
    rows = measure(plan, path, lines.append)
    assert len(rows) == len(lines) == 4
    assert measure(plan, path, lines.append) == [
        {**dict.fromkeys(("cpu_seconds", "peak_mb"), ""), **row} for row in rows
    ]
    assert len(lines) == 4
    with path.open() as file:
        kept = list(csv.reader(file))[:3]
    path.write_text("\n".join(",".join(row) for row in kept) + "\n")
    again = measure(plan, path, lines.append)
    assert [(r["name"], r["round"]) for r in again] == [(r["name"], r["round"]) for r in rows]
    assert len(lines) == 6


def test_gains_are_ratios_of_medians_with_the_published_ones_beside():
    def steps(name, seconds, peak):
        common = {"task": "image", "name": name, "n": 1024, "batch": 16}
        return [
            {**common, "peak_mb": peak},
            *({**common, "cpu_seconds": s, "peak_mb": ""} for s in seconds),
        ]

    rows = [
        *steps(MEASURE, [9.0, 4.0, 4.0], 80.0),
        *steps("softmax", [2.0], 20.0),
        *steps("primal", [1.0], 10.0),
    ]
    record = summarize(rows)[-1]
    assert (record["time_gain"], record["published_time"]) == (4.0, 2.3)
    assert (record["memory_gain"], record["published_memory"]) == (8.0, 4.2)
    assert (record["time_gain_sdpa"], record["memory_gain_sdpa"]) == (2.0, 2.0)
    assert record["time_gain_explicit"] is None


def test_command_prints_tables_and_saves_files(tmp_path, capsys):
    names = (MEASURE, "softmax", "primal")
    main(Plan(tasks=("image",), names=names, rounds=1, shrink=64, out=tmp_path))
    assert "Times faster than the released softmax (published)" in capsys.readouterr().out
    saved = {p.name for p in tmp_path.iterdir()}
    assert saved == {"longrange.csv", "longrange.md", "longrange_steps.csv"}


def test_unknown_tasks_are_refused():
    with pytest.raises(ValueError, match="Unknown tasks"):
        Plan(tasks=("images",))
