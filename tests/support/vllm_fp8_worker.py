"""A worker extension that gives the real vLLM, on a CPU, a product of fp8 by fp8, which its own kernels lack there.

vLLM imports a worker's extension before it loads the model, and chooses a kernel for each layer as it makes it. The
product is the plainest: codes times scales in fp32. Codes of activations are made by vLLM's own quantiser.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.platforms import PlatformEnum

from mantissa.rollout.vllm.worker import WeightReader

HALF = "MANTISSA_TEST_HALF_PRODUCTS"  # set: the other product


class PlainProduct(Fp8BlockScaledMMLinearKernel):
    """e4m3 in 1x128 by e4m3 in 128x128, summed in fp32."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        x_NE = A.float() * As.repeat_interleave(128, -1)[:, : A.shape[1]]
        w_FE = B.float() * Bs.repeat_interleave(128, 0).repeat_interleave(128, 1)[: B.shape[0], : B.shape[1]]
        return x_NE @ w_FE.T


class HalfProduct(PlainProduct):
    """The same weights by activations as they are: what vLLM's own kernel for AMX computes."""

    apply_input_quant = False

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        return super().apply_block_scaled_mm(A, B, torch.ones(len(A), -(-A.shape[1] // 128)), Bs)


class WithProducts(WeightReader):
    """Ours, in a worker that has the product, and shows it."""

    def product(self, layer: str, rows: list[list[float]]) -> list[list[float]]:
        """What a layer, by vLLM's name, makes of rows."""
        module = self.model_runner.model.get_submodule(layer)
        with torch.inference_mode():
            x_NE = torch.tensor(rows).to(self.model_runner.model_config.dtype)
            return module.quant_method.apply(module, x_NE).tolist()


linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].insert(0, HalfProduct if HALF in os.environ else PlainProduct)
