"""A causal decoder that models language, and generates with a state of constant size."""

from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.types import Device

from primal_attention.attention import State
from primal_attention.models.base import ModelOutput
from primal_attention.models.config import DecoderConfig
from primal_attention.models.sequence import SequenceModel

__all__ = ["CausalDecoder", "DecoderState"]


class DecoderState(NamedTuple):
    """Decoding state after the tokens read so far. Never changed in place."""

    layers: tuple[State, ...]
    """The state of every block's attention."""
    seen: Int[Tensor, " b"]
    """Real tokens read so far, per sequence."""

    def reorder(self, index: Int[Tensor, " k"]) -> "DecoderState":
        """Return the state of the sequences in ``index``, as beam search needs it."""
        layers = tuple(layer.reorder(index) for layer in self.layers)
        return DecoderState(layers, self.seen.index_select(0, index))

    @property
    def numel(self) -> int:
        """Numbers in the state."""
        return self.seen.numel() + sum(layer.numel for layer in self.layers)


class CausalDecoder(SequenceModel):
    """Predict the next token at every position; input and output embedding are one matrix.

    ``step`` continues a sequence from a state. With linear attentions that state has a constant
    size at any length; softmax attention keeps every token.

    Args:
        config: Configuration of the model.
        device: Where to create the parameters.
        dtype: Type of the parameters.

    Example:
        >>> model = CausalDecoder(DecoderConfig(vocab_size=20, dim=16, num_heads=2)).eval()
        >>> prompt = torch.randint(20, (1, 5))
        >>> model(prompt).logits.shape
        torch.Size([1, 5, 20])
        >>> model.generate(prompt, 3).shape
        torch.Size([1, 8])
    """

    config_class: ClassVar[type[DecoderConfig]] = DecoderConfig
    config: DecoderConfig
    embed: nn.Embedding

    def __init__(
        self, config: DecoderConfig, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(
            config, vocab_size=config.vocab_size, is_causal=True, device=device, dtype=dtype
        )
        # rows of length one: scaled up to unit entries as inputs, logits of order one as outputs
        nn.init.normal_(self.embed.weight, std=config.dim**-0.5)
        self.embed_scale = config.dim**0.5

    def forward(
        self,
        x: Int[Tensor, "b n"],
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        document_ids: Int[Tensor, "b n"] | None = None,
        return_hidden: bool = False,
    ) -> ModelOutput:
        """Return the logits ``[b n vocab]`` of the token after each position.

        Args:
            x: Token ids.
            key_mask: ``True`` where a token is real; the content of the other slots is ignored.
            document_ids: Document of each token, if rows hold several; no document sees another.
            return_hidden: Also return the stream after the last block.
        """
        hidden, aux_loss = self.encode(x, key_mask, document_ids)
        return ModelOutput(self._logits(hidden), aux_loss, hidden if return_hidden else None)

    def init_state(self, batch_size: int) -> DecoderState:
        """Return the state before the first token."""
        seen = torch.zeros(batch_size, dtype=torch.long, device=self.embed.weight.device)
        return DecoderState(self.blocks.init_state(batch_size), seen)

    def step(
        self,
        x: Int[Tensor, "b t"],
        state: DecoderState,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t vocab"], DecoderState]:
        """Read the next ``t`` tokens; return the logits after each, and the new state.

        The logits are those of ``forward`` over everything read so far. With learned positions a
        sequence ends at ``max_length`` real tokens; more raise a ``ValueError``.

        Args:
            x: The new token ids: the whole prompt to begin with, then one at a time.
            state: From ``init_state`` or the last ``step``; it is not changed.
            key_mask: ``True`` where a new token is real, for prompts padded on the left.
        """
        self._check(x, key_mask)
        real = torch.ones_like(x, dtype=torch.bool) if key_mask is None else key_mask
        seen = state.seen + real.sum(1)
        if self.config.max_length is not None:
            _check_seen(seen, self.config.max_length)
        # padding has the position of the token before it
        position = (state.seen[:, None] + real.cumsum(1) - 1).clamp_min(0)
        y, layers = self.blocks.step(
            self._embed(x, position, key_mask),
            state.layers,
            key_mask=key_mask,
            rotary=self._rotary(position),
        )
        return self._logits(self.norm(y)), DecoderState(layers, seen)

    @torch.no_grad()
    def generate(
        self,
        prompt: Int[Tensor, "b n"],
        max_new_tokens: int,
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Int[Tensor, "b total"]:
        """Return the prompt continued by ``max_new_tokens`` tokens.

        Args:
            prompt: Token ids; pad shorter prompts on the left.
            max_new_tokens: How many tokens to add.
            key_mask: ``True`` where a token of the prompt is real.
            temperature: Zero takes the likeliest token; else logits are divided by it, and tokens
                drawn.
            generator: What to draw with; by default torch's own.
        """
        if prompt.dim() != 2 or prompt.shape[1] == 0:
            raise ValueError(
                f"prompt must have shape [batch, tokens] with at least one token, got "
                f"{tuple(prompt.shape)}; begin with a token that starts a text."
            )
        if temperature < 0:
            raise ValueError(f"temperature must not be negative, got {temperature}.")
        total, longest = prompt.shape[1] + max_new_tokens, self.config.max_length
        if longest is not None and total > longest:
            raise ValueError(
                f"Prompt and continuation have {total} tokens, but learned positions end at "
                f"max_length={longest}; ask for fewer, or use sinusoidal or rotary positions."
            )
        if key_mask is not None and not key_mask[:, -1].all():
            raise ValueError("The last token of every prompt must be real: pad on the left.")
        logits, state = self.step(prompt, self.init_state(len(prompt)), key_mask=key_mask)
        tokens = [prompt]
        for left in reversed(range(max_new_tokens)):
            tokens.append(_choose(logits[:, -1], temperature, generator))
            if left:
                logits, state = self.step(tokens[-1], state)
        return torch.cat(tokens, dim=1)

    def _logits(self, hidden: Float[Tensor, "b n c"]) -> Float[Tensor, "b n vocab"]:
        return nn.functional.linear(hidden, self.embed.weight)


def _check_seen(seen: Int[Tensor, " b"], longest: int) -> None:
    # a compiled step cannot read the number of tokens
    if torch.compiler.is_compiling() or not seen.numel():
        return
    count = int(seen.max())
    if count > longest:
        raise ValueError(
            f"After this step a sequence has {count} tokens, but learned positions end at "
            f"max_length={longest}; stop there, or use sinusoidal or rotary positions."
        )


def _choose(
    logits: Float[Tensor, "b vocab"], temperature: float, generator: torch.Generator | None
) -> Int[Tensor, "b one"]:
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    share = torch.softmax(logits.float() / temperature, dim=-1)
    return torch.multinomial(share, 1, generator=generator)
