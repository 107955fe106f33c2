"""``primal convert``: replace the softmax attention of a saved model."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from primal_attention.cli.folders import check_folder
from primal_attention.cli.inputs import (
    ModelSource,
    check_samples,
    load,
    one_sentence,
    read_documents,
    read_texts,
)
from primal_attention.support.command import UserError, progress
from primal_attention.support.files import new_folder, parse_json
from primal_attention.support.settings import at_least_one, parse
from primal_attention.surgery.options import PositionMethod

if TYPE_CHECKING:
    from torch import Tensor

    from primal_attention.surgery import ConvertedModel, ExtendedPositions, SurgeryConfig
    from primal_attention.surgery.loading import LoadedModel

__all__ = ["main"]

_MARKER = "convert.json"
_TOKENS = 8192
"""Tokens to measure on, unless --samples says how many inputs."""


@dataclass(frozen=True)
class Convert(ModelSource):
    """Replace the attention of a model, measure what that loses and saves, and save the model.

    By default every layer becomes adaptive: softmax that is exact on short inputs and for near and
    important tokens of long ones. Nothing is trained. The loss is measured at --length on your
    texts, or on the Python reference manual.
    """

    out: Path = field(kw_only=True)
    """Folder to write."""
    to: str = "adaptive"
    """Mechanism, see primal list attentions."""
    option: Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction] = ()
    """Options of the mechanism, such as rank=16; may be given several times."""
    layers: tuple[str, ...] = ()
    """all, auto, last:2, or names, regular expressions or numbers of layers; by default all for
    adaptive and auto for others, which is as many as --threshold allows."""
    threshold: float = 0.9
    """With --layers auto, least R² of the model's output."""
    length: int | None = None
    """Tokens of the inputs to measure on; by default as many as the model takes, at most 2048."""
    extend: int | None = None
    """Let the model take so many tokens: stretch its positions before the conversion."""
    extend_by: PositionMethod = "auto"
    """How: interpolate or repeat for a table of positions; ntk, linear or dynamic for rotary
    ones."""
    tokens: int | None = None
    """Take texts one by one, cut to so many tokens; by default they are joined to inputs of
    --length."""
    samples: int | None = None
    """Largest number of inputs; by default as many as make 8192 tokens, at least 4."""
    distill: int = 0
    """Training steps after the conversion: so many layer by layer, then half as many end to end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("length", "extend", "tokens"):
            if getattr(self, name) is not None:
                at_least_one(self, name)
        if self.samples is not None:
            check_samples(self.samples)
        if self.distill < 0:
            raise ValueError(f"distill must be at least 0, got {self.distill}.")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be between 0 and 1, got {self.threshold}.")
        if self.extend is None and self.extend_by != "auto":
            raise ValueError("--extend-by needs a length; give it with --extend.")


def main(argv: list[str]) -> int:
    """Convert, measure and save; print the verdict, a table, and how to load the model."""
    options = parse(Convert, argv, prog="primal convert")
    check_folder(options.out, _MARKER, overwrite=options.overwrite, source=options.model)
    values = _mechanism_options([pair for pairs in options.option for pair in pairs])

    from primal_attention.hosts import converted_layers
    from primal_attention.support.output import markdown_table, to_json, write_atomically
    from primal_attention.surgery import convert_and_compare
    from primal_attention.surgery.hub import auto_class, save_for_hub

    loaded = load(options)
    if converted_layers(loaded.model):
        raise UserError(f"{options.model} is converted already; give the original model.")
    with one_sentence():
        config = _config(options, values)
        extension = _extend(options, loaded)
        length = _length(options, loaded)
    batches = _read(options, loaded, config, length)
    with one_sentence():
        try:
            outcome = convert_and_compare(
                loaded.model,
                batches,
                config,
                length=length,
                threshold=options.threshold,
                distill_steps=options.distill,
                extension=extension,
                report=progress,
            )
        except ValueError as error:
            words = " ".join(str(error).split())
            raise UserError(f"nothing was converted: {words}") from error
        progress(f"writing {options.out}")
        with new_folder(options.out) as folder:
            save_for_hub(
                loaded.model,  # type: ignore[arg-type]
                folder,
                tokenizer=loaded.tokenizer,
                verdict=outcome.verdict(),
                source=loaded.folder,
            )
            outcome.report(options.source).write(folder / "report.html")
            write_atomically(folder / _MARKER, to_json(_record(options, outcome)))
    print(f"{outcome.verdict()}\n\n{markdown_table(*outcome.layer_table())}\n")
    print(f"Saved the model and report.html in {options.out}. Load it in Python with")
    print("  import primal_attention, transformers")
    auto = auto_class(type(loaded.model).__name__)
    print(f"  model = transformers.{auto}.from_pretrained({str(options.out)!r})")
    return 0


def _mechanism_options(pairs: Sequence[str]) -> dict[str, object]:
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


def _config(options: Convert, values: dict[str, object]) -> "SurgeryConfig":
    """Return the conversion that the user asked for."""
    from primal_attention.surgery import SurgeryConfig
    from primal_attention.surgery.config import KEEPS_WEIGHTS

    layers = [int(x) if re.fullmatch(r"-?\d+", x) else x for x in options.layers]
    layers = layers or ["all" if options.to in KEEPS_WEIGHTS else "auto"]
    return SurgeryConfig(options.to, values, layers[0] if len(layers) == 1 else layers)


def _extend(options: Convert, loaded: "LoadedModel") -> "ExtendedPositions | None":
    """Let the model take longer inputs, if the user asked for it."""
    if options.extend is None:
        return None
    from primal_attention.surgery import extend_positions

    progress(f"extending the positions to {options.extend:,} tokens")
    done = extend_positions(loaded.model, options.extend, method=options.extend_by)
    if loaded.tokenizer is not None:
        loaded.tokenizer.model_max_length = max(done.after, loaded.tokenizer.model_max_length)
    return done


def _length(options: Convert, loaded: "LoadedModel") -> int | None:
    """Return the length to measure at; ``None`` for that of the arrays in a file."""
    from primal_attention.surgery.converting import default_length

    if options.has_arrays:
        return options.length
    return options.length or options.extend or default_length(loaded.model)


def _read(
    options: Convert, loaded: "LoadedModel", config: "SurgeryConfig", length: int | None
) -> "list[dict[str, Tensor]]":
    """Return the inputs to measure on."""
    from primal_attention.surgery import position_limit
    from primal_attention.surgery.converting import least_batches

    if options.tokens is not None:
        return read_texts(options, loaded, tokens=options.tokens, samples=options.samples or 32)
    tokens = min(length or 1, position_limit(loaded.model) or length or 1)
    samples = options.samples or max(_TOKENS // tokens, 4)
    least = least_batches(config.attention, distill=options.distill > 0)
    return read_documents(options, loaded, tokens=tokens, samples=samples, least=least)


def _record(options: Convert, outcome: "ConvertedModel") -> dict[str, object]:
    """Return the numbers of the command as plain values."""
    return {
        "verdict": outcome.verdict(),
        "folder": str(options.model),
        "measured_on": options.source,
        "distill": options.distill,
        **outcome.numbers,
    }
