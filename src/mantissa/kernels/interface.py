"""The operations a decoder is made of, behind one small interface, so that a role's precision is an argument.

Legend: B rows, T query positions, S key positions, H query heads, K key/value heads (H a multiple of K), D head size,
E features in, F features out, V vocabulary, N any leading shape.

Two families keep this contract: ``NativeKernels`` (tensors really have the format's dtype) and ``SimulatedKernels``
(tensors are fp32, and every value in them is on the format's grid). Both round at the same places (``EmulatedKernels``
at others, switch by switch):

- a product's operands are in the format, its accumulation is fp32, its result is rounded once (bias included);
- RMSNorm and SwiGLU compute in fp32 and round where Hugging Face's code rounds: the normalised value before the
  weight, silu(gate) before ``up``;
- rotary embedding and softmax are fp32 inside, rounded at the end; the attention's probabilities are rounded, because
  they are an operand of a product;
- logits are an fp32 result of operands in the format, and are not rounded (``logits_format`` asks for otherwise).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mantissa.kernels.compiled import SpansOf
from mantissa.precision import BlockScaled, Fp8Policy, NumberFormat


class Kernels(Protocol):
    """One family of operations in one number format."""

    @property
    def format(self) -> NumberFormat:
        """The format whose grid the values are on."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that tensors have in memory: the format's own (native), or fp32 (simulated)."""

    @property
    def logits_format(self) -> NumberFormat:
        """The format that logits are rounded to; fp32 leaves the product's accumulator as it is."""

    @property
    def fp8(self) -> Fp8Policy | None:
        """Which projections have quantised operands; None: none has."""

    def weight(self, master: Tensor) -> Tensor:
        """The compute copy of a master weight: rounded to the format. Differentiable: its gradient is rounded too."""

    def copied(self, master: Tensor, layer: str = "") -> Tensor | BlockScaled:
        """What a policy that does not train keeps of a master: rounded once, or quantised once. No gradient."""

    def laid(self, copy: Tensor | BlockScaled, layer: str = "") -> Tensor:
        """A matrix or codes that ``copied`` made, in the layout that its product reads fastest (``kernels/cpu.py``)."""

    def embedding(self, tokens_BT: Tensor, weight_VE: Tensor) -> Tensor:
        """Rows of the embedding table, in the format. ``weight_VE`` is the master."""

    def linear(
        self, x_NE: Tensor, weight_FE: Tensor | BlockScaled, bias_F: Tensor | None = None, layer: str = ""
    ) -> Tensor:
        """x @ weight^T + bias, rounded once. Weight and bias are masters, or the copies that ``copied`` made.

        ``layer`` is the projection's name in the model: where the fp8 policy names it, both operands are quantised.
        """

    def logits(self, x_NE: Tensor, weight_VE: Tensor) -> Tensor:
        """x @ weight^T as fp32 (then rounded only where ``logits_format`` says so). ``weight_VE`` is the master."""

    def router(self, x_NE: Tensor, weight_XE: Tensor) -> Tensor:
        """x @ weight^T as fp32, never rounded: by which positions choose experts. ``weight_XE`` is the master."""

    def token_logprob(self, logits_NV: Tensor, tokens_N: Tensor, temperature: float = 1.0) -> Tensor:
        """Log-prob of each token under softmax(logits / temperature), fp32: ``precision.token_logprob``."""

    def rms_norm(self, x_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """weight * round(x / sqrt(mean(x^2) + eps)), rounded."""

    def swiglu(self, gate_NE: Tensor, up_NE: Tensor) -> Tensor:
        """round(silu(gate)) * up, rounded."""

    def sigmoid(self, x_NE: Tensor) -> Tensor:
        """1 / (1 + exp(-x)), rounded."""

    def scale(self, x_NE: Tensor, weight_N: Tensor) -> Tensor:
        """weight * x, one weight (fp32) a row, rounded."""

    def rotate(self, x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
        """Rotary embedding x * cos + rotate_half(x) * sin, in fp32, rounded once. ``cos`` and ``sin`` are fp32."""

    def add(self, x_NE: Tensor, y_NE: Tensor) -> Tensor:
        """x + y, rounded."""

    def add_norm(self, x_NE: Tensor, y_NE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """``add`` of x and y, and ``rms_norm`` of what it gave."""

    def causal_attention(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
        """Attention of every position to itself and those before it; softmax(q k^T / sqrt(D)) v. Shape of ``q``."""

    def packed_attention(self, q: Tensor, k: Tensor, v: Tensor, spans: SpansOf) -> Tensor | None:
        """``causal_attention`` of packed positions (1,H,N,D), each to its own sequence's; None: of whole ones alone."""

    def cached_attention(self, q_BHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, length_B: Tensor) -> Tensor:
        """Attention of one query per row to the first ``length_B`` (at least 1) keys of a cache. Shape of ``q``.

        No gradient. What the cache holds beyond the length has no effect, but must be finite: 0 * inf is NaN.
        """
