"""Invariants of the model; N1 to N20 are the numbers of the list in the method's specification."""

import copy
import math

import pytest
import torch
from npt_cases import CATEGORIES, ROW_ATTENTIONS, model, table
from torch.nn.functional import gelu, layer_norm

from primal_attention.tasks.tables import NPTConfig, NPTModel
from primal_attention.tasks.tables.cells import CellEmbedding, CellHeads, bin_shares

ROWS = list(ROW_ATTENTIONS)
MIXING = [name for name in ROWS if name != "none"]


@pytest.mark.parametrize("row_attention", ROWS)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_permuted_rows_give_permuted_predictions(row_attention, dtype, atol):
    # N1, in the published form: all rows attend to all
    npt = model(row_attention, context="transductive", rows=0).to(dtype)
    values, missing = table(20)
    values, order = values.to(dtype), torch.randperm(20)
    y = npt(values, missing).logits
    permuted = npt(values[order], missing[order]).logits
    torch.testing.assert_close(permuted, y[order], atol=atol, rtol=0)


@pytest.mark.parametrize("row_attention", ROWS)
def test_the_order_of_the_context_has_no_effect(row_attention):
    npt, (values, missing) = model(row_attention).double(), table(24)
    values, order = values.double(), torch.randperm(24)
    other = npt.with_context(values[order], missing[order])
    npt.set_context(values, missing)
    asked = table(5, seed=1)
    got, want = (m(asked[0].double(), asked[1]).logits for m in (other, npt))
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


@pytest.mark.parametrize("row_attention", ROWS)
@pytest.mark.parametrize("garbage", [7.0, float("nan"), float("inf")])
def test_values_under_a_set_mask_bit_are_never_read(row_attention, garbage):
    # N2 and N8: also NaN
    npt, (values, missing) = model(row_attention), table(24)
    want = npt(values, missing).logits
    changed = torch.where(missing, garbage, values)
    assert torch.equal(npt(changed, missing).logits, want)
    npt.set_context(changed, missing)
    assert torch.equal(npt(values, missing).logits, want)


def test_targets_of_rows_to_predict_cannot_leak():
    # N3: also into the training loss of the other rows, if their target is missing
    npt, (values, missing) = model(), table(24)
    flipped = values.clone()
    flipped[:, 3] = -flipped[:, 3] + 5
    assert torch.equal(npt(flipped, missing).logits, npt(values, missing).logits)
    npt.train()
    missing[:8, 3] = True
    flipped = torch.where(missing, 9.0, values)
    losses = []
    for rows in (values, flipped):
        torch.manual_seed(3)
        losses.append(npt(rows, missing).loss)
    assert torch.equal(*losses)


def test_a_hidden_cell_has_no_gradient():
    # N4
    npt, (values, missing) = model(), table(6)
    values.requires_grad_()
    (slope,) = torch.autograd.grad(npt(values, missing).logits.sum(), values)
    assert (slope[missing] == 0).all()
    assert (slope[:, 3] == 0).all()
    is_number = torch.tensor([True, True, False, False])
    assert (slope[~missing & is_number] != 0).all()


@pytest.mark.parametrize("row_attention", ROWS)
def test_a_prediction_depends_on_no_other_row_to_predict(row_attention):
    # N5: the batch has the same size, every other row is another one
    npt, (values, missing) = model(row_attention), table(9, seed=1)
    other_values, other_missing = table(9, seed=2)
    other_values[4], other_missing[4] = values[4], missing[4]
    assert torch.equal(npt(other_values, other_missing).logits[4], npt(values, missing).logits[4])


@pytest.mark.parametrize("row_attention", ROWS)
def test_batches_of_any_size_agree(row_attention):
    # N6
    npt, (values, missing) = model(row_attention), table(9, seed=1)
    whole = npt(values, missing).logits
    for size in (1, 2, 7):
        parts = zip(values.split(size), missing.split(size), strict=True)
        split = torch.cat([npt(v, m).logits for v, m in parts])
        torch.testing.assert_close(split, whole, atol=1e-6, rtol=0)


@pytest.mark.parametrize("row_attention", MIXING)
def test_the_context_matters(row_attention):
    npt, (values, missing) = model(row_attention), table(9, seed=1)
    before = npt(values, missing).logits
    npt.set_context(*table(24, seed=5))
    assert (npt(values, missing).logits - before).abs().max() > 1e-4


def test_a_transductive_prediction_depends_on_the_rows_beside_it():
    npt, (values, missing) = model(context="transductive"), table(9, seed=1)
    assert (
        npt(values[:1], missing[:1]).logits - npt(values, missing).logits[:1]
    ).abs().max() > 1e-6


def test_a_column_without_any_value_works():
    # N8
    npt, (values, missing) = model(), table(24)
    missing[:, 0] = True
    npt.set_context(values, missing)
    npt.train()
    output = npt(values, missing)
    assert output.loss.isfinite()


@pytest.mark.parametrize("row_attention", ROWS)
@pytest.mark.parametrize("chunk", [1, 7, 24])
def test_a_context_read_in_parts_is_the_whole_context(row_attention, chunk):
    npt, (values, missing) = model(row_attention).double(), table(24)
    npt.set_context(values.double(), missing)
    asked = table(5, seed=1)
    x = npt.embedding(asked[0].double(), asked[1])
    memories = npt.stream(npt.context_values, npt.context_missing, chunk=chunk)
    got, want = npt.predict_from(x, memories=memories), npt.predict_from(x)
    torch.testing.assert_close(got.logits, want.logits, atol=1e-12, rtol=0)


def test_a_condensed_model_predicts_the_same_without_any_row():
    npt, (values, missing) = model("primal"), table(5, seed=1)
    small = npt.condense()
    assert torch.equal(small(values, missing).logits, npt(values, missing).logits)
    kept = sum(b.numel() for n, b in small.named_buffers() if n.startswith(("context", "memory")))
    twice = torch.cat([npt.context_values] * 2), torch.cat([npt.context_missing] * 2)
    larger = npt.with_context(*twice).condense()
    assert kept == sum(
        b.numel() for n, b in larger.named_buffers() if n.startswith(("context", "memory"))
    )


def test_other_row_attentions_cannot_be_condensed():
    with pytest.raises(ValueError, match="all primal-dual can be condensed"):
        model("sparse").condense()


def test_training_rows_are_split_into_context_and_queries():
    npt, (values, missing) = model(), table(40)
    torch.manual_seed(0)
    split = npt._hide(values, missing)
    assert 0 < split.is_query.sum() < 40
    assert torch.equal(split.hidden[:, 3], split.is_query)
    assert torch.equal(split.selected[:, 3], split.is_query)


def test_a_target_that_is_asked_for_is_hidden_or_random_in_the_published_form():
    npt, (values, missing) = model(context="transductive"), table(2000)
    torch.manual_seed(0)
    split = npt._hide(values, missing)
    asked = split.selected[:, 3]
    assert not split.is_query.any()
    share = (~split.hidden[asked, 3]).float().mean()
    assert abs(share - 0.1) < 3 * (0.09 / asked.sum()) ** 0.5
    changed = split.values[:, 3] != values[:, 3]
    assert torch.equal(changed, asked & ~split.hidden[:, 3])


def test_with_p_target_one_every_target_is_hidden_and_rows_still_attend():
    npt, (values, missing) = model(p_target=1.0), table(12)
    split = npt._hide(values, missing)
    assert split.selected[:, 3].all()
    assert not split.is_query.any()


@pytest.mark.parametrize("row_attention", ROWS)
def test_every_parameter_learns(row_attention):
    npt, (values, missing) = model(row_attention, p_feature=0.5).train(), table(24)
    output = npt(values, missing)
    (output.loss + (output.aux_loss or 0)).backward()
    # the regulariser of primal rows alone reaches lam; unused bins and codes of other columns stay
    still = [n for n, p in npt.named_parameters() if p.grad is None or not p.grad.any()]
    assert all("context" not in n for n in still)
    assert set(still) <= {n for n in still if n.endswith(("k_proj.bias", "ell", "lam"))}


def test_a_training_table_of_two_rows_has_a_finite_regularizer():
    # one row is the context then; its relative residual alone may be infinite
    npt, (values, missing) = model("primal").train(), table(2)
    for seed in range(300):
        torch.manual_seed(seed)
        values = torch.randn(2, 4)
        values[:, 2] = 1
        output = npt(values, missing)
        assert output.aux_loss == 0
        assert output.loss.isfinite()


def test_a_model_survives_its_folder(tmp_path):
    # N20
    for name in ROWS:
        npt, (values, missing) = model(name), table(5, seed=1)
        npt.temperature.fill_(1.7)
        folder = tmp_path / name
        npt.save_pretrained(folder)
        again = NPTModel.from_pretrained(folder)
        assert torch.equal(again(values, missing).logits, npt(values, missing).logits)
    small = model("primal").condense()
    small.save_pretrained(tmp_path / "small")
    again = NPTModel.from_pretrained(tmp_path / "small")
    assert torch.equal(again(values, missing).logits, small(values, missing).logits)
    assert torch.equal(copy.deepcopy(small)(values, missing).logits, small(values, missing).logits)


def _attend(x, block, heads, scale):
    """Res and rFF of one block from its weights: one sequence, no shortcuts."""
    norm = block.attention_norm
    z = layer_norm(x, x.shape[-1:], norm.weight, norm.bias, 1e-12)
    a = block.attention
    q, k, v = (z @ p.weight.T + p.bias for p in (a.q_proj, a.k_proj, a.v_proj))
    parts = []
    for i in range(heads):
        d = q.shape[-1] // heads
        cut = slice(i * d, (i + 1) * d)
        weights = (q[:, cut] @ k[:, cut].T / scale).softmax(-1)
        parts.append(weights @ v[:, cut])
    att = torch.cat(parts, -1) @ a.out_proj.weight.T + a.out_proj.bias
    res = x @ block.residual.weight.T + block.residual.bias + att
    z = layer_norm(res, x.shape[-1:], block.mlp_norm.weight, block.mlp_norm.bias, 1e-12)
    first, last = block.mlp[0], block.mlp[3]
    return res + gelu(z @ first.weight.T + first.bias) @ last.weight.T + last.bias


def test_the_published_model_is_its_formula():
    options = {"published": True, "row_dim": None, "numbers": "linear", "rows": 0}
    npt = model("softmax", context="transductive", **options).double()
    values, missing = table(7)
    values = values.double()
    missing[:, 3] = True
    cells = []
    embed = npt.embedding
    for j, count in enumerate(CATEGORIES):
        code = values[:, j].long().clamp(0, 2)
        raw = embed.table.weight[code] if count else values[:, j, None] * embed.slope[j]
        h = torch.where(missing[:, j, None], embed.mask[j], raw)
        cells.append(h + embed.bias[j] + embed.kind[int(count > 0)])
    x = torch.stack(cells, 1)  # [n d e]
    n, d, e = x.shape
    for row, cell in zip(npt.row_blocks, npt.cell_blocks, strict=True):
        x = _attend(x.reshape(n, d * e), row.block, 2, math.sqrt(d * e / 2)).reshape(n, d, e)
        x = torch.stack([_attend(r, cell, 2, math.sqrt(e / 2)) for r in x])
    want = x[:, 3] @ npt.heads.weight[-2] + npt.heads.bias[-2]
    torch.testing.assert_close(npt(values, missing).logits[:, 0], want, atol=1e-10, rtol=1e-10)


def test_published_scores_are_divided_by_the_root_of_the_whole_width():
    torch.manual_seed(0)
    options = {"categories": (0, 0), "dim": 8, "num_heads": 4, "row_dim": None}
    flat = NPTModel(NPTConfig(**options, published=True)).row_blocks[0].block.attention
    torch.manual_seed(0)
    common = NPTModel(NPTConfig(**options)).row_blocks[0].block.attention
    torch.testing.assert_close(flat.q_proj.weight * 2, common.q_proj.weight)


def test_a_table_too_wide_for_the_published_width_is_refused():
    with pytest.raises(ValueError, match=r"200 columns × 32 = 6400 channels.*set row_dim"):
        NPTConfig(categories=(0,) * 200, row_dim=None)


def test_attentions_that_see_the_order_of_rows_are_refused():
    with pytest.raises(ValueError, match="'primal' cannot attend from rows to a set"):
        NPTConfig(categories=(0, 0), attention="primal")


def test_bins_share_a_number():
    edges = torch.tensor([[0.0, 1.0, 3.0, float("nan")]])
    x = torch.tensor([[-1.0], [0.5], [2.0], [5.0]])
    want = torch.tensor([[-1.0, 0, 0], [0.5, 0, 0], [1, 0.5, 0], [1, 2.0, 0]])
    torch.testing.assert_close(bin_shares(x, edges)[:, 0], want)
    # one bin is linear everywhere, none is zero
    assert bin_shares(x, torch.full((1, 3), float("nan"))).abs().max() == 0


@pytest.mark.parametrize("numbers", ["linear", "piecewise", "periodic"])
def test_equal_cells_have_equal_vectors_and_columns_differ(numbers):
    torch.manual_seed(0)
    embed = CellEmbedding((0, 0, 2), 8, numbers)
    embed.start_from([(-1.0, 0.0, 1.0), (-2.0, 2.0), ()])
    values = torch.tensor([[0.3, 0.3, 1.0], [0.3, 0.4, 0.0]])
    h = embed(values, torch.zeros(2, 3, dtype=torch.bool))
    assert torch.equal(h[0, 0], h[1, 0])
    assert (h[0, 0] - h[0, 1]).abs().max() > 0.1
    assert (h[0, 2] - h[1, 2]).abs().max() > 0.1


def test_heads_of_columns_do_not_overlap():
    heads = CellHeads((0, 3, 0), 4, num_targets=1)
    assert heads.widths == (1, 3, 2)
    h = torch.randn(5, 3, 4)
    numbers = heads.numbers(h, [0, 2])
    torch.testing.assert_close(numbers[:, 0], heads.column(h, 0)[:, 0])
    torch.testing.assert_close(numbers[:, 1], heads.column(h, 2)[:, 0])
