"""Tokens are removed in six ways, and models decide without them."""

import pytest
import torch
from tests.analysis.causes import models

from primal_attention.analysis.causes.removal import Remover, choose_removal, remove
from primal_attention.analysis.causes.subjects import Subject, rollout_importances
from primal_attention.analysis.causes.text import encode_text, text_subject, token_names
from primal_attention.hosts import capture

TEXT = "the film was not good but the cast is very fun"


IDS = torch.tensor([10, 11, 12, 13])
SETS = [(1,), (0, 3), ()]


def test_mask_and_pad_replace_attend_hides_zero_marks():
    (found,) = remove(IDS, SETS, Remover("mask", 9))
    assert found.ids.tolist() == [[10, 9, 12, 13], [9, 11, 12, 9], [10, 11, 12, 13]]
    assert found.keep.all()
    assert not found.zeroed.any()
    (found,) = remove(IDS, SETS, Remover("pad", 0))
    assert found.ids[1].tolist() == [0, 11, 12, 0]
    assert found.keep.all()  # padding stays attended
    (found,) = remove(IDS, SETS, Remover("attend"))
    assert (found.ids == IDS).all()
    assert found.keep.tolist()[1] == [False, True, True, False]
    (found,) = remove(IDS, SETS, Remover("zero"))
    assert found.zeroed.tolist()[0] == [False, True, False, False]
    assert found.keep.all()


def test_drop_deletes_and_batches_equal_lengths():
    found = {len(part.ids[0]): part for part in remove(IDS, SETS, Remover("drop"))}
    assert found[3].ids.tolist() == [[10, 12, 13]]
    assert found[2].ids.tolist() == [[11, 12]]
    assert found[2].positions.tolist() == [[1, 2]]
    assert found[4].owners == [2]
    # nothing is left, so there is no row
    for kind in ("drop", "attend"):
        assert remove(IDS, [(0, 1, 2, 3)], Remover(kind)) == []


def test_resample_draws_the_same_ids_for_all_sets(words):
    remover = choose_removal(words, IDS, removal="resample", samples=3, seed=1)
    (found,) = remove(IDS, [(1,), (1, 2)], remover)
    assert found.owners == [0, 0, 0, 1, 1, 1]
    assert (found.ids[:3, 1] == found.ids[3:, 1]).all()
    assert (found.ids[:, [0, 3]] == IDS[[0, 3]]).all()
    assert not set(found.ids[:, 1].tolist()) & set(words.all_special_ids)
    again = choose_removal(words, IDS, removal="resample", samples=3, seed=1).replacements
    assert torch.equal(remover.replacements, again)


@pytest.mark.raw
def test_mistakes_say_what_to_do(words):
    assert choose_removal(words, IDS, removal="auto") == Remover("mask", words.mask_token_id)
    assert choose_removal(None, IDS, removal="auto").kind == "attend"
    with pytest.raises(ValueError, match="Did you mean 'mask'"):
        choose_removal(words, IDS, removal="msk")
    with pytest.raises(ValueError, match="needs a mask token"):
        choose_removal(None, IDS, removal="mask")
    with pytest.raises(ValueError, match="from 0 to 3, got 4"):
        remove(IDS, [(4,)], Remover("mask", 0))
    with pytest.raises(ValueError, match="makes no decision"):
        text_subject(models.bert("BertModel"), words, TEXT)
    with pytest.raises(ValueError, match="The text has 0 mask tokens"):
        text_subject(models.bert("BertForMaskedLM"), words, TEXT)


@pytest.mark.parametrize("removal", ["mask", "pad", "drop", "attend", "zero"])
def test_a_class_without_tokens_is_what_the_model_itself_says(words, removal):
    model = models.bert()
    subject = text_subject(model, words, TEXT, removal=removal)
    assert isinstance(subject, Subject)
    assert subject.target == 0
    assert subject.tokens[0] == "[CLS]"
    assert subject.candidates == list(range(1, 12))
    batch = encode_text(words, TEXT)
    gone = [3, 5]
    if removal in ("mask", "pad"):
        batch["input_ids"][0, gone] = getattr(words, f"{removal}_token_id")
    elif removal == "attend":
        batch["attention_mask"][0, gone] = 0
    elif removal == "drop":
        kept = [i for i in range(13) if i not in gone]
        batch = {name: value[:, kept] for name, value in batch.items()}
    else:
        embedded = model.get_input_embeddings()(batch.pop("input_ids"))
        embedded[0, gone] = 0
        batch["inputs_embeds"] = embedded
    with torch.no_grad():
        expected = model(**batch).logits.double().softmax(-1)[0, subject.choice]
    # alone and in a batch with others
    (alone,) = subject.evaluate([(3, 5)])
    both = subject.evaluate([(1,), (3, 5), (2, 4, 6)])[1]
    assert alone.score == pytest.approx(float(expected), abs=1e-6)
    assert both.score == pytest.approx(float(expected), abs=1e-6)
    assert not model.training
    assert not model.get_input_embeddings()._forward_hooks


def test_the_pooled_token_is_found(words):
    class Pooled(torch.nn.Module):
        def __init__(self, pool):
            super().__init__()
            self.encode_textr, self.pool = models.bert("BertModel"), pool
            self.head = torch.nn.Linear(32, 3)
            self.config = self.encode_textr.config

        def forward(self, input_ids, attention_mask=None):
            hidden = self.encode_textr(input_ids, attention_mask=attention_mask).last_hidden_state
            vector = {"mean": hidden.mean(1), "last": hidden[:, -1]}[self.pool]
            return models.transformers.modeling_outputs.SequenceClassifierOutput(
                logits=self.head(vector)
            )

    assert text_subject(Pooled("mean"), words, TEXT).target is None
    assert text_subject(Pooled("last"), words, TEXT).target == 12
    assert text_subject(models.bert(), words, TEXT, target="mean").target is None
    assert text_subject(models.bert(), words, TEXT, target=-2).target == 11


def test_the_next_token_stands_at_the_end_and_is_not_seen_by_the_others(words):
    model, ids = models.llama(), words(TEXT, add_special_tokens=False, return_tensors="pt")
    subject = text_subject(model, words, {"input_ids": ids.input_ids}, removal="attend")
    with torch.no_grad():
        logits = model(input_ids=ids.input_ids).logits[0, -1].double()
    assert subject.choice == int(logits.argmax())
    assert subject.score == pytest.approx(float(logits.softmax(-1).max()), abs=1e-6)
    assert subject.tokens == [*TEXT.split(), subject.decision]
    assert subject.target == 11
    assert subject.candidates == list(range(11))
    assert subject.abduct()["input_ids"].tolist() == [[*ids.input_ids[0].tolist(), subject.choice]]
    captured = subject.captured()
    assert captured.weights().shape == (4, 12, 12)
    assert captured.is_causal
    # a hidden token changes nothing by its content, and positions stay where they are
    other = ids.input_ids.clone()
    other[0, 4] = words.convert_tokens_to_ids("bad")
    twin = text_subject(model, words, {"input_ids": other}, removal="attend")
    (mine,), (theirs,) = subject.evaluate([(4,)]), twin.evaluate([(4,)])
    assert mine.label == theirs.label
    # the first token may go too
    assert subject.evaluate([(0,)])[0].score > 0


def test_the_masked_token_is_read_where_it_moves(words):
    model = models.bert("BertForMaskedLM")
    subject = text_subject(model, words, "the film was [MASK] good", removal="drop")
    assert subject.target == 4
    assert subject.tokens[4] == subject.decision
    assert subject.candidates == [1, 2, 3, 5]
    batch = words("film [MASK] good", return_tensors="pt")
    with torch.no_grad():
        expected = model(**batch).logits[0, 2].double().softmax(-1)[subject.choice]
    found = subject.evaluate([(5,), (1, 3)])
    assert found[1].score == pytest.approx(float(expected), abs=1e-6)
    # the attention is that of the text with the prediction in it
    assert words.mask_token_id not in subject.abduct()["input_ids"]
    again = text_subject(model, words, "the film was not good", target=4, removal="drop")
    assert again.decision == subject.decision


def test_padding_of_a_batch_is_cut(words):
    model, short = models.bert(), "the film was fun"
    batch = words([short, TEXT], padding=True, return_tensors="pt")
    row = {name: value[:1] for name, value in batch.items()}
    padded, alone = text_subject(model, words, row), text_subject(model, words, short)
    assert padded.tokens == alone.tokens
    assert padded.evaluate([(2,)]) == alone.evaluate([(2,)])


def test_importances_are_rollout_and_gradients(words):
    model = models.bert()
    subject = text_subject(model, words, TEXT)
    found = subject.importances()
    first, second = (layer.weights().mean(0) for layer in capture(model, encode_text(words, TEXT)))
    eye = torch.eye(13, dtype=torch.float64)
    expected = ((second + eye) / 2 @ ((first + eye) / 2))[0]
    assert found["attention rollout"] == pytest.approx(expected.tolist())
    layers = capture(model, encode_text(words, TEXT))
    (mean,) = rollout_importances(layers, None).values()
    assert sum(mean) == pytest.approx(1)
    # gradient × input by hand
    embedding = model.get_input_embeddings()(encode_text(words, TEXT)["input_ids"]).detach()
    embedding.requires_grad_()
    logits = model(inputs_embeds=embedding).logits[0, subject.choice]
    (gradient,) = torch.autograd.grad(logits, embedding)
    by_hand = (gradient * embedding).sum(-1)[0].abs()
    assert found["gradient × input"] == pytest.approx(by_hand.tolist(), rel=1e-4)


def test_resampled_decisions_are_voted(words):
    subject = text_subject(models.bert(), words, TEXT, removal="resample", samples=3)
    scores = torch.tensor([[0.0, 5.0], [0.0, 5.0], [5.0, 0.0]], dtype=torch.float64)
    scores = scores if subject.choice == 0 else scores.flip(1)
    assert subject._outcome(scores).changed
    # the original decision wins a tie
    assert not subject._outcome(scores[1:]).changed
    assert subject._outcome(scores[:1]).rank == 2
    assert subject.evaluate([()])[0].score == pytest.approx(subject.score, abs=1e-6)


def test_names_of_tokens_are_readable(words):
    assert token_names(words, [2, 7, 25]) == ["[CLS]", "film", "##s"]
