"""``primal analyze``: one page about a saved model, with a section for every analysis."""

from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from primal_attention.analysis.registry import (
    FILES,
    AnalysisResult,
    analysis_entry,
    list_analyses,
    registered_analyses,
)
from primal_attention.cli.folders import check_folder
from primal_attention.cli.inputs import ModelInputs, load, one_sentence, read_batches
from primal_attention.report.page import Report
from primal_attention.support.command import UserError, named, progress, user_errors
from primal_attention.support.files import new_folder
from primal_attention.support.output import markdown_table, to_json, write_atomically
from primal_attention.support.settings import parse

if TYPE_CHECKING:
    from torch import nn

    from primal_attention.hosts import Batch
    from primal_attention.surgery.loading import LoadedModel

__all__ = ["main"]

_MARKER = "analyze.json"


@dataclass(frozen=True)
class Analyze(ModelInputs):
    """Measure a saved model: print findings, and write a page and JSON for each analysis."""

    names: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME ...]")
    ] = ()
    """Analyses to run; by default all that suit the model. --NAME is the same as NAME."""
    out: Path | None = None
    """Folder to write; for one analysis also a page (.html), numbers (.json) or picture (.png)."""
    original: Path | None = None
    """For a converted model: folder of the original model, if it was moved."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.names:
            analysis_entry(name)
        if self.is_file and len(self.names) != 1:
            raise ValueError(
                f"--out {self.out} is one file, which holds one analysis; name one after the "
                "model, or give a folder."
            )

    @property
    def is_file(self) -> bool:
        """Whether ``out`` is the file of one analysis."""
        return self.out is not None and self.out.suffix in FILES


def main(argv: list[str]) -> int:
    """Run the analyses; print the verdict and the table of each. Or run a tool of a subject."""
    if argv and argv[0] in list_analyses():
        return _run_tool(argv[0], argv[1:])
    # the options of each analysis stand under its name: --spectrum.first 8
    kind = make_dataclass(
        "AnalyzeOptions",
        [(name, _options(name), field(default=_options(name)())) for name in list_analyses()],
        bases=(Analyze,),
        frozen=True,
        namespace={"__doc__": _help()},
    )
    flags = [f"--{name}" for name in list_analyses()]
    argv = [word.removeprefix("--") if word in flags else word for word in argv]
    options: Any = parse(kind, argv, prog="primal analyze")
    if options.out is not None and not options.is_file:
        check_folder(options.out, _MARKER, overwrite=options.overwrite, source=options.model)
    loaded = load(options, original=options.original)
    names = list(dict.fromkeys(options.names or registered_analyses()))
    # a text or a file in the options may be all that an analysis reads
    reads = any(getattr(getattr(options, name), "needs_inputs", True) for name in names)
    results, skipped = _run_all(
        options, names, loaded, read_batches(options, loaded) if reads else ()
    )
    source = options.source if reads else "what its options name"
    with one_sentence():
        written = _write(options, type(loaded.model).__name__, source, results, skipped)
    for name, result in results.items():
        print(f"{name}: {result.verdict()}\n")
        for table in (result.table(), *result.details()):
            print(f"{markdown_table(*table)}\n")
        if written is None:
            print(f"{result.limits()}\n")
    for name, why in skipped.items():
        print(f"{name}: does not suit this model: {why}\n")
    print(f"Measured on {source}." + (f" Wrote {written}" if written else ""))
    return 0


def _run_tool(subject: str, argv: list[str]) -> int:
    """Run what a subject can do without a model."""
    tools = {tool.name: tool for tool in analysis_entry(subject).tools}
    if not tools:
        raise UserError(f"which model? Write primal analyze MODEL {subject}.")
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, tools))
        rows = "\n".join(f"  {tool.name:<{width}}  {tool.summary}" for tool in tools.values())
        print(
            f"usage: primal analyze {subject} TOOL [OPTIONS]\n\n"
            f"tools, which need no model:\n{rows}\n\n"
            f"primal analyze {subject} TOOL --help shows the options of a tool.\n"
            f"primal analyze MODEL {subject} measures a saved model; a folder of that name is "
            f"./{subject}."
        )
        return 0
    tool = named(argv[0], tools, "tool")
    with user_errors(""):
        parse(tool.load(), argv[1:], prog=f"primal analyze {subject} {tool.name}").run()
    return 0


def _write(
    options: Analyze,
    title: str,
    source: str,
    results: dict[str, AnalysisResult],
    skipped: dict[str, str],
) -> Path | None:
    """Write one file, or the folder of all results; return what to open."""
    if options.out is None:
        return None
    if options.is_file:
        (result,) = results.values()
        result.write(options.out)
        return options.out
    record = {
        "model": title,
        "folder": str(options.model),
        "measured_on": source,
        "verdicts": {name: result.verdict() for name, result in results.items()},
        "skipped": skipped,
    }
    with new_folder(options.out) as folder:
        _page(title, source, results, skipped).write(folder / "report.html")
        for name, result in results.items():
            write_atomically(folder / f"{name}.json", result.to_json())
        write_atomically(folder / _MARKER, to_json(record))
    return options.out / "report.html"


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
    entries = [analysis_entry(name) for name in list_analyses()]
    lines = [f"{entry.name}: {entry.summary}" for entry in entries]
    tools = [
        f"primal analyze {entry.name} {'|'.join(tool.name for tool in entry.tools)}"
        for entry in entries
        if entry.tools
    ]
    return "\n\n".join([str(Analyze.__doc__), *lines, "Without a model:", *tools])


def _run_all(
    options: Any, names: Sequence[str], loaded: "LoadedModel", batches: "Sequence[Batch]"
) -> tuple[dict[str, AnalysisResult], dict[str, str]]:
    """Return the results by name, and why the others were skipped.

    An analysis that the user named must succeed; of the others, at least one.
    """
    results: dict[str, AnalysisResult] = {}
    skipped: dict[str, str] = {}
    for name in names:
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
