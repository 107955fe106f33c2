"""Folders that the library writes: models, estimators, checkpoints, conversions."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from primal_attention.models import EncoderClassifier, EncoderConfig, ModelFileError
from primal_attention.support.command import UserError
from primal_attention.tasks.trained import load_trained

from .cases import (
    case,
    check_rows,
    event_log,
    pair_task,
    series_model,
    table,
    table_model,
    text_model,
    vectors,
)
from .harness import Case, in_use

# saved models


def _load_and_predict(data: Any) -> Callable[[Path], Any]:
    def read(here: Path) -> Any:
        found = load_trained(here)
        with in_use():
            return found.records(data)

    return read


@case("model of texts")
def _text_folder(folder: Path) -> Case:
    read = _load_and_predict(["good", "bad plot", "fine film"])
    return Case(
        "model of texts",
        text_model(folder),
        (read,),
        check=check_rows,
        is_sealed=True,
        names=("model",),
    )


@case("model of series")
def _series_folder(folder: Path) -> Case:
    rng = np.random.default_rng(1)
    read = _load_and_predict([rng.normal(size=(2, n)) for n in (5, 7)])
    return Case(
        "model of series",
        series_model(folder),
        (read,),
        check=check_rows,
        is_sealed=True,
        names=("model",),
    )


@case("encoder")
def _encoder(folder: Path) -> Case:
    sizes: Any = {"num_classes": 2, "num_features": 3, "dim": 8, "num_heads": 2, "num_layers": 1}
    EncoderClassifier(EncoderConfig(**sizes)).save_pretrained(folder / "encoder")
    x = torch.randn(2, 4, 3)

    @torch.no_grad()
    def read(here: Path) -> Any:
        model = EncoderClassifier.from_pretrained(here)
        with in_use():
            return model.eval()(x).logits.numpy()

    return _folder("encoder", folder / "encoder", read)


# estimators


def _folder(name: str, path: Path, read: Callable[[Path], Any]) -> Case:
    errors = (UserError, ValueError, ModelFileError)
    return Case(name, path, (read,), errors=errors, is_sealed=True, names=(path.name,))


def _estimator(name: str, path: Path, kind: Any, data: Any, answer: str) -> Case:
    def read(here: Path) -> Any:
        found = kind.load(here)
        with in_use():
            return np.asarray(getattr(found, answer)(data))

    return _folder(name, path, read)


@case("estimator of tables")
def _npt(folder: Path) -> Case:
    from primal_attention.tasks.tables import TableClassifier

    path = table_model(folder)
    frame = table().drop(columns="price")[:5]
    return _estimator("estimator of tables", path, TableClassifier, frame, "predict_proba")


@case("estimator of numbers")
def _npt_regressor(folder: Path) -> Case:
    from primal_attention.tasks.tables import TableRegressor

    frame, path = table(), folder / "estimator"
    model = TableRegressor(dim=8, num_heads=2, num_layers=1, max_epochs=1, random_state=0)
    model.fit(frame[["color"]], frame["size"]).save(path)
    return _estimator("estimator of numbers", path, TableRegressor, frame[["color"]], "predict")


@case("aligned estimator")
def _aligned(folder: Path) -> Case:
    from primal_attention.tasks.tables import OTAlignedClassifier

    frame, path = table(), folder / "estimator"
    features = frame[["size", "color"]]
    model = OTAlignedClassifier(max_epochs=2, random_state=0)
    model.fit(features, frame["price"]).save(path)
    return _estimator("aligned estimator", path, OTAlignedClassifier, features, "predict_proba")


@case("estimator of events")
def _next_event(folder: Path) -> Case:
    from primal_attention.datasets import EventSequences
    from primal_attention.tasks.events import EventPredictor

    log = EventSequences.from_frame(event_log(), sequence="user", unit="days")
    sizes: Any = {"dim": 16, "num_heads": 2, "num_layers": 1, "max_epochs": 1}
    EventPredictor(**sizes, options={"components": 4}, random_state=0).fit(log).save(
        folder / "estimator"
    )

    def read(here: Path) -> Any:
        found = EventPredictor.load(here)
        with in_use():
            return found.predict_next(log).probabilities

    return _folder("estimator of events", folder / "estimator", read)


@case("classifier of events")
def _event_classes(folder: Path) -> Case:
    from primal_attention.datasets import EventSequences
    from primal_attention.tasks.events import EventClassifier

    log, path = EventSequences.from_frame(event_log(), sequence="user", unit="days"), folder / "x"
    sizes: Any = {"dim": 16, "num_heads": 2, "num_layers": 1, "max_epochs": 1}
    model = EventClassifier(**sizes, random_state=0)
    model.fit(log, np.array(["a", "b"] * 6)).save(path)
    return _estimator("classifier of events", path, EventClassifier, log, "predict_proba")


@case("estimator of pairs")
def _matcher(folder: Path) -> Case:
    from PIL import Image

    from primal_attention.tasks.pairs import ImageTextMatcher

    matcher = ImageTextMatcher(dim=16, options={"image_size": 16, "max_words": 8})
    matcher.task_, matcher.model_ = pair_task()
    matcher.history_ = None
    matcher.save(folder / "estimator")
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 255, (9, 9, 3)).astype(np.uint8)) for _ in "abc"]

    def read(here: Path) -> Any:
        found = ImageTextMatcher.load(here)
        with in_use():
            return [hit.score for hit in found.index(images).search("a red square", 2)]

    return _folder("estimator of pairs", folder / "estimator", read)


@case("re-ranker")
def _reranker(folder: Path) -> Case:
    from primal_attention.tasks.lists import Reranker

    x = vectors()
    options = {"candidates": 8, "anchors": 4, "epoch_steps": 2}
    model = Reranker(dim=8, num_layers=1, max_epochs=1, options=options)
    model.fit(x, np.arange(24) % 3).save(folder / "reranker")
    ids = np.argsort(-x[:3] @ x.T)[:, :6]

    def read(here: Path) -> Any:
        found = Reranker.load(here)
        with in_use():
            return found.rerank(x[:3], x, ids).scores

    return _folder("re-ranker", folder / "reranker", read)


@case("classifier of series")
def _aeon(folder: Path) -> Case:
    from primal_attention.tasks.series import SeriesClassifier

    x, path = np.random.default_rng(0).normal(size=(8, 2, 10)), folder / "estimator"
    kind = SeriesClassifier
    kind(random_state=0).fit(x, np.array(["a", "b"] * 4)).save(path)
    return _estimator("classifier of series", path, kind, x, "predict_proba")


@case("regressor of series")
def _aeon_numbers(folder: Path) -> Case:
    from primal_attention.tasks.series import SeriesRegressor
    from primal_attention.tasks.series import estimator as module

    x, path = np.random.default_rng(0).normal(size=(8, 1, 10)), folder / "estimator"
    kind = SeriesRegressor
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_LONG_STEPS": 1, "_STEPS": 1, "_FOLDS": 2}.items():
            patch.setattr(module, name, value)
        model = kind(max_epochs=1, options={"parts": ("attention",)}, random_state=0).fit(
            x, np.linspace(0, 1, 8)
        )
    model.save(path)
    return _estimator("regressor of series", path, kind, x, "predict")


# runs


@case("checkpoint")
def _checkpoint(folder: Path) -> Case:
    from primal_attention.training import (
        CheckpointError,
        Columns,
        NonFiniteLossError,
        TrainingConfig,
        fit,
    )

    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(10) % 2
    data = Columns(x=torch.randn(10, 4, 3, generator=generator), labels=labels)

    def run(out: Path, *, resume: bool, stop: int | None = None) -> Any:
        torch.manual_seed(0)
        sizes: Any = {"num_features": 3, "dim": 8, "num_heads": 2, "num_layers": 1}
        model = EncoderClassifier(EncoderConfig(num_classes=2, **sizes))

        def on_epoch(model: Any, record: Any) -> None:
            if stop is not None and record.epoch >= stop:
                raise KeyboardInterrupt

        config = TrainingConfig(epochs=3, batch_size=5, lr=1e-2, ema=0.9, save_steps=2)
        fit(model, data, config=config, valid=data, out=out, resume=resume, on_epoch=on_epoch)
        return {name: weight.numpy() for name, weight in model.state_dict().items()}

    with contextlib.suppress(KeyboardInterrupt):
        run(folder / "run", resume=False, stop=2)

    def read(here: Path) -> Any:
        return run(here, resume=True)

    # with renewed checksums, weights may be anything; the run then says what is not finite
    errors = (UserError, CheckpointError, NonFiniteLossError)
    return Case(
        "checkpoint",
        folder / "run",
        (read,),
        ("checkpoints/**/*",),
        errors=errors,
        is_sealed=True,
        names=("epoch-", "run"),
    )


# models of others


def _bert(folder: Path) -> Any:
    from transformers import BertConfig, BertModel

    sizes: Any = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2}
    config = BertConfig(**sizes, num_attention_heads=2, intermediate_size=16)
    BertModel(config).save_pretrained(folder / "bert")
    return BertModel.from_pretrained(folder / "bert").eval()


def _load_any(**options: Any) -> Callable[[Path], Any]:
    @torch.no_grad()
    def read(here: Path) -> Any:
        from primal_attention.hosts.optional import quiet_transformers
        from primal_attention.surgery.loading import load_any

        quiet_transformers()
        model = load_any(here, **options).model
        with in_use():
            return model(torch.arange(6)[None]).last_hidden_state.numpy()

    return read


@case("conversion")
def _conversion(folder: Path) -> Case:
    from primal_attention.hosts import ConversionError
    from primal_attention.surgery import SurgeryConfig, convert, save_converted

    model = _bert(folder)
    convert(model, SurgeryConfig("primal-dual", layers="last:1"))
    save_converted(model, folder / "conversion")
    return Case(
        "conversion",
        folder / "conversion",
        (_load_any(original=folder / "bert"),),
        errors=(UserError, ConversionError),
        is_sealed=True,
        names=("conversion",),
    )


@case("model of transformers")
def _transformers(folder: Path) -> Case:
    from primal_attention.hosts import ConversionError

    _bert(folder)
    return Case(
        "model of transformers",
        folder / "bert",
        (_load_any(),),
        errors=(UserError, ConversionError),
        names=("bert",),
    )
