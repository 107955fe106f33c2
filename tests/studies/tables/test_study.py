"""Methods are compared on the same rows; ranks, intervals and tables are those of the rows."""

from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest

pytest.importorskip("sklearn")

from threadpoolctl import threadpool_limits

from primal_attention.datasets.tables import Fold, Table, load_table
from primal_attention.support.command import UserError
from primal_attention.tasks import tables as tabular
from primal_attention.tasks.study import find_study, read_rows, run_study
from primal_studies.tables.methods import METHODS, make_method
from primal_studies.tables.pages import cost_page, rank_page, score_page
from primal_studies.tables.ranks import rank_methods
from primal_studies.tables.study import Tables, score_classes, score_numbers

RESULTS = Path(__file__).parents[3] / "docs" / "results" / "tables"
BASELINES = [name for name, method in METHODS.items() if not method.is_ours]
FILES = {"scores.md", "ranks.md", "more.md", "cost.md", "ranks.png", "scores.png"}


def row(set_, split, method, **scores):
    number = {"kind": "number", "rmse": 1.0, "r2": 0.5}
    return {"set": set_, "split": split, "method": method, "fit_seconds": 1.0,
            "predict_seconds": 1.0, **number, **scores}  # fmt: skip


def ranks(rows, **options):
    return rank_methods(rows, lambda r: r["rmse"], **options)


@pytest.fixture(autouse=True)
def _one_thread():
    # threads of BLAS on busy cores make small products a hundred times slower
    with threadpool_limits(1):
        yield


def line_of(text, title):
    """Return the cells of the first line of a Markdown page that begins with a title."""
    line = next(line for line in text.split("\n") if line.startswith(f"| {title} "))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_equal_scores_share_a_rank():
    losses = {"k-nn": 3.0, "linear": 1.0, "mlp": 3.0, "boosting": 2.0, "catboost": 3.0}
    found = ranks([row("wine", 0, name, rmse=loss) for name, loss in losses.items()])
    assert found.methods == tuple(losses)
    assert found.by_set["wine"].tolist() == [[4.0, 1.0, 4.0, 2.0, 4.0]]


def test_splits_are_averaged_before_tables():
    # k-nn wins three splits of one table and loses the only split of another
    rows = [row("yacht", i, m, rmse=loss) for i in range(3)
            for m, loss in (("k-nn", 1.0), ("mlp", 2.0))]  # fmt: skip
    rows += [row("wine", 0, m, rmse=loss) for m, loss in (("k-nn", 2.0), ("mlp", 1.0))]
    found = ranks(rows)
    assert found.splits == 4
    assert {name: rank.mean for name, rank in found.average().items()} == {"k-nn": 1.5, "mlp": 1.5}
    difference = found.average("mlp")
    assert difference["mlp"] == (0.0, 0.0, 0.0)
    assert difference["k-nn"].mean == 0.0
    assert difference["k-nn"].lower == -1.0
    assert difference["k-nn"].upper == 1.0


def test_the_interval_has_the_width_of_the_splits():
    rng = np.random.default_rng(0)
    losses = rng.normal([0.0, 0.5], 1.0, size=(100, 2))
    found = ranks([row("wine", i, m, rmse=loss) for i, pair in enumerate(losses)
                   for m, loss in zip(("k-nn", "mlp"), pair, strict=True)])  # fmt: skip
    rank = found.average()["k-nn"]
    won = (losses[:, 0] < losses[:, 1]).mean()
    assert rank.mean == pytest.approx(2 - won)
    error = np.sqrt(won * (1 - won) / 100)
    assert rank.upper - rank.mean == pytest.approx(1.96 * error, rel=0.15)
    assert rank.mean - rank.lower == pytest.approx(1.96 * error, rel=0.15)
    # a method that always wins has no spread
    always = ranks([row("wine", i, m, rmse=loss) for i in range(4)
                    for m, loss in (("k-nn", 1.0), ("mlp", 2.0))])  # fmt: skip
    assert always.average()["k-nn"] == (1.0, 1.0, 1.0)


def test_a_split_that_a_method_lacks_does_not_count():
    rows = [row(s, i, m) for s in ("wine", "iris") for i in range(3) for m in ("k-nn", "mlp")]
    short = [r for r in rows if (r["set"], r["split"], r["method"]) != ("iris", 2, "mlp")]
    found = ranks(short)
    assert {name: len(r) for name, r in found.by_set.items()} == {"wine": 3, "iris": 2}
    assert "2 methods, 2 tables, 5 splits" in rank_page(short).replace("\n", " ")


def test_a_method_that_lacks_a_table_is_shown_but_not_ranked():
    rows = [row(s, 0, m) for s in ("yacht", "concrete") for m in ("k-nn", "mlp")]
    rows.append(row("yacht", 0, "linear", rmse=0.1))
    found = ranks(rows)
    assert found.methods == ("k-nn", "mlp")
    assert found.splits == 2
    assert line_of(rank_page(rows), "ridge / logistic") == ["–", "–"]
    assert line_of(score_page(rows), "ridge / logistic") == ["–", "**0.10**"]


def test_without_a_common_split_there_are_no_ranks():
    rows = [row("yacht", 0, "k-nn"), row("yacht", 1, "mlp")]
    assert ranks(rows) is None
    assert "no ranks" in rank_page(rows)
    Tables().tables([r | {"settings": Tables.Options().mark(r["method"])} for r in rows],
                    Tables.Options())  # fmt: skip


def test_scores_of_numbers_are_those_of_scikit_learn_and_of_the_normal_density():
    metrics, stats = pytest.importorskip("sklearn.metrics"), pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    y, guess, deviation = rng.normal(size=50), rng.normal(size=50), rng.uniform(0.5, 2, size=50)
    found = score_numbers(y, guess, deviation, 4.0)
    assert found["rmse"] == pytest.approx(metrics.root_mean_squared_error(y, guess))
    assert found["rmse_scaled"] == pytest.approx(found["rmse"] / 4)
    assert found["r2"] == pytest.approx(metrics.r2_score(y, guess))
    assert found["nll"] == pytest.approx(-stats.norm(guess, deviation).logpdf(y).mean())
    assert "nll" not in score_numbers(y, guess, None, 4.0)


def test_scores_of_classes_by_hand():
    y = np.array(["a", "b", "a", "b"])
    chances = np.array([[0.9, 0.1], [0.4, 0.6], [0.3, 0.7], [0.2, 0.8]])
    found = score_classes(y, np.array(["a", "b", "b", "b"]), chances, np.array(["a", "b"]))
    # of four pairs of an a and a b, only (0.7, 0.6) is in the wrong order
    assert found == {
        "classes": 2,
        "accuracy": 0.75,
        "auroc": 0.75,
        "log_loss": pytest.approx(-np.log([0.9, 0.6, 0.3, 0.8]).mean()),
    }
    three = score_classes(np.arange(3), np.arange(3), np.eye(3) * 0.7 + 0.1, np.array([0, 1, 2]))
    assert three["auroc"] == three["accuracy"] == 1.0


@pytest.fixture
def mixed():
    """A table of numbers and words with holes; a word of the test rows is new."""
    pd = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    word = rng.choice(["red", "blue"], 80).astype(object)
    label = np.where(word == "red", "yes", "no")
    word[:3], word[70] = None, "green"
    frame = pd.DataFrame({"size": rng.normal(size=80), "color": pd.Categorical(word)})
    frame.loc[5:8, "size"] = np.nan
    return Table("adult", frame, label, "classes", (Fold(np.arange(60), np.arange(60, 80)),))


def extra(name):
    is_missing = name in ("lightgbm", "catboost") and find_spec(name) is None
    return pytest.param(
        name, marks=pytest.mark.skipif(is_missing, reason="needs the extra tables-peers")
    )


@pytest.mark.parametrize("name", [extra(name) for name in BASELINES])
def test_a_method_takes_words_holes_and_new_categories(name, mixed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    X_train, X_test, y_train, y_test = mixed.parts(0)
    model = make_method(name, mixed).fit(X_train, y_train)
    assert (model.predict(X_test).ravel() == y_test).mean() > 0.8
    assert model.predict_proba(X_test).shape == (20, 2)
    assert not list(tmp_path.iterdir())  # CatBoost would leave a folder


@pytest.mark.parametrize("name", [extra(name) for name in BASELINES if name != "linear"])
def test_a_method_learns_numbers_and_is_the_same_for_a_seed(name):
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, size=(150, 2))
    table = Table(
        "t", X, 100 + 10 * X[:, 0] ** 2, "number", (Fold(*np.split(np.arange(150), [100])),)
    )
    X_train, X_test, y_train, y_test = table.parts(0)
    first, second = (make_method(name, table, seed=3).fit(X_train, y_train) for _ in range(2))
    guess = first.predict(X_test)
    np.testing.assert_array_equal(guess, second.predict(X_test))
    assert score_numbers(y_test, guess, None, 1.0)["r2"] > 0.8


def test_ours_get_their_row_attention_and_steps_only_if_asked(monkeypatch):
    class Fake:
        def __init__(self, **options):
            self.options = options

    for name in ("TableClassifier", "TableRegressor", "OTAlignedClassifier"):
        monkeypatch.setattr(tabular, name, type(name, (Fake,), {}), raising=False)
    iris, diabetes = load_table("iris"), load_table("diabetes")
    model = make_method("npt-primal", iris, seed=2)
    assert type(model).__name__ == "TableClassifier"
    assert model.options == {"attention": "primal-dual", "random_state": 2}
    model = make_method("npt-none", diabetes, steps=7)
    assert type(model).__name__ == "TableRegressor"
    assert model.options == {
        "random_state": 0,
        "max_epochs": 7,
        "options": {"has_rows": False, "epoch_steps": 1},
    }
    assert make_method("ot-aligned", iris, steps=7).options == {"random_state": 0}
    with pytest.raises(UserError, match=r"no method 'npt-prime'. Did you mean 'npt-primal'"):
        make_method("npt-prime", iris)


def test_the_first_split_of_all_tables_comes_before_the_second():
    options = Tables.Options(sets=("wine", "iris"), methods=("k-nn", "linear"), splits=20)
    cells = Tables().cells(options)
    order = [(c["split"], c["set"], c["method"]) for c in cells]
    assert order[:5] == [(0, "wine", "k-nn"), (0, "wine", "linear"), (0, "iris", "k-nn"),
                         (0, "iris", "linear"), (1, "wine", "k-nn")]  # fmt: skip
    assert len(cells) == 2 * 2 * 5  # these tables have five splits


def test_a_study_that_was_cut_short_continues_and_new_methods_join(tmp_path):
    study, said = Tables(), []
    options = Tables.Options(sets=("iris", "diabetes"), methods=("random-forest",), splits=1)
    first = run_study(study, options, out=tmp_path, report=lambda _: None)
    more = Tables.Options(sets=("iris", "diabetes"), methods=("random-forest", "k-nn"), splits=1)
    rows = run_study(study, more, out=tmp_path, report=said.append)
    assert len(said) == 2
    assert [r for r in rows if r["method"] == "random-forest"] == first
    assert {p.name for p in tmp_path.iterdir() if p.is_file()} == {
        "rows.jsonl",
        "about.json",
    } | FILES
    iris, diabetes = first
    assert (iris["rows"], iris["columns"], diabetes["rows"], diabetes["columns"]) == (
        150,
        4,
        442,
        10,
    )
    assert iris["accuracy"] > 0.9
    assert iris["auroc"] > 0.95
    assert diabetes["rmse_scaled"] == pytest.approx(
        diabetes["rmse"] / load_table("diabetes").parts(0).y_train.std()
    )
    # another seed is another row
    other = Tables.Options(sets=("iris",), methods=("k-nn",), splits=1, seed=1)
    run_study(study, other, out=tmp_path, report=said.append)
    assert len(said) == 3
    # the table shows rows of one seed only
    assert "k-NN" not in study.tables(rows, Tables.Options(seed=2)).get("scores.md", "")


def test_the_table_of_scores_holds_means_and_deviations_and_marks_the_best():
    values = {"k-nn": (3.0, 4.0, 2.0), "mlp": (1.0, 1.5, 1.2)}
    rows = [row("yacht", i, m, rmse=x, r2=x) for m, xs in values.items() for i, x in enumerate(xs)]
    three = {"kind": "classes", "classes": 3, "log_loss": 0.1}
    rows += [row("wine", 0, m, accuracy=x, **three) for m, x in (("k-nn", 0.9), ("mlp", 0.8))]
    text = score_page(rows)
    assert line_of(text, "k-NN") == ["3.00 ± 1.00"]
    assert line_of(text, "MLP") == [f"**{fmean(values['mlp']):.2f}** ± {stdev(values['mlp']):.2f}"]
    assert "wine, accuracy" in text
    assert "**0.900**" in text
    assert "(2015): yacht (3); 5 stratified folds, seed 0: wine (1)." in text.replace("\n", " ")
    # two classes are compared by AUROC
    two = [row("breast-cancer", 0, "k-nn", auroc=0.5, accuracy=0.9, **three | {"classes": 2})]
    assert "breast-cancer, AUROC" in score_page(two)


def test_the_table_of_costs_compares_within_a_split():
    rows = [row("yacht", i, "random-forest", fit_seconds=s) for i, s in enumerate((1.0, 2.0, 4.0))]
    rows += [row("yacht", i, "mlp", fit_seconds=s, predict_seconds=0.5)
             for i, s in enumerate((3.0, 20.0, 8.0, 100.0))]  # fmt: skip
    assert line_of(cost_page(rows), "random forest") == ["2", "2 – 2", "1", "1"]
    assert line_of(cost_page(rows), "MLP") == ["14", "14 – 14", "3", "0.5"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sets": ("irs",)}, "sets has no 'irs'. Did you mean 'iris'"),
        ({"methods": ("forest",)}, "methods has no 'forest'"),
        ({"methods": ()}, "methods must not be empty"),
        ({"splits": 0}, "splits must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
    ],
)
def test_options_that_cannot_run_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Tables.Options(**options)


def test_a_missing_file_is_told_before_anything_runs(tmp_path):
    with pytest.raises(UserError, match=r"yacht lacks yacht\.npz"):
        Tables().cells(Tables.Options(sets=("iris", "yacht"), data=tmp_path))


def test_the_tables_in_the_docs_are_those_of_their_rows():
    study = find_study("tables", "repro")
    files = study.tables(read_rows(RESULTS), study.Options())
    assert set(files) == {p.name for p in RESULTS.iterdir()} - {"rows.jsonl", "about.json"}
    for name in files.keys() - {"ranks.png", "scores.png"}:
        assert (RESULTS / name).read_text("utf-8") == files[name], name
