"""More positions than a model was trained with: learned tables interpolated, rotary angles scaled.

    extend_positions(model, 4096)                  # BERT: its table is interpolated
    extend_positions(decoder, 16384, method="ntk")  # rotary positions: a larger base

Nothing is trained, so something is lost, also on short texts; measure it. The settings of
transformers (``max_position_embeddings``, ``rope_parameters``) are changed with the model, so that
``save_pretrained`` and ``from_pretrained`` keep the extension.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.hosts import ConversionError
from primal_attention.surgery.options import PositionMethod

__all__ = ["ExtendedPositions", "PositionMethod", "extend_positions", "position_limit"]

_TABLE, _ROTARY = ("interpolate", "repeat"), ("ntk", "linear", "dynamic")
_NAMES = ("position_embeddings", "position_embedding", "embed_positions", "wpe")
"""Names that models of transformers give to a learned table of positions."""
_RECORD = "extended_positions"
"""Field of a config that remembers an extension."""


@dataclass(frozen=True)
class ExtendedPositions:
    """Result of :func:`extend_positions`."""

    method: PositionMethod
    """How the positions were made; ``"auto"`` if the model took as many tokens already."""
    before: int
    """Most tokens that the model took."""
    after: int
    """Most tokens that it takes now."""
    _undo: tuple[Callable[[], None], ...] = field(default=(), repr=False, compare=False)

    def verdict(self) -> str:
        """Return in words what was done."""
        if self.before >= self.after:
            return f"The model takes {self.before:,} tokens; its positions were not changed."
        how = {
            "interpolate": "its learned positions were interpolated",
            "repeat": "its learned positions begin again",
            "linear": "its rotary angles were divided",
            "ntk": "the base of its rotary angles was raised",
            "dynamic": "the base of its rotary angles grows with the length of a batch",
        }[self.method]
        return f"The model takes {self.after:,} tokens instead of {self.before:,}: {how}."

    def to_dict(self) -> dict[str, object]:
        """Return method and lengths as JSON values."""
        return {"method": self.method, "before": self.before, "after": self.after}

    def undo(self) -> None:
        """Put the former positions back."""
        for step in reversed(self._undo):
            step()


def position_limit(model: nn.Module) -> int | None:
    """Return the largest number of tokens that a model takes; ``None`` if nothing limits it.

    Example:
        >>> position_limit(nn.TransformerEncoderLayer(16, 2)) is None
        True
    """
    config = getattr(model, "config", None)
    record = getattr(config, _RECORD, None)
    if record is not None:
        return int(record["after"])
    limit = getattr(config, "max_position_embeddings", None)
    tables = list(_tables(model))
    if tables:
        return min(table.num_embeddings - _first(table) for _, table in tables)
    return limit if isinstance(limit, int) and limit > 0 else None


def extend_positions(
    model: nn.Module, length: int, *, method: PositionMethod = "auto"
) -> ExtendedPositions:
    """Let a model of transformers take longer inputs, in place, and return what was done.

    ``"interpolate"`` stretches a learned table, so positions of short texts change too.
    ``"repeat"`` lets a learned table begin again, so short texts keep their positions.
    ``"linear"`` divides rotary angles, ``"ntk"`` raises their base, and ``"dynamic"`` raises it by
    the longest text of a batch, as transformers does.

    Args:
        model: An encoder or a decoder with a learned table of positions or rotary ones.
        length: Number of tokens that it is to take.
        method: How; by default ``"interpolate"`` for a table and ``"ntk"`` for rotary positions.

    Raises:
        ConversionError: If the model has no such positions, or the method does not fit them. The
            model is not changed then.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = BertModel(BertConfig(vocab_size=9, intermediate_size=16, **sizes)).eval()
        >>> extend_positions(model, 1000).before
        512
        >>> model(torch.ones(1, 1000, dtype=torch.long)).last_hidden_state.shape
        torch.Size([1, 1000, 16])
    """
    if method not in get_args(PositionMethod):
        raise ValueError(f"method must be one of {get_args(PositionMethod)}, got {method!r}.")
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}; give a number of tokens.")
    before = position_limit(model)
    tables, rotary = list(_tables(model)), list(_rotaries(model))
    if before is None or not (tables or rotary):
        raise ConversionError(
            f"{type(model).__name__} has neither a learned table of positions nor rotary ones that "
            "are known here, so it cannot be extended; leave the extension out."
        )
    if before >= length:
        return ExtendedPositions("auto", before, before)
    fitting = _TABLE if tables else _ROTARY
    chosen = fitting[0] if method == "auto" else method
    if chosen not in fitting:
        raise ConversionError(
            f"method={method!r} does not fit {type(model).__name__}, which has "
            f"{'a learned table of' if tables else 'rotary'} positions; choose one of "
            f"{', '.join(fitting)}."
        )
    done = ExtendedPositions(chosen, before, length)  # type: ignore[arg-type]
    if tables:
        undo = [step for owner, table in tables for step in _extend_table(owner, table, done)]
        undo += _extend_configs(model, done)
    else:
        undo = _extend_rotary(model, rotary, done)
    return ExtendedPositions(done.method, before, length, tuple(undo))


def _tables(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Embedding]]:
    """Yield the learned tables of token positions, and the modules that hold them."""
    for owner in model.modules():
        for name in _NAMES:
            table = getattr(owner, name, None)
            if isinstance(table, nn.Embedding):
                yield owner, table


def _first(table: nn.Embedding) -> int:
    """Return the row of the first token: some models keep the rows before it for padding."""
    if table.padding_idx is not None:
        return table.padding_idx + 1
    return int(getattr(table, "offset", 0))


def _rotaries(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield the modules of rotary angles of transformers: owner, name, module."""
    for owner in model.modules():
        for name, module in owner.named_children():
            buffers = [n for n, _ in module.named_buffers(recurse=False)]
            if any(n.endswith("inv_freq") for n in buffers) and hasattr(module, "rope_type"):
                yield owner, name, module


@torch.no_grad()
def _extend_table(
    owner: nn.Module, table: nn.Embedding, done: ExtendedPositions
) -> list[Callable[[], None]]:
    """Enlarge a table, and the numbers of positions beside it; return what undoes it."""
    weight, first = table.weight, _first(table)
    rows = _interpolated if done.method == "interpolate" else _repeated
    wide = torch.cat([weight[:first], rows(weight[first:], done.after)])
    undo: list[Callable[[], None]] = [
        partial(setattr, table, "weight", weight),
        partial(setattr, table, "num_embeddings", table.num_embeddings),
    ]
    for name, buffer in list(owner.named_buffers(recurse=False)):
        if buffer.shape != (1, len(weight)):
            continue
        # position_ids count, and token_type_ids are zero
        counts = torch.arange(len(wide), device=buffer.device)[None]
        longer = counts if name == "position_ids" else buffer.new_zeros(1, len(wide))
        undo.append(partial(setattr, owner, name, buffer))
        setattr(owner, name, longer.to(buffer.dtype))
    table.weight = nn.Parameter(wide, requires_grad=weight.requires_grad)
    table.num_embeddings = len(wide)
    return undo


def _interpolated(rows: Float[Tensor, "n c"], length: int) -> Float[Tensor, "m c"]:
    # both ends stay: the first position is that of a special token in many models
    place = torch.arange(length, dtype=torch.float64, device=rows.device)
    place = place * ((len(rows) - 1) / max(length - 1, 1))
    left = place.floor().long().clamp_max(max(len(rows) - 2, 0))
    right = (left + 1).clamp_max(len(rows) - 1)
    # in float64 the result does not depend on the machine, which checksums need
    share, wide = (place - left)[:, None], rows.double()
    return (wide[left] * (1 - share) + wide[right] * share).to(rows.dtype)


def _repeated(rows: Float[Tensor, "n c"], length: int) -> Float[Tensor, "m c"]:
    return rows[torch.arange(length, device=rows.device) % len(rows)].clone()


def _configs(model: nn.Module) -> list[Any]:
    """Return every settings object of transformers inside a model that has a limit."""
    found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    return [c for c in found.values() if hasattr(c, "max_position_embeddings")]


def _extend_configs(model: nn.Module, done: ExtendedPositions) -> list[Callable[[], None]]:
    """Give a model its own settings with the new length; return what undoes it."""
    undo: list[Callable[[], None]] = []
    old = _configs(model)
    # other models may share the settings; one deep copy keeps those shared inside the model
    mine = {id(was): new for was, new in zip(old, copy.deepcopy(old), strict=True)}
    for module in model.modules():
        config = getattr(module, "config", None)
        if id(config) in mine:
            undo.append(partial(setattr, module, "config", config))
            setattr(module, "config", mine[id(config)])  # noqa: B010 - not a Tensor or Module
    for config in mine.values():
        if done.method != "dynamic":  # this one needs the length of the training
            # RoBERTa counts the rows before the first token, too
            config.max_position_embeddings += done.after - done.before
        setattr(config, _RECORD, done.to_dict())
    return undo


def _extend_rotary(
    model: nn.Module, rotary: list[tuple[nn.Module, str, nn.Module]], done: ExtendedPositions
) -> list[Callable[[], None]]:
    """Scale the angles in the settings and build the modules again; return what undoes it."""
    for _, _, module in rotary:
        config: Any = getattr(module, "config", None)
        for scaling in _scalings(config):
            kind = scaling.get("rope_type", "default")
            if kind != "default":
                raise ConversionError(
                    f"The rotary positions of {type(model).__name__} are scaled already "
                    f"(rope_type={kind!r}); only unscaled ones can be extended. Set "
                    "rope_parameters of its config yourself."
                )
            if done.method != "linear" and _rotary_width(scaling, config) <= 2:
                raise ConversionError(
                    f"{type(model).__name__} turns {_rotary_width(scaling, config)} features of a "
                    f"head, and method={done.method!r} needs four; choose 'linear'."
                )
    undo = _extend_configs(model, done)
    for config in _configs(model):
        for scaling in _scalings(config):
            _scale(scaling, config, done)
    for owner, name, module in rotary:
        device = next(module.buffers()).device
        config = module.config
        undo.append(partial(setattr, owner, name, module))
        setattr(owner, name, type(module)(config=config).to(device))
    return undo


def _scalings(config: object) -> list[dict[str, Any]]:
    """Return the settings of rotary angles: one, or one for each kind of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" in found:
        return [found]
    # layers with a window see no long distance
    return [s for kind, s in found.items() if isinstance(s, dict) and "sliding" not in kind]


def _rotary_width(scaling: dict[str, Any], config: Any) -> int:
    """Return how many features of a head turn."""
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    return int(head_dim * scaling.get("partial_rotary_factor", 1.0))


def _scale(scaling: dict[str, Any], config: Any, done: ExtendedPositions) -> None:
    factor = done.after / done.before
    if done.method == "ntk":
        d = _rotary_width(scaling, config)
        # the slowest angle is divided by the factor, the fastest stays
        scaling["rope_theta"] = float(scaling["rope_theta"] * factor ** (d / (d - 2)))
    else:
        scaling.update(rope_type=done.method, factor=factor)
