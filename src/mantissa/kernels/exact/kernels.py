"""Exact kernels on a CPU: the number that a position gets is the same in training, in prefill and in decode.

A log-prob is a tree of rounded operations. Two policies with the same weights give the same log-prob, to the last bit,
if and only if each node of that tree depends on nothing but its position's own past: not on the batch, the row, what
follows, the length of the cache or the threads. The fast kernels break that at three places, and this family replaces
them; the rest (norms, rotation, sums of two, embedding) computes each row for itself as it is, which the probe checks.

- Products: a library chooses its routine by the number of rows, and each adds in another order; here in tiles, as
  ``plan.py`` says. The bias is added as an operation of its own, since a fused one may be rounded otherwise.
- Attention: below.
- SwiGLU: torch's ``silu`` computes what is left over from whole vectors by another exponential, so that a number
  depends on where it stands. ``x / (1 + exp(-x))`` by torch's ``exp`` and correctly rounded operations does not.

Where sums are in order, compiled (``plan.py``), norms and SwiGLU are too, in both roles: a decode step is one call.

The arithmetic is that of ``SimulatedKernels``, at the same rounding points, and its backward passes are used as they
are: nothing compares gradients bit by bit. In fp32 the roundings are identities.

Legend: M rows, E features in, F features out, R rows of a tile. Of attention: B sequences, H query heads, K key heads,
G = H / K queries that share a key head, T query positions, S key positions, D head size, N = B*K, M rows of queries
that see the same keys (G times some positions).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mantissa.kernels import compiled, cpu
from mantissa.kernels.compiled import Kind, Laid, Operation, PackedAttention, Part, SpansOf, rounded_
from mantissa.kernels.cpu import Products
from mantissa.kernels.exact.plan import AttentionChoice, Choice, ExactPlan, pieces
from mantissa.kernels.simulated import (
    CausalAttention,
    SimulatedKernels,
    _fold,
    _Sigmoid,
    _SwiGLU,
    mask_beyond,
)
from mantissa.precision import FP32, BlockScaled, Fp8Policy, NumberFormat, round_cached

PART = 1 << 19  # values of SwiGLU at a time: 2 MB


class Planned:
    """Exact kernels on a CPU: what they compute a product or attention by is ``plan``'s choice."""

    plan: ExactPlan
    products: Products
    format: NumberFormat

    def compiles(self, x: Tensor, width: int = 0, part: Part = "rows") -> bool:
        """Whether compiled code computes that of such tensors: in both policies, or in none."""
        return self.plan.attention.way == "in order" and super().compiles(x, width, part)  # type: ignore[misc]

    def packed(self, q: Tensor, k: Tensor, v: Tensor, spans: SpansOf) -> Tensor | None:
        """``packed_attention``, where a cache in the format makes keys and values no coarser."""
        if not self.compiles(q, part="attention"):
            return None
        found = spans()
        self.plan.check_length(found.longest[0])
        out: Tensor = PackedAttention.of(q, k, v, self.format, found)
        return out


class ExactKernels(Planned, SimulatedKernels):
    """The operations in ``fmt``, fp32 included, on fp32 tensors, by the calls that ``plan`` allows. See ``Kernels``.

    ``kv_format``: what keys and values are rounded to before anything attends to them: the cache's format, in training
    too; None where it is ``fmt``. A cache's keys and values have been rounded by whoever wrote them.
    """

    def __init__(
        self,
        fmt: NumberFormat,
        plan: ExactPlan,
        logits_format: NumberFormat = FP32,
        weights_on_grid: bool = False,
        kv_format: NumberFormat | None = None,
        fp8: Fp8Policy | None = None,
        table: cpu.CpuProducts | None = None,
    ) -> None:
        super().__init__(fmt, logits_format, weights_on_grid, fp8, table)
        if plan.attention.bf16:
            raise ValueError("the exact plan's attention is for operands in bf16: it was made for another role")
        self.plan = plan
        self.kv_format = kv_format or fmt

    def laid(self, copy: Tensor | BlockScaled, layer: str = "") -> Tensor:
        assert isinstance(copy, Tensor)  # values: codes are the fast native family's
        return laid(copy, self.plan.products, self.kind_of(layer)) if self.weights_on_grid else copy

    def product(self, x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None) -> Tensor:
        self.plan.check_threads(torch.get_num_threads())
        out_NF = product(x_NE, weight_FE, self.plan.product(weight_FE.shape))
        return out_NF if bias_F is None else out_NF.add_(bias_F)

    def swiglu(self, gate_NE: Tensor, up_NE: Tensor) -> Tensor:
        if self.compiles(gate_NE):
            return super().swiglu(gate_NE, up_NE)
        return _ExactSwiGLU.of(gate_NE, up_NE, self.format)

    def sigmoid(self, x_NE: Tensor) -> Tensor:
        return _Sigmoid.of(x_NE, self.format, lambda x: torch.neg(x).exp_().add_(1.0).reciprocal_())

    def causal_attention(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
        self.plan.check_length(k_BKTD.shape[2])
        choice = self.plan.attention
        return ExactAttention.of(q_BHTD, k_BKTD, v_BKTD, self.format, self.products, self.kv_format, choice)

    def packed_attention(self, q: Tensor, k: Tensor, v: Tensor, spans: SpansOf) -> Tensor | None:
        return self.packed(q, k, v, spans) if self.kv_format is self.format else None

    def cached_attention(self, q_BHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, length_B: Tensor) -> Tensor:
        self.plan.check_length(k_BKSD.shape[2])
        return cached(q_BHD, k_BKSD, v_BKSD, length_B, self.format, self.plan.attention, self._mask)


class _ExactSwiGLU(_SwiGLU):
    """The forward of ``_SwiGLU`` with x / (1 + exp(-x)) for silu: where exp(-x) is inf the result is -0, as it is."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, fmt: NumberFormat) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.fmt = fmt
        if gate.numel() <= PART:
            return _swiglu(gate, up, torch.neg(gate), fmt)
        out = torch.empty(gate.shape, device=gate.device)
        # Part by part, so that the next operation finds in the cache what the last one wrote.
        for gate_N, up_N, out_N in zip(*(x.reshape(-1).split(PART) for x in (gate, up, out)), strict=True):
            _swiglu(gate_N, up_N, torch.neg(gate_N, out=out_N), fmt)
        return out


def _swiglu(gate: Tensor, up: Tensor, negated: Tensor, fmt: NumberFormat) -> Tensor:
    """Written over ``negated``, which is -gate."""
    silu = torch.div(gate, negated.exp_().add_(1.0), out=negated)
    return rounded_(rounded_(silu, fmt).mul_(up), fmt)


def laid(copy: Tensor, choices: Mapping[tuple[int, ...], Choice], kind: Kind) -> Tensor:
    """A copy in the layout that its product reads: held as ``kind`` where that is a compiled one of any rows."""
    choice = choices.get(tuple(copy.shape))
    if choice is not None and choice.way == "in order":
        return compiled.lay(copy, "pairs" if choice.bf16 else kind)
    return cpu.packed(copy) if any(choice.onednn for choice in choices.values()) else copy


def product(x_NE: Tensor, weight_FE: Tensor, choice: Choice, bias_F: Tensor | None = None) -> Tensor:
    """x @ weight^T in the dtype of ``x_NE``, any leading shape, as chosen. To be called without gradients.

    ``weight_FE`` may be laid out as its product reads it fastest. Where the choice is bf16's and so are the tensors,
    x @ weight^T + bias is rounded once; elsewhere there is no ``bias_F``.
    """
    if choice.way == "in order":
        if not isinstance(weight_FE, Laid):
            weight_FE = compiled.lay(weight_FE.detach(), "pairs" if choice.bf16 else "fp32")
        return weight_FE.product(x_NE, bias_F, x_NE.dtype)
    if isinstance(weight_FE, Laid):  # a plan made anew
        weight_FE = weight_FE.to_dense().to(x_NE.dtype)
    x_ME, wide = x_NE.reshape(-1, x_NE.shape[-1]), choice.way == "fp64"
    if weight_FE.is_mkldnn and not choice.onednn:
        weight_FE = weight_FE.to_dense()
    if wide:
        weight_FE = weight_FE.double()
    if len(x_ME) in choice.sizes and not wide:
        out_MF = _tile(x_ME, weight_FE, choice, bias_F)
    else:
        out_MF = x_ME.new_empty(len(x_ME), weight_FE.shape[0])
        for start, stop, size in pieces(len(x_ME), choice.sizes):
            tile_RE = x_ME[start:stop].double() if wide else x_ME[start:stop]
            if stop - start == size and not wide and not choice.onednn:
                torch.mm(tile_RE, weight_FE.t(), out=out_MF[start:stop])
                continue
            if stop - start < size:
                tile_RE = torch.cat((tile_RE, tile_RE.new_zeros(size - (stop - start), x_ME.shape[1])))
            # From float64: rounded once.
            out_MF[start:stop].copy_(_tile(tile_RE, weight_FE, choice, bias_F)[: stop - start])
    # No view where none is needed: FSDP2 warns of a module that returns one.
    return out_MF if x_NE.dim() == 2 else out_MF.view(*x_NE.shape[:-1], out_MF.shape[-1])


def _tile(tile_RE: Tensor, weight_FE: Tensor, choice: Choice, bias_F: Tensor | None) -> Tensor:
    if choice.onednn:
        return cpu.onednn(tile_RE.contiguous(), weight_FE, bias_F)
    return torch.mm(tile_RE, weight_FE.t())


KEYS = 16  # the fewest keys of a block: the widest vector of a CPU, so that a softmax's lanes stay the same
BLOCK = 128  # keys of a whole block
_LONG = 128  # up to here 16 positions at a time save a quarter of all scores; beyond, 32 do with fewer calls


class ExactAttention(Operation):
    """``CausalAttention`` with the exact forward; the backward is its own, which need not be exact.

    Keys and values are rounded to ``kv_fmt`` first, as the cache would, gradients passing straight through.

    Attention. What a row's number may depend on is its query and the keys and values up to its own position. Three
    rules make it so:

    - Keys come in blocks of ``BLOCK`` = 128 from position 0, the last one of a multiple of 16, as the cache's lengths
      are. What lies beyond the query has a score of -inf, so a probability of exactly 0. Adding 0 * v, v finite,
      changes no sum; so it does not matter how many such keys there are, or what they hold.
    - P V is summed block by block, and the blocks' sums are added in order.
    - A call of the library has one of a few shapes: so many heads, so many queries, so many keys
      (``AttentionChoice``). All of them are tried before a run (``exact_probe.py``), whatever the number of sequences
      and their lengths will be.

    The scale is applied to the finished scores: as a factor of the product (``baddbmm``'s alpha) its place would be
    the library's choice, before or after the sum, by the shape.

    Where attention was compiled (``attention.c``), each row has its own sums and none of this is needed; the mask that
    another model's attention has is for these calls alone.

    ``attended``, one function, serves all three uses: what differs is the mask. The rounding points are the fast
    family's: scores and softmax in fp32, the normalised probabilities rounded to the format, the result rounded once.

    Of the two possible schemes, softmax over all keys (two-pass) and a running maximum (online), this is the first:
    the maximum over all keys is exact in any order, so nothing is ever rescaled, and the fast family's roundings stay.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_BHTD: Tensor,
        k_BKTD: Tensor,
        v_BKTD: Tensor,
        fmt: NumberFormat,
        products: Products,
        kv_fmt: NumberFormat,
        choice: AttentionChoice,
    ) -> Tensor:
        own = kv_fmt is fmt  # on whose grid keys and values are already
        k, v = (x if own else round_cached(x, kv_fmt) for x in (k_BKTD, v_BKTD))
        length = q_BHTD.shape[2]
        if choice.way == "in order":
            q, k, v = _fold(q_BHTD, k.shape[1]), k.flatten(0, 1), v.flatten(0, 1)
            out = compiled.attention(q, k.unsqueeze(1), v.unsqueeze(1), fmt)
            ctx.save_for_backward(q, k, v, out)
            ctx.fmt, ctx.shape, ctx.block, ctx.products = fmt, q_BHTD.shape, None, products
            return out.view(q_BHTD.shape)
        q, k, v = _laid_out(q_BHTD, k, v, choice)
        out = _causal(q, k, v, length, length, fmt, choice)
        ctx.save_for_backward(q[:, :, :length], k[:, :length], v[:, :length], out)
        ctx.fmt, ctx.shape, ctx.block, ctx.products = fmt, q_BHTD.shape, _queries(length, choice), products
        return out.view(q_BHTD.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*CausalAttention.backward(ctx, *grads), None, None)


def causal(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, fmt: NumberFormat, choice: AttentionChoice) -> Tensor:
    """Queries of the last T of S positions against the keys up to each of them: T = S but in a chunk of a prefill.

    Shape of ``q``. No gradient.
    """
    if choice.way == "in order":
        return compiled.attention(q_BHTD, k_BKSD, v_BKSD, fmt)
    q, k, v = _laid_out(q_BHTD, k_BKSD, v_BKSD, choice)
    return _causal(q, k, v, q_BHTD.shape[2], k_BKSD.shape[2], fmt, choice).view(q_BHTD.shape)


def _laid_out(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, choice: AttentionChoice) -> tuple[Tensor, Tensor, Tensor]:
    """q as N,G,T,D and k, v as N,S,D, contiguous, with zeros behind: whole steps of positions, and their keys."""
    kv_heads, first = k_BKSD.shape[1], k_BKSD.shape[2] - q_BHTD.shape[2]
    q = _padded(q_BHTD, 2, choice.positions[0])
    k, v = (_padded(x, 2, choice.keys, first + q.shape[2]).flatten(0, 1) for x in (k_BKSD, v_BKSD))
    return q.view(-1, q_BHTD.shape[1] // kv_heads, *q.shape[2:]), k, v


def _queries(length: int, choice: AttentionChoice) -> int:
    """Positions at a time."""
    return choice.positions[0] if length <= _LONG else choice.positions[-1]


def _causal(
    q: Tensor, k: Tensor, v: Tensor, length: int, last: int, fmt: NumberFormat, choice: AttentionChoice
) -> Tensor:
    """The first ``length`` positions of ``q``, of which the last stands at ``last`` - 1. Shape N,G,length,D."""
    group, first = q.shape[1], last - length
    out = q.new_empty(len(q), group, length, q.shape[3])
    queries = _queries(last, choice)
    for start in range(0, length, queries):
        stop, padded = min(start + queries, length), min(start + queries, q.shape[2])
        keys = -(-(first + padded) // choice.keys) * choice.keys
        future = torch.full((padded - start, keys), float("-inf"), device=q.device).triu_(first + start + 1)
        mask_MS = future.repeat(group, 1)
        rows_NMD = attended(q[:, :, start:padded].flatten(1, 2), k[:, :keys], v[:, :keys], mask_MS, fmt, choice)
        out[:, :, start:stop] = rows_NMD.view(len(q), group, padded - start, -1)[:, :, : stop - start]
    return out


def cached(
    q_BHD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    length_B: Tensor,
    fmt: NumberFormat,
    choice: AttentionChoice,
    mask: Callable[[Tensor, int, int], Tensor] = mask_beyond,
) -> Tensor:
    """One query a row against the first ``length_B`` keys of a cache. Shape of ``q``. ``mask``: who makes its mask."""
    if choice.way == "in order":
        return compiled.attention(q_BHD.unsqueeze(2), k_BKSD, v_BKSD, fmt, length_B).squeeze(2)
    (batch, heads, size), (kv_heads, _) = q_BHD.shape, k_BKSD.shape[1:3]
    group = heads // kv_heads
    q = _padded(q_BHD.reshape(batch * kv_heads, group, size), 1, choice.rows)
    k, v = (_padded(x.flatten(0, 1), 1, choice.keys) for x in (k_BKSD, v_BKSD))
    return attended(q, k, v, mask(length_B, kv_heads, k.shape[1]), fmt, choice)[:, :group].reshape(q_BHD.shape)


def attended(
    q_NMD: Tensor,
    k_NSD: Tensor,
    v_NSD: Tensor,
    mask: Tensor,
    fmt: NumberFormat,
    choice: AttentionChoice,
    scale: float | None = None,
    capped: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """round(round(softmax(scale * q k^T)) v). Shape of ``q``. ``scale``: None for 1/sqrt(D).

    ``mask``: 0 where a query sees a key and -inf where not, in a shape that broadcasts to N,M,S, or to B,K,M,S with
    N = B K. ``capped``: of the products, to the scores, scaled; for a model that caps them.
    """
    (heads, rows, size), keys = q_NMD.shape, k_NSD.shape[1]
    blocks = [slice(start, min(start + BLOCK, keys)) for start in range(0, keys, BLOCK)]
    scores_NMS = q_NMD.new_empty(heads, rows, keys)
    shape = (mask.shape[0], heads // mask.shape[0]) if mask.dim() == 4 else (heads,)
    scores, alpha = scores_NMS.view(*shape, rows, keys), size**-0.5 if scale is None else scale
    for block in blocks:
        part = batched(q_NMD, k_NSD[:, block].transpose(1, 2), choice)
        if capped is not None:
            part, alpha = capped(part), 1.0
        # 0 + scale * s is one rounding whether or not it is fused, and -inf stays: mask and scale in one pass.
        torch.add(mask[..., block], part.view(*shape, *part.shape[1:]), alpha=alpha, out=scores[..., block])
    p = rounded_(torch.softmax(scores_NMS, dim=-1), fmt)
    total = batched(p[:, :, blocks[0]], v_NSD[:, blocks[0]], choice)
    for block in blocks[1:]:
        total += batched(p[:, :, block], v_NSD[:, block], choice)
    return rounded_(total, fmt)


def batched(x_NMK: Tensor, y_NKS: Tensor, choice: AttentionChoice) -> Tensor:
    """x @ y for each of N heads, in calls of as many heads as the plan allows; in float64 where it says so."""
    if choice.way == "fp64":
        return torch.bmm(x_NMK.double(), y_NKS.double()).float()
    with cpu.switched(choice.bf16):
        return _batched(x_NMK, y_NKS, choice)


def _batched(x_NMK: Tensor, y_NKS: Tensor, choice: AttentionChoice) -> Tensor:
    if len(x_NMK) in choice.heads:
        return torch.bmm(x_NMK, y_NKS)
    out = x_NMK.new_empty(len(x_NMK), x_NMK.shape[1], y_NKS.shape[2])
    for start, stop, size in pieces(len(x_NMK), choice.heads):
        if stop - start == size:
            torch.bmm(x_NMK[start:stop], y_NKS[start:stop], out=out[start:stop])
        else:
            x, y = _padded(x_NMK[start:stop], 0, size), _padded(y_NKS[start:stop], 0, size)
            out[start:stop] = torch.bmm(x, y)[: stop - start]
    return out


def _padded(x: Tensor, dim: int, multiple: int, least: int = 0) -> Tensor:
    """``x``, contiguous, with zeros behind it along ``dim`` up to a multiple that is at least ``least``."""
    length = x.shape[dim]
    padded = -(-max(length, least) // multiple) * multiple
    if padded == length:
        return x.contiguous()
    shape = list(x.shape)
    shape[dim] = padded
    out = x.new_empty(shape)
    out.narrow(dim, 0, length).copy_(x)
    out.narrow(dim, length, padded - length).zero_()
    return out
