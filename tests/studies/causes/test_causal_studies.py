"""Data, models and tables of the studies behind causal explanations."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from primal_attention.analysis.causes.discovery import learn_pag
from primal_attention.analysis.causes.recommend import RecommenderSubject
from primal_attention.support.command import UserError
from primal_attention.tasks.study import run_study
from primal_studies.causes.compare import (
    ATTENTION,
    GRAPH,
    Estimate,
    Explanations,
    estimate_verdict,
    mean_interval,
)
from primal_studies.causes.measure import (
    SearchSettings,
    _consensus,
    _influence,
    _Runner,
    explain_by_all,
)
from primal_studies.causes.recommend import RecommendStudy
from primal_studies.causes.recommenders import (
    MASK,
    ItemModel,
    ItemModelConfig,
    LastItem,
    _Windows,
    item_scores,
    popularity,
    question,
    ranking_scores,
    ranks_of,
    read_histories,
    train_recommender,
)
from primal_studies.causes.sentiment import _masked, _passage, _sentence

HEADER = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
EVENTS = [
    *(("1", "50", 10), ("1", "7", 30), ("1", "9", 20), ("1", "11", 20), ("1", "50", 40)),
    *(("1", "12", 50), ("2", "7", 9)),
    *(("0", str(item), item) for item in range(1, 9)),
]


def write(path, events, header=""):
    path.write_text(header + "".join(f"{u}\t{i}\t3\t{t}\n" for u, i, t in events), "utf-8")
    return path


@pytest.mark.parametrize("header", ["", HEADER])
def test_histories_are_in_order_of_time(tmp_path, header):
    ratings = read_histories(write(tmp_path / "ratings", EVENTS, header), fewest=5)
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
        (b"\xff\xfe", "is not text in UTF-8"),
    ],
)
def test_a_wrong_file_of_ratings_is_refused(tmp_path, content, words):
    path = tmp_path / "ratings"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=words):
        read_histories(path)


def test_a_missing_file_of_ratings_is_named(tmp_path):
    with pytest.raises(UserError, match="nothing: No such file"):
        read_histories(tmp_path / "nothing")


def test_windows_hide_items_and_label_only_those():
    histories = [tuple(range(1, 130)), tuple(range(1, 8))]
    masked, causal = (_Windows(histories, is_causal, 20) for is_causal in (False, True))
    shares = []
    for i in range(len(masked)):
        x, labels = masked[i]["x"], masked[i]["labels"]
        hidden = x == MASK
        assert len(x) == min(100, len(histories[i % 2]))
        assert hidden.any()
        assert ((labels != -100) == hidden).all()
        whole = torch.where(hidden, labels, x)
        assert (whole.diff() == 1).all()  # a window of the history, and the labels are its items
        assert (masked[i]["x"] == x).all()  # the same when it is read again
        shares.append(float(hidden.double().mean()))
        x, labels = causal[i]["x"], causal[i]["labels"]
        assert (labels == x + 1).all()
        assert len(x) <= 100
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


def small_subject(is_causal, seed=0):
    torch.manual_seed(seed)
    config = ItemModelConfig(
        vocab_size=30, dim=16, num_heads=2, attention="softmax", is_causal=is_causal
    )
    return RecommenderSubject(
        LastItem(ItemModel(config).eval()),
        [3, 1, 4, 15, 9, 2, 6, 5],
        mask_id=None if is_causal else MASK,
        exclude=[MASK],
    )


@pytest.mark.parametrize("is_causal", [True, False])
def test_every_method_is_measured_under_the_same_conditions(is_causal):
    settings = SearchSettings(max_evals=100, max_size=3, is_exhaustive=True, nodes=8)
    smallest = set()
    for seed in range(6):
        subject = small_subject(is_causal, seed)
        found = explain_by_all(subject, settings, orders={"latest": subject.candidates[::-1]})
        assert {GRAPH, ATTENTION, "greedy", "random, best of 2", "graph sets", "latest"} <= set(
            found
        )
        least = found["exhaustive"][0]
        smallest.add(least)
        for name, (size, calls, rank) in found.items():
            assert calls <= 100
            assert (size is None) == (rank is None)
            # the exhaustive search has the smallest set of all, or there is none of three
            assert size is None or (size >= least if least else size > 3), name
            assert rank is None or rank > 1
    assert {1, 2} & smallest


def test_budgets_and_best_orders_count_their_own_sets():
    subject = small_subject(True)
    runner = _Runner(subject, SearchSettings(4, 3, True, 8))
    outcome = {i: subject.evaluate([(i,)])[0].changed for i in subject.candidates}
    flips = [i for i, changed in outcome.items() if changed]
    stays = [i for i, changed in outcome.items() if not changed]
    assert flips
    assert stays
    assert runner.prefixes([[flips[0], *stays]])[:2] == [1, 1]
    # the second order finds a single token; the third can only be shorter, so it is not followed
    got = runner.prefixes([[stays[0], flips[0]], [flips[0]], stays])
    assert got[0] == 1
    assert got[1] <= 3
    assert _Runner(subject, SearchSettings(0, 3, True, 8)).prefixes([flips]) == [None, 0, None]


def test_graphs_are_read_by_position():
    weights = np.array([[0, 0, 0, 0], [0, 0, 0, 0], [0.6, 0.6, 0, 0], [0, 0, 0.6, 0]])
    mixing = np.linalg.inv(np.eye(4) - weights)
    pag = learn_pag(mixing @ mixing.T, tau=1e-6)  # 0 o→ 2 ←o 1, 2 → 3
    nodes = SimpleNamespace(members=((1,), (2,), (4,), (7,)), target=0)
    graphs = SimpleNamespace(
        nodes=nodes, consensus=SimpleNamespace(frequency=np.array([[0, 0.2, 0.9, 0.2]]))
    )
    attention = torch.tensor([[0.0, 0.1, 0.3, 0.0, 0.2, 0.0, 0.0, 0.4]])
    near = _influence(graphs, SimpleNamespace(head=0, pag=pag), attention)
    # token 2 is reached through the collider 4; token 7 is not: 4 is no collider on that path
    assert near.distance == {4: 1, 2: 2}
    assert near.is_connected((2, 4))
    assert not near.is_connected((2,))
    assert near.attention[4] == pytest.approx(0.2)
    # the share of heads first, then attention; token 3 is no node
    assert _consensus(graphs, [2, 3, 4, 7], attention) == [4, 7, 2, 3]


ROWS = [
    {"tokens": 9, "found": {GRAPH: [2, 8, 3], ATTENTION: [1, 4, 2], "exhaustive": [1, 5, 2]}},
    {"tokens": 7, "found": {GRAPH: [None, 8, None], ATTENTION: [3, 2, 5], "exhaustive": [3, 9, 5]}},
    {"tokens": 5, "found": {g: [None, 8, None] for g in (GRAPH, ATTENTION, "exhaustive")}},
]


def test_a_method_without_a_set_counts_with_all_tokens():
    methods = Explanations(ROWS, ROWS[:2])
    assert methods.sizes(GRAPH) == [2, 7]
    assert methods.sizes(ATTENTION) == [1, 3]
    assert methods.means[GRAPH].mean == 4.5
    assert methods.difference(GRAPH, ATTENTION).mean == 2.5
    assert methods.share(GRAPH) == pytest.approx(1 / 3)
    assert methods.ranks(GRAPH) == [3]
    assert methods.rank_ratio(GRAPH, ATTENTION).mean == pytest.approx(1.5)
    table = methods.table("tokens", with_ranks=True).splitlines()
    header, _, *lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    assert [line[0] for line in lines] == [ATTENTION, "exhaustive", GRAPH]
    assert dict(zip(header, lines[-1], strict=True))["found"] == "33%"


def test_intervals_are_those_of_the_mean():
    values = [0.0, 1.0] * 200
    mean, low, high = mean_interval(values)
    # standard error of the mean: 0.5 / √400
    assert mean == 0.5
    assert (low, high) == pytest.approx((0.5 - 1.96 * 0.025, 0.5 + 1.96 * 0.025), abs=0.005)


def test_the_verdict_follows_the_interval():
    choices = "less", "equal", "more"
    values = [Estimate(d, d - 0.1, d + 0.1) for d in (-0.2, -0.05, 0.05, 0.2)]
    words = [estimate_verdict("G", "A", found, choices).split()[1] for found in values]
    assert words == ["less", "equal", "equal", "more"]
    ratios = [Estimate(1 + d, 1 + low, 1 + high) for d, low, high in values]
    words = [
        estimate_verdict("G", "A", found, choices, is_ratio=True).split()[1] for found in ratios
    ]
    assert words == ["less", "equal", "equal", "more"]


def test_pieces_of_every_second_text_are_masked_and_special_ones_never():
    ids = [101, *range(1000, 1060), 102]
    assert _masked(ids, 0, 103) == ids
    many = [_masked(ids, index, 103) for index in range(1, 400, 2)]
    assert all(row[0] == 101 and row[-1] == 102 for row in many)
    shares = [sum(piece == 103 for piece in row) / 60 for row in many]
    assert 0.2 < sum(shares) / len(shares) < 0.3
    assert max(shares) < 0.7
    assert _masked(ids, 7, 103) == _masked(ids, 7, 103)


def test_passages_are_whole_sentences_up_to_eighty_words():
    sentences = [f"{'word ' * (10 + i)}end." for i in range(12)]
    for seed in range(20):
        found = _passage(sentences, random.Random(seed))
        assert found in " ".join(sentences)
        assert found.endswith("end.")
        assert len(found.split()) <= 80 or found in sentences
    assert _passage(["word " * 90], random.Random(0)) == "word " * 90
    assert _sentence(["Too short.", "word " * 41], random.Random(0)) == ""


def test_ratings_are_asked_for(tmp_path):
    with pytest.raises(UserError, match="--ratings"):
        run_study(RecommendStudy(), out=tmp_path)
