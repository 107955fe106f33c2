"""The study ``depth-teacher``: the teacher, and the error that no single layer can go below."""

import torch

from primal_attention.analysis.depth import LayerShape, poly_self_attention, separation_rank
from primal_attention.tasks.study import find_study, run_study
from primal_studies.depth.teacher import (
    DepthTeacherOptions,
    _least_squares,
    _network,
    _samples,
)


def test_teacher_has_two_layers_of_the_theory():
    assert separation_rank("standard", 2, 4) == 110
    x, y = _samples(200)
    torch.testing.assert_close(x.norm(dim=-1), torch.ones(200, 4))
    torch.testing.assert_close(y.std(), torch.tensor(1.0))
    w = torch.randn(1, 3, 4, 4)
    q, k, v = (x[0] @ m for m in w[0])
    by_hand = sum((q[0] @ k[j]) * v[j] for j in range(4))
    torch.testing.assert_close(_network(x[:1], list(w))[0], by_hand)


def test_least_squares_finds_every_single_layer():
    x, _ = _samples(5000)
    y = sum(_network(x, [torch.randn(3, 4, 4)])[:, i] for i in range(4))  # four heads
    assert _least_squares(x, y) < 1e-9
    x, y = _samples(5000)
    assert _least_squares(x, y) > 0.4


def test_one_layer_on_narrow_tokens_has_rank_five_however_wide_it_is():
    def lifted(field, shape):
        inner = poly_self_attention(field, LayerShape(12, heads=3))
        lift, read = field.random(shape.width, 12), field.random(12, shape.width)
        return lambda x: field.matmul(inner(field.matmul(x, lift)), read)

    assert separation_rank(lifted, 1, 4) == 5


def test_study_runs(tmp_path):
    options = DepthTeacherOptions(widths=(6,), restarts=1, steps=3, samples=300)
    study = find_study("depth-teacher", "bench")
    rows = run_study(study, options, out=tmp_path, report=lambda _: None)
    assert [(row["layers"], row["width"]) for row in rows] == [(1, 0), (1, 6), (2, 4)]
    assert "any width and heads, by least squares" in (tmp_path / "table.md").read_text()
