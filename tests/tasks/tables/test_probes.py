"""Probes see what a model takes from other rows; row attention in the primal is what it claims."""

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")

from npt_cases import model as small_model
from npt_cases import table

from primal_attention.attention import create_attention
from primal_attention.functional import dual_residual, ksvd_objective, naive, parameter_trace
from primal_attention.report import Report
from primal_attention.tasks.study import find_study, run_study
from primal_attention.tasks.tables import TableClassifier, TableRegressor
from primal_attention.tasks.tables.probe_report import add_probes, plot_row_attention
from primal_attention.tasks.tables.probes import (
    context_model,
    corrupt_others,
    corruption_by_row,
    intervention,
    row_distances,
)
from primal_studies.tables.corruption import _mark
from primal_studies.tables.deletion import _delete, data_deletion
from primal_studies.tables.lookup import (
    VARIANTS,
    build_lookup,
    nearest_targets,
    predict_lookup,
    sample_lookup,
    train_lookup,
)

FITTED = {
    "dim": 8,
    "num_heads": 2,
    "max_epochs": 15,
    "random_state": 0,
    "options": {"epoch_steps": 2},
}
TINY = {"dim": 8, "num_heads": 2, "max_epochs": 2, "options": {"epoch_steps": 1}}
CONTENT = ("softmax", "primal", "hybrid")
"""Row attentions that carry content between rows."""


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(70, 3))
    return X, X[:, 0] + 0.1 * rng.normal(size=70)


@pytest.fixture(scope="module")
def regressor(data):
    return TableRegressor(**FITTED).fit(*data)


@pytest.fixture(scope="module")
def classifier(data):
    X, y = data
    return TableClassifier(**FITTED).fit(X, y > 0)


@pytest.fixture(scope="module")
def copier():
    """A model that has learned to look up one of twelve rows."""
    return train_lookup("softmax", 12, steps=450, lr=5e-3)


# lookup


@pytest.mark.parametrize("variant", VARIANTS)
def test_twins_hide_one_column_and_share_the_features(variant):
    found = sample_lookup(40, 50, variant)
    seen, twins = found.values.split(50, 1)
    hidden = found.hidden[:, 50:]
    assert not found.hidden[:, :50].any()
    assert (hidden.sum(2) == 1).all()
    torch.testing.assert_close(twins[hidden].view(40, 50), found.truth)
    shift = 1.0 if variant in ("add-one", "both") else 0.0
    torch.testing.assert_close(seen[..., -1] - twins[..., -1], torch.full((40, 50), shift))
    torch.testing.assert_close(seen[..., :4], twins[..., :4])
    noise = torch.stack([seen[..., 4:-1], twins[..., 4:-1]])
    assert noise.shape[-1] == (3 if variant in ("random-features", "both") else 0)
    if noise.numel():
        assert abs(noise.mean() - 1) < 0.02
        assert abs(noise.std() - 1) < 0.02
        assert abs(torch.corrcoef(noise.flatten(1))[0, 1]) < 0.02
    assert (found.column.unique().numel() > 1) == (variant == "any-column")


def test_the_nearest_row_answers_only_the_original_task():
    errors = {
        name: float((nearest_targets(t) - t.truth).square().mean().sqrt())
        for name in VARIANTS
        for t in [sample_lookup(20, 30, name)]
    }
    assert errors["original"] == errors["any-column"] == 0
    assert errors["add-one"] == pytest.approx(1)
    assert errors["random-features"] > 0.8


@pytest.mark.parametrize("row_attention", CONTENT)
def test_tables_computed_at_once_equal_the_model_with_their_context(row_attention):
    model, tables = build_lookup(row_attention), sample_lookup(3, 7)
    holes = tables.hidden[0, 7:]
    for values, found in zip(tables.values, predict_lookup(model, tables), strict=True):
        own = model.with_context(values[:7], torch.zeros(7, 5, dtype=torch.bool)).eval()
        torch.testing.assert_close(own(values[7:], holes).logits[:, 0], found, rtol=0, atol=2e-6)


# N14
def test_softmax_between_rows_looks_up_duplicates_and_single_rows_cannot(copier):
    assert copier.rmse <= 0.15
    assert train_lookup("none", 12, steps=200).rmse >= 0.9


# N14
@pytest.mark.slow
def test_lookup_with_most_seeds():
    found = [train_lookup("softmax", 12, seed=seed).rmse for seed in range(3)]
    assert sorted(found)[1] <= 0.15
    lost = [train_lookup("none", 12, seed=seed).rmse for seed in range(3)]
    assert sorted(lost)[1] >= 0.9


# N15
def test_predictions_follow_the_target_that_they_copy(copier):
    tables = sample_lookup(1, 12, generator=torch.Generator().manual_seed(5))
    seen, holes = tables.values[0, :12], tables.hidden[0, :12]
    found = [intervention(copier.model, seen, holes, row) for row in range(12)]
    assert 0.9 <= np.mean([f.slope for f in found]) <= 1.1
    assert np.mean([f.correlation for f in found]) > 0.99


@pytest.mark.slow
def test_one_sparse_layer_beside_a_primal_one_looks_up_what_primal_layers_cannot():
    assert train_lookup("hybrid", 64).rmse <= 0.2
    assert train_lookup("primal", 64).rmse >= 0.6


def test_an_intervention_changes_one_target_only():
    model, (values, missing) = small_model(), table()
    before = values.clone()
    sweep = torch.tensor([-1.0, 3.0])
    found = intervention(model, values, missing, 4, sweep=sweep)
    assert torch.equal(values, before)
    values[4, -1] = 3.0
    hidden = missing[4:5].clone()
    hidden[:, -1] = True
    own = model.with_context(values, missing).eval()(values[4:5], hidden)
    torch.testing.assert_close(found.predictions[1], own.logits[0, 0], rtol=0, atol=1e-6)
    slope = float(found.predictions.diff()) / 4
    assert found.slope == pytest.approx(slope, abs=1e-6)
    assert abs(found.correlation) == pytest.approx(1)


def test_an_intervention_needs_a_number(classifier):
    model = classifier.model_
    with pytest.raises(ValueError, match="target is a number"):
        intervention(model, model.context_values, model.context_missing, 0)


# corruption


# N7
def test_corruption_keeps_the_row_and_the_values_of_every_column():
    values, missing = table(50)
    found, holes = corrupt_others(values, missing, 7, seed=3)
    assert torch.equal(found[7], values[7])
    assert torch.equal(holes[7], missing[7])
    # a hole moves with its value
    pairs, shuffled = values + 100 * missing, found + 100 * holes
    assert torch.equal(pairs.sort(0).values, shuffled.sort(0).values)
    moved = (pairs != shuffled).float().mean(0)
    assert (moved > 0.5).all()
    assert len({tuple(r.tolist()) for r in shuffled} & {tuple(r.tolist()) for r in pairs}) < 5


@pytest.mark.parametrize("context", ["train", "transductive"])
def test_corruption_of_equal_rows_changes_nothing(data, context):
    X, y = data
    options = {"epoch_steps": 1, "context": context}
    fitted = TableRegressor(dim=8, num_heads=2, max_epochs=5, options=options, random_state=0)
    fitted.fit(X, y)
    equal = np.repeat(X[:1], 20, axis=0), np.repeat(y[:1], 20)
    beside = X[:5] if context == "train" else equal[0][:5]
    found = corruption_by_row(fitted, beside, y[:5], rows=equal)
    if context == "transductive":
        # hidden targets of the rows beside move, so only the context alone stays the same
        assert abs(found.change) < 1e-2
    else:
        assert found.change == pytest.approx(0, abs=1e-6)
    assert abs(corruption_by_row(fitted, X[:5], y[:5]).change) > 1e-6


def test_corruption_counts_each_evaluated_row_once(regressor, classifier, data):
    X, y = data
    whole = corruption_by_row(regressor, X, y, limit=1000)
    assert whole.score == pytest.approx(np.sqrt(np.mean((regressor.predict(X) - y) ** 2)))
    assert whole == corruption_by_row(regressor, X, y)
    few = corruption_by_row(classifier, X, y > 0, limit=4)
    assert few.score in (0, 0.25, 0.5, 0.75, 1)


def test_a_model_without_rows_asks_for_them(data):
    fitted = TableRegressor("primal-dual", **TINY).fit(*data)
    with pytest.raises(ValueError, match="pass rows="):
        context_model(fitted)
    with pytest.raises(ValueError, match="none can be shuffled"):
        fitted.corruption_test(*data)
    kept = fitted.corruption_test(*data, rows=data)
    assert kept.score == pytest.approx(np.sqrt(np.mean((fitted.predict(data[0]) - data[1]) ** 2)))
    assert kept.change != 0
    assert np.isfinite(corruption_by_row(fitted, *data, rows=data, limit=3).corrupted)


# deletion


class _Sum:
    """A prediction that is one plus the contributions of the rows that are left."""

    def __init__(self, contributions):
        self.contributions = np.asarray(contributions, float)
        self.count = len(self.contributions)

    def __call__(self, kept):
        return 1 + self.contributions[kept].sum()


def test_deletion_keeps_the_rows_that_a_prediction_needs():
    needed = np.zeros(60)
    needed[[5, 17]] = 0.5
    kept, deleted, change = _delete(_Sum(needed), np.random.default_rng(0), 5000)
    assert kept.tolist() == [5, 17]
    assert sorted([*kept, *deleted]) == list(range(60))
    assert change == 0


def test_deletion_stays_within_the_total_change():
    # each row is 0.4 % of the prediction, so 24 of them may go
    kept, _, change = _delete(_Sum(np.full(100, 2 / 300)), np.random.default_rng(0), 5000)
    assert len(kept) == 100 - 24
    assert 0.09 < change < 0.1


def test_deletion_allows_larger_steps_after_many_rejections_and_ends_at_few_rows():
    # single steps of 2 % are not allowed at the start
    contributions = np.zeros(100)
    contributions[:4] = 0.02
    kept, _, change = _delete(_Sum(contributions), np.random.default_rng(0), 5000)
    assert len(kept) == 2
    assert change > 0.01
    kept, _, change = _delete(_Sum(contributions), np.random.default_rng(0), 40)
    assert len(kept) > 55
    assert change < 0.1


def test_deletion_compares_the_distances_of_kept_and_deleted_rows(regressor, data):
    X, _ = data
    found = data_deletion(regressor, X[:3], max_proposals=60)
    assert 0 <= found.p_value <= 1
    for x, one in zip(X, found.deletions, strict=False):
        assert sorted([*one.kept, *one.deleted]) == list(range(70))
        assert one.change < 0.1
        rows = regressor._rows(x[None])
        away = row_distances(regressor.model_, rows.values[0], rows.missing[0]).numpy()
        assert one.kept_distance == pytest.approx(away[one.kept].mean())
        assert one.deleted_distance == pytest.approx(away[one.deleted].mean())


def test_distances_count_categories_and_holes_as_one():
    values = torch.tensor([[0.0, 2.0, 1.0, 9.0], [3.0, 2.0, 2.0, 9.0]])
    holes = torch.tensor([[False, False, False, False], [False, True, False, False]])
    point = torch.tensor([0.0, 0.0, 1.0, -5.0]), torch.zeros(4, dtype=torch.bool)
    found = row_distances(small_model(), *point, (values, holes))
    expected = torch.tensor([4 / 3, (9 + 1 + 1) / 3]).sqrt()
    torch.testing.assert_close(found, expected)


# pictures and report


def test_attention_is_drawn_with_the_nearest_rows_first(regressor, data):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    X, _ = data
    figure = plot_row_attention(regressor, X[:9], anchor=3)
    maps = regressor.attention_maps(X[:9])
    assert len(figure.axes) == 4
    drawn = np.asarray(figure.axes[0].images[0].get_array())
    rows = regressor._rows(X[3:4])
    order = row_distances(regressor.model_, rows.values[0], rows.missing[0]).argsort().numpy()
    np.testing.assert_allclose(drawn[0], maps["row_blocks.0.block.attention"][0, 3, order])
    plt.close(figure)


def test_primal_rows_have_no_map_to_draw(data):
    pytest.importorskip("matplotlib")
    fitted = TableRegressor("primal-dual", **TINY).fit(*data)
    with pytest.raises(ValueError, match="no matrix of weights"):
        plot_row_attention(fitted, data[0])


def test_a_report_says_what_other_rows_are_worth(regressor, classifier, data):
    pytest.importorskip("matplotlib")
    X, y = data
    page = add_probes(Report("numbers"), regressor, X[:20], y[:20]).html()
    test = corruption_by_row(regressor, X[:20], y[:20])
    for text in ("RMSE, other rows shuffled", f"{test.corrupted:.3g}", "slope of", "<img"):
        assert text in page
    page = add_probes(Report("classes"), classifier, X[:20], y[:20] > 0).html()
    assert "accuracy, other rows shuffled" in page
    assert "slope of" not in page


@pytest.mark.parametrize("row_attention", ["none", "primal"])
def test_a_report_of_a_model_without_rows_says_so(row_attention, data):
    options = {"epoch_steps": 1, "has_rows": row_attention != "none"}
    fitted = TableRegressor("primal-dual", **{**TINY, "options": options}).fit(*data)
    page = add_probes(Report("numbers"), fitted, *data).html()
    assert ("no attention between rows" in page) == (row_attention == "none")
    assert ("keeps no training rows" in page) == (row_attention == "primal")


# row attention in the primal


def _heads(x, map_, count):
    return map_(x).unflatten(-1, (count, -1)).transpose(1, 2)


# N16
def test_primal_rows_equal_the_dual_sum_over_rows_and_permute_with_them():
    torch.manual_seed(0)
    layer = create_attention("primal-dual", 24, 3, rank=5).double().eval()
    x = torch.randn(1, 40, 24, dtype=torch.float64)
    q, k, h_e, h_r = (
        _heads(x, m, 3) for m in (layer.q_proj, layer.k_proj, layer.dual_e, layer.dual_r)
    )
    kernel = naive.cosine(q) @ naive.cosine(k).mT  # [1 h n n]
    e, r = kernel @ h_r / 40, kernel.mT @ h_e / 40
    by_head = layer.concat(torch.cat([e, r], -1)).transpose(1, 2).flatten(2)
    y = layer(x)
    torch.testing.assert_close(y, layer.out_proj(by_head), rtol=0, atol=1e-12)
    order = torch.randperm(40)
    torch.testing.assert_close(layer(x[:, order]), y[:, order], rtol=0, atol=1e-12)


# N16
def test_the_objective_is_zero_at_the_singular_value_solution():
    torch.manual_seed(1)
    n, s = 30, 4
    q, k = (naive.cosine(torch.randn(1, 1, n, 8, dtype=torch.float64)) for _ in range(2))
    u, sigma, vt = torch.linalg.svd(q @ k.mT)
    h_e, h_r, sigma = u[..., :s], vt.mT[..., :s], sigma[..., :s]
    w_e, w_r = naive.dual_weights(k, h_r), naive.dual_weights(q, h_e)
    e, r = q @ w_e, k @ w_r
    torch.testing.assert_close(e * n, h_e * sigma[..., None, :], rtol=0, atol=1e-12)
    torch.testing.assert_close(r * n, h_r * sigma[..., None, :], rtol=0, atol=1e-12)
    # weights are means over n rows, so Λ = n / σ; the library has ℓ with ℓ² = Λ
    ell = (n / sigma[0]).sqrt()
    moments = e.square().mean(2), r.square().mean(2)
    found = ksvd_objective(*moments, ell, parameter_trace(w_e, w_r))
    assert abs(float(found)) < 1e-10
    assert float(dual_residual(e, r, h_e, h_r, ell)) < 1e-20
    # the objective is not zero everywhere
    assert abs(float(ksvd_objective(*moments, 1.1 * ell, parameter_trace(w_e, w_r)))) > 1e-4


# N17
def test_constant_weights_carry_nothing_from_row_to_row():
    layer = create_attention("primal-static", 16, 2).eval()
    x = torch.randn(1, 30, 16)
    other = torch.cat([x[:, :1], torch.randn(1, 29, 16)], 1)
    with pytest.warns(UserWarning, match="mix no tokens"):
        assert torch.equal(layer(x)[:, 0], layer(other)[:, 0])
    content = create_attention("primal-dual", 16, 2).eval()
    assert not torch.allclose(content(x)[:, 0], content(other)[:, 0])


# N18
def test_evenly_spaced_rows_depend_on_their_order():
    torch.manual_seed(0)
    layer = create_attention("primal", 32, 4, rank=4).eval()
    x, order = torch.randn(1, 100, 32), torch.randperm(100)
    y, permuted = layer(x)[:, order], layer(x[:, order])
    assert ((permuted - y).norm() / y.norm()).item() > 0.1


# studies


def test_the_study_of_lookup_can_be_continued(tmp_path):
    pytest.importorskip("matplotlib")
    study = find_study("tables-probes", "repro")
    options = study.Options(rows=(3, 5), attentions=("none", "1-nn"), seeds=(0, 1), steps=2)
    first = run_study(study, options, out=tmp_path, max_seconds=0, report=lambda _: None)
    assert first == []
    rows = run_study(study, options, out=tmp_path, report=lambda _: None)
    # two seeds of three tasks with both sizes, one seed of the others with the smaller size
    assert len(rows) == 2 * (2 * 3 * 2 + 2)
    text = (tmp_path / "table.md").read_text()
    assert "| original        | 1-nn      | **0.000** ± 0.000 |" in text
    assert (tmp_path / "picture.png").exists()


def test_the_study_of_corruption_has_a_row_for_every_model(tmp_path):
    pytest.importorskip("matplotlib")
    study = find_study("tables-corruption", "repro")
    options = study.Options(sets=("iris",), models=("softmax", "primal"), splits=1, steps=2)
    rows = run_study(study, options, out=tmp_path, report=lambda _: None)
    assert [r["model"] for r in rows] == ["softmax", "primal"]
    shares = np.array(rows[0]["shares"])
    assert shares.shape == (2, 10)
    np.testing.assert_allclose(shares.sum(1), 1, atol=1e-3)
    assert {p.suffix for p in tmp_path.iterdir()} == {".jsonl", ".json", ".md", ".png"}
    # rows of other settings are left out
    other = study.Options(sets=("iris",), models=("softmax", "primal"), splits=1, steps=3)
    assert study.tables(rows, other) == {}


def test_the_table_of_corruption_shows_relative_errors_and_points_of_accuracy():
    study = find_study("tables-corruption", "repro")
    options = study.Options()
    same = {"model": "softmax", "settings": _mark("softmax", options), "fit_seconds": 1.0}
    number = {"kind": "number", "score": 2.0, "by_row": 3.0, "shuffled": 2.5, "set": "yacht"}
    shown = {"kept_share": 0.25, "kept_distance": 0.5, "deleted_distance": 1.0, "p_value": 0.01}
    classes = {"kind": "classes", "score": 0.9, "by_row": 0.88, "shuffled": 0.9, "set": "wine"}
    rows = [{"split": i, **same, **number, **shown} for i in range(2)] + [same | classes]
    files = study.tables(rows, options)
    assert "| +50.0 % (+50.0 … +50.0) " in files["table.md"]
    assert "| +25.0 % (+25.0 … +25.0) " in files["table.md"]
    assert "-2.0 points" in files["table.md"]
    assert "| 25 %      | 0.50                 | 1.00" in files["deletion.md"]


def test_the_study_of_a_large_table_compares_what_is_kept_with_all_rows(tmp_path):
    pytest.importorskip("matplotlib")
    study = find_study("tables-scale", "repro")
    options = study.Options(rows=1200, steps=2, timed=(16, 32))
    rows = run_study(study, options, out=tmp_path, report=lambda _: None)
    fit = rows[0]
    assert max(fit[key] for key in ("gap_one_part", "gap_parts", "gap_kept")) < 1e-5
    assert len(set(fit["kept_bytes"].values())) == 1
    assert {(r["attention"], r["n"]) for r in rows[1:]} >= {("softmax", 32), ("primal", 128)}
    for name in ("fit.md", "time.md", "picture.png"):
        assert (tmp_path / name).exists()


def test_wrong_options_of_the_study_are_a_sentence():
    study = find_study("tables-probes", "repro")
    with pytest.raises(ValueError, match="Did you mean 'softmax'"):
        study.Options(attentions=("softmx",))
    with pytest.raises(ValueError, match="must not be empty"):
        study.Options(seeds=())
