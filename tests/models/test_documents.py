"""Models of packed rows are the models of the documents one by one."""

import pytest
import torch
from tests.house.rows import each

from primal_attention.attention.documents import document_ids_of
from primal_attention.models import CausalDecoder, DecoderConfig, EncoderClassifier, EncoderConfig

LENGTHS = (5, 1, 7)
IDS = torch.cat(
    [document_ids_of(lengths=LENGTHS, tokens=15), document_ids_of(lengths=(9, 4), tokens=15) + 3]
)
IDS[1, 13:] = -1
POSITIONS = [
    {"positions": "learned", "max_length": 9},
    {"positions": "sinusoidal"},
    {"positions": "rotary"},
]


def _documents():
    """Return row and slots of every document."""
    return [
        (row, (IDS[row] == number).nonzero().flatten())
        for row in range(2)
        for number in IDS[row][IDS[row] >= 0].unique()
    ]


def _decoder(**changes):
    torch.manual_seed(0)
    base = {"vocab_size": 11, "dim": 16, "num_heads": 2, "attention": "primal-dual"}
    return CausalDecoder(DecoderConfig(**{**base, **changes})).double().eval()


def _encoder(**changes):
    torch.manual_seed(0)
    base = {"num_classes": 3, "num_features": 4, "dim": 16, "num_heads": 2, "num_layers": 2}
    return EncoderClassifier(EncoderConfig(**{**base, **changes})).double().eval()


@each("positions", POSITIONS)
@pytest.mark.parametrize("name", ["softmax", "primal-dual"])
def test_a_decoder_begins_again_in_every_document(name, positions):
    model = _decoder(attention=name, **positions)
    x = torch.randint(11, IDS.shape)
    logits = model(x.where(IDS >= 0, 10**9), document_ids=IDS).logits
    for row, at in _documents():
        torch.testing.assert_close(logits[row, at], model(x[row : row + 1, at]).logits[0])


@each("pooling", ["mean", "last"])
@each("positions", [*POSITIONS, {"positions": "none"}])
def test_an_encoder_classifies_every_document(pooling, positions):
    attention = "primal-dual" if positions["positions"] == "rotary" else "primal"
    model = _encoder(attention=attention, pooling=pooling, **positions)
    x = torch.randn(*IDS.shape, 4, dtype=torch.float64)
    logits = model(x, document_ids=IDS).logits
    alone = [model(x[row : row + 1, at]).logits[0] for row, at in _documents()]
    torch.testing.assert_close(logits, torch.stack(alone))


def test_an_encoder_with_a_mask_classifies_the_real_tokens():
    model = _encoder(positions="sinusoidal")
    x, keep = torch.randn(*IDS.shape, 4, dtype=torch.float64), torch.rand(IDS.shape) < 0.7
    keep[0, 5] = False  # a document without tokens
    logits = model(x, key_mask=keep, document_ids=IDS).logits
    for number, (row, at) in enumerate(_documents()):
        at = at[keep[row, at]]
        torch.testing.assert_close(logits[number], model(x[row : row + 1, at]).logits[0])


def test_documents_of_unequal_length_keep_their_order():
    model = _encoder()
    lengths = [3, 700, 2, 900]
    x = torch.randn(1, sum(lengths), 4, dtype=torch.float64)
    logits = model(x, document_ids=document_ids_of(lengths=lengths)).logits
    alone = [model(part).logits[0] for part in x.split(lengths, dim=1)]
    torch.testing.assert_close(logits, torch.stack(alone))


def test_rows_without_documents_have_no_logits():
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    assert _encoder()(x, document_ids=torch.full((2, 3), -1)).logits.shape == (0, 3)


def test_checkpointed_layers_keep_documents_apart():
    x = torch.randn(*IDS.shape, 4, dtype=torch.float64)
    found = []
    for checkpointing in (False, True):
        model = _encoder(dropout=0.0, checkpointing=checkpointing).train()
        output = model(x, document_ids=IDS)
        (output.logits.square().sum() + output.aux_loss).backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*found)


def test_a_row_may_be_longer_than_learned_positions_and_a_document_may_not():
    model = _decoder(positions="learned", max_length=8)
    model(torch.randint(11, (1, 14)), document_ids=document_ids_of(lengths=[8, 6]))
    with pytest.raises(ValueError, match="x has 9 tokens, but learned positions end"):
        model(torch.randint(11, (1, 14)), document_ids=document_ids_of(lengths=[9, 5]))


@pytest.mark.raw
def test_ids_that_do_not_fit_are_refused_in_words():
    with pytest.raises(ValueError, match=r"document_ids must have shape"):
        _decoder()(torch.randint(11, (2, 14)), document_ids=IDS)
