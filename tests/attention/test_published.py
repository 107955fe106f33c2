"""The five published layers: names, numbers and quirks, from dictionaries in their own naming."""

import copy
import pickle

import pytest
import torch
from tests.house.rows import each
from torch.testing import assert_close

from primal_attention import PrimalAttention
from primal_attention.functional import naive

DIM, HEADS, RANK, SAMPLES = 8, 2, 3, 5
NAMES = {
    "uea": (
        "query_projection key_projection out_projection We Wr inner_attention.Lambda "
        "inner_attention.concate_weight"
    ),
    "lra": "W_q W_k ff We Wr attn.Lambda attn.concate_weight",
    "vit": "qk - proj we wr Lambda concate_weight",
    "d4rl": "query_projection key_projection out_projection We Wr Lambda concate_weight",
    "wikitext": "q_proj k_proj out_proj We Wr Lambda concate_weight",
}
CAUSAL = ("d4rl", "wikitext")


def _released(variant):
    """Return parameters under the names of the released code, and the same by role."""
    rows = DIM // HEADS if variant in CAUSAL else SAMPLES
    q, k, out, w_e, w_r, lam, concat = NAMES[variant].split()
    role, released = {}, {}

    def linear(name, inputs, outputs, *roles):
        weight = torch.randn(outputs, inputs, dtype=torch.float64)
        bias = torch.randn(outputs, dtype=torch.float64)
        released[f"{name}.weight"], released[f"{name}.bias"] = weight, bias
        parts = zip(roles, weight.chunk(len(roles)), bias.chunk(len(roles)), strict=True)
        role.update({r: (a, b) for r, a, b in parts})

    if variant == "vit":
        linear(q, DIM, 2 * DIM, "q", "k")
    else:
        linear(q, DIM, DIM, "q")
        linear(k, DIM, DIM, "k")
    linear(out, DIM, DIM, "out")
    linear(concat, 2 * RANK, DIM // HEADS, "concat")
    for name, key in ((w_e, "w_e"), (w_r, "w_r")):
        role[key] = released[name] = torch.randn(HEADS, rows, RANK, dtype=torch.float64)
    role["lam"] = released[lam] = torch.randn(HEADS, RANK, dtype=torch.float64)
    return released, role


def _layer(variant):
    return PrimalAttention.reference(
        variant, DIM, HEADS, rank=RANK, num_samples=SAMPLES, dtype=torch.float64
    )


def _textbook(variant, role, x, keep=None):
    """Return output and loss as the released code computes them."""

    def split(t):
        return t.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    q, k = (split(x @ role[r][0].T + role[r][1]) for r in "qk")
    w_e, w_r = role["w_e"], role["w_r"]
    if variant in CAUSAL:
        e = naive.primal_scores(naive.prefix_mean(q), w_e[None], 1e-12)
        r = naive.primal_scores(naive.prefix_mean(k), w_r[None], 1e-12)
    else:
        f = split(x[:, naive.even_indices(x.shape[1], SAMPLES)])
        e = naive.primal_scores(q, naive.data_weights(f, w_e), 1e-12)
        r = naive.primal_scores(k, naive.data_weights(f, w_r), 1e-12)
    objective = naive.ksvd_objective(e, r, role["lam"], w_e, w_r).mean(1)
    loss = objective.mean().square() if variant in ("lra", "vit") else objective.square().mean()
    y = naive.primal_output(e, r, *role["concat"], *role["out"])
    # masked heads are zero before the output projection, which then adds its bias
    return (y if keep is None else torch.where(keep[:, :, None], y, role["out"][1])), loss


@each("variant", NAMES)
def test_t24_released_parameters_load_under_their_names(variant):
    released, role = _released(variant)
    layer = _layer(variant)
    layer.load_reference_state_dict(released)
    state = layer.state_dict()
    for ours in ("q", "k", "out"):
        assert torch.equal(state[f"{ours}_proj.weight"], role[ours][0])
        assert torch.equal(state[f"{ours}_proj.bias"], role[ours][1])
    assert torch.equal(state["concat.weight"], role["concat"][0])
    for name in ("w_e", "w_r", "lam"):
        assert torch.equal(state[name], role[name])


@each("variant", NAMES)
def test_t24_released_names_make_the_round_trip(variant):
    released, _ = _released(variant)
    layer, twin = _layer(variant), _layer(variant)
    layer.load_reference_state_dict(released)
    back = layer.reference_state_dict()
    assert set(back) == set(released)
    assert all(torch.equal(back[name], value) for name, value in released.items())
    twin.load_reference_state_dict(back)
    ours = layer.state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in twin.state_dict().items())


@each("variant", NAMES)
@each("n", [3, 5, 12])
def test_published_layers_compute_the_released_formulas(variant, n):
    released, role = _released(variant)
    layer = _layer(variant)
    layer.load_reference_state_dict(released)
    x = torch.randn(3, n, DIM, dtype=torch.float64)
    y, aux = layer(x, is_causal=variant in CAUSAL, return_aux=True)
    expected, loss = _textbook(variant, role, x)
    assert_close(y, expected, atol=1e-10, rtol=1e-10)
    assert_close(aux.loss, loss, atol=1e-10, rtol=1e-10)


def test_the_lra_mask_zeroes_the_heads_and_nothing_else():
    released, role = _released("lra")
    layer = _layer("lra")
    layer.load_reference_state_dict(released)
    x = torch.randn(2, 6, DIM, dtype=torch.float64)
    keep = torch.arange(6) < torch.tensor([[6], [3]])
    y, aux = layer(x, key_mask=keep, return_aux=True)
    expected, loss = _textbook("lra", role, x, keep)
    assert_close(y, expected)
    assert_close(aux.loss, loss)


@each("variant", NAMES)
@pytest.mark.parametrize(
    "change",
    [
        lambda names: {"encoder.0." + k: v for k, v in names.items()},
        lambda names: {**names, "extra": torch.zeros(1)},
    ],
    ids=["prefix", "extra"],
)
def test_t24_unknown_names_raise(variant, change):
    with pytest.raises(ValueError, match=r"Unknown parameter .* prefix removed"):
        _layer(variant).load_reference_state_dict(change(_released(variant)[0]))


@each("variant", NAMES)
def test_t24_names_of_another_variant_raise(variant):
    other = "lra" if variant != "lra" else "uea"
    with pytest.raises(ValueError, match="Unknown parameter"):
        _layer(variant).load_reference_state_dict(_released(other)[0])


def test_t24_a_missing_parameter_raises():
    released, _ = _released("uea")
    del released["We"]
    with pytest.raises(RuntimeError, match="w_e"):
        _layer("uea").load_reference_state_dict(released)


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_only_published_layers_load_released_parameters(twin):
    for layer in (PrimalAttention(8, 2), twin(PrimalAttention(8, 2))):
        with pytest.raises(RuntimeError, match=r"PrimalAttention\.reference"):
            layer.load_reference_state_dict({})
        with pytest.raises(RuntimeError, match=r"PrimalAttention\.reference"):
            layer.reference_state_dict()
    twin(_layer("uea")).load_reference_state_dict(_released("uea")[0])


@each("variant", NAMES)
def test_published_layers_start_as_the_released_code_starts_them(variant):
    layer = _layer(variant)
    for w in (layer.w_e, layer.w_r):
        flat = w.flatten(1)
        assert_close(flat @ flat.T, torch.eye(HEADS, dtype=torch.float64))
    assert ((layer.lam >= 0) & (layer.lam <= 1)).all()
    assert torch.equal(layer.ell, layer.lam)


@each("variant", NAMES)
def test_published_linear_maps_start_as_the_released_code_starts_them(variant):
    wide = PrimalAttention.reference(variant, 256, 4, rank=32, num_samples=40)
    maps = {name: getattr(wide, name) for name in ("q_proj", "k_proj", "out_proj", "concat")}
    spread = {name: m.weight.std().item() for name, m in maps.items()}
    biased = {name for name, m in maps.items() if m.bias.any()}
    # torch draws from ±1/√inputs, Xavier from ±gain √(6 / (inputs + outputs))
    plain = {name: (3 * m.in_features) ** -0.5 for name, m in maps.items()}
    if variant == "d4rl":
        assert spread == pytest.approx(dict.fromkeys(maps, 0.02), rel=0.05)
        assert not biased
        # a normal law reaches beyond the bounds of a uniform one of the same spread
        assert all(m.weight.abs().max() > 0.055 for m in maps.values())
    elif variant == "wikitext":
        xavier = {"q_proj": 512**-0.5, "k_proj": 512**-0.5, "out_proj": 256**-0.5}
        assert spread == pytest.approx({**plain, **xavier}, rel=0.05)
        assert biased == {"q_proj", "k_proj", "concat"}
    else:
        assert spread == pytest.approx(plain, rel=0.05)
        assert biased == set(maps)


@each("variant", NAMES)
def test_published_layers_refuse_what_they_never_did(variant):
    layer, x = _layer(variant), torch.randn(1, 4, DIM, dtype=torch.float64)
    wrong = {"is_causal": variant not in CAUSAL}
    with pytest.raises(ValueError, match="causal"):
        layer(x, **wrong)
    right = {"is_causal": variant in CAUSAL}
    if variant != "lra":
        with pytest.raises(ValueError, match="cannot honour a padding mask"):
            layer(x, key_mask=torch.ones(1, 4, dtype=torch.bool), **right)
    with pytest.raises(ValueError, match="cannot attend to a context"):
        layer(x, x)
    if variant not in CAUSAL:
        with pytest.raises(ValueError, match="cannot decode step by step"):
            layer.init_state(1)


@pytest.mark.raw
def test_unknown_variants_are_refused_in_words():
    with pytest.raises(ValueError, match=r"variant must be one of .*'uea'.* got 'imagenet'"):
        PrimalAttention.reference("imagenet", 8, 2, rank=3)
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        PrimalAttention.reference("uea", 8, 2, rank=3, num_samples=0)


def test_published_ranks_may_exceed_the_head_width_silently():
    assert PrimalAttention.reference("vit", 8, 2, rank=6).num_samples == 60
