"""The table of approximation errors: what it must show, and that it is written."""

from primal_attention.bench.approximation import METHODS, Plan, feature_errors, main


def _error(rows, tau, method):
    return next(row.error for row in rows if (row.tau, row.method) == (tau, method))


def test_exact_low_degrees_win_where_temperature_is_low_and_positive_features_where_it_is_high():
    rows = feature_errors([0.177, 4.0], [128], draws=3)
    low = {method: _error(rows, 0.177, method) for method in METHODS}
    assert low["maclaurin"] < 0.25 * min(low["maclaurin-published"], low["favor"])
    assert low["maclaurin"] < rows[0].from_average < low["favor"] * 2
    assert _error(rows, 4.0, "favor") < _error(rows, 4.0, "maclaurin-published")


def test_the_command_prints_a_table_and_saves_it(tmp_path, capsys):
    main(Plan(dim=8, tokens=16, draws=2, out=tmp_path))
    printed = capsys.readouterr().out
    assert all(method in printed for method in METHODS)
    assert (tmp_path / "approximation.csv").read_text().startswith("# exp kernel, d=8, 16 tokens")
    assert (tmp_path / "approximation.png").read_bytes()[:4] == b"\x89PNG"
