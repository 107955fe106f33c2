"""Documents packed into rows are the documents one by one, in every attention."""

import pytest
import torch

import primal_attention as pa
from primal_attention.attention import Rotary, documents
from primal_attention.attention.documents import Documents, attend_documents, document_ids_of

N = 17
IDS = torch.tensor(
    [
        [0] * 5 + [1] + [2] * 9 + [-1] * 2,
        [7] * 3 + [4] * 13 + [9],
        [0, 1, 1, 0, 1, 0, 0] + [-1] * 3 + [3] * 7,
    ]
)
"""Odd lengths, documents of one token, padding at the end and between, ids in any order."""
KEEP = torch.ones_like(IDS, dtype=torch.bool)
KEEP[0, 12:] = KEEP[1, 13:] = False
"""Cuts one document, and empties another."""
EXACT = {"atol": 1e-10, "rtol": 1e-10}


@pytest.fixture
def by_length(monkeypatch):
    """Documents of unequal length run apart, however little padding there is."""
    monkeypatch.setattr(documents, "_FEW_SLOTS", 0)


def _tokens():
    torch.manual_seed(1)
    return torch.randn(*IDS.shape, 16, dtype=torch.float64)


def _modes(case):
    return [{}, {"is_causal": True}] if case.capabilities.causal else [{}]


def _slots(keep=None):
    """Return row and slots of every document with a real token."""
    found = []
    for row, ids in enumerate(IDS):
        for number in ids[ids >= 0].unique().tolist():
            chosen = ids == number
            if keep is not None:
                chosen = chosen & keep[row]
            if chosen.any():
                found.append((row, chosen.nonzero().flatten()))
    return found


def _gradients(layer, x, loss):
    layer.zero_grad()
    x.grad = None
    loss.backward()
    return [x.grad.clone(), *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]


def _check(layer, keep=None, **flags):
    """Compare packed rows with the documents one by one: outputs and all gradients."""
    x = _tokens().requires_grad_()
    weight = torch.randn_like(x)
    y = layer(x, document_ids=IDS, key_mask=keep, **flags)
    packed = _gradients(layer, x, (y * weight).sum())
    alone, total = torch.zeros_like(y), 0.0
    for row, at in _slots(keep):
        part = layer(x[row : row + 1, at], **flags)[0]
        alone[row, at] = part.detach()
        total = total + (part * weight[row, at]).sum()
    torch.testing.assert_close(y.detach(), alone, **EXACT)
    torch.testing.assert_close(packed, _gradients(layer, x, total), **EXACT)


def test_packed_rows_are_the_documents_one_by_one(padding_case, by_length):
    layer = padding_case.build(dtype=torch.float64).eval()
    for flags in _modes(padding_case):
        _check(layer, **flags)


def test_packed_rows_with_a_mask_are_the_real_tokens_one_by_one(padding_case):
    layer = padding_case.build(dtype=torch.float64).eval()
    for flags in _modes(padding_case):
        _check(layer, KEEP, **flags)


@pytest.mark.parametrize("apart", [False, True], ids=["together", "by-length"])
def test_the_regularizer_is_the_mean_over_documents(aux_case, apart, monkeypatch):
    monkeypatch.setattr(documents, "_FEW_SLOTS", 0 if apart else 1024)
    layer = aux_case.build(dtype=torch.float64)
    x = _tokens().requires_grad_()
    for flags in _modes(aux_case):
        for keep in (None, KEEP):
            _, aux = layer(x, document_ids=IDS, key_mask=keep, return_aux=True, **flags)
            packed = _gradients(layer, x, aux.loss)
            layer(x, document_ids=IDS, key_mask=keep, **flags)
            torch.testing.assert_close(pa.ksvd_loss(layer), aux.loss, **EXACT)
            alone = [
                layer(x[row : row + 1, at], return_aux=True, **flags)[1].loss
                for row, at in _slots(keep)
            ]
            mean = torch.stack(alone).mean()
            torch.testing.assert_close(aux.loss, mean, **EXACT)
            torch.testing.assert_close(packed, _gradients(layer, x, mean), **EXACT)


def test_evaluation_publishes_no_regularizer(aux_case):
    layer = aux_case.build().eval()
    layer(_tokens().float(), document_ids=IDS)
    assert pa.ksvd_terms(layer) == {}


def test_nothing_in_padding_reaches_output_gradient_or_regularizer(padding_case):
    layer, x = padding_case.build(dtype=torch.float64), _tokens()
    poisoned = torch.where((IDS >= 0)[:, :, None], x, float("nan"))
    has_loss = layer.capabilities.aux_loss
    results = []
    for tokens in (x, poisoned):
        leaf = tokens.clone().requires_grad_()
        torch.manual_seed(2)
        y = layer(leaf, document_ids=IDS, return_aux=has_loss)
        y, loss = (y[0], y[1].loss) if has_loss else (y, 0.0)
        results.append([y.detach(), *_gradients(layer, leaf, y.square().sum() + loss)])
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
    assert (results[0][0][IDS < 0] == 0).all()


def test_rows_without_documents_are_zero_with_zero_gradient(padding_case):
    layer = padding_case.build()
    x = torch.full((2, N, 16), float("nan"), requires_grad=True)
    has_loss = layer.capabilities.aux_loss
    y = layer(x, document_ids=torch.full((2, N), -1), return_aux=has_loss)
    y, loss = (y[0], y[1].loss) if has_loss else (y, 0.0)
    gradients = _gradients(layer, x, y.sum() + loss)
    assert (y == 0).all()
    assert all(g.isfinite().all() for g in gradients)
    assert (gradients[0] == 0).all()


def test_times_belong_to_documents(time_row):
    torch.manual_seed(0)
    times = torch.rand(IDS.shape, dtype=torch.float64).cumsum(1)
    for case in time_row:
        layer, x = case.build(dtype=torch.float64), _tokens()
        for flags in _modes(case):
            layer.eval()
            y = layer(x, times=times, document_ids=IDS, **flags)
            for row, at in _slots():
                alone = layer(x[row : row + 1, at], times=times[row : row + 1, at], **flags)[0]
                torch.testing.assert_close(y[row, at], alone, **EXACT)
            if layer.train().capabilities.aux_loss:
                layer(x, times=times, document_ids=IDS, **flags)
                _, aux = layer(x, times=times, document_ids=IDS, return_aux=True, **flags)
                torch.testing.assert_close(pa.ksvd_loss(layer), aux.loss, **EXACT)


@pytest.mark.parametrize("rows", [1, 3], ids=["shared", "of-each-row"])
def test_turns_belong_to_documents(padding_case, rows):
    layer, x = padding_case.build(dtype=torch.float64).eval(), _tokens()
    if not layer.capabilities.rotary:
        return
    angle = torch.rand(rows, N, 4, dtype=torch.float64).repeat(1, 1, 2)
    turn = Rotary(angle.cos(), angle.sin())
    y = layer(x, rotary=turn, document_ids=IDS)
    for row, at in _slots():
        part = Rotary(*(t.expand(3, -1, -1)[row : row + 1, at] for t in turn))
        alone = layer(x[row : row + 1, at], rotary=part)[0]
        torch.testing.assert_close(y[row, at], alone, **EXACT)


def test_documents_of_similar_length_share_a_batch():
    lengths = [2000, 900, 1100, 3, 2, 2, 1]
    ids = document_ids_of(lengths=lengths, tokens=4100)
    found = Documents.find(ids)
    assert found.lengths.tolist() == lengths
    batches = found.batches()
    assert sorted((b.rows, b.longest) for b in batches) == [(1, 1), (1, 900), (2, 2000), (3, 3)]
    assert sum(len(b.slots) for b in batches) == sum(lengths)
    for b in batches:
        assert b.rows * b.longest < 2 * len(b.slots)


def test_a_little_padding_is_no_reason_for_another_batch():
    (batch,) = Documents.find(document_ids_of(lengths=[500, 3, 2])).batches()
    assert (batch.rows, batch.longest) == (3, 500)


def test_documents_of_equal_length_run_without_a_mask():
    seen = []

    def run(batch, key_mask, has_term):
        seen.append(key_mask)
        return batch.unpack(torch.arange(12.0).view(2, 6, 1)), None

    ids = torch.arange(4).repeat_interleave(3).view(2, 6)
    y, _ = attend_documents(run, ids)
    assert seen == [None]
    assert y.flatten().tolist() == list(range(12))


def test_positions_restart_in_every_document():
    ids = torch.tensor([[3, 3, -1, 1, 1, 3]])
    assert Documents.find(ids).positions().tolist() == [[0, 1, 0, 0, 1, 2]]


def test_export_says_that_the_number_of_documents_depends_on_values():
    layer = pa.create_attention("primal", 16, 2)
    with pytest.raises(RuntimeError, match="pass one document a row"):
        torch.export.export(layer, (torch.randn(3, N, 16),), {"document_ids": IDS})


@pytest.mark.raw
@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (torch.zeros(3, N), TypeError, "whole numbers, got torch.float32"),
        (torch.zeros(3, N).bool(), TypeError, "whole numbers, got torch.bool"),
        (torch.zeros(3, 4).long(), ValueError, r"= \(3, 17\), got \(3, 4\)"),
        (torch.zeros(N).long(), ValueError, r"= \(3, 17\), got \(17,\)"),
    ],
)
def test_ids_that_do_not_fit_are_refused_in_words(ids, error, message):
    with pytest.raises(error, match=message):
        pa.PrimalAttention(16, 2)(_tokens().float(), document_ids=ids)


def test_what_cannot_keep_documents_apart_says_so():
    layer, x = pa.SoftmaxAttention(16, 2), _tokens().float()
    with pytest.raises(ValueError, match="one document a row, each with its context"):
        layer(x, x, document_ids=IDS)
    published = pa.PrimalAttention.reference("lra", 16, 2, rank=2, num_samples=4)
    with pytest.raises(ValueError, match="cannot keep documents of one row apart; use one of"):
        published(x, document_ids=IDS)


@pytest.mark.raw
def test_other_turns_than_rotary_ones_are_refused_in_words():
    class Other:
        """A turn of another kind."""

    with pytest.raises(TypeError, match="must be a Rotary, got Other"):
        pa.SoftmaxAttention(16, 2)(_tokens().float(), document_ids=IDS, rotary=Other())


@pytest.mark.raw
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "either lengths or cu_seqlens"),
        ({"lengths": [1], "cu_seqlens": [0, 1]}, "either lengths or cu_seqlens"),
        ({"cu_seqlens": [3, 5]}, r"begins with 0, got \[3, 5\]"),
        ({"cu_seqlens": [0, 5, 4]}, r"at least 0, got \[5, -1\]"),
        ({"lengths": [2, -1]}, r"at least 0, got \[2, -1\]"),
        ({"lengths": [0.5]}, "whole numbers"),
        ({"lengths": [3, 4], "tokens": 6}, "have 7 tokens and the row only 6"),
    ],
)
def test_lengths_that_make_no_row_are_refused_in_words(given, message):
    with pytest.raises(ValueError, match=message):
        document_ids_of(**given)
