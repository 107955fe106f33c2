"""Decode token by token with a state that does not grow.

A causal layer reads a prompt at once and the following tokens one by one. The outputs equal those
of the whole sequence.
"""

import torch

import primal_attention as pa

torch.manual_seed(0)
layer = pa.create_attention("primal-dual", 32, 4, rank=8).eval()
x = torch.randn(1, 200, 32)
with torch.no_grad():
    expected = layer(x, is_causal=True)
    y, state = layer.step(x[:, :100], layer.init_state(1))
    outputs, sizes = [y], [state.numel]
    for t in range(100, 200):
        y, state = layer.step(x[:, t : t + 1], state)
        outputs.append(y)
        sizes.append(state.numel)
torch.testing.assert_close(torch.cat(outputs, 1), expected, atol=1e-4, rtol=1e-4)
print(f"numbers in the state after 100 tokens: {sizes[0]}, after 200: {sizes[-1]}")
