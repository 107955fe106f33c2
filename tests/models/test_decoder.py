"""The causal decoder: no future, steps equal the whole, constant state, generation."""

import pytest
import torch
from tests.house.rows import each

import primal_attention as pa
from primal_attention.models import CausalDecoder, DecoderConfig

CAUSAL = pa.list_attentions(causal=True, stateful=True)
CONSTANT = ("linear", "primal", "primal-dual", "primal-static")


def decoder(**changes) -> CausalDecoder:
    torch.manual_seed(0)
    base = {"vocab_size": 11, "dim": 16, "num_heads": 2, "dropout": 0.0}
    return CausalDecoder(DecoderConfig(**{**base, **changes})).eval()


def ids(b: int = 2, n: int = 9) -> torch.Tensor:
    return torch.randint(11, (b, n))


@pytest.mark.parametrize("name", CAUSAL)
def test_logits_do_not_depend_on_later_tokens(name):
    model, x = decoder(attention=name), ids()
    changed = x.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    before, after = model(x).logits, model(changed).logits
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert (before[:, 5:] - after[:, 5:]).abs().max() > 1e-4


@pytest.mark.parametrize("name", CAUSAL)
@each("sizes", [(9,), (4, 1, 1, 3)])
def test_steps_equal_the_whole_sequence(name, sizes):
    model, x = decoder(attention=name), ids()
    state, found = model.init_state(2), []
    for part in x.split(sizes, dim=1):
        logits, state = model.step(part, state)
        found.append(logits)
    torch.testing.assert_close(torch.cat(found, 1), model(x).logits, atol=1e-4, rtol=1e-4)


@each("positions", ["learned", "rotary", "none"])
@each("norm", ["pre", "post"])
def test_steps_equal_the_whole_sequence_for_all_positions_and_norms(positions, norm):
    length = {"max_length": 12} if positions == "learned" else {}
    model = decoder(attention="primal-dual", positions=positions, norm=norm, **length)
    x, state = ids(), model.init_state(2)
    first, state = model.step(x[:, :4], state)
    rest, _ = model.step(x[:, 4:], state)
    torch.testing.assert_close(torch.cat([first, rest], 1), model(x).logits, atol=1e-4, rtol=1e-4)


@each("positions", ["sinusoidal", "rotary"])
@pytest.mark.parametrize("name", ["softmax", "primal-dual"])
def test_left_padding_is_invisible(name, positions):
    model, x = decoder(attention=name, positions=positions), ids(1, 6)
    padded = torch.cat([torch.full((1, 3), -1), x], 1)
    keep = torch.arange(9)[None] >= 3
    plain = model(x).logits
    torch.testing.assert_close(model(padded, key_mask=keep).logits[:, 3:], plain)
    logits, state = model.step(padded, model.init_state(1), key_mask=keep)
    torch.testing.assert_close(logits[:, 3:], plain, atol=1e-5, rtol=1e-4)
    assert state.seen.tolist() == [6]
    torch.testing.assert_close(
        model.generate(padded, 4, key_mask=keep)[:, 3:], model.generate(x, 4)
    )


@pytest.mark.parametrize("name", CONSTANT)
def test_state_of_linear_attention_does_not_grow(name):
    model = decoder(attention=name)
    _, short = model.step(ids(1, 3), model.init_state(1))
    _, long = model.step(ids(1, 200), short)
    assert short.numel == long.numel


def test_softmax_state_grows_with_every_token():
    model = decoder(attention="softmax")
    _, short = model.step(ids(1, 3), model.init_state(1))
    _, long = model.step(ids(1, 5), short)
    assert long.numel > short.numel


def test_reordered_state_continues_the_chosen_sequences():
    model, x = decoder(), ids(3, 7)
    _, state = model.step(x[:, :4], model.init_state(3))
    order = torch.tensor([2, 0])
    found, _ = model.step(x[order, 4:], state.reorder(order))
    torch.testing.assert_close(found, model(x).logits[order, 4:], atol=1e-5, rtol=1e-4)


def test_a_reordered_state_keeps_the_position_of_each_sequence():
    model, x = decoder(), ids(2, 5)
    keep = torch.arange(5) >= torch.tensor([[0], [3]])
    _, state = model.step(x, model.init_state(2), key_mask=keep)
    order = torch.tensor([1])
    other = state.reorder(order)
    assert other.seen.tolist() == [2]
    assert other.numel == 1 + sum(layer.numel for layer in other.layers)
    found, _ = model.step(x[order, :1], other)
    whole = torch.cat([x[1:, 3:], x[order, :1]], dim=1)
    torch.testing.assert_close(found[:, 0], model(whole).logits[:, -1], atol=1e-5, rtol=1e-4)


def test_generation_may_reach_the_last_learned_position():
    model = decoder(positions="learned", max_length=6)
    assert model.generate(ids(1, 4), 2).shape == (1, 6)


def test_embeddings_start_as_rows_of_length_one():
    rows = decoder(vocab_size=2000).embed.weight.norm(dim=1)
    assert rows.square().mean().item() == pytest.approx(1.0, abs=0.05)


def test_greedy_generation_takes_the_likeliest_next_token():
    model, x = decoder(), ids(2, 3)
    made = model.generate(x, 5)
    assert made.shape == (2, 8)
    torch.testing.assert_close(made[:, :3], x)
    for n in range(3, 8):
        torch.testing.assert_close(made[:, n], model(made[:, :n]).logits[:, -1].argmax(-1))


def test_sampling_is_reproducible_and_follows_the_temperature():
    model, x = decoder(), ids(1, 3)
    draws = [
        model.generate(x, 20, temperature=t, generator=torch.Generator().manual_seed(s))
        for t, s in ((1.0, 1), (1.0, 1), (1.0, 2), (1e-6, 3))
    ]
    assert draws[0].equal(draws[1])
    assert not draws[0].equal(draws[2])
    assert draws[3].equal(model.generate(x, 20))


def test_a_decoder_learns_to_count():
    model = decoder(attention="primal-dual", dim=32).train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    text = (torch.arange(12) + torch.arange(8)[:, None]) % 11
    for _ in range(40):
        output = model(text[:, :-1])
        task = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        (task + 0.01 * pa.ksvd_loss(model)).backward()
        optimizer.step()
    assert model.eval().generate(torch.tensor([[4, 5, 6]]), 6).tolist() == [
        [4, 5, 6, 7, 8, 9, 10, 0, 1]
    ]


def test_terms_of_the_decoder_are_published_once():
    model = decoder(num_layers=2).train()
    output = model(ids())
    torch.testing.assert_close(output.aux_loss, pa.ksvd_loss(model))


@pytest.mark.parametrize("name", ["favor", "gaussian", "primal-dual", "schoenbat", "softmax"])
def test_rotary_decoders_learn_nothing_from_absolute_positions(name):
    # a prefix of real tokens moves all positions by its length; its content is masked out
    model, x = decoder(attention=name, positions="rotary", num_layers=1), ids(1, 6)
    block = model.blocks[0]
    tokens = model.embed(x)
    with torch.no_grad():
        found = [
            block(tokens, is_causal=True, rotary=model._rotary(torch.arange(6)[None] + start))
            for start in (0, 5)
        ]
    # random features keep it in expectation only
    tolerance = 0.3 if name in ("favor", "schoenbat") else 1e-5
    assert (found[0] - found[1]).norm() <= tolerance * found[0].norm()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax", "primal-dual"])
@torch.no_grad()
def test_a_compiled_decoder_reads_and_steps_like_the_eager_one(name):
    torch._dynamo.reset()
    model = decoder(attention=name, positions="rotary")
    forward = torch.compile(model, backend="aot_eager", fullgraph=True)
    step = torch.compile(model.step, backend="aot_eager", fullgraph=True)
    x = ids()
    expected = model(x).logits
    torch.testing.assert_close(forward(x).logits, expected, atol=1e-5, rtol=1e-4)
    first, state = step(x[:, :5], model.init_state(2))
    second, _ = step(x[:, 5:], state)
    found = torch.cat([first, second], 1)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_checkpointed_decoder_has_the_same_gradients():
    x, grads = ids(), []
    for checkpointing in (False, True):
        model = decoder(
            attention="primal-dual", positions="rotary", checkpointing=checkpointing
        ).train()
        loss = model(x).logits.square().mean() + pa.ksvd_loss(model)
        loss.backward()
        grads.append({k: p.grad for k, p in model.named_parameters()})
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.raw
@each(
    "changes, message",
    [
        ({"attention": "nystromformer"}, "'nystromformer' cannot run causally.*primal-dual"),
        ({"other_attention": "linformer", "primal_layers": "last:1"}, "'linformer' cannot run"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
        ({"positions": "rotary"}, "Rotary positions need an attention that compares tokens"),
        ({"positions": "learned"}, "need max_length"),
        ({"max_length": 5}, "only they have one"),
        ({"positions": "relative"}, "positions must be one of sinusoidal"),
        ({"norm": "both"}, "norm must be one of pre, post"),
    ],
)
def test_bad_decoders_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        decoder(**changes)


def test_steps_end_at_the_last_learned_position():
    model, x = decoder(positions="learned", max_length=6), ids(2, 6)
    logits, state = model.step(x, model.init_state(2))
    torch.testing.assert_close(logits, model(x).logits, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match=r"has 7 tokens, .* end at max_length=6; stop there, or"):
        model.step(x[:, :1], state)
    # padding needs no position
    padding = torch.zeros(2, 1, dtype=torch.bool)
    _, same = model.step(x[:, :1], state, key_mask=padding)
    assert same.seen.tolist() == [6, 6]
    one = torch.tensor([[True], [False]])
    with pytest.raises(ValueError, match="has 7 tokens"):
        model.step(x[:, :1], state, key_mask=one)


@pytest.mark.raw
def test_bad_requests_are_refused():
    model = decoder(positions="learned", max_length=6)
    with pytest.raises(ValueError, match="positions end at max_length=6"):
        model(ids(1, 7))
    with pytest.raises(ValueError, match="have 8 tokens"):
        model.generate(ids(1, 4), 4)
    with pytest.raises(ValueError, match="at least one token"):
        model.generate(ids(1, 0), 4)
    with pytest.raises(ValueError, match="temperature"):
        model.generate(ids(1, 2), 1, temperature=-1.0)
    with pytest.raises(ValueError, match="pad on the left"):
        model.generate(ids(1, 2), 1, key_mask=torch.tensor([[True, False]]))
    with pytest.raises(ValueError, match="token ids"):
        model(torch.randn(2, 9))
