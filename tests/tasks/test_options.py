"""What the estimators at the front door share: names of arguments, options, time limits."""

import inspect
from dataclasses import dataclass

import pytest
from sklearn.base import clone

from primal_attention.support.options import plain_options, read_options
from primal_attention.tasks.events import (
    EventClassifier,
    EventPredictor,
    IrregularSeriesRegressor,
    NextEventFitOptions,
)
from primal_attention.tasks.lists import Reranker
from primal_attention.tasks.pairs import ImageTextMatcher
from primal_attention.tasks.series import SeriesClassifier, SeriesRegressor
from primal_attention.tasks.tables import (
    OTAlignedClassifier,
    OTAlignedRegressor,
    TableClassifier,
    TableImputer,
    TableRegressor,
)

ESTIMATORS = [
    EventClassifier,
    EventPredictor,
    ImageTextMatcher,
    IrregularSeriesRegressor,
    Reranker,
    SeriesClassifier,
    SeriesRegressor,
    TableClassifier,
    TableImputer,
    TableRegressor,
]
ARGUMENTS = {
    "attention", "dim", "num_heads", "num_layers", "max_epochs", "batch_size", "learning_rate",
    "options", "random_state", "verbose",
}  # fmt: skip


OWN = {"geometry", "hidden", "n_components"}
"""Arguments of the estimators without attention."""


@dataclass(frozen=True)
class Options:
    """A share and a name."""

    share: float = 0.1
    name: str = "a"

    def __post_init__(self) -> None:
        if self.share > 1:
            raise ValueError(f"share must be at most 1, got {self.share}.")


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_all_have_the_same_arguments(kind):
    assert set(inspect.signature(kind).parameters) == ARGUMENTS
    limit = inspect.signature(kind.fit).parameters["time_limit"]
    assert (limit.kind, limit.default) == (inspect.Parameter.KEYWORD_ONLY, None)


@pytest.mark.parametrize("kind", [OTAlignedClassifier, OTAlignedRegressor])
def test_estimators_without_attention_have_the_same_words(kind):
    arguments = set(inspect.signature(kind).parameters)
    assert len(arguments) <= 10
    assert arguments <= ARGUMENTS | OWN
    assert "time_limit" in inspect.signature(kind.fit).parameters


def test_options_are_an_instance_or_some_fields():
    assert read_options(Options, None) == Options()
    assert read_options(Options, {"share": 1}) == Options(share=1.0)
    assert read_options(Options, Options(name="b")) == Options(name="b")
    assert plain_options(Options, None) is None
    assert plain_options(Options, {"name": "b"}) == {"share": 0.1, "name": "b"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shard": 0.2}, r"no setting options\.shard\. Did you mean 'share'"),
        ({"share": "much"}, "options.share must be a number, got 'much'"),
        (Options(name=3), "options.name must be a word, got 3"),
        ({"share": 2.0}, "share must be at most 1, got 2.0"),
    ],
)
def test_wrong_options_are_told(given, message):
    with pytest.raises(ValueError, match=message):
        read_options(Options, given)
    with pytest.raises(TypeError, match="options must be Options, a dictionary of its fields"):
        read_options(Options, "share")


def test_options_are_parameters_of_scikit_learn():
    options = NextEventFitOptions(components=3, attention_options={"feature_map": "elu"})
    model = clone(EventPredictor(options=options))
    assert model.options == options
    assert model.options is not options
    assert model.set_params(options={"time": "mercer"}).get_params()["options"] == {
        "time": "mercer"
    }


@pytest.mark.parametrize("name", ["max_epochs", "batch_size", "learning_rate"])
@pytest.mark.parametrize("value", [0, -1, "3", True])
def test_wrong_sizes_of_a_training_are_told(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a"):
        SeriesClassifier(**{name: value}).fit([], [])
