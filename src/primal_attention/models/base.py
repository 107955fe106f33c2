"""Outputs of models, and folders that hold saved models.

A folder has two files: ``config.json`` with the class, its configuration and the version of the
format, and ``model.safetensors`` with the weights. Neither can run code.
"""

import json
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from primal_attention.attention import PublishesTerms
from primal_attention.models.depth_rule import DepthNotice
from primal_attention.output import to_json, write_atomically

__all__ = ["ModelFileError", "ModelOutput", "PretrainedModel"]

FORMAT = 1
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_OWN = re.compile(r"primal_attention\.(models|tasks)(\.[a-z0-9_]+)+")
"""Modules that a file may name: where this library defines models, nothing else."""


class ModelFileError(ValueError):
    """A folder without a model, with a damaged model, or with a model of another class."""


@dataclass(frozen=True)
class ModelOutput:
    """Output of a model."""

    logits: Float[Tensor, "b *n classes"]
    """Unnormalised log-probabilities, of every sequence or of every token."""
    aux_loss: Float[Tensor, ""] | None = None
    """Mean regulariser of the layers, unweighted, as ``ksvd_loss`` returns it; ``None`` outside
    training or if no layer has one."""
    hidden: Float[Tensor, "b n c"] | None = None
    """Normalised stream after the last block, if requested."""


torch.export.register_dataclass(ModelOutput)


class PretrainedModel(PublishesTerms):
    """A model with a configuration that can be saved to a folder and loaded again.

    A subclass names the dataclass of its configuration and takes ``(config, *, device, dtype)``.
    """

    config_class: ClassVar[type[Any]]
    config: Any
    _classes: ClassVar[dict[str, type["PretrainedModel"]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        PretrainedModel._classes[cls.__name__] = cls

    def collect(self, prefix: str, terms: Mapping[str, Tensor]) -> Tensor | None:
        """Publish regularisers for ``ksvd_loss``; return their mean, or ``None`` without any.

        Args:
            prefix: Name of the stack that the terms come from.
            terms: Regularisers by name inside that stack.
        """
        if not terms:
            return None
        self.publish({f"{prefix}.{name}": term for name, term in terms.items()})
        return torch.stack(list(terms.values())).mean()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model to a folder; each file is written completely or not at all.

        Args:
            folder: Where to put ``config.json`` and ``model.safetensors``; created if missing.

        Example:
            >>> import tempfile
            >>> from primal_attention.models import EncoderClassifier, EncoderConfig
            >>> model = EncoderClassifier(EncoderConfig(num_classes=2, vocab_size=9, dim=16))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     model.save_pretrained(folder)
            ...     again = EncoderClassifier.from_pretrained(folder)
            >>> again.config == model.config
            True
        """
        content = {
            "format": FORMAT,
            "class": type(self).__name__,
            "module": type(self).__module__,
            "config": asdict(self.config),
        }
        weights = {k: v.detach().cpu().contiguous().clone() for k, v in self.state_dict().items()}
        write_atomically(Path(folder) / _WEIGHTS, save(weights))
        write_atomically(Path(folder) / _CONFIG, to_json(content))

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, device: Any = None, dtype: Any = None) -> Self:
        """Return the model in a folder, in eval mode.

        Called on a model class it returns that class or raises; called on
        :class:`PretrainedModel` it returns whatever model of the library the folder holds.

        Args:
            folder: What ``save_pretrained`` wrote.
            device: Where to put the parameters.
            dtype: Type of the parameters; by default that of the file.

        Raises:
            ModelFileError: If the folder holds no model, a damaged one or one of another class.
        """
        folder = Path(folder)
        found, config = cls._read_config(folder)
        try:
            weights = load((folder / _WEIGHTS).read_bytes())
        except (OSError, SafetensorError) as error:
            raise ModelFileError(
                f"{folder / _WEIGHTS} cannot be read ({error}); it is missing, truncated or no "
                "safetensors file. Save the model again."
            ) from error
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # advice about the shape comes too late for a model that is trained
            warnings.simplefilter("ignore", DepthNotice)
            model = found(config)
        _check_weights(folder, model.state_dict(), weights)
        if weights and dtype is None:
            dtype = next((t.dtype for t in weights.values() if t.is_floating_point()), None)
        model.to(device=device, dtype=dtype).load_state_dict(weights)
        return model.eval()  # type: ignore[return-value]

    @classmethod
    def _read_config(cls, folder: Path) -> tuple[type["PretrainedModel"], Any]:
        path = folder / _CONFIG
        try:
            content = json.loads(path.read_text("utf-8"))
            version, name, values = content["format"], content["class"], dict(content["config"])
        except OSError as error:
            raise ModelFileError(
                f"{folder} holds no model ({error}); give the folder that save_pretrained wrote."
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise ModelFileError(
                f"{path} was not written by save_pretrained, or is damaged "
                f"({type(error).__name__}: {error})."
            ) from error
        if version != FORMAT:
            raise ModelFileError(
                f"{path} has format {version!r}, this version reads {FORMAT}; use the version of "
                "the library that wrote it."
            )
        module = str(content.get("module", ""))
        if name not in cls._classes and _OWN.fullmatch(module):
            with suppress(ModuleNotFoundError):
                import_module(module)  # defines the class
        found = cls._classes.get(name)
        if found is None or not issubclass(found, cls):
            raise ModelFileError(
                f"{path} holds a {name!r}, not a {cls.__name__}; use the class it was saved from."
            )
        known = {field.name for field in fields(found.config_class)}
        if unknown := sorted(set(values) - known):
            raise ModelFileError(f"{path} has unknown fields for {name}: {', '.join(unknown)}.")
        try:
            return found, found.config_class(**values)
        except (ValueError, TypeError) as error:
            raise ModelFileError(f"{path} describes no valid {name}: {error}") from error


def _check_weights(
    folder: Path, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> None:
    """Raise if the weights are not those of the configured model."""
    wrong = [f"{k} is missing" for k in expected if k not in found]
    wrong += [f"{k} is unknown" for k in found if k not in expected]
    wrong += [
        f"{k} has shape {tuple(found[k].shape)} instead of {tuple(v.shape)}"
        for k, v in expected.items()
        if k in found and found[k].shape != v.shape
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ModelFileError(
            f"{folder / _WEIGHTS} does not belong to {_CONFIG} beside it: "
            f"{'; '.join(wrong[:3])}{more}. Save the model again."
        )
