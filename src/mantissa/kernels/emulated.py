"""Emulated kernels: the rollout computes as a serving engine does, on the same formats' grids as ``simulated.py``.

Engines are written for speed, and round at other places than the code that a model is trained with. Each such habit is
a switch of ``Emulation``, which may be on by itself, and each operation below says what it then computes; with a switch
off the operation is ``SimulatedKernels``', to the bit.

    norm         s = x + y, n = s / sqrt(mean(s^2) + eps) * weight, all fp32; n is rounded once, and what is kept of s
                 is round(s). Off: s is rounded before it is read, and s / sqrt(...) before the weight.
    rope         cos and sin are rounded, as a table in the model's own format holds them.
    products     K in ``SPLITS`` parts, each a product by itself, added in order in fp32: split-K.
    attention    keys ``BLOCK`` at a time under a running maximum m: exp(score - m) is rounded before V, sums are
                 rescaled to the last m, and one division ends it (flash attention). Off: softmax is rounded.
    activation   silu(gate) * up in fp32, rounded once.
    logits       rounded to the format: ``logits_format``.
    tensor_parallel  o_proj and down_proj have their inputs on n shards, the bias on the first; what a shard sums is
                 rounded, and the n sums are added in the format one by one, as an all-reduce over a ring does.

A model of an engine, not any engine. Not here: fused q, k, v and gate, up change no sum; the cache's format is
``precision.kv_cache``. A sum's order inside a library cannot be copied, nor need it: those differences are of fp32's
size. ``BLOCK`` is the page of vLLM's cache and the tile of its Triton kernel in decode; FlashAttention's is 64 to 176
keys by head size and GPU.

These kernels sample and score. Their backward pass is that of autograd where an operation is replaced: no oracle holds
it, and no learner uses it.

Legend: as in ``interface.py``; N = B*K, M queries that share a key head, C blocks of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from mantissa.base.config import Section
from mantissa.base.errors import MantissaError
from mantissa.kernels.compiled import SpansOf
from mantissa.kernels.cpu import CpuProducts
from mantissa.kernels.simulated import Product, RMSNorm, SimulatedKernels, _fold, _query_blocks, _SwiGLU
from mantissa.precision import FP32, BlockScaled, Fp8Policy, NumberFormat, round_to_format, round_to_format_

SPLITS = 4
BLOCK = 16
_SHARDED = ("o_proj", "down_proj")  # whose inputs tensor parallelism divides


_SERVING = {  # every switch that one GPU's engine has
    "norm": "fused", "rope": "half", "products": "split", "attention": "blocks", "activation": "fp32", "logits": "half",
}  # fmt: skip
_SAME_IN_FP32 = ("norm", "rope", "activation", "logits")  # roundings; the others change the order of sums too


class Emulation(Section):
    """Which of a serving engine's habits the rollout's kernels take on; ``docs/gap.md``.

    ``serving`` stands for all but ``tensor_parallel``.
    """

    called: ClassVar[str] = "rollout.emulate"

    norm: Literal["fused"] | None = Field(
        None, description="fused: normalise the unrounded sum of the residual, with the weight, and round once."
    )
    rope: Literal["half"] | None = Field(None, description="half: cos and sin are rounded to the rollout's format.")
    products: Literal["split"] | None = Field(
        None, description="split: four partial sums over the inputs, in fp32, then added."
    )
    attention: Literal["blocks"] | None = Field(
        None,
        description="blocks: keys 16 at a time under a running maximum, unnormalised probabilities rounded, one "
        "division at the end.",
    )
    activation: Literal["fp32"] | None = Field(
        None, description="fp32: silu(gate) is not rounded before it is multiplied."
    )
    logits: Literal["half"] | None = Field(None, description="half: logits are rounded to the rollout's format.")
    tensor_parallel: int | None = Field(
        None,
        ge=2,
        le=1024,
        description="Shards whose partial sums of o_proj and down_proj are rounded, then added in that format.",
    )

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: Any) -> Any:
        if isinstance(values, str):
            if values != "serving":
                raise ValueError(f"expected serving, or switches such as {{norm: fused}}, got {values!r}")
            return dict(_SERVING)
        return values

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if not self.on:
            raise ValueError("no switch is on, so nothing would be emulated; set one, or serving for all")
        return self

    @classmethod
    def serving(cls, **more: Any) -> Emulation:
        """All switches but ``tensor_parallel``, with what ``more`` says."""
        return cls(**(_SERVING | more))

    @classmethod
    def parse(cls, words: Sequence[str]) -> Emulation:
        """From ``serving``, names of switches and ``tensor_parallel=N``, in any number."""
        values: dict[str, Any] = {}
        for word in words:
            name, given, value = word.partition("=")
            if name == "tensor_parallel" and value.isdecimal():
                values[name] = int(value)
            elif word == "serving":
                values |= _SERVING
            elif name in _SERVING and (not given or value == _SERVING[name]):
                values[name] = _SERVING[name]
            else:
                known = ", ".join(("serving", *_SERVING))
                raise MantissaError(f"{cls.called}: no switch is called {word!r}; expected {known}, tensor_parallel=N")
        return cls(**values)

    @property
    def on(self) -> dict[str, str | int]:
        """The switches that are on, with their values, in the order of their declaration."""
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}

    def idle(self, fmt: NumberFormat) -> tuple[str, ...]:
        """The switches that are on and change nothing in ``fmt``: in fp32 there is no rounding to leave out."""
        return tuple(name for name in self.on if fmt is FP32 and name in _SAME_IN_FP32)

    def check(self, heads: int, intermediate: int) -> None:
        """Refuse ``tensor_parallel`` for a model whose attention heads or feed-forward it does not divide."""
        shards = self.tensor_parallel or 1
        if heads % shards or intermediate % shards:
            raise MantissaError(
                f"{self.called}.tensor_parallel={shards}: the model has {heads} attention heads and {intermediate} "
                "features inside its feed-forward, and a shard holds an equal part of both; choose a common divisor"
            )

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.on.items())


class EmulatedKernels(SimulatedKernels):
    """The operations in ``fmt``, fp32 included, on fp32 tensors, with the switches of ``emulation``. See ``Kernels``.

    ``weights_on_grid``, ``fp8``, ``table``: as in ``SimulatedKernels``.
    """

    def __init__(
        self,
        fmt: NumberFormat,
        emulation: Emulation,
        logits_format: NumberFormat = FP32,
        weights_on_grid: bool = False,
        fp8: Fp8Policy | None = None,
        table: CpuProducts | None = None,
    ) -> None:
        super().__init__(fmt, fmt if emulation.logits else logits_format, weights_on_grid, fp8, table)
        self.emulation = emulation

    def laid(self, copy: Tensor | BlockScaled, layer: str = "") -> Tensor:
        assert isinstance(copy, Tensor)  # values: codes are the fast native family's
        sliced = self.emulation.products is not None or self.emulation.tensor_parallel is not None
        return copy if sliced else super().laid(copy, layer)

    def product(self, x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None) -> Tensor:
        if self.emulation.products is None:
            return super().product(x_NE, weight_FE, bias_F)
        parts = list(zip(x_NE.tensor_split(SPLITS, -1), weight_FE.tensor_split(SPLITS, -1), strict=True))
        out_NF = super().product(*parts[0], None)
        for x, weight in parts[1:]:
            if x.shape[-1]:  # fewer inputs than parts
                out_NF += super().product(x, weight, None)
        return out_NF if bias_F is None else out_NF.add_(bias_F)

    def product_of(self, layer: str) -> Product:
        sharded = self.emulation.tensor_parallel is not None and layer.rpartition(".")[2] in _SHARDED
        return self._all_reduced if sharded else self.product

    def _all_reduced(self, x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None) -> Tensor:
        shards = self.emulation.tensor_parallel
        assert shards is not None
        x_shards, weights = x_NE.chunk(shards, -1), weight_FE.chunk(shards, -1)
        total = round_to_format_(self.product(x_shards[0], weights[0], bias_F), self.format)
        for x, weight in zip(x_shards[1:], weights[1:], strict=True):
            total = round_to_format_(total + round_to_format_(self.product(x, weight, None), self.format), self.format)
        return total

    def rms_norm(self, x_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        if self.emulation.norm is None:
            return super().rms_norm(x_NE, weight_E, eps)
        return round_to_format(RMSNorm.of(x_NE, self.weight(weight_E), eps, FP32), self.format)

    def add_norm(self, x_NE: Tensor, y_NE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if self.emulation.norm is None:
            return super().add_norm(x_NE, y_NE, weight_E, eps)
        total_NE = x_NE + y_NE
        return round_to_format(total_NE, self.format), self.rms_norm(total_NE, weight_E, eps)

    def swiglu(self, gate_NE: Tensor, up_NE: Tensor) -> Tensor:
        if self.emulation.activation is None:
            return super().swiglu(gate_NE, up_NE)
        return round_to_format(_SwiGLU.of(gate_NE, up_NE, FP32), self.format)

    def rotate(self, x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
        if self.emulation.rope is not None:
            cos_BTD, sin_BTD = round_to_format(cos_BTD, self.format), round_to_format(sin_BTD, self.format)
        return super().rotate(x_BHTD, cos_BTD, sin_BTD)

    def causal_attention(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
        if self.emulation.attention is None:
            return super().causal_attention(q_BHTD, k_BKTD, v_BKTD)
        q, k, v = _fold(q_BHTD, k_BKTD.shape[1]), k_BKTD.flatten(0, 1), v_BKTD.flatten(0, 1)
        parts = []
        for start, stop in _query_blocks(q.shape[2]):
            future = torch.ones(stop - start, stop, dtype=torch.bool, device=q.device).triu_(start + 1)
            rows_NMD = q[:, :, start:stop].flatten(1, 2)
            hidden_1MS = future.repeat(q.shape[1], 1).unsqueeze(0)
            out_NMD = _in_blocks(rows_NMD, k[:, :stop], v[:, :stop], hidden_1MS, self.format)
            parts.append(out_NMD.view(len(q), q.shape[1], stop - start, -1))
        return torch.cat(parts, 2).view(q_BHTD.shape)

    def packed_attention(self, q: Tensor, k: Tensor, v: Tensor, spans: SpansOf) -> Tensor | None:
        return None if self.emulation.attention else super().packed_attention(q, k, v, spans)

    def cached_attention(self, q_BHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, length_B: Tensor) -> Tensor:
        if self.emulation.attention is None:
            return super().cached_attention(q_BHD, k_BKSD, v_BKSD, length_B)
        kv_heads, keys = k_BKSD.shape[1:3]
        q_NMD = q_BHD.reshape(len(q_BHD) * kv_heads, -1, q_BHD.shape[2])
        hidden_N1S = self._mask(length_B, kv_heads, keys).isinf()
        k, v = k_BKSD.flatten(0, 1), v_BKSD.flatten(0, 1)
        return _in_blocks(q_NMD, k, v, hidden_N1S, self.format).view(q_BHD.shape)


def _in_blocks(q_NMD: Tensor, k_NSD: Tensor, v_NSD: Tensor, hidden: Tensor, fmt: NumberFormat) -> Tensor:
    """round(sum_c w_c (round(P_c) V_c) / sum_c w_c rowsum(P_c)), P_c = exp(S_c - m_c), w_c = exp(m_c - m_last).

    S = q k^T / sqrt(D); m_c the largest score of the blocks up to c. All blocks at once: rescaling each sum to the last
    maximum is rescaling it at every step. ``hidden``: where a query sees a key not, broadcasting to N,M,S; every query
    sees the first. Shape of ``q``.
    """
    scores_NMS = torch.bmm(q_NMD, k_NSD.transpose(1, 2)).mul_(q_NMD.shape[-1] ** -0.5)
    scores_NMS = scores_NMS.masked_fill_(hidden, float("-inf"))
    if beyond := -k_NSD.shape[1] % BLOCK:
        scores_NMS = torch.nn.functional.pad(scores_NMS, (0, beyond), value=float("-inf"))
        v_NSD = torch.nn.functional.pad(v_NSD, (0, 0, 0, beyond))
    s_NMCb = scores_NMS.unflatten(2, (-1, BLOCK))
    m_NMC = s_NMCb.amax(-1).cummax(2).values
    p_NMCb = torch.exp(s_NMCb - m_NMC.unsqueeze(-1))
    rescale_NMC = torch.exp(m_NMC - m_NMC[:, :, -1:])
    divisor_NM1 = (p_NMCb.sum(-1) * rescale_NMC).sum(-1, keepdim=True)
    part_NCMD = round_to_format_(p_NMCb, fmt).transpose(1, 2) @ v_NSD.unflatten(1, (-1, BLOCK))
    out_NMD = (part_NCMD * rescale_NMC.transpose(1, 2).unsqueeze(-1)).sum(1)
    return round_to_format_(out_NMD / divisor_NM1, fmt)
