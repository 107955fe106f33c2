"""``primal repro``: the published tables, computed here."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from primal_attention.cli.recipes import to_yaml
from primal_attention.command import UserError, did_you_mean, parse, told_as_mistake
from primal_attention.output import write_atomically

__all__ = ["main"]

_STUDIES = {
    "uea": "Table 1: accuracy on the UEA sets, by held-out data and as published; an ablation",
    "longrange": "Long Range Arena: accuracy at equal processor time or steps, with curves",
}


def main(argv: list[str]) -> int:
    """Run a study; a stopped one continues where it was."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: primal repro STUDY [OPTIONS]\n\nstudies:")
        for name, what in _STUDIES.items():
            print(f"  {name:<10} {what}")
        print(
            "\nA study can be stopped at any time; the same command continues it.\n"
            "primal repro STUDY --help tells its options. Time and memory on the shapes of Long\n"
            "Range Arena: primal bench longrange."
        )
        return 0
    if argv[0] not in _STUDIES:
        raise UserError(
            f"there is no study {argv[0]!r}.{did_you_mean(argv[0], _STUDIES)} "
            f"Studies: {', '.join(_STUDIES)}."
        )
    return (_uea if argv[0] == "uea" else _longrange)(argv[1:])


@dataclass(frozen=True)
class Uea:
    """Train what is missing of Table 1, and write it as CSV and Markdown."""

    sets: tuple[str, ...] = ()
    """Names of sets; by default all of the table."""
    models: tuple[str, ...] = ()
    """Columns: softmax, primal, primal-plus, dual, ours; by default all."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of parameters, batches and validation splits."""
    root: Path | None = None
    """Folder of the sets; by default uea in the folder of PRIMAL_DATA."""
    out: Path = Path("outputs/uea")
    """Folder of the tables and of what is done already."""
    max_seconds: float | None = None
    """Start nothing new after this time."""
    ablation: bool = False
    """The ablation instead of the table."""


def _uea(argv: list[str]) -> int:
    options = parse(Uea, argv, prog="primal repro uea")
    import torch

    from primal_attention.tasks.timeseries import list_series, load_series
    from primal_attention.tasks.timeseries.repro import ablate_uea, reproduce_uea
    from primal_attention.tasks.timeseries.settings import ABLATION_SETS, MODELS, SETS

    _known("set", options.sets, SETS)
    _known("model", options.models, MODELS)
    if not options.seeds:
        raise UserError("--seeds must name at least one seed.")
    if options.ablation and options.models:
        raise UserError("--models chooses columns of the table; the ablation has rows of its own.")
    names = options.sets or (ABLATION_SETS if options.ablation else SETS)
    with told_as_mistake(""):
        there = list_series(options.root)
    missing = [name for name in names if name not in there]
    if missing:
        raise UserError(
            f"the folder of the sets lacks {', '.join(missing)}; name those to run with --sets."
        )
    study = "uea_ablation" if options.ablation else "uea"
    with told_as_mistake(""):
        for name in names:
            for part in ("train", "test"):
                load_series(name, part, root=options.root)
        print(to_yaml(options), flush=True)
        write_atomically(options.out / f"{study}.config.yaml", _uea_settings(options, names))
    torch.set_num_threads(1)  # batches this small only wait for a second thread
    shared: Any = {
        "seeds": options.seeds,
        "root": options.root,
        "out": options.out,
        "max_seconds": options.max_seconds,
    }
    if options.ablation:
        rows = ablate_uea(names, **shared)
    else:
        rows = reproduce_uea(names, options.models or None, **shared)
    if rows:
        print(f"Saved the tables, their rows and settings as {study}.* in {options.out}")
    else:
        print("Nothing was trained yet, so there is no table.")
    return 0


def _uea_settings(options: Uea, names: Sequence[str]) -> str:
    """Return all that decides the rows, and the short names by which they refer to it."""
    from primal_attention.tasks.timeseries.settings import (
        ABLATION,
        ABLATION_SETTINGS,
        GRID,
        GRID_SETS,
        MODELS,
        PUBLISHED_SETTINGS,
        SETTINGS,
        ModelChoice,
        Settings,
        fingerprint,
        published_choice,
    )

    def describe(settings: Settings, choices: Mapping[str, ModelChoice]) -> dict[str, Any]:
        marks = {m: fingerprint(choice, settings) for m, choice in choices.items()}
        return {"settings": settings, "models": choices, "fingerprints": marks}

    content: dict[str, Any] = {"options": options}
    if options.ablation:
        content["ablation"] = {name: describe(ABLATION_SETTINGS, ABLATION) for name in names}
        return to_yaml(content)
    models = options.models or tuple(MODELS)
    content["validation_selected"] = {
        name: describe(SETTINGS[name], {m: MODELS[m] for m in models}) for name in names
    }
    content["best_test_epoch"] = {
        name: describe(PUBLISHED_SETTINGS[name], {m: published_choice(m, name) for m in models})
        for name in names
    }
    if "primal-plus" in models:
        content["best_pair"] = {
            name: describe(PUBLISHED_SETTINGS[name], GRID) for name in names if name in GRID_SETS
        }
    return to_yaml(content)


def _longrange(argv: list[str]) -> int:
    from primal_attention.tasks.longrange.compare import (
        Comparison,
        check_longrange,
        reproduce_longrange,
    )

    @dataclass(frozen=True)
    class LongRange(Comparison):
        """Train every model on every task at the same cost; write accuracies and curves."""

        out: Path = Path("outputs/longrange")
        """Folder of the results; what is there already is not done again."""
        data: Path | None = None
        """Folder with text/imdb and vision/cifar-10; by default that of PRIMAL_DATA."""

    options = parse(LongRange, argv, prog="primal repro longrange")
    root = options.data or (
        Path(os.environ["PRIMAL_DATA"]) if "PRIMAL_DATA" in os.environ else None
    )
    needed = [t for t in options.tasks if t != "listops"]
    if needed and (root is None or not root.is_dir()):
        raise UserError(
            f"{' and '.join(needed)} are read from a folder: set PRIMAL_DATA, give --data, or run "
            "--tasks listops, which is drawn."
        )
    import torch

    torch.set_num_threads(1)  # processor seconds of one core are what is compared
    comparison = Comparison(**{f.name: getattr(options, f.name) for f in fields(Comparison)})
    with told_as_mistake(""):
        check_longrange(options.out, comparison, data=root)
        print(to_yaml(options), flush=True)
        write_atomically(options.out / "config.yaml", to_yaml(options))
    reproduce_longrange(
        options.out, comparison, data=root, progress=lambda line: print(f"  … {line}", flush=True)
    )
    print((options.out / "accuracy.md").read_text())
    print(
        f"Saved accuracy.csv, accuracy.md, curves.csv, curves.png and config.yaml in {options.out}"
    )
    return 0


def _known(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    words = list(known)
    for name in names:
        if name not in words:
            raise UserError(
                f"there is no {kind} {name!r}.{did_you_mean(name, words)} "
                f"There are: {', '.join(words)}."
            )
