"""``primal convert``: replace the softmax attention of a saved model."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from primal_attention.cli.folders import check_folder
from primal_attention.cli.inputs import ModelInputs, load, one_sentence, read_batches
from primal_attention.support.command import UserError, progress
from primal_attention.support.files import new_folder, parse_json
from primal_attention.support.settings import parse

if TYPE_CHECKING:
    from torch import nn

    from primal_attention.hosts import Batch
    from primal_attention.report import Report
    from primal_attention.surgery import Advice, SurgeryConfig
    from primal_attention.surgery.outcome import ConvertedModel

__all__ = ["main"]

_MARKER = "convert.json"


@dataclass(frozen=True)
class Convert(ModelInputs):
    """Replace the attention of a model by a linear one, and save the new layers.

    The model is measured on your texts, or on passages of the Python reference manual. By default
    the mechanism that saves most time replaces the layers of which it explains --threshold.
    """

    out: Path = field(kw_only=True)
    """Folder to write."""
    to: str | None = None
    """Mechanism, see primal list attentions; by default the one that saves most."""
    option: tuple[str, ...] = ()
    """Options of the mechanism, such as rank=16."""
    layers: tuple[str, ...] = ("auto",)
    """auto, all, last:2, or names, regular expressions or numbers of layers."""
    threshold: float = 0.9
    """Lowest R² at which layers are converted by --layers auto."""
    length: int | None = None
    """Tokens at which time and memory are measured; by default the longest input of the model, at
    most 4096."""
    distill: int = 0
    """Training steps after the conversion: so many layer by layer, then half as many end to end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distill < 0:
            raise ValueError(f"distill must be at least 0, got {self.distill}.")
        if self.option and self.to is None:
            raise ValueError("--option needs a mechanism; name it with --to.")


def main(argv: list[str]) -> int:
    """Inspect, advise, convert, distil and save; print the verdict and a table."""
    options = parse(Convert, argv, prog="primal convert")
    check_folder(options.out, _MARKER, overwrite=options.overwrite, source=options.model)
    values = _mechanism_options(options.option)

    from primal_attention.hosts import converted_layers
    from primal_attention.support.output import markdown_table, to_json, write_atomically
    from primal_attention.surgery import save_converted
    from primal_attention.surgery.outcome import convert_and_compare

    loaded = load(options)
    if converted_layers(loaded.model):
        raise UserError(f"{options.model} is converted already; give the original model.")
    batches = read_batches(options, loaded)
    with one_sentence():
        advice = _advice(options, loaded.model, batches, values)
        config = _config(options, advice, values)
        outcome = convert_and_compare(
            loaded.model, batches, advice, config, distill_steps=options.distill, report=progress
        )
    rows = [[name, f"{r2:.3f}"] for name, r2 in outcome.layers.items()]
    with new_folder(options.out) as folder:
        save_converted(loaded.model, folder)
        _page(options, outcome, rows, advice).write(folder / "report.html")
        write_atomically(folder / _MARKER, to_json(_record(options, outcome)))
    print(f"{outcome.verdict()}\n\n{markdown_table(['layer', 'R²'], rows)}\n")
    print(f"Saved the new layers and report.html in {options.out}. Load them in Python with")
    print(f"  model = transformers.{outcome.model}.from_pretrained({str(loaded.folder)!r})")
    print(f"  primal_attention.surgery.load_converted(model, {str(options.out)!r})")
    return 0


def _mechanism_options(pairs: tuple[str, ...]) -> dict[str, object]:
    """Return options of the mechanism from name=value pairs; values are JSON or plain words."""
    found: dict[str, object] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UserError(f"--option takes name=value, got {pair!r}.")
        try:
            found[name] = parse_json(value, pair[:80], object)
        except UserError:
            found[name] = value
    return found


def _advice(
    options: Convert, model: "nn.Module", batches: "Sequence[Batch]", values: dict[str, object]
) -> "Advice":
    from primal_attention.surgery import AdviceConfig, advise

    names = () if options.to is None else (options.to,)
    config = AdviceConfig(names, length=options.length, threshold=options.threshold)
    return advise(
        model,
        batches,
        config,
        options={} if options.to is None else {options.to: values},
        progress=lambda name: progress(f"measuring {name}"),
    )


def _config(options: Convert, advice: "Advice", values: dict[str, object]) -> "SurgeryConfig":
    """Return the conversion that the user asked for, or the recommended one."""
    from primal_attention.surgery import SurgeryConfig

    hint = "Name a mechanism with --to and layers with --layers, or lower --threshold."
    attention = options.to or advice.attention
    if attention is None:
        raise UserError(f"nothing was converted. {advice.verdict()} {hint}")
    if options.layers != ("auto",):
        layers = [int(x) if re.fullmatch(r"-?\d+", x) else x for x in options.layers]
        return SurgeryConfig(attention, values, layers[0] if len(layers) == 1 else layers)
    chosen = advice.layers_for(attention)
    if not chosen:
        raise UserError(f"nothing was converted. {advice.verdict()} {hint}")
    return SurgeryConfig(attention, values, layers=chosen)


def _record(options: Convert, outcome: "ConvertedModel") -> dict[str, object]:
    """Return the numbers of the command as plain values."""
    return {
        "verdict": outcome.verdict(),
        "folder": str(options.model),
        "measured_on": options.source,
        "distill": options.distill,
        **outcome.numbers,
    }


def _page(
    options: Convert, outcome: "ConvertedModel", rows: list[list[str]], advice: "Advice"
) -> "Report":
    """Return the report: verdict, numbers, converted layers, and the advice behind the choice."""
    from primal_attention.report import Report

    before, after = outcome.costs["original"], outcome.costs["converted"]
    page = Report(f"{outcome.model} with {outcome.attention} attention", outcome.verdict())
    page.tiles(
        {
            "R² of the model's output": f"{outcome.output_r2:.3f}",
            f"ms at {outcome.length:,} tokens, from {before.milliseconds:.1f}": (
                f"{after.milliseconds:.1f}"
            ),
            f"MB at {outcome.length:,} tokens, from {before.megabytes:.1f}": (
                f"{after.megabytes:.1f}"
            ),
        }
    )
    page.section("Converted layers").text(
        f"Explained variance of each layer's output, measured on {options.source}: one half to "
        "fit, the other half to test."
    )
    page.table(["layer", "R²"], rows)
    advice.add_to(page)
    return page
