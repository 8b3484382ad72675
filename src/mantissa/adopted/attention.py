"""Attention of an adopted model: keys in blocks by their *absolute* position, whatever padding, cache or batch.

Transformers gives an attention function queries, keys and a mask. Where a key stands among those depends on the padding
to the left of its row, and in a layer with a window on what its cache has dropped; and where blocks of keys begin
decides how their sums are cut. So keys are laid out anew, by their position in the sequence: key column j of row b
stands at L - S + j - left(b), of L columns so far and S keys given. Blocks begin at multiples of ``BLOCK``. A block of
which nothing is seen is left out, or adds exact zeros: the same. The rest is ``kernels/exact/kernels.py``'s.

- A sink (a score that every query sees, without a value) is a key of zeros in a block before the first, whose mask
  holds the score.
- A value narrower or wider than a key (latent attention) is filled up with zeros, or the key is.
- A soft cap is taken of the scores, on whole vectors.

The backward pass is torch's own attention over the same mask.

Legend: B sequences, H query heads, K key heads, T query positions, S keys, D head size, N = B K, L columns so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mantissa.adopted.route import RUNNING, pointwise
from mantissa.base.errors import MantissaError
from mantissa.kernels.exact.kernels import BLOCK, attended
from mantissa.kernels.exact.plan import AttentionChoice
from mantissa.precision import NumberFormat

NAME = "mantissa"  # of the attention among transformers' implementations
_LONG = 128  # positions from which on more queries are taken at a time


@dataclass(frozen=True)
class Place:
    """Where the columns of a batch stand: ``columns`` so far, of which row b's first ``left[b]`` are padding."""

    columns: int
    left: tuple[int, ...]

    def first(self, keys: int) -> list[int]:
        """Of each row, the position of the first of its last ``keys`` columns; below 0: padding."""
        return [self.columns - keys - left for left in self.left]


@dataclass(frozen=True)
class Form:
    """What a layer's attention is: the ``scale`` of its products, a soft ``cap`` of its scores (0: none), and how it is
    computed, in ``fmt`` by ``choice``."""

    scale: float
    cap: float
    fmt: NumberFormat
    choice: AttentionChoice | None  # None: by Triton's kernel

    def capped(self, products: Tensor) -> Tensor:
        scaled = products * (self.scale / self.cap)
        return pointwise(torch.tanh, scaled) * self.cap


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, softcap: float | None = None, s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Transformers' attention function: shapes B,H,T,D; K,S; the result is B,T,H,D. See ``AttentionInterface``."""
    mode = RUNNING.modes[-1] if RUNNING.modes else None
    if mode is None:
        raise MantissaError("adopt: a layer of an adopted model was called by itself; call the model, or its layers' "
                            "own parent")  # fmt: skip
    if dropout and module.training:
        raise MantissaError(f"adopt: attention drops out values (p={dropout}); set the model's attention_dropout to 0")
    unknown = [name for name in ("head_mask", "position_bias", "cu_seq_lens_q") if more.get(name) is not None]
    if unknown:
        raise MantissaError(
            f"adopt: {type(module).__name__} attends with {', '.join(unknown)}, which has no exact form"
        )
    heads, kv_heads, size = query.shape[1], key.shape[1], query.shape[3]
    at = (heads, kv_heads, max(size, value.shape[-1]))
    with torch._C.DisableTorchFunction():  # to which a master has the dtype that it is cast to
        (s_aux,) = mode.cast_all((s_aux,))
    if mode.plans is None:
        mode.heads.add(at)
        seen = visible(attention_mask, query, key)
        out = plain(query, key, value, seen, size**-0.5 if scaling is None else scaling, softcap or 0.0, s_aux)
        return out.transpose(1, 2), None
    if attention_mask is None or attention_mask.shape[-1] != key.shape[2]:
        raise MantissaError(
            f"adopt: {type(module).__name__} attends to {key.shape[2]} keys under a mask of "
            f"{None if attention_mask is None else tuple(attention_mask.shape)}: where they stand is not known; with a "
            "DynamicCache and a mask of rows and columns it is"
        )
    seen = visible(attention_mask, query, key)
    place = RUNNING.places[-1] or _of_whole(seen)
    if at not in mode.heads:
        raise MantissaError(f"adopt: {type(module).__name__} has heads {at}, which the model was not seen to have")
    if place.columns > mode.length:
        raise MantissaError(
            f"adopt: the kernels were proven for {mode.length} positions at most, and here are {place.columns}; adopt "
            f"the model with length={place.columns} or more"
        )
    choice = None
    if not mode.gpu:
        plan = mode.plans[at]
        plan.check_threads(torch.get_num_threads())
        choice = plan.attention
    form = Form(size**-0.5 if scaling is None else scaling, softcap or 0.0, mode.format, choice)
    with mode.routing(), torch._C.DisableTorchFunction():
        out = Attention.apply(query, key, value, seen, s_aux, place, form)
    return out.transpose(1, 2).contiguous(), None


def _of_whole(seen: Tensor) -> Place:
    """Of a layer that is computed again by itself, over whole sequences: the first column that a row sees is its
    first."""
    if seen.shape[2] != seen.shape[3]:
        raise MantissaError("adopt: a layer of an adopted model was called by itself with a cache; call the model")
    return Place(seen.shape[3], tuple(seen.any(1).any(1).int().argmax(-1).tolist()))


def visible(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """What each query sees, B or 1,1 or H,T,S; of a mask that is one, or is added to scores, or of none: causal."""
    length, keys = query.shape[2], key.shape[2]
    if mask is None:
        return torch.ones(length, keys, dtype=torch.bool, device=query.device).tril(keys - length)[None, None]
    if mask.dtype is torch.bool:
        return mask
    seen = mask == 0
    if bool((~seen & (mask > torch.finfo(mask.dtype).min / 2)).any()):
        raise MantissaError("adopt: a layer adds values of its own to attention's scores, which has no exact form here")
    return seen


def plain(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, cap: float, sinks: Tensor | None) -> Tensor:
    """The same by torch's operations, differentiable, in the dtype given: what the exact one is compared with, and its
    gradient. A query that sees nothing gets 0."""
    group, dtype = q.shape[1] // k.shape[1], q.dtype
    k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
    some = seen.any(-1, keepdim=True)
    seen = seen | ~some
    if not cap and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, seen, scale=scale) * some.to(dtype)
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(dtype, torch.float32)) * scale
    scores = torch.tanh(scores / cap) * cap if cap else scores
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
    p = torch.softmax(scores, -1)[..., : k.shape[2]].to(dtype)
    return (p @ v) * some.to(dtype)


class Attention(torch.autograd.Function):
    """``attended`` over keys that lie by their positions; the gradient is ``plain``'s, in fp32, row by row."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor | None, place: Place, form: Form
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, seen, *(() if sinks is None else (sinks,)))
        ctx.form = form
        if form.choice is None:
            return by_triton(q, k, v, seen, sinks, place, form)
        size, width = max(q.shape[3], v.shape[3]), v.shape[3]
        wide_q, wide_k, wide_v = (F.pad(x.float(), (0, size - x.shape[3])) for x in (q, k, v))
        return exact(wide_q, wide_k, wide_v, seen, sinks, place, form)[..., :width].to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, seen, *sinks = ctx.saved_tensors
        form, given = ctx.form, [q, k, v, *sinks]
        fused = form.choice is None and not form.cap and not sinks  # torch's own fused attention, for all rows at once
        wide = [x.detach() if fused else x.detach().float() for x in given]
        totals = [torch.zeros_like(x) for x in wide]
        for row in range(1 if fused else len(q)):
            own = slice(None) if fused else slice(row, row + 1)
            with torch.enable_grad():
                parts = [x[own].requires_grad_() for x in wide[:3]] + [x.requires_grad_() for x in wide[3:]]
                mask = seen[own] if len(seen) > 1 else seen
                q_row, k_row, v_row = parts[:3]
                out = plain(q_row, k_row, v_row, mask, form.scale, form.cap, parts[3] if sinks else None)
            found = torch.autograd.grad(out, parts, grads[0][own].to(out.dtype))
            for total, part in zip(totals[:3], found[:3], strict=True):
                total[own] = part
            for total, part in zip(totals[3:], found[3:], strict=True):
                total += part
        q_grad, k_grad, v_grad, *rest = (total.to(x.dtype) for total, x in zip(totals, given, strict=True))
        return q_grad, k_grad, v_grad, None, rest[0] if rest else None, None, None


def by_triton(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor | None, place: Place, form: Form
) -> Tensor:  # fmt: skip
    """The same on a GPU, whose kernel knows where each row's keys stand."""
    from mantissa.kernels.triton.attention import masked_attention

    first = torch.tensor(place.first(k.shape[2]), device=q.device)
    return masked_attention(q, k, v, seen, first, form.scale, form.cap, sinks)


def exact(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor | None, place: Place, form: Form) -> Tensor:
    """Shape of ``q``, fp32, rounded to the format; ``q``, ``k`` and ``v`` are fp32 tensors of one head size."""
    assert form.choice is not None
    (batch, heads, length, size), kv_heads, choice = q.shape, k.shape[1], form.choice
    group = heads // kv_heads
    k, v, seen = laid_out(k, v, seen.expand(batch, *seen.shape[1:]), place, choice.keys)
    if sinks is not None:
        k, v = (F.pad(x, (0, 0, BLOCK, 0)) for x in (k, v))
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    out = q.new_empty(batch, kv_heads, group, length, size)
    grouped = q.view(batch, kv_heads, group, length, size)
    lead = 0 if sinks is None else BLOCK
    for start, stop, low, high in chunks(seen, length, choice):
        rows = stop - start if length > 1 else 1
        fill = -rows % choice.positions[0] if length > 1 else 0
        part = F.pad(grouped[:, :, :, start:stop], (0, 0, 0, fill)).reshape(batch * kv_heads, -1, size)
        mask = _mask(F.pad(seen[:, :, start:stop, low:high], (0, 0, 0, fill)), kv_heads, group, sinks)
        if length == 1:
            room = -group % choice.rows
            part, mask = F.pad(part, (0, 0, 0, room)), F.pad(mask, (0, 0, 0, room))
        keys = [slice(low + lead, high + lead)] if not lead else [slice(0, BLOCK), slice(low + lead, high + lead)]
        some_k, some_v = (x[:, keys[0]] if len(keys) == 1 else torch.cat([x[:, s] for s in keys], 1) for x in (k, v))
        capped = form.capped if form.cap else None
        got = attended(part, some_k, some_v, mask, form.fmt, choice, form.scale, capped)
        got = got[:, : group * (rows + fill)].view(batch, kv_heads, group, rows + fill, size)
        out[:, :, :, start:stop] = got[:, :, :, :rows]
    blind = ~seen.any(-1, keepdim=True)  # B,1 or H,T,1
    return out.view(q.shape).masked_fill_(blind, 0.0) if bool(blind.any()) else out.view(q.shape)


def laid_out(k: Tensor, v: Tensor, seen: Tensor, place: Place, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and what is seen of them, each row's first key at its position less a multiple of ``BLOCK``, with
    zeros elsewhere and behind, up to a multiple of ``multiple``."""
    keys, firsts = k.shape[2], place.first(k.shape[2])
    shifts = [(first % BLOCK, 0) if first >= 0 else (0, -first) for first in firsts]  # where to, and from where
    width = -(-max(to + keys - skip for to, skip in shifts) // multiple) * multiple
    if len(set(shifts)) == 1 and shifts[0] == (0, 0):
        room = (0, 0, 0, width - keys)
        return F.pad(k, room), F.pad(v, room), F.pad(seen, (0, width - keys))
    outs = [x.new_zeros(*x.shape[:2], width, x.shape[3]) for x in (k, v)]
    sees = seen.new_zeros(*seen.shape[:3], width)
    for row, (to, skip) in enumerate(shifts):
        count = max(keys - skip, 0)
        for out, x in zip(outs, (k, v), strict=True):
            out[row, :, to : to + count] = x[row, :, skip:]
        sees[row, ..., to : to + count] = seen[row, ..., skip:]
    return outs[0], outs[1], sees


def chunks(seen: Tensor, length: int, choice: AttentionChoice) -> Iterator[tuple[int, int, int, int]]:
    """Queries to be taken together: their first and end, and the first and end of the keys of which they see any."""
    step = choice.positions[0] if length <= _LONG else choice.positions[-1]
    any_TS = seen.flatten(0, 1).any(0)
    for start in range(0, length, step):
        stop = min(start + step, length)
        columns = any_TS[start:stop].any(0).nonzero()
        first, last = (int(columns[0]), int(columns[-1])) if len(columns) else (0, 0)
        low, high = first // BLOCK * BLOCK, -(-(last + 1) // choice.keys) * choice.keys
        yield start, stop, low, max(high, low + choice.keys)


def _mask(seen: Tensor, kv_heads: int, group: int, sinks: Tensor | None) -> Tensor:
    """0 where a query sees a key, -inf where not, 0 throughout where it sees none: B,1 or K,G T,S."""
    blind = ~seen.any(-1, keepdim=True)
    mask = torch.zeros(seen.shape, device=seen.device).masked_fill_(~(seen | blind), float("-inf"))
    batch, own, length, keys = mask.shape
    if own > 1 or sinks is not None:  # each head's own
        mask = mask.expand(batch, kv_heads * group, length, keys)
    if sinks is not None:
        before = mask.new_full((batch, kv_heads * group, length, BLOCK), float("-inf"))
        before[..., 0] = sinks.float().view(1, -1, 1)
        return torch.cat((before, mask), -1).reshape(batch, kv_heads, group * length, -1)
    if own > 1:
        return mask.reshape(batch, kv_heads, group * length, keys)
    return mask.repeat(1, 1, group, 1)


def places(mask: Tensor | None, columns: int, rows: int) -> Place:
    """From a batch's mask B,L, 1 where a token is: rows of which columns to the left are padding."""
    if mask is None:
        return Place(columns, (0,) * rows)
    real = mask.bool()
    first: Sequence[int] = real.int().argmax(-1).tolist()
    return Place(columns, tuple(first))
