"""Write a converted model of transformers as a whole folder, ready for ``push_to_hub``.

    save_for_hub(model, "outputs/minilm", tokenizer=tokenizer, verdict=outcome.verdict())
    # in another interpreter
    import primal_attention
    model = transformers.AutoModel.from_pretrained("outputs/minilm")

The folder has weights in safetensors, a model card and checksums. Without this package
transformers refuses to load it.
"""

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.hosts import ConversionError, converted_layers
from primal_attention.hosts.transformers import IMPORT_FIRST, METHOD
from primal_attention.support.files import read_json, save_sealed
from primal_attention.support.output import to_json
from primal_attention.surgery.conversion import conversion_record
from primal_attention.surgery.fold import is_folded

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["auto_class", "model_card", "save_for_hub"]

_TASKS = {
    "CausalLM": ("text-generation", "AutoModelForCausalLM"),
    "LMHeadModel": ("text-generation", "AutoModelForCausalLM"),
    "MaskedLM": ("fill-mask", "AutoModelForMaskedLM"),
    "SequenceClassification": ("text-classification", "AutoModelForSequenceClassification"),
    "TokenClassification": ("token-classification", "AutoModelForTokenClassification"),
    "QuestionAnswering": ("question-answering", "AutoModelForQuestionAnswering"),
    "ImageClassification": ("image-classification", "AutoModelForImageClassification"),
    "Model": ("feature-extraction", "AutoModel"),
}
"""Tasks of the model hub and ``Auto`` classes, by the ending of a class."""

_CARD = """\
---
{header}
---
**`import primal_attention` before `from_pretrained`: without it, this folder does not load.**
{verdict}
# {name} with {attention} attention

```python
import primal_attention  # pip install -e '.[hf]' in a checkout of primal-attention
import transformers

folder = "."  # this folder, or its name on the hub
model = transformers.{auto}.from_pretrained(folder){tokenizer}
```

The attention of these layers was replaced by `{attention}` with {options}. Loading runs no code of
this folder.

| layer | width | heads |
|---|---:|---:|
{rows}
"""


def save_for_hub(
    model: "PreTrainedModel",
    folder: str | Path,
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    verdict: str = "",
    source: str | Path | None = None,
) -> Path:
    """Write a converted model whole, with model card and checksums, and return the folder.

    ``from_pretrained`` compares configuration and weights with the checksums. If you save the
    model again with ``save_pretrained``, they no longer apply and are ignored.

    Args:
        model: A model of transformers after ``convert``.
        folder: Where to write; its files are replaced all or none.
        tokenizer: Written, too; or a processor.
        verdict: What was measured, in words; it follows the first line of the model card.
        source: Folder of the original. If it is one of sentence-transformers, its pooling is
            written, too.

    Raises:
        ConversionError: If the model is not a converted one of transformers.
    """
    record = getattr(getattr(model, "config", None), "quantization_config", None)
    if not isinstance(record, dict) or record.get("quant_method") != METHOD:
        raise ConversionError(
            f"{type(model).__name__} is no converted model of transformers; call convert first, or "
            "save_converted for models of other libraries."
        )
    if any(is_folded(layer) for layer in converted_layers(model).values()):
        raise ConversionError("A folded model cannot be saved; save it before fold_output.")
    with tempfile.TemporaryDirectory() as temporary:
        model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        config = read_json(Path(temporary) / "config.json")
        config["quantization_config"]["sealed"] = True
        # stops transformers also if a caller names an attention function that exists
        config["transformers_weights"] = IMPORT_FIRST
        files = {
            str(path.relative_to(temporary)): path.read_bytes()
            for path in Path(temporary).rglob("*")
            if path.is_file()
        }
    files |= {} if source is None else _pooling_files(Path(source))
    card = model_card(model, verdict, has_tokenizer=tokenizer is not None)
    save_sealed(Path(folder), {**files, "config.json": to_json(config), "README.md": card})
    return Path(folder)


def _pooling_files(source: Path) -> dict[str, bytes]:
    """Return the files of sentence-transformers that say how token vectors become one."""
    if not (source / "modules.json").is_file():
        return {}
    found = [source / "modules.json", *source.glob("[0-9]*_*/config.json")]
    return {str(path.relative_to(source)): path.read_bytes() for path in found}


def model_card(model: "PreTrainedModel", verdict: str = "", *, has_tokenizer: bool = False) -> str:
    """Return the model card of a converted model, as Markdown with a header.

    Args:
        model: The converted model.
        verdict: What was measured, in words.
        has_tokenizer: Whether a tokenizer lies beside the model.
    """
    record: Any = conversion_record(model) or {}
    name, config = type(model).__name__, record["config"]
    header: dict[str, object] = {
        "library_name": "transformers",
        "tags": ["primal-attention", config["attention"]],
    }
    task, auto = _task(name)
    if task:
        header["pipeline_tag"] = task
    origin = str(getattr(model, "name_or_path", ""))
    if origin and not Path(origin).exists():
        header["base_model"] = origin  # a name on the hub, not a folder of this machine
    options = ", ".join(f"`{key}={value!r}`" for key, value in config["options"].items())
    rows = [f"| `{row['name']}` | {row['dim']} | {row['heads']} |" for row in record["layers"]]
    tokenizer = "\ntokenizer = transformers.AutoTokenizer.from_pretrained(folder)"
    return _CARD.format(
        # JSON is YAML, whatever characters a name holds
        header="\n".join(f"{key}: {json.dumps(value)}" for key, value in header.items()),
        name=name,
        attention=config["attention"],
        verdict=f"\n{verdict}\n" if verdict else "",
        auto=auto,
        tokenizer=tokenizer if has_tokenizer else "",
        options=options or "its defaults",
        rows="\n".join(rows),
    )


def auto_class(name: str) -> str:
    """Return the ``Auto`` class of transformers for a class; the class itself if there is none.

    Example:
        >>> auto_class("LlamaForCausalLM")
        'AutoModelForCausalLM'
    """
    return _task(name)[1]


def _task(name: str) -> tuple[str, str]:
    return next((_TASKS[end] for end in _TASKS if name.endswith(end)), ("", name))
