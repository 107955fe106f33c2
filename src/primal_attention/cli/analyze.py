"""``primal analyze``: one page about a saved model, with a section for every analysis."""

from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from primal_attention.analysis.registry import (
    AnalysisResult,
    analysis_entry,
    list_analyses,
    registered_analyses,
)
from primal_attention.cli.folders import check_folder, new_folder
from primal_attention.cli.inputs import ModelInputs, load, one_sentence, read_batches
from primal_attention.report.page import Report
from primal_attention.support.command import UserError, progress
from primal_attention.support.settings import parse

if TYPE_CHECKING:
    from torch import nn

    from primal_attention.surgery.loading import LoadedModel

__all__ = ["main"]

_MARKER = "analyze.json"


@dataclass(frozen=True)
class Analyze(ModelInputs):
    """Measure a saved model: one page, report.html, and a JSON file for each analysis."""

    names: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME ...]")
    ] = ()
    """Analyses to run; by default all that suit the model. --NAME is the same as NAME."""
    original: Path | None = None
    """For a converted model: folder of the original model, if it was moved."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.names:
            analysis_entry(name)


def main(argv: list[str]) -> int:
    """Run the analyses; print the verdict and the table of each."""
    # the options of each analysis stand under its name: --spectrum.first 8
    kind = make_dataclass(
        "AnalyzeOptions",
        [(name, _options(name), field(default=_options(name)())) for name in list_analyses()],
        bases=(Analyze,),
        frozen=True,
        namespace={"__doc__": _help()},
    )
    names = [f"--{name}" for name in list_analyses()]
    argv = [word.removeprefix("--") if word in names else word for word in argv]
    options: Any = parse(kind, argv, prog="primal analyze")
    check_folder(options.out, _MARKER, overwrite=options.overwrite, source=options.model)

    from primal_attention.support.output import markdown_table, to_json, write_atomically

    loaded = load(options, original=options.original)
    batches = read_batches(options, loaded)
    results, skipped = _run_all(options, loaded, batches)
    title = type(loaded.model).__name__
    with new_folder(options.out) as folder:
        with one_sentence():
            _page(title, options.source, results, skipped).write(folder / "report.html")
        for name, result in results.items():
            write_atomically(folder / f"{name}.json", result.to_json())
        record = {
            "model": title,
            "folder": str(options.model),
            "measured_on": options.source,
            "verdicts": {name: result.verdict() for name, result in results.items()},
            "skipped": skipped,
        }
        write_atomically(folder / _MARKER, to_json(record))
    for name, result in results.items():
        print(f"{name}: {result.verdict()}\n\n{markdown_table(*result.table())}\n")
    for name, why in skipped.items():
        print(f"{name}: does not suit this model: {why}\n")
    print(f"Measured on {options.source}. Wrote {options.out / 'report.html'}")
    return 0


def _page(
    title: str, source: str, results: dict[str, AnalysisResult], skipped: dict[str, str]
) -> Report:
    """Return the page: all verdicts, then each analysis and what it does not show."""
    page = Report(f"{title}: what its attention does", f"Measured on {source}.")
    if len(results) > 1:
        page.section("In short")
        page.table(
            ["analysis", "finding"],
            [[name.capitalize(), result.verdict()] for name, result in results.items()],
        )
    for name, result in results.items():
        page.include(name.capitalize(), result.report())
        page.caution(result.limits())
    if skipped:
        page.section("Left out").table(
            ["analysis", "reason"], [[name.capitalize(), why] for name, why in skipped.items()]
        )
    return page


def _options(name: str) -> type[Any]:
    return analysis_entry(name).load_options()


def _help() -> str:
    lines = [f"{name}: {analysis_entry(name).summary}" for name in list_analyses()]
    return "\n\n".join([str(Analyze.__doc__), *lines])


def _run_all(
    options: Any, loaded: "LoadedModel", batches: Sequence[Any]
) -> tuple[dict[str, AnalysisResult], dict[str, str]]:
    """Return the results by name, and why the others were skipped.

    An analysis that the user named must succeed; of the others, at least one.
    """
    results: dict[str, AnalysisResult] = {}
    skipped: dict[str, str] = {}
    for name in dict.fromkeys(options.names or registered_analyses()):
        progress(f"running {name}")
        try:
            with one_sentence():
                entry = analysis_entry(name)
                model = _with_our_layers(loaded.model) if entry.needs_our_layers else loaded.model
                results[name] = entry.run(
                    model, batches, getattr(options, name), tokenizer=loaded.tokenizer
                )
        except UserError as error:
            if options.names:
                raise
            skipped[name] = str(error)
    if not results:
        why = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise UserError(f"no analysis suits the model: {why}")
    return results, skipped


def _with_our_layers(model: "nn.Module") -> "nn.Module":
    """Return the model with its softmax layers as layers of this library, which changes no output.

    A model that has such layers already comes back as it is.
    """
    import copy

    from primal_attention.attention import Attention
    from primal_attention.surgery import SurgeryConfig, convert

    if any(isinstance(module, Attention) for module in model.modules()):
        return model
    model = copy.deepcopy(model)
    convert(model, SurgeryConfig("softmax"))
    return model
