"""Where the parameters of a model are: blocks, attention, perceptron, norms and embeddings.

Works on the modules alone, without a forward: models of transformers, torch.nn, timm, this library,
and converted models. A *stack* is a list of modules that each contain attention. The largest stack
is the model's; its length is the depth.
"""

import re
from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from primal_attention.attention import Attention

__all__ = ["ModelParts", "Roles", "embedding_rank", "find_parts"]

_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_NORM = re.compile(r"norm", re.IGNORECASE)
_POSITION = re.compile(r"(^|[._])w?p(os|e)|token_type", re.IGNORECASE)
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
_RANK_WORK = 2e11
"""Largest number of operations for the rank of an embedding; larger ones are sampled by rows."""


class Roles(NamedTuple):
    """Numbers of parameters by role; shared parameters count once."""

    embedding: int
    """Tables of tokens, positions and types, and the patch embedding of images."""
    attention: int
    """Attention in all blocks, without norms."""
    ffn: int
    """The rest of the blocks: perceptrons."""
    norm: int
    """Norms, in blocks and after them."""
    other: int
    """Heads, poolers and other parts outside the blocks."""

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(self)


class ModelParts(NamedTuple):
    """Shape of a model, read from its modules."""

    stack: str
    """Name of the list of blocks."""
    layers: int
    """Blocks in the stack; more than modules if blocks share their weights."""
    mixing_layers: int
    """Blocks whose attention mixes tokens."""
    bilinear_layers: int
    """Blocks with data-dependent primal attention."""
    width: int
    heads: int | None
    block_params: int
    """Parameters inside the blocks: the ``N`` of the rule."""
    roles: Roles
    embedding: Tensor | None
    """The table of tokens, ``[vocabulary width]``."""
    other_stacks: tuple[str, ...]
    """Names of smaller stacks, such as the decoder of a translation model."""


def find_parts(model: nn.Module) -> ModelParts:
    """Return the shape of a model and its parameters by role.

    Args:
        model: A Transformer.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> parts = find_parts(nn.TransformerEncoder(layer, 3))
        >>> parts.layers, parts.width, parts.heads
        (3, 16, 2)
    """
    stacks = _stacks(model)
    if not stacks:
        raise ValueError(
            f"{type(model).__name__} has no list of blocks with attention, so its depth is not "
            "known; give the Transformer itself, with its blocks in an nn.ModuleList or "
            "nn.Sequential."
        )
    name = max(stacks, key=lambda key: _count(stacks[key]))
    blocks = [block for block in stacks[name].children() if _attentions(block)]
    attentions = [_attentions(block)[0] for block in blocks]
    layers = _depth(model, len(blocks))
    still = sum(not _mixes(model, block) for block in blocks)
    return ModelParts(
        stack=name,
        layers=layers,
        mixing_layers=layers - still,
        bilinear_layers=sum(_is_bilinear(module) for module in attentions),
        width=_width(model, blocks[0]),
        heads=_heads(model, attentions[0]),
        block_params=sum(_count(block) for block in blocks),
        roles=_roles(model, stacks[name]),
        embedding=_embedding(model),
        other_stacks=tuple(key for key in stacks if key != name),
    )


def _stacks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost lists whose items each contain attention, by name."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        if any(name.startswith(f"{outer}." if outer else "") for outer in found):
            continue
        with_attention = [child for child in module.children() if _attentions(child)]
        # the blocks of a stack are of one class; a Sequential of different parts is another thing
        kinds = {type(child) for child in with_attention}
        if with_attention and len(kinds) == 1 and not _holds_stack(with_attention[0]):
            found[name] = module
    return found


def _holds_stack(module: nn.Module) -> bool:
    """Return whether a module has a list of several blocks with attention inside."""
    for inner in module.modules():
        if isinstance(inner, nn.ModuleList | nn.Sequential) and inner is not module:
            kinds = Counter(type(child) for child in inner.children() if _attentions(child))
            # self-attention beside cross-attention is one block, as in T5
            if kinds and max(kinds.values()) > 1:
                return True
    return False


def _attentions(module: nn.Module) -> list[nn.Module]:
    """Return the outermost attention modules inside a module, itself included."""
    if _is_attention(module):
        return [module]
    return [found for child in module.children() for found in _attentions(child)]


def _is_attention(module: nn.Module) -> bool:
    if isinstance(module, Attention | nn.MultiheadAttention):
        return True
    name = type(module).__name__
    # blocks may have attention in their name, such as AttentionBlock
    is_block = re.search(r"block|layer$|encoder|decoder|model", name, re.IGNORECASE)
    is_named = _ATTENTION.search(name) and not is_block
    return bool(is_named) and next(module.parameters(), None) is not None


def _mixes(model: nn.Module, block: nn.Module) -> bool:
    inner = next((m for m in block.modules() if isinstance(m, Attention)), None)
    if inner is None or inner.capabilities.mixes_without_order:
        return True
    # converted decoders keep the order in the module around the attention
    return any(getattr(m, "is_causal", False) is True for m in (model, *block.modules()))


def _is_bilinear(module: nn.Module) -> bool:
    return any(getattr(inner, "weights", None) == "data" for inner in module.modules())


def _depth(model: nn.Module, blocks: int) -> int:
    """Return the number of blocks; shared blocks, as in ALBERT, run several times."""
    repeats = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    groups = getattr(getattr(model, "config", None), "num_hidden_groups", None)
    return int(repeats) if groups is not None and repeats is not None else blocks


def _width(model: nn.Module, block: nn.Module) -> int:
    """Return the model width: what the norms of a block work on."""
    sizes = Counter(
        p.numel()
        for module in block.modules()
        if _is_norm(module)
        for p in module.parameters(recurse=False)
    )
    config = getattr(model, "config", None)
    for name in ("hidden_size", "d_model", "n_embd", "dim"):
        value = getattr(config, name, None)
        if isinstance(value, int) and (not sizes or value in sizes):
            return value
    if sizes:
        # norms of queries and keys are narrower than the stream
        return max(sizes)
    inputs = Counter(m.in_features for m in block.modules() if isinstance(m, nn.Linear))
    if not inputs:
        raise ValueError(
            f"the width of a {type(block).__name__} is not known: it has no norm and no linear map."
        )
    return inputs.most_common(1)[0][0]


def _heads(model: nn.Module, attention: nn.Module) -> int | None:
    for module in attention.modules():
        for name in _HEADS:
            value = getattr(module, name, None)
            if isinstance(value, int):
                return value
    for name in _HEADS:
        value = getattr(getattr(model, "config", None), name, None)
        if isinstance(value, int):
            return value
    return None


def _roles(model: nn.Module, stack: nn.Module) -> Roles:
    """Return the parameters by role, each counted once."""
    seen: set[int] = set()
    count = dict.fromkeys(Roles._fields, 0)
    inside = {id(p) for p in stack.parameters()}

    def add(role: str, parameter: nn.Parameter) -> None:
        if id(parameter) not in seen:
            seen.add(id(parameter))
            count[role] += parameter.numel()

    for module in model.modules():
        role = "embedding" if isinstance(module, nn.Embedding) else "norm"
        for parameter in module.parameters() if role == "embedding" or _is_norm(module) else ():
            add(role, parameter)
    for module in _attentions(stack):
        for parameter in module.parameters():
            if id(parameter) in inside:
                add("attention", parameter)
    for name, parameter in model.named_parameters():
        if id(parameter) in inside:
            add("ffn", parameter)
        else:
            add("embedding" if _is_input(name) else "other", parameter)
    return Roles(**count)


def _is_norm(module: nn.Module) -> bool:
    return bool(_NORM.search(type(module).__name__)) and not list(module.children())


def _is_input(name: str) -> bool:
    return bool(re.search(r"embed|position_table|cls_token|reg_token|patch", name, re.IGNORECASE))


def _embedding(model: nn.Module) -> Tensor | None:
    """Return the table of tokens: the model's own answer, or the largest without positions."""
    ask: object = getattr(model, "get_input_embeddings", None)
    try:
        found = ask() if callable(ask) else None
    except NotImplementedError:
        found = None
    if isinstance(found, nn.Embedding):
        return found.weight.detach()
    tables = [
        module.weight.detach()
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and not _POSITION.search(name)
    ]
    return max(tables, key=Tensor.numel, default=None)


def embedding_rank(table: Tensor, *, threshold: float = 1e-3) -> int:
    """Return the numerical rank of an embedding: singular values above ``threshold`` σ₁.

    Very large tables are sampled by evenly spaced rows.

    Args:
        table: The table of tokens, ``[vocabulary width]``.
        threshold: Smallest singular value that counts, relative to the largest.

    Example:
        >>> embedding_rank(torch.randn(50, 4) @ torch.randn(4, 16))
        4
    """
    rows, width = table.shape
    keep = max(4 * width, int(_RANK_WORK / width**2))
    if rows > keep:
        table = table[torch.arange(keep) * rows // keep]
    wide = table.double()
    # squared singular values; 1e-6 relative is far above the error of float64
    gram = wide.T @ wide if rows >= width else wide @ wide.T
    squares = torch.linalg.eigvalsh(gram)
    return int((squares > threshold**2 * squares[-1]).sum())


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
