"""A tokenizer of twenty words, and a small classifier of reviews that is always right."""

import pytest
import torch
from tests.analysis.causes import models


@pytest.fixture(scope="session")
def words(tmp_path_factory):
    return models.tokenizer(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="session")
def critic(words):
    names = {0: "negative", 1: "positive"}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = models.bert(id2label=names, label2id={v: k for k, v in names.items()}, **off).config
    torch.manual_seed(0)
    model = models.transformers.BertForSequenceClassification(config)
    return models.trained(model, words)
