"""Scaled dot-product attention of half tensors as a flash kernel computes it: fp32 inside, rounded where it rounds.

Operands are half. Scores q k^T * scale, the mask and the softmax are fp32; the probabilities are rounded, because they
are the operand of the second product; the result is rounded once. Backward: probabilities are recomputed from q and k;
dS is rounded, because it is an operand; each gradient is rounded once.

``CausalAttention`` is the special case of a decoder, on fp32 tensors that hold the grid's values. This one takes what
``torch.nn.functional.scaled_dot_product_attention`` takes: masks, dropout, scale, shared key heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK_SCORES = 2**20  # scores at a time: 4 MiB, about what a cache holds
_CAUSAL_BLOCK = 64  # queries at a time where there is a future to skip


def rounded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """dropout(softmax(q k^T * scale + mask)) v for q (..., T, D), k (..., S, D), v (..., S, E): (..., T, E), half.

    Arguments as in ``torch.nn.functional.scaled_dot_product_attention``; a query that may see no key gives zeros.
    ``enable_gqa``: each key head serves several query heads; its gradient is the rounded sum of their rounded
    gradients, as flash attention makes it. Differentiable once, in q, k, v and a floating-point mask.
    Memory is linear in T, plus one byte per score with dropout.
    """
    if enable_gqa:
        group = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    q, k, v = (x.expand(*lead, *x.shape[-2:]) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _RoundedAttention.apply(q, k, v, attn_mask, float(dropout_p), is_causal, scale)


class _RoundedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float
    ) -> Tensor:
        call = _Call(q, k, v, mask, is_causal, scale)
        out = q.new_empty(call.rows, call.queries, v.shape[-1])
        kept = None
        if dropout_p > 0:
            kept = torch.empty(call.rows, call.queries, call.keys, dtype=torch.bool, device=q.device)
            kept.bernoulli_(1 - dropout_p)
        for start, stop, seen in call.blocks:
            p = call.probabilities(start, stop, seen)
            if kept is not None:
                p.mul_(_dropout_factor(kept[:, start:stop, :seen], dropout_p))
            out[:, start:stop] = p.to(q.dtype).float() @ call.v[:, :seen]  # the copy into a half tensor rounds
        out = out.view(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, mask, out, kept)
        ctx.dropout_p, ctx.is_causal, ctx.scale = dropout_p, is_causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, kept = ctx.saved_tensors
        call = _Call(q, k, v, mask, ctx.is_causal, ctx.scale)
        grad_out, out = (x.reshape(call.rows, call.queries, -1).float() for x in (grad, out))
        delta = (grad_out * out).sum(-1, keepdim=True)
        grad_q, grad_k, grad_v = torch.zeros_like(call.q), torch.zeros_like(call.k), torch.zeros_like(call.v)
        wants_mask = ctx.needs_input_grad[3]
        grad_mask = call.q.new_zeros(call.rows, call.queries, call.keys) if wants_mask else None
        for start, stop, seen in call.blocks:
            p = call.probabilities(start, stop, seen)
            d_out = grad_out[:, start:stop]
            d_p, p_used = d_out @ call.v[:, :seen].transpose(1, 2), p
            if kept is not None:
                factor = _dropout_factor(kept[:, start:stop, :seen], ctx.dropout_p)
                d_p, p_used = d_p.mul_(factor), p * factor
            d_scores = d_p.sub_(delta[:, start:stop]).mul_(p)
            if grad_mask is not None:
                grad_mask[:, start:stop, :seen] = d_scores
            p_rounded, d_rounded = p_used.to(q.dtype).float(), d_scores.to(q.dtype).float()
            grad_v[:, :seen] += p_rounded.transpose(1, 2) @ d_out
            grad_k[:, :seen] += d_rounded.transpose(1, 2) @ call.q[:, start:stop]
            grad_q[:, start:stop] = d_rounded @ call.k[:, :seen]
        if grad_mask is not None:
            grad_mask = grad_mask.view(*q.shape[:-1], call.keys).sum_to_size(mask.shape).to(mask.dtype)
        grads = (grad_q.mul_(ctx.scale).to(q.dtype), grad_k.mul_(ctx.scale).to(k.dtype), grad_v.to(v.dtype))
        return *(g.view(x.shape) for g, x in zip(grads, (q, k, v), strict=True)), grad_mask, None, None, None


class _Call:
    """Operands widened to fp32 with all leading dimensions in one, and the blocks of queries."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> None:
        self.queries, self.keys = q.shape[-2], k.shape[-2]
        self.q, self.k, self.v = (x.float().reshape(-1, *x.shape[-2:]) for x in (q, k, v))
        self.rows = self.q.shape[0]
        self.mask = None if mask is None else mask.expand(*q.shape[:-1], self.keys)
        self.is_causal, self.scale = is_causal, scale
        block = max(16, _BLOCK_SCORES // max(1, self.rows * self.keys))
        if is_causal:
            block = min(block, _CAUSAL_BLOCK)
        starts = range(0, self.queries, block)
        stops = [min(start + block, self.queries) for start in starts]
        seen = [min(stop, self.keys) if is_causal else self.keys for stop in stops]
        self.blocks = list(zip(starts, stops, seen, strict=True))  # first query, last + 1, keys that it may see

    def probabilities(self, start: int, stop: int, seen: int) -> Tensor:
        """softmax(q k^T * scale + mask) of queries start..stop over the first ``seen`` keys, fp32, zeros if all hidden.

        Shape (rows, stop - start, seen).
        """
        q, k_t = self.q[:, start:stop], self.k[:, :seen].transpose(1, 2)
        scores = torch.baddbmm(self._bias(start, stop, seen), q, k_t, alpha=self.scale)
        return torch.softmax(scores, -1) if self.mask is None else torch._safe_softmax(scores, -1)

    def _bias(self, start: int, stop: int, seen: int) -> Tensor:
        """What is added to the scores: 0 or the mask's values, and -inf where a query may not look."""
        if self.mask is not None:
            mask = self.mask[..., start:stop, :seen].reshape(self.rows, stop - start, seen)
            if mask.dtype != torch.bool:
                return mask.float()
            return torch.zeros(mask.shape, device=mask.device).masked_fill_(mask.logical_not(), float("-inf"))
        if self.is_causal:
            hidden = torch.full((stop - start, seen), float("-inf"), device=self.q.device)
            return hidden.triu_(start + 1)
        return self.q.new_zeros(())


def _dropout_factor(kept: Tensor, dropout_p: float) -> Tensor:
    return kept.float().mul_(1 / (1 - dropout_p) if dropout_p < 1 else 0.0)
