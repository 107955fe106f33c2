"""Losses of distillation: how far a converted model is from the original."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.hosts import Batch
from primal_attention.hosts.recording import first_tensor
from primal_attention.surgery.recording import real_tokens

if TYPE_CHECKING:
    from primal_attention.surgery.distillation import DistillConfig

__all__ = ["end_loss", "unexplained_share"]


def unexplained_share(
    output: Float[Tensor, "t c"], target: Float[Tensor, "t c"]
) -> Float[Tensor, ""]:
    """Return ``1 − R²`` on the tokens of one batch."""
    output, target = output.float(), target.float()
    spread = (target - target.mean(0)).square().sum().clamp_min(1e-12)
    return (output - target).square().sum() / spread


def end_loss(output: object, target: object, batch: Batch, config: "DistillConfig") -> Tensor:
    """Return the loss of the end-to-end stage.

    Args:
        output: What the converted model returns.
        target: What the original returns.
        batch: The inputs of both.
        config: Objective and temperature.
    """
    if config.objective == "task":
        own = _part(output, "loss")
        if own is None:
            raise ValueError(
                "objective='task' needs a model that returns its loss; put 'labels' into the "
                "batches, or pass loss=."
            )
        return own
    logits = _part(target, "logits")
    if config.objective == "logits" and logits is None:
        raise ValueError(
            "objective='logits' needs a model that returns logits; use 'hidden', or pass loss=."
        )
    if config.objective != "hidden" and logits is not None:
        keep = real_tokens(batch, logits)
        t = config.temperature
        student, wanted = (
            x[keep].float().div(t).log_softmax(-1) for x in (_part(output, "logits"), logits)
        )
        return nn.functional.kl_div(student, wanted, log_target=True, reduction="batchmean") * t * t
    mine, wanted = _hidden(output), _hidden(target)
    keep = real_tokens(batch, wanted)
    return unexplained_share(mine[keep], wanted[keep])


def _part(output: object, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _hidden(output: object) -> Tensor:
    hidden = _part(output, "last_hidden_state")
    if hidden is not None:
        return hidden
    if isinstance(output, Mapping):
        raise ValueError(
            f"objective='hidden' needs a model that returns last_hidden_state, got "
            f"{', '.join(output)}; use 'logits', or pass loss=."
        )
    return first_tensor(output)
