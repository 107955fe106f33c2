import copy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from primal_attention.attention import Attention, create_attention
from primal_attention.hosts import record_calls
from primal_attention.models import EncoderClassifier, EncoderConfig
from primal_attention.support.command import UserError
from primal_attention.support.files import locked
from primal_attention.surgery import SurgeryConfig, convert, distillation
from primal_attention.surgery.distillation import DistillConfig, distill
from primal_attention.surgery.fitting import fit_outputs
from primal_attention.surgery.recording import differing_layers, layer_r2
from primal_attention.training import CheckpointError, NonFiniteLossError

FAST = DistillConfig(fit_batches=4, layer_steps=6, end_steps=6)


class Tagger(nn.Module):
    """Two attention layers with residuals, and logits per token."""

    def __init__(self) -> None:
        super().__init__()
        self.first = create_attention("softmax", 16, 2, dropout=0.1)
        self.second = create_attention("softmax", 16, 2, dropout=0.1)
        self.head = nn.Linear(16, 5)

    def forward(self, x, key_mask=None, labels=None):
        x = x + self.first(x, key_mask=key_mask)
        x = x + self.second(x, key_mask=key_mask)
        logits = self.head(x)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits, "last_hidden_state": x}


def pair(name: str = "linear", **options: object) -> tuple[Tagger, Tagger]:
    torch.manual_seed(3)
    teacher = Tagger().eval()
    with torch.no_grad():
        for layer in (teacher.first, teacher.second):
            layer.q_proj.weight.mul_(3)
    model = copy.deepcopy(teacher)
    model.second = create_attention(name, 16, 2, **options)
    model.second.load_state_dict(teacher.second.state_dict(), strict=False)
    return model, teacher


def batches(count: int = 6) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    keep = torch.arange(12) < torch.tensor([[12], [9], [4], [12]])
    return [
        {"x": torch.randn(4, 12, 16, generator=generator), "key_mask": keep} for _ in range(count)
    ]


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_differing_layers_are_found_by_comparison():
    model, teacher = pair()
    assert differing_layers(model, teacher) == ["second"]
    with pytest.raises(ValueError, match="same layers everywhere"):
        differing_layers(teacher, teacher)
    with pytest.raises(ValueError, match="teacher a Linear"):
        differing_layers(model, nn.Linear(1, 1))


def test_recorded_calls_leave_caches_out():
    class Layer(nn.Module):
        def forward(self, x, past_key_values=None):
            return (x + 1, None)

    layer = nn.ModuleDict({"a": Layer()})
    with record_calls(layer, ["a"], {}) as calls:
        layer["a"](torch.zeros(1, 2, 3), past_key_values=object())
    assert calls["a"].kwargs == {"past_key_values": None}
    assert torch.equal(calls["a"].output, torch.ones(1, 2, 3))
    assert not layer["a"]._forward_hooks


def test_an_equal_layer_explains_everything_and_a_silent_one_nothing():
    model, teacher = pair("softmax")
    model.second = type("Copy", (type(model.second),), {})(16, 2)
    model.second.load_state_dict(teacher.second.state_dict())
    assert layer_r2(model, teacher, batches()) == {"second": pytest.approx(1.0)}
    with torch.no_grad():
        model.second.out_proj.weight.zero_()
        truth = torch.cat(
            [
                record(teacher, batch)[batch["key_mask"]]
                for batch in batches()
            ]
        )  # fmt: skip
        model.second.out_proj.bias.copy_(truth.mean(0))
    assert layer_r2(model, teacher, batches())["second"] == pytest.approx(0.0, abs=1e-6)


def record(teacher: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with record_calls(teacher, ["second"], {}) as calls:
        teacher(**batch)
    return calls["second"].output


@pytest.mark.parametrize("name", ["linear", "skyformer", "primal", "primal-dual"])
def test_the_closed_form_helps_and_is_the_least_squares_solution(name):
    model, teacher = pair(name)
    before = layer_r2(model, teacher, batches())["second"]
    assert fit_outputs(model, teacher, batches(), ridge=1e-9) == ["second"]
    after = layer_r2(model, teacher, batches())["second"]
    assert after > max(before, 0.0)
    # at the minimum no small change of the map helps
    layer = model.second.out_proj
    for _ in range(3):
        with torch.no_grad():
            change = 1e-2 * torch.randn_like(layer.weight)
            layer.weight += change
            worse = layer_r2(model, teacher, batches())["second"]
            layer.weight -= change
        assert worse < after


@pytest.mark.parametrize("name", ["linear", "cosformer", "schoenbat", "primal", "primal-dual"])
def test_without_an_output_map_the_values_are_refit(name):
    model, teacher = pair(name)
    teacher.second.out_proj = nn.Identity()
    model.second.out_proj = nn.Identity()
    before = layer_r2(model, teacher, batches())["second"]
    assert fit_outputs(model, teacher, batches(), ridge=1e-9) == ["second"]
    after = layer_r2(model, teacher, batches())["second"]
    # a primal layer has one map for all heads, which cannot even give each its mean
    assert after > before
    layer = model.second.v_proj if hasattr(model.second, "v_proj") else model.second.concat
    for _ in range(3):
        with torch.no_grad():
            change = 1e-2 * torch.randn_like(layer.weight)
            layer.weight += change
            worse = layer_r2(model, teacher, batches())["second"]
            layer.weight -= change
        assert worse < after


def test_the_chosen_ridge_holds_back_where_there_are_few_tokens():
    model, teacher = pair()
    model.second.out_proj = nn.Linear(16, 16)
    model.second.out_proj.load_state_dict(teacher.second.out_proj.state_dict())
    careless = copy.deepcopy(model)
    before = layer_r2(model, teacher, batches())["second"]
    few = [{k: v[:1] for k, v in batches(1)[0].items()}]  # twelve tokens, seventeen unknowns
    fit_outputs(careless, teacher, few, ridge=1e-6)
    fit_outputs(model, teacher, few)
    found = layer_r2(model, teacher, batches())["second"]
    assert found > layer_r2(careless, teacher, batches())["second"]
    assert found > before - 0.2
    fit_outputs(model, teacher, batches())
    assert layer_r2(model, teacher, batches())["second"] > max(found, before)


def test_a_strong_ridge_keeps_the_copied_weights():
    model, teacher = pair()
    before = model.second.out_proj.weight.clone()
    fit_outputs(model, teacher, batches(), ridge=1e9)
    torch.testing.assert_close(model.second.out_proj.weight, before, rtol=0, atol=1e-6)


def test_a_layer_without_an_output_map_is_left_alone():
    model, teacher = pair()
    model.second = nn.Sequential(model.second, nn.ReLU())
    model.second.forward = lambda x, key_mask=None: x * 0.5
    before = weights(model)
    assert fit_outputs(model, teacher, batches()) == []
    assert torch.equal(weights(model), before)


@pytest.mark.parametrize("objective", ["logits", "hidden", "task", "auto"])
def test_every_stage_lowers_its_loss_and_leaves_the_rest_alone(objective):
    model, teacher = pair("primal-dual")
    original, kept = weights(teacher), weights(model.first)
    data = batches()
    for batch in data:
        batch["labels"] = torch.randint(0, 5, (4, 12))
    config = DistillConfig(
        layer_steps=30, end_steps=30, objective=objective, layer_lr=3e-3, end_lr=3e-3
    )
    done = distill(model, teacher, data, config)
    assert done.layers == ["second"]
    assert done.fitted == ["second"]
    assert list(done.history) == ["layers", "end"]
    for history in done.history.values():
        assert history.records[-1].step == 30
        losses = [record.loss for record in history.records]
        assert sum(losses[-3:]) < sum(losses[:3])
    # dropout is off while layers are matched, and the term is part of the last stage only
    assert done.history["layers"].records[-1].ksvd == 0
    assert done.history["end"].records[-1].ksvd > 0
    assert torch.equal(weights(teacher), original)
    assert torch.equal(weights(model.first), kept)
    assert not model.training
    assert all(p.requires_grad for p in (*model.parameters(), *teacher.parameters()))


def test_training_all_moves_the_other_layers_too():
    model, teacher = pair()
    before = weights(model.first)
    config = DistillConfig(layer_steps=1, end_steps=2, train_all=True)
    distill(model, teacher, batches(), config)
    assert not torch.equal(weights(model.first), before)


class KilledError(Exception):
    """Ends a run in the middle."""


def dying_at(monkeypatch, step: int | None) -> list[int]:
    """Count the steps from now on, and raise in one of them."""
    taken: list[int] = []
    forward = distillation._Stage.forward

    def counted(self, batch):
        if len(taken) == step:
            raise KilledError
        taken.append(len(taken))
        return forward(self, batch)

    monkeypatch.setattr(distillation._Stage, "forward", counted)
    return taken


# 23 steps are one epoch, with a checkpoint every second step
@pytest.mark.parametrize(
    ("steps", "killed", "kept"), [(6, 0, 0), (6, 3, 3), (6, 6, 6), (6, 9, 9), (23, 5, 4)]
)
def test_a_killed_run_ends_with_the_same_weights(tmp_path, monkeypatch, steps, killed, kept):
    config = replace(FAST, layer_steps=steps, end_steps=steps)
    model, teacher = pair("primal-dual", dropout=0.2)
    straight = copy.deepcopy(model)
    want = distill(straight, teacher, batches(), config)
    with monkeypatch.context() as patch:
        dying_at(patch, killed)
        with pytest.raises(KilledError):
            distill(copy.deepcopy(model), teacher, batches(), config, folder=tmp_path)
    torch.manual_seed(99)
    again = copy.deepcopy(model)
    with monkeypatch.context() as patch:
        taken = dying_at(patch, None)
        got = distill(again, teacher, batches(), config, folder=tmp_path)
        assert len(taken) == 2 * steps - kept
        assert torch.equal(weights(again), weights(straight))
        for stage, history in want.history.items():
            losses = [record.loss for record in got.history[stage].records]
            assert losses == [record.loss for record in history.records]
        assert got.fitted == want.fitted
        # a finished run is only loaded
        loaded = copy.deepcopy(model)
        distill(loaded, teacher, batches(), config, folder=tmp_path)
        assert len(taken) == 2 * steps - kept
    assert torch.equal(weights(loaded), weights(straight))
    left = {p.suffix or p.name for p in tmp_path.rglob("*") if p.is_file()}
    assert left == {".csv", ".json", ".jsonl", ".safetensors", "SHA256SUMS"}


def test_checkpoints_hold_only_what_is_trained(tmp_path):
    model, teacher = pair()
    distill(model, teacher, batches(), FAST, folder=tmp_path)
    for stage in ("layers", "end"):
        saved = load_file(tmp_path / stage / "model" / "model.safetensors")
        assert sum(t.numel() for t in saved.values()) == sum(
            t.numel() for t in model.second.state_dict().values()
        )


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    model, teacher = pair()
    distill(copy.deepcopy(model), teacher, batches(), FAST, folder=tmp_path)
    with pytest.raises(CheckpointError, match="the training data had 6 items and have 2"):
        distill(model, teacher, batches(2), FAST, folder=tmp_path)
    others = [{**batch, "x": batch["x"] + 1} for batch in batches()]
    with pytest.raises(CheckpointError, match="the training data hold other items"):
        distill(model, teacher, others, FAST, folder=tmp_path)
    with pytest.raises(CheckpointError, match="objective was 'auto' and is 'hidden'"):
        distill(model, teacher, batches(), replace(FAST, objective="hidden"), folder=tmp_path)
    wider, teacher = pair("primal-dual", rank=4)
    with pytest.raises(CheckpointError, match="the model has other weights"):
        distill(wider, teacher, batches(), FAST, folder=tmp_path)
    path = tmp_path / "distill.json"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"distill\.json is not a complete checkpoint"):
        distill(model, teacher, batches(), FAST, folder=tmp_path)


def test_a_folder_that_another_process_distils_into_is_refused(tmp_path):
    model, teacher = pair()
    with locked(tmp_path), pytest.raises(UserError, match="is in use by process"):
        distill(model, teacher, batches(), FAST, folder=tmp_path)
    assert not (tmp_path / "distill.json").exists()


def test_models_that_publish_their_terms_themselves_are_trained_with_them():
    size = {"num_classes": 3, "num_features": 16, "dim": 16, "num_layers": 1}
    teacher = EncoderClassifier(EncoderConfig(attention="softmax", **size)).eval()
    model = copy.deepcopy(teacher)
    name = next(n for n, m in model.named_modules() if isinstance(m, Attention))
    model.set_submodule(name, create_attention("primal", 16, model.config.num_heads))
    done = distill(model, teacher, batches(), DistillConfig(layer_steps=2, end_steps=2))
    assert done.history["end"].records[-1].ksvd > 0


def test_the_callers_random_numbers_and_frozen_weights_stay():
    model, teacher = pair()
    model.first.q_proj.weight.requires_grad_(False)
    model.second.q_proj.weight.requires_grad_(False)
    frozen = model.second.q_proj.weight.clone()
    before = torch.get_rng_state()
    distill(model, teacher, batches(), FAST)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.first.q_proj.weight.requires_grad
    assert not model.second.q_proj.weight.requires_grad
    # all weights of converted layers are trained, also those that were frozen
    assert not torch.equal(model.second.q_proj.weight, frozen)


def test_plain_tensors_and_a_loss_of_ones_own_will_do():
    teacher = nn.Sequential(create_attention("softmax", 8, 2), nn.Linear(8, 3)).eval()
    model = copy.deepcopy(teacher)
    model[0] = create_attention("linear", 8, 2)
    seen = []

    def loss(answer, truth, batch):
        seen.append(batch.shape)
        return (answer - truth).abs().mean()

    data = [torch.randn(2, 6, 8) for _ in range(3)]
    config = DistillConfig(layer_steps=0, end_steps=4, closed_form=False)
    done = distill(model, teacher, data, config, loss=loss)
    assert seen == [(2, 6, 8)] * 4
    assert done.fitted == []


@pytest.mark.raw
def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="objective must be one of"):
        DistillConfig(objective="guess")
    with pytest.raises(ValueError, match="layer_lr must be positive"):
        DistillConfig(layer_lr=0)
    with pytest.raises(ValueError, match="fit_batches must be at least 1"):
        DistillConfig(fit_batches=0)
    with pytest.raises(ValueError, match="eta must not be negative"):
        DistillConfig(eta=-1)
    model, teacher = pair()
    with pytest.raises(ValueError, match="no batch"):
        distill(model, teacher, [])
    data = batches(2)
    config = DistillConfig(layer_steps=0, end_steps=1, objective="task")
    with pytest.raises(ValueError, match="needs a model that returns its loss"):
        distill(model, teacher, data, config)


def test_a_loss_that_is_no_number_stops_the_run():
    model, teacher = pair()
    data = batches(1)
    data[0]["x"][0, 0] = float("nan")
    with pytest.raises(NonFiniteLossError, match="Step 1 is not finite: loss nan"):
        distill(model, teacher, data, DistillConfig(closed_form=False))


def test_pictures_without_labels_teach_a_converted_vision_model():
    import timm

    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    teacher = timm.create_model("vit_tiny_patch16_224", num_classes=4, **sizes).eval()
    for block in teacher.blocks:
        block.attn.qkv.weight.data *= 20  # weights that an untrained model does not have yet
    model = copy.deepcopy(teacher)
    convert(model, SurgeryConfig("linear"))
    pictures = [torch.randn(4, 3, 32, 32) for _ in range(4)]
    before = layer_r2(model, teacher, pictures)
    config = DistillConfig(fit_batches=4, layer_steps=30, end_steps=2)
    done = distill(model, teacher, pictures, config)
    after = layer_r2(model, teacher, pictures)
    assert done.history["end"].records[-1].step == 2
    assert len(after) == 2
    assert all(after[name] > before[name] + 0.05 for name in before)
