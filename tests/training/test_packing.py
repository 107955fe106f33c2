"""Packed batches train as padded ones do."""

import pytest
import torch
from tests.house.rows import each
from tests.training.training_cases import config, data, model

import primal_attention as pa
from primal_attention.models import CausalDecoder, DecoderConfig
from primal_attention.training import Columns, PackedCollator, cross_entropy, fit, pad_collate

TEXTS = [torch.randint(11, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 2, 6, 4)]


def _mean_over_tokens(output, labels):
    return torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())


def _step(net, batch, objective=cross_entropy):
    """Return loss and gradients of one training step."""
    net.zero_grad()
    labels = batch.pop("labels")
    output = net.train()(**batch)
    loss = objective(output, labels) + 0.1 * pa.ksvd_loss(net)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


def test_a_step_on_a_packed_batch_is_that_on_the_padded_one():
    net = model(num_layers=2).double()
    items = [{"x": item["x"].double(), "labels": item["labels"]} for item in data(12)]
    packed = PackedCollator(16)(items)
    assert packed["x"].shape[:2] < (len(items), 16)
    torch.testing.assert_close(_step(net, packed), _step(net, pad_collate(items)))


def test_a_step_of_a_decoder_on_packed_texts_is_that_on_padded_ones():
    torch.manual_seed(0)
    options = {"vocab_size": 11, "dim": 16, "num_heads": 2, "dropout": 0.0}
    net = CausalDecoder(DecoderConfig(**options, positions="sinusoidal")).double()
    items = [{"x": text[:-1], "labels": text[1:]} for text in TEXTS]
    packed = PackedCollator(10, columns=("x", "labels"))(items)
    assert packed["labels"][packed["document_ids"] < 0].tolist() == [-100]
    steps = (_step(net, batch, _mean_over_tokens) for batch in (packed, pad_collate(items)))
    torch.testing.assert_close(*steps)


def test_fit_trains_on_packed_batches():
    found = []
    for collate in (pad_collate, PackedCollator(20)):
        net = model()
        fit(net, data(), config=config(eta=0.1), collate=collate)
        found.append(list(net.parameters()))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


@each("most", [9, 10, 12, 100])
def test_rows_are_within_the_budget_and_hold_every_token_once(most):
    items = [{"x": text, "labels": torch.tensor(i)} for i, text in enumerate(TEXTS)]
    batch = PackedCollator(most)(items)
    ids, x = batch["document_ids"], batch["x"]
    assert x.shape == ids.shape
    assert x.shape[1] <= most
    for number, label in enumerate(batch["labels"].tolist()):
        assert torch.equal(x[ids == number], TEXTS[label])
    assert (ids >= 0).sum() == sum(len(text) for text in TEXTS)


def test_long_items_come_first_and_short_ones_fill_the_rows():
    batch = PackedCollator(11)([{"x": text} for text in TEXTS])
    assert [row[row >= 0].unique().tolist() for row in batch["document_ids"]] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("options", "item", "message"),
    [
        ({"max_tokens": 0}, {}, "at least 1"),
        ({"max_tokens": 4, "columns": ()}, {}, "must name a tensor"),
        ({"max_tokens": 4}, {"x": torch.zeros(5)}, "has 5 tokens, and a row takes 1 to 4"),
        ({"max_tokens": 4}, {"x": torch.zeros(0)}, "has 0 tokens"),
        (
            {"max_tokens": 4, "columns": ("x", "labels")},
            {"x": torch.zeros(3), "labels": torch.zeros(2)},
            "one entry for each token",
        ),
    ],
)
def test_what_cannot_be_packed_is_refused_in_words(options, item, message):
    with pytest.raises(ValueError, match=message):
        PackedCollator(**options)([item])


def test_columns_of_a_data_set_are_packed():
    items = Columns(x=TEXTS, labels=torch.arange(4))
    batch = PackedCollator(9)([items[i] for i in range(4)])
    assert batch["labels"].tolist() == [0, 2, 1, 3]
