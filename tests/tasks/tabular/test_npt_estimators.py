import numpy as np
import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from primal_attention.tasks.tabular import NPTClassifier, NPTImputer, NPTRegressor

SMALL = {"d_embed": 8, "depth": 2, "heads": 2, "steps": 30, "lr": 0.02, "random_state": 0}


@parametrize_with_checks([NPTClassifier(**SMALL), NPTRegressor(**SMALL), NPTImputer(**SMALL)])
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)
