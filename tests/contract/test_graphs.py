"""Compiled, exported and checkpointed layers give the same numbers, at every length."""

import contextlib

import pytest
import torch
from tests.contract.cases import masked_modes
from torch.utils.checkpoint import checkpoint

from primal_attention.attention import ksvd_loss, ksvd_terms

LENGTHS = (7, 12, 70, 200)
LONG_SUMS = {"kernelized", "kernelized-log", "schoenbat"}
"""Their sums pass 4,096 terms within these lengths, where inductor's C++ makes another program."""


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _train(layer, call, arguments):
    """Return output, regularizer and gradients of one training step."""
    layer.zero_grad()
    torch.manual_seed(2)
    y = call(**arguments)
    loss = ksvd_loss(layer) if layer.capabilities.aux_loss else y.new_zeros(())
    (y.square().mean() + loss).backward()
    grads = [p.grad for p in layer.parameters() if p.grad is not None]
    return [y.detach(), loss.detach(), *grads]


def _compiles(case, backend):
    layer = case.build().train()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for i, n in enumerate(LENGTHS):
        arguments = case.inputs(b=2 + i, n=n, m=n // 2 + 1)
        expected = _train(layer, layer, arguments)
        # the first call compiles; from then on one program serves every batch and length
        strict = torch._dynamo.config.patch(error_on_recompile=True)
        is_strict = i and not (backend == "inductor" and case.name in LONG_SUMS)
        with strict if is_strict else contextlib.nullcontext():
            got = _train(layer, compiled, arguments)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_t20_one_captured_program_trains_at_every_length(plain_case):
    _compiles(plain_case, "eager")


@pytest.mark.slow
def test_t20_one_captured_program_trains_at_every_length_in_every_mode(graph_case):
    _compiles(graph_case, "aot_eager")


@pytest.mark.slow
# the compiler warns about calls inside itself, and that it leaves transforms as they are
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:Torchinductor does not support code generation for complex operators",
)
def test_t20_one_compiled_program_trains_at_every_length(plain_case):
    _compiles(plain_case, "inductor")


def _exports(case):
    layer, arguments = case.build().eval(), case.inputs(b=3, n=9, m=6)
    batch = torch.export.Dim("b")
    # an exported grid serves whole rows only; docs/reference/attention/kernelized.md says so
    row = case.options.get("width", 1)
    n, m = (row * torch.export.Dim(name, **case.lengths) for name in "nm")
    keys = m if "context" in arguments else n
    dynamic = {"x": {0: batch, 1: n}, "context": {0: batch, 1: m}, "key_mask": {0: batch, 1: keys}}
    shapes = {k: dynamic.get(k) for k in arguments}
    program = torch.export.export(layer, (), arguments, dynamic_shapes=shapes)
    for b, *lengths in ((2, 5, 4), (4, 40, 50), (5, 130, 2)):
        length, memory = (-(-count // row) * row for count in lengths)
        other = case.inputs(b=b, n=length, m=memory)
        torch.testing.assert_close(program.module()(**other), layer(**other), atol=1e-6, rtol=1e-5)


def test_t20_exports_with_dynamic_batch_and_length(plain_case):
    _exports(plain_case)


@pytest.mark.slow
def test_t20_exports_with_dynamic_batch_and_length_in_every_mode(graph_case):
    _exports(graph_case)


@masked_modes
def test_t21_checkpointing_keeps_every_gradient(mode_case):
    layer, arguments = mode_case.build().train(), mode_case.inputs()
    expected = _train(layer, layer, arguments)

    def saving(**given):
        return checkpoint(layer, **given, use_reentrant=False)

    got = _train(layer, saving, arguments)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    assert ksvd_terms(layer) == {}


def test_t21_reentrant_checkpointing_is_refused(aux_case):
    layer = aux_case.build().train()
    x = torch.randn(2, 5, 16, requires_grad=True)
    checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        ksvd_loss(layer)
