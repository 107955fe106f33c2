"""What estimators share: a flipped bit in a folder, or NaN, is an error and not a prediction."""

import copy
import shutil
import warnings
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from primal_attention.datasets import EventSequences, IrregularSeries
from primal_attention.hosts import ConversionError
from primal_attention.models import EncoderClassifier, EncoderConfig, PretrainedModel
from primal_attention.support.command import UserError
from primal_attention.support.files import UnsealedWarning
from primal_attention.surgery import SurgeryConfig, convert, load_converted, save_converted
from primal_attention.tasks.events import (
    EventClassifier,
    EventPredictor,
    IrregularSeriesRegressor,
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
from primal_attention.tasks.trained import load_trained, save_trained

RNG = np.random.default_rng(0)
TINY = {"dim": 8, "num_heads": 2, "num_layers": 1, "max_epochs": 1, "random_state": 0}
TABLE = {**TINY, "options": {"epoch_steps": 2}}
OT = {"hidden": (4,), "max_epochs": 1, "random_state": 0}
X, Y = RNG.normal(size=(24, 3)), np.arange(24) % 2
TIMES = [np.cumsum(row) for row in RNG.exponential(size=(12, 8))]
LOG = EventSequences.from_arrays(TIMES, RNG.integers(3, size=(12, 8)), unit="hours")
VALUES = IrregularSeries.from_arrays(TIMES, list(RNG.normal(size=(12, 8, 2))))
SERIES = list(RNG.normal(size=(12, 2, 20)))
VECTORS = (np.eye(8) + 0.1 * RNG.normal(size=(6, 8, 8))).reshape(48, 8)
IMAGES = list(RNG.integers(0, 255, (12, 16, 16, 3), np.uint8))
TEXTS = [f"a {name} thing" for name in ("red", "blue", "green") * 4]


def wrapped_torch() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()


def converted(folder: Path) -> None:
    model = wrapped_torch()
    convert(model, SurgeryConfig("primal"))
    save_converted(model, folder)


def task_and_model(folder: Path) -> None:
    save_trained(folder, fitted(TableRegressor).task_, fitted(TableRegressor).model_)


def own_model(folder: Path) -> None:
    config = EncoderConfig(num_classes=2, num_features=3, dim=8, num_heads=2, num_layers=1)
    EncoderClassifier(config).save_pretrained(folder)


@cache
def fitted(kind):
    """Return a trained estimator; how well it is trained does not matter."""
    if kind is EventPredictor:
        return kind(**TINY, options={"components": 2}).fit(LOG)
    if kind is EventClassifier:
        return kind(**TINY).fit(LOG, Y[:12])
    if kind is IrregularSeriesRegressor:
        return kind(**TINY, options={"references": 4}).fit(VALUES)
    if kind in (SeriesClassifier, SeriesRegressor):
        targets = Y[:12] if kind is SeriesClassifier else np.linspace(0, 1.5, 12)
        with pytest.MonkeyPatch.context() as patch:
            name = "primal_attention.tasks.series.estimator"
            for limit, value in {"_STEPS": 2, "_LONG_STEPS": 2, "_FOLDS": 2}.items():
                patch.setattr(f"{name}.{limit}", value)
            return kind(max_epochs=1, options={"parts": ("attention",)}, random_state=0).fit(
                SERIES, targets
            )
    if kind in (TableClassifier, TableRegressor):
        return kind(**TABLE).fit(X, Y)
    if kind is TableImputer:
        return kind(**TABLE).fit(X)
    if kind is Reranker:
        return kind(
            dim=8, max_epochs=1, options={"candidates": 8, "anchors": 4, "epoch_steps": 1}
        ).fit(VECTORS, np.arange(48) % 8, normalize=True)
    if kind is ImageTextMatcher:
        options = {"image_size": 16, "max_words": 5}
        with pytest.MonkeyPatch.context() as patch:
            name = "primal_attention.tasks.pairs.estimator.TRAINING"
            patch.setattr(name, {"training": {"min_steps": 1, "monitor": "loss"}})
            return kind(dim=8, max_epochs=1, options=options, random_state=0).fit(IMAGES, TEXTS)
    return kind(**OT).fit(X, Y)


ESTIMATORS = [
    EventPredictor,
    EventClassifier,
    IrregularSeriesRegressor,
    SeriesClassifier,
    SeriesRegressor,
    TableClassifier,
    TableRegressor,
    TableImputer,
    OTAlignedClassifier,
    OTAlignedRegressor,
    ImageTextMatcher,
    Reranker,
]
SAVED = {
    **{kind.__name__: (lambda f, k=kind: fitted(k).save(f), kind.load) for kind in ESTIMATORS},
    "task and model": (task_and_model, load_trained),
    "model": (own_model, PretrainedModel.from_pretrained),
    "conversion": (converted, lambda f: load_converted(wrapped_torch(), f)),
}


def places(folder: Path, count: int = 40) -> list[tuple[Path, int, int]]:
    """Return files with a byte and a bit of each, the same number of every file."""
    rng = np.random.default_rng(0)
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return [
        (file, int(rng.integers(file.stat().st_size)), int(rng.integers(8)))
        for file in files
        for _ in range(-(-count // len(files)))
    ]


@pytest.mark.parametrize("name", SAVED)
def test_no_flipped_bit_is_read(name, tmp_path):
    save, load = SAVED[name]
    save(tmp_path)
    load(tmp_path)
    wrong = []
    for file, byte, bit in places(tmp_path):
        good = bytearray(file.read_bytes())
        bad = bytearray(good)
        bad[byte] ^= 1 << bit
        file.write_bytes(bad)
        try:
            load(tmp_path)
            message = "no error"
        except (UserError, ConversionError) as error:
            message = str(error)
        if str(tmp_path) not in message:
            wrong.append(f"{file.name}, byte {byte}, bit {bit}: {message}")
        file.write_bytes(good)
    assert not wrong


@pytest.mark.parametrize("name", SAVED)
def test_a_lost_file_is_named(name, tmp_path):
    save, load = SAVED[name]
    save(tmp_path / "a")
    for file in sorted(p for p in (tmp_path / "a").rglob("*") if p.is_file()):
        copy = tmp_path / "b"
        shutil.copytree(tmp_path / "a", copy)
        (copy / file.relative_to(tmp_path / "a")).unlink()
        if file.name == "SHA256SUMS" and file.parent.name == "a":
            with pytest.warns(UnsealedWarning, match="has no SHA256SUMS"):
                load(copy)
        else:
            with pytest.raises((UserError, ConversionError), match=str(copy)):
                load(copy)
        shutil.rmtree(copy)


def test_parts_of_two_saves_are_not_mixed(tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        clf = OTAlignedClassifier(**{**OT, "random_state": seed}).fit(X, Y)
        clf.save(tmp_path / name)
    shutil.rmtree(tmp_path / "a" / "model")
    shutil.copytree(tmp_path / "b" / "model", tmp_path / "a" / "model")
    with pytest.raises(UserError, match="was changed or damaged"):
        OTAlignedClassifier.load(tmp_path / "a")


def test_a_folder_of_an_earlier_version_is_read_with_one_warning(tmp_path):
    fitted(TableRegressor).save(tmp_path)
    for sums in list(tmp_path.rglob("SHA256SUMS")):
        sums.unlink()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        TableRegressor.load(tmp_path)
    assert [w.category for w in seen] == [UnsealedWarning]


ASK = {
    EventPredictor: [
        lambda e: e.predict_next(LOG),
        lambda e: e.sample(LOG, n=2, horizon=1.0),
        lambda e: e.score(LOG),
    ],
    EventClassifier: [lambda e: e.predict(LOG)],
    IrregularSeriesRegressor: [
        lambda e: e.predict(VALUES, [[1.0]] * len(TIMES)),
        lambda e: e.score(VALUES),
    ],
    SeriesClassifier: [lambda e: e.predict(SERIES)],
    SeriesRegressor: [lambda e: e.predict(SERIES)],
    TableClassifier: [lambda e: e.predict(X), lambda e: e.predict_proba(X)],
    TableRegressor: [lambda e: e.predict(X), lambda e: e.predict_interval(X)],
    TableImputer: [lambda e: e.transform(np.where(X > 1, np.nan, X))],
    OTAlignedClassifier: [lambda e: e.predict(X), lambda e: e.transform(X)],
    OTAlignedRegressor: [lambda e: e.predict(X)],
    ImageTextMatcher: [
        lambda e: e.predict(IMAGES, TEXTS),
        lambda e: e.score(IMAGES, TEXTS),
        lambda e: e.index(IMAGES).search("a red thing"),
    ],
}


@pytest.mark.parametrize("kind", ASK, ids=lambda kind: kind.__name__)
def test_an_estimator_never_answers_from_nan(kind):
    estimator = copy.deepcopy(fitted(kind))
    with torch.no_grad():
        for weight in estimator.model_.parameters():
            weight.fill_(torch.nan)
    for ask in ASK[kind]:
        with pytest.raises(ValueError, match="no finite answer to"):
            ask(estimator)


@pytest.mark.parametrize("kind", [SeriesClassifier, SeriesRegressor])
@pytest.mark.parametrize("name", ["convolutions.weight", "quantiles.forest.answer", "shares"])
def test_a_closed_form_part_never_answers_from_nan(kind, name):
    targets = Y[:12] if kind is SeriesClassifier else np.linspace(0, 1.5, 12)
    estimator = kind(random_state=0).fit(SERIES, targets)
    estimator.model_.get_buffer(name).fill_(torch.nan)
    with pytest.raises(ValueError, match="no finite answer to"):
        estimator.predict(SERIES)


def test_a_series_that_overflows_has_no_class():
    series = [case.copy() for case in SERIES]
    series[3][0, 5] = 1e25
    with pytest.raises(ValueError, match=r"no finite answer to item 3|Case 3"):
        fitted(SeriesClassifier).predict(series)


def test_the_command_says_how_to_read_an_estimator_without_a_task(tmp_path):
    fitted(OTAlignedClassifier).save(tmp_path)
    with pytest.raises(UserError, match=r"in Python, OTAlignedClassifier\.load\('"):
        load_trained(tmp_path)
