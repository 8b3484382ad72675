"""What a model is asked before it is adopted: which operations it calls, and whether its numbers are then the same.

``read`` runs the model once as it is, and gathers the products and attentions to plan for. ``census`` runs it routed
and knows each operation that no route computed: one that is rounded correctly, moves values, or gives integers. Any
other is refused by its name and the module that called it. ``compare`` then asks this model itself: a whole batch
against a prefill and decoding, other paddings, another order, a row alone. What differs is refused, with the first
module that gives other numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mantissa.adopted.route import Routed
from mantissa.base.errors import MantissaError

LENGTH = 150  # positions of the probe: more than one block of keys
_STEPS = 6  # that are decoded at the end, and in the middle of a block
_ROWS = 3

# Correctly rounded, whatever a loop does: IEEE 754's operations, comparisons, and what is computed of exact values.
_CORRECT = (
    "add sub rsub mul div neg abs relu clamp clamp_min clamp_max maximum minimum sqrt reciprocal sign floor ceil round "
    "trunc where masked_fill fill zero eq ne lt le gt ge logical_not logical_and logical_or isinf isnan isfinite "
    "nan_to_num threshold remainder"
)
# Values from one place to another; the largest of some; and additions one after the other.
_MOVED = (
    "view reshape _unsafe_view permute transpose t expand expand_as slice select split split_with_sizes unbind "
    "chunk cat stack clone copy _to_copy contiguous squeeze unsqueeze alias detach lift_fresh index index_select "
    "gather embedding repeat roll flip constant_pad_nd new_empty new_zeros new_ones new_full zeros ones full empty "
    "empty_like zeros_like ones_like full_like arange scatter index_put index_add narrow diagonal tril triu "
    "as_strided unfold empty_strided scalar_tensor masked_select repeat_interleave movedim max min topk sort amax "
    "amin split_copy unfold_copy _reshape_alias view_as_real view_as_complex complex real imag conj"
)
_KNOWN = frozenset(f"aten::{name}{end}" for name in (*_CORRECT.split(), *_MOVED.split()) for end in ("", "_"))


class _Census(TorchDispatchMode):
    """Every operation that no route computed and that is not known to give a value the same bits everywhere."""

    def __init__(self, mode: Routed, where: list[str]) -> None:
        super().__init__()
        self.mode, self.where = mode, where
        self.refused: dict[str, str] = {}
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        self.counts[name] = self.counts.get(name, 0) + 1
        if not self.mode.inside and self._is_new(name, args, kwargs or {}, out):
            self.refused.setdefault(name, self.where[-1] if self.where else "the model")
        return out

    @staticmethod
    def _is_new(name: str, args: Any, kwargs: dict[str, Any], out: Any) -> bool:
        complex_out = isinstance(out, Tensor) and out.is_complex()
        return _inexact(name, out) and (complex_out or not _is_known(name, args, kwargs))


def _is_known(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    if name in ("aten::add", "aten::sub", "aten::add_", "aten::sub_") and kwargs.get("alpha", 1) != 1:
        return False  # one rounding or two
    if name == "aten::pow" and args[1] in (1, 2):
        return True  # torch's is x, and x * x
    return name in _KNOWN


def _inexact(name: str, out: Any) -> bool:
    """Whether a result has roundings that the operation's name does not vouch for."""
    outs = [x for x in (out if isinstance(out, list | tuple) else (out,)) if isinstance(x, Tensor) and x.numel()]
    if any(x.is_complex() for x in outs):
        return name.removeprefix("aten::").rstrip("_") not in _MOVED.split()
    return any(x.is_floating_point() for x in outs)


@contextlib.contextmanager
def _located(model: nn.Module) -> Iterator[list[str]]:
    """Within this, a list ends with the name of the module that runs."""
    stack: list[str] = []
    handles: list[Any] = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, n=name: stack.append(n)))
        handles.append(module.register_forward_hook(lambda *_: stack.__delitem__(-1), always_call=True))
    try:
        yield stack
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Within this the model is in eval mode, without gradients; each module's own mode is then put back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def drawn(vocabulary: int, length: int) -> Tensor:
    """Tokens of the probe."""
    return torch.randint(3, vocabulary, (_ROWS, length), generator=torch.Generator().manual_seed(7))


def read(model: nn.Module, tokens: Tensor) -> None:
    """Run the model once, as a batch and a step of decoding, for its routes to see what it multiplies."""
    with _evaluating(model):
        split = tokens.shape[1] - 1
        cache = model(input_ids=tokens[:, :split], attention_mask=torch.ones_like(tokens)[:, :split], use_cache=True)
        if getattr(cache, "past_key_values", None) is None:
            raise MantissaError(
                f"adopt: {type(model).__name__} keeps no cache of keys and values (is_decoder is "
                f"{getattr(model.config, 'is_decoder', False)}); expected a causal language model that does"
            )
        model(
            input_ids=tokens[:, split:], attention_mask=torch.ones_like(tokens), use_cache=True,
            past_key_values=cache.past_key_values,
        )  # fmt: skip


def census(model: nn.Module, mode: Routed, tokens: Tensor) -> str:
    """Refuse an operation that is not known, in a prefill or a step; returns what was counted."""
    with _located(model) as where, _Census(mode, where) as seen:
        read(model, tokens)
    if seen.refused:
        name, module = next(iter(seen.refused.items()))
        others = f" (and {', '.join(list(seen.refused)[1:])})" if len(seen.refused) > 1 else ""
        owner = dict(model.named_modules()).get(module, model)
        raise MantissaError(
            f"adopt: {module or 'the model'} ({type(owner).__name__}) calls {name.removeprefix('aten::')}{others}, "
            "which has no exact form here: expected products with weights, pointwise functions, reductions over one "
            "dimension, depthwise convolutions, and attention by transformers' AttentionInterface"
        )
    return f"{sum(seen.counts.values()):,} calls of {len(seen.counts)} operations known"


Logits = Callable[[Tensor, Tensor], Tensor]


def compare(model: nn.Module, tokens: Tensor) -> str:
    """Refuse a model whose logits differ by what stands beside a position; returns what was compared."""
    length, compared = tokens.shape[1], 0
    pads = (0, min(5, length // 6), min(11, length // 4))  # less than what is decoded from
    with _evaluating(model):
        left, right = _padded(tokens, pads, left=True), _padded(tokens, pads, left=False)
        whole = _whole(model, *left)
        order = torch.tensor([2, 0, 1], device=tokens.device)
        forms: list[tuple[str, Tensor, slice]] = [
            ("padded to the right", _moved(_whole(model, *right), pads), slice(0, length)),
            ("in another order", _whole(model, left[0][order], left[1][order])[order.argsort()], slice(0, length)),
        ]
        for start in sorted({max(1, length // 3), length - _STEPS - 1} - {length}):
            stop = min(start + _STEPS, length)
            forms.append(
                (f"decoded from position {start}", _decoded(model, *left, start, stop), slice(start - 1, stop))
            )
        for name, logits, part in forms:
            compared += _same(model, name, whole[:, part], logits, left[1][:, part], left)
        for row, pad in enumerate(pads):
            alone = _whole(model, tokens[row : row + 1, : length - pad], None)
            compared += _same(model, f"row {row} alone", whole[row : row + 1, pad:], alone, None, left)
    return f"{compared:,} logits equal: padded left and right, in another order, decoded, each row alone"


def _padded(tokens: Tensor, pads: tuple[int, ...], left: bool) -> tuple[Tensor, Tensor]:
    """Row b's first L - pad tokens, with padding on one side, and the mask."""
    out, mask = torch.zeros_like(tokens), torch.zeros_like(tokens)
    for row, pad in enumerate(pads):
        kept = tokens.shape[1] - pad
        own = slice(pad, None) if left else slice(0, kept)
        out[row, own], mask[row, own] = tokens[row, :kept], 1
    return out, mask


def _moved(logits: Tensor, pads: tuple[int, ...]) -> Tensor:
    """Rows padded to the right, moved to where those padded to the left stand."""
    return torch.stack([row.roll(pad, 0) for row, pad in zip(logits, pads, strict=True)])


def _whole(model: nn.Module, tokens: Tensor, mask: Tensor | None) -> Tensor:
    return model(input_ids=tokens, attention_mask=mask, use_cache=False).logits


def _decoded(model: nn.Module, tokens: Tensor, mask: Tensor, start: int, stop: int) -> Tensor:
    """Logits of positions ``start`` - 1 to ``stop``, each but the first from a cache."""
    out = model(input_ids=tokens[:, :start], attention_mask=mask[:, :start], use_cache=True)
    logits = [out.logits[:, -1:]]
    for at in range(start, stop):
        out = model(
            input_ids=tokens[:, at : at + 1], attention_mask=mask[:, : at + 1], use_cache=True,
            past_key_values=out.past_key_values,
        )  # fmt: skip
        logits.append(out.logits)
    return torch.cat(logits, 1)


def _same(
    model: nn.Module, name: str, whole: Tensor, other: Tensor, mask: Tensor | None, batch: tuple[Tensor, Tensor]
) -> int:
    """How many logits were equal. ``MantissaError`` where one was not."""
    real = torch.ones(whole.shape[:2], dtype=torch.bool, device=whole.device) if mask is None else mask.bool()
    one, two = whole[real], other[real]
    if torch.equal(one, two):
        return one.numel()
    rows = int((one != two).any(-1).sum())
    raise MantissaError(
        f"adopt: {rows:,} of {len(one):,} positions get other logits {name} than in their batch, from "
        f"{_first(model, *batch)} on; this model has no exact form here"
    )


def _first(model: nn.Module, tokens: Tensor, mask: Tensor) -> str:
    """The first module whose result for the last position of the last row differs between the batch and it alone."""
    own = mask[-1].bool()
    batch, alone = (_results(model, *given) for given in ((tokens, mask), (tokens[-1:, own], None)))
    for name, one in batch.items():
        two = alone.get(name)
        if two is not None and len(one) == len(tokens) and len(two) == 1 and not torch.equal(one[-1, -1], two[0, -1]):
            return name or "the model"
    return "a cache"


def _results(model: nn.Module, tokens: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """What each module gives, in the order in which they end."""
    found: dict[str, Tensor] = {}

    def keep(name: str, out: Any) -> None:
        out = out[0] if isinstance(out, tuple) and out else out
        if isinstance(out, Tensor) and out.dim() >= 2 and out.is_floating_point():
            found.setdefault(name, out.detach().clone())

    handles = [
        module.register_forward_hook(lambda _, __, out, name=name: keep(name, out))
        for name, module in model.named_modules()
    ]
    try:
        _whole(model, tokens, mask)
    finally:
        for handle in handles:
            handle.remove()
    return found
