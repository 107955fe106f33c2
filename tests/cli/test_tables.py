"""Tables of one's own: recognised, trained, explained, and used again in every way."""

import contextlib
import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
import yaml

import primal_attention as pa
from primal_attention.cli.main import main

pytest.importorskip("sklearn")
pd = pytest.importorskip("pandas")

from primal_attention.tasks.tables import TableClassifier, TableImputer, TableRegressor  # noqa: E402

QUICK = [
    *("--model.dim", "8", "--model.num-heads", "2", "--model.num-layers", "1"),
    *("--model.row-dim", "16", "--training.epochs", "2", "--training.epoch-steps", "10"),
]
SECTIONS = (
    *("Result", "Beside baselines", "Curves", "Calibration", "Influential rows"),
    *("Corruption test", "Learned map", "Spectra", "KSVD diagnostics", "Configuration"),
)


def houses(rows: int = 90) -> "pd.DataFrame":
    """Return numbers, words, dates, booleans and holes, a quantity and two classes."""
    rng = np.random.default_rng(0)
    size = rng.normal(100, 30, rows).round(1)
    built = pd.Timestamp("1950-01-01") + pd.to_timedelta(rng.integers(0, 25_000, rows), "D")
    frame = pd.DataFrame(
        {
            "size": size,
            "rooms": rng.integers(1, 7, rows),
            "district": rng.choice(["north", "west side"], rows),
            "built": built.strftime("%Y-%m-%d"),
            "garden": rng.choice([True, False], rows).astype(object),
            "empty": np.nan,
            "price": (3 * size + rng.normal(0, 5, rows)).round(2),
            "kind": np.where(size > 100, "dear", "cheap"),
        }
    )
    for name in ("size", "district", "built", "garden"):
        frame.loc[rng.random(rows) < 0.1, name] = np.nan
    return frame


def written(folder: Path, target: str) -> Path:
    """Write the table with one of its targets, which has a hole if it is a number."""
    frame = houses().drop(columns="kind" if target == "price" else "price")
    if target == "price":
        frame.loc[3, "price"] = np.nan
    frame.to_csv(folder / "houses.csv", index=False)
    return folder / "houses.csv"


def run(folder: Path, target: str, *options: str) -> Path:
    """Train on a file with a hole in its target; keep what was printed."""
    file, out = written(folder, target), folder / "run"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        arguments = [str(file), "--target", target, "--out", str(out), *QUICK, *options]
        assert main(["train", *arguments]) == 0
    (out / "printed.txt").write_text(printed.getvalue())
    return out


@pytest.fixture(scope="module")
def classes(tmp_path_factory) -> Path:
    """A finished run of two models that predict classes."""
    return run(tmp_path_factory.mktemp("classes"), "kind", "--compare", "primal-dual")


@pytest.fixture(scope="module")
def numbers(tmp_path_factory) -> Path:
    """A finished run of a model that predicts numbers."""
    return run(tmp_path_factory.mktemp("numbers"), "price")


# the run and its report


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_a_report_compares_and_explains(kind, request):
    out = request.getfixturevalue(kind)
    page = (out / "report.html").read_text("utf-8")
    headings = [part.partition("<")[0] for part in page.split('">')[1:] if "</h2>" in part[:60]]
    own = "Confusion" if kind == "classes" else "Predictions"
    assert set(headings) == {*SECTIONS, own}
    assert page.index('class="verdict"') < page.index("<table")
    for method in ("k-NN", "random forest", "histogram boosting", "a constant"):
        assert f"<td>{method}</td>" in page
    assert "baseline" in page[page.index('class="verdict"') :][:800]
    # influential rows are in the units of the file
    assert "<td>west side</td>" in page
    assert "A typical one: test row" in page
    found = json.loads((out / "result.json").read_text())
    assert len(found["baselines"]) == 5


def test_the_output_says_what_was_read_and_what_it_will_cost(numbers):
    told = (numbers / "printed.txt").read_text()
    assert told.startswith("houses.csv: a table, 'price' from 6 columns (task tables).\n")
    assert "the number 'price' from 6 columns; 60 to train, 12 to choose the epoch, 17 to" in told
    assert "A row without 'price' was left out. There is no test file: 20% of houses.csv" in told
    assert "Training softmax: about " in told
    assert "weights …" in told
    assert "beside baselines" in told


def test_a_finished_run_gives_the_same_report_again(numbers):
    before = json.loads((numbers / "result.json").read_text())
    assert main(["train", str(numbers), "--resume"]) == 0
    after = json.loads((numbers / "result.json").read_text())
    for key in ("test RMSE", "test loss", "test coverage of 90 %", "effective rank"):
        assert before["results"][0][key] == after["results"][0][key]
    assert before["baselines"] == after["baselines"]


# using the models


def predictions(name: str) -> list[dict[str, str]]:
    with Path(name).open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", ["softmax", "primal-dual"])
def test_classes_come_from_commands_python_and_estimators_alike(classes, name, tmp_path, capsys):
    file = written(tmp_path, "kind")
    X = houses().drop(columns=["kind", "price"])
    assert main(["predict", str(classes / name), str(file), "--out", "p.csv"]) == 0
    rows = predictions("p.csv")
    assert list(rows[0]) == ["index", "class", "p(cheap)", "p(dear)"]
    said = [row["class"] for row in rows]
    assert pa.load(classes / name).predict(X).tolist() == said
    estimator = TableClassifier.load(classes / name)
    assert estimator.classes_.tolist() == ["cheap", "dear"]
    assert estimator.predict(X).tolist() == said
    shares = np.array([[float(row[f"p({c})"]) for c in ("cheap", "dear")] for row in rows])
    np.testing.assert_allclose(estimator.predict_proba(X), shares, atol=2e-6)
    assert main(["eval", str(classes / name)]) == 0
    result = json.loads((classes / name / "result.json").read_text())
    assert f"loss {result['test loss']:.3f}" in capsys.readouterr().out
    # columns in another order, and more of them
    turned = houses()[["kind", "price", *X.columns[::-1]]]
    assert pa.load(classes / name).predict(turned).tolist() == said


def test_numbers_come_with_a_deviation(numbers, tmp_path):
    file = written(tmp_path, "price")
    assert main(["predict", str(numbers / "softmax"), str(file), "--out", "p.jsonl"]) == 0
    rows = [json.loads(line) for line in Path("p.jsonl").read_text().splitlines()]
    X = houses().drop(columns=["kind", "price"])
    mean, std = TableRegressor.load(numbers / "softmax").predict(X, return_std=True)
    np.testing.assert_allclose([row["value"] for row in rows], mean, rtol=1e-5)
    np.testing.assert_allclose([row["sd"] for row in rows], std, rtol=1e-5)
    with pytest.raises(ValueError, match="predicts no classes; load it with TableRegressor"):
        TableClassifier.load(numbers / "softmax")


def test_models_are_calibrated_and_keep_what_they_need(numbers, classes):
    whole, primal = (pa.load(classes / name) for name in ("softmax", "primal-dual"))
    for model in (pa.load(numbers).model, whole.model, primal.model):
        assert float(model.temperature) != 1
    # all rows but those to score; a primal model keeps none
    assert whole.task.context_rows == 72
    assert pa.load(numbers).task.context_rows == 72
    assert (primal.task.context_rows, primal.model.config.is_condensed) == (0, True)


@pytest.mark.parametrize("is_frame", [True, False])
def test_the_command_reads_what_an_estimator_saved(tmp_path, is_frame):
    frame = houses()[["size", "rooms", "price"]]
    X, y = frame[["size", "rooms"]], frame["price"]
    model = TableRegressor(dim=8, num_heads=2, num_layers=1, max_epochs=1, random_state=0)
    model.fit(X if is_frame else X.to_numpy(), y)
    model.save("saved")
    frame.to_csv("new.csv", index=False)
    assert main(["predict", "saved", "new.csv", "--out", "p.csv"]) == 0
    said = [float(row["value"]) for row in predictions("p.csv")]
    np.testing.assert_allclose(said, model.predict(X if is_frame else X.to_numpy()), rtol=1e-4)
    assert main(["eval", "saved", "--data", "new.csv"]) == 0


def test_an_imputer_has_nothing_to_predict(fails):
    X = houses()[["size", "rooms"]]
    imputer = TableImputer(dim=8, num_heads=2, num_layers=1, max_epochs=1, random_state=0)
    imputer.fit(X).save("saved")
    X.to_csv("new.csv", index=False)
    assert "this model has no target: it fills holes" in fails("predict", "saved", "new.csv")
    assert "this model has no target" in fails("eval", "saved", "--data", "new.csv")


def test_rows_of_a_transductive_model_are_predicted_together(tmp_path):
    written(tmp_path, "price")
    options = ["--model.context", "transductive", "--model.p-target", "1"]
    assert main(["train", "houses.csv", "--target", "price", *options, *QUICK]) == 0
    X = houses().drop(columns=["kind", "price"])
    trained = pa.load("outputs/houses")
    said = trained.predict(X, batch_size=7)
    np.testing.assert_allclose(said, trained.predict(X, batch_size=90))
    np.testing.assert_allclose(
        said, TableRegressor.load("outputs/houses/softmax").predict(X), rtol=1e-4
    )


def test_a_small_table_with_many_classes_and_one_test_row_has_a_report(tmp_path):
    frame = pd.DataFrame({"x": np.arange(48) % 16, "t": [f"c{i:02}" for i in np.arange(48) % 16]})
    frame.to_csv("t.csv", index=False)
    frame.head(1).to_csv("one.csv", index=False)
    assert main(["train", "t.csv", "--target", "t", "--test", "one.csv", *QUICK]) == 0
    assert Path("outputs/t/report.html").exists()


# which task reads a file


def recognised(capsys, *arguments: str) -> str:
    """Return the task that reads a file, without training it."""
    assert main(["init", "new.yaml", *arguments, "--overwrite"]) == 0
    return yaml.safe_load(Path("new.yaml").read_text())["task"]


NUMBERED = {f"t{i}": np.linspace(i, i + 1, 40) for i in range(5)}
NAMED = {"sepal length": np.linspace(4, 8, 40), "petal width": np.linspace(0, 2, 40)}
WORDS = {"who": ["a name of four"] * 40, "city": ["Ulm", "Rom"] * 20, "age": range(40)}


@pytest.mark.parametrize(
    ("columns", "target", "task"),
    [
        (NUMBERED, ["slow", "fast"] * 20, "series"),
        ({str(i): NUMBERED[f"t{i}"] for i in range(5)}, [1, 2] * 20, "series"),
        ({"case": np.arange(40) // 4, **NAMED}, np.arange(40) // 4 % 2, "series"),
        (NAMED, ["setosa", "virginica"] * 20, "tables"),
        (NAMED, np.linspace(0, 1, 40), "tables"),
        (NUMBERED, np.linspace(0, 1, 40), "tables"),
        ({"case": range(40), **NAMED}, [0, 1] * 20, "tables"),
        ({**NUMBERED, "t9": ["a", "b"] * 20}, [0, 1] * 20, "tables"),
        ({**WORDS, "x": range(40), "y": range(40)}, [0, 1] * 20, "tables"),
        ({"text": ["win money"] * 40, **NAMED}, ["ham", "spam"] * 20, "longrange"),
        ({"user": [1, 2] * 20, "time": range(40), "event": "a"}, [0, 1] * 20, "event-labels"),
    ],
    ids=[
        *("numbered", "integers", "case", "iris", "quantity", "numbers", "cases", "words"),
        *("names", "text", "events"),
    ],
)  # fmt: skip
def test_a_file_is_read_by_one_task(columns, target, task, capsys):
    pd.DataFrame({**columns, "asked": target}).to_csv("t.csv", index=False)
    assert recognised(capsys, "t.csv", "--target", "asked") == task
    assert recognised(capsys, "t.csv", "--target", "asked", "--task", "tables") == "tables"


def test_usual_names_of_a_target_need_no_option(capsys, fails):
    for name in ("target", "label"):
        pd.DataFrame({**NAMED, name: [0, 1] * 20}).to_csv("t.csv", index=False)
        assert recognised(capsys, "t.csv") == "tables"
        saved = yaml.safe_load(Path("new.yaml").read_text())["data"]
        assert saved.get("target", "target") == name  # a default is not written
    pd.DataFrame({**NAMED, "kind": [0, 1] * 20}).to_csv("t.csv", index=False)
    told = fails("train", "t.csv")
    assert "tables: which column is to be predicted?" in told
    assert "give --target with one of kind, sepal length" in told


def test_the_command_trains_as_the_estimators_do(capsys):
    from primal_attention.cli.plans import make_plan

    pd.DataFrame({**NAMED, "target": [0, 1] * 20}).to_csv("t.csv", index=False)
    recipe = make_plan(["t.csv"], prog="").options.recipe
    estimator = TableClassifier()
    mine = estimator._training(10_000, 0)
    assert recipe.training == mine
    assert recipe.model == estimator._model_options()
    assert recipe.data.valid == estimator._fit_options().validation
    assert recipe.data.max_context == estimator._fit_options().max_context


# mistakes


def table(**columns: object) -> str:
    return pd.DataFrame({"x": range(40), "y": np.arange(40) % 7, **columns}).to_csv(index=False)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (table(t=[0, 1] * 20), ["--target", "u"], "There is no 'u'; give --target with one of y"),
        (table(t=[1] * 40), [], "'t' has the same value in all rows"),
        (table(t=[f"id{i}" for i in range(40)]), [], "40 different words in 40 rows; classes must"),
        (table(t=[np.nan] * 40), [], "no row has a value in the target 't'"),
        (table(t=["2024-01-01", "2024-01-02"] * 20), [], "'t' holds dates or durations"),
        (table(t=["a", "b"] * 20), ["--kind", "number"], "'t' holds words, which are no numbers"),
        (table(t=[0, 1] * 20), ["--categorical", "z"], "names the column 'z', which the table"),
        (table(t=[0, 1] * 20), ["--kind", "many"], "many"),
        ("x,x,t\n" + "1,2,a\n3,4,b\n" * 9, [], "two columns have the name 'x'"),
        ("x,t\n1,2\n", [], "has 1 rows with a target, too few"),
        ("t\n" + "1\n2\n" * 9, [], "has no column besides the target 't'"),
        (table(z=[np.inf, 1] * 20, t=[0, 1] * 20), [], "column 'z' holds infinity"),
    ],
    ids=[
        *("no-target", "constant", "identifier", "empty", "dates", "words", "categorical", "kind"),
        *("twice", "one", "alone", "infinite"),
    ],
)  # fmt: skip
def test_tables_that_cannot_be_learned_from_are_told(text, options, message, fails):
    Path("t.csv").write_text(text)
    target = [] if "--target" in options else ["--target", "t"]
    assert message in fails("train", "t.csv", "--task", "tables", *target, *options, *QUICK)


def test_a_test_file_must_belong_to_the_table(tmp_path, fails):
    frame = houses().drop(columns="price")
    frame.to_csv("a.csv", index=False)
    command = ["train", "a.csv", "--target", "kind", "--test", "b.csv", *QUICK]
    frame.assign(kind="new").to_csv("b.csv", index=False)
    assert "the classes new of 'kind' are not among those of the training" in fails(*command)
    frame.drop(columns="size").to_csv("b.csv", index=False)
    assert "b.csv: the table has no column 'size'" in fails(*command)
    frame.drop(columns="kind").to_csv("b.csv", index=False)
    assert "b.csv has no column 'kind'" in fails(*command)


def test_a_file_to_predict_must_have_the_columns_of_the_training(classes, fails):
    frame = houses().drop(columns=["price", "kind"])
    frame.drop(columns="rooms").to_csv("new.csv", index=False)
    told = fails("predict", classes / "softmax", "new.csv")
    assert "new.csv: the table has no column 'rooms', which the model was trained with" in told
    frame.assign(built="last year").to_csv("new.csv", index=False)
    told = fails("predict", classes / "softmax", "new.csv")
    assert "column 'built' held dates in training; write them as 2024-05-31" in told
    frame.assign(size="large").to_csv("new.csv", index=False)
    assert "column 'size' held numbers in training" in fails(
        "predict", classes / "softmax", "new.csv"
    )
    frame.assign(district="moon", garden=np.nan).to_csv("new.csv", index=False)  # unseen is fine
    assert main(["predict", str(classes / "softmax"), "new.csv"]) == 0
