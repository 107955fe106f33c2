"""The timer takes turns and counts memory."""

import time

import torch

from primal_studies.kit.timing import layer_costs, peak_mb, take_turns
from primal_studies.peers.layers import build_rival


def test_functions_take_turns_until_their_time_is_up():
    called = []
    runs = {"a": lambda: called.append("a"), "b": lambda: called.append("b")}
    times = take_turns(runs, 3, before=lambda: called.append("-"))
    assert called == ["-", "a", "-", "b"] * 3
    assert [len(taken) for taken in times.values()] == [3, 3]
    times = take_turns(runs, 3, seconds=1e-12)
    assert [len(taken) for taken in times.values()] == [1, 1]


def test_one_thread_is_timed_by_its_own_clock():
    def wait():
        time.sleep(0.2)

    # waiting takes no processor time
    assert take_turns({0: wait}, 1)[0][0] < 0.1


def test_peaks_are_those_of_one_call():
    assert peak_mb(lambda: torch.ones(2**18) + torch.ones(2**18)) == 3.0


def test_the_cost_of_a_layer_has_all_its_parts():
    torch.manual_seed(0)
    layers = {name: build_rival(name, 16, 2) for name in ("floor", "primal", "primal-static")}
    x = torch.randn(1, 30, 16, requires_grad=True)
    costs = layer_costs(layers, x, 2)
    for cost in costs.values():
        assert set(cost) == {"forward_ms", "step_ms", "peak_mb", "kept_mb", "repeats"}
        assert min(cost["step_ms"], cost["forward_ms"]) > 0
        assert cost["repeats"] == 2
    assert costs["floor"]["kept_mb"] < costs["primal"]["kept_mb"]
    assert "peak_mb" not in layer_costs(layers, x, 1, counts_memory=False)["floor"]
