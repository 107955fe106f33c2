"""Models and schedules are the published ones."""

import pytest

from primal_attention.tasks.longrange.published import (
    LRA,
    model_config,
    published_model,
    training_config,
)

# thousands of parameters, counted from the released shapes
PUBLISHED = {
    "primal": {"listops": 236, "text": 397, "retrieval": 463, "image": 243, "pathfinder": 242},
    "primal+": {"listops": 244, "text": 404, "retrieval": 408, "image": 209, "pathfinder": 187},
}


@pytest.mark.parametrize("task", LRA)
@pytest.mark.parametrize("variant", PUBLISHED)
def test_models_have_the_published_number_of_parameters(task, variant):
    count = sum(p.numel() for p in published_model(task, variant).parameters())
    assert round(count / 1000) == PUBLISHED[variant][task]


@pytest.mark.parametrize("task", LRA)
@pytest.mark.parametrize("variant", ["softmax", "dual", "skyformer"])
def test_the_other_variants_can_be_built(task, variant):
    assert published_model(task, variant).config.num_classes == LRA[task].num_classes
    assert training_config(task, variant).lr == 1e-4


def test_schedules_are_the_published_ones():
    config = training_config("text", "primal+")
    assert (config.epochs * config.epoch_steps, config.batch_size, config.eta) == (20000, 32, 0.1)
    assert config.warmup == pytest.approx(0.4)
    assert model_config("text", "primal").attention_options["rank"] == 20


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="no task 'images'"):
        model_config("images", "primal")
    with pytest.raises(ValueError, match=r"no attention named 'primal\+\+'"):
        training_config("text", "primal++")
