"""ConvertedLayer models keep working with the tools around them."""

import copy
import logging
import subprocess
import sys

import pytest
import torch
from tests.surgery.conftest import IDS, KEEP, Encoder, hidden, text
from torch import nn

from primal_attention.attention import ksvd_loss, ksvd_terms
from primal_attention.hosts import ConversionError, converted_layers
from primal_attention.surgery import SurgeryConfig, convert, fold_output, save_converted

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["BertModel", "LlamaModel", "GPT2Model"])
@pytest.mark.parametrize("attention", ["primal", "primal-dual"])
def test_the_loss_term_is_collected_from_a_model_in_training(name, attention):
    model = text(name).train()
    convert(model, SurgeryConfig(attention))
    loss = hidden(model).square().mean()  # decoders make a cache here, as they do by default
    assert set(ksvd_terms(model)) == {f"{n}.attention" for n in converted_layers(model)}
    (loss + 0.1 * ksvd_loss(model)).backward()
    for layer in converted_layers(model).values():
        assert layer.attention.lam.grad is not None
        assert layer.attention.q_proj.weight.grad.isfinite().all()
    with pytest.raises(RuntimeError, match="no published term"):
        ksvd_loss(model)


@pytest.mark.parametrize("name", ["BertModel", "LlamaModel"])
def test_gradient_checkpointing_changes_no_gradient(name):
    grads = []
    for checkpointing in (False, True):
        model = text(name, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
        torch.manual_seed(1)
        convert(model, SurgeryConfig("primal-dual"))
        if checkpointing:
            model.gradient_checkpointing_enable()
        loss = hidden(model, use_cache=False).square().mean() + ksvd_loss(model)
        loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for key, grad in grads[0].items():
        torch.testing.assert_close(grads[1][key], grad, atol=1e-5, rtol=1e-4, msg=key)


def test_the_trainer_trains_with_the_loss_term(tmp_path, monkeypatch):
    pytest.importorskip("accelerate")

    class Trainer(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            if model.training:
                loss = loss + 0.01 * ksvd_loss(model)
            return (loss, outputs) if return_outputs else loss

    model = text("BertForSequenceClassification", num_labels=2).train()
    convert(model, SurgeryConfig("primal", layers="last:2"))
    before = copy.deepcopy(model.state_dict())
    rows = [
        {"input_ids": ids, "attention_mask": keep.long(), "labels": int(ids[0]) % 2}
        for ids, keep in zip(IDS, KEEP, strict=True)
    ]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        save_steps=3,
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    logging.disable(logging.CRITICAL)
    trainer.train()
    assert "eval_loss" in trainer.evaluate()
    logging.disable(logging.NOTSET)
    changed = [k for k, v in model.state_dict().items() if not torch.equal(v, before[k])]
    assert any(".attention.w_e" in k for k in changed)
    assert (tmp_path / "checkpoint-3" / "model.safetensors").exists()


def test_adapters_learn_on_a_converted_model():
    peft = pytest.importorskip("peft")
    model = text("BertModel")
    convert(model, SurgeryConfig("primal-dual"))
    before = hidden(model)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"], lora_alpha=4)
    adapted = peft.get_peft_model(model, config)
    torch.testing.assert_close(
        adapted(IDS, attention_mask=KEEP.long()).last_hidden_state[KEEP], before
    )
    adapted.train()
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        y = adapted(IDS, attention_mask=KEEP.long()).last_hidden_state[KEEP]
        (y.square().mean() + ksvd_loss(adapted)).backward()
        optimizer.step()
    trained = [n for n, p in adapted.named_parameters() if p.grad is not None]
    assert trained
    assert all("lora_" in n for n in trained)
    merged = adapted.eval().merge_and_unload()
    assert not torch.allclose(hidden(merged), before, atol=1e-4)
    assert type(merged.encoder.layer[0].attention.self.attention.q_proj) is nn.Linear


def test_adapters_are_merged_before_converting(same_as_before):
    peft = pytest.importorskip("peft")
    model = text("LlamaModel")
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), model)
    unchanged = same_as_before(model)
    with pytest.raises(ConversionError, match=r"q_proj is not a plain .* merge"):
        convert(model, SurgeryConfig("linear"))
    unchanged()


@pytest.mark.slow
@pytest.mark.raw
@pytest.mark.parametrize(
    ("attention", "backend"),
    # the contract compiles every mechanism; here the shells matter
    [*((a, "aot_eager") for a in ("primal", "primal-dual", "linear")), ("primal-dual", "inductor")],
)
@pytest.mark.parametrize("name", ["BertModel", "LlamaModel", "GPT2Model"])
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_compiled_models_agree(name, attention, backend):
    model = text(name, num_hidden_layers=1)
    convert(model, SurgeryConfig(attention))
    before = hidden(model, use_cache=False)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(hidden(compiled, use_cache=False), before, atol=1e-5, rtol=1e-4)
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.raw
@pytest.mark.filterwarnings("ignore")
def test_compiled_training_collects_the_loss_term():
    grads = []
    for compiled in (False, True):
        sizes = {"num_hidden_layers": 1, "hidden_dropout_prob": 0.0}
        model = text("BertModel", **sizes).train()
        torch.manual_seed(1)
        convert(model, SurgeryConfig("primal"))
        run = torch.compile(model, backend="aot_eager") if compiled else model
        (hidden(run).square().mean() + ksvd_loss(model)).backward()
        grads.append(model.encoder.layer[0].attention.self.attention.w_e.grad)
    torch.testing.assert_close(grads[1], grads[0], atol=1e-5, rtol=1e-3)
    torch.compiler.reset()


class Hidden(nn.Module):
    """A model reduced to two tensors in and one out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, keep):
        return self.model(ids, attention_mask=keep, use_cache=False).last_hidden_state


@pytest.mark.slow
@pytest.mark.raw
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["BertModel", "LlamaModel"])
@pytest.mark.parametrize("attention", ["primal", "primal-dual", "linear", "softmax"])
@torch.no_grad()
def test_onnx_runs_other_batches_and_lengths(name, attention, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = text(name, num_hidden_layers=1)
    convert(model, SurgeryConfig(attention))
    model = Hidden(model).eval()
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", min=2, max=64)
    program = torch.onnx.export(
        model,
        (IDS, KEEP.long()),
        dynamo=True,
        dynamic_shapes=({0: batch, 1: length},) * 2,
        verbose=False,
    )
    program.save(str(tmp_path / "model.onnx"))
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    first, second = (i.name for i in session.get_inputs())
    for b, n in ((3, 9), (1, 5), (4, 23)):
        ids = torch.randint(3, 50, (b, n))
        keep = torch.arange(n).expand(b, -1) < torch.randint(2, n + 1, (b, 1))
        keep[0] = True
        (got,) = session.run(None, {first: ids.numpy(), second: keep.long().numpy()})
        want = model(ids, keep.long())
        torch.testing.assert_close(torch.from_numpy(got)[keep], want[keep], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("attention", ["primal", "primal-dual", "primal-static"])
@pytest.mark.parametrize("name", ["BertModel", "LlamaModel", "GPT2Model"])
@torch.no_grad()
def test_folded_outputs_compute_the_same(attention, name, tmp_path):
    if attention == "primal-static" and name == "BertModel":
        return
    for rank in (3, 8):
        model = text(name)
        convert(model, SurgeryConfig(attention, {"rank": rank}, layers="last:2"))
        for layer in converted_layers(model).values():
            layer.attention.concat.weight.normal_()
        before = hidden(model)
        assert fold_output(model) == 2
        torch.testing.assert_close(hidden(model), before, atol=1e-5, rtol=1e-4)
        with pytest.raises(ConversionError, match="no primal layer"):
            fold_output(model)
        with pytest.raises(ConversionError, match="save the model before fold_output"):
            save_converted(model, tmp_path)


def test_there_is_nothing_to_fold_in_other_attentions():
    model = text("BertModel")
    convert(model, SurgeryConfig("linear"))
    with pytest.raises(ConversionError, match="no primal layer"):
        fold_output(model)


@torch.no_grad()
def test_decoding_continues_where_the_prompt_ended():
    for name in ("LlamaForCausalLM", "GPT2LMHeadModel"):
        for attention in ("primal-dual", "linear", "softmax"):
            for layers in ("all", "last:1"):
                model = text(name)
                convert(model, SurgeryConfig(attention, layers=layers))
                whole = model(IDS, use_cache=False).logits
                first = model(IDS[:, :6], use_cache=True)
                second = model(IDS[:, 6:], past_key_values=first.past_key_values)
                got = torch.cat([first.logits, second.logits], 1)
                torch.testing.assert_close(got, whole, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_torch_models_compile_and_copy(tokens):
    model = Encoder(batch_first=True)
    convert(model, SurgeryConfig("primal-dual"))
    twin = copy.deepcopy(model)
    assert torch.equal(twin(tokens), model(tokens))


def test_a_torchvision_that_does_not_fit_is_named():
    # without the finder of our own environment, torchvision fails beside a CPU torch
    code = (
        "import sys\n"
        "sys.meta_path = [f for f in sys.meta_path if type(f).__name__ != 'TorchvisionFinder']\n"
        "from primal_attention.hosts.optional import require_transformers\n"
        "try: require_transformers()\n"
        "except ImportError as error: print(error)\n"
        "else: print('fits')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if done.stdout.strip() == "fits":
        pytest.skip("torch and torchvision come from one index here")
    assert "transformers cannot be imported, because torchvision" in done.stdout
    assert "Uninstall torchvision, or install both from one index" in done.stdout
    assert "not installed" not in done.stdout
