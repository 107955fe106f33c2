"""Which epoch of a run is the best, and when a run ends."""

from collections.abc import Mapping

from primal_attention.training.config import TrainingConfig
from primal_attention.training.history import Ending, History
from primal_attention.training.scores import Scores

__all__ = ["ending_of", "is_better", "monitored"]


def monitored(config: TrainingConfig, scores: Scores) -> str:
    """Return the name of the score that chooses the epoch; raise if it is not measured."""
    if config.monitor not in scores:
        raise ValueError(
            f"monitor must name a score of the validation data, got {config.monitor!r}; "
            f"measured are: {', '.join(scores)}."
        )
    return config.monitor


def is_better(config: TrainingConfig, new: Scores, best: Mapping[str, float]) -> bool:
    """Return whether scores beat those of the best epoch; a tie goes to the lower loss."""
    name = monitored(config, new)
    # accuracies of few items are often equal
    if new[name].value == best[name] and "loss" in new:
        name = "loss"
    return new[name].is_better_than(best[name])


def ending_of(config: TrainingConfig, history: History, *, is_out_of_time: bool) -> Ending:
    """Return why a run ends after the last epoch of its history, or that it goes on."""
    done, best = len(history.records), history.best_epoch or 0
    if is_out_of_time:
        return "seconds"
    if done >= config.epochs:
        return "epochs"
    if config.patience is not None and done - best >= config.patience:
        return "patience"
    return "running"
