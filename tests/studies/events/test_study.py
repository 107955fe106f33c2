"""The studies of events run on a small log, and their tables are those of their rows."""

import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from primal_attention.datasets import EventSequences, HawkesProcess
from primal_attention.tasks.study import read_rows, run_study
from primal_studies.events.peer_study import Peers
from primal_studies.events.planted import Planted
from primal_studies.events.prefixes import Prefixes
from primal_studies.events.study import TimeCodes, group_sums, load_user_parts, paired
from primal_studies.kit.tables import exponent

RESULTS = Path(__file__).parents[3] / "docs" / "results"
STUDIES = [TimeCodes, Peers, Planted]


@pytest.fixture
def data(tmp_path):
    """A folder with a file in the form of the StackOverflow badges."""
    folder = tmp_path / "data" / "events" / "stackoverflow"
    folder.mkdir(parents=True)
    times, types = HawkesProcess().sample(60, 15)
    np.savez(
        folder / "stackoverflow.npz",
        time_ms=np.round(times * 86_400_000).astype(np.int64).ravel(),
        event=(types + 1).astype(np.int8).ravel(),
        offsets=np.arange(0, 60 * 15 + 1, 15),
        badge_names=np.array(["", "one", "two"]),
        in_test=np.arange(60)[:, None] % 5 == np.arange(5),
    )
    load_user_parts.cache_clear()
    yield tmp_path / "data"
    load_user_parts.cache_clear()


def check(study, options, out, files):
    rows = run_study(study, options, out=out, report=lambda _: None)
    assert {p.name for p in out.iterdir() if p.is_file()} == {"rows.jsonl", "about.json", *files}
    said = []
    assert run_study(study, options, out=out, report=said.append) == rows
    assert not said
    return rows


def test_time_codes_run_once_and_differences_are_paired(data, tmp_path):
    options = TimeCodes.Options(
        seeds=(0,), steps=4, batch_size=8, length=8, dim=16, num_valid=20, num_test=50, data=data
    )
    rows = check(TimeCodes(), options, tmp_path / "out", {"table.md", "picture.png"})
    assert len(rows) == 11
    for row in rows:
        counts, hits, losses = np.array(row["groups"]).sum(axis=0)
        assert counts == 50
        assert hits / counts == pytest.approx(row["accuracy"], abs=1e-4)
        assert losses / counts == pytest.approx(row["nll"], abs=1e-3)
    lines = (tmp_path / "out" / "table.md").read_text("utf-8").splitlines()
    assert len(lines) == 13
    assert sum("last_event" in line for line in lines) == 2


def test_our_models_run_beside_each_other_and_over_the_length(data, tmp_path):
    options = Peers.Options(
        models=("small", "small, softmax"), seeds=(0,), seconds=0.5, lengths=(32, 64), data=data
    )
    files = {"table.md", "length.md", "picture.png"}
    rows = check(Peers(), options, tmp_path / "out", files)
    assert [row["part"] for row in rows] == ["badges"] * 2 + ["length"] * 4
    for row in rows[:2]:
        sums = np.array(row["groups"]).sum(axis=0)
        assert sums[0] == row["events"] == 12 * 14
        assert sums[1] / sums[0] == pytest.approx(row["log_likelihood"], abs=1e-4)


@pytest.mark.skipif(find_spec("easy_tpp") is None, reason="needs the extra events of the studies")
def test_peers_score_the_same_events_as_ours(data, tmp_path):
    options = Peers.Options(
        models=("small", "RMTPP", "THP", "AttNHP"), seeds=(0,), seconds=0.3, slow_seconds=0.3,
        lengths=(32,), data=data,
    )  # fmt: skip
    rows = run_study(Peers(), options, out=tmp_path / "out", report=lambda _: None)
    counts = [[g[0] for g in row["groups"]] for row in rows if row["part"] == "badges"]
    assert len(counts) == 4
    assert all(count == counts[0] for count in counts)


def test_users_are_in_one_part_only(data):
    train, valid, test = load_user_parts(data)
    keys = [set(part.keys) for part in (train, valid, test)]
    assert [len(k) for k in keys] == [43, 5, 12]
    assert len(set.union(*keys)) == 60


def test_a_paired_difference_has_the_error_of_its_groups():
    generator = np.random.default_rng(0)
    base, shift = generator.normal(size=1_000), generator.normal(0.1, 0.5, size=1_000)
    rows = [
        {"groups": group_sums(np.stack([np.ones(1_000), values], -1), np.arange(1_000))}
        for values in (base, base + shift)
    ]
    found = paired([rows[1]], [rows[0]], 1)
    assert found.mean == pytest.approx(shift.mean(), abs=1e-4)
    assert found.error == pytest.approx(0.5 / math.sqrt(1_000), rel=0.25)
    assert str(found).startswith("+0.")


def test_prefixes_know_the_wait_only_with_the_target_as_reference():
    log = EventSequences.from_arrays([[0.0, 2.0, 5.0, 9.0], [1.0, 4.0]], ["abab", "ba"])
    targets = Prefixes.all_targets(log)
    assert targets.tolist() == [1, 2, 3, 5]
    known, unknown = (
        Prefixes(log, targets, 2.0, length=2, t_ref=t_ref)[2] for t_ref in ("target", "last_event")
    )
    # the last two events before 9.0, in halves of the time
    assert known["times"].tolist() == unknown["times"].tolist() == [0.0, 1.5]
    assert known["t_ref"].tolist() == [3.5]
    assert unknown["t_ref"].tolist() == [1.5]
    assert known["labels"].item() == 1
    with pytest.raises(ValueError, match="no prefix"):
        Prefixes(log, np.array([4]), 1.0, length=2, t_ref="target")


def test_the_slope_of_a_quadratic_is_two():
    assert exponent([(n, 3e-9 * n**2) for n in (1, 4, 16)]) == pytest.approx(2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TimeCodes.Options(seeds=()), "seeds must not be empty"),
        (lambda: TimeCodes.Options(lr=0.0), "lr must be positive"),
        (lambda: Peers.Options(models=("NHP",)), "choose from small"),
        (lambda: Peers.Options(seconds=0.0), "seconds must be positive"),
        (lambda: Planted.Options(processes=("Cox",)), "choose from Poisson, Hawkes"),
    ],
)
def test_options_that_cannot_run_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("study", [kind() for kind in STUDIES], ids=lambda s: s.name)
def test_the_tables_in_the_docs_are_those_of_their_rows(study):
    folder = RESULTS / study.name
    files = study.tables(read_rows(folder), study.Options())
    shown = {p.name for p in folder.iterdir()} - {"rows.jsonl", "about.json"}
    assert set(files) == shown
    for path in folder.glob("*.md"):
        again = f"primal repro {study.name} --out {folder} --max-seconds 0"
        assert files[path.name] == path.read_text("utf-8"), again
