"""A memory of constant size: what the table of the study says, and that its parts are measured."""

import pytest

from primal_attention.tasks.study import run_study
from primal_studies.surgery.hybrid import Hybrid, HybridOptions

SCORED = {"part": "test", "tokens": 128, "sequences": 2}
WINDOW = {**SCORED, "window": 8}
SIZES = {**WINDOW, "features": 4}
TRAINED = {
    "way": "trained",
    "transfer_steps": 3,
    "lora_steps": 2,
    "lora_rank": 2,
    "transfer_lr": 0.01,
    "lora_lr": 0.001,
    "num_train": 5,
    "train_tokens": 64,
}
ROWS = [
    {"way": "original", **SCORED, "perplexity": 20.0},
    {"way": "window", **WINDOW, "perplexity": 30.0},
    {"way": "clusters", **SIZES, "perplexity": 25.0},
    {
        **TRAINED,
        **SIZES,
        "stage": "lora",
        "perplexity": 21.0,
        "linear part off": 28.0,
        "cpu seconds": 7,
    },
    {"way": "original", **SCORED, "part": "valid", "perplexity": 50.0},
    {"way": "window", **WINDOW, "part": "valid", "perplexity": 90.0},
]


def lines(table):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.split("\n")]


def test_the_table_compares_rows_of_one_text_and_says_what_the_linear_part_adds():
    files = Hybrid().tables(ROWS, HybridOptions())
    assert set(files) == {"table.md", "picture.png"}
    first, second = (
        lines(part.split("\n\n")[0]) for part in files["table.md"].split("| model")[1:]
    )
    original, window, clusters, trained = (line[1:] for line in first[2:6])
    assert original == ["—", "20.00", "—", "—", "0.000", "—"]
    assert window == ["—", "30.00", "—", "—", "0.405", "—"]
    # untrained weights are those of the original, so the window alone is the row of the window
    assert clusters == ["4", "25.00", "30.00", "50%", "0.223", "—"]
    assert trained == ["4", "21.00", "28.00", "90%", "0.049", "7"]
    assert [line[2] for line in second[2:4]] == ["50.00", "90.00"]
    alone = Hybrid().tables(ROWS[:1], HybridOptions())["table.md"]
    assert "Nothing but the original is measured yet" in alone
    assert "20.00" in alone


def test_the_training_is_a_cell_of_its_own_and_can_be_left_out():
    ways = [cell["way"] for cell in Hybrid().cells(HybridOptions())]
    assert ways == ["original", "window", "clusters", "trained", "favor", "random"]
    assert "trained" not in [c["way"] for c in Hybrid().cells(HybridOptions(transfer_steps=0))]
    with pytest.raises(ValueError, match="num_train must be at least 1"):
        HybridOptions(num_train=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_study_measures_every_row_with_the_linear_part_off(tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("peft")
    options = HybridOptions(
        window=8, features=4, tokens=64, train_tokens=48, num_sequences=1, num_train=4,
        transfer_steps=2, lora_steps=2, lora_rank=2,
    )  # fmt: skip
    rows = run_study(Hybrid(), options, out=tmp_path, report=lambda line: None)
    scores = {row.get("stage", row["way"]): row["perplexity"] for row in rows}
    assert list(scores) == [
        *("original", "window", "clusters", "transfer", "lora", "favor", "random")
    ]
    assert len(set(scores.values())) == len(scores)
    trained = {row["stage"]: row for row in rows if row["way"] == "trained"}
    # attention transfer leaves the projections alone
    assert trained["transfer"]["linear part off"] == scores["window"]
    assert trained["lora"]["linear part off"] != scores["window"]
    assert "after low-rank training, 2 + 2 steps" in (tmp_path / "table.md").read_text("utf-8")
