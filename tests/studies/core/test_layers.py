"""The benchmark of layers measures what it says, and its verdicts follow the numbers."""

import platform
import subprocess
import sys

import pytest
import torch

from primal_attention.attention import PrimalAttention, ksvd_loss
from primal_attention.support.output import markdown_table, to_csv, write_atomically
from primal_attention.training.memory import PeakMemory, kept_for_backward
from primal_studies.core.layers import LayerOptions, LayerStudy
from primal_studies.core.promises import check_decoding, check_promises
from primal_studies.peers.layers import NaivePrimal


@pytest.mark.parametrize("rank", [3, 8])
def test_textbook_layer_computes_the_same_function_and_gradients(rank):
    layer = PrimalAttention(16, 2, rank=rank, dtype=torch.float64)
    x = torch.randn(2, 30, 16, dtype=torch.float64)
    results = []
    for module in (layer, NaivePrimal(layer)):
        loss = module(x).square().mean() + ksvd_loss(module)
        results.append((loss, *torch.autograd.grad(loss, list(layer.parameters()))))
    torch.testing.assert_close(results[0], results[1], atol=1e-10, rtol=1e-8)


def test_peak_memory_counts_what_lives_at_once():
    with PeakMemory() as memory:
        a = torch.ones(1000)
        b = a + 1
        del a
        c = b + 1
        view = c[:10]
    assert memory.peak == 8000
    assert view.shape == (10,)
    assert memory.live == 8000


def test_kept_for_backward_counts_each_storage_once_and_no_known_tensor():
    x = torch.randn(100, requires_grad=True)
    assert kept_for_backward(lambda: x.square(), [x]) == 0
    assert kept_for_backward(lambda: x.exp().square(), [x]) == 400


def test_fast_layer_keeps_at_most_six_tenths_of_the_textbook_memory():
    layer, x = PrimalAttention(128, 2, rank=20), torch.randn(1, 2048, 128)
    known = [x, *layer.parameters()]
    fast = kept_for_backward(lambda: layer(x), known)
    textbook = kept_for_backward(lambda: NaivePrimal(layer)(x), known)
    assert fast <= 0.6 * textbook


def test_quadratic_attentions_end_where_they_are_told_to():
    options = LayerOptions(lengths=(8, 100), shapes=((2, 8),), quadratic_up_to=50)
    short, long, decoding = LayerStudy().cells(options)
    assert set(short["names"]) - set(long["names"]) == {"softmax"}
    assert decoding["positions"] == [64, 100]
    with pytest.raises(ValueError, match="no attention named"):
        LayerStudy().cells(LayerOptions(names=("sotfmax",)))


def test_decoding_state_is_constant_for_primal_and_grows_for_softmax(tmp_path):
    options = LayerOptions((80,), ((2, 8),), ("primal", "softmax"), (4,), repeats=1)
    cell = LayerStudy().cells(options)[-1]
    rows = LayerStudy().run(cell, options, tmp_path)
    sizes = {(r["name"], r["position"]): r["state_numbers"] for r in rows}
    assert sizes["primal", 64] == sizes["primal", 80]
    assert sizes["softmax", 64] < sizes["softmax", 80]
    assert [c.promise.split(":")[0] for c in check_decoding(rows)] == ["primal"]


def _row(name, n, step_ms):
    costs = {"step_ms": step_ms, "kept_mb": 1.0}
    return {"name": name, "heads": 8, "head_dim": 64, "n": n, **costs}


def test_verdicts_follow_the_numbers():
    rows = [_row("floor", 2048, 10), _row("primal", 2048, 11), _row("linear", 2048, 10.9)]
    verdict = {c.promise: c.holds for c in check_promises(rows)}
    assert verdict["step ≤ 1.2 × projection floor, 8 heads of 64, n ≥ 2,048"] is True
    assert verdict["faster than linear attention at n ≥ 1,024, 8 heads of 64"] is False
    assert verdict["15 × faster than softmax at 16,384, 8 heads of 64"] is None
    # rows of the wanted cells come first and count
    late = check_promises([*rows, _row("primal", 2048, 99)])
    assert {c.promise: c.holds for c in late} == verdict


def test_the_overview_compares_primal_with_softmax():
    base = {"heads": 8, "head_dim": 64, "rank": 4, "batch": 1, "seed": 0, "compiled": False}
    costs = {"step_ms": 2.0, "forward_ms": 1.0, "kept_mb": 1.0, "machine": "a machine"}
    rows = [
        {**base, **costs, "name": name, "n": n, "peak_mb": 3.0 if n == 128 else None}
        for name in ("floor", "primal", "softmax")
        for n in (128, 512)
    ]
    study, options = LayerStudy(), LayerOptions()
    assert study.tables(rows, options)["overview.png"][:4] == b"\x89PNG"
    assert "overview.png" not in study.tables(rows[:4], options)


def test_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "table.csv"
    write_atomically(path, "old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_tables_read_as_text_and_as_csv():
    table = markdown_table(["a", "bb"], [[1, "x"]])
    assert table.splitlines() == ["| a | bb |", "|---|----|", "| 1 | x  |"]
    assert to_csv([{"a": 1, "b": 2}], "note") == "# note\na,b\n1,2\n"


def test_freed_memory_is_kept_and_huge_pages_asked_for(monkeypatch):
    code = (
        "import os; from primal_attention.support.allocator import keep_memory; "
        "print(keep_memory(), os.environ['THP_MEM_ALLOC_ENABLE'])"
    )
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [str(platform.libc_ver()[0] == "glibc"), "1"]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries keep nothing")
def test_kept_memory_can_be_returned():
    code = """
from primal_attention.support.allocator import keep_memory, return_memory
keep_memory()
import torch
def resident(): return int(open("/proc/self/statm").read().split()[1]) * 4096
pieces = [torch.ones(2**20) for _ in range(64)]
last, pieces = pieces[-1], None
kept = resident()
print(return_memory(), (kept - resident()) // 2**20)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    could, freed = run.stdout.split()
    assert could == "True"
    assert int(freed) > 200  # of 252 MiB
