"""Losses and masks of pre-training, against closed forms and plain loops."""

import math

import pytest
import torch

from primal_attention.tasks.pairs.objectives import (
    CollapseError,
    CollapseWatch,
    contrastive_pair_loss,
    draw_negatives,
    draw_seeds,
    feature_loss,
    feature_variance,
    group_mask,
    mask_words,
    matching_loss,
    random_mask,
    word_loss,
)

SPECIAL = (0, 1, 2, 3, 4)


def captions(b=40, n=9, vocab=30):
    """Texts of different lengths: [CLS] words [SEP] padding; some without a word."""
    ids = torch.randint(5, vocab, (b, n))
    lengths = torch.randint(2, n + 1, (b, 1))
    place = torch.arange(n)
    ids[place.expand(b, n) == lengths - 1] = 2
    ids[:, 0] = 1
    ids[place >= lengths] = 0
    return ids, ids != 0


def naive_groups(rows, seeds, group, keep):
    """Return the sets of the definition, by sorting pairs of value and index."""
    found = torch.zeros_like(keep)
    for b in range(len(rows)):
        for j, seed in enumerate(seeds[b].tolist()):
            others = [i for i in range(rows.shape[2]) if i != seed and keep[b, i]]
            others.sort(key=lambda i: (-float(rows[b, j, i]), i))
            found[b, [seed, *others[: group - 1]]] = True
    return found


def test_groups_hold_their_seed_and_the_top_of_its_row():  # M1
    b, n, group = 6, 17, 5
    keep = torch.arange(n) < torch.randint(6, n + 1, (b, 1))
    seeds = draw_seeds(b, n, share=0.6, group=group, keep=keep)
    assert seeds.shape == (b, 2)  # round(0.6 · 17 / 6)
    assert all(len(set(row)) == 2 for row in seeds.tolist())
    # rounded values have many ties, which go to the lower index
    rows = torch.rand(b, 2, n).mul(4).round()
    found = group_mask(rows, seeds, group, keep=keep)
    assert torch.equal(found, naive_groups(rows, seeds, group, keep))
    assert found.gather(1, seeds).all()
    assert not (found & ~keep).any()
    assert (found.sum(1) <= 2 * group).all()
    assert (found.sum(1) >= group).all()


def test_a_seed_is_hidden_even_if_nothing_attends_to_it():  # M1
    rows = torch.tensor([[[0.0, 0.9, 0.5, 0.8]]])
    assert group_mask(rows, torch.tensor([[0]]), 3).tolist() == [[True, True, False, True]]


def test_there_is_always_a_seed_and_padding_is_none():
    assert draw_seeds(3, 2, share=0.01, group=5).shape == (3, 1)
    keep = torch.tensor([[True] + [False] * 19])
    seeds = draw_seeds(1, 20, share=0.9, group=2, keep=keep)
    assert seeds.shape == (1, 6)
    assert seeds.unique().tolist() == [0]
    assert random_mask(50, 9, 3).sum(1).unique().tolist() == [3]
    assert random_mask(200, 9, 3).any(0).all()


def test_every_caption_with_a_word_has_a_hidden_one_and_special_tokens_have_none():  # M5
    ids, keep = captions(400)
    masked = mask_words(ids, keep, vocab_size=30, mask_id=3, special_ids=SPECIAL)
    hidden, is_word = masked.labels != -100, ids > 4
    assert not (hidden & ~is_word).any()
    assert torch.equal(hidden.any(1), is_word.any(1))
    assert not is_word.any(1).all()
    assert torch.equal(masked.labels[hidden], ids[hidden])
    assert torch.equal(masked.input_ids[~hidden], ids[~hidden])
    # padding that holds the id of a word is no word
    again = mask_words(ids.clamp_min(7), keep, vocab_size=30, mask_id=3, special_ids=SPECIAL)
    assert not ((again.labels != -100) & ~keep).any()


def test_hidden_words_become_mask_other_word_or_stay_in_the_right_shares():  # M5
    ids = torch.full((400, 100), 7)
    masked = mask_words(ids, ids > 0, vocab_size=1005, mask_id=3, special_ids=SPECIAL, share=0.3)
    hidden = masked.labels != -100
    assert abs(hidden.float().mean() - 0.3) < 0.01
    found = masked.input_ids[hidden]
    assert abs((found == 3).float().mean() - 0.8) < 0.02
    assert abs((found == 7).float().mean() - 0.1) < 0.02
    others = found[(found != 3) & (found != 7)]
    assert others.min() >= 5
    assert others.max() > 900


def test_half_of_the_texts_are_exchanged_and_never_for_an_equal_one():
    ids, keep = captions(60, vocab=7)  # many captions are equal
    ids[torch.where(keep, 0, 1).bool()] = 9  # padding may hold anything
    for _ in range(20):
        found = draw_negatives(ids, keep)
        words, drawn = (
            torch.where(mask, t, -1) for t, mask in ((ids, keep), (found.input_ids, found.keep))
        )
        assert torch.equal((words == drawn).all(1), found.matched)
    many = torch.stack([draw_negatives(ids, keep).matched for _ in range(100)])
    assert abs(many.float().mean() - 0.5) < 0.05
    one = draw_negatives(ids[:1].repeat(4, 1), keep[:1].repeat(4, 1), share=1.0)
    assert one.matched.all()


def test_similar_texts_are_drawn_in_proportion_to_the_exponential():
    ids = torch.tensor([[5], [6], [7]])
    similarity = torch.zeros(3, 3)
    similarity[0, 2] = math.log(3)
    drawn = torch.cat(
        [
            draw_negatives(ids, ids > 0, similarity=similarity, share=1.0).input_ids[:1, 0]
            for _ in range(2000)
        ]
    )
    assert abs((drawn == 7).float().mean() - 0.75) < 0.03


def test_given_texts_replace_half_of_the_drawn_ones():
    ids = torch.arange(5, 405)[:, None]
    hard = ids + 1000
    given = draw_negatives(ids, ids > 0, texts=(hard, hard > 0), share=1.0)
    assert abs((given.input_ids == hard).float().mean() - 0.5) < 0.08
    made = draw_negatives(ids, ids > 0, texts=lambda t, keep: (t + 1000, keep), share=1.0)
    assert abs((made.input_ids == hard).float().mean() - 0.5) < 0.08
    # a given text that equals the right one is no negative, and serves a batch of one pair
    alone = draw_negatives(ids[:1], ids[:1] > 0, texts=(hard[:1], hard[:1] > 0), share=1.0)
    assert alone.input_ids.tolist() == [[1005]]
    assert not alone.matched.any()
    same = draw_negatives(ids[:1], ids[:1] > 0, texts=(ids[:1], ids[:1] > 0), share=1.0)
    assert same.matched.all()


@pytest.mark.raw
def test_given_texts_of_another_shape_are_refused():
    ids = torch.tensor([[5, 6]])
    with pytest.raises(ValueError, match=r"must have the shape \(1, 2\)"):
        draw_negatives(ids, ids > 0, texts=(ids[:, :1], ids[:, :1] > 0))


def test_feature_loss_is_the_mean_over_hidden_tokens_without_gradient_to_the_target():  # M3
    guess = torch.randn(2, 5, 3, requires_grad=True)
    target = torch.randn(2, 5, 3, requires_grad=True)
    hidden = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 0, 1, 0]]).bool()
    loss = feature_loss(guess, target, hidden)
    wanted = [((guess[b, i] - target[b, i]) ** 2).mean() for b, i in hidden.nonzero().tolist()]
    torch.testing.assert_close(loss, torch.stack(wanted).mean())
    loss.backward()
    assert target.grad is None
    assert torch.equal(guess.grad.any(-1), hidden)
    cosine = feature_loss(2 * target, target, hidden, distance="cosine")
    torch.testing.assert_close(cosine, torch.zeros(()), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        feature_loss(-target, target, hidden, distance="cosine"), torch.tensor(2.0)
    )


def test_losses_without_anything_to_count_are_zero_with_a_graph():  # M4
    x = torch.randn(2, 3, 4, requires_grad=True)
    none = torch.zeros(2, 3, dtype=torch.bool)
    empty = x[:, 0][:0]
    for loss in (
        feature_loss(x, x, none),
        word_loss(x[none], torch.zeros(0, dtype=torch.long)),
        contrastive_pair_loss(empty, empty, 1.0),
    ):
        assert loss == 0
        assert loss.requires_grad
        loss.backward()
    assert x.grad.abs().max() == 0


def test_word_and_matching_loss_have_their_closed_forms():
    logits = torch.randn(4, 6)
    labels = torch.tensor([2, -100, 0, 5])
    wanted = -logits.log_softmax(1)[[0, 2, 3], [2, 0, 5]].mean()
    torch.testing.assert_close(word_loss(logits, labels), wanted)
    z = torch.tensor([0.3, -2.0])
    wanted = (math.log1p(math.exp(-0.3)) + math.log1p(math.exp(-2.0))) / 2
    found = matching_loss(z, torch.tensor([True, False]))
    torch.testing.assert_close(found, torch.tensor(wanted))


def test_contrast_has_its_closed_form_and_equal_texts_share_the_target():
    image, text = (torch.nn.functional.normalize(torch.randn(4, 3), dim=1) for _ in range(2))
    s = 5.0 * image @ text.T
    rows = s.diag() - s.logsumexp(1)
    columns = s.diag() - s.logsumexp(0)
    torch.testing.assert_close(
        contrastive_pair_loss(image, text, 5.0), -(rows + columns).mean() / 2
    )
    # two equal texts share the target of their images, in both directions
    same = torch.eye(4).bool()
    same[0, 3] = same[3, 0] = True
    share = same / same.sum(1)
    wanted = -(share * (s.log_softmax(1) + s.log_softmax(0))).sum() / 8
    torch.testing.assert_close(contrastive_pair_loss(image, text, 5.0, same=same), wanted)


def test_collapse_is_noticed():
    v = torch.randn(3, 4, 8)
    # a constant of each channel is no variance
    torch.testing.assert_close(feature_variance(v + torch.arange(8)), feature_variance(v))
    channel = v[..., 0]
    wanted = (channel - channel.mean()).square().mean()
    torch.testing.assert_close(feature_variance(v[..., :1]), wanted)
    watch = CollapseWatch()
    assert watch.update(feature_variance(v)) == 1.0
    torch.testing.assert_close(watch.update(feature_variance(v / 2)), 0.25, atol=1e-6, rtol=0)
    with pytest.raises(CollapseError, match="leave out the objective 'mfr'"):
        watch.update(feature_variance(v / 11))
    with pytest.raises(CollapseError):
        CollapseWatch().update(feature_variance(torch.ones(2, 3, 4)))
