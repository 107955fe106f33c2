"""Recommendations to explain: which items of the history lead to the recommended one."""

import inspect
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.analysis.causes.removal import Removed, Remover, choose_removal
from primal_attention.analysis.causes.subjects import ModelSubject, Names, option_name

__all__ = ["RecommenderSubject"]


class RecommenderSubject(ModelSubject):
    """The item that a sequential recommender puts first for a history of items.

    A model in the style of BERT4Rec reads the history with a mask item at its end; give
    ``mask_id``. A model in the style of SASRec reads the history alone. For the graph, the
    recommended item is appended to the history and the attention of that sequence is read.

    Args:
        model: Gets ids ``[b n]`` and returns the scores of all items after the last position:
            ``[b items]`` or ``[b n items]``, as a tensor or as ``logits`` of an output.
        items: Ids of the history, oldest first.
        mask_id: Id of the mask item.
        names: Names of the items by id; by default the ids.
        layer: Attention layer to read: an index in the order of the forward, or a name.
        removal: ``"mask"`` (default with ``mask_id``), ``"drop"`` (default without), ``"pad"``,
            ``"zero"``, ``"resample"``, or ``"attend"`` for a model with the argument ``key_mask``
            or ``attention_mask``.
        pad_id: Id of padding, for ``removal="pad"``; never recommended.
        exclude_seen: Whether items of the history are never recommended.
        exclude: Further ids that are never recommended.
        samples: Inputs to draw for each set, for ``"resample"``.
        seed: Seed of the draws.

    Example:
        >>> from primal_attention.models import EncoderClassifier, EncoderConfig
        >>> model = EncoderClassifier(EncoderConfig(num_classes=12, vocab_size=12, dim=16)).eval()
        >>> names = dict(enumerate("abcdefghijkl"))
        >>> subject = RecommenderSubject(model, [3, 1, 4], mask_id=0, names=names)
        >>> subject.tokens[:3], subject.target, subject.candidates
        (['d', 'b', 'e'], 3, [0, 1, 2])
    """

    def __init__(
        self,
        model: nn.Module,
        items: Sequence[int],
        *,
        mask_id: int | None = None,
        names: Names = None,
        layer: int | str = -1,
        removal: str = "auto",
        pad_id: int | None = None,
        exclude_seen: bool = True,
        exclude: Sequence[int] = (),
        samples: int = 5,
        seed: int = 0,
    ) -> None:
        if not len(items):
            raise ValueError("items is empty; give a history of at least one item.")
        ids = torch.as_tensor(list(items))
        self.model, self.mask_id, self.names = model, mask_id, names
        special = [i for i in (mask_id, pad_id) if i is not None]
        self._never = sorted({*special, *exclude, *(ids.tolist() if exclude_seen else ())})
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        super().__init__(
            model,
            ids,
            self._remover(removal, ids, pad_id, special, samples, seed),
            layer=layer,
        )
        self.tokens = [*map(self.name_option, ids.tolist()), self.decision]
        self.target = len(ids)
        self.candidates = [i for i, item in enumerate(ids.tolist()) if item not in special]

    def score_options(self, removed: Removed) -> Float[Tensor, "b options"]:
        """Return the scores of all items; items that are never recommended have ``-inf``."""
        ids, keep = removed.ids, removed.keep
        if self.mask_id is not None:
            ids = nn.functional.pad(ids, (0, 1), value=self.mask_id)
            keep = nn.functional.pad(keep, (0, 1), value=True)
        scores = self._forward(ids, keep)
        scores = scores[:, -1] if scores.ndim == 3 else scores
        never = torch.tensor([i for i in self._never if i < scores.shape[-1]], dtype=torch.long)
        return scores.index_fill(-1, never.to(scores.device), -torch.inf)

    def name_option(self, option: int) -> str:
        """Return the name of an item."""
        return option_name(self.names, option)

    def abduct(self) -> Tensor:
        """Return the history with the recommended item at its end."""
        return torch.cat([self.ids, torch.tensor([self.choice])])[None].to(self._device)

    def _forward(self, ids: Tensor, keep: Tensor) -> Tensor:
        options: dict[str, Tensor] = {}
        if not keep.all():
            name = next((n for n in ("key_mask", "attention_mask") if n in self._takes), None)
            if name is None:
                raise ValueError(
                    f"removal='attend' needs the argument key_mask or attention_mask, which "
                    f"{type(self.model).__name__} does not take; use removal='drop'."
                )
            options[name] = (keep if name == "key_mask" else keep.long()).to(self._device)
        output = self.model(ids.to(self._device), **options)
        return output if isinstance(output, Tensor) else output.logits

    def _remover(
        self,
        removal: str,
        ids: Tensor,
        pad_id: int | None,
        special: Sequence[int],
        samples: int,
        seed: int,
    ) -> Remover:
        if removal == "auto":
            removal = "drop" if self.mask_id is None else "mask"
        fill = {"mask": self.mask_id, "pad": pad_id}.get(removal)
        if removal in ("mask", "pad"):
            if fill is None:
                raise ValueError(f"removal={removal!r} needs {removal}_id; give it, or use 'drop'.")
            return Remover(removal, fill)  # type: ignore[arg-type]
        proposal = None
        if removal == "resample":
            # items are known by their scores only
            with torch.no_grad():
                size = self._forward(ids[None], torch.ones(1, 1, dtype=torch.bool)).shape[-1]
            proposal = [i for i in range(size) if i not in special]
        return choose_removal(
            None, ids, removal=removal, samples=samples, proposal=proposal, seed=seed
        )
