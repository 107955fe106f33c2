"""``from_pretrained`` of transformers loads converted models, without code from their folder.

The config of a converted model names a quantization method. Transformers then calls its quantizer
between building the original layers, on the meta device, and loading the weights. This one
replaces the layers. Importing this package registers it, once transformers is imported::

    import primal_attention
    model = transformers.AutoModel.from_pretrained("outputs/minilm")
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from primal_attention.hosts.transformers import METHOD, allow_build

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["ConversionLoader", "ConvertedConfig"]


@register_quantization_config(METHOD)
class ConvertedConfig(QuantizationConfigMixin):
    """What ``config.json`` says of a conversion, as transformers wants to hold it."""

    def __init__(self, **record: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]
        self.record = record

    def to_dict(self) -> dict[str, Any]:
        """Return the section of ``config.json``."""
        return {**self.record, "quant_method": METHOD}


@register_quantizer(METHOD)
class ConversionLoader(HfQuantizer):
    """Replaces the layers of a model between its construction and the loading of its weights."""

    requires_calibration = True  # a model that is not converted is refused

    def update_attn_implementation(self, config: "PretrainedConfig") -> "PretrainedConfig":
        """Remove from a config what stops transformers without this package."""
        allow_build(config)
        return config

    def _process_model_before_weight_loading(
        self,
        model: "PreTrainedModel",
        *,
        checkpoint_files: Sequence[str] | None = None,
        **_: object,
    ) -> None:
        # now, because they import torch, and transformers imports this module
        from primal_attention.surgery.rebuilding import rebuild_conversion

        files = [Path(file) for file in checkpoint_files or ()]
        rebuild_conversion(model, self.quantization_config.to_dict(), files)

    def postprocess_model(self, model: "PreTrainedModel", **_: object) -> None:
        """Leave an ordinary model, which trains, moves and saves as any other."""
        from primal_attention.surgery.rebuilding import check_loaded

        check_loaded(model)
        record = model.config.quantization_config
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]
        model.config.quantization_config = record

    @property
    def is_trainable(self) -> bool:
        """True: the weights are ordinary ones."""
        return True

    def is_serializable(self) -> bool:
        """Return true: ``save_pretrained`` writes all there is."""
        return True
