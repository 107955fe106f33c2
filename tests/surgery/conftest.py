"""Small models of every library, with weights large enough for attention to choose."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

IDS = torch.randint(3, 50, (3, 9), generator=torch.Generator().manual_seed(3))
# whole, padded on the left, padded on the right
KEEP = torch.stack([torch.arange(9) >= 0, torch.arange(9) >= 4, torch.arange(9) < 3])
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def text(name: str, **options: Any) -> nn.Module:
    """Return a small random model of transformers by class name."""
    import transformers

    torch.manual_seed(0)
    cls = getattr(transformers, name)
    sizes = {**SIZES, **options}
    if name.startswith("DistilBert"):
        for old, new in (
            ("hidden_size", "dim"),
            ("num_hidden_layers", "n_layers"),
            ("num_attention_heads", "n_heads"),
            ("intermediate_size", "hidden_dim"),
        ):
            sizes[new] = sizes.pop(old)
    return sharpen(cls(cls.config_class(**sizes))).eval()


def sharpen(model: nn.Module) -> nn.Module:
    """Enlarge the matrices of a fresh model, whose attention is all but uniform."""
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dim() == 2 and not isinstance(module, nn.Embedding):
                    parameter.copy_(torch.randn_like(parameter) * (2 / parameter.shape[0]) ** 0.5)
                elif parameter.dim() == 1 and name == "bias":
                    parameter.copy_(0.1 * torch.randn_like(parameter))
    return model


def hidden(model: nn.Module, **also: Any) -> Tensor:
    """Return the last hidden states of a transformers model at real tokens."""
    output = model(IDS, attention_mask=KEEP.long(), **also)
    return output.last_hidden_state[KEEP]


class Encoder(nn.Module):
    """Torch's own encoder, with masks as it wants them."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, **options)
        nested = bool(options.get("batch_first")) and not options.get("norm_first")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.batch_first = bool(options.get("batch_first"))
        sharpen(self).eval()

    def forward(self, x: Tensor, **masks: Any) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        y = self.encoder(x, **masks)
        return y if self.batch_first else y.transpose(0, 1)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randn(3, 9, 32, generator=torch.Generator().manual_seed(4))


@pytest.fixture
def same_as_before() -> Callable[[nn.Module], Callable[[], None]]:
    """Remember a model; the function that comes back checks that nothing has changed."""

    def remember(model: nn.Module) -> Callable[[], None]:
        state = {k: v.clone() for k, v in model.state_dict().items()}
        modules = {name: id(m) for name, m in model.named_modules()}
        modes = {name: m.training for name, m in model.named_modules()}
        rng = torch.get_rng_state()
        config = getattr(model, "config", None)
        configs = [(m, getattr(m, "config", None)) for m in model.modules()]
        settings = None if config is None else repr(sorted(vars(config).items(), key=str))

        def check() -> None:
            assert {name: id(m) for name, m in model.named_modules()} == modules
            assert {name: m.training for name, m in model.named_modules()} == modes
            after = model.state_dict()
            assert list(after) == list(state)
            for key, value in state.items():
                if value.device.type != "meta":
                    assert torch.equal(after[key], value), key
            if config is not None:
                assert all(getattr(m, "config", None) is c for m, c in configs)
                assert repr(sorted(vars(config).items(), key=str)) == settings
            assert torch.equal(torch.get_rng_state(), rng)

        return check

    return remember
