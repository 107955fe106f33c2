"""Models and schedules are the published ones."""

import pytest

from primal_attention.models import EncoderClassifier
from primal_attention.tasks.longrange.settings import LRA, model_config, training_config


@pytest.mark.parametrize("task", LRA)
@pytest.mark.parametrize("variant", ["softmax", "primal", "primal+", "dual"])
def test_every_model_can_be_built(task, variant):
    model = EncoderClassifier(model_config(task, variant))
    assert model.config.num_classes == LRA[task].num_classes
    assert training_config(task, variant).lr == 1e-4


def test_schedules_are_the_published_ones():
    config = training_config("text", "primal+")
    assert (config.epochs * config.epoch_steps, config.batch_size, config.eta) == (20000, 32, 0.1)
    assert config.warmup == pytest.approx(0.4)
    assert model_config("text", "primal").attention_options == {"rank": 20}


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="no task 'images'"):
        model_config("images", "primal")
    with pytest.raises(ValueError, match="variant must be one of"):
        training_config("text", "primal++")
