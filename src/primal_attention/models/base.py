"""Outputs of models, and folders that hold saved models.

A folder has three files: ``config.json`` with the class, its configuration and the version of the
format, ``model.safetensors`` with the weights, and ``SHA256SUMS`` with the checksums of both. None
can run code. A changed byte is an error, and so is a configuration that the weights do not have.
"""

import re
import warnings
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Float
from torch import Tensor
from torch.types import Device

from primal_attention.attention import PublishesTerms
from primal_attention.models.depth_rule import DepthNotice
from primal_attention.support.command import UserError
from primal_attention.support.files import (
    SealedFolder,
    finish_save,
    parse_json,
    parse_tensors,
    save_sealed,
    to_bytes,
)
from primal_attention.support.output import to_json
from primal_attention.support.randomness import isolated
from primal_attention.support.settings import build

__all__ = ["ModelFileError", "ModelOutput", "PretrainedModel"]

FORMAT = 1
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_OWN = re.compile(r"primal_attention\.(models|tasks)(\.[a-z0-9_]+)+")
"""Modules that a file may name: where this library defines models, nothing else."""


class ModelFileError(UserError):
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

    def __init_subclass__(cls, **options: object) -> None:
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
        """Write the model to a folder: all of its files, or none.

        Args:
            folder: Where to put ``config.json``, ``model.safetensors`` and their checksums; created
                if missing.

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
        save_sealed(Path(folder), self.to_files())

    def to_files(self) -> dict[str, str | bytes]:
        """Return the files of a saved model by name, to save them beside others."""
        content = {
            "format": FORMAT,
            "class": type(self).__name__,
            "module": type(self).__module__,
            "config": asdict(self.config),
        }
        return {_WEIGHTS: to_bytes(self.state_dict()), _CONFIG: to_json(content)}

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Return the model in a folder, in eval mode.

        Called on a model class it returns that class or raises; called on
        :class:`PretrainedModel` it returns whatever model of the library the folder holds.

        Args:
            folder: What ``save_pretrained`` wrote.
            device: Where to put the parameters.
            dtype: Type of the parameters; by default that of the file.

        Raises:
            ModelFileError: If the folder holds no model, a damaged one or one of another class, or
                if a file was changed after it was saved.

        A folder of an earlier version has no checksums; it is read with an ``UnsealedWarning``.
        """
        folder = Path(folder)
        finish_save(folder)
        for name in (_CONFIG, _WEIGHTS):
            if not (folder / name).is_file():
                raise ModelFileError(
                    f"{folder} holds no model: it has no {name}; give the folder that "
                    "save_pretrained wrote."
                )
        try:
            sealed = SealedFolder(folder)
            content = parse_json(sealed.read(_CONFIG), folder / _CONFIG)
            weights = parse_tensors(sealed.read(_WEIGHTS), folder / _WEIGHTS)
        except UserError as error:
            raise ModelFileError(str(error)) from error
        found, values = cls._find_class(content, folder / _CONFIG)
        _check_layers(values, len(weights), folder)
        with isolated(), warnings.catch_warnings():
            # advice about the shape comes too late for a model that is trained
            warnings.simplefilter("ignore", DepthNotice)
            config = _check_shapes(found, values, weights, folder)
            model = found(config)
        if weights and dtype is None:
            dtype = next((t.dtype for t in weights.values() if t.is_floating_point()), None)
        model.to(device=device, dtype=dtype).load_state_dict(weights)
        return model.eval()  # type: ignore[return-value]

    @classmethod
    def _find_class(
        cls, content: Mapping[str, Any], path: Path
    ) -> tuple[type["PretrainedModel"], dict[str, object]]:
        """Return the class that a file names, and the values of its configuration."""
        for key, kind in (("format", int), ("class", str), ("config", dict)):
            if not isinstance(content.get(key), kind):
                raise ModelFileError(
                    f"{path} was not written by save_pretrained, or is damaged: it has no valid "
                    f"{key!r}."
                )
        version, name = content["format"], content["class"]
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
        return found, content["config"]


def _check_layers(values: Mapping[str, object], tensors: int, folder: Path) -> None:
    """Raise if there are more layers than tensors: to build them would take for ever."""
    for name, value in values.items():
        if "layers" in name and isinstance(value, int) and value > tensors:
            raise ModelFileError(
                f"{folder / _CONFIG} has {name} = {value:,}, but {_WEIGHTS} beside it holds only "
                f"{tensors:,} tensors; they do not belong together. Save the model again."
            )


def _check_shapes(
    kind: type[PretrainedModel],
    values: Mapping[str, object],
    weights: Mapping[str, Tensor],
    folder: Path,
) -> object:
    """Return the configuration; raise if it is not valid, or not that of the weights.

    The model is built without memory first, because a wrong number may ask for any amount of it.
    Models of other packages are not: they may read values of tensors when they are built.
    """
    is_own = _OWN.fullmatch(kind.__module__) is not None
    try:
        config = build(kind.config_class, values)
        with torch.device("meta") if is_own else nullcontext():
            expected = kind(config).state_dict()
    except (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError) as error:
        words = " ".join(str(error).split())
        raise ModelFileError(
            f"{folder / _CONFIG} describes no valid {kind.__name__}: {words}"
        ) from error
    wrong = [f"{k} is missing" for k in expected if k not in weights]
    wrong += [f"{k} is unknown" for k in weights if k not in expected]
    for name, wanted in expected.items():
        found = weights.get(name, wanted)
        if found.shape != wanted.shape:
            shapes = f"{tuple(found.shape)} instead of {tuple(wanted.shape)}"
            wrong.append(f"{name} has shape {shapes}")
        elif found.is_floating_point() != wanted.is_floating_point():
            wrong.append(f"{name} has the type {found.dtype} instead of {wanted.dtype}")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ModelFileError(
            f"{folder / _WEIGHTS} does not belong to {_CONFIG} beside it: "
            f"{'; '.join(wrong[:3])}{more}. Save the model again."
        )
    return config
