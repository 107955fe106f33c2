"""Methods of re-ranking by name, for commands and for other domains."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from primal_attention.support.command import UserError, did_you_mean

if TYPE_CHECKING:
    from primal_attention.tasks.lists.base import BaseReranker

__all__ = ["make_reranker"]


def make_reranker(name: str) -> "BaseReranker":
    """Return a method of re-ranking by name, or the model in a folder.

    Args:
        name: ``context`` (the trained model of the package), ``diffusion`` (on the graph of each
            list), ``expansion`` (the query moves towards its first results), ``augmentation``
            (every item moves towards its neighbours, then expansion), ``refine`` (query and items
            become means of their neighbours), ``reciprocal`` (shared k-reciprocal neighbours), or
            the folder of a trained model.

    Example:
        >>> make_reranker("expansion")
        AlphaQE()
    """
    from primal_attention.tasks import lists

    makers: dict[str, Callable[[], BaseReranker]] = {
        "context": lists.Reranker.pretrained,
        "diffusion": lists.DiffusionReranker,
        "expansion": lists.AlphaQE,
        "augmentation": lambda: lists.Chain([lists.DatabaseAugmentation(), lists.AlphaQE()]),
        "refine": lists.NeighbourRefine,
        "reciprocal": lists.KReciprocal,
    }
    if name in makers:
        return makers[name]()
    if not Path(name).is_dir():
        raise UserError(
            f"there is no method and no folder {name!r}.{did_you_mean(name, makers)} Methods: "
            f"{', '.join(makers)}; or the folder of a trained model."
        )
    return lists.Reranker.load(name)
