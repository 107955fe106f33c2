"""Data, models and tables of the studies behind causal explanations."""

import random

import pytest
import torch

from primal_attention.bench.recommenders import (
    MASK,
    ItemModel,
    ItemModelConfig,
    _Windows,
    item_scores,
    popularity,
    question,
    ranking_scores,
    ranks_of,
    read_ratings,
    train_recommender,
)
from primal_attention.command import UserError

HEADER = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
EVENTS = [
    *(("1", "50", 10), ("1", "7", 30), ("1", "9", 20), ("1", "11", 20), ("1", "50", 40)),
    *(("1", "12", 50), ("2", "7", 9), ("0", "1", 1)),
]


def write(path, events, header=""):
    path.write_text(header + "".join(f"{u}\t{i}\t3\t{t}\n" for u, i, t in events), "utf-8")
    return path


@pytest.mark.parametrize("header", ["", HEADER])
def test_histories_are_in_order_of_time(tmp_path, header):
    ratings = read_ratings(write(tmp_path / "ratings", EVENTS, header), fewest=5)
    # user 0 and the short user 2 are out; ties keep the order of the file; 50 counts once
    assert ratings.users == ("1",)
    assert [ratings.items[i - 1] for i in ratings.histories[0]] == ["50", "9", "11", "7", "12"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("1::2::5::978300760\n", "line 1: expected user, item, rating and time with tabs"),
        ("1\t2\t3\tnever\n", "line 1"),
        ("1\t\t3\t4\n", "must not be empty"),
        ("1\t2\t3\tnan\n", "must not be empty"),
        ("1\t2\t3\t4\n", "no user with 5 items"),
        (b"\xff\xfe", "no text"),
    ],
)
def test_a_wrong_file_of_ratings_is_refused(tmp_path, content, words):
    path = tmp_path / "ratings"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=words):
        read_ratings(path)


def test_a_missing_file_of_ratings_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nothing: No such file.*give the file"):
        read_ratings(tmp_path / "nothing")


def test_windows_hide_items_and_label_only_those():
    histories = [tuple(range(1, 130)), tuple(range(1, 8))]
    masked, causal = (_Windows(histories, is_causal, 20) for is_causal in (False, True))
    shares = []
    for i in range(len(masked)):
        x, labels = masked[i]["x"], masked[i]["labels"]
        hidden = x == MASK
        assert len(x) == min(100, len(histories[i % 2])) and hidden.any()
        assert ((labels != -100) == hidden).all()
        whole = torch.where(hidden, labels, x)
        assert (whole.diff() == 1).all()  # a window of the history, and the labels are its items
        assert (masked[i]["x"] == x).all()  # the same when it is read again
        shares.append(float(hidden.double().mean()))
        x, labels = causal[i]["x"], causal[i]["labels"]
        assert (labels == x + 1).all() and len(x) <= 100
    assert len(set(shares)) > 10


def test_the_last_position_asks_and_watched_items_are_out():
    torch.manual_seed(0)
    settings = {"vocab_size": 12, "dim": 8, "num_heads": 2, "attention": "softmax"}
    histories = [(3, 1, 4), (5, 9, 2, 6, 11)]
    for is_causal in (True, False):
        model = ItemModel(ItemModelConfig(**settings, is_causal=is_causal)).eval()
        scores = item_scores(model, histories)
        for row, history in zip(scores, histories, strict=True):
            asked = question(model, history)
            assert asked == [*history] if is_causal else [*history, MASK]
            alone = model(torch.tensor([asked])).logits[0, -1]
            out = [MASK, *history]
            rest = [i for i in range(12) if i not in out]
            assert (row[out] == -torch.inf).all()
            torch.testing.assert_close(row[rest], alone[rest])


def test_popular_items_come_first():
    scores = popularity([(1, 2), (2, 3), (2, 4), (3, 1)], 5)
    assert scores[3].argsort(descending=True)[:2].tolist() == [2, 4]
    assert ranks_of(scores, [3, 1, 3, 5]) == [1, 1, 2, 3]
    assert ranking_scores([1, 2, 11]) == pytest.approx({"hits": 2 / 3, "gain": 0.543643}, rel=1e-6)


@pytest.mark.parametrize("kind", ["masked", "causal"])
def test_a_recommender_learns_a_cycle_and_continues(kind, tmp_path):
    generator = random.Random(0)
    starts = [generator.randrange(12) for _ in range(40)]
    histories = [tuple(1 + (s + i) % 12 for i in range(10)) for s in starts]
    options = {"passes": 30, "lr": 1e-2}
    model = train_recommender(kind, histories, 12, tmp_path, **options)
    scores = item_scores(model, [h[:-1] for h in histories])
    assert ranking_scores(ranks_of(scores, [h[-1] for h in histories]), cut=1)["hits"] > 0.9
    again = train_recommender(kind, histories, 12, tmp_path, **options)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
