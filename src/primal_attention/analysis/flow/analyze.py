"""The analysis ``flow`` of ``primal analyze``."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from primal_attention.analysis.flow.adapters import special_token_ids
from primal_attention.analysis.flow.metric import modality_flow
from primal_attention.analysis.flow.result import FlowResult
from primal_attention.analysis.flow.sources import FlowDetails
from primal_attention.analysis.options import FlowOptions
from primal_attention.hosts import Batch, batch_arguments
from primal_attention.support.randomness import isolated

__all__ = ["analyze_flow"]


def analyze_flow(
    model: nn.Module, batches: Sequence[Batch], options: FlowOptions, *, tokenizer: object = None
) -> FlowResult:
    """Return the flow between modalities on the first batch; see :func:`modality_flow`.

    Raises:
        ValueError: If the model has one modality only.
    """
    if not batches:
        raise ValueError("batches is empty; the analysis flow needs one batch.")
    batch = _cut(batches[0], options.sequences)
    ids = special_token_ids(getattr(model, "config", None), tokenizer)
    with isolated():  # some models draw the order of patches
        return modality_flow(
            model,
            batch,
            "segments" if options.modalities == "segments" else None,
            special=options.special,
            special_ids=ids,
            weighting=options.weighting,
            mode=options.mode,
            details=FlowDetails(
                primal=options.primal,
                ablate=None if options.ablate == "none" else options.ablate,
            ),
        )


def _cut(batch: Batch, sequences: int) -> Batch:
    """Return the first samples of a batch, unless images of all samples are laid end to end."""
    if not isinstance(batch, Mapping):
        return batch_arguments(batch, sequences)[0]
    sizes = {len(value) for value in batch.values() if isinstance(value, Tensor) and value.ndim}
    return dict(batch) if len(sizes) > 1 else batch_arguments(batch, sequences)[1]
