"""Padding influences nothing, whatever it holds and wherever it sits."""

import torch

N = 9
KEEPS = {
    "right": [[1, 1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1]],
    "left": [[0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1, 1]],
    "interior": [[1, 0, 1, 1, 0, 0, 1, 1, 0], [0, 1, 0, 1, 0, 1, 0, 1, 0]],
    "empty": [[0, 0, 0, 0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0, 0]],
}
KEEP = torch.tensor([row for rows in KEEPS.values() for row in rows], dtype=torch.bool)
"""All of them as one batch: sequences of a batch do not influence each other."""
B = len(KEEP)


def _poisoned(x):
    """Return ``x`` with NaN, infinity and a large number in turn in the slots of padding."""
    poison = torch.tensor([float("nan"), float("inf"), -1e30])
    turn = (~KEEP).flatten().cumsum(0).view(KEEP.shape) % 3
    return torch.where(KEEP[:, :, None], x, poison[turn][:, :, None])


def _modes(case):
    return [{}, {"is_causal": True}] if case.capabilities.causal else [{}]


def test_t10_a_padded_batch_is_a_loop_over_unpadded_sequences(padding_case):
    layer = padding_case.build(dtype=torch.float64).eval()
    x = torch.randn(B, N, 16, dtype=torch.float64)
    for flags in _modes(padding_case):
        y = layer(x, key_mask=KEEP, **flags)
        for i, keep in enumerate(KEEP):
            if padding_case.stands_alone(keep):
                torch.testing.assert_close(y[i, keep], layer(x[i : i + 1, keep], **flags)[0])
        assert (y[~KEEP] == 0).all()


def test_t10_the_regularizer_of_a_padded_batch_is_that_of_unpadded_sequences(aux_case):
    layer = aux_case.build(dtype=torch.float64)
    x = torch.randn(B, N, 16, dtype=torch.float64)
    for flags in _modes(aux_case):
        loss = layer(x, key_mask=KEEP, return_aux=True, **flags)[1].loss
        alone = [
            layer(x[i : i + 1, keep], return_aux=True, **flags)[1].loss
            for i, keep in enumerate(KEEP)
            if keep.any()
        ]
        torch.testing.assert_close(loss, torch.stack(alone).mean())


def test_t09_nothing_in_a_padded_slot_reaches_output_gradient_or_loss(padding_case):
    layer = padding_case.build().train()
    x = torch.randn(B, N, 16)
    has_loss = layer.capabilities.aux_loss
    for flags in _modes(padding_case):
        results = []
        for tokens in (x, _poisoned(x)):
            layer.zero_grad()
            leaf = tokens.clone().requires_grad_()
            torch.manual_seed(2)
            y = layer(leaf, key_mask=KEEP, return_aux=has_loss, **flags)
            y, loss = (y[0], y[1].loss) if has_loss else (y, y.new_zeros(()))
            (y.square().sum() + loss).backward()
            grads = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
            results.append([y.detach(), loss.detach(), leaf.grad, *grads])
        for clean, dirty in zip(*results, strict=True):
            assert dirty.isfinite().all()
            assert torch.equal(clean, dirty)
        assert (results[0][2][~KEEP] == 0).all()


def test_nothing_in_a_padded_slot_of_the_memory_reaches_the_result(cross_case):
    layer = cross_case.build().eval()
    x, context = torch.randn(B, 4, 16), torch.randn(B, N, 16)
    leaf = _poisoned(context).requires_grad_()
    y = layer(x, leaf, key_mask=KEEP)
    assert torch.equal(y, layer(x, context, key_mask=KEEP))
    y.sum().backward()
    assert leaf.grad.isfinite().all()
    assert (leaf.grad[~KEEP] == 0).all()
    for i, keep in enumerate(KEEP):
        if cross_case.stands_alone(keep):
            alone = layer(x[i : i + 1], context[i : i + 1, keep])
            torch.testing.assert_close(y[i : i + 1], alone, atol=1e-6, rtol=1e-5)


def test_an_all_true_mask_is_no_mask(padding_case):
    layer, x = padding_case.build().eval(), torch.randn(2, N, 16)
    everything = torch.ones(2, N, dtype=torch.bool)
    for flags in _modes(padding_case):
        y = layer(x, key_mask=everything, **flags)
        torch.testing.assert_close(y, layer(x, **flags), atol=1e-6, rtol=1e-5)


def test_a_batch_of_only_padding_is_zero_with_zero_gradient(padding_case):
    layer = padding_case.build().train()
    x = torch.full((2, N, 16), float("nan"), requires_grad=True)
    nothing = torch.zeros(2, N, dtype=torch.bool)
    has_loss = layer.capabilities.aux_loss
    for flags in _modes(padding_case):
        y = layer(x, key_mask=nothing, return_aux=has_loss, **flags)
        y, loss = (y[0], y[1].loss) if has_loss else (y, 0.0)
        (y.sum() + loss).backward()
        assert (y == 0).all()
        assert (x.grad == 0).all()
        assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


def test_a_nan_in_a_real_token_shows(any_case):
    layer, x = any_case.build().eval(), torch.randn(2, N, 16)
    x[0, 4, 3] = float("nan")
    y = layer(x)
    assert y[0, 4].isnan().all()
    assert y[1].isfinite().all()
