"""Flow of primal layers without an n × n matrix, and of linear layers of this library."""

import pytest
import torch
from torch import nn

from primal_attention.analysis.flow import (
    FlowDetails,
    block_energy,
    contribution_shares,
    direction_shares,
    membership,
    modality_flow,
    split_scores,
)
from primal_attention.analysis.flow.layers import LayerReader, value_norms
from primal_attention.attention import create_attention, list_attentions
from primal_attention.hosts import CapturedScores, LayerInputs, capture
from primal_attention.training import PeakMemory

IDS = torch.tensor([0] * 9 + [1] * 14)
N = len(IDS)
P = membership(IDS, 2)


def close(found, want, tolerance=1e-10):
    torch.testing.assert_close(found, want.to(found.dtype), atol=tolerance, rtol=tolerance)


def random_scores(h=2, n=N, s=4):
    e, r = torch.randn(2, h, n, s, dtype=torch.float64)
    return CapturedScores(e, r, torch.rand(h, s, dtype=torch.float64))


def kernel(scores):
    return torch.einsum("hns,hs,hms->hnm", scores.e, scores.lam, scores.r)


def test_energy_equals_that_of_the_matrix():  # F7
    scores = random_scores()
    dense = kernel(scores)
    energy = block_energy(scores, P, P)
    close(energy, P.T @ dense.square() @ P)
    close(energy.sum((1, 2)), dense.square().sum((1, 2)))
    causal = block_energy(scores, P, P, is_causal=True)
    close(causal, P.T @ dense.square().tril() @ P)


def test_causal_energy_over_several_chunks():  # F7
    scores, ids = random_scores(1, 700, 3), torch.randint(0, 3, (700,))
    p = membership(ids, 3)
    want = p.T @ kernel(scores).square().tril() @ p
    close(block_energy(scores, p, p, is_causal=True), want)


def test_singular_directions_are_those_of_the_matrix():  # F7
    scores = random_scores()
    u, sigma, vh = torch.linalg.svd(kernel(scores))
    found = direction_shares(scores, P, P)
    close(found.sigma, sigma[:, :4], 1e-9)
    close(found.receivers, (u[..., :4].square().mT @ P), 1e-8)
    close(found.senders, (vh[:, :4].square() @ P), 1e-8)
    left, right = found.receivers, found.senders
    close(found.alignment, left[..., 0] * right[..., 1] + left[..., 1] * right[..., 0])
    # at the optimum, scores UΣ and VΣ with Λ = 1/Σ, the columns of the scores are the directions
    e, r = u[..., :4] * sigma[:, None, :4], vh[:, :4].mT * sigma[:, None, :4]
    best = direction_shares(CapturedScores(e, r, 1 / sigma[:, :4]), P, P)
    share = torch.einsum("hns,na->hsa", e.square(), P) / e.square().sum(1)[..., None]
    close(best.receivers, share, 1e-8)
    close(best.sigma, sigma[:, :4], 1e-9)


def test_more_directions_than_tokens_are_zero():
    found = direction_shares(random_scores(1, 3, 5), P[:3], P[:3])
    assert found.sigma.shape == (1, 5)
    assert not found.sigma[:, 3:].any()
    assert bool(found.alignment.isfinite().all())


class Wrapped(nn.Module):
    """A layer and how it is called."""

    def __init__(self, layer, **options):
        super().__init__()
        self.attention, self.options = layer, options

    def forward(self, x, **extra):
        return self.attention(x, **self.options, **extra)


LAYERS = {
    "data": {"name": "primal", "rank": 4},
    "table": {"name": "primal", "rank": 4, "codes": "table"},
    "dual": {"name": "primal-dual", "rank": 4},
    "relative": {"name": "primal-relative", "rank": 4, "window": 5},
    "static": {"name": "primal-static", "rank": 4},
    "decay": {"name": "primal-static", "rank": 4, "decay": 0.8},
}


def primal_layer(kind):
    options = dict(LAYERS[kind])
    return create_attention(options.pop("name"), 16, 2, **options).double().eval()


def head_outputs(layer, x, **options):
    """Return the scores (e ; r) of every head, read from the input of the layer's output map."""
    seen = []
    hook = layer.concat.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        layer(x, **options)
    hook.remove()
    return seen[0]


CASES = [(kind, True) for kind in LAYERS]
CASES += [(kind, False) for kind in ("data", "table", "dual", "relative", "static")]


@pytest.mark.filterwarnings("ignore:static weights")
@pytest.mark.parametrize(("kind", "is_causal"), CASES)
def test_parts_add_up_to_the_scores_of_the_layer(kind, is_causal):  # F8
    layer, x = primal_layer(kind), torch.randn(1, N, 16, dtype=torch.float64)
    parts = split_scores(layer, LayerInputs(x, None, None, is_causal), P)
    scores = head_outputs(layer, x, is_causal=is_causal)
    both = torch.cat([parts.e.sum(0), parts.r.sum(0)], -1)[None]
    close(both, scores, 1e-10)
    share = contribution_shares(parts.e)
    close(share.sum(-1), torch.ones(2, N))


def test_a_part_depends_on_the_tokens_of_its_modality_alone():
    layer, x = primal_layer("dual"), torch.randn(1, N, 16, dtype=torch.float64)
    other = x.clone()
    other[:, 12:] += torch.randn(1, N - 12, 16)
    first, second = (split_scores(layer, LayerInputs(t, None, None, False), P) for t in (x, other))
    close(first.e[0, :, :12], second.e[0, :, :12])
    assert float((first.e[1] - second.e[1]).abs().max()) > 1e-3


def test_contribution_equals_columns_of_the_kernel_times_duals():  # F7
    layer, x = primal_layer("dual"), torch.randn(1, N, 16, dtype=torch.float64)
    q, k = nn.functional.normalize(layer.project_heads(x), dim=-1).chunk(2, 1)
    dual_e, dual_r = layer.project_duals(x).chunk(2, 1)
    dense = (q @ k.mT)[0] / N
    parts = split_scores(layer, LayerInputs(x, None, None, False), P)
    for c in range(2):
        chosen = c == IDS
        close(parts.e[c], dense[..., chosen] @ dual_r[0][:, chosen])
        close(parts.r[c], dense.mT[..., chosen] @ dual_e[0][:, chosen])


def test_contribution_with_a_context():  # F8
    x, context = torch.randn(1, 5, 16).double(), torch.randn(1, N, 16).double()
    for kind in ("data", "dual"):
        layer = primal_layer(kind)
        parts = split_scores(layer, LayerInputs(x, context, None, False), P)
        scores = head_outputs(layer, x, context=context)
        close(torch.cat([parts.e.sum(0), parts.r.sum(0)], -1)[None], scores)


@pytest.mark.filterwarnings("ignore:static weights")
def test_static_weights_contribute_nothing_between_modalities():  # F9
    model = Wrapped(primal_layer("static"))
    x = torch.randn(3, N, 16, dtype=torch.float64)
    found = modality_flow(model, {"x": x}, IDS, details=FlowDetails(primal="contribution"))
    assert torch.equal(found.imf, torch.zeros(1).double())
    assert torch.equal(found.flow[0], torch.eye(2).double())
    assert any("0 by definition" in note for note in found.notes)
    energy = modality_flow(model, {"x": x}, IDS)
    assert float(energy.imf) > 0.1


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["data", "dual", "relative"])
def test_primal_layers_of_a_model_are_read_through_their_scores(kind, is_causal):
    model = Wrapped(primal_layer(kind), is_causal=is_causal)
    x = torch.randn(2, N + 3, 16, dtype=torch.float64)
    keep = torch.ones(2, N + 3, dtype=torch.bool)
    keep[:, N:] = False
    x[:, N:] = torch.nan
    ids = torch.cat([IDS, torch.zeros(3, dtype=torch.long)])
    has_energy = kind == "dual" or (kind == "data" and not is_causal)
    found = modality_flow(model, {"x": x, "key_mask": keep}, ids)
    assert found.readings == ("energy of scores" if has_energy else "contribution to scores",)
    assert bool(found.flow.isfinite().all())
    assert (found.primal[0].energy is not None) == has_energy
    if has_energy:
        dense = [
            kernel(layer.scores(i)) for layer in capture(model, {"x": x[:, :N]}) for i in (0, 1)
        ]
        dense = torch.stack([d.square().tril() if is_causal else d.square() for d in dense])
        blocks = (P.T @ dense @ P).mean(1)
        close(found.flow[0], (blocks / blocks.sum(-1, keepdim=True)).mean(0))
        assert 0 <= found.primal[0].alignment_share <= 1
        directions = [
            direction_shares(layer.scores(i), P, P)
            for layer in capture(model, {"x": x[:, :N]})
            for i in (0, 1)
        ]
        spent = [(one.sigma * one.alignment).sum() / one.sigma.sum() for one in directions]
        assert found.primal[0].alignment_share == pytest.approx(float(sum(spent)) / 2)
        share = torch.tensor([9, 14]) / N
        assert found.primal[0].alignment_chance == pytest.approx(float(2 * share.prod()))
    shares = [
        contribution_shares(
            split_scores(model.attention, LayerInputs(one[None, :N], None, None, is_causal), P).e
        )
        for one in x
    ]
    want = torch.stack([(P.T @ share).mean(0) / P.sum(0)[:, None] for share in shares]).mean(0)
    close(found.primal[0].contribution_e, want)


def test_shares_of_contribution_are_those_of_the_norms_of_both_sides():
    parts = torch.tensor([3.0, 4.0, 0.0, 5.0]).reshape(2, 1, 1, 2)
    close(contribution_shares(parts), torch.tensor([[[0.5, 0.5]]]))
    close(contribution_shares(2 * parts[:1]), torch.ones(1, 1, 1))
    uneven = torch.cat([parts[:1], 3 * parts[1:]])
    close(contribution_shares(uneven), torch.tensor([[[0.25, 0.75]]]))
    model = Wrapped(primal_layer("dual"))
    x = torch.randn(2, N, 16, dtype=torch.float64)
    found = modality_flow(model, {"x": x}, IDS, details=FlowDetails(primal="contribution"))
    sides = found.primal[0].contribution_e, found.primal[0].contribution_r
    close(found.flow[0], (sides[0] + sides[1]) / 2)
    assert float((sides[0] - sides[1]).abs().max()) > 1e-3


def test_chance_of_a_causal_kernel_is_a_constant_one():
    layer = primal_layer("dual")
    with torch.no_grad():
        for weight in (layer.q_proj.weight, layer.k_proj.weight, layer.dual_e.weight):
            weight.zero_()
        layer.q_proj.bias.fill_(1)
        layer.k_proj.bias.fill_(1)
        layer.dual_e.weight.fill_(0.1)
        layer.dual_r.weight.fill_(0.1)
    x = torch.ones(1, N, 16, dtype=torch.float64)  # all scores are equal
    found = modality_flow(Wrapped(layer, is_causal=True), {"x": x}, 1 - IDS)
    assert found.readings == ("energy of scores",)
    close(found.lift[found.has_lift], torch.ones(int(found.has_lift.sum())))
    assert int(found.has_lift.sum()) == 3


LINEAR = [name for name in list_attentions() if not name.startswith("primal")]


@pytest.mark.parametrize("name", LINEAR)
def test_layers_of_this_library_are_read_without_their_matrix(name):
    model = Wrapped(create_attention(name, 16, 2).double().eval())
    x = torch.randn(1, N, 16, dtype=torch.float64)
    layer = capture(model, {"x": x})[0]
    reader = LayerReader(layer, IDS[None], IDS[None], 2)
    weights = layer.weights(0)
    assert reader._is_own == (name != "linformer")  # which projects values in its own way
    if not reader._is_own:
        return
    close(reader._own_sums(0, P), weights @ P, 1e-5)
    norm = LayerReader(layer, IDS[None], IDS[None], 2, "norm", out=model.attention.out_proj.weight)
    norms = value_norms(layer.values(0), norm.out)
    close(norm.sums(0, P)[0], (weights * norms[:, None]) @ P, 1e-5)


def test_padding_and_order_of_layers_of_this_library():
    model = Wrapped(create_attention("softmax", 16, 2).double().eval(), is_causal=True)
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    ids = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0, 0])
    want = modality_flow([capture(model, {"x": x})[0].weights()[None]], ids)
    close(modality_flow(model, {"x": x}, ids).flow, want.flow, 1e-7)
    padded = torch.cat([torch.full((1, 2, 16), torch.nan).double(), x], 1)
    keep = torch.tensor([[False] * 2 + [True] * 9])
    long = torch.cat([torch.tensor([-1, -1]), ids])
    found = modality_flow(model, {"x": padded, "key_mask": keep}, long)
    close(found.flow, want.flow, 1e-7)
    close(found.chance, want.chance)
    assert not found.has_lift[0, 1, 0]


def test_weights_below_zero_are_read_by_their_energy():
    model = Wrapped(create_attention("nystromformer", 16, 2).double().eval())
    x = torch.randn(1, N, 16, dtype=torch.float64)
    found = modality_flow(model, {"x": x}, IDS)
    assert found.readings == ("energy",)
    assert any("below zero" in note for note in found.notes)
    blocks = P.T @ capture(model, {"x": x})[0].weights().square().mean(0) @ P
    close(found.flow[0], blocks / blocks.sum(1, keepdim=True))


def test_norms_of_weighted_values_are_those_of_the_vectors():
    values, out = torch.randn(2, 5, 3).double(), torch.randn(7, 6).double()
    vectors = torch.einsum("hmv,chv->hmc", values, out.unflatten(1, (2, 3)))
    close(value_norms(values, out), vectors.norm(dim=-1))


@pytest.mark.parametrize("name", ["primal-dual", "linear"])
def test_long_sequences_need_no_matrix(name):
    n = 4096
    layer = create_attention(name, 16, 2).eval()
    x, ids = torch.randn(1, n, 16), (torch.arange(n) > 64).long()
    with PeakMemory() as memory:
        found = modality_flow(layer, {"x": x}, ids)
    assert memory.peak < n * n  # bytes: an eighth of one matrix in float64
    assert bool(found.flow.isfinite().all())
