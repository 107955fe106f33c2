"""Attention layers of this library inside any model: their inputs, weights and scores."""

import copy
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.attention import Attention, MultiHeadAttention, PrimalAttention
from primal_attention.attention.kernel_problem import pose_on_tokens
from primal_attention.hosts.captured import CapturedLayer, CapturedScores
from primal_attention.hosts.inputs import LayerInputs
from primal_attention.hosts.recording import record_run

__all__ = ["OwnLayer", "layer_inputs"]


def layer_inputs(model: nn.Module, *args: object, **kwargs: object) -> dict[str, LayerInputs]:
    """Return the inputs of every attention layer of this library, in the order of the forward.

    The forward runs in evaluation mode. If it calls a layer twice, the last call counts.

    Example:
        >>> from primal_attention.attention import create_attention
        >>> layer_inputs(create_attention("softmax", 8, 2), torch.randn(1, 5, 8))[""].x.shape
        torch.Size([1, 5, 8])
    """
    names = [name for name, module in model.named_modules() if isinstance(module, Attention)]
    calls = record_run(model, names, *args, **kwargs)
    return {name: LayerInputs.of_call(call.args, call.kwargs) for name, call in calls.items()}


class OwnLayer(CapturedLayer):
    """A layer of this library, known by its inputs."""

    def __init__(self, layer: Attention, inputs: LayerInputs) -> None:
        self.layer, self.inputs = layer, inputs
        self.num_heads, self.head_dim = layer.num_heads, layer.head_dim
        self.is_causal = inputs.is_causal
        self.has_weights = isinstance(layer, MultiHeadAttention)
        memory = inputs.x if inputs.context is None else inputs.context
        every = torch.ones(memory.shape[:2], dtype=torch.bool)
        self.keep = every if inputs.key_mask is None else inputs.key_mask
        alone = torch.ones(inputs.x.shape[:2], dtype=torch.bool)
        self.query_keep = self.keep if inputs.context is None else alone
        self._matrix: dict[int, Tensor] = {}

    def _doubles(self, sequence: int) -> tuple[LayerInputs, Any]:
        """Return the inputs of one sequence, and a copy of the layer, in float64."""
        inputs = self.real_inputs(sequence)
        context = None if inputs.context is None else inputs.context.double()
        # a copy: the layer of the user stays in its type
        layer = copy.deepcopy(self.layer).double().eval()  # type: ignore[union-attr]
        return inputs._replace(x=inputs.x.double(), context=context), layer

    @torch.no_grad()
    def _rows(self, sequence: int, rows: slice) -> Float[Tensor, "h rows m"]:
        # a mechanism may couple its queries, so the matrix is computed as a whole
        if sequence not in self._matrix:
            inputs, layer = self._doubles(sequence)
            self._matrix = {sequence: inputs.matrices(layer)[0].double()}
        return self._matrix[sequence][:, rows]

    @torch.no_grad()
    def values(self, sequence: int = 0) -> Float[Tensor, "h m v"]:
        """Return the values of the real keys, one set for each query head."""
        self._check_weights()
        inputs, layer = self._doubles(sequence)
        memory = inputs.x if inputs.context is None else inputs.context
        v = layer.v_proj(memory)[0].unflatten(-1, (layer.kv_heads, -1)).transpose(0, 1)
        return v.repeat_interleave(layer.num_heads // layer.kv_heads, 0)

    @torch.no_grad()
    def scores(self, sequence: int = 0) -> CapturedScores:
        """Return the scores of a primal layer: ``O(n s)`` memory, no ``n × n`` matrix."""
        if not isinstance(self.layer, PrimalAttention):
            return super().scores(sequence)
        if self.is_causal and self.layer.weights == "data":
            raise ValueError(
                f"{self.name} has causal weights='data': its kernel changes with every token, so "
                "it has no scores of one kernel. Use another layer, or call it without a mask."
            )
        (x, context, *_), layer = self._doubles(sequence)
        problem = pose_on_tokens(layer, x, context, None, is_causal=self.is_causal)
        w_e, w_r = problem.weights.double().chunk(2, dim=1)
        q, k = problem.queries.inputs, problem.keys.inputs
        if context is not None and layer.weights == "dual":
            # dual weights pose the problem on the context; the scores are those of the queries
            q = layer.project_heads(x).chunk(2, dim=1)[0]
        e, r = (
            nn.functional.normalize(t.double(), dim=-1, eps=problem.eps) @ w
            for t, w in ((q, w_e), (k, w_r))
        )
        return CapturedScores(e[0], r[0], problem.ell.double().square())
